//! Beam search: of all continuations that are kept at a length, the likeliest few go on. It is a caller like any other: beams are
//! [steered](super::Request::steered) sequences, forks of each other, and the policy knows nothing of them.
//!
//! ```text
//! all beams have their row   rank beam + token by the sum of log-probabilities
//! down to `width` beams      a stop token among the first `width`: the hypothesis is complete; any other token: a beam
//! beams nobody continues     cancelled, their blocks are back; beams with two continuations: forked
//! ```
//!
//! Invariant: the same request gives the same hypotheses whatever else runs; ranks are total: by sum, then beam, then token.
#![forbid(unsafe_code)]

use super::{Engine, EventKind, FinishReason, Held, Request};
use crate::error::SubmitError;
use crate::ids::TokenId;
use crate::sample::SamplingParams;
use std::collections::VecDeque;

/// What a beam search is to do. The rest is the request's: prompt, stop tokens, length, priority.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BeamOptions {
    /// Beams, and hypotheses that are kept.
    pub width: usize,
    /// A hypothesis of `n` generated tokens, its stop token included, has the score `logprob / n^length_penalty`: above 0
    /// longer ones gain. 1 by default.
    pub length_penalty: f64,
    /// When to end before `max_tokens`.
    pub stop: BeamStop,
}

/// When a beam search that has `width` complete hypotheses ends: the `early_stopping` of Hugging Face transformers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum BeamStop {
    /// At once; `True` there.
    First,
    /// When the best beam, scored as if it ended now, is no better than the worst of the hypotheses: `False` there. With a length
    /// penalty above 0 a longer hypothesis could still win.
    #[default]
    Likely,
    /// When no continuation of a beam can be better than the worst of the hypotheses; `"never"` there.
    Sure,
}

impl BeamOptions {
    /// So many beams, a length penalty of 1, [`BeamStop::Likely`].
    pub fn new(width: usize) -> Self {
        BeamOptions { width, length_penalty: 1.0, stop: BeamStop::default() }
    }
}

/// A complete answer of a beam search.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Hypothesis {
    /// What was generated, the stop token included.
    pub tokens: Vec<TokenId>,
    /// Sum of the tokens' log-probabilities.
    pub logprob: f64,
    /// What it is ranked by: see [`BeamOptions::length_penalty`].
    pub score: f64,
}

/// A beam search in an engine that its caller steps. Dropping it ends its sequences at the engine's next call.
///
/// ```
/// use loquat::{BeamOptions, BeamSearch, Engine, EngineConfig, FinishReason, Request};
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
/// let mut search = BeamSearch::start(&mut engine, Request::new([1, 2, 3], 8), BeamOptions::new(4))?;
/// let end = loop {
///     if let Some(end) = search.poll(&mut engine)? {
///         break end;
///     }
///     engine.step()?;
/// };
/// assert_eq!(end, FinishReason::Length);
/// let best = &search.hypotheses()[0];
/// assert_eq!(best.tokens.len(), 8);
/// # Ok::<(), loquat::Error>(())
/// ```
pub struct BeamSearch {
    options: BeamOptions,
    max_tokens: usize,
    stop_tokens: Vec<TokenId>,
    /// In order of rank; all of one length.
    beams: Vec<Beam>,
    /// Beams of the last length that some of `next` continue, by their former places.
    parents: Vec<Option<Beam>>,
    /// Beams that are to be, in order of rank.
    next: VecDeque<Next>,
    /// The best first.
    hypotheses: Vec<Hypothesis>,
    /// Tokens of each beam.
    len: usize,
    end: Option<FinishReason>,
}

struct Beam {
    held: Held,
    tokens: Vec<TokenId>,
    logprob: f64,
    /// The likeliest tokens after it, once they are known.
    top: Option<Vec<(TokenId, f32)>>,
}

/// A beam of the last length and one more token.
#[derive(Clone, Copy)]
struct Next {
    logprob: f64,
    parent: usize,
    token: TokenId,
}

impl BeamSearch {
    /// Submits `width` sequences that share the prompt. Of the request's fields `sampling` must be the default, for nothing is
    /// sampled.
    ///
    /// # Errors
    /// [`SubmitError`] as of [`Engine::submit_group`]; [`SubmitError::Parameter`] for a width of 0, or one that makes 256 or more
    /// together with the stop tokens, a length penalty that is not finite, and requests that are steered or held.
    pub fn start(engine: &mut Engine, request: Request, options: BeamOptions) -> Result<Self, SubmitError> {
        let refused = |name, expected, found: String| Err(SubmitError::Parameter { name, expected, found });
        let mut stop_tokens = request.stop_tokens.clone();
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        // Of each beam so many tokens leave `width` that go on.
        let top = options.width.checked_add(stop_tokens.len()).and_then(|top| u8::try_from(top).ok());
        let (Some(top), 1..) = (top, options.width) else {
            let found = format!("{} and {}", options.width, stop_tokens.len());
            return refused("width", "1 or more, and at most 255 with the stop tokens", found);
        };
        if !options.length_penalty.is_finite() {
            return refused("length_penalty", "a finite number", options.length_penalty.to_string());
        }
        if request.sampling != SamplingParams::default() {
            return refused("sampling", "the default, for a beam search", format!("{:?}", request.sampling));
        }
        if request.steered || request.hold {
            return refused("request", "neither steered nor held, for a beam search", "one that is".into());
        }
        let max_tokens = request.max_tokens;
        // Hypotheses end here, not in the engine.
        let request = Request { stop_tokens: Vec::new(), ..request }.steered(top);
        let group = engine.submit_group(request, options.width)?;
        let beam = |seq| Beam { held: engine.own(seq), tokens: Vec::new(), logprob: 0.0, top: None };
        Ok(BeamSearch {
            options,
            max_tokens,
            stop_tokens,
            beams: group.into_iter().map(beam).collect(),
            parents: Vec::new(),
            next: VecDeque::new(),
            hypotheses: Vec::new(),
            len: 0,
            end: None,
        })
    }

    /// Goes on as far as the engine has come; `None`: step it. The search is over with [`FinishReason::Stop`] by its rule,
    /// [`FinishReason::Length`] at `max_tokens`, when the beams are hypotheses too, and [`FinishReason::Failed`] or
    /// [`FinishReason::Cancelled`] where one of its sequences ended so. Nothing of it is in the engine then.
    ///
    /// # Errors
    /// [`SubmitError`] where a beam could not be forked, as the engine is full of others' sequences or the system has no memory;
    /// the next call tries it again.
    pub fn poll(&mut self, engine: &mut Engine) -> Result<Option<FinishReason>, SubmitError> {
        if self.end.is_none() && self.next.is_empty() && self.listen(engine) {
            self.choose(engine);
        }
        while let (None, Some(&next)) = (&self.end, self.next.front()) {
            match self.branch(engine, next) {
                Ok(beam) => self.beams.push(beam),
                // Somebody else ended it.
                Err(SubmitError::Sequence { .. }) => self.finish(engine, FinishReason::Cancelled),
                Err(error) => return Err(error),
            }
            self.next.pop_front();
        }
        Ok(self.end.clone())
    }

    /// The best complete hypotheses so far, at most `width`, the best first; among equals the one that was complete first.
    pub fn hypotheses(&self) -> &[Hypothesis] {
        &self.hypotheses
    }

    /// Ends the search now. Its sequences are gone from the engine; the hypotheses stay.
    pub fn cancel(&mut self, engine: &mut Engine) {
        if self.end.is_none() {
            self.finish(engine, FinishReason::Cancelled);
        }
    }

    /// Takes the events; true once all beams have their rows.
    fn listen(&mut self, engine: &mut Engine) -> bool {
        let mut ended = None;
        for beam in &mut self.beams {
            while let Some(event) = engine.next_event_for(&beam.held) {
                match event.kind {
                    EventKind::Choice { top } => beam.top = Some(top),
                    EventKind::Finished(reason) => ended = Some(reason),
                    EventKind::Token { .. } | EventKind::Embedding(_) => {}
                }
            }
            if ended.is_none() && engine.owned(&beam.held).is_none() {
                ended = Some(FinishReason::Cancelled);
            }
        }
        if let Some(reason) = ended {
            self.finish(engine, reason);
            return false;
        }
        self.beams.iter().all(|beam| beam.top.is_some())
    }

    /// Ranks all continuations of the beams and decides which become the next ones.
    fn choose(&mut self, engine: &mut Engine) {
        // At first all beams are the same.
        let beams = if self.len == 0 { &self.beams[..1] } else { &self.beams[..] };
        let mut ranked = Vec::new();
        for (parent, beam) in beams.iter().enumerate() {
            let top = beam.top.as_ref().expect("all beams have their rows");
            let next = |&(token, logprob): &(TokenId, f32)| Next { logprob: beam.logprob + f64::from(logprob), parent, token };
            ranked.extend(top.iter().map(next));
        }
        ranked.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then((a.parent, a.token).cmp(&(b.parent, b.token))));
        self.len += 1;
        for (rank, next) in ranked.into_iter().enumerate() {
            if self.next.len() == self.options.width {
                break;
            }
            if self.stop_tokens.binary_search(&next.token).is_err() {
                self.next.push_back(next);
            } else if rank < self.options.width {
                self.complete(next);
            }
        }
        if self.stops() {
            return self.finish(engine, FinishReason::Stop);
        }
        if self.len == self.max_tokens {
            for next in std::mem::take(&mut self.next) {
                self.complete(next);
            }
            return self.finish(engine, FinishReason::Length);
        }
        if self.len == 1 {
            // They are the same, and there is one for each.
            self.next.iter_mut().enumerate().for_each(|(i, next)| next.parent = i);
        }
        self.parents = self.beams.drain(..).map(Some).collect();
        for (i, parent) in self.parents.iter_mut().enumerate() {
            if self.next.iter().all(|next| next.parent != i)
                && let Some(beam) = parent.take()
            {
                release(engine, &beam);
            }
        }
    }

    /// The beam that continues a parent by a token: the parent itself, if it is the last one to, or a fork.
    fn branch(&mut self, engine: &mut Engine, next: Next) -> Result<Beam, SubmitError> {
        let last = self.next.iter().skip(1).all(|later| later.parent != next.parent);
        let place = &mut self.parents[next.parent];
        let parent = place.as_ref().expect("somebody continues it");
        let seq = engine.owned(&parent.held);
        let gone = SubmitError::Sequence { seq: parent.held.seq(), expected: "any state", found: "gone" };
        let seq = seq.ok_or(gone)?;
        let mut tokens = Vec::with_capacity(self.len);
        tokens.extend_from_slice(&parent.tokens);
        tokens.push(next.token);
        let held = match last {
            true => {
                engine.choose(seq, next.token)?;
                place.take().expect("seen a moment ago").held
            }
            false => {
                let fork = engine.fork(seq)?;
                let held = engine.own(fork);
                engine.choose(fork, next.token)?;
                held
            }
        };
        Ok(Beam { held, tokens, logprob: next.logprob, top: None })
    }

    fn complete(&mut self, next: Next) {
        let mut tokens = self.beams[next.parent].tokens.clone();
        tokens.push(next.token);
        let score = self.score(next.logprob, tokens.len());
        let place = self.hypotheses.partition_point(|h| h.score >= score);
        if place < self.options.width {
            self.hypotheses.insert(place, Hypothesis { tokens, logprob: next.logprob, score });
            self.hypotheses.truncate(self.options.width);
        }
    }

    fn score(&self, logprob: f64, len: usize) -> f64 {
        // Of the software kind: the same on every machine.
        logprob / libm::pow(len as f64, self.options.length_penalty)
    }

    fn stops(&self) -> bool {
        let Some(best) = self.next.front() else { return true };
        let Some(worst) = self.hypotheses.get(self.options.width - 1) else { return false };
        match self.options.stop {
            BeamStop::First => true,
            BeamStop::Likely => worst.score >= self.score(best.logprob, self.len),
            // Sums only fall; what they are divided by is largest at the end, or now.
            BeamStop::Sure => {
                let len = if self.options.length_penalty > 0.0 { self.max_tokens } else { self.len };
                worst.score >= self.score(best.logprob, len)
            }
        }
    }

    fn finish(&mut self, engine: &mut Engine, reason: FinishReason) {
        self.end = Some(reason);
        self.next.clear();
        self.beams.drain(..).chain(self.parents.drain(..).flatten()).for_each(|beam| release(engine, &beam));
    }
}

/// Gives a beam's blocks back at once, not at the engine's next call.
fn release(engine: &mut Engine, beam: &Beam) {
    if let Some(seq) = engine.owned(&beam.held) {
        // Its events go with `held`.
        let _ = engine.cancel(seq);
    }
}
