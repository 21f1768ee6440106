//! SmolLM2-135M-Instruct, a real model in a 4-bit GGUF file, against another implementation: tokenizer, chat template, logits,
//! greedy answers and perplexity; and that its logits have the same bits however they are computed. Tests skip, and say so,
//! where the file is not cached and cannot be fetched. `LOQUAT_LONG=1` runs the long versions.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "../examples/support/fetch.rs"]
mod fetch;

use common::engines::{exact, finish, open, record};
use common::golden::{close, fixtures, floats, ids, json, same_greedy};
use common::lane::Lane;
use common::text::check_golden_text;
use loquat::backend::cpu::{Compute, Cpu};
use loquat::engine::{Engine, EngineConfig, KvSave, Request};
use loquat::sched::ContinuousBatching;
use loquat::weights::no_progress;
use loquat::{GenerateOptions, KvDType, ModelFiles, SeqId, Session, TokenId};
use serde_json::Value;
use std::sync::{Arc, LazyLock, Mutex};

/// The model, opened once; `None` skips the test.
fn model() -> Option<&'static ModelFiles> {
    static FILES: LazyLock<Option<ModelFiles>> = LazyLock::new(|| fetch::for_test(&fetch::SMOLLM2).map(|path| open(&path)));
    if FILES.is_none() {
        eprintln!("skipped: no {}", fetch::SMOLLM2.file_name);
    }
    FILES.as_ref()
}

fn golden() -> Value {
    json(&fixtures().join("smollm2/golden.json"))["variants"]["exact"].take()
}

fn long() -> bool {
    std::env::var_os("LOQUAT_LONG").is_some_and(|value| !value.is_empty() && value != "0")
}

/// Prompts of the ten golden conversations, about 40 tokens each.
fn chat_prompts() -> Vec<Vec<TokenId>> {
    golden()["greedy"].as_array().unwrap().iter().map(|g| ids(&g["prompt_ids"])).collect()
}

/// The setting that golden values are compared with, and the one that programs use.
fn modes() -> [(&'static str, EngineConfig); 2] {
    let fast = EngineConfig { compute: Compute::Fast, kv_dtype: KvDType::F16, ..exact() };
    [("exact", exact()), ("fast", fast)]
}

#[test]
fn tokens_and_chat_texts() {
    let Some(files) = model() else { return };
    let golden = json(&fixtures().join("smollm2/tokenizer.json"));
    assert_eq!((golden["strings"].as_array().unwrap().len(), golden["chat"].as_array().unwrap().len()), (34, 5));
    check_golden_text(files.tokenizer().unwrap(), files.template().unwrap(), &golden);
}

/// Noise between two float32 implementations is about 3e-5 on these logits.
#[test]
fn last_logits_of_ten_texts() {
    let Some(files) = model() else { return };
    let golden = golden();
    let cases = golden["top20"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    let mut engine = Engine::new(files, EngineConfig { threads: 2, ..exact() }).unwrap();
    let rows = record(&mut engine);
    let seqs: Vec<_> = cases.iter().map(|case| engine.submit(Request::new(ids(&case["ids"]), 1)).unwrap()).collect();
    let tokens = finish(&mut engine, &seqs);
    let rows = rows.lock().unwrap();
    for ((case, seq), tokens) in cases.iter().zip(&seqs).zip(tokens) {
        let (what, top) = (case["text"].as_str().unwrap(), ids(&case["top_ids"]));
        let logits = &rows[&(*seq, ids(&case["ids"]).len() - 1)].0;
        let got: Vec<f32> = top.iter().map(|&id| logits[id as usize]).collect();
        close(what, &got, &floats(&case["top_logits"]), 1e-3);
        let mean = logits.iter().map(|&v| f64::from(v)).sum::<f64>() / logits.len() as f64;
        let sums = [log_sum_exp(logits) as f32, mean as f32];
        close(what, &sums, &[&case["logsumexp"], &case["mean_logit"]].map(|v| v.as_f64().unwrap() as f32), 1e-3);
        // Nothing outside the list may lie above it.
        let above = |(id, &v): (usize, &f32)| v > got[19] + 1e-3 && !top.contains(&(id as TokenId));
        assert_eq!(logits.iter().enumerate().position(above), None, "{what}");
        assert_eq!(tokens, top[..1], "{what}");
    }
}

#[test]
fn greedy_answers_of_ten_chats_at_once() {
    let Some(files) = model() else { return };
    let golden = golden();
    let cases = golden["greedy"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    let mut engine = Engine::new(files, EngineConfig { threads: 2, ..exact() }).unwrap();
    let seqs: Vec<_> = chat_prompts().into_iter().map(|prompt| engine.submit(Request::new(prompt, 64)).unwrap()).collect();
    for (case, tokens) in cases.iter().zip(finish(&mut engine, &seqs)) {
        let (what, margins) = (case["question"].as_str().unwrap(), floats(&case["top1_minus_top2"]));
        same_greedy(what, &tokens, &ids(&case["tokens"]), &margins, 2e-3);
    }
}

/// Measured: 2.986910 over all 7 windows, no window further than 5e-7 from the reference.
#[test]
fn perplexity_of_the_exact_path() {
    let Some(files) = model() else { return };
    let windows = if long() { 7 } else { 2 };
    let (got, want) = (window_nlls(files, exact(), windows), golden_nlls());
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!((got - want).abs() < 1e-5, "window {i}: {got}, not {want}");
    }
    if long() {
        let (got, want) = (mean(&got), golden()["nll"]["mean_nll"].as_f64().unwrap());
        eprintln!("exact path: mean NLL {got:.6}, reference {want:.6}");
        assert!((got - want).abs() < 1e-5, "{got}, not {want}");
    }
}

/// 8-bit activations and an F16 cache cost a little. Measured: 19.8785, 0.27 % more than the reference.
#[test]
fn perplexity_of_the_production_path() {
    let Some(files) = model() else { return };
    let [_, (_, fast)] = modes();
    let got = mean(&window_nlls(files, fast, 7)).exp();
    let want = golden()["nll"]["perplexity"].as_f64().unwrap();
    eprintln!("production path: perplexity {got:.4}, reference {want:.4}");
    assert!((got / want - 1.0).abs() < 5e-3, "perplexity {got}, not {want}");
}

/// Mean negative log-likelihood of each of the first windows: 1024 tokens, all but the first scored. Logits are looked at as
/// they come: kept, they would take 200 MB a window.
fn window_nlls(files: &ModelFiles, config: EngineConfig, windows: usize) -> Vec<f64> {
    let text = ids(&json(&fixtures().join("smollm2/text.json"))["ids"]);
    let windows: Vec<Vec<TokenId>> = text.chunks_exact(1024).take(windows).map(<[_]>::to_vec).collect();
    let config = EngineConfig { threads: 2, prompt_logits: true, step_tokens: 256, cache_tokens: 1040 * windows.len(), ..config };
    let mut engine = Engine::new(files, config).unwrap();
    let request = |tokens: &Vec<TokenId>| Request { prompt_logits: true, ..Request::new(tokens.as_slice(), 1) };
    let seqs: Vec<SeqId> = windows.iter().map(|tokens| engine.submit(request(tokens)).unwrap()).collect();
    let sums = Arc::new(Mutex::new(vec![(0.0, 0); windows.len()]));
    let (known, seen) = (seqs.clone(), sums.clone());
    engine.observe(move |row| {
        let i = known.iter().position(|seq| *seq == row.seq).unwrap();
        if let Some(&next) = windows[i].get(row.position + 1) {
            let (sum, scored) = &mut seen.lock().unwrap()[i];
            *sum += log_sum_exp(row.logits) - f64::from(row.logits[next as usize]);
            *scored += 1;
        }
    });
    finish(&mut engine, &seqs);
    let sums = sums.lock().unwrap();
    sums.iter().map(|&(sum, scored)| (scored == 1023).then(|| sum / f64::from(scored)).expect("each position once")).collect()
}

fn golden_nlls() -> Vec<f64> {
    golden()["nll"]["per_window_mean_nll"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
    f64::from(max) + logits.iter().map(|&v| f64::from((v - max).exp())).sum::<f64>().ln()
}

/// How one sequence is run, beside what the configuration says.
struct Run<'a> {
    config: EngineConfig,
    /// Prefill tokens in a step with decode rows.
    max_chunk: usize,
    /// Sequences in the engine before and after it.
    others: [&'a [Vec<TokenId>]; 2],
}

impl Run<'_> {
    fn alone(config: EngineConfig) -> Self {
        Run { config, max_chunk: 512, others: [&[], &[]] }
    }

    /// Bits of the logits at every position of `prompt` and at those of `more` generated tokens but the last.
    fn bits(self, files: &ModelFiles, prompt: &[TokenId], more: usize) -> Bits {
        let config = EngineConfig { prompt_logits: true, ..self.config };
        let mut policy = ContinuousBatching::default();
        policy.max_chunk = self.max_chunk;
        let mut engine = Engine::load(files, config, Box::new(policy), &mut no_progress).unwrap();
        let mut seqs: Vec<SeqId> = Vec::new();
        let [before, after] = self.others;
        seqs.extend(before.iter().map(|p| engine.submit(Request::new(p.as_slice(), more + 2)).unwrap()));
        let seq = engine.submit(Request { prompt_logits: true, ..Request::new(prompt, more) }).unwrap();
        seqs.extend(after.iter().map(|p| engine.submit(Request::new(p.as_slice(), more + 2)).unwrap()));
        let rows = Arc::new(Mutex::new(Bits::new()));
        let seen = rows.clone();
        engine.observe(move |row| {
            if row.seq == seq {
                seen.lock().unwrap().push((row.position, row.logits.iter().map(|v| v.to_bits()).collect()));
            }
        });
        seqs.push(seq);
        finish(&mut engine, &seqs);
        let rows = std::mem::take(&mut *rows.lock().unwrap());
        assert_eq!(rows.len(), prompt.len() + more - 1);
        rows
    }
}

/// Positions and the logits there.
type Bits = Vec<(usize, Vec<u32>)>;

fn same_bits(what: &str, got: &Bits, want: &Bits) {
    assert_eq!(got.len(), want.len(), "{what}");
    for ((position, got), (_, want)) in got.iter().zip(want) {
        let parts = got.iter().zip(want).filter(|(a, b)| a != b).count();
        assert_eq!(parts, 0, "{what}: logits differ at position {position}");
    }
}

#[test]
fn same_bits_in_any_company_and_in_any_chunks() {
    let Some(files) = model() else { return };
    let chats = chat_prompts();
    // Two chats in one: longer than the largest chunk here.
    let prompt = chats[..2].concat();
    for (mode, config) in modes() {
        let config = EngineConfig { threads: 2, ..config };
        let want = Run::alone(config.clone()).bits(files, &prompt, 4);
        let check = |what: &str, run: Run<'_>| same_bits(&format!("{mode}, {what}"), &run.bits(files, &prompt, 4), &want);
        for chunk in [1, 3, 64] {
            if chunk > 1 || long() || config.compute == Compute::Fast {
                let config = EngineConfig { step_tokens: chunk, max_batch: 1, ..config.clone() };
                check(&format!("chunks of {chunk}"), Run::alone(config));
            }
        }
        check("blocks of 64", Run::alone(EngineConfig { block_size: 64, ..config.clone() }));
        let others = [&chats[2..5], &chats[5..9]];
        for max_chunk in [3, 64] {
            let config = EngineConfig { step_tokens: 96, max_batch: 8, ..config.clone() };
            check(&format!("among seven, chunks of {max_chunk}"), Run { config, max_chunk, others });
        }
    }
}

#[test]
fn same_bits_on_any_threads_and_tier() {
    let Some(files) = model() else { return };
    let prompt = &chat_prompts()[0];
    let mut wants = Vec::new();
    for (mode, config) in modes() {
        let want = Run::alone(config.clone()).bits(files, prompt, 3);
        let check = |what: &str, config: EngineConfig| {
            same_bits(&format!("{mode}, {what}"), &Run::alone(config).bits(files, prompt, 3), &want);
        };
        for threads in [2, 5] {
            check(&format!("{threads} threads"), EngineConfig { threads, ..config.clone() });
        }
        for tier in Cpu::tiers() {
            check(tier, EngineConfig { threads: 2, tier: Some(tier.into()), ..config.clone() });
        }
        wants.push(want);
    }
    assert_ne!(wants[0], wants[1], "the two modes are told apart");
}

/// Hits of all lengths around a block, preemption by both ways in a pool that is too small, all against a run of its own.
#[test]
fn same_bits_on_what_is_found_cached_or_swapped() {
    let Some(files) = model() else { return };
    let (chats, block, more) = (chat_prompts(), 16, 6);
    let prompt = &chats[..3].concat()[..5 * block + 3];
    for (mode, config) in modes() {
        let config = EngineConfig { threads: 2, step_tokens: 64, ..config };
        let request = |key| Request { key, hold: true, ..Request::new(prompt, more) };
        let trace = |lane: &Lane, seq| (lane.tokens_of(seq).to_vec(), lane.rows_of(seq));
        let mut lane = Lane::new(files, config.clone());
        let seq = lane.submit(request(0));
        lane.finish(&[seq]);
        let want = trace(&lane, seq);
        assert_eq!(want.1.len(), more);
        for (key, n) in [block - 1, block, block + 1, 2 * block, prompt.len()].into_iter().enumerate() {
            let key = key as u64 + 1;
            let prefix = lane.submit(Request { key, ..Request::prefill(&prompt[..n]) });
            lane.finish(&[prefix]);
            let seq = lane.submit(request(key));
            lane.finish(&[seq]);
            assert!(trace(&lane, seq) == want, "{mode}: {n} tokens cached");
            assert_eq!(lane.engine.view(seq).unwrap().hit(), n.min(prompt.len() - 1), "{mode}");
        }
        // What an engine has cached, moved to another with other blocks and threads.
        let saved = lane.engine.export(0, prompt, KvSave::Exact).unwrap();
        let mut other = Lane::new(files, EngineConfig { block_size: 32, threads: 1, ..config.clone() });
        assert_eq!(other.engine.import(&saved).unwrap().cached, prompt.len());
        let seq = other.submit(request(0));
        other.finish(&[seq]);
        assert!(trace(&other, seq) == want, "{mode}: restored");
        assert_eq!(other.engine.view(seq).unwrap().hit(), prompt.len() - 1, "{mode}: restored");
        for swap_tokens in [0, 256] {
            let cache_tokens = 9 * block;
            let mut lane = Lane::new(files, EngineConfig { cache_tokens, swap_tokens, ..config.clone() });
            let first = lane.submit(Request { key: 1, ..Request::new(&prompt[..46], 60) });
            lane.step();
            let seq = lane.submit(request(0));
            lane.finish(&[first, seq]);
            assert!(trace(&lane, seq) == want, "{mode}: preempted, with {swap_tokens} tokens to swap");
            let stats = lane.engine.ledger().stats();
            assert!(stats.preemptions > 0 && stats.evicted_blocks > 0 && (stats.swaps > 0) == (swap_tokens > 0), "{stats:?}");
        }
    }
}

/// A session's answer as tokens.
fn answer(session: &mut Session, engine: &mut Engine, max_tokens: usize) -> Vec<TokenId> {
    let options = GenerateOptions { max_tokens, ignore_end: true, ..GenerateOptions::default() };
    session.generate(engine, &options).unwrap().for_each(|piece| _ = piece.unwrap());
    session.tokens()[session.tokens().len() - session.generated()..].to_vec()
}

/// The answer of a session that knows only these tokens, in an engine of its own.
fn answer_anew(files: &ModelFiles, config: EngineConfig, tokens: &[TokenId], max_tokens: usize) -> Vec<TokenId> {
    let mut engine = Engine::new(files, EngineConfig { threads: 2, ..config }).unwrap();
    let mut session = Session::new(files).unwrap();
    session.push_tokens(tokens);
    answer(&mut session, &mut engine, max_tokens)
}

#[test]
fn the_second_turn_of_a_chat_runs_only_what_is_new() {
    let Some(files) = model() else { return };
    let mut engine = Engine::new(files, EngineConfig { threads: 2, ..exact() }).unwrap();
    let mut session = Session::new(files).unwrap();
    let options = GenerateOptions { max_tokens: 40, ..GenerateOptions::default() };
    session.say("user", "What is the capital of France?");
    let text: String = session.generate(&mut engine, &options).unwrap().map(Result::unwrap).collect();
    assert_eq!(text, "The capital of France is Paris.");
    let first = session.tokens().to_vec();
    assert_eq!((session.reused(), session.messages().len()), (0, 2));

    session.say("user", "And of Italy?");
    let text: String = session.generate(&mut engine, &options).unwrap().map(Result::unwrap).collect();
    assert!(text.contains("Rome"), "{text:?}");
    let second = session.tokens().to_vec();
    let same = first.iter().zip(&second).take_while(|(a, b)| a == b).count();
    assert_eq!(same, first.len(), "the template renders the first turn as it was");
    // The last token of an answer was sampled and never run.
    assert_eq!(session.reused(), first.len() - 1);
    let prompt = second.len() - session.generated();
    assert_eq!(answer_anew(files, exact(), &second[..prompt], session.generated()), second[prompt..]);
}

#[test]
fn a_first_turn_that_was_cut_is_run_again_from_the_cut() {
    let Some(files) = model() else { return };
    let mut engine = Engine::new(files, EngineConfig { threads: 2, ..exact() }).unwrap();
    let mut session = Session::new(files).unwrap();
    let stop = vec![" William Shakespeare".to_owned()];
    let options = GenerateOptions { max_tokens: 12, stop, ..GenerateOptions::default() };
    session.say("user", "Who wrote Romeo and Juliet?");
    let text: String = session.generate(&mut engine, &options).unwrap().map(Result::unwrap).collect();
    assert_eq!(text, "The story of Romeo and Juliet by");
    let first = session.tokens().to_vec();
    session.say("user", "When?");
    session.generate(&mut engine, &options).unwrap().for_each(|piece| _ = piece.unwrap());
    let second = session.tokens().to_vec();
    // The template ends the turn where its text was cut, two tokens before the last that was generated.
    let same = first.iter().zip(&second).take_while(|(a, b)| a == b).count();
    assert!(same < first.len() - 1, "{same} of {}", first.len());
    assert_eq!(session.reused(), same);
    let prompt = second.len() - session.generated();
    assert_eq!(answer_anew(files, exact(), &second[..prompt], session.generated()), second[prompt..]);
}

#[test]
fn truncated_and_forked_sessions_answer_like_fresh_ones() {
    let Some(files) = model() else { return };
    let mut engine = Engine::new(files, EngineConfig { threads: 2, ..EngineConfig::default() }).unwrap();
    let mut session = Session::new(files).unwrap();
    session.push("Once upon a time, there was a small village at the foot of a mountain.").unwrap();
    let story = answer(&mut session, &mut engine, 24);
    let all = session.tokens().to_vec();
    assert_eq!(answer_anew(files, EngineConfig::default(), &all[..all.len() - 24], 24), story);

    // Back to the middle of the answer, and of a cache block: it goes on as it did.
    let middle = all.len() - 13;
    session.truncate(&mut engine, middle).unwrap();
    assert_eq!(answer(&mut session, &mut engine, 13), all[middle..]);
    assert_eq!(session.reused(), middle - 1);

    // Two ways on from there, and a third from the fork's own past; what they share is never written.
    let mut fork = session.fork(&mut engine).unwrap();
    session.push(" The villagers were afraid of").unwrap();
    fork.push(" Nobody had ever climbed").unwrap();
    let mut third = fork.fork(&mut engine).unwrap();
    third.truncate(&mut engine, middle).unwrap();
    third.push(" In the winter").unwrap();
    let known: Vec<Vec<TokenId>> = [&session, &fork, &third].map(|s| s.tokens().to_vec()).to_vec();
    for (i, session) in [&mut session, &mut fork, &mut third].into_iter().enumerate() {
        assert_eq!(answer(session, &mut engine, 12), answer_anew(files, EngineConfig::default(), &known[i], 12), "{i}");
        assert!(session.reused() >= middle - 1, "{i}: {}", session.reused());
    }
}
