//! The stock policies in seeded worlds: arrivals, priorities, deadlines, cancels, forks, follow-ups, failing steps and tiny pools.
//! After every step the ledger recounts itself, and each policy is held to what its documentation says: who may join, in which
//! order, when, and how often anybody is preempted.
#![allow(clippy::unwrap_used)]

mod common;
// Not all of it is used here.
#[allow(dead_code)]
#[path = "common/heap.rs"]
mod heap;

use common::process::alone;
use common::text::Random;
use loquat::SeqId;
use loquat::sched::*;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: heap::Heap = heap::Heap;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Static { size: usize, linger: Duration },
    Dynamic { size: usize, max_wait: Duration },
    Continuous { ageing: Duration, patience: Duration },
}

impl Kind {
    fn policy(self, chunk: usize) -> Box<dyn Scheduler> {
        match self {
            Kind::Static { size, linger } => Box::new(StaticBatching::new(size).linger(linger)),
            Kind::Dynamic { size, max_wait } => Box::new(DynamicBatching::new(size, max_wait)),
            Kind::Continuous { ageing, patience } => {
                Box::new(ContinuousBatching::default().max_chunk(chunk).ageing(ageing).patience(patience))
            }
        }
    }
}

/// A waiting sequence as it stood before the step.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Waiting {
    seq: SeqId,
    arrival: Duration,
    total: usize,
    rank: i128,
}

struct World {
    rng: Random,
    kind: Kind,
    policy: Box<dyn Scheduler>,
    ledger: Ledger,
    now: Duration,
    /// Forks, and regimes in which shared blocks become worthless: what a batch cannot foresee.
    surprises: bool,
    ids: Vec<SeqId>,
    /// Those of whom the batch that runs may consist, and those that it preempted.
    batch: (Vec<Waiting>, HashSet<SeqId>),
    preemptions: HashMap<SeqId, u32>,
    preempted: usize,
    appended: usize,
}

fn ms(n: usize) -> Duration {
    Duration::from_millis(n as u64)
}

impl World {
    fn new(kind: fn(&mut Random) -> Kind, seed: u64) -> Self {
        let mut rng = Random(seed);
        let kind = kind(&mut rng);
        let (blocks, block_size) = (1 + rng.below(16), 1 + rng.below(5));
        let mut cfg = LedgerConfig::new(blocks, block_size, 2 + rng.below(blocks * block_size + 8));
        (cfg.max_seqs, cfg.step_seqs, cfg.step_tokens) = (1 + rng.below(16), 1 + rng.below(9), 1 + rng.below(20));
        let surprises = rng.below(2) == 0;
        if surprises && rng.below(2) == 0 {
            let long = 1 + rng.below(blocks * block_size);
            cfg.regime = Box::new(move |total| u32::from(total > long));
        }
        World {
            policy: kind.policy(1 + rng.below(12)),
            kind,
            ledger: Ledger::new(cfg).unwrap(),
            now: Duration::ZERO,
            surprises,
            ids: Vec::new(),
            batch: Default::default(),
            preemptions: HashMap::new(),
            preempted: 0,
            appended: 0,
            rng,
        }
    }

    fn rank(&self, s: SeqView<'_>) -> i128 {
        let Kind::Continuous { ageing, patience } = self.kind else { return 0 };
        let ns = |t: Duration| t.as_nanos() as i128;
        let due = ns(s.arrival() + patience);
        let due = s.deadline().filter(|d| *d > s.arrival()).map_or(due, |d| due.min(ns(d)));
        due - i128::from(s.priority()) * ns(ageing)
    }

    /// One random call of the host.
    fn act(&mut self) {
        let kind = self.rng.below(12);
        if kind < 6 || self.ids.is_empty() {
            let tokens = (0..1 + self.rng.below(20)).map(|_| self.rng.below(3) as u32).collect();
            let deadline = (self.rng.below(2) == 0).then(|| ms(self.rng.below(200)));
            let (priority, hold) = (self.rng.below(5) as i32 - 2, self.rng.below(3) == 0);
            let mut new = NewSeq { tokens, max_tokens: 1 + self.rng.below(12), priority, ..NewSeq::default() };
            (new.deadline, new.hold) = (deadline, hold);
            self.ids.extend(self.ledger.submit(new, self.now));
            return;
        }
        let id = self.ids[self.rng.below(self.ids.len())];
        let some = self.rng.below(12);
        match kind {
            6..8 => drop(self.ledger.resume(id, &vec![1; some], 1 + some / 2, self.now)),
            8 => drop(self.ledger.truncate(id, some)),
            9 if self.surprises => self.ids.extend(self.ledger.fork(id, self.now)),
            9 => {}
            10 => drop(self.ledger.release(id)),
            _ => drop(self.ledger.cancel(id)),
        }
    }

    /// One step; how many sequences it ran, and when the policy wants to be called again.
    fn step(&mut self, calm: bool) -> (usize, Option<Duration>) {
        let mut step = self.ledger.begin_step(self.now).unwrap();
        let line: Vec<_> = step.waiting().map(|s| (s.id(), s.arrival(), s.total())).collect();
        let running = step.running().count();
        let full = step.seq_budget().min(step.token_budget()).min(step.max_seqs());
        self.policy.schedule(&mut step);
        let info = step.finish();
        self.ledger.check();
        let line: Vec<_> = line
            .into_iter()
            .map(|(seq, arrival, total)| Waiting { seq, arrival, total, rank: self.rank(self.ledger.view(seq).unwrap()) })
            .collect();
        self.check_turn(&line, running, full, info);

        if !calm && self.rng.below(12) == 0 {
            self.ledger.abort_step();
            self.ledger.check();
            return (info.items, info.wake_at);
        }
        for item in self.ledger.plan_items().to_vec() {
            if !calm && self.rng.below(60) == 0 {
                self.ledger.cancel(item.seq).unwrap();
                continue;
            }
            self.ledger.commit(item.seq, &[]).unwrap();
            if !item.last {
                continue;
            }
            if self.ledger.view(item.seq).unwrap().remaining() > 0 {
                self.ledger.append(item.seq, self.rng.below(3) as u32).unwrap();
                self.appended += 1;
            }
            if self.ledger.view(item.seq).unwrap().remaining() == 0 || self.rng.below(30) == 0 {
                self.ledger.finish(item.seq).unwrap();
            }
        }
        self.ledger.end_step();
        self.ledger.check();
        (info.items, info.wake_at)
    }

    fn check_turn(&mut self, line: &[Waiting], running: usize, full: usize, info: StepInfo) {
        self.preempted += info.preempted;
        let items: HashSet<_> = self.ledger.plan_items().iter().map(|p| p.seq).collect();
        let (admitted, left): (Vec<Waiting>, Vec<Waiting>) = line.iter().partition(|w| items.contains(&w.seq));
        let (size, due) = match self.kind {
            Kind::Continuous { .. } => {
                assert!(!items.is_empty() || running + line.len() == 0, "work waits and nothing runs");
                let key = |w: &Waiting| (w.rank, w.seq);
                let (last, next) = (admitted.iter().map(key).max(), left.iter().map(key).min());
                // Whoever was preempted just now is not in line.
                assert!(last.is_none() || next.is_none() || last < next, "{admitted:?} passed {left:?}");
                return;
            }
            Kind::Static { size, linger } => (size, line.iter().map(|w| w.arrival).max().map(|t| t.saturating_add(linger))),
            Kind::Dynamic { size, max_wait } => (size, line.iter().map(|w| w.arrival).min().map(|t| t.saturating_add(max_wait))),
        };
        let size = size.min(full).max(1);
        let may_start = running == 0 && (line.len() >= size || due.is_some_and(|t| t <= self.now));
        let first = &line[..size.min(line.len())];
        let new = admitted.iter().any(|w| !self.batch.0.contains(w));
        assert!(!new || may_start, "{admitted:?} joined {:?}, or started before {due:?}", self.batch);
        if !admitted.is_empty() && may_start && admitted == first[..admitted.len().min(first.len())] {
            // Those chosen for a batch of which nobody was admitted could be the first of the next as well.
            let stale = if new { Vec::new() } else { std::mem::take(&mut self.batch.0) };
            self.batch = (first.iter().copied().chain(stale).collect(), HashSet::new());
        }
        assert!(admitted.iter().all(|w| self.batch.0.contains(w)), "{admitted:?} joined {:?} out of order", self.batch);
        if items.is_empty() && !line.is_empty() {
            assert!(running == 0 && line.len() < size && due.unwrap() > self.now, "{line:?} could have started");
            assert_eq!(info.wake_at, due.filter(|d| *d != Duration::MAX));
        }
        assert!(!items.is_empty() || running == 0, "a batch stands still");
        for s in self.ledger.all() {
            let before = self.preemptions.insert(s.id(), s.preemptions()).unwrap_or(0);
            assert!(before == s.preemptions() || self.batch.1.insert(s.id()), "{} is preempted again in one batch", s.id());
        }
        assert!(admitted.is_empty() || self.batch.1.is_empty(), "{admitted:?} joined a batch that is too large already");
        assert!(self.surprises || self.preempted == 0, "room for whole lives was made sure of");
    }

    fn live_through(mut self, steps: usize) -> Self {
        let blocks = self.ledger.available_blocks();
        for _ in 0..steps {
            for _ in 0..self.rng.below(3) {
                self.act();
                self.ledger.check();
            }
            self.now += ms(self.rng.below(6));
            self.step(false);
        }
        for k in 0.. {
            let Counts { waiting, running, .. } = self.ledger.counts();
            if waiting + running == 0 {
                break;
            }
            assert!(k < 10_000, "it does not end");
            match self.step(true) {
                // A strict batch waits for company that does not come.
                (0, None) => {
                    assert!(matches!(self.kind, Kind::Static { linger: Duration::MAX, .. }));
                    break;
                }
                (_, wake_at) => self.now = self.now.max(wake_at.unwrap_or_default()) + ms(1),
            }
        }
        let left: Vec<_> = self.ledger.all().map(|s| s.id()).collect();
        left.iter().for_each(|id| self.ledger.cancel(*id).unwrap());
        self.ledger.check();
        assert_eq!(self.ledger.available_blocks(), blocks, "a block leaked");
        self
    }
}

/// Preemptions, appended tokens.
fn worlds(kind: fn(&mut Random) -> Kind, count: u64) -> (usize, usize) {
    let mut sum = (0, 0);
    for seed in 0..count {
        let run = std::panic::AssertUnwindSafe(|| World::new(kind, seed).live_through(60));
        match std::panic::catch_unwind(run) {
            Ok(world) => sum = (sum.0 + world.preempted, sum.1 + world.appended),
            Err(panic) => {
                eprintln!("world {seed} failed: {:?}", World::new(kind, seed).kind);
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(sum.1 > 20 * count as usize, "{sum:?}: nothing was tested");
    sum
}

#[test]
fn static_batches_in_random_worlds() {
    let kind = |rng: &mut Random| {
        let linger = if rng.below(4) == 0 { Duration::MAX } else { ms(rng.below(30)) };
        Kind::Static { size: rng.below(7), linger }
    };
    let (preempted, appended) = worlds(kind, 600);
    assert!(preempted > 0 && preempted * 20 < appended, "{preempted} preemptions for {appended} tokens");
}

#[test]
fn dynamic_batches_in_random_worlds() {
    let (preempted, appended) = worlds(|rng| Kind::Dynamic { size: rng.below(7), max_wait: ms(rng.below(30)) }, 600);
    assert!(preempted > 0 && preempted * 20 < appended, "{preempted} preemptions for {appended} tokens");
}

#[test]
fn continuous_batches_in_random_worlds() {
    let (preempted, appended) = worlds(|rng| Kind::Continuous { ageing: ms(rng.below(40)), patience: ms(rng.below(80)) }, 600);
    assert!(preempted > 0 && preempted < appended, "{preempted} preemptions for {appended} tokens");
}

/// A ledger with room for `blocks` blocks of 4, and steps of `tokens`.
fn ledger(blocks: usize, tokens: usize) -> Ledger {
    let mut cfg = LedgerConfig::new(blocks, 4, 64);
    cfg.step_tokens = tokens;
    Ledger::new(cfg).unwrap()
}

fn submit(ledger: &mut Ledger, prompt: usize, max_tokens: usize, at: Duration) -> SeqId {
    // Held, so that no two of a test are alike: a cached prefix would shorten what they run.
    let tokens = vec![10 + ledger.all().count() as u32; prompt];
    ledger.submit(NewSeq { tokens, max_tokens, hold: true, ..NewSeq::default() }, at).unwrap()
}

/// One step that ends who has all its tokens; what it ran, as (sequence, tokens).
fn step(ledger: &mut Ledger, policy: &mut dyn Scheduler, now: Duration) -> (Vec<(SeqId, usize)>, Option<Duration>) {
    let mut builder = ledger.begin_step(now).unwrap();
    policy.schedule(&mut builder);
    let info = builder.finish();
    let ran: Vec<_> = ledger.plan_items().iter().map(|p| (p.seq, p.len)).collect();
    for item in ledger.plan_items().to_vec() {
        ledger.commit(item.seq, &[]).unwrap();
        if item.last {
            ledger.append(item.seq, 2).unwrap();
            if ledger.view(item.seq).unwrap().remaining() == 0 {
                ledger.finish(item.seq).unwrap();
            }
        }
    }
    ledger.end_step();
    ledger.check();
    (ran, info.wake_at)
}

#[test]
fn dynamic_batching_waits_for_company_so_long_and_no_longer() {
    let mut l = ledger(64, 64);
    let mut policy = DynamicBatching::new(3, ms(10));
    let a = submit(&mut l, 5, 3, ms(1));
    let b = submit(&mut l, 5, 1, ms(8));
    assert_eq!(step(&mut l, &mut policy, ms(10)), (vec![], Some(ms(11))));
    assert_eq!(step(&mut l, &mut policy, ms(11)).0, [(a, 5), (b, 5)]);
    let late: Vec<_> = (0..3).map(|_| submit(&mut l, 2, 1, ms(12))).collect();
    for _ in 0..2 {
        assert_eq!(step(&mut l, &mut policy, ms(40)).0, [(a, 1)], "nobody joins");
    }
    // Full: at once.
    assert_eq!(step(&mut l, &mut policy, ms(12)).0, [(late[0], 2), (late[1], 2), (late[2], 2)]);
}

#[test]
fn static_batching_lets_the_tail_go_once_it_is_quiet() {
    let mut l = ledger(64, 64);
    let mut policy = StaticBatching::new(3).linger(ms(10));
    let a = submit(&mut l, 5, 1, ms(1));
    assert_eq!(step(&mut l, &mut policy, ms(2)), (vec![], Some(ms(11))));
    let b = submit(&mut l, 5, 1, ms(9));
    assert_eq!(step(&mut l, &mut policy, ms(18)), (vec![], Some(ms(19))));
    assert_eq!(step(&mut l, &mut policy, ms(19)).0, [(a, 5), (b, 5)]);
    let mut strict = StaticBatching::new(2).linger(Duration::MAX);
    let a = submit(&mut l, 5, 1, ms(20));
    assert_eq!(step(&mut l, &mut strict, ms(1 << 40)), (vec![], None));
    let b = submit(&mut l, 5, 1, ms(1 << 40));
    assert_eq!(step(&mut l, &mut strict, ms(1 << 40)).0, [(a, 5), (b, 5)]);
}

/// Prompts longer than a step: the batch is admitted over several steps, and nobody else meanwhile.
#[test]
fn a_batch_is_admitted_chunk_by_chunk() {
    let mut l = ledger(64, 8);
    let mut policy = StaticBatching::new(2);
    let [a, b, c, d] = [12, 9, 1, 1].map(|prompt| submit(&mut l, prompt, 2, ms(0)));
    let expected =
        [vec![(a, 8)], vec![(a, 4), (b, 4)], vec![(a, 1), (b, 5)], vec![(b, 1)], vec![(c, 1), (d, 1)], vec![(c, 1), (d, 1)]];
    for (k, expected) in expected.into_iter().enumerate() {
        assert_eq!(step(&mut l, &mut policy, ms(k)).0, expected, "step {k}");
    }
}

/// 5 blocks; each life takes 2. The third does not fit, and the fourth, which would, does not pass it.
#[test]
fn a_pool_too_small_for_the_batch_makes_it_smaller() {
    let mut l = ledger(5, 64);
    let mut policy = StaticBatching::new(4);
    let [a, b, c, d] = [4, 4, 4, 1].map(|prompt| submit(&mut l, prompt, 4, ms(0)));
    assert_eq!(step(&mut l, &mut policy, ms(0)).0, [(a, 4), (b, 4)]);
    for _ in 0..3 {
        assert_eq!(step(&mut l, &mut policy, ms(0)).0, [(a, 1), (b, 1)]);
    }
    assert_eq!(step(&mut l, &mut policy, ms(1000)).0, [(c, 4), (d, 1)]);
}

/// Forks grow past the room that was made sure of: the last of the batch gives way, and all end.
#[test]
fn a_batch_that_outgrows_the_pool_preempts_its_last() {
    let mut l = ledger(6, 64);
    let mut policy = DynamicBatching::new(2, ms(0));
    let a = submit(&mut l, 4, 16, ms(0));
    step(&mut l, &mut policy, ms(0));
    let forks: Vec<_> = (0..3).map(|_| l.fork(a, ms(0)).unwrap()).collect();
    let mut preempted = 0;
    for k in 0.. {
        assert!(k < 200);
        if l.counts().waiting + l.counts().running == 0 {
            break;
        }
        let first = l.all().filter(|s| s.state() == SeqState::Running).map(|s| s.id()).min();
        let (ran, _) = step(&mut l, &mut policy, ms(k));
        assert!(first.is_none_or(|f| ran[0].0 == f), "the first of the batch stands still");
        preempted = forks.iter().filter_map(|f| l.view(*f)).map(|s| s.preemptions()).sum();
    }
    assert!((1..=6).contains(&preempted) && l.view(a).unwrap().preemptions() == 0, "{preempted}");
}

/// Whoever is resumed while its batch still runs is not of it, or a conversation could keep others out for ever.
#[test]
fn a_follow_up_waits_for_the_next_batch() {
    let mut l = ledger(64, 64);
    let mut policy = DynamicBatching::new(2, ms(0));
    let a = submit(&mut l, 4, 20, ms(0));
    let b = submit(&mut l, 4, 1, ms(0));
    let c = submit(&mut l, 4, 1, ms(0));
    assert_eq!(step(&mut l, &mut policy, ms(0)).0, [(a, 4), (b, 4)]);
    for k in 0..19 {
        // The clock stands still: it is told by its length.
        let _ = l.resume(b, &[3], 1, ms(0));
        assert_eq!(step(&mut l, &mut policy, ms(0)).0, [(a, 1)], "step {k}");
    }
    assert_eq!(step(&mut l, &mut policy, ms(0)).0[0].0, c);
}

/// One sequence runs at a time; they come in the order in which they are due.
fn order(policy: &mut ContinuousBatching, new: &[(usize, Option<usize>, i32)]) -> Vec<usize> {
    let mut cfg = LedgerConfig::new(1, 4, 4);
    cfg.step_seqs = 1;
    let mut l = Ledger::new(cfg).unwrap();
    let ids: Vec<_> = new
        .iter()
        .map(|&(at, deadline, priority)| {
            let new = NewSeq { tokens: vec![1], max_tokens: 2, priority, deadline: deadline.map(ms), ..NewSeq::default() };
            l.submit(new, ms(at)).unwrap()
        })
        .collect();
    let mut order: Vec<usize> = Vec::new();
    while l.counts().waiting + l.counts().running > 0 {
        let (ran, _) = step(&mut l, policy, ms(1000));
        let seq = ids.iter().position(|id| *id == ran[0].0).unwrap();
        if order.last() != Some(&seq) {
            order.push(seq);
        }
    }
    order
}

#[test]
fn deadlines_order_and_count_for_so_much() {
    let policy = || ContinuousBatching::default().patience(ms(100)).ageing(ms(10));
    // (arrival, deadline, priority): due at 100, 90, 51, 102, 60.
    let new = [(0, None, 0), (1, Some(90), 0), (1, Some(51), 0), (2, Some(5000), 0), (60, Some(70), 1)];
    assert_eq!(order(&mut policy(), &new), [2, 4, 1, 0, 3]);
    // A deadline that had passed on arrival is none.
    assert_eq!(order(&mut policy(), &[(5, None, 0), (6, Some(6), 0), (6, Some(0), 0), (7, Some(8), 0)]), [3, 0, 1, 2]);
    // Without patience they count for nothing.
    assert_eq!(order(&mut policy().patience(ms(0)), &new), [0, 1, 2, 3, 4]);
    // Nothing overflows.
    let mut extreme = ContinuousBatching::default().patience(Duration::MAX).ageing(Duration::MAX);
    assert_eq!(order(&mut extreme, &[(0, None, i32::MIN), (1, Some(2), 0), (1, None, i32::MAX)]), [2, 1, 0]);
}

/// An endless stream of urgent sequences, more than the pool can take: whoever has none of that is passed by those alone that
/// arrive within the bound, and is never preempted for a later one.
#[test]
fn nobody_starves_behind_deadlines() {
    let mut l = ledger(4, 64);
    let (patience, ageing) = (ms(60), ms(20));
    let mut policy = ContinuousBatching::default().patience(patience).ageing(ageing);
    // Each urgent one takes half of the pool for four steps; two arrive in a step.
    let mut urgent = Vec::new();
    let mut mine = None;
    for k in 0..400 {
        let now = ms(k);
        for _ in 0..2 {
            let deadline = Some(now + Duration::from_micros(1));
            let new = NewSeq { tokens: vec![1; 5], max_tokens: 3, priority: 1, deadline, ..NewSeq::default() };
            urgent.push((l.submit(new, now).unwrap(), now));
        }
        if k == 10 {
            mine = Some(submit(&mut l, 4, 12, now));
        }
        let (ran, _) = step(&mut l, &mut policy, now);
        let Some(s) = mine.and_then(|id| l.view(id)) else { continue };
        let bound = s.arrival() + patience + ageing;
        if s.cached() == 0 && s.state() == SeqState::Waiting {
            for (id, arrival) in urgent.iter().filter(|(id, _)| ran.iter().any(|r| r.0 == *id)) {
                assert!(*arrival <= bound, "{id} of {arrival:?} passed one due before all after {bound:?}");
            }
        } else {
            assert!(now > bound, "deadlines and priority gained nothing");
            assert_eq!(s.preemptions(), 0);
            if s.state() == SeqState::Held {
                return;
            }
        }
    }
    panic!("it starved");
}

/// Batches that start, run and end, after the first.
#[test]
fn a_turn_allocates_nothing() {
    alone("a_turn_allocates_nothing", || {
        let policies: [Box<dyn Scheduler>; 3] =
            [Box::new(StaticBatching::new(4)), Box::new(DynamicBatching::new(4, ms(0))), Box::new(ContinuousBatching::default())];
        for mut policy in policies {
            let mut l = ledger(64, 16);
            (0..20).for_each(|k| _ = submit(&mut l, 5 + k % 3, 2 + k % 5, ms(0)));
            let mut steps = |n: usize| -> usize {
                let mut ran = 0;
                for _ in 0..n {
                    let mut step = l.begin_step(ms(0)).unwrap();
                    policy.schedule(&mut step);
                    step.finish();
                    for k in 0..l.plan_items().len() {
                        let item = l.plan_items()[k];
                        ran += 1;
                        l.commit(item.seq, &[]).unwrap();
                        if item.last {
                            l.append(item.seq, 2).unwrap();
                            if l.view(item.seq).unwrap().remaining() == 0 {
                                l.finish(item.seq).unwrap();
                            }
                        }
                    }
                    l.end_step();
                }
                ran
            };
            steps(2);
            let (ran, calls) = heap::calls_of(|| steps(20));
            assert!(ran > 30 && calls == 0, "{calls} allocations for {ran} turns of sequences");
        }
    });
}
