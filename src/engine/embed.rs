//! Embeddings: one vector for a whole prompt, pooled from the hidden states after the final norm.
//!
//! Knows no normalisation but the usual one, and no model's own projection. Invariant: states are added up position by
//! position, in f64, each once: chunks, company and preemption change no bit.
#![forbid(unsafe_code)]

use super::{Engine, Event, EventKind, FinishReason, Held, Request, Status};
use crate::error::{Error, RunError, SubmitError};
use crate::ids::{SeqId, TokenId};
use crate::sched::PlanItem;
use std::collections::VecDeque;

/// How the hidden states of a prompt become one vector. The model's card says which; causal models want the last or the mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Pooling {
    /// The mean over all tokens.
    #[default]
    Mean,
    /// The last token's.
    Last,
    /// The first token's, often written CLS.
    First,
}

/// Settings of [`Engine::embed`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EmbedOptions {
    /// How tokens become one vector.
    pub pooling: Pooling,
    /// Scale each vector to length 1, so that the dot product of two is their cosine: see [`normalize`].
    pub normalize: bool,
}

impl Default for EmbedOptions {
    /// The mean, of length 1.
    fn default() -> Self {
        EmbedOptions { pooling: Pooling::Mean, normalize: true }
    }
}

/// Scales a vector to Euclidean length 1. One of zeros stays.
pub fn normalize(vector: &mut [f32]) {
    let sum: f64 = vector.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    let length = sum.sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|v| *v = (f64::from(*v) / length) as f32);
    }
}

impl Request {
    /// The embedding of `tokens` instead of an answer: it comes as [`EventKind::Embedding`], as the model computed it. Nothing is
    /// sampled or appended, so that `tokens` may fill the context, and no logits are computed; the observer is shown no rows.
    /// Needs [`hidden`](super::EngineConfig::hidden). What concerns generation is not looked at, but `max_tokens` must be 0
    /// and `prompt_logits` off. Held, the sequence can be continued by a request that generates.
    pub fn embed(tokens: impl Into<Vec<TokenId>>, pooling: Pooling) -> Self {
        Request { embedding: Some(pooling), ..Request::new(tokens, 0) }
    }
}

/// What is known of an embedding so far. All its memory is there from the start.
pub(super) struct Pool {
    pooling: Pooling,
    /// Ascending positions added up; for [`Pooling::Mean`] alone.
    sums: Vec<f64>,
    vector: Vec<f32>,
}

impl Pool {
    fn new(pooling: Pooling, width: usize) -> Self {
        let sums = vec![0.0; if pooling == Pooling::Mean { width } else { 0 }];
        Pool { pooling, sums, vector: vec![0.0; width] }
    }

    /// True where an item runs positions that count, of those from `seen` on.
    pub(super) fn wants(&self, item: &PlanItem, seen: usize) -> bool {
        match self.pooling {
            Pooling::Mean => item.start + item.len > seen,
            Pooling::Last => item.last,
            Pooling::First => item.start == 0 && seen == 0,
        }
    }

    /// Takes in the states of an item's tokens; says which value is not finite, by position and index.
    fn add(&mut self, item: &PlanItem, seen: usize, states: &[f32]) -> Result<(), (usize, usize, f32)> {
        let width = self.vector.len();
        for (position, state) in (item.start..).zip(states.chunks_exact(width)) {
            let counts = match self.pooling {
                Pooling::Mean => position >= seen,
                Pooling::Last => item.last && position + 1 == item.start + item.len,
                Pooling::First => position == 0 && seen == 0,
            };
            if !counts {
                continue;
            }
            if let Some(at) = state.iter().position(|v| !v.is_finite()) {
                return Err((position, at, state[at]));
            }
            match self.pooling {
                Pooling::Mean => self.sums.iter_mut().zip(state).for_each(|(sum, &v)| *sum += f64::from(v)),
                Pooling::Last | Pooling::First => self.vector.copy_from_slice(state),
            }
        }
        Ok(())
    }

    fn finish(mut self, tokens: usize) -> Vec<f32> {
        for (v, sum) in self.vector.iter_mut().zip(&self.sums) {
            *v = (sum / tokens as f64) as f32;
        }
        self.vector
    }
}

impl Engine {
    /// Embeds each input, all of them in batches, in the order given. Steps the engine until they are done: other sequences go on
    /// meanwhile, and their events wait. For a host that must not block there is [`Request::embed`].
    ///
    /// ```no_run
    /// use loquat::{EmbedOptions, Engine, EngineConfig, ModelFiles};
    ///
    /// let files = ModelFiles::load("model.gguf")?;
    /// let mut engine = Engine::new(&files, EngineConfig { hidden: true, ..EngineConfig::default() })?;
    /// let texts = ["a cat on a mat", "a dog in the fog"];
    /// let tokenizer = files.tokenizer()?;
    /// let tokens = texts.iter().map(|t| tokenizer.encode(t, Default::default())).collect::<Result<Vec<_>, _>>()?;
    /// let vectors = engine.embed(&tokens, &EmbedOptions::default())?;
    /// let cosine: f32 = vectors[0].iter().zip(&vectors[1]).map(|(a, b)| a * b).sum();
    /// # Ok::<(), loquat::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`SubmitError`] for an input that can never run, [`SubmitError::QueueFull`] only where other sequences leave no room for
    /// any; [`RunError`] as [`step`](Self::step) gives it, or of an input's own. None of the inputs is in the engine then.
    pub fn embed<T: AsRef<[TokenId]>>(&mut self, inputs: &[T], options: &EmbedOptions) -> Result<Vec<Vec<f32>>, Error> {
        let mut vectors = vec![Vec::new(); inputs.len()];
        // Dropping one of these ends its sequence.
        let mut under_way: VecDeque<(usize, Held)> = VecDeque::new();
        let mut next = 0;
        while next < inputs.len() || !under_way.is_empty() {
            while let Some(input) = inputs.get(next) {
                match self.submit(Request::embed(input.as_ref(), options.pooling)) {
                    Ok(seq) => under_way.push_back((next, self.own(seq))),
                    Err(SubmitError::QueueFull { .. }) if !under_way.is_empty() => break,
                    Err(error) => return Err(error.into()),
                }
                next += 1;
            }
            let status = self.step()?;
            let before = under_way.len();
            for _ in 0..before {
                let Some((i, held)) = under_way.pop_front() else { break };
                if !self.take_embedding(held.seq(), &mut vectors[i])? {
                    under_way.push_back((i, held));
                }
            }
            match (status, under_way.front()) {
                (Status::Idle(Some(when)), Some(_)) => std::thread::sleep(when.saturating_sub(self.now())),
                (Status::Idle(None), Some((_, held))) => return Err(RunError::Stalled { seq: held.seq() }.into()),
                _ => {}
            }
        }
        if options.normalize {
            vectors.iter_mut().for_each(|v| normalize(v));
        }
        Ok(vectors)
    }

    /// Takes a sequence's events; true once it has ended.
    fn take_embedding(&mut self, seq: SeqId, vector: &mut Vec<f32>) -> Result<bool, RunError> {
        while let Some(event) = self.next_event_of(seq) {
            match event.kind {
                EventKind::Embedding(found) => *vector = found,
                EventKind::Finished(FinishReason::Failed(error)) => return Err(error),
                EventKind::Finished(_) => return Ok(true),
                EventKind::Token { .. } | EventKind::Choice { .. } => unreachable!("nothing is sampled for an embedding"),
            }
        }
        Ok(false)
    }

    /// Where a request wants an embedding, the place for it.
    pub(super) fn admit_embedding(&self, request: &Request) -> Result<Option<Box<Pool>>, SubmitError> {
        let Some(pooling) = request.embedding else { return Ok(None) };
        let refused = |name, expected, found: &str| Err(SubmitError::Parameter { name, expected, found: found.into() });
        if !self.want.hidden {
            return refused("embedding", "an engine built with hidden", "one without");
        }
        if request.max_tokens > 0 {
            return refused("max_tokens", "0 for an embedding", &request.max_tokens.to_string());
        }
        if request.prompt_logits {
            return refused("prompt_logits", "false for an embedding", "true");
        }
        Ok(Some(Box::new(Pool::new(pooling, self.model.spec().hidden))))
    }

    /// Adds the states of the step's `i`-th item, each position once.
    pub(super) fn pool(&mut self, item: &PlanItem, i: usize) -> Result<(), RunError> {
        let run = self.runs.get_mut(&item.seq).expect("looked up a moment ago");
        let pool = run.embedding.as_mut().expect("looked up a moment ago");
        let seen = run.shown;
        run.shown = seen.max(item.start + item.len);
        if !pool.wants(item, seen) {
            return Ok(());
        }
        let (width, states) = (pool.vector.len(), self.logits.states());
        let tokens = self.batch.q_indptr()[i] as usize..self.batch.q_indptr()[i + 1] as usize;
        let all = self.batch.tokens().len() * width;
        if states.len() != all {
            return Err(RunError::NoStates { seq: item.seq, expected: all, found: states.len() });
        }
        pool.add(item, seen, &states[tokens.start * width..tokens.end * width])
            .map_err(|(position, at, value)| RunError::BrokenState { seq: item.seq, position, at, value })
    }

    /// Ends a sequence whose tokens have all been run.
    pub(super) fn embedded(&mut self, seq: SeqId) {
        let tokens = self.ledger.view(seq).expect("a sequence that runs").total();
        let run = self.runs.get_mut(&seq).expect("looked up a moment ago");
        let pool = run.embedding.take().expect("looked up a moment ago");
        self.events.push_back(Event { seq, kind: EventKind::Embedding(pool.finish(tokens)) });
        self.end(seq, FinishReason::Embedded);
    }
}
