//! Attention against f64, and its bits over tiers, threads, batches and chunks. The cache holds NaNs wherever nothing was
//! written, so that any of them that counts shows.

use super::super::kv::CpuKv;
use super::super::pool::Pool;
use super::super::simd::Tier;
use super::*;
use crate::arch::AttnDims;
use crate::batch::{Batch, BatchItem, RowsWanted};
use crate::dtype::KvDType;
use crate::ids::BlockGroup;

/// A small generator: numbers near a normal law.
struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn normal(&mut self) -> f32 {
        (0..4).map(|_| self.bits() as f32 / (1u64 << 31) as f32 - 0.5).sum::<f32>() * 1.7
    }
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    qk_dim: usize,
    v_dim: usize,
    v_in_k: bool,
    block_size: usize,
    dtype: KvDType,
    window: Option<usize>,
    softcap: Option<f32>,
    /// Of head 0; those of the others follow in steps.
    sink: Option<f32>,
}

/// Sequences with all their tokens in the cache.
struct World {
    shape: Shape,
    args: AttnArgs,
    kv_shape: KvShape,
    kv: CpuKv,
    /// Per sequence: the block table and, per token, q, k and v as the cache rounds them.
    seqs: Vec<Seq>,
    limits: BatchLimits,
    sinks: Option<Vec<f32>>,
}

struct Seq {
    table: Vec<BlockId>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

const LAYER: usize = 1;

impl World {
    fn new(shape: Shape, lens: &[usize]) -> World {
        World::tree(shape, &lens.iter().map(|len| (*len, None)).collect::<Vec<_>>())
    }

    /// Sequences of these lengths, of which some begin with so many blocks of an earlier one.
    fn tree(shape: Shape, seqs: &[(usize, Option<(usize, usize)>)]) -> World {
        let lens: Vec<_> = seqs.iter().map(|seq| seq.0).collect();
        let Shape { heads, kv_heads, qk_dim, v_dim, v_in_k, block_size, dtype, .. } = shape;
        let dims = AttnDims { heads, kv_heads, qk_dim, v_dim, v_in_k };
        let other = AttnDims { heads: 2, kv_heads: 1, qk_dim: 8, v_dim: 40, v_in_k: false };
        let shared = |from: &Option<(usize, usize)>| from.map_or(0, |(_, blocks)| blocks);
        let per_seq: Vec<_> = seqs.iter().map(|(len, from)| len.div_ceil(block_size) - shared(from)).collect();
        let blocks = per_seq.iter().sum::<usize>() + 3;
        let kv_shape = KvShape::one_group(vec![other, dims, other], blocks, block_size, dtype);
        let mut kv = CpuKv::new(&kv_shape).unwrap();
        kv.poison();
        let mut rng = Rng(lens.len() as u64 + lens[0] as u64);
        let mut ids: Vec<_> = (0..blocks as u32).map(BlockId).collect();
        for i in (1..blocks).rev() {
            ids.swap(i, rng.bits() as usize % (i + 1));
        }
        let (pool, tier) = (Pool::new(1).unwrap(), Tier::best());
        let (kw, vw) = (kv_heads * qk_dim, kv_heads * v_dim);
        let mut made: Vec<Seq> = Vec::new();
        for (&(len, from), &n) in seqs.iter().zip(&per_seq) {
            let mut table = ids.split_off(ids.len() - n);
            let mut row = |n: usize| (0..n).map(|_| rng.normal()).collect::<Vec<_>>();
            let (q, mut k, mut v) = (row(len * heads * qk_dim), row(len * kw), row(len * vw));
            if let Some((parent, blocks)) = from {
                let (parent, tokens) = (&made[parent], blocks * block_size);
                k[..tokens * kw].copy_from_slice(&parent.k[..tokens * kw]);
                v[..tokens * vw].copy_from_slice(&parent.v[..tokens * vw]);
                table = [&parent.table[..blocks], &table].concat();
            }
            // One value before the heads and one after, as other parts of a fused matrix.
            let stride = kw + vw + 2;
            let src: Vec<_> = (0..len).flat_map(|t| [&[9.0], &k[t * kw..][..kw], &v[t * vw..][..vw], &[9.0]].concat()).collect();
            let slots: Vec<_> = (0..len).map(|p| (table[p / block_size].index() * block_size + p % block_size) as u32).collect();
            let (kh, vh) = (
                Heads { stride, offset: 1, heads: kv_heads, dim: qk_dim },
                Heads { stride, offset: 1 + kw, heads: kv_heads, dim: v_dim },
            );
            kv.write(&pool, tier, LAYER, &slots, &src, kh, vh);
            if v_in_k {
                let heads = k.chunks(qk_dim).flat_map(|k| &k[..v_dim]);
                v = heads.copied().collect();
            }
            let rounded = |v: f32| match dtype {
                KvDType::F32 => v,
                KvDType::F16 => half::f16::from_f32(v).to_f32(),
                KvDType::BF16 => half::bf16::from_f32(v).to_f32(),
            };
            k.iter_mut().chain(&mut v).for_each(|v| *v = rounded(*v));
            made.push(Seq { table, q, k, v });
        }
        let args = AttnArgs { dims, scale: 1.0 / (qk_dim as f32).sqrt(), window: shape.window, softcap: shape.softcap };
        let limits = BatchLimits {
            tokens: lens.iter().sum(),
            seqs: lens.len(),
            blocks: lens.iter().map(|l| l.div_ceil(block_size)).sum(),
            rows: 1,
        };
        let sinks = shape.sink.map(|s| (0..heads).map(|h| s + h as f32 * 0.25).collect());
        World { shape, args, kv_shape, kv, seqs: made, limits, sinks }
    }

    /// Output bits of the given (sequence, first position, end) in one batch.
    fn run(&self, tier: &Tier, threads: usize, items: &[(usize, usize, usize)]) -> Vec<u32> {
        let Shape { heads, qk_dim, v_dim, block_size, .. } = self.shape;
        let group = BlockGroup { blocks: self.kv_shape.blocks[0], window: self.shape.window };
        let mut batch = Batch::new(block_size, &[group], self.limits).unwrap();
        let mut q = Vec::new();
        for &(seq, start, end) in items {
            let tokens = vec![0; end - start];
            let tables = &[&self.seqs[seq].table[..]];
            batch.push(BatchItem { tokens: &tokens, start, total: end, tables, rows: RowsWanted::None }).unwrap();
            for row in self.seqs[seq].q.chunks(heads * qk_dim).take(end).skip(start) {
                q.extend_from_slice(&[7.0; 3]);
                q.extend_from_slice(row);
            }
        }
        let pool = Pool::new(threads).unwrap();
        let mut scratch = AttnScratch::new(&self.limits, &self.kv_shape, threads, tier).unwrap();
        // Whatever an earlier call left behind must not matter.
        scratch.states.fill(f32::NAN);
        scratch.parts.fill(f32::NAN);
        for w in &scratch.workers {
            let mut w = w.lock();
            let Worker { desk: Desk { own, run, scores, panel, .. }, parts, state } = &mut *w;
            panel.fill(f32::NAN);
            for v in [own, run, scores, parts, state] {
                v.fill(f32::NAN);
            }
        }
        let mut out = vec![f32::NAN; batch.tokens().len() * heads * v_dim];
        let heads = Heads { stride: heads * qk_dim + 3, offset: 3, heads, dim: qk_dim };
        let sinks = self.sinks.as_deref();
        let mut neighbours = Neighbours::new(items.len()).unwrap();
        neighbours.fill(batch.block_indptr(0), batch.blocks(0));
        let arrays = AttnBatch {
            q_indptr: batch.q_indptr(),
            kv_lens: batch.kv_lens(),
            block_indptr: batch.block_indptr(0),
            blocks: batch.blocks(0),
            order: neighbours.order(),
            common: neighbours.common(),
        };
        attention(&pool, tier, &mut scratch, arrays, &self.args, sinks, &q, heads, &self.kv, LAYER, &mut out);
        out.iter().map(|v| v.to_bits()).collect()
    }

    /// The plain formula in f64 for one row.
    fn truth(&self, seq: usize, position: usize, head: usize) -> Vec<f64> {
        let Shape { heads, kv_heads, qk_dim, v_dim, window, softcap, .. } = self.shape;
        let s = &self.seqs[seq];
        let kv_head = head / (heads / kv_heads);
        let first = window.map_or(0, |w| (position + 1).saturating_sub(w));
        let q = &s.q[(position * heads + head) * qk_dim..][..qk_dim];
        let scores: Vec<f64> = (first..=position)
            .map(|t| {
                let k = &s.k[(t * kv_heads + kv_head) * qk_dim..][..qk_dim];
                let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let x = dot * f64::from(self.args.scale);
                softcap.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh())
            })
            .collect();
        let sink = self.sinks.as_ref().map(|s| f64::from(s[head]));
        let max = scores.iter().copied().chain(sink).fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
        let mut out = vec![0.0; v_dim];
        for (i, score) in scores.iter().enumerate() {
            let v = &s.v[((first + i) * kv_heads + kv_head) * v_dim..][..v_dim];
            for (o, v) in out.iter_mut().zip(v) {
                *o += (score - max).exp() / sum * f64::from(*v);
            }
        }
        out
    }

    /// A batch against the formula, on every tier and over threads.
    fn check(&self, items: &[(usize, usize, usize)]) -> Vec<u32> {
        let Shape { heads, v_dim, .. } = self.shape;
        let bits = self.run(Tier::named("scalar").unwrap(), 1, items);
        let mut rows = bits.chunks(v_dim);
        for &(seq, start, end) in items {
            for position in start..end {
                for head in 0..heads {
                    let row = rows.next().unwrap();
                    // Every row of a long chunk would be the test's whole time.
                    if end - start > 8 && (position * 31 + head) % 13 != 0 {
                        continue;
                    }
                    for (d, (got, want)) in row.iter().zip(self.truth(seq, position, head)).enumerate() {
                        let got = f64::from(f32::from_bits(*got));
                        // Scores of about 1 carry errors of some 1e-6 for 64 to 576 products.
                        assert!((got - want).abs() < 1e-5, "{:?} {seq} at {position}, {head}, {d}: {got} for {want}", self.shape);
                    }
                }
            }
        }
        for tier in tiers() {
            for threads in [1, 2, 5] {
                assert!(
                    bits == self.run(tier, threads, items),
                    "{} with {threads} threads: {:?} {items:?}",
                    tier.name,
                    self.shape
                );
            }
        }
        bits
    }
}

/// The tiers of this machine, and one with the shapes of AVX-512.
fn tiers() -> impl Iterator<Item = &'static Tier> {
    #[cfg(target_arch = "x86_64")]
    let twin = is_x86_feature_detected!("fma").then_some(&crate::backend::cpu::simd::AVX512_TWIN);
    #[cfg(not(target_arch = "x86_64"))]
    let twin = None;
    Tier::available().chain(twin)
}

/// Query heads, kv heads, widths.
const DIMS: [(usize, usize, usize, usize); 10] = [
    (9, 3, 64, 64),
    (4, 4, 16, 16),
    (8, 2, 24, 24),
    (6, 1, 80, 80),
    (14, 2, 128, 128),
    (3, 3, 64, 64),
    (16, 1, 72, 40),
    (2, 1, 96, 96),
    (5, 1, 33, 17),
    (4, 1, 192, 128),
];

#[test]
fn near_f64_and_the_same_bits_everywhere() {
    let (mut i, mut cases) = (0, 0);
    for len in [1, 15, 16, 17, 255, 256, 257, 600, 1000] {
        for q_len in [1, 3, 64] {
            for window in [None, Some(1), Some(8), Some(100)] {
                i += 1;
                let (heads, kv_heads, qk_dim, v_dim) = DIMS[i * 7 % DIMS.len()];
                let shape = Shape {
                    heads,
                    kv_heads,
                    qk_dim,
                    v_dim,
                    v_in_k: false,
                    block_size: [16, 32, 64, 256][(i * 3 + i / 4) % 4],
                    dtype: [KvDType::F16, KvDType::F32, KvDType::BF16][i % 3],
                    window,
                    softcap: [None, None, Some(2.0)][i % 3],
                    sink: [None, None, None, Some(-1.0)][i / 2 % 4],
                };
                if q_len > len {
                    continue;
                }
                World::new(shape, &[len]).check(&[(0, len - q_len, len)]);
                cases += 1;
            }
        }
    }
    assert!(cases > 80);
}

#[test]
fn every_shape_of_heads() {
    for (i, (heads, kv_heads, qk_dim, v_dim)) in DIMS.into_iter().chain([(64, 1, 576, 512), (12, 1, 256, 256)]).enumerate() {
        let dtype = [KvDType::F16, KvDType::F32, KvDType::BF16][i % 3];
        let shape = Shape { heads, kv_heads, qk_dim, v_dim, block_size: 32, dtype, ..SMOL };
        World::new(shape, &[300]).check(&[(0, 298, 300)]);
    }
}

const SMOL: Shape = Shape {
    heads: 9,
    kv_heads: 3,
    qk_dim: 64,
    v_dim: 64,
    v_in_k: false,
    block_size: 16,
    dtype: KvDType::F16,
    window: None,
    softcap: None,
    sink: None,
};

/// DeepSeek-V2-Lite's.
const LATENT: Shape = Shape { heads: 16, kv_heads: 1, qk_dim: 576, v_dim: 512, v_in_k: true, ..SMOL };

#[test]
fn a_row_does_not_know_its_batch() {
    for shape in
        [SMOL, Shape { window: Some(100), heads: 3, ..SMOL }, Shape { heads: 7, kv_heads: 1, softcap: Some(5.0), ..SMOL }]
    {
        let lens = [1, 700, 33, 256, 520];
        let world = World::new(shape, &lens);
        let items = [(3, 255, 256), (1, 690, 700), (0, 0, 1), (4, 470, 520), (2, 32, 33)];
        let together = world.check(&items);
        let alone: Vec<_> = items.iter().flat_map(|item| world.run(Tier::best(), 2, &[*item])).collect();
        assert!(together == alone, "{shape:?}");
    }
}

#[test]
fn chunks_change_no_bit() {
    for shape in
        [SMOL, Shape { window: Some(100), ..SMOL }, Shape { window: Some(8), heads: 14, kv_heads: 2, block_size: 64, ..SMOL }]
    {
        let world = World::new(shape, &[600]);
        for tier in tiers() {
            let once = world.run(tier, 2, &[(0, 0, 600)]);
            let cuts = [0, 100, 101, 108, 255, 257, 300, 599, 600];
            let chunked: Vec<_> = cuts.windows(2).flat_map(|c| world.run(tier, 2, &[(0, c[0], c[1])])).collect();
            assert!(once == chunked, "{} {shape:?}", tier.name);
            let tail: Vec<_> = (590..600).flat_map(|p| world.run(tier, 1, &[(0, p, p + 1)])).collect();
            assert!(once.ends_with(&tail), "{} {shape:?} one by one", tier.name);
        }
    }
}

#[test]
fn long_contexts_go_in_waves() {
    // More rows of pieces than two threads' waves hold.
    let len = 50_124;
    let world = World::new(Shape { heads: 8, kv_heads: 1, qk_dim: 16, v_dim: 16, block_size: 64, ..SMOL }, &[len]);
    assert!(8 * len.div_ceil(PIECE) > 2 * WAVE);
    world.check(&[(0, len - 1, len)]);
    // Of several sequences, and in tiles that are not the largest.
    let seqs: Vec<_> = (0..5).map(|i| (12_000 + 64 * i, (i > 0).then_some((0, 150)))).collect();
    let world = World::tree(Shape { qk_dim: 16, v_dim: 16, block_size: 64, ..SMOL }, &seqs);
    let items: Vec<_> = (0..5).map(|i| (i, seqs[i].0 - 1 - i % 2, seqs[i].0)).collect();
    assert!(items.iter().map(|i| 3 * (i.2 - i.1) * i.2 / PIECE).sum::<usize>() * 3 > 2 * WAVE);
    assert!(world.check(&items) == alone(&world, &items));
}

#[test]
fn a_nan_query_gives_a_nan_row_and_no_other() {
    let mut world = World::new(SMOL, &[40]);
    world.seqs[0].q[39 * 9 * 64 + 64] = f32::NAN;
    for tier in tiers() {
        let out = world.run(tier, 1, &[(0, 30, 40)]);
        for (row, values) in out.chunks(64).enumerate() {
            assert_eq!(values.iter().any(|v| f32::from_bits(*v).is_nan()), row == 9 * 9 + 1, "{} row {row}", tier.name);
        }
    }
}

#[test]
fn scratch_takes_the_bytes_it_says() {
    for (world, threads) in [SMOL, SMOL, LATENT, LATENT].map(|shape| World::new(shape, &[600, 5])).iter().zip([1, 3, 1, 3]) {
        let said = AttnScratch::bytes(&world.limits, &world.kv_shape, threads, Tier::best());
        let s = AttnScratch::new(&world.limits, &world.kv_shape, threads, Tier::best()).unwrap();
        let mut bytes = s.workers.capacity() * size_of::<Mutex<Worker>>();
        bytes += (s.parts.capacity() + s.states.capacity()) * 4;
        bytes += (s.whole.capacity() + s.split.capacity()) * size_of::<Tile>();
        for w in &s.workers {
            let w = w.lock();
            bytes += w.desk.panel.len() * 4;
            bytes += (w.desk.own.capacity() + w.desk.run.capacity() + w.desk.scores.capacity()) * 4;
            bytes += (w.parts.capacity() + w.state.capacity()) * 4;
        }
        assert_eq!(said, bytes);
    }
}

#[test]
fn sinks_join_the_softmax() {
    let cases = [
        SMOL,
        Shape { window: Some(100), ..SMOL },
        Shape { heads: 14, kv_heads: 2, softcap: Some(3.0), dtype: KvDType::F32, ..SMOL },
        Shape { heads: 64, kv_heads: 8, window: Some(128), block_size: 32, ..SMOL },
        Shape { heads: 4, qk_dim: 32, v_dim: 24, ..LATENT },
    ];
    for (i, shape) in cases.into_iter().enumerate() {
        let sinks = [-0.5, 2.0, 20.0, -5.0, 1e4, -1e4, 3e38, -3e38];
        for sink in [sinks[i], sinks[(i + 3) % 8], sinks[(i + 5) % 8]] {
            let world = World::new(Shape { sink: Some(sink), ..shape }, &[600, 20]);
            let items = [(0, 597, 600), (1, 0, 20)];
            let bits = world.check(&items);
            let chunks = [(0, 597, 598), (0, 598, 600), (1, 0, 7), (1, 7, 20)];
            let chunked: Vec<_> = chunks.iter().flat_map(|item| world.run(Tier::best(), 2, &[*item])).collect();
            assert!(bits == chunked, "{sink} {shape:?}");
            let without = World { sinks: None, ..world };
            // A sink far below adds nothing, one far above leaves nothing.
            match sink {
                s if s <= -1e4 => assert!(bits == without.run(Tier::best(), 1, &items), "{sink} {shape:?}"),
                s if s >= 1e4 => assert!(bits.iter().all(|v| f32::from_bits(*v) == 0.0), "{sink} {shape:?}"),
                _ => assert!(bits != without.run(Tier::best(), 1, &items), "{sink} {shape:?}"),
            }
        }
    }
}

#[test]
fn infinite_sinks_have_their_limits() {
    let mut world = World::new(SMOL, &[40]);
    let bits = world.run(Tier::best(), 1, &[(0, 38, 40)]);
    for tier in tiers() {
        world.sinks = Some(vec![f32::NEG_INFINITY; 9]);
        assert!(bits == world.run(tier, 1, &[(0, 38, 40)]), "{}", tier.name);
        world.sinks = Some(vec![f32::INFINITY; 9]);
        assert!(world.run(tier, 1, &[(0, 38, 40)]).iter().all(|v| f32::from_bits(*v) == 0.0), "{}", tier.name);
    }
}

#[test]
fn values_in_keys_near_f64_and_the_same_bits_everywhere() {
    let small = Shape { qk_dim: 32, v_dim: 24, ..LATENT };
    let mut i = 0;
    for (shape, heads) in [(small, 4), (small, 16), (small, 128), (LATENT, 4), (LATENT, 16), (LATENT, 128)] {
        for dtype in [KvDType::F16, KvDType::F32, KvDType::BF16] {
            for window in [None, Some(100)] {
                i += 1;
                let shape = Shape { heads, dtype, window, block_size: [16, 64, 32][i % 3], ..shape };
                let (len, rows) = if shape.qk_dim * heads > 10_000 { (270, 2) } else { (530, 3) };
                World::new(shape, &[len]).check(&[(0, len - rows, len)]);
            }
        }
    }
    // A value as wide as its key, neither in whole vectors.
    World::new(Shape { qk_dim: 40, v_dim: 40, heads: 5, ..LATENT }, &[33]).check(&[(0, 0, 33)]);
    // Several such heads.
    World::new(Shape { qk_dim: 48, v_dim: 17, heads: 6, kv_heads: 2, ..LATENT }, &[300]).check(&[(0, 297, 300)]);
}

#[test]
fn values_in_keys_weigh_as_stored_ones() {
    for (heads, dtype) in [(16, KvDType::F16), (3, KvDType::F32), (5, KvDType::BF16)] {
        let shape = Shape { qk_dim: 56, v_dim: 40, heads, dtype, ..LATENT };
        let latent = World::new(shape, &[300]);
        let mut stored = World::new(Shape { v_in_k: false, ..shape }, &[300]);
        let (from, to) = (&latent.seqs[0], &mut stored.seqs[0]);
        let src: Vec<_> = from.k.chunks(56).zip(from.v.chunks(40)).flat_map(|(k, v)| [k, v].concat()).collect();
        let slots: Vec<_> = (0..300).map(|p| (to.table[p / 16].index() * 16 + p % 16) as u32).collect();
        let (k, v) = (Heads { stride: 96, offset: 0, heads: 1, dim: 56 }, Heads { stride: 96, offset: 56, heads: 1, dim: 40 });
        stored.kv.write(&Pool::new(1).unwrap(), Tier::best(), LAYER, &slots, &src, k, v);
        to.q.copy_from_slice(&from.q);
        for tier in tiers() {
            assert!(latent.run(tier, 1, &[(0, 290, 300)]) == stored.run(tier, 1, &[(0, 290, 300)]), "{}", tier.name);
        }
    }
}

#[test]
fn values_in_keys_do_not_know_their_batch() {
    for shape in [Shape { window: Some(100), ..LATENT }, Shape { qk_dim: 32, v_dim: 24, heads: 20, sink: Some(0.5), ..LATENT }] {
        let world = World::new(shape, &[300, 1, 40]);
        let items = [(0, 255, 300), (1, 0, 1), (2, 39, 40)];
        let together = world.check(&items);
        let chunks = [(0, 255, 257), (0, 257, 299), (0, 299, 300), (1, 0, 1), (2, 39, 40)];
        let alone: Vec<_> = chunks.iter().flat_map(|item| world.run(Tier::best(), 2, &[*item])).collect();
        assert!(together == alone, "{shape:?}");
    }
}

#[test]
fn blocks_behind_the_window_are_never_looked_up() {
    let latent = Shape { qk_dim: 32, v_dim: 24, ..LATENT };
    for shape in [SMOL, Shape { block_size: 64, sink: Some(1.0), dtype: KvDType::F32, ..SMOL }, latent] {
        for window in [1, 17, 300] {
            let mut world = World::new(Shape { window: Some(window), ..shape }, &[700, 40]);
            let tables: Vec<_> = world.seqs.iter().map(|s| s.table.clone()).collect();
            for start in [699, 690, 510] {
                let items = [(0, start, 700), (1, 30, 40)];
                let want = world.run(Tier::best(), 2, &items);
                for (seq, start, _) in items {
                    let first = (start + 1usize).saturating_sub(window);
                    world.seqs[seq].table[..first / shape.block_size].fill(BlockId::NONE);
                }
                for (tier, threads) in tiers().flat_map(|tier| [(tier, 1), (tier, 3)]) {
                    assert!(want == world.run(tier, threads, &items), "{} {start} {:?}", tier.name, world.shape);
                }
                for (seq, table) in world.seqs.iter_mut().zip(&tables) {
                    seq.table.clone_from(table);
                }
            }
        }
    }
}

/// What each item gives in a batch of its own.
fn alone(world: &World, items: &[(usize, usize, usize)]) -> Vec<u32> {
    items.iter().flat_map(|item| world.run(Tier::best(), 1, &[*item])).collect()
}

#[test]
fn a_shared_prompt_changes_no_bit() {
    let latent = Shape { qk_dim: 48, v_dim: 40, heads: 5, ..LATENT };
    let wide = Shape { heads: 4, kv_heads: 4, block_size: 64, ..SMOL };
    for shape in [SMOL, wide, latent, Shape { heads: 8, kv_heads: 1, softcap: Some(4.0), sink: Some(0.5), ..SMOL }] {
        // A prompt of 600 tokens, as whole blocks: two pieces and part of a third.
        let blocks = 600 / shape.block_size;
        let seqs: Vec<_> = (0..9).map(|i| (601 + 7 * i, (i > 0).then_some((0, blocks)))).collect();
        let world = World::tree(shape, &seqs);
        let decode: Vec<_> = (0..9).map(|i| (i, 600 + 7 * i, 601 + 7 * i)).collect();
        assert!(world.check(&decode) == alone(&world, &decode), "{shape:?}");
        // A draft check, a chunk of a prompt and one that begins within the shared one, beside rows of one token.
        let mixed = [(8, 653, 657), (3, 621, 622), (7, 601, 650), (1, 580, 600), (0, 599, 600), (2, 614, 615), (5, 630, 636)];
        assert!(world.check(&mixed) == alone(&world, &mixed), "{shape:?}");
    }
}

#[test]
fn trees_of_prefixes_change_no_bit() {
    for round in 0..24 {
        let mut rng = Rng(round * 7919 + 1);
        let mut below = |n: usize| rng.bits() as usize % n;
        let (heads, kv_heads, qk_dim, v_dim) = DIMS[below(DIMS.len())];
        let shape = Shape {
            heads,
            kv_heads,
            qk_dim,
            v_dim,
            block_size: [16, 32, 64, 256, 512][below(5)],
            dtype: [KvDType::F16, KvDType::F32, KvDType::BF16][below(3)],
            window: [None, None, Some(1), Some(90), Some(400)][below(5)],
            softcap: [None, None, Some(2.0)][below(3)],
            sink: [None, None, Some(0.5)][below(3)],
            v_in_k: qk_dim > v_dim && below(2) == 0,
        };
        let mut seqs: Vec<(usize, Option<(usize, usize)>)> = Vec::new();
        for i in 0..2 + below(9) {
            let len = 1 + below(800);
            let from = (i > 0 && below(5) > 0).then(|| {
                let parent = below(i);
                let most = len.min(seqs[parent].0) / shape.block_size;
                // All that can be, half of the time.
                (parent, if below(2) == 0 { most } else { below(most + 1) })
            });
            seqs.push((len, from));
        }
        let mut world = World::tree(shape, &seqs);
        let mut items = Vec::new();
        for (seq, (len, _)) in seqs.iter().enumerate() {
            let tokens = [1, 1, 1, 1, 2, 5, 70][below(7)].min(*len);
            // The last tokens, or some before them.
            let end = if below(3) == 0 { tokens + below(len - tokens + 1) } else { *len };
            items.insert(below(seq + 1), (seq, end - tokens, end));
        }
        // Nobody looks a block up that lies behind the window.
        for &(seq, start, _) in &items {
            let first = shape.window.map_or(0, |w| (start + 1).saturating_sub(w)) / shape.block_size;
            world.seqs[seq].table[..first].fill(BlockId::NONE);
        }
        assert!(world.check(&items) == alone(&world, &items), "round {round}: {seqs:?} {items:?}");
    }
}
