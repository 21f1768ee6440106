//! The scheduler in seeded worlds: random arrivals, forks, cancels, follow-ups, pins, imports, failing steps, rotary regimes,
//! windows and pools that are too small, under a good policy, a random one and one that talks nonsense. After every act all
//! invariants are recounted, and a fake cache, which holds for each slot what was written there, catches any block in a wrong
//! table.
// A failed step of the test itself is a failed test.
#![allow(clippy::unwrap_used)]

mod world;

use loquat::SeqId;
use loquat::sched::*;
use std::time::Duration;
use world::{Rng, World};

#[derive(Clone, Copy, PartialEq, Debug)]
enum Policy {
    Continuous,
    Random,
    Nonsense,
}

/// Reasonable calls in random order.
struct Random(Rng);

impl Scheduler for Random {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        let rng = &mut self.0;
        let ids: Vec<_> = step.running().chain(step.waiting()).map(|s| (s.id(), s.left())).collect();
        for (id, left) in ids {
            let _ = match rng.below(8) {
                0 => Ok(usize::from(step.preempt(id, if rng.percent(50) { Preempt::Recompute } else { Preempt::Swap }))),
                1 => continue,
                2..5 if left == 1 => step.decode(id, rng.below(5)),
                _ => step.prefill(id, rng.within(1, left)),
            };
        }
    }
}

/// Anything at all, also about sequences that are gone.
struct Nonsense(Rng, Vec<SeqId>);

impl Scheduler for Nonsense {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        let rng = &mut self.0;
        for _ in 0..rng.below(30) {
            let id = self.1[rng.below(self.1.len())];
            match rng.below(8) {
                7 => drop(step.preempt(id, Preempt::Swap)),
                0 => drop(step.prefill(id, usize::MAX)),
                1 => drop(step.prefill(id, rng.below(4))),
                2 => drop(step.decode(id, usize::MAX)),
                3 => drop(step.decode(id, 0)),
                4 => drop(step.preempt(id, Preempt::Recompute)),
                5 => step.wake_at(Duration::from_nanos(rng.next())),
                _ => assert!(step.blocks_for(id, rng.below(99)) <= 200),
            }
            assert!(step.view(id).is_none_or(|s| s.id() == id));
        }
    }
}

/// `LOQUAT_WORLDS=20` lives through twenty times as many.
fn worlds(policy: Policy, count: u64, steps: usize) {
    let times = std::env::var("LOQUAT_WORLDS").map_or(1, |n| n.parse().expect("LOQUAT_WORLDS is a number"));
    let (mut preempted, mut ended, mut stats) = (0, 0, [0; 3]);
    let count = count * times;
    for seed in 0..count {
        let run = std::panic::AssertUnwindSafe(|| World::new(seed, policy).live_through(steps));
        match std::panic::catch_unwind(run) {
            Ok(world) => {
                ended += world.ended.len();
                preempted += world.preempted.values().map(|p| p.0 as usize).sum::<usize>();
                let s = world.ledger.stats();
                for (sum, n) in stats.iter_mut().zip([s.hit_tokens, s.evicted_blocks, s.swaps]) {
                    *sum += n;
                }
            }
            Err(panic) => {
                eprintln!("{policy:?} world {seed} failed");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(ended > count as usize && preempted > 0, "{ended} sequences, {preempted} preemptions: nothing was tested");
    let [hits, evicted, swaps] = stats;
    assert!(
        hits > 0 && evicted > 0 && swaps > 0,
        "{hits} tokens hit, {evicted} blocks evicted, {swaps} swaps: nothing was tested"
    );
}

#[test]
fn continuous_batching_keeps_its_promises() {
    worlds(Policy::Continuous, 6000, 40);
}

#[test]
fn a_random_policy_is_slow_but_never_wrong() {
    worlds(Policy::Random, 3000, 40);
}

#[test]
fn nonsense_is_refused() {
    worlds(Policy::Nonsense, 3000, 40);
}
