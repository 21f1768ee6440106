//! The chain from a row to a token, over scratch that is allocated once and shared by all sequences. Knows the order of
//! the steps; what each does to a row stands in the state, how it selects in `select`.
//!
//! Invariant: a call leaves nothing behind that the next one could see, whether it gave a token or an error.
#![forbid(unsafe_code)]

use super::draw::Stream;
use super::params::SamplingParams;
use super::select::{self, Candidates};
use super::state::SamplerState;
use crate::error::{ConfigError, RunError, reserved};
use crate::ids::{SeqId, TokenId};
use thiserror::Error;

/// Turns rows of logits into tokens. Holds scratch only: what it returns depends on the row and the [`SamplerState`].
///
/// Cost a row: greedy is one pass over the vocabulary; `top_k` one more; without `top_k` an `exp` for each token. Nothing
/// is sorted but the heads that `top_p`, `typical_p` and `logprobs` need, and nothing is allocated after construction.
#[derive(Debug)]
pub struct Sampler {
    vocab: usize,
    row: Vec<f32>,
    candidates: Candidates,
    top: Vec<(TokenId, f32)>,
}

/// A token and, if the parameters ask for it, how likely the model itself found it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled<'a> {
    /// The token.
    pub token: TokenId,
    /// Its natural log-probability in the raw row, if [`SamplingParams::logprobs`] is set.
    pub logprob: Option<f32>,
    /// The most probable tokens of the raw row with their log-probabilities, most probable first, as many as asked for.
    pub top: &'a [(TokenId, f32)],
}

/// The distribution that a token is drawn from: what is left after every step of the chain.
#[derive(Clone, Copy, Debug)]
pub struct Law<'a> {
    tokens: &'a [TokenId],
    weights: &'a [f32],
    total: f64,
}

impl<'a> Law<'a> {
    /// The tokens that can come, in rising order.
    pub fn tokens(&self) -> &'a [TokenId] {
        self.tokens
    }

    /// The probability of a token: 0 for those that cannot come. Cost: a binary search.
    pub fn probability(&self, token: TokenId) -> f64 {
        self.tokens.binary_search(&token).map_or(0.0, |at| f64::from(self.weights[at]) / self.total)
    }

    /// Tokens with their probabilities, which sum to 1 up to rounding.
    pub fn iter(&self) -> impl Iterator<Item = (TokenId, f64)> + 'a {
        let total = self.total;
        self.tokens.iter().zip(self.weights).map(move |(&token, &weight)| (token, f64::from(weight) / total))
    }
}

/// Why a row gives no token.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SampleError {
    /// The row holds a NaN.
    #[error("the logits hold a NaN at token {token}")]
    Nan {
        /// The first such token.
        token: TokenId,
    },
    /// The row holds +inf. No distribution follows from it, and no sound arithmetic makes one, so it is refused for greedy
    /// decoding as well.
    #[error("the logits hold +inf at token {token}")]
    Infinite {
        /// The first such token.
        token: TokenId,
    },
    /// Every token is ruled out: by the row, or by bans and n-grams.
    #[error("no token is left: every logit is -inf")]
    NoToken,
    /// The row is not as long as the vocabulary.
    #[error("a row of {found} logits for a vocabulary of {expected}")]
    RowLength {
        /// The vocabulary.
        expected: usize,
        /// The row.
        found: usize,
    },
}

impl SampleError {
    /// The same, naming the sequence.
    pub fn of(self, seq: SeqId) -> RunError {
        match self {
            SampleError::Nan { token } => RunError::NanLogits { seq, token },
            SampleError::Infinite { token } => RunError::InfiniteLogits { seq, token },
            SampleError::NoToken => RunError::NoToken { seq },
            SampleError::RowLength { expected, found } => RunError::RowLength { seq, expected, found },
        }
    }
}

impl Sampler {
    /// Scratch for rows of `vocab` logits.
    ///
    /// # Errors
    /// [`ConfigError::Refused`] where the system has not the memory.
    pub fn new(vocab: usize) -> Result<Self, ConfigError> {
        Ok(Sampler {
            vocab,
            row: reserved("the sampler", vocab)?,
            candidates: Candidates::with_capacity(vocab)?,
            top: reserved("the sampler", u8::MAX as usize)?,
        })
    }

    /// Bytes that [`new`](Self::new) allocates for a vocabulary of `vocab`.
    pub const fn bytes(vocab: usize) -> usize {
        vocab * size_of::<f32>() + Candidates::bytes(vocab) + u8::MAX as usize * size_of::<(TokenId, f32)>()
    }

    /// Logits in a row.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The next token of `state`'s sequence, from the row at its last token. The draw is that of
    /// [`state.position()`](SamplerState::position). The token is not pushed.
    ///
    /// # Errors
    /// [`SampleError`]; the sampler stays usable.
    pub fn sample(&mut self, state: &SamplerState, logits: &[f32]) -> Result<Sampled<'_>, SampleError> {
        let params = state.params();
        let (best, max) = self.check(logits)?;
        let log_total = params.logprobs.map(|n| self.raw_logprobs(logits, max, n));
        let token = if params.is_greedy() {
            self.greedy(state, logits, best)?
        } else {
            self.filter(state, logits, max)?;
            let u = state.draws().uniform(state.position() as u64, Stream::Token);
            self.candidates.pick(u, self.candidates.total())
        };
        let logprob = log_total.map(|log_total| logprob(logits[token as usize], max, log_total));
        let top = if log_total.is_some() { &self.top[..] } else { &[] };
        Ok(Sampled { token, logprob, top })
    }

    /// The law that [`sample`](Self::sample) draws from; greedy decoding has one token with probability 1.
    ///
    /// # Errors
    /// As for [`sample`](Self::sample).
    pub fn probabilities(&mut self, state: &SamplerState, logits: &[f32]) -> Result<Law<'_>, SampleError> {
        let (best, max) = self.check(logits)?;
        if state.params().is_greedy() {
            let token = self.greedy(state, logits, best)?;
            self.candidates.set_one(token);
        } else {
            self.filter(state, logits, max)?;
        }
        let Candidates { tokens, weights, .. } = &self.candidates;
        Ok(Law { tokens, weights, total: self.candidates.total() })
    }

    /// The first maximum of a sound row.
    fn check(&self, logits: &[f32]) -> Result<(TokenId, f32), SampleError> {
        if logits.len() != self.vocab {
            return Err(SampleError::RowLength { expected: self.vocab, found: logits.len() });
        }
        match select::argmax(logits) {
            Err(at) => Err(SampleError::Nan { token: at as TokenId }),
            Ok((at, f32::INFINITY)) => Err(SampleError::Infinite { token: at as TokenId }),
            Ok((_, f32::NEG_INFINITY)) => Err(SampleError::NoToken),
            Ok((at, max)) => Ok((at as TokenId, max)),
        }
    }

    fn greedy(&mut self, state: &SamplerState, logits: &[f32], best: TokenId) -> Result<TokenId, SampleError> {
        if !state.adjusts() {
            return Ok(best);
        }
        self.adjust(state, logits).map(|(token, _)| token)
    }

    /// Copies the row, adjusts the copy, and finds its first maximum.
    fn adjust(&mut self, state: &SamplerState, logits: &[f32]) -> Result<(TokenId, f32), SampleError> {
        self.row.clear();
        self.row.extend_from_slice(logits);
        state.adjust(&mut self.row);
        match select::argmax(&self.row) {
            Ok((at, max)) if max > f32::NEG_INFINITY => Ok((at as TokenId, max)),
            _ => Err(SampleError::NoToken),
        }
    }

    /// Leaves what may be drawn in `candidates`: at least one token.
    fn filter(&mut self, state: &SamplerState, logits: &[f32], max: f32) -> Result<(), SampleError> {
        let params = state.params();
        let adjusts = state.adjusts();
        let max = if adjusts { self.adjust(state, logits)?.1 } else { max };
        let row = if adjusts { &self.row[..] } else { logits };
        let candidates = &mut self.candidates;
        let least = match params.top_k {
            1.. if params.top_k < row.len() => select::kth_largest(row, params.top_k, &mut candidates.weights),
            _ => f32::NEG_INFINITY,
        };
        candidates.collect(row, least, max, params.temperature);
        if params.top_p < 1.0 {
            candidates.keep_head(f64::from(params.top_p));
        }
        if params.min_p > 0.0 {
            // The most probable token is still there and weighs exactly 1.
            candidates.retain(|_, _, weight| weight >= params.min_p);
        }
        if params.typical_p < 1.0 {
            keep_typical(candidates, params.typical_p);
        }
        keep_probable(candidates, params);
        Ok(())
    }

    /// Fills `top`; returns the logarithm of the row's total relative to its maximum.
    fn raw_logprobs(&mut self, logits: &[f32], max: f32, n: u8) -> f64 {
        let log_total = libm::log(select::sum_exp(logits, max));
        select::largest(logits, usize::from(n), &mut self.candidates, &mut self.top);
        for (_, value) in &mut self.top {
            *value = logprob(*value, max, log_total);
        }
        log_total
    }
}

fn logprob(logit: f32, max: f32, log_total: f64) -> f32 {
    (f64::from(logit) - f64::from(max) - log_total) as f32
}

/// A token's information is `log(total) - score`; its distance to the entropy is the key.
fn keep_typical(candidates: &mut Candidates, share: f32) {
    let total = candidates.total();
    let offset = (libm::log(total) - candidates.entropy(total)) as f32;
    candidates.keep_mass(f64::from(share) * total, |score| (offset - score).abs(), true);
}

/// The two cut-offs by probability.
fn keep_probable(candidates: &mut Candidates, params: &SamplingParams) {
    let cut = |candidates: &mut Candidates, least: f64, total: f64| {
        let best = candidates.weights.iter().copied().fold(0.0, f32::max);
        candidates.retain(|_, _, weight| weight == best || f64::from(weight) / total >= least);
    };
    if params.epsilon_cutoff > 0.0 {
        let total = candidates.total();
        cut(candidates, f64::from(params.epsilon_cutoff), total);
    }
    if params.eta_cutoff > 0.0 {
        let (total, eta) = (candidates.total(), f64::from(params.eta_cutoff));
        let by_entropy = libm::sqrt(eta) * libm::exp(-candidates.entropy(total));
        cut(candidates, eta.min(by_entropy), total);
    }
}
