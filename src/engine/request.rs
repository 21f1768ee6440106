//! What goes into an engine and what comes out.
#![forbid(unsafe_code)]

use super::embed::Pooling;
use crate::error::RunError;
use crate::ids::{SeqId, TokenId};
use crate::sample::SamplingParams;
use std::time::Duration;

/// A prompt and what to do with it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt tokens.
    pub tokens: Vec<TokenId>,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// How to choose them.
    pub sampling: SamplingParams,
    /// Tokens that end the generation; they are reported. Empty: only `max_tokens` does.
    pub stop_tokens: Vec<TokenId>,
    /// Higher goes first.
    pub priority: i32,
    /// When the answer is due, after the engine's start; for policies that read it.
    pub deadline: Option<Duration>,
    /// Keep the sequence when it ends, for a follow-up; [`Engine::cancel`](super::Engine::cancel) frees it.
    pub hold: bool,
    /// What is cached of one request is used by others with the same key alone: for tenants who are not to learn from the
    /// time to the first token what others have asked. 0 by default.
    pub key: u64,
    /// Show the logits of the prompt's tokens to the observer; needs
    /// [`prompt_logits`](super::EngineConfig::prompt_logits).
    pub prompt_logits: bool,
    /// Generate nothing: end once the prompt is cached. See [`Request::prefill`].
    pub prefill: bool,
    /// Generate nothing: end with an embedding of the prompt, pooled like this. See [`Request::embed`].
    pub embedding: Option<Pooling>,
    /// The caller chooses the tokens. See [`Request::steered`].
    pub steered: bool,
}

impl Request {
    /// Greedy generation of up to `max_tokens` after `tokens`.
    pub fn new(tokens: impl Into<Vec<TokenId>>, max_tokens: usize) -> Self {
        Request {
            tokens: tokens.into(),
            max_tokens,
            sampling: SamplingParams::default(),
            stop_tokens: Vec::new(),
            priority: 0,
            deadline: None,
            hold: false,
            key: 0,
            prompt_logits: false,
            prefill: false,
            embedding: None,
            steered: false,
        }
    }

    /// Runs `tokens` and generates nothing: what starts with them finds them cached from then on, as long as nobody needs the
    /// room, or for good with [`Engine::pin`](super::Engine::pin). Ends with [`FinishReason::Length`].
    pub fn prefill(tokens: impl Into<Vec<TokenId>>) -> Self {
        Request { prefill: true, ..Request::new(tokens, 0) }
    }

    /// With these sampling parameters.
    pub fn sampling(mut self, sampling: SamplingParams) -> Self {
        self.sampling = sampling;
        self
    }

    /// Ending at any of these tokens.
    pub fn stop_tokens(mut self, stop: impl Into<Vec<TokenId>>) -> Self {
        self.stop_tokens = stop.into();
        self
    }

    /// With this priority.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Kept when it ends.
    pub fn hold(mut self, hold: bool) -> Self {
        self.hold = hold;
        self
    }
}

/// Something that happened to a sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct Event {
    /// Which.
    pub seq: SeqId,
    /// What.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// A token was generated.
    Token {
        /// The token.
        token: TokenId,
        /// Its log-probability under the model's own distribution, where [`SamplingParams::logprobs`] asks for it.
        logprob: Option<f32>,
        /// The likeliest tokens, as many as asked for.
        top: Vec<(TokenId, f32)>,
    },
    /// What a [`Request::embed`] asked for, `[hidden]`; not normalised. Its [`Finished`](Self::Finished) follows.
    Embedding(Vec<f32>),
    /// A [steered](Request::steered) sequence asks for its next token, by [`Engine::choose`](super::Engine::choose).
    Choice {
        /// The likeliest tokens with their log-probabilities under the model's own distribution, the likeliest first, as many
        /// as asked for. Those that the model rules out are missing.
        top: Vec<(TokenId, f32)>,
    },
    /// The sequence has ended. Each submitted sequence has exactly one such event for each submission.
    Finished(FinishReason),
}

/// Why a sequence ended.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum FinishReason {
    /// At one of its stop tokens.
    Stop,
    /// At `max_tokens`.
    Length,
    /// With its embedding.
    Embedded,
    /// By the caller.
    Cancelled,
    /// By an error of its own; others go on.
    Failed(RunError),
}

/// What a call of [`Engine::step`](super::Engine::step) came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Status {
    /// Nothing to do now. With a time, the scheduler wants to be called again then, counted from the engine's start.
    Idle(Option<Duration>),
    /// The budget ended in the middle of a step: call again.
    Paused,
    /// A step was completed.
    Stepped,
}

/// A row that the model computed, shown to the observer before sampling.
#[derive(Clone, Copy, Debug)]
pub struct RowView<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Position of the token whose successor the logits predict.
    pub position: usize,
    /// `[vocab]`.
    pub logits: &'a [f32],
    /// `[hidden]`, or empty: see [`EngineConfig::hidden`](super::EngineConfig::hidden).
    pub hidden: &'a [f32],
}
