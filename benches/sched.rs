//! Cost of one scheduling step: the policy's turn and the ledger's bookkeeping, without a model. The plan is checked first.
//!
//! | group | what is in it |
//! | --- | --- |
//! | `step` | decode rows of all that run, each with a text of its own |
//! | `shared` | the same, of texts that start with the same 512 tokens |
//! | `churn` | the same, with an end and a new arrival in each step: taken in, looked up in the cache, admitted |
//! | `admission` | room in the step but no block: those that wait are ranked, and none is admitted |

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use loquat::SeqId;
use loquat::sched::{ContinuousBatching, DynamicBatching, Ledger, LedgerConfig, NewSeq, Scheduler, StaticBatching};
use std::hint::black_box;
use std::time::{Duration, Instant};

const PROMPT: usize = 64;
const SHARED: usize = 512;
/// Tokens after which a sequence ends.
const GROWTH: usize = 1024;
const BLOCK_SIZE: usize = 16;

type Policy = Box<dyn Scheduler>;
/// Makes one for so many sequences.
type Make = fn(usize) -> Policy;

fn continuous(_: usize) -> Policy {
    // No bound on prompts: all are to run before the first has grown far.
    Box::new(ContinuousBatching::default().max_chunk(usize::MAX))
}

fn fixed(size: usize) -> Policy {
    Box::new(StaticBatching::new(size))
}

fn dynamic(size: usize) -> Policy {
    Box::new(DynamicBatching::new(size, Duration::ZERO))
}

/// Sequences of which `running` find a place in a step.
struct World {
    ledger: Ledger,
    policy: Policy,
    shared: usize,
    submitted: u32,
}

impl World {
    /// `running` sequences past their prompt, and `waiting` ones that find every place in the step taken.
    fn new(policy: fn(usize) -> Policy, running: usize, waiting: usize, shared: usize) -> Self {
        let longest = shared + PROMPT + GROWTH;
        let mut cfg = LedgerConfig::new(running * longest.div_ceil(BLOCK_SIZE) + waiting, BLOCK_SIZE, longest);
        (cfg.max_seqs, cfg.step_seqs) = (running + waiting, running);
        cfg.step_tokens = 2 * running.max(1024);
        let ledger = Ledger::new(cfg).expect("valid sizes");
        let mut world = World { ledger, policy: policy(running), shared, submitted: 0 };
        (0..running).for_each(|_| world.submit(GROWTH));
        while world.ledger.counts().running < running || world.ledger.all().any(|s| s.left() > 1) {
            world.step();
        }
        (0..waiting).for_each(|_| world.submit(GROWTH));
        world
    }

    /// The same, that runs all of them and has found the prefix of all that could.
    fn checked(policy: fn(usize) -> Policy, running: usize, waiting: usize, shared: usize) -> Self {
        let mut world = World::new(policy, running, waiting, shared);
        assert_eq!(world.step(), running);
        // The first few start together, before it is there.
        assert!(world.ledger.stats().hit_tokens >= (shared * running.saturating_sub(8)) as u64, "{:?}", world.ledger.stats());
        world
    }

    fn submit(&mut self, max_tokens: usize) {
        self.submitted += 1;
        let own = (0..PROMPT as u32).map(|k| self.submitted.wrapping_mul(0x9E37_79B1) ^ k);
        let tokens = (0..self.shared as u32).chain(own).collect();
        self.ledger.submit(NewSeq { tokens, max_tokens, ..NewSeq::default() }, Duration::ZERO).expect("room");
    }

    /// One step of an engine whose model always says 1. Returns the sequences that ran.
    fn step(&mut self) -> usize {
        let ledger = &mut self.ledger;
        let mut builder = ledger.begin_step(Duration::ZERO).expect("no step is open");
        self.policy.schedule(&mut builder);
        let items = builder.finish().items;
        for k in 0..items {
            let item = ledger.plan_items()[k];
            ledger.commit(item.seq, &[]).expect("planned");
            if item.last {
                ledger.append(item.seq, 1).expect("room to grow");
            }
        }
        ledger.end_step();
        items
    }

    /// The sequence that has run the longest.
    fn oldest(&self) -> SeqId {
        self.ledger.all().map(|s| s.id()).min().expect("one that runs")
    }

    /// Ends a sequence, and takes a new one in.
    fn replace(&mut self, seq: SeqId) {
        self.ledger.finish(seq).expect("it runs");
        self.submit(GROWTH);
    }

    /// Some sequence has no room for another token after this step.
    fn ends(&self) -> bool {
        self.ledger.all().next().is_some_and(|s| s.remaining() < 2)
    }
}

fn steps(c: &mut Criterion) {
    let sizes = [(1, 0), (100, 0), (256, 0), (256, 10_000), (10_000, 0)];
    let policies: [(&str, Make); 3] = [("continuous", continuous), ("static", fixed), ("dynamic", dynamic)];
    for (group, shared) in [("step", 0), ("shared", SHARED)] {
        let mut group = c.benchmark_group(group);
        for (name, policy) in policies {
            for (running, waiting) in sizes {
                // The wait of 10,000 is that of the first group again, and their memory large.
                if shared > 0 && running + waiting > 256 {
                    continue;
                }
                group.throughput(Throughput::Elements(running as u64));
                let mut world = None;
                group.bench_function(BenchmarkId::new(name, format!("{running} running, {waiting} waiting")), |b| {
                    // Of those that are left out on the command line none is built.
                    let world = world.get_or_insert_with(|| World::checked(policy, running, waiting, shared));
                    b.iter_custom(|n| {
                        let mut time = Duration::ZERO;
                        for _ in 0..n {
                            if world.ends() {
                                *world = World::new(policy, running, waiting, shared);
                            }
                            let start = Instant::now();
                            black_box(world.step());
                            time += start.elapsed();
                        }
                        time
                    });
                });
            }
        }
        group.finish();
    }
}

fn churn(c: &mut Criterion) {
    let mut group = c.benchmark_group("churn");
    for (running, shared) in [(100, SHARED), (256, SHARED), (256, 0)] {
        let mut world = None;
        group.bench_function(BenchmarkId::from_parameter(format!("{running} running, {shared} shared")), |b| {
            let world = world.get_or_insert_with(|| {
                let mut world = World::checked(continuous, running, 0, shared);
                let hits = world.ledger.stats().hit_tokens;
                world.replace(world.oldest());
                assert_eq!(world.step(), running);
                assert_eq!(world.ledger.stats().hit_tokens - hits, shared as u64, "the new one finds what the others have");
                world
            });
            // Who is next is found by a search, which is not the ledger's and is not counted.
            b.iter_custom(|n| {
                let mut time = Duration::ZERO;
                for _ in 0..n {
                    let oldest = world.oldest();
                    let start = Instant::now();
                    world.replace(oldest);
                    black_box(world.step());
                    time += start.elapsed();
                }
                time
            });
        });
    }
    group.finish();
}

fn admission(c: &mut Criterion) {
    let mut group = c.benchmark_group("admission");
    for (waiting, prompt) in [(100, 40), (10_000, 40), (100, 4000)] {
        // One that runs leaves less than the others need.
        let mut cfg = LedgerConfig::new(prompt / BLOCK_SIZE + 2, BLOCK_SIZE, 2 * prompt);
        (cfg.max_seqs, cfg.step_tokens) = (waiting + 1, 8192);
        let mut ledger = Ledger::new(cfg).expect("valid sizes");
        let mut policy = ContinuousBatching::default().max_chunk(8192);
        // The others find all but the last two blocks of theirs cached: that takes the longest to look up.
        let new = |end| NewSeq { tokens: [vec![1; prompt - 32], vec![end; 32]].concat(), max_tokens: 8, ..NewSeq::default() };
        ledger.submit(NewSeq { max_tokens: 24, ..new(1) }, Duration::ZERO).expect("room");
        let mut builder = ledger.begin_step(Duration::ZERO).expect("no step is open");
        policy.schedule(&mut builder);
        assert_eq!(builder.finish().items, 1);
        let first = ledger.plan_items()[0];
        ledger.commit(first.seq, &[]).expect("planned");
        ledger.end_step();
        ledger.append(first.seq, 1).expect("room to grow");
        for _ in 0..waiting {
            ledger.submit(new(2), Duration::ZERO).expect("room");
        }
        let places = ledger.config().step_seqs;
        group.bench_function(BenchmarkId::from_parameter(format!("{waiting} waiting, {prompt} tokens each")), |b| {
            b.iter(|| {
                let mut builder = ledger.begin_step(Duration::ZERO).expect("no step is open");
                policy.schedule(&mut builder);
                // Dropped, not run: the next round finds the same.
                assert_eq!(builder.seq_budget(), places - 1);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, steps, churn, admission);
criterion_main!(benches);
