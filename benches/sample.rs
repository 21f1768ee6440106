//! Sampling one token from a row of logits, for a small and a large vocabulary.
//!
//! Rows are seeded sums of uniforms, a bell curve of standard deviation 3 like the logits of real models.
#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use loquat::sample::{Sampler, SamplerState, SamplingParams};
use std::hint::black_box;

fn row(vocab: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..vocab).map(|_| ((0..12).map(|_| uniform()).sum::<f32>() - 6.0) * 3.0).collect()
}

fn sample(c: &mut Criterion) {
    let plain = || SamplingParams::default().temperature(0.8);
    let cases = [
        ("greedy", SamplingParams::default()),
        ("temperature", plain()),
        ("top_k 40", plain().top_k(40)),
        ("top_p 0.95", plain().top_p(0.95)),
        ("top_p 0.95, flat", plain().temperature(5.0).top_p(0.95)),
        ("min_p 0.05", plain().min_p(0.05)),
        ("typical_p 0.9", plain().typical_p(0.9)),
        ("penalties, top_k 40", plain().top_k(40).repetition_penalty(1.1).frequency_penalty(0.2)),
        ("greedy, logprobs 5", SamplingParams::default().logprobs(Some(5))),
    ];
    for vocab in [49_152, 151_936] {
        let row = row(vocab);
        let mut sampler = Sampler::new(vocab).expect("memory for it");
        let mut group = c.benchmark_group("sample");
        group.throughput(Throughput::Bytes(vocab as u64 * 4));
        for (name, params) in &cases {
            let mut state = SamplerState::new(params.clone(), vocab, 2_048).expect("the cases are valid");
            state.extend(&(0..2_000).map(|i| i * 17 % 1_000).collect::<Vec<_>>());
            let law = sampler.probabilities(&state, &row).expect("the row is finite");
            let mass: f64 = law.iter().map(|(_, p)| p).sum();
            assert!((mass - 1.0).abs() < 1e-9, "{name}: the law sums to {mass}");
            group.bench_function(BenchmarkId::new(*name, vocab), |b| {
                b.iter(|| sampler.sample(&state, black_box(&row)).expect("the row is finite").token);
            });
        }
        group.finish();
    }
}

criterion_group!(benches, sample);
criterion_main!(benches);
