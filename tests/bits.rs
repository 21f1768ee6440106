//! A request's logits have the same bits whatever else goes on: neighbours, chunks, threads, kernels, block sizes, preemption,
//! pauses, and whichever way its tokens came into the cache.
#![allow(clippy::unwrap_used)]

mod common;

use common::engines::open;
use common::golden::fixtures;
use common::lane::{Lane, Rows};
use common::text::{Random, random_tokens};
use loquat::arch::RopeScaling;
use loquat::backend::cpu::Cpu;
use loquat::engine::{EngineConfig, FinishReason, Request, Status};
use loquat::model::ModelFiles;
use loquat::{Compute, KvDType, SamplingParams, SeqId, TokenId};
use sha2::{Digest, Sha256};
use std::time::Duration;

const MODELS: [&str; 7] = [
    "arch/llama_mha_f32",
    "arch/llama_gqa_tied_llama3",
    "arch/llama_rope_dynamic",
    "gguf/llama_q4_1.gguf",
    "gguf/llama_mixed.gguf",
    "gguf/llama_q4_k_m.gguf",
    "gguf/llama_q8_0.gguf",
];
/// Past 64 tokens the dynamic model's frequencies change with each token.
const PROMPT: usize = 56;
const MORE: usize = 24;

/// What a request came to.
#[derive(PartialEq)]
struct Trace {
    tokens: Vec<TokenId>,
    rows: Rows,
}

impl Trace {
    fn of(lane: &Lane, seq: SeqId) -> Self {
        assert_eq!(lane.ended.get(&seq), Some(&FinishReason::Length));
        Trace { tokens: lane.tokens_of(seq).to_vec(), rows: lane.rows_of(seq) }
    }
}

/// A model in one mode, and what the request comes to alone.
struct Case {
    what: String,
    files: ModelFiles,
    config: EngineConfig,
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    alone: Trace,
}

impl Case {
    fn new(model: &str, compute: Compute, kv_dtype: KvDType, sampling: SamplingParams) -> Self {
        let files = open(&fixtures().join(model));
        let config = EngineConfig {
            compute,
            kv_dtype,
            cache_tokens: 2048,
            max_seqs: 32,
            max_batch: 16,
            step_tokens: 64,
            prompt_logits: true,
            ..EngineConfig::default()
        };
        let mut case = Case {
            what: format!("{model} {compute:?} {kv_dtype:?}"),
            prompt: random_tokens(1, PROMPT, files.spec().vocab),
            alone: Trace { tokens: Vec::new(), rows: Rows::new() },
            files,
            config,
            sampling,
        };
        let mut lane = Lane::new(&case.files, case.config.clone());
        let seq = lane.submit(case.request(&case.prompt, MORE));
        lane.finish(&[seq]);
        case.alone = Trace::of(&lane, seq);
        assert_eq!(case.alone.tokens.len(), MORE);
        assert!(case.alone.rows.keys().copied().eq(0..PROMPT + MORE - 1), "a row for each position");
        case
    }

    fn request(&self, tokens: &[TokenId], max_tokens: usize) -> Request {
        Request { prompt_logits: true, ..Request::new(tokens, max_tokens).sampling(self.sampling.clone()) }
    }

    /// The whole request.
    fn whole(&self) -> Request {
        self.request(&self.prompt, MORE)
    }

    /// Other people's requests.
    fn neighbours(&self, n: usize) -> Vec<Request> {
        let mut random = Random(n as u64);
        (0..n)
            .map(|i| {
                let (len, more) = (1 + random.below(70), 1 + random.below(30));
                let tokens = random_tokens(100 + i as u64, len, self.files.spec().vocab);
                let sampling = SamplingParams::default().temperature(0.5 * (i % 4) as f32).seed(i as u64);
                let sampling = sampling.top_k(random.below(20)).min_p(0.01 * i as f32).repetition_penalty(1.1);
                Request { prompt_logits: i % 3 == 0, ..Request::new(tokens, more).sampling(sampling) }
            })
            .collect()
    }

    /// Rows from position `from` on, and all tokens.
    #[track_caller]
    fn check(&self, how: &str, lane: &Lane, seq: SeqId, from: usize) {
        let Trace { tokens, rows } = Trace::of(lane, seq);
        assert_eq!(tokens, self.alone.tokens, "{}, {how}: tokens", self.what);
        for (position, want) in self.alone.rows.range(from..) {
            let got = rows.get(position).unwrap_or_else(|| panic!("{}, {how}: no row at {position}", self.what));
            assert!(got == want, "{}, {how}: other bits at position {position}", self.what);
        }
    }

    /// Where the frequencies follow the length, rows of a shorter prompt are others, and rightly so.
    fn shared(&self, len: usize) -> usize {
        if matches!(self.files.spec().ropes[0].scaling, RopeScaling::Dynamic { .. }) { len } else { 0 }
    }
}

/// All models in both compute modes with both types of cache.
fn cases(mut f: impl FnMut(&Case)) {
    for model in MODELS {
        for compute in [Compute::Exact, Compute::Fast] {
            for kv in [KvDType::F32, if model.contains("llama3") { KvDType::BF16 } else { KvDType::F16 }] {
                f(&Case::new(model, compute, kv, SamplingParams::default()));
            }
        }
    }
}

#[test]
fn chunks_threads_tiers_and_block_sizes() {
    let tiers: Vec<_> = Cpu::tiers().collect();
    assert!(tiers.contains(&"scalar"), "{tiers:?}");
    cases(|case| {
        let base = || case.config.clone();
        let mut configs = Vec::new();
        configs.extend([1, 3, 64].map(|n| EngineConfig { step_tokens: n, max_batch: n.min(16), ..base() }));
        configs.extend([1, 2, 5].map(|threads| EngineConfig { threads, ..base() }));
        configs.extend([16, 32, 64].map(|block_size| EngineConfig { block_size, ..base() }));
        configs.extend(tiers.iter().map(|&tier| EngineConfig { tier: Some(tier.into()), step_tokens: 17, ..base() }));
        configs.push(EngineConfig { tier: Some("scalar".into()), threads: 3, block_size: 32, step_tokens: 16, ..base() });
        for config in configs {
            let how = format!(
                "steps of {}, {} threads, blocks of {}, tier {:?}",
                config.step_tokens, config.threads, config.block_size, config.tier
            );
            let mut lane = Lane::new(&case.files, config);
            let seq = lane.submit(case.whole());
            lane.finish(&[seq]);
            case.check(&how, &lane, seq, 0);
        }
    });
}

/// First 64 bits of the SHA-256 of all rows' bits, exact and fast, with an f16 cache: norms, rotations, activations and
/// routers of several kinds, and all sorts of weights.
const HASHES: [(&str, [&str; 2]); 11] = [
    ("arch/llama_mha_f32", ["82297592135ca88c", "82297592135ca88c"]),
    ("arch/llama_gqa_tied_llama3", ["48bcf893186c0770", "48bcf893186c0770"]),
    ("arch/llama_mha_bf16", ["2ea69d92465bc84c", "2ea69d92465bc84c"]),
    ("arch/phi3_longrope", ["539fd31c7d35a09a", "539fd31c7d35a09a"]),
    ("arch/gemma2", ["236d404b0d2304f1", "236d404b0d2304f1"]),
    ("arch/gpt2", ["63018f71c2e9d373", "63018f71c2e9d373"]),
    ("arch/gpt_oss", ["42ae225b8bef4593", "42ae225b8bef4593"]),
    ("arch/deepseek_v3", ["8f550e67f2c9777e", "8f550e67f2c9777e"]),
    ("gguf/llama_q4_0.gguf", ["7b69232630e4c50f", "5076c302ead79f56"]),
    ("gguf/llama_mixed.gguf", ["ec223b06a0f30853", "e35412a9af55010c"]),
    ("gguf/llama_q4_k_m.gguf", ["63cfd3ca07cadcc9", "98acb93008f8a6e9"]),
];

/// Another architecture, another processor, another operating system: whatever runs this must come to these bits. Short, since
/// it runs on emulated processors too.
#[test]
fn on_every_machine_and_tier() {
    let mut other = Vec::new();
    for (model, want) in HASHES {
        let files = open(&fixtures().join(model));
        let prompt = random_tokens(1, 11, files.spec().vocab);
        for (compute, want) in [Compute::Exact, Compute::Fast].into_iter().zip(want) {
            for tier in Cpu::tiers() {
                let small =
                    EngineConfig { cache_tokens: 64, max_seqs: 1, max_batch: 1, step_tokens: 8, ..EngineConfig::default() };
                let config = EngineConfig { compute, tier: Some(tier.into()), prompt_logits: true, ..small };
                let mut lane = Lane::new(&files, config);
                let seq = lane.submit(Request { prompt_logits: true, ..Request::new(prompt.clone(), 3) });
                lane.finish(&[seq]);
                let mut hash = Sha256::new();
                for value in lane.rows_of(seq).values().flatten() {
                    hash.update(value.to_le_bytes());
                }
                let got: String = hash.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect();
                if got != want {
                    other.push(format!("{model} {compute:?} {tier}: {got} for {want}"));
                }
            }
        }
    }
    assert!(other.is_empty(), "other bits:\n{}", other.join("\n"));
}

#[test]
fn among_seven_others_that_stay_or_are_cancelled() {
    cases(|case| {
        for (step_tokens, threads, cancel) in [(64, 1, false), (20, 2, false), (64, 1, true)] {
            let mut lane = Lane::new(&case.files, EngineConfig { step_tokens, threads, ..case.config.clone() });
            let mut others: Vec<_> = case.neighbours(7).into_iter().map(|r| lane.submit(r)).collect();
            let seq = lane.submit(case.whole());
            // In the middle of a step, between steps, while it waits.
            let mut call = 0;
            while cancel && !others.is_empty() && !lane.ended.contains_key(&seq) {
                lane.engine.step_within(Duration::ZERO).unwrap();
                lane.listen();
                call += 1;
                if call % 5 == 3 {
                    // It may have ended by itself.
                    let _ = lane.engine.cancel(others.pop().unwrap());
                    lane.listen();
                }
            }
            lane.finish(&[seq]);
            case.check(&format!("among 7 in steps of {step_tokens}, cancelled: {cancel}"), &lane, seq, 0);
        }
    });
}

#[test]
fn preempted_and_computed_anew() {
    cases(|case| {
        // Seven blocks for two sequences of five each in the end; the other one came first.
        let mut lane = Lane::new(&case.files, EngineConfig { cache_tokens: 7 * 16, ..case.config.clone() });
        let first = lane.submit(Request { key: 1, ..Request::new(&case.prompt[..20], 60) });
        let seq = lane.submit(case.whole());
        let mut preemptions = 0;
        while !lane.ended.contains_key(&seq) {
            assert_ne!(lane.step(), Status::Idle(None));
            preemptions = preemptions.max(lane.engine.view(seq).map_or(0, |v| v.preemptions()));
        }
        assert!(preemptions > 0, "{}: it was to be preempted", case.what);
        case.check("preempted", &lane, seq, 0);
        lane.finish(&[first]);
        assert_eq!(lane.engine.ledger().available_blocks(), 7);
    });
}

#[test]
fn held_resumed_truncated_and_forked() {
    cases(|case| {
        for keep in [1, 15, 16, 17, 33] {
            let (start, rest) = case.prompt.split_at(keep);
            for (junk, fork) in [(0, None), (20, None), (0, Some(true)), (7, Some(false))] {
                let mut lane = Lane::new(&case.files, case.config.clone());
                let mut tokens = start.to_vec();
                tokens.extend(random_tokens(9, junk, case.files.spec().vocab));
                let mut seq = lane.submit(case.request(&tokens, 5).hold(true));
                lane.finish(&[seq]);
                lane.engine.truncate(seq, keep).unwrap();
                let mut from = case.shared(keep);
                if let Some(child_is_it) = fork {
                    // Both go on at once, from the block they share.
                    let child = lane.engine.fork(seq).unwrap();
                    let other = if child_is_it { std::mem::replace(&mut seq, child) } else { child };
                    lane.resume(other, Request::new(random_tokens(11, 25, case.files.spec().vocab), 30));
                    from = keep;
                }
                lane.resume(seq, case.request(rest, MORE));
                lane.finish(&[seq]);
                case.check(&format!("resumed after {keep} tokens, junk {junk}, fork {fork:?}"), &lane, seq, from);
            }
        }
        // In the middle of its answer, with nothing new to say.
        let mut lane = Lane::new(&case.files, case.config.clone());
        let seq = lane.submit(case.request(&case.prompt, 10).hold(true));
        lane.finish(&[seq]);
        let first = lane.tokens_of(seq).to_vec();
        lane.resume(seq, case.request(&[], MORE - 10));
        lane.finish(&[seq]);
        let answer = lane.tokens.get_mut(&seq).unwrap();
        answer.splice(..0, first);
        case.check("held and resumed in its answer", &lane, seq, 0);
    });
}

#[test]
fn paused_at_every_opportunity() {
    cases(|case| {
        for threads in [1, 2] {
            let mut lane = Lane::new(&case.files, EngineConfig { threads, ..case.config.clone() });
            let seq = lane.submit(case.whole());
            let mut pauses = 0;
            while !lane.ended.contains_key(&seq) {
                pauses += usize::from(lane.engine.step_within(Duration::ZERO).unwrap() == Status::Paused);
                lane.listen();
            }
            // Before the embedding, and after it and each half of each layer.
            assert!(pauses >= MORE * (2 + 2 * case.files.spec().layers.len()), "{}: {pauses} pauses", case.what);
            case.check("paused", &lane, seq, 0);
        }
    });
}

#[test]
fn seeded_sampling_among_fifteen_random_neighbours() {
    for model in MODELS {
        let sampling = SamplingParams::default().temperature(1.2).top_k(60).top_p(0.95).frequency_penalty(0.2).seed(11);
        let case = Case::new(model, Compute::Fast, KvDType::F16, sampling.clone());
        for step_tokens in [64, 31] {
            let mut lane = Lane::new(&case.files, EngineConfig { step_tokens, ..case.config.clone() });
            let mut requests = case.neighbours(15);
            requests.insert(6, case.whole());
            let seqs: Vec<_> = requests.into_iter().map(|r| lane.submit(r)).collect();
            lane.finish(&seqs);
            case.check(&format!("seeded, in steps of {step_tokens}"), &lane, seqs[6], 0);
        }
        let other = Case::new(model, Compute::Fast, KvDType::F16, sampling.seed(12));
        assert_ne!(case.alone.tokens, other.alone.tokens, "{model}: the seed does nothing");
    }
}
