//! What an engine allocates: as much as it announced, nothing while it steps, and all of it given back. Each test runs in a
//! process of its own, so that every allocation is the library's, on whichever thread.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/heap.rs"]
mod heap;
#[path = "common/scratch.rs"]
mod scratch;

use common::engines::open;
use common::golden::fixtures;
use common::lane::{Lane, Rows};
use common::made::Sizes;
use common::process::{alone, threads};
use heap::{calls_of, live_bytes, peak_of};
use loquat::engine::{Engine, EngineConfig, EventKind, FinishReason, Request, Status};
use loquat::model::{ModelFiles, OpenOptions, PackOptions, pack};
use loquat::weights::{LoadMode, no_progress};
use loquat::{Compute, ConfigError, Error, FormatId, GenerateOptions, KvDType, Pooling, SamplingParams, Session, TokenId};
use scratch::Scratch;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: heap::Heap = heap::Heap;

const MODELS: [&str; 4] = ["arch/llama_mha_f32", "arch/llama_gqa_tied_llama3", "gguf/llama_q4_1.gguf", "gguf/llama_mixed.gguf"];
/// A model whose parts are large beside the bookkeeping.
const LARGE: Sizes = Sizes { vocab: 4096, hidden: 512, layers: 4, heads: 8, intermediate: 1024, context: 2048 };

/// Enough for each sequence to grow into two blocks more.
const STEPS: usize = 40;

/// Allocations of `steps` steps with all their events, after some to warm up; tokens that came meanwhile.
fn while_stepping(engine: &mut Engine, sampling: &SamplingParams, seqs: usize, steps: usize) -> (usize, usize) {
    for i in 0..seqs {
        let prompt: Vec<TokenId> = (0..3 + 5 * i as u32).map(|t| (t * 7 + i as u32) % 200).collect();
        engine.submit(Request::new(prompt, 200).sampling(sampling.clone())).unwrap();
    }
    let run = |engine: &mut Engine, steps: usize| {
        let mut tokens = 0;
        for _ in 0..steps {
            assert_eq!(engine.step().unwrap(), Status::Stepped);
            while let Some(event) = engine.next_event() {
                assert!(matches!(event.kind, EventKind::Token { .. }));
                tokens += 1;
            }
        }
        tokens
    };
    run(engine, 5);
    calls_of(|| run(engine, steps))
}

/// Over block boundaries, whatever the sampler has to remember. Events carry what was asked for: the list of the likeliest tokens
/// is one allocation a token where [`SamplingParams::logprobs`] asks for it, and none otherwise.
#[test]
fn a_step_allocates_nothing() {
    alone("a_step_allocates_nothing", || {
        let p = SamplingParams::default;
        let all = p().temperature(0.8).top_k(40).top_p(0.9).min_p(0.01).typical_p(0.95).seed(3);
        let all = all.repetition_penalty(1.1).frequency_penalty(0.1).presence_penalty(0.1).penalty_window(48);
        let all = all.no_repeat_ngram(4).logit_bias(vec![(3, 1.0)]).banned(vec![7]);
        let ways = [
            ("greedy", p(), 0),
            ("one logprob", p().logprobs(Some(0)), 0),
            ("sampled", p().temperature(1.0).top_p(0.9).epsilon_cutoff(1e-4).eta_cutoff(1e-4), 0),
            ("everything", all, 0),
            ("five logprobs", p().logprobs(Some(5)), 1),
        ];
        for model in MODELS {
            let files = open(&fixtures().join(model));
            for compute in [Compute::Exact, Compute::Fast] {
                for threads in [1, 2] {
                    for seqs in [1, 8] {
                        // The sampler knows no threads.
                        for (name, sampling, each) in
                            ways.iter().filter(|w| threads == 1 || ["greedy", "everything"].contains(&w.0))
                        {
                            let config = EngineConfig { compute, threads, max_batch: 8, ..EngineConfig::default() };
                            let mut engine = Engine::new(&files, config).unwrap();
                            let (tokens, calls) = while_stepping(&mut engine, sampling, seqs, STEPS);
                            let what = format!("{model} {compute:?}, {threads} threads, {seqs} sequences, {name}");
                            assert_eq!(tokens, STEPS * seqs, "{what}");
                            assert_eq!(calls, each * tokens, "{what}: allocations in {STEPS} steps");
                        }
                    }
                }
            }
        }
        // Pauses and an observer change nothing.
        let mut engine = Engine::new(&open(&fixtures().join(MODELS[0])), EngineConfig::default()).unwrap();
        engine.observe(|row| assert!(row.logits[0].is_finite()));
        engine.submit(Request::new([1, 2, 3], 200)).unwrap();
        engine.step().unwrap();
        let (_, calls) = calls_of(|| (0..200).for_each(|_| _ = engine.step_within(Duration::ZERO).unwrap()));
        assert_eq!(calls, 0, "paused and observed");
        // Nor does an embedding, its last step and its event included.
        let config = EngineConfig { hidden: true, step_tokens: 16, ..EngineConfig::default() };
        let mut engine = Engine::new(&open(&fixtures().join(MODELS[0])), config).unwrap();
        for pooling in [Pooling::Mean, Pooling::Last, Pooling::First] {
            engine.submit(Request::embed(vec![3; 40], pooling)).unwrap();
        }
        engine.step().unwrap();
        let (steps, calls) =
            calls_of(|| std::iter::from_fn(|| (engine.step().unwrap() == Status::Stepped).then_some(())).count());
        assert!(steps > 5 && calls == 0, "{calls} allocations in {steps} steps");
        assert_eq!(std::iter::from_fn(|| engine.next_event()).count(), 6);
    });
}

fn use_it(files: &ModelFiles, config: EngineConfig) {
    let mut engine = Engine::new(files, config).unwrap();
    let held = engine.submit(Request::new([1, 2, 3], 20).hold(true)).unwrap();
    let seqs = [held, engine.submit(Request::new([5; 40], 9)).unwrap()];
    common::engines::finish(&mut engine, &seqs);
    let fork = engine.fork(held).unwrap();
    engine.resume(fork, Request::new([4], 3)).unwrap();
    engine.step_within(Duration::ZERO).unwrap();
    // Dropped in the middle of a step, with sequences in every state.
}

/// Threads once all that ended are gone from the list, which the system may do a moment after the join.
fn threads_settle_at(want: usize) -> usize {
    let start = Instant::now();
    while threads().len() != want && start.elapsed() < Duration::from_secs(5) {
        std::thread::yield_now();
    }
    threads().len()
}

#[test]
fn all_is_given_back() {
    alone("all_is_given_back", || {
        for model in MODELS {
            let path = fixtures().join(model);
            for mode in [LoadMode::Map, LoadMode::Read] {
                let options = OpenOptions { mode, ..OpenOptions::default() };
                let files = || ModelFiles::open(&path, &options, &mut no_progress).unwrap();
                let config = EngineConfig { threads: 3, ..EngineConfig::default() };
                // What the process needs once.
                use_it(&files(), config.clone());
                let there = threads().len();
                let before = live_bytes();
                for round in 0..20 {
                    let files = files();
                    if round % 2 == 0 {
                        // The files may go first.
                        let mut engine = Engine::new(&files, config.clone()).unwrap();
                        drop(files);
                        engine.submit(Request::new([1, 2], 3)).unwrap();
                        engine.step().unwrap();
                    } else {
                        use_it(&files, config.clone());
                        drop(files);
                    }
                    assert_eq!(live_bytes(), before, "{model} {mode:?}: bytes left after round {round}");
                }
                assert_eq!(threads_settle_at(there), there, "{model}: threads");
            }
        }
        // A session and its text handling too.
        let files = open(&fixtures().join("gguf/llama_q4_0.gguf"));
        let talk = || {
            let mut engine = Engine::new(&files, EngineConfig::default()).unwrap();
            let mut session = Session::new(&files).unwrap();
            session.push("some text").unwrap();
            let options = GenerateOptions { max_tokens: 20, ignore_end: true, ..GenerateOptions::default() };
            session.generate(&mut engine, &options).unwrap().for_each(|text| drop(text.unwrap()));
        };
        (0..3).for_each(|_| talk());
        let before = live_bytes();
        (0..20).for_each(|_| talk());
        assert_eq!(live_bytes(), before, "sessions");
    });
}

/// Bytes beside the plan, whatever the model: names and tables of layers, the ends of cache lines.
const BOOKKEEPING: u64 = 32 << 10;
/// Matrices under 2 MiB share chunks of memory: each as large as what was given out before it, within these bounds. What is
/// left of the last one is not touched, but it is allocated.
const CHUNK: (u64, u64) = (64 << 10, 4 << 20);

#[test]
fn the_plan_is_what_is_allocated() {
    alone("the_plan_is_what_is_allocated", || {
        let formats =
            [FormatId::F32, FormatId::F16, FormatId::BF16, FormatId::Q8_0, FormatId::Q4_0, FormatId::Q4K, FormatId::Q6K];
        let mut models: Vec<(String, ModelFiles)> = formats.map(|f| (f.to_string(), LARGE.synthetic(f))).into();
        models.extend(MODELS.map(|m| (m.to_owned(), open(&fixtures().join(m)))));
        // Used as they lie, or unpacked.
        let scratch = Scratch::new("memory");
        for (i, model) in MODELS.iter().enumerate() {
            let mut packed = Vec::new();
            pack(fixtures().join(model), &PackOptions::default(), &mut packed, &mut no_progress).unwrap();
            models.push((format!("{model}, packed"), open(&scratch.write(&i.to_string(), packed))));
        }
        for (name, files) in &models {
            for compute in [Compute::Exact, Compute::Fast] {
                for (threads, kv_dtype, block_size, prompt_logits, hidden) in
                    [(1, KvDType::F16, 16, false, false), (3, KvDType::F32, 64, true, true)]
                {
                    let config =
                        EngineConfig { compute, threads, kv_dtype, block_size, prompt_logits, hidden, ..EngineConfig::default() };
                    let plan = Engine::plan(files, &config).unwrap();
                    // A synthetic tensor is made when it is first asked for, and stays with its source.
                    drop(Engine::new(files, config.clone()).unwrap());
                    let before = live_bytes();
                    let (engine, peak) = peak_of(|| Engine::new(files, config.clone()).unwrap());
                    let (held, peak) = ((live_bytes() - before) as u64, peak as u64);
                    assert_eq!(engine.memory(), plan);
                    let planned = plan.total_bytes();
                    let what = format!("{name} {compute:?}, {threads} threads: planned {planned}, held {held}, peak {peak}");
                    let chunk = plan.weight_bytes.clamp(CHUNK.0, CHUNK.1);
                    assert!(held >= planned - planned / 50, "{what}");
                    assert!(held <= planned + planned / 50 + BOOKKEEPING + chunk, "{what}");
                    assert!(peak <= held + BOOKKEEPING, "{what}");
                    drop((engine, what));
                    assert_eq!(live_bytes(), before, "{name}");
                }
            }
        }
    });
}

#[test]
fn a_limit_is_kept_before_anything_is_allocated() {
    alone("a_limit_is_kept_before_anything_is_allocated", || {
        let files = LARGE.synthetic(FormatId::F16);
        let config = EngineConfig::default();
        let plan = Engine::plan(&files, &config).unwrap().total_bytes();
        drop(Engine::new(&files, EngineConfig { memory_limit_bytes: Some(plan), ..config.clone() }).unwrap());
        for limit in [0, 1 << 20, plan - 1] {
            let config = EngineConfig { memory_limit_bytes: Some(limit), ..config.clone() };
            let (result, peak) = peak_of(|| Engine::new(&files, config).map(drop));
            let error = result.unwrap_err();
            assert!(
                matches!(error, Error::Config(ConfigError::Memory { needed_bytes, limit_bytes, .. })
                    if needed_bytes == plan && limit_bytes == limit),
                "{error}"
            );
            assert!(error.to_string().contains(&plan.to_string()) && error.to_string().contains(&limit.to_string()), "{error}");
            assert!(peak < 64 << 10, "{peak} bytes for a refusal");
        }
        // A cache that no machine has is refused as well, and not by a crash.
        let huge = EngineConfig { cache_tokens: 1 << 30, ..config };
        let needed = Engine::plan(&files, &huge).unwrap().total_bytes();
        assert!(needed > 1 << 40, "{needed}");
        let limited = EngineConfig { memory_limit_bytes: Some(1 << 33), ..huge };
        assert!(matches!(Engine::new(&files, limited), Err(Error::Config(ConfigError::Memory { .. }))));
    });
}

#[test]
fn mapped_and_read_files_give_the_same_logits() {
    let rows = |model: &str, mode: LoadMode| -> (Vec<TokenId>, Rows) {
        let options = OpenOptions { mode, ..OpenOptions::default() };
        let files = ModelFiles::open(fixtures().join(model), &options, &mut no_progress).unwrap();
        let config = EngineConfig { prompt_logits: true, ..EngineConfig::default() };
        let mut lane = Lane::new(&files, config);
        let seq = lane.submit(Request { prompt_logits: true, ..Request::new([1, 2, 3, 4, 5], 8) });
        lane.finish(&[seq]);
        assert_eq!(lane.ended[&seq], FinishReason::Length);
        (lane.tokens_of(seq).to_vec(), lane.rows_of(seq))
    };
    for model in MODELS.into_iter().chain(["arch/llama_sharded", "gguf/llama_q6_k.gguf"]) {
        assert!(rows(model, LoadMode::Map) == rows(model, LoadMode::Read), "{model}");
    }
}

/// What grows with the vocabulary, the sequences, the cache and the step is in the plan. No matrix is small enough here to
/// share a chunk.
#[test]
fn the_plan_follows_every_size() {
    alone("the_plan_follows_every_size", || {
        for (vocab, max_seqs, step_tokens, cache_tokens) in [
            (512, 64, 128, 4096),
            (16_384, 64, 128, 4096),
            (512, 4096, 128, 4096),
            (512, 64, 2048, 4096),
            (512, 64, 128, 16_384),
            (512, 1, 1, 16),
        ] {
            let files = Sizes { vocab, hidden: 1024, layers: 1, heads: 8, intermediate: 1024, context: 16_384 };
            let files = files.synthetic(FormatId::F32);
            let max_batch = max_seqs.min(16);
            let config = EngineConfig { max_seqs, max_batch, step_tokens, cache_tokens, ..EngineConfig::default() };
            let plan = Engine::plan(&files, &config).unwrap();
            drop(Engine::new(&files, config.clone()).unwrap());
            let before = live_bytes();
            let engine = Engine::new(&files, config).unwrap();
            let over = live_bytes() - before - plan.total_bytes() as isize;
            println!("vocab {vocab}, {max_seqs} sequences, steps of {step_tokens}, cache of {cache_tokens}: {over} over");
            assert!(
                (-1024..BOOKKEEPING as isize).contains(&over),
                "vocab {vocab}, {max_seqs} sequences, steps of {step_tokens}: {over} bytes over"
            );
            drop(engine);
        }
    });
}
