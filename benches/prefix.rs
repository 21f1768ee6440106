//! The prefix cache with a million tokens in it, as a ledger's calls see it. What was found is checked before it is timed.
//!
//! | group | what is timed | for each |
//! | --- | --- | --- |
//! | `match` | `cached_prefix` of a prompt that is cached but for its last tokens | token |
//! | `insert` | commit and end of a sequence, whose blocks nobody has yet | block |
//! | `evict` | admission of a sequence to a full cache, all of whose blocks are taken from others | block |
//!
//! The cached texts are branches of each other: each leaves an older one at a random place, so that a path has siblings all along
//! the way.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use loquat::sched::{Ledger, LedgerConfig, NewSeq};
use loquat::{SeqId, TokenId};
use std::hint::black_box;
use std::time::{Duration, Instant};

const BLOCK_SIZE: usize = 16;
const CACHED: usize = 1_000_000;
const LONGEST: usize = 4_000;
/// What a sequence runs when all else of it is cached.
const REST: usize = 16;

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn tokens(&mut self, n: usize) -> impl Iterator<Item = TokenId> {
        (0..n).map(|_| (self.next() >> 32) as TokenId)
    }
}

struct Cache {
    ledger: Ledger,
    rng: Random,
    /// All that was run.
    texts: Vec<Vec<TokenId>>,
}

impl Cache {
    /// Room for `CACHED` tokens, all of it used.
    fn full() -> Self {
        let mut cfg = LedgerConfig::new(CACHED / BLOCK_SIZE, BLOCK_SIZE, LONGEST + REST + 1);
        cfg.step_tokens = LONGEST + REST;
        let mut cache = Cache { ledger: Ledger::new(cfg).expect("valid sizes"), rng: Random(1), texts: Vec::new() };
        while cache.ledger.free_blocks() >= LONGEST / BLOCK_SIZE + 2 {
            let tokens = cache.branch();
            cache.run(tokens.clone());
            cache.texts.push(tokens);
        }
        while cache.ledger.free_blocks() > 0 {
            let few = cache.ledger.free_blocks().min(8) * BLOCK_SIZE;
            let tokens = cache.rng.tokens(few).collect();
            cache.run(tokens);
        }
        let stats = cache.ledger.stats();
        assert_eq!((stats.cached, stats.nodes), (CACHED / BLOCK_SIZE, CACHED / BLOCK_SIZE));
        cache
    }

    /// A text of 500 or 4,000 tokens that starts like an older one.
    fn branch(&mut self) -> Vec<TokenId> {
        let len = [500, LONGEST][usize::from(self.rng.below(4) == 0)];
        let old = self.rng.below(self.texts.len().max(1));
        let leaves = self.rng.below(len - 100);
        let mut tokens: Vec<TokenId> = self.texts.get(old).map_or(Vec::new(), |t| t[..leaves.min(t.len())].to_vec());
        let rest = len - tokens.len();
        tokens.extend(self.rng.tokens(rest));
        tokens
    }

    fn submit(&mut self, tokens: Vec<TokenId>) -> SeqId {
        self.ledger.submit(NewSeq { tokens, max_tokens: 1, ..NewSeq::default() }, Duration::ZERO).expect("room")
    }

    /// Plans a sequence to its last token; how long that took, and what it found cached.
    fn admit(&mut self, seq: SeqId) -> (Duration, usize) {
        let start = Instant::now();
        let mut step = self.ledger.begin_step(Duration::ZERO).expect("no step is open");
        let granted = step.prefill(seq, usize::MAX);
        step.finish();
        let time = start.elapsed();
        let item = self.ledger.plan_items()[0];
        assert!(item.last && Ok(item.len) == granted, "{item:?}, {granted:?}");
        (time, item.start)
    }

    /// Books what was planned and ends the sequence; how long that took.
    fn end(&mut self, seq: SeqId) -> Duration {
        let start = Instant::now();
        self.ledger.commit(seq, &[]).expect("planned");
        self.ledger.finish(seq).expect("it runs");
        let time = start.elapsed();
        self.ledger.end_step();
        time
    }

    fn run(&mut self, tokens: Vec<TokenId>) {
        let seq = self.submit(tokens);
        self.admit(seq);
        self.end(seq);
    }

    /// Runs a new text of `len` tokens: how long its admission and its end took. The blocks are all taken from others.
    fn replace(&mut self, len: usize) -> (Duration, Duration) {
        let tokens = self.rng.tokens(len).collect();
        let before = self.ledger.stats();
        let seq = self.submit(tokens);
        let (admitted, found) = self.admit(seq);
        let taken = self.ledger.stats().evicted_blocks - before.evicted_blocks;
        // Among so many, one can start with the same token by chance.
        assert!(taken as usize == len.div_ceil(BLOCK_SIZE) && found < BLOCK_SIZE, "{taken} taken, {found} found");
        let ended = self.end(seq);
        assert_eq!(self.ledger.stats().cached, before.cached);
        (admitted, ended)
    }
}

fn prefixes(c: &mut Criterion) {
    let mut cache = Cache::full();

    let mut group = c.benchmark_group("match");
    for len in [500, LONGEST] {
        // Branches of branches: the youngest has the most siblings on its way.
        let cached = cache.texts.iter().rev().find(|t| t.len() == len).expect("both lengths come").clone();
        let rest: Vec<TokenId> = cache.rng.tokens(REST).collect();
        let seq = cache.submit([cached, rest].concat());
        let ledger = &cache.ledger;
        assert_eq!(ledger.cached_prefix(seq), len);
        group.throughput(Throughput::Elements(len as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{len} tokens")), |b| {
            b.iter(|| black_box(ledger.cached_prefix(black_box(seq))));
        });
        cache.ledger.cancel(seq).expect("it waits");
    }
    group.finish();

    for (name, which) in [("insert", 1), ("evict", 0)] {
        let mut group = c.benchmark_group(name);
        for len in [500, LONGEST] {
            group.throughput(Throughput::Elements(len.div_ceil(BLOCK_SIZE) as u64));
            group.bench_function(BenchmarkId::from_parameter(format!("{len} tokens")), |b| {
                b.iter_custom(|n| {
                    (0..n)
                        .map(|_| {
                            let (admitted, ended) = cache.replace(len);
                            [admitted, ended][which]
                        })
                        .sum()
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, prefixes);
criterion_main!(benches);
