//! Attention of one layer of a 135M model (9 heads of 64 over 3 kv heads, f16) on each tier: a decode row at several depths,
//! in bytes of the cache read, and a prompt of 512 tokens. Layers take turns, so that the cache comes from where it would in
//! a model; blocks lie shuffled over it. The first result is compared with the formula in f64.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use loquat::BlockId;
use loquat::arch::AttnDims;
use loquat::backend::cpu::{Cpu, CpuOptions};
use loquat::backend::{AttnArgs, Backend, Heads, KvShape};
use loquat::batch::{Batch, BatchItem, BatchLimits, RowsWanted};
use loquat::dtype::KvDType;
use std::time::Duration;

const DIMS: AttnDims = AttnDims { heads: 9, kv_heads: 3, qk_dim: 64, v_dim: 64 };
const Q: Heads = Heads { stride: 576, offset: 0, heads: 9, dim: 64 };
const K: Heads = Heads { stride: 384, offset: 0, heads: 3, dim: 64 };
const V: Heads = Heads { stride: 384, offset: 192, heads: 3, dim: 64 };
const BLOCK: usize = 16;
const LAYERS: usize = 12;

/// Seeded values in -2..2 with 10 bits: f16 holds them exactly.
fn values(n: usize, mut seed: u64) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 54) as f32 / 256.0 - 2.0
    };
    (0..n).map(|_| next()).collect()
}

/// The first values of head 0 of the last token, in f64.
fn truth(q: &[f32], kv: &[f32], depth: usize, scale: f32) -> Vec<f64> {
    let q = &q[(q.len() / 576 - 1) * 576..][..64];
    let scores: Vec<f64> = kv
        .chunks(384)
        .take(depth)
        .map(|row| q.iter().zip(row).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * f64::from(scale))
        .collect();
    let max = scores.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    (0..64)
        .map(|d| scores.iter().zip(kv.chunks(384)).map(|(s, row)| (s - max).exp() / sum * f64::from(row[192 + d])).sum())
        .collect()
}

fn attention(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    group.sample_size(20).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600));
    for (depth, tokens) in [(128, 1), (1024, 1), (4096, 1), (512, 512)] {
        let blocks = depth / BLOCK;
        let shape = KvShape { layers: vec![DIMS; LAYERS], blocks, block_size: BLOCK, dtype: KvDType::F16 };
        let limits = BatchLimits { tokens: depth, seqs: 1, blocks, rows: 1 };
        // Steps of 37 reach every block of a power of two.
        let table: Vec<_> = (0..blocks).map(|i| BlockId((i * 37 % blocks) as u32)).collect();
        let mut batch = Batch::new(BLOCK, limits).expect("valid limits");
        let push = |batch: &mut Batch, start: usize| {
            batch.clear();
            let ids = vec![0; depth - start];
            let item = BatchItem { tokens: &ids, start, total: depth, blocks: &table, rows: RowsWanted::Last };
            batch.push(item).expect("the limits are the item's");
        };
        let (kv_values, q_values) = (values(depth * 384, 1), values(tokens * 576, 2));
        let args = AttnArgs { dims: DIMS, scale: 0.125, window: None, softcap: None };
        for tier in Cpu::tiers().filter(|t| *t != "scalar") {
            for threads in [1, 2] {
                let options = CpuOptions { threads, tier: Some(tier.into()), ..CpuOptions::default() };
                let mut cpu = Cpu::new(&options).expect("a tier of this machine");
                let mut kv = cpu.kv(&shape).expect("memory");
                let mut step = cpu.step(&limits, 64, &shape).expect("memory");
                let mut src = cpu.buf(kv_values.len()).expect("memory");
                let mut q = cpu.buf(q_values.len()).expect("memory");
                let mut out = cpu.buf(q_values.len()).expect("memory");
                cpu.upload(&kv_values, &mut src).expect("the CPU copies");
                cpu.upload(&q_values, &mut q).expect("the CPU copies");
                push(&mut batch, 0);
                cpu.begin(&batch, &mut step).expect("within the limits");
                for layer in 0..LAYERS {
                    cpu.kv_write(&step, &src, K, V, &mut kv, layer).expect("the CPU writes");
                }
                push(&mut batch, depth - tokens);
                cpu.begin(&batch, &mut step).expect("within the limits");
                cpu.attention(&mut step, &args, &q, Q, &kv, LAYERS - 1, &mut out).expect("the CPU attends");
                let mut got = vec![0.0; q_values.len()];
                cpu.download(&out, &mut got).expect("the CPU copies");
                let last = &got[(tokens - 1) * 576..][..64];
                for (got, want) in last.iter().zip(truth(&q_values, &kv_values, depth, args.scale)) {
                    assert!((f64::from(*got) - want).abs() < 1e-5, "{tier} at {depth}: {got} for {want}");
                }

                if tokens == 1 {
                    group.throughput(Throughput::Bytes((depth * 384 * 2) as u64));
                } else {
                    // Multiplications and additions of the triangle.
                    group.throughput(Throughput::Elements((4 * 576 * depth * (depth + 1) / 2) as u64));
                }
                let mut layer = 0;
                group.bench_function(format!("{tier}/{threads}/{tokens}@{depth}"), |b| {
                    b.iter(|| {
                        layer = (layer + 1) % LAYERS;
                        cpu.attention(&mut step, &args, &q, Q, &kv, layer, &mut out)
                    });
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, attention);
criterion_main!(benches);
