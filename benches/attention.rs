//! Attention of one layer on each tier, f16: of a 135M model (9 heads of 64 over 3 kv heads) a decode row at several depths,
//! in bytes of the cache read, and a prompt of 512 tokens; of DeepSeek-V2-Lite (16 heads over one latent of 512 + 64, values
//! in the keys) a decode row. Layers take turns, so that the cache comes from where it would in a model; blocks lie shuffled
//! over it. The first result is compared with the formula in f64.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use loquat::arch::AttnDims;
use loquat::backend::cpu::{Cpu, CpuOptions};
use loquat::backend::{AttnArgs, Backend, Heads, KvShape, MoeShape};
use loquat::batch::{Batch, BatchItem, BatchLimits, RowsWanted};
use loquat::dtype::KvDType;
use loquat::{BlockGroup, BlockId};
use std::time::Duration;

const SMALL: AttnDims = AttnDims { heads: 9, kv_heads: 3, qk_dim: 64, v_dim: 64, v_in_k: false };
const LATENT: AttnDims = AttnDims { heads: 16, kv_heads: 1, qk_dim: 512 + 64, v_dim: 512, v_in_k: true };
const BLOCK: usize = 16;
const LAYERS: usize = 12;

/// Values of a token in the cache.
fn width(d: &AttnDims) -> usize {
    d.kv_heads * (d.qk_dim + if d.v_in_k { 0 } else { d.v_dim })
}

/// Seeded values in -2..2 with 10 bits: f16 holds them exactly.
fn values(n: usize, mut seed: u64) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 54) as f32 / 256.0 - 2.0
    };
    (0..n).map(|_| next()).collect()
}

/// The first values of head 0 of the last token, in f64.
fn truth(d: &AttnDims, q: &[f32], kv: &[f32], scale: f32) -> Vec<f64> {
    let (q, rows) = (&q[q.len() - d.heads * d.qk_dim..][..d.qk_dim], kv.chunks(width(d)));
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
    let small = [(128, 1), (1024, 1), (4096, 1), (512, 512)].map(|(depth, tokens)| (SMALL, depth, tokens));
    let latent = [(128, 1), (1024, 1), (4096, 1)].map(|(depth, tokens)| (LATENT, depth, tokens));
    for (dims, depth, tokens) in small.into_iter().chain(latent) {
        let (kv_width, q_width, blocks) = (width(&dims), dims.heads * dims.qk_dim, depth / BLOCK);
        let q_heads = Heads { stride: q_width, offset: 0, heads: dims.heads, dim: dims.qk_dim };
        let k = Heads { stride: kv_width, offset: 0, heads: dims.kv_heads, dim: dims.qk_dim };
        let v = Heads { offset: if dims.v_in_k { 0 } else { dims.kv_heads * dims.qk_dim }, dim: dims.v_dim, ..k };
        let shape = KvShape::one_group(vec![dims; LAYERS], blocks, BLOCK, KvDType::F16);
        let limits = BatchLimits { tokens: depth, seqs: 1, blocks, rows: 1 };
        // Steps of 37 reach every block of a power of two.
        let table: Vec<_> = (0..blocks).map(|i| BlockId((i * 37 % blocks) as u32)).collect();
        let mut batch = Batch::new(BLOCK, &[BlockGroup { blocks, window: None }], limits).expect("valid limits");
        let push = |batch: &mut Batch, start: usize| {
            batch.clear();
            let ids = vec![0; depth - start];
            let item = BatchItem { tokens: &ids, start, total: depth, tables: &[&table], rows: RowsWanted::Last };
            batch.push(item).expect("the limits are the item's");
        };
        let (kv_values, q_values) = (values(depth * kv_width, 1), values(tokens * q_width, 2));
        // Scores of a few units.
        let args = AttnArgs { dims, scale: 1.0 / (dims.qk_dim as f32).sqrt(), window: None, softcap: None };
        let want = truth(&dims, &q_values, &kv_values, args.scale);
        for tier in Cpu::tiers().filter(|t| *t != "scalar") {
            for threads in [1, 2] {
                let options = CpuOptions { threads, tier: Some(tier.into()), ..CpuOptions::default() };
                let mut cpu = Cpu::new(&options).expect("a tier of this machine");
                let mut kv = cpu.kv(&shape).expect("memory");
                let mut step = cpu.step(&limits, 64, &shape, &MoeShape::default()).expect("memory");
                let mut src = cpu.buf(kv_values.len()).expect("memory");
                let mut q = cpu.buf(q_values.len()).expect("memory");
                let out_width = dims.heads * dims.v_dim;
                let mut out = cpu.buf(tokens * out_width).expect("memory");
                cpu.upload(&kv_values, &mut src).expect("the CPU copies");
                cpu.upload(&q_values, &mut q).expect("the CPU copies");
                push(&mut batch, 0);
                cpu.begin(&batch, &mut step).expect("within the limits");
                for layer in 0..LAYERS {
                    cpu.kv_write(&step, &src, k, v, &mut kv, layer).expect("the CPU writes");
                }
                push(&mut batch, depth - tokens);
                cpu.begin(&batch, &mut step).expect("within the limits");
                cpu.attention(&mut step, &args, &q, q_heads, &kv, LAYERS - 1, None, &mut out).expect("the CPU attends");
                let mut got = vec![0.0; tokens * out_width];
                cpu.download(&out, &mut got).expect("the CPU copies");
                for (got, want) in got[(tokens - 1) * out_width..].iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() < 1e-5, "{tier} at {depth}: {got} for {want}");
                }

                if tokens == 1 {
                    group.throughput(Throughput::Bytes((depth * kv_width * 2) as u64));
                } else {
                    // Multiplications and additions of the triangle.
                    let products = dims.heads * (dims.qk_dim + dims.v_dim);
                    group.throughput(Throughput::Elements((2 * products * depth * (depth + 1) / 2) as u64));
                }
                let name = if dims.v_in_k { "latent/" } else { "" };
                let mut layer = 0;
                group.bench_function(format!("{name}{tier}/{threads}/{tokens}@{depth}"), |b| {
                    b.iter(|| {
                        layer = (layer + 1) % LAYERS;
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
