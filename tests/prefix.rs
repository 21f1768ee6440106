//! What is found cached has the bits of what is run: after hits of every length around a block, after preemption by both ways, in
//! a pool that is always too small, with windows, latents and frequencies that follow the length; and pins hold.
#![allow(clippy::unwrap_used)]

mod common;

use common::engines::open;
use common::golden::fixtures;
use common::lane::{Lane, Rows};
use common::text::random_tokens;
use loquat::engine::{EngineConfig, FinishReason, Request};
use loquat::model::ModelFiles;
use loquat::{Compute, KvDType, SamplingParams, SeqId, SubmitError, TokenId};

const MODELS: [&str; 9] = [
    "arch/llama_gqa_tied_llama3",
    "arch/llama_rope_dynamic",
    "arch/phi3_longrope",
    // All layers with a window of 16, some, with sinks.
    "arch/mistral_swa",
    "arch/gemma3_text",
    "arch/gpt_oss",
    // Latents, and experts.
    "arch/deepseek_v2_lite",
    "arch/deepseek_v3",
    "gguf/llama_q4_k_m.gguf",
];
const BLOCK: usize = 16;
/// Past two windows and in the middle of a block. The dynamic model's frequencies change with each token past 64.
const PROMPT: usize = 4 * BLOCK + 5;
const MORE: usize = 20;

struct Case {
    what: String,
    files: ModelFiles,
    config: EngineConfig,
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    tokens: Vec<TokenId>,
    rows: Rows,
}

/// Each model, in a mode of its own.
fn cases(mut f: impl FnMut(&Case)) {
    for (i, model) in MODELS.into_iter().enumerate() {
        let files = open(&fixtures().join(model));
        let kv_dtype = [KvDType::F32, KvDType::F16, KvDType::BF16][i % 3];
        let compute = if i % 2 == 1 { Compute::Fast } else { Compute::Exact };
        let config = EngineConfig {
            compute,
            kv_dtype,
            cache_tokens: 1024,
            max_seqs: 32,
            max_batch: 8,
            step_tokens: 24,
            ..EngineConfig::default()
        };
        let prompt = random_tokens(5, PROMPT, files.spec().vocab);
        let sampling = SamplingParams::default().temperature(0.7).seed(i as u64);
        let mut lane = Lane::new(&files, config.clone());
        let seq = lane.submit(Request::new(prompt.as_slice(), MORE).sampling(sampling.clone()));
        lane.finish(&[seq]);
        assert_eq!(lane.ended[&seq], FinishReason::Length);
        let (said, rows) = (lane.tokens_of(seq).to_vec(), lane.rows_of(seq));
        assert!(rows.keys().copied().eq(PROMPT - 1..PROMPT + MORE - 1));
        f(&Case { what: format!("{model} {compute:?} {kv_dtype:?}"), files, config, prompt, sampling, tokens: said, rows });
    }
}

impl Case {
    fn request(&self) -> Request {
        Request::new(self.prompt.as_slice(), MORE).sampling(self.sampling.clone())
    }

    #[track_caller]
    fn check(&self, how: &str, lane: &Lane, seq: SeqId) {
        assert_eq!(lane.tokens_of(seq), self.tokens, "{}, {how}: tokens", self.what);
        assert!(lane.rows_of(seq) == self.rows, "{}, {how}: other bits", self.what);
    }

    /// Frequencies follow the length: what a shorter prompt has cached is of no use.
    fn follows_length(&self) -> bool {
        self.what.contains("rope")
    }

    /// Runs the first `n` tokens of the prompt, and some that follow them elsewhere.
    fn run_prefix(&self, lane: &mut Lane, n: usize) {
        let other = random_tokens(77, 9, self.files.spec().vocab);
        for end in [&other[..0], &other[..]] {
            let seq = lane.submit(Request::prefill([&self.prompt[..n], end].concat()));
            lane.finish(&[seq]);
        }
    }
}

#[test]
fn hits_of_every_length() {
    cases(|case| {
        for n in [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7, PROMPT - 1, PROMPT] {
            let mut lane = Lane::new(&case.files, case.config.clone());
            case.run_prefix(&mut lane, n);
            let seq = lane.submit(case.request().hold(true));
            lane.finish(&[seq]);
            case.check(&format!("{n} tokens cached"), &lane, seq);
            let hit = lane.engine.view(seq).unwrap().hit();
            match case.follows_length() {
                true => assert!(hit <= n.min(PROMPT - 1)),
                // At least one token runs.
                false => assert_eq!(hit, n.min(PROMPT - 1), "{}: tokens found of {n}", case.what),
            }
        }
    });
}

/// The same request again and again, and a follow-up that nobody held a sequence for.
#[test]
fn whole_prompts_and_what_was_said_after_them() {
    cases(|case| {
        let mut lane = Lane::new(&case.files, case.config.clone());
        let first = lane.submit(case.request());
        lane.finish(&[first]);
        for _ in 0..2 {
            let again: Vec<_> = (0..3).map(|_| lane.submit(case.request())).collect();
            lane.finish(&again);
            again.into_iter().for_each(|seq| case.check("the same again", &lane, seq));
        }
        let whole = [&case.prompt[..], &case.tokens[..]].concat();
        let seq = lane.submit(Request::new(whole.as_slice(), 4).hold(true));
        lane.finish(&[seq]);
        // The last token that was said has not been run.
        let hit = lane.engine.view(seq).unwrap().hit();
        assert!(case.follows_length() || hit == whole.len() - 1, "{}: {hit} of {}", case.what, whole.len());
        let mut fresh = Lane::new(&case.files, case.config.clone());
        let alone = fresh.submit(Request::new(whole.as_slice(), 4));
        fresh.finish(&[alone]);
        assert_eq!(lane.tokens_of(seq), fresh.tokens_of(alone), "{}", case.what);
        assert!(lane.rows_of(seq) == fresh.rows_of(alone), "{}: other bits", case.what);
        let stats = lane.engine.ledger().stats();
        assert!(stats.hit_tokens > 5 * PROMPT as u64 / 2 || case.follows_length(), "{stats:?}");
    });
}

/// Requests of other keys find nothing, and neither do those who want to see their prompt's logits.
#[test]
fn keys_and_prompt_logits_keep_to_themselves() {
    let files = open(&fixtures().join(MODELS[0]));
    let config = EngineConfig { prompt_logits: true, kv_dtype: KvDType::F32, ..EngineConfig::default() };
    let mut lane = Lane::new(&files, config);
    let prompt = random_tokens(1, 40, files.spec().vocab);
    let request = || Request::new(prompt.as_slice(), 3).hold(true);
    let hit = |lane: &mut Lane, request: Request| {
        let seq = lane.submit(request);
        lane.finish(&[seq]);
        let rows = lane.rows_of(seq).len();
        (lane.engine.view(seq).unwrap().hit(), rows)
    };
    assert_eq!(hit(&mut lane, request()), (0, 3));
    assert_eq!(hit(&mut lane, Request { key: 1, ..request() }), (0, 3));
    assert_eq!(hit(&mut lane, Request { prompt_logits: true, ..request() }), (0, 42));
    assert_eq!(hit(&mut lane, request()), (39, 3));
    assert_eq!(hit(&mut lane, Request { key: 1, ..request() }), (39, 3));
}

/// Three that do not fit beside each other: somebody always loses its place, and everybody comes to the same bits.
#[test]
fn preempted_either_way_in_a_pool_that_is_always_full() {
    cases(|case| {
        for swap_tokens in [0, 512] {
            let blocks = (PROMPT + MORE).div_ceil(BLOCK) + 3;
            let config = EngineConfig { cache_tokens: blocks * BLOCK, swap_tokens, ..case.config.clone() };
            let mut lane = Lane::new(&case.files, config);
            let vocab = case.files.spec().vocab;
            let mut seqs = Vec::new();
            for round in 0..3 {
                let other = Request { key: round, ..Request::new(random_tokens(round, 30, vocab), 40) };
                lane.submit(other);
                // Of a key of its own each, so that none lives on what another has cached.
                seqs.push(lane.submit(Request { key: round, ..case.request() }));
                seqs.push(lane.submit(Request { key: 10 + round, ..case.request() }));
                lane.step();
            }
            lane.finish(&seqs);
            seqs.into_iter().for_each(|seq| case.check(&format!("{blocks} blocks, swap {swap_tokens}"), &lane, seq));
            let stats = lane.engine.ledger().stats();
            assert!(stats.preemptions > 0 && stats.evicted_blocks > 0, "{}: {stats:?}", case.what);
            assert_eq!(stats.swaps > 0, swap_tokens > 0, "{}: {stats:?}", case.what);
        }
    });
}

#[test]
fn a_pinned_prefix_outlives_every_flood() {
    cases(|case| {
        let mut lane = Lane::new(&case.files, EngineConfig { cache_tokens: 12 * BLOCK, ..case.config.clone() });
        let system = &case.prompt[..3 * BLOCK + 4];
        case.run_prefix(&mut lane, system.len());
        let longest = lane.engine.max_len();
        let (pin, len) = lane.engine.pin(0, system).unwrap();
        assert_eq!(len, 3 * BLOCK);
        assert!(lane.engine.max_len() <= longest);
        let vocab = case.files.spec().vocab;
        for flood in 0..6 {
            let seq = lane.submit(Request::new(random_tokens(200 + flood, 80, vocab), 30));
            lane.finish(&[seq]);
        }
        let seq = lane.submit(case.request().hold(true));
        lane.finish(&[seq]);
        case.check("pinned", &lane, seq);
        let hit = lane.engine.view(seq).unwrap().hit();
        assert!(hit >= len || case.follows_length(), "{}: {hit} of {len} pinned tokens found", case.what);
        lane.engine.unpin(pin).unwrap();
        assert!(matches!(lane.engine.unpin(pin), Err(SubmitError::Parameter { name: "pin", .. })));
        assert_eq!(lane.engine.max_len(), longest);
        let nothing = lane.engine.pin(0, &random_tokens(999, 40, vocab));
        assert!(matches!(nothing, Err(SubmitError::Parameter { name: "tokens", .. })), "{nothing:?}");
    });
}

/// A model whose layers all have windows runs sequences that are longer than its cache, and a mixed one keeps of its windowed
/// layers what the window shows.
#[test]
fn windows_let_go_of_what_nobody_sees() {
    let files = open(&fixtures().join("arch/mistral_swa"));
    let config = EngineConfig {
        cache_tokens: 4 * BLOCK,
        step_tokens: 24,
        max_batch: 2,
        kv_dtype: KvDType::F32,
        ..EngineConfig::default()
    };
    let prompt = random_tokens(3, 100, files.spec().vocab);
    let mut small = Lane::new(&files, config.clone());
    assert!(small.engine.max_len() >= 128, "{}", small.engine.max_len());
    let mut large = Lane::new(&files, EngineConfig { cache_tokens: 2048, ..config });
    let [a, b] = [&mut small, &mut large].map(|lane| {
        let seq = lane.submit(Request::new(prompt.as_slice(), 28));
        lane.finish(&[seq]);
        (lane.tokens_of(seq).to_vec(), lane.rows_of(seq))
    });
    assert!(a == b, "a cache of four blocks gives other bits");

    let files = open(&fixtures().join("arch/gemma3_text"));
    let config = EngineConfig { cache_tokens: 1 << 14, max_batch: 2, step_tokens: 32, ..EngineConfig::default() };
    let engine = loquat::Engine::new(&files, config).unwrap();
    let groups = &engine.ledger().config().groups;
    assert_eq!((groups.len(), groups[0].blocks, groups[1].window), (2, 1024, Some(16)));
    // Four windows of a block, and three blocks each; two blocks for the step.
    assert_eq!(groups[1].blocks, 4 * (1 + 3) + 2);
}
