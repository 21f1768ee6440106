//! Whole steps of an engine, plan to committed token, on a model of random weights with SmolLM2-135M's shape and formats (Q4_1,
//! embeddings Q8_0), F16 cache, with the best tier on one and two threads: a decode row of each sequence at several depths, and a
//! chunk of a prompt. Elements are tokens, of all sequences together.
//!
//! `cargo bench --bench step -- 'decode/1 threads'` picks some. Where a step's time goes: `examples/measure --profile`.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use loquat::weights::{Fill, Synthetic, SyntheticTensor};
use loquat::{Engine, EngineConfig, FormatId, ModelFiles, Request, SideTexts, Status, TokenId};
use std::sync::Arc;
use std::time::{Duration, Instant};

const VOCAB: usize = 49152;
const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const KV: usize = 192;
const LAYERS: usize = 30;

const BLOCK: usize = 16;
/// Sequences, and tokens before those that are decoded.
const DECODE: [(usize, usize); 5] = [(1, 0), (1, 1024), (2, 128), (8, 128), (32, 128)];
/// Tokens of a chunk, and tokens before it.
const PREFILL: [(usize, usize); 3] = [(32, 0), (128, 0), (128, 1024)];
/// Steps of a sequence before it begins anew: its depth stays what the bench says, nearly.
const LIFE: u64 = 32;

fn files() -> ModelFiles {
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[usize], format: FormatId| {
        let fill = if shape.len() == 1 { Fill::Constant(1.0) } else { Fill::Normal(0.04) };
        tensors.push(SyntheticTensor { name, shape: shape.into(), format, fill });
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN], FormatId::Q8_0);
    add("model.norm.weight".into(), &[HIDDEN], FormatId::F32);
    for l in 0..LAYERS {
        let mut part = |name: &str, shape: &[usize]| {
            let format = if shape.len() == 1 { FormatId::F32 } else { FormatId::Q4_1 };
            add(format!("model.layers.{l}.{name}.weight"), shape, format);
        };
        part("input_layernorm", &[HIDDEN]);
        part("self_attn.q_proj", &[HIDDEN, HIDDEN]);
        part("self_attn.k_proj", &[KV, HIDDEN]);
        part("self_attn.v_proj", &[KV, HIDDEN]);
        part("self_attn.o_proj", &[HIDDEN, HIDDEN]);
        part("post_attention_layernorm", &[HIDDEN]);
        part("mlp.gate_proj", &[INTERMEDIATE, HIDDEN]);
        part("mlp.up_proj", &[INTERMEDIATE, HIDDEN]);
        part("mlp.down_proj", &[HIDDEN, INTERMEDIATE]);
    }
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": {VOCAB}, "hidden_size": {HIDDEN}, "num_hidden_layers": {LAYERS},
            "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": {INTERMEDIATE},
            "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": true}}"#
    );
    let texts = SideTexts { config: Some(config), ..SideTexts::default() };
    let weights = Synthetic::new(1, tensors).expect("sizes that fit");
    ModelFiles::from_texts(Arc::new(weights), &texts, false).expect("a model of this shape")
}

/// Room for the largest case, and as much again for what is cached of others.
fn engine(files: &ModelFiles, threads: usize) -> Engine {
    let room = |(batch, depth): &(usize, usize)| batch * (depth + LIFE as usize + 1).next_multiple_of(BLOCK) + batch * BLOCK;
    let cache_tokens = 2 * DECODE.iter().map(room).max().expect("some cases");
    let config =
        EngineConfig { threads, cache_tokens, max_batch: 32, step_tokens: 128, block_size: BLOCK, ..EngineConfig::default() };
    Engine::new(files, config).expect("an engine")
}

/// Seeded tokens.
fn tokens(seed: u64, n: usize) -> Vec<TokenId> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) % VOCAB as u64) as TokenId
    };
    (0..n).map(|_| next()).collect()
}

/// Time in steps until nothing is left to do, and how many there were.
fn drain(engine: &mut Engine) -> (Duration, u64) {
    let (mut time, mut steps) = (Duration::ZERO, 0);
    loop {
        let start = Instant::now();
        let status = engine.step().expect("a step");
        let took = start.elapsed();
        while engine.next_event().is_some() {}
        if status != Status::Stepped {
            return (time, steps);
        }
        (time, steps) = (time + took, steps + 1);
    }
}

fn decode(criterion: &mut Criterion) {
    let files = files();
    let mut group = criterion.benchmark_group("decode");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    for threads in [1, 2] {
        let mut engine = engine(&files, threads);
        for (case, (batch, depth)) in DECODE.into_iter().enumerate() {
            group.throughput(Throughput::Elements(batch as u64));
            // Only where the case is run at all.
            let mut prompts: Vec<Vec<TokenId>> = Vec::new();
            group.bench_function(format!("{threads} threads/{batch} at {depth}"), |b| {
                if prompts.is_empty() {
                    prompts = (0..batch).map(|s| tokens((case * 100 + s) as u64, depth + 1)).collect();
                    for p in prompts.iter().filter(|_| depth > 0) {
                        engine.submit(Request::prefill(&p[..depth])).expect("a prompt that fits");
                        drain(&mut engine);
                    }
                }
                b.iter_custom(|mut left| {
                    let mut time = Duration::ZERO;
                    while left > 0 {
                        let life = left.min(LIFE);
                        for p in &prompts {
                            engine.submit(Request::new(p.as_slice(), life as usize)).expect("a prompt that fits");
                        }
                        let (took, steps) = drain(&mut engine);
                        // What is cached of the prompts is all but their last token, so that no step is a prefill.
                        assert_eq!(steps, life, "steps of {batch} rows at {depth}");
                        time += took;
                        left -= life;
                    }
                    time
                });
            });
        }
    }
    group.finish();
}

fn prefill(criterion: &mut Criterion) {
    let files = files();
    let mut group = criterion.benchmark_group("prefill");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(3));
    for threads in [1, 2] {
        let mut engine = engine(&files, threads);
        let mut seed = 1 << 32;
        for (chunk, depth) in PREFILL {
            group.throughput(Throughput::Elements(chunk as u64));
            let mut before: Vec<TokenId> = Vec::new();
            group.bench_function(format!("{threads} threads/{chunk} at {depth}"), |b| {
                if before.len() != depth {
                    before = tokens(7, depth);
                    engine.submit(Request::prefill(before.as_slice())).expect("a prompt that fits");
                    drain(&mut engine);
                }
                b.iter_custom(|n| {
                    let mut time = Duration::ZERO;
                    for _ in 0..n {
                        seed += 1;
                        engine
                            .submit(Request::prefill([&before[..], &tokens(seed, chunk)].concat()))
                            .expect("a prompt that fits");
                        let (took, steps) = drain(&mut engine);
                        assert_eq!(steps, 1, "a chunk of {chunk} at {depth}");
                        time += took;
                    }
                    time
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, decode, prefill);
criterion_main!(benches);
