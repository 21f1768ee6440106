//! Several answers to one prompt: the prompt is run once, and the best answers can be picked out.
//!
//! ```text
//! first       waits -> runs the prompt -> goes on
//! others      parked ------------------> its blocks, and a token of their own from the same row of logits
//! ```
//!
//! Where fewer may run at a time than there are, the rest have their first token, too, and wait for a place with the prompt cached.
//! If the first ends before its prompt does, the next one takes over. Once the prompt is run nothing ties them together.
//!
//! Invariant: each says, bit for bit, what the same request says alone with that one's seed.
#![forbid(unsafe_code)]

use super::{Engine, Event, EventKind, FinishReason, Request, SeqRun};
use crate::error::SubmitError;
use crate::ids::{SeqId, TokenId};
use std::mem;

impl Engine {
    /// Takes a request in `samples` times, as sequences of their own that share the blocks of the prompt, which is run once. The
    /// `i`-th draws from [`SamplingParams::sample_seed(i)`](crate::SamplingParams::sample_seed): the first says what the request
    /// says alone. Greedy ones all say the same. The logits of the prompt's tokens, where they are wanted, are shown once, as those
    /// of the sequence that runs it; the row that the first token comes from is shown for each.
    ///
    /// # Errors
    /// [`SubmitError`] as of [`submit`](Self::submit), and [`SubmitError::Parameter`] for no samples or a request that generates
    /// nothing; the engine is then as it was: all are in, or none.
    pub fn submit_group(&mut self, request: Request, samples: usize) -> Result<Vec<SeqId>, SubmitError> {
        self.sweep();
        let refused = |name, expected, found: &str| Err(SubmitError::Parameter { name, expected, found: found.into() });
        if samples == 0 {
            return refused("samples", "1 or more", "0");
        }
        if request.prefill || request.embedding.is_some() {
            return refused("samples", "a request that generates", "one that does not");
        }
        let counts = self.ledger.counts();
        let limit = self.ledger.config().max_seqs;
        if samples > limit - (counts.waiting + counts.running + counts.held) {
            return Err(SubmitError::QueueFull { limit });
        }
        let mut group = Vec::with_capacity(samples);
        for i in 0..samples {
            match self.submit(request.sample(i)) {
                Ok(seq) => group.push(seq),
                Err(error) => {
                    for seq in group {
                        self.ledger.cancel(seq).expect("submitted a moment ago");
                        self.runs.remove(&seq);
                    }
                    return Err(error);
                }
            }
        }
        for seq in &group[1..] {
            self.ledger.park(*seq);
            self.runs.get_mut(seq).expect("submitted a moment ago").follows = true;
        }
        let first = self.runs.get_mut(&group[0]).expect("submitted a moment ago");
        first.followers = group[1..].iter().rev().copied().collect();
        Ok(group)
    }

    /// Gives those that waited for a sequence's prompt, all of it run and nothing else, a part in it; the next one last.
    pub(super) fn join_followers(&mut self, seq: SeqId) -> Vec<SeqId> {
        let Some(run) = self.runs.get_mut(&seq) else { return Vec::new() };
        let mut followers = mem::take(&mut run.followers);
        // Places among those that run go to the first in line.
        followers.reverse();
        followers.retain(|follower| {
            let run = self.runs.get_mut(follower).filter(|run| run.follows);
            run.is_some_and(|run| {
                run.follows = false;
                self.ledger.join(*follower, seq)
            })
        });
        followers.reverse();
        followers
    }

    /// Drops what the engine knows of a sequence that ends. Where others waited for its prompt, the next of them runs it.
    pub(super) fn forget_run(&mut self, seq: SeqId) -> Option<SeqRun> {
        let mut run = self.runs.remove(&seq)?;
        if run.asks {
            self.asking.retain(|asking| *asking != seq);
        }
        while let Some(next) = run.followers.pop() {
            if let Some(heir) = self.runs.get_mut(&next).filter(|heir| heir.follows) {
                heir.follows = false;
                heir.followers = mem::take(&mut run.followers);
                self.ledger.unpark(next);
                break;
            }
        }
        Some(run)
    }
}

impl Request {
    fn sample(&self, i: usize) -> Request {
        let mut request = self.clone();
        // Where the caller chooses nothing is drawn.
        if !self.steered {
            request.sampling.seed = self.sampling.sample_seed(i as u64);
        }
        request
    }
}

/// How [`BestOf`] compares answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Ranking {
    /// By the log-probability of the whole answer: the sum over its tokens. Longer ones are less likely.
    Sum,
    /// By the log-probability of a token: the sum divided by the number of tokens, the stop token among them.
    Mean,
}

/// One of the answers to a prompt.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Sample {
    /// The sequence.
    pub seq: SeqId,
    /// What it said, its stop token included.
    pub tokens: Vec<TokenId>,
    /// Sum of the tokens' log-probabilities under the model's own distribution, in the order of the tokens.
    pub logprob: f64,
    /// Why it ended, once it has.
    pub end: Option<FinishReason>,
}

impl Sample {
    /// It came to a stop token, or to `max_tokens`.
    pub fn complete(&self) -> bool {
        matches!(self.end, Some(FinishReason::Stop | FinishReason::Length))
    }

    fn score(&self, ranking: Ranking) -> f64 {
        match ranking {
            Ranking::Sum => self.logprob,
            Ranking::Mean => self.logprob / self.tokens.len().max(1) as f64,
        }
    }
}

/// Several answers to one prompt, and the likeliest among them. Lives on events: it steps nothing.
///
/// ```
/// use loquat::{BestOf, Engine, EngineConfig, Ranking, Request, SamplingParams, Status};
/// # use loquat::weights::{Fill, Synthetic, SyntheticTensor};
/// # let tensor = |name: &str, shape: &[usize]| SyntheticTensor {
/// #     name: name.into(),
/// #     shape: shape.into(),
/// #     format: loquat::FormatId::F32,
/// #     fill: if shape.len() == 1 { Fill::Constant(1.0) } else { Fill::Normal(0.2) },
/// # };
/// # let layer = "model.layers.0";
/// # let weights = Synthetic::new(7, vec![
/// #     tensor("model.embed_tokens.weight", &[96, 32]),
/// #     tensor(&format!("{layer}.input_layernorm.weight"), &[32]),
/// #     tensor(&format!("{layer}.self_attn.q_proj.weight"), &[32, 32]),
/// #     tensor(&format!("{layer}.self_attn.k_proj.weight"), &[16, 32]),
/// #     tensor(&format!("{layer}.self_attn.v_proj.weight"), &[16, 32]),
/// #     tensor(&format!("{layer}.self_attn.o_proj.weight"), &[32, 32]),
/// #     tensor(&format!("{layer}.post_attention_layernorm.weight"), &[32]),
/// #     tensor(&format!("{layer}.mlp.gate_proj.weight"), &[64, 32]),
/// #     tensor(&format!("{layer}.mlp.up_proj.weight"), &[64, 32]),
/// #     tensor(&format!("{layer}.mlp.down_proj.weight"), &[32, 64]),
/// #     tensor("model.norm.weight", &[32]),
/// # ])?;
/// # let config = r#"{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1,
/// #     "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
/// #     "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;
/// # let texts = loquat::SideTexts { config: Some(config.into()), ..Default::default() };
/// # let files = loquat::ModelFiles::from_texts(std::sync::Arc::new(weights), &texts, false)?;
/// let mut engine = Engine::new(&files, EngineConfig { cache_tokens: 256, ..EngineConfig::default() })?;
/// let sampling = SamplingParams::default().temperature(1.0).seed(7);
/// let mut answers = BestOf::submit(&mut engine, Request::new([1, 2, 3], 8).sampling(sampling), 4)?;
/// while !answers.done() {
///     engine.step()?;
///     while let Some(event) = engine.next_event() {
///         answers.take(&event);
///     }
/// }
/// let best = answers.best(2, Ranking::Mean);
/// assert_eq!(best.len(), 2);
/// assert!(best[0].logprob >= best[1].logprob && best[0].tokens.len() == 8);
/// # Ok::<(), loquat::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BestOf {
    samples: Vec<Sample>,
}

impl BestOf {
    /// Submits `samples` [together](Engine::submit_group), with log-probabilities where the request did not ask for any.
    ///
    /// # Errors
    /// As of [`Engine::submit_group`], and [`SubmitError::Parameter`] for a steered request.
    pub fn submit(engine: &mut Engine, mut request: Request, samples: usize) -> Result<Self, SubmitError> {
        if request.steered {
            let (name, expected) = ("steered", "a request that samples its tokens");
            return Err(SubmitError::Parameter { name, expected, found: "one whose caller chooses them".into() });
        }
        request.sampling.logprobs.get_or_insert(0);
        let group = engine.submit_group(request, samples)?;
        let sample = |seq| Sample { seq, tokens: Vec::new(), logprob: 0.0, end: None };
        Ok(BestOf { samples: group.into_iter().map(sample).collect() })
    }

    /// Books an event; false for one of another sequence. A token without a log-probability makes its answer the unlikeliest.
    pub fn take(&mut self, event: &Event) -> bool {
        let Some(sample) = self.samples.iter_mut().find(|s| s.seq == event.seq && s.end.is_none()) else { return false };
        match &event.kind {
            EventKind::Token { token, logprob, .. } => {
                sample.tokens.push(*token);
                sample.logprob += logprob.map_or(f64::NEG_INFINITY, f64::from);
            }
            EventKind::Finished(reason) => sample.end = Some(reason.clone()),
            EventKind::Embedding(_) | EventKind::Choice { .. } => {}
        }
        true
    }

    /// All have ended.
    pub fn done(&self) -> bool {
        self.samples.iter().all(|s| s.end.is_some())
    }

    /// All answers in the order of their samples, as far as they have come.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// The best `k` of those that are [complete](Sample::complete), the best first; fewer where there are fewer. Among equals the
    /// earlier sample comes first.
    pub fn best(&self, k: usize, ranking: Ranking) -> Vec<&Sample> {
        let mut best: Vec<_> = self.samples.iter().filter(|s| s.complete()).collect();
        best.sort_by(|a, b| b.score(ranking).total_cmp(&a.score(ranking)));
        best.truncate(k);
        best
    }
}
