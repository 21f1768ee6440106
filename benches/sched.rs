//! Cost of one scheduling step: the policy's turn and the ledger's bookkeeping, without a model. The plan is checked first.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use loquat::sched::{ContinuousBatching, Ledger, LedgerConfig, NewSeq, Scheduler};
use std::hint::black_box;
use std::time::Duration;

const PROMPT: usize = 64;
/// Enough that no sequence ends while it is measured: growth wraps by starting anew.
const GROWTH: usize = 4096;

/// `running` sequences past their prompt, and `waiting` ones that find every place in the step taken.
fn world(running: usize, waiting: usize) -> (Ledger, ContinuousBatching) {
    let block_size = 16;
    let mut cfg = LedgerConfig::new(running * (PROMPT + GROWTH).div_ceil(block_size) + waiting, block_size, PROMPT + GROWTH);
    cfg.max_seqs = running + waiting;
    cfg.step_seqs = running;
    cfg.step_tokens = 2 * running.max(1024);
    let mut ledger = Ledger::new(cfg).expect("valid sizes");
    let mut policy = ContinuousBatching::default();
    let new = || NewSeq { tokens: vec![1; PROMPT], max_tokens: GROWTH, ..NewSeq::default() };
    for _ in 0..running {
        ledger.submit(new(), Duration::ZERO).expect("room");
    }
    while ledger.counts().running < running || ledger.all().any(|s| s.left() > 1) {
        step(&mut ledger, &mut policy);
    }
    for _ in 0..waiting {
        ledger.submit(new(), Duration::ZERO).expect("room");
    }
    (ledger, policy)
}

/// One step of an engine whose model always says 1. Returns the sequences that ran.
fn step(ledger: &mut Ledger, policy: &mut ContinuousBatching) -> usize {
    let mut builder = ledger.begin_step(Duration::ZERO).expect("no step is open");
    policy.schedule(&mut builder);
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

fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("step");
    for (running, waiting) in [(1, 0), (100, 0), (256, 0), (256, 10_000), (10_000, 0)] {
        let id = BenchmarkId::from_parameter(format!("{running} running, {waiting} waiting"));
        let (mut ledger, mut policy) = world(running, waiting);
        assert_eq!(step(&mut ledger, &mut policy), running);
        group.bench_function(id, |b| {
            b.iter(|| {
                if ledger.all().next().is_some_and(|s| s.remaining() < 2) {
                    (ledger, policy) = world(running, waiting);
                }
                black_box(step(&mut ledger, &mut policy))
            });
        });
    }
    group.finish();

    // Here there is room in the step but no block, so that the waiting are ranked in every step and none is admitted.
    let mut group = c.benchmark_group("admission");
    for waiting in [100, 10_000] {
        let mut cfg = LedgerConfig::new(8, 16, 128);
        cfg.max_seqs = waiting + 1;
        let mut ledger = Ledger::new(cfg).expect("valid sizes");
        let mut policy = ContinuousBatching::default();
        let new = |n| NewSeq { tokens: vec![1; n], max_tokens: 8, ..NewSeq::default() };
        ledger.submit(new(100), Duration::ZERO).expect("room");
        step(&mut ledger, &mut policy);
        for _ in 0..waiting {
            ledger.submit(new(40), Duration::ZERO).expect("room");
        }
        group.bench_function(BenchmarkId::from_parameter(format!("{waiting} waiting")), |b| {
            b.iter(|| {
                let mut builder = ledger.begin_step(Duration::ZERO).expect("no step is open");
                policy.schedule(&mut builder);
                // Dropped, not run: the next round finds the same.
                assert_eq!(builder.running().count(), 0);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
