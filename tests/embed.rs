//! Embeddings: against hidden states of another implementation, the same bits however they are computed, and errors by name.
#![allow(clippy::unwrap_used)]

mod common;

use common::engines::{alone, exact, finish, open};
use common::fake::{self, FakeSizes, Faults, NAN, continuation};
use common::golden::{Golden, close, fixtures};
use loquat::engine::{Engine, EngineConfig, EventKind, FinishReason, Request, Status, normalize};
use loquat::sched::ContinuousBatching;
use loquat::weights::no_progress;
use loquat::{EmbedOptions, Error, ModelFiles, Pooling, RunError, SeqId, SubmitError, TokenId};

const POOLINGS: [Pooling; 3] = [Pooling::Mean, Pooling::Last, Pooling::First];

/// One of each: heads alone, windows and norms all over, latents, experts.
const MODELS: [&str; 4] = ["llama_mha_f32", "gemma3_text", "deepseek_v2_lite", "qwen3_moe"];

fn model(name: &str) -> (ModelFiles, Golden) {
    let folder = fixtures().join("arch").join(name);
    (open(&folder), Golden::open(&folder))
}

fn config() -> EngineConfig {
    EngineConfig { hidden: true, ..exact() }
}

fn raw(pooling: Pooling) -> EmbedOptions {
    EmbedOptions { pooling, normalize: false }
}

fn bits(vectors: &[Vec<f32>]) -> Vec<Vec<u32>> {
    vectors.iter().map(|v| v.iter().map(|x| x.to_bits()).collect()).collect()
}

/// What a sequence ended with, stepping the engine until then.
fn embedding(engine: &mut Engine, seq: SeqId) -> Vec<f32> {
    let mut found = None;
    loop {
        let status = engine.step().unwrap();
        engine.ledger().check();
        while let Some(event) = engine.next_event() {
            match event.kind {
                EventKind::Embedding(vector) if event.seq == seq => assert!(found.replace(vector).is_none(), "one vector"),
                EventKind::Finished(reason) if event.seq == seq => {
                    assert_eq!(reason, FinishReason::Embedded);
                    return found.expect("its vector came before");
                }
                _ => assert_ne!(event.seq, seq, "nothing else happens to it"),
            }
        }
        assert_ne!(status, Status::Idle(None), "idle with work left");
    }
}

#[test]
fn pooled_states_of_another_implementation() {
    let mut compared = 0;
    for name in MODELS {
        let (files, golden) = model(name);
        let mut engine = Engine::new(&files, EngineConfig { step_tokens: 24, ..config() }).unwrap();
        for pooling in POOLINGS {
            let vectors = engine.embed(&golden.prompts, &raw(pooling)).unwrap();
            let unit = engine.embed(&golden.prompts, &EmbedOptions { pooling, normalize: true }).unwrap();
            for (i, prompt) in golden.prompts.iter().enumerate() {
                let Some((shape, states)) = golden.arrays.get(&format!("p{i}.final_hidden")) else { continue };
                assert_eq!(shape[0], prompt.len());
                let (width, n) = (shape[1], prompt.len());
                let want: Vec<f32> = match pooling {
                    Pooling::Mean => (0..width).map(|d| states.iter().skip(d).step_by(width).sum::<f32>() / n as f32).collect(),
                    Pooling::Last => states[(n - 1) * width..].to_vec(),
                    Pooling::First => states[..width].to_vec(),
                };
                let what = format!("{name} p{i} {pooling:?}");
                close(&what, &vectors[i], &want, golden.atol);
                let length = want.iter().map(|v| v * v).sum::<f32>().sqrt();
                let want: Vec<f32> = want.iter().map(|v| v / length).collect();
                close(&what, &unit[i], &want, golden.atol / length.min(1.0));
                let length: f32 = unit[i].iter().map(|v| v * v).sum();
                assert!((length - 1.0).abs() < 1e-5, "{what}: {length}");
                compared += 1;
            }
        }
    }
    assert!(compared >= 3 * MODELS.len(), "{compared}");
}

#[test]
fn company_chunks_and_limits_change_no_bit() {
    for name in MODELS {
        let (files, golden) = model(name);
        for pooling in POOLINGS {
            let mut want = Vec::new();
            for prompt in &golden.prompts {
                let mut engine = Engine::new(&files, config()).unwrap();
                want.extend(engine.embed(&[prompt], &raw(pooling)).unwrap());
            }
            assert!(want.iter().flatten().all(|v| v.is_finite()) && want[0].iter().any(|v| *v != 0.0));
            // The second and third see their inputs in several rounds.
            let configs = [
                config(),
                EngineConfig { max_seqs: 2, max_batch: 2, step_tokens: 7, ..config() },
                EngineConfig { max_seqs: 1, max_batch: 1, step_tokens: 1, ..config() },
                EngineConfig { prompt_logits: true, step_tokens: 33, block_size: 64, ..config() },
            ];
            for config in configs {
                let mut engine = Engine::new(&files, config.clone()).unwrap();
                let got = engine.embed(&golden.prompts, &raw(pooling)).unwrap();
                assert_eq!(bits(&got), bits(&want), "{name} {pooling:?} {config:?}");
                engine.ledger().check();
                assert_eq!(engine.next_event(), None);
            }
            // Among sequences that generate, and that are not disturbed either.
            let mut engine = Engine::new(&files, EngineConfig { step_tokens: 16, max_batch: 8, ..config() }).unwrap();
            let other = engine.submit(Request::new(golden.prompts[0].as_slice(), 8)).unwrap();
            let got = engine.embed(&golden.prompts, &raw(pooling)).unwrap();
            assert_eq!(bits(&got), bits(&want), "{name} {pooling:?} in company");
            assert_eq!(finish(&mut engine, &[other])[0], alone(&files, exact(), &golden.prompts[0], 8).0);
        }
    }
}

/// A generation of higher rank grows into the room of a long prompt that is embedded one token a step.
#[test]
fn a_preempted_prompt_counts_each_position_once() {
    let (files, _) = model("llama_mha_f32");
    let prompt: Vec<TokenId> = (0..60).map(|i| (i * 37 + 5) % 200).collect();
    for pooling in POOLINGS {
        let want = Engine::new(&files, config()).unwrap().embed(&[&prompt], &raw(pooling)).unwrap();
        let config = EngineConfig { cache_tokens: 6 * 16, ..config() };
        let policy = ContinuousBatching::default().max_chunk(1);
        let mut engine = Engine::load(&files, config, Box::new(policy), &mut no_progress).unwrap();
        engine.submit(Request::new([1, 2, 3, 4, 5], 70).priority(9)).unwrap();
        engine.step().unwrap();
        let seq = engine.submit(Request::embed(prompt.as_slice(), pooling)).unwrap();
        let mut preempted = 0;
        while engine.view(seq).is_some_and(|v| v.preemptions() == 0) {
            engine.step().unwrap();
            preempted = engine.view(seq).map_or(0, |v| v.preemptions());
        }
        assert_eq!(preempted, 1, "the pool was to be too small");
        assert_eq!(bits(&[embedding(&mut engine, seq)]), bits(&want), "{pooling:?}");
    }
}

#[test]
fn nothing_is_sampled_shown_or_appended_and_a_held_one_goes_on() {
    let (files, golden) = model("llama_mha_f32");
    let prompt = golden.prompts[0].as_slice();
    let mut engine = Engine::new(&files, config()).unwrap();
    engine.observe(|row| panic!("a row of {} values", row.logits.len()));
    let seq = engine.submit(Request::embed(prompt, Pooling::Mean).hold(true)).unwrap();
    assert_eq!(embedding(&mut engine, seq).len(), files.spec().hidden);
    engine.stop_observing();
    assert_eq!(engine.view(seq).unwrap().tokens(), prompt);
    assert_eq!(engine.ledger().cached_prefix(seq), prompt.len());
    let fork = engine.fork(seq).unwrap();
    for seq in [seq, fork] {
        engine.resume(seq, Request::new([], 8)).unwrap();
        assert_eq!(finish(&mut engine, &[seq])[0], alone(&files, exact(), prompt, 8).0);
    }
}

/// Not one token of room is asked for beyond the prompt's own, in the context or in the cache.
#[test]
fn a_prompt_may_fill_the_context_and_the_cache() {
    let (files, _) = model("llama_mha_f32");
    let context = files.spec().context;
    let prompt: Vec<TokenId> = (0..context as TokenId).map(|i| i * 7 % 200).collect();
    let cache_tokens = context.next_multiple_of(16);
    let mut engine = Engine::new(&files, EngineConfig { cache_tokens, ..config() }).unwrap();
    let vectors = engine.embed(&[&prompt, &prompt], &EmbedOptions::default()).unwrap();
    assert_eq!(bits(&vectors[..1]), bits(&vectors[1..]));
    let long = [prompt.as_slice(), &[1]].concat();
    let error = engine.embed(&[&prompt, &long], &EmbedOptions::default()).unwrap_err();
    let Error::Submit(SubmitError::TooLong { tokens, limit, .. }) = error else { panic!("{error}") };
    assert_eq!((tokens, limit), (context + 1, context));
    // What was submitted before the error is gone with the next call.
    assert_eq!(engine.step().unwrap(), Status::Idle(None));
    assert_eq!((engine.ledger().all().count(), engine.next_event()), (0, None));
}

#[test]
fn what_cannot_be_embedded_is_refused_by_name() {
    let (files, _) = model("llama_mha_f32");
    let vocab = files.spec().vocab as TokenId;
    let mut engine = Engine::new(&files, EngineConfig { prompt_logits: true, max_seqs: 1, max_batch: 1, ..config() }).unwrap();
    let embed = || Request::embed([1, 2], Pooling::Last);
    let parameter = |engine: &mut Engine, request: Request, expected: &str| match engine.submit(request) {
        Err(SubmitError::Parameter { name, .. }) => assert_eq!(name, expected),
        other => panic!("{other:?}"),
    };
    parameter(&mut engine, Request { max_tokens: 3, ..embed() }, "max_tokens");
    parameter(&mut engine, Request { prompt_logits: true, ..embed() }, "prompt_logits");
    let mut plain = Engine::new(&files, exact()).unwrap();
    parameter(&mut plain, embed(), "embedding");
    assert_eq!(engine.submit(Request::embed([], Pooling::Last)), Err(SubmitError::EmptyPrompt));
    assert!(matches!(engine.submit(Request::embed([vocab], Pooling::Last)), Err(SubmitError::UnknownToken { .. })));
    assert_eq!(engine.submit(Request::new([1], 0)), Err(SubmitError::NoTokens), "generation needs a token");
    assert_eq!(engine.ledger().all().count(), 0);
    assert_eq!(engine.embed::<Vec<TokenId>>(&[], &EmbedOptions::default()).unwrap(), Vec::<Vec<f32>>::new());

    let held = engine.submit(Request::new([1, 2, 3], 1).hold(true)).unwrap();
    finish(&mut engine, &[held]);
    match engine.resume(held, embed()) {
        Err(SubmitError::Parameter { name: "embedding", found, .. }) => assert!(found.contains(&held.to_string()), "{found}"),
        other => panic!("{other:?}"),
    }
    let full = engine.embed(&[[1, 2]], &EmbedOptions::default()).unwrap_err();
    assert!(matches!(full, Error::Submit(SubmitError::QueueFull { limit: 1 })), "{full}");
    assert_eq!(engine.view(held).unwrap().total(), 4);
}

#[test]
fn an_embedding_can_be_stopped() {
    let (files, _) = model("llama_mha_f32");
    let mut engine = Engine::new(&files, EngineConfig { step_tokens: 16, ..config() }).unwrap();
    let seq = engine.submit(Request::embed(vec![3; 40], Pooling::Mean)).unwrap();
    engine.step().unwrap();
    engine.stop(seq).unwrap();
    let event = engine.next_event().unwrap();
    assert_eq!((event.seq, event.kind), (seq, EventKind::Finished(FinishReason::Cancelled)));
    assert_eq!(engine.ledger().all().count(), 0);
}

#[test]
fn broken_states_end_their_sequence_alone() {
    for states in [true, false] {
        let sizes = FakeSizes { hidden: true, states, ..FakeSizes::default() };
        let mut engine = fake::engine(sizes, &Faults::at(1, 0));
        let other = engine.submit(Request::new([5, 6], 9)).unwrap();
        let error = engine.embed(&[vec![3; 4], vec![4, 7, NAN, 8]], &raw(Pooling::Mean)).unwrap_err();
        match error {
            Error::Run(RunError::BrokenState { position: 2, at: 1, value, .. }) => assert!(states && value.is_nan()),
            Error::Run(RunError::NoStates { expected, found: 0, .. }) => assert!(!states && expected > 0),
            other => panic!("{other}"),
        }
        assert_eq!(finish(&mut engine, &[other])[0], continuation(&[5, 6], 9));
        assert_eq!((engine.ledger().all().count(), engine.next_event()), (0, None));
        engine.ledger().check();
    }
}

/// Whichever call of the model fails, and however often: a step that is tried again counts its positions once.
#[test]
fn failed_steps_count_nothing() {
    let prompt: Vec<TokenId> = (0..60).collect();
    let sizes = FakeSizes { hidden: true, ..FakeSizes::default() };
    let run = |faults: &std::sync::Arc<Faults>| {
        let mut engine = fake::engine(sizes, faults);
        let seq = engine.submit(Request::embed(prompt.as_slice(), Pooling::Mean)).unwrap();
        loop {
            let failed = matches!(engine.step(), Err(RunError::Device { .. }));
            if let Some(event) = engine.next_event() {
                assert_eq!((event.seq, failed), (seq, false));
                let EventKind::Embedding(vector) = event.kind else { panic!("{event:?}") };
                return vector;
            }
        }
    };
    let calls = Faults::at(1, 0);
    let want = run(&calls);
    assert_eq!(want[..3], [29.5, 1.0, 29.5]);
    let calls = calls.calls.load(std::sync::atomic::Ordering::Relaxed);
    assert!(calls > 6, "{calls}");
    for first in 1..=calls {
        assert_eq!(run(&Faults::at(first, 2)), want, "call {first}");
    }
}

#[test]
fn a_vector_of_zeros_stays() {
    let (mut zeros, mut tiny) = ([0.0; 3], [3e-30, 4e-30]);
    normalize(&mut zeros);
    normalize(&mut tiny);
    assert_eq!((zeros, tiny), ([0.0; 3], [0.6, 0.8]));
}
