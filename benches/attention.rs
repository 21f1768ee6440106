//! Attention of one layer on each tier, f16, over shapes of heads: decode rows at several depths, batches whose sequences
//! share a prompt or do not, and prompts. Each cell counts the bytes of the cache that must be read once, and the
//! multiplications and additions of the tokens that are seen. Layers take turns, so that the cache comes from where it would
//! in a model; blocks lie shuffled over it. The first result is compared with the formula in f64.
//!
//! ```text
//! cargo bench --bench attention -- avx2/1/        one tier, one thread
//! cargo bench --bench attention -- shared         the batches
//! ```

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use loquat::arch::AttnDims;
use loquat::backend::cpu::{Cpu, CpuOptions};
use loquat::backend::{AttnArgs, Backend, Heads, KvShape, MoeShape};
use loquat::batch::{Batch, BatchItem, BatchLimits, RowsWanted};
use loquat::dtype::KvDType;
use loquat::{BlockGroup, BlockId};
use std::time::Duration;

/// Of a 135M model.
const SMALL: AttnDims = AttnDims { heads: 9, kv_heads: 3, qk_dim: 64, v_dim: 64, v_in_k: false };
/// A head of keys for each of queries.
const MHA: AttnDims = AttnDims { heads: 8, kv_heads: 8, qk_dim: 128, v_dim: 128, v_in_k: false };
/// Four heads of queries share one of keys, as in models of 7B and more.
const GQA: AttnDims = AttnDims { heads: 16, kv_heads: 4, qk_dim: 128, v_dim: 128, v_in_k: false };
/// All share one.
const MQA: AttnDims = AttnDims { heads: 8, kv_heads: 1, qk_dim: 256, v_dim: 256, v_in_k: false };
/// DeepSeek-V2-Lite's latent of 512 + 64, values in the keys.
const LATENT: AttnDims = AttnDims { heads: 16, kv_heads: 1, qk_dim: 512 + 64, v_dim: 512, v_in_k: true };
const BLOCK: usize = 16;

/// What a step does: so many sequences that have `shared` tokens in common and `own` after them, and run the last `tokens`.
#[derive(Clone, Copy)]
struct Cell {
    name: &'static str,
    dims: AttnDims,
    seqs: usize,
    shared: usize,
    own: usize,
    tokens: usize,
}

impl Cell {
    const fn decode(name: &'static str, dims: AttnDims, depth: usize) -> Cell {
        Cell { name, dims, seqs: 1, shared: 0, own: depth, tokens: 1 }
    }

    const fn prompt(name: &'static str, dims: AttnDims, tokens: usize) -> Cell {
        Cell { tokens, ..Cell::decode(name, dims, tokens) }
    }

    fn depth(&self) -> usize {
        self.shared + self.own
    }

    /// Values of a token in the cache.
    fn width(&self) -> usize {
        self.dims.kv_heads * (self.dims.qk_dim + if self.dims.v_in_k { 0 } else { self.dims.v_dim })
    }

    /// Bytes of the cache, each counted once.
    fn bytes(&self) -> usize {
        (self.shared + self.seqs * self.own) * self.width() * 2
    }

    /// Multiplications and additions of what is seen.
    fn operations(&self) -> usize {
        let seen: usize = (self.depth() - self.tokens + 1..=self.depth()).sum();
        2 * self.dims.heads * (self.dims.qk_dim + self.dims.v_dim) * seen * self.seqs
    }

    /// The sequences' block tables. Steps that have no divisor in common with the number of blocks reach all of them.
    fn tables(&self) -> (Vec<Vec<BlockId>>, usize) {
        let (shared, own) = (self.shared / BLOCK, self.own.div_ceil(BLOCK));
        let blocks = shared + self.seqs * own;
        let step =
            (37..).step_by(2).find(|step| (2..=*step).all(|d| step % d != 0 || !blocks.is_multiple_of(d))).expect("a prime");
        let at = |i: usize| BlockId((i * step % blocks) as u32);
        let table = |seq: usize| (0..shared).chain(shared + seq * own..shared + (seq + 1) * own).map(at).collect();
        ((0..self.seqs).map(table).collect(), blocks)
    }
}

const CELLS: [Cell; 20] = [
    Cell::decode("small", SMALL, 128),
    Cell::decode("small", SMALL, 1024),
    Cell::decode("small", SMALL, 4096),
    Cell::decode("mha", MHA, 1024),
    Cell::decode("mha", MHA, 4096),
    Cell::decode("gqa", GQA, 1024),
    Cell::decode("gqa", GQA, 4096),
    Cell::decode("mqa", MQA, 1024),
    Cell::decode("mqa", MQA, 4096),
    Cell::decode("latent", LATENT, 1024),
    Cell::decode("latent", LATENT, 4096),
    Cell { name: "shared", dims: SMALL, seqs: 8, shared: 1024, own: 64, tokens: 1 },
    Cell { name: "shared", dims: SMALL, seqs: 32, shared: 1024, own: 64, tokens: 1 },
    Cell { name: "unshared", dims: SMALL, seqs: 32, shared: 0, own: 1088, tokens: 1 },
    Cell { name: "shared_gqa", dims: GQA, seqs: 32, shared: 1024, own: 64, tokens: 1 },
    Cell { name: "drafts", dims: SMALL, seqs: 4, shared: 512, own: 64, tokens: 5 },
    Cell::prompt("small", SMALL, 128),
    Cell::prompt("small", SMALL, 512),
    Cell::prompt("small", SMALL, 2048),
    Cell::prompt("gqa", GQA, 512),
];

/// Seeded values in -2..2 with 10 bits: f16 holds them exactly.
fn values(n: usize, mut seed: u64) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 54) as f32 / 256.0 - 2.0
    };
    (0..n).map(|_| next()).collect()
}

/// The first values of head 0 of the last token, in f64; `kv` lies slot by slot.
fn truth(cell: &Cell, q: &[f32], kv: &[f32], table: &[BlockId], scale: f32) -> Vec<f64> {
    let (d, width) = (&cell.dims, cell.width());
    let q = &q[q.len() - d.heads * d.qk_dim..][..d.qk_dim];
    let rows = (0..cell.depth()).map(|t| &kv[(table[t / BLOCK].index() * BLOCK + t % BLOCK) * width..][..width]);
    let scores: Vec<f64> = rows
        .clone()
        .map(|row| q.iter().zip(row).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * f64::from(scale))
        .collect();
    let max = scores.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let first = if d.v_in_k { 0 } else { d.kv_heads * d.qk_dim };
    (0..64)
        .map(|v| scores.iter().zip(rows.clone()).map(|(s, row)| (s - max).exp() / sum * f64::from(row[first + v])).sum())
        .collect()
}

fn attention(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    group.sample_size(20).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600));
    for cell in CELLS {
        let (dims, seqs, depth, tokens) = (cell.dims, cell.seqs, cell.depth(), cell.tokens);
        let (kv_width, q_width, (tables, blocks)) = (cell.width(), dims.heads * dims.qk_dim, cell.tables());
        let q_heads = Heads { stride: q_width, offset: 0, heads: dims.heads, dim: dims.qk_dim };
        let k = Heads { stride: kv_width, offset: 0, heads: dims.kv_heads, dim: dims.qk_dim };
        let v = Heads { offset: if dims.v_in_k { 0 } else { dims.kv_heads * dims.qk_dim }, dim: dims.v_dim, ..k };
        // 64 MiB of cache, or a layer.
        let layers = ((64 << 20) / (blocks * BLOCK * kv_width * 2)).clamp(1, 12);
        let shape = KvShape::one_group(vec![dims; layers], blocks, BLOCK, KvDType::F16);
        let limits = BatchLimits { tokens: (blocks * BLOCK).max(seqs * tokens), seqs, blocks: seqs * depth / BLOCK, rows: seqs };
        let mut batch = Batch::new(BLOCK, &[BlockGroup { blocks, window: None }], limits).expect("valid limits");
        let (kv_values, q_values) = (values(blocks * BLOCK * kv_width, 1), values(seqs * tokens * q_width, 2));
        // Scores of a few units.
        let args = AttnArgs { dims, scale: 1.0 / (dims.qk_dim as f32).sqrt(), window: None, softcap: None };
        let want = truth(&cell, &q_values, &kv_values, &tables[seqs - 1], args.scale);
        for tier in Cpu::tiers().filter(|t| *t != "scalar") {
            for threads in [1, 2] {
                let options = CpuOptions { threads, tier: Some(tier.into()), ..CpuOptions::default() };
                let mut cpu = Cpu::new(&options).expect("a tier of this machine");
                let mut kv = cpu.kv(&shape).expect("memory");
                let mut step = cpu.step(&limits, 64, &shape, &MoeShape::default()).expect("memory");
                let mut src = cpu.buf(kv_values.len()).expect("memory");
                let mut q = cpu.buf(q_values.len()).expect("memory");
                let out_width = dims.heads * dims.v_dim;
                let mut out = cpu.buf(seqs * tokens * out_width).expect("memory");
                cpu.upload(&kv_values, &mut src).expect("the CPU copies");
                cpu.upload(&q_values, &mut q).expect("the CPU copies");
                let ids = vec![0; blocks * BLOCK];
                // The whole cache as one sequence, so that values lie slot by slot.
                let all: Vec<_> = (0..blocks as u32).map(BlockId).collect();
                batch.clear();
                let rows = RowsWanted::Last;
                let item = BatchItem { tokens: &ids, start: 0, total: ids.len(), tables: &[&all], rows };
                batch.push(item).expect("the limits are the item's");
                cpu.begin(&batch, &mut step).expect("within the limits");
                for layer in 0..layers {
                    cpu.kv_write(&step, &src, k, v, &mut kv, layer).expect("the CPU writes");
                }
                batch.clear();
                for table in &tables {
                    let (tokens, start) = (&ids[..tokens], depth - tokens);
                    let item = BatchItem { tokens, start, total: depth, tables: &[table], rows };
                    batch.push(item).expect("the limits are the items'");
                }
                cpu.begin(&batch, &mut step).expect("within the limits");
                cpu.attention(&mut step, &args, &q, q_heads, &kv, layers - 1, None, &mut out).expect("the CPU attends");
                let mut got = vec![0.0; seqs * tokens * out_width];
                cpu.download(&out, &mut got).expect("the CPU copies");
                for (got, want) in got[(seqs * tokens - 1) * out_width..].iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() < 1e-5, "{tier} {} at {depth}: {got} for {want}", cell.name);
                }

                let (bytes, elements) = (cell.bytes() as u64, cell.operations() as u64);
                group.throughput(Throughput::ElementsAndBytes { elements, bytes });
                let mut layer = 0;
                let name = format!("{}/{tier}/{threads}/{seqs}x{tokens}@{depth}", cell.name);
                group.bench_function(name, |b| {
                    b.iter(|| {
                        layer = (layer + 1) % layers;
                        cpu.attention(&mut step, &args, &q, q_heads, &kv, layer, None, &mut out)
                    });
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, attention);
criterion_main!(benches);
