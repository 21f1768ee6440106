//! What a caller may ask of the sampler, and the ranges in which it makes sense.
//!
//! Invariant: parameters that [`SamplingParams::validate`] accepted cannot make the sampler fail on a row of finite
//! logits, except by ruling out every token.
#![forbid(unsafe_code)]

use crate::error::SubmitError;
use crate::ids::TokenId;

/// How to choose the next token. The default is greedy decoding with everything else off, so that a program says the
/// same thing every time until it asks for more; with `temperature(1.0)` the model's own distribution is sampled.
///
/// The steps run in this order, which is that of Hugging Face transformers: `logit_bias`, `banned`, `no_repeat_ngram`,
/// the three penalties, `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`, `epsilon_cutoff`, `eta_cutoff`. Each
/// filter sees the distribution that the one before left, renormalised. The most probable token always survives, except
/// under `typical_p`, which is made to drop it.
///
/// With `temperature` 0 the filters have nothing to say: the largest logit after bias and penalties wins, the lowest
/// token id among equals.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits: below 1 sharper, above 1 flatter, 0 greedy. Default 0.
    pub temperature: f32,
    /// Keeps the `top_k` largest logits and whatever equals the smallest of them. 0, the default, is off.
    pub top_k: usize,
    /// Keeps the most probable tokens until their sum reaches `top_p`, at least one. Among equals the lower id goes first.
    /// 1, the default, is off.
    pub top_p: f32,
    /// Keeps tokens at least `min_p` times as probable as the most probable one. 0, the default, is off.
    pub min_p: f32,
    /// Keeps the tokens whose information is nearest to the distribution's entropy until their sum reaches `typical_p`.
    /// 1, the default, is off.
    pub typical_p: f32,
    /// Drops tokens less probable than this; the most probable stays. 0, the default, is off.
    pub epsilon_cutoff: f32,
    /// Drops tokens less probable than the smaller of this and `sqrt(this) * exp(-entropy)`. 0, the default, is off.
    pub eta_cutoff: f32,
    /// Divides positive logits of tokens in the window, multiplies negative ones, once however often they occur.
    /// Above 1 discourages. 1, the default, is off.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit once for each time it occurs in the window. 0, the default, is off.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it occurs in the window. 0, the default, is off.
    pub presence_penalty: f32,
    /// How many of the last tokens the penalties look at, prompt and answer alike. The default, `usize::MAX`, is all of
    /// them; 0 is none.
    pub penalty_window: usize,
    /// Never completes a run of this many tokens that the prompt or the answer already holds. 0, the default, is off.
    pub no_repeat_ngram: usize,
    /// Added to the logits of these tokens, before everything else. Entries for the same token add up;
    /// `f32::NEG_INFINITY` bans it.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Tokens that must not come.
    pub banned: Vec<TokenId>,
    /// Chooses the random numbers. Equal seeds give equal answers: nothing else about the draws varies. Default 0.
    pub seed: u64,
    /// Asks for the log-probability of the chosen token and of the given number of most probable ones, from the model's
    /// own distribution: before bias, penalties, temperature and filters. `Some(0)` is the chosen token alone.
    pub logprobs: Option<u8>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            epsilon_cutoff: 0.0,
            eta_cutoff: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: usize::MAX,
            no_repeat_ngram: 0,
            logit_bias: Vec::new(),
            banned: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

macro_rules! setters {
    ($($name:ident: $type:ty),* $(,)?) => {
        impl SamplingParams {
            $(
                #[doc = concat!("With [`", stringify!($name), "`](Self#structfield.", stringify!($name), ") set.")]
                #[must_use]
                pub fn $name(mut self, $name: $type) -> Self {
                    self.$name = $name;
                    self
                }
            )*
        }
    };
}

setters! {
    temperature: f32, top_k: usize, top_p: f32, min_p: f32, typical_p: f32, epsilon_cutoff: f32, eta_cutoff: f32,
    repetition_penalty: f32, frequency_penalty: f32, presence_penalty: f32, penalty_window: usize,
    no_repeat_ngram: usize, logit_bias: Vec<(TokenId, f32)>, banned: Vec<TokenId>, seed: u64, logprobs: Option<u8>,
}

impl SamplingParams {
    /// True where no draw is needed.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// The seed of the `i`-th of several samples of one request, from 0: `seed ^ mix(i)`, where `mix` is the finaliser of
    /// MurmurHash3 for 64 bits, a bijection that leaves 0 as it is. So the first has the seed itself, no two of a seed have the
    /// same, and samples of neighbouring seeds have nothing in common. It never changes, as no draw of a seed does.
    pub fn sample_seed(&self, i: u64) -> u64 {
        let x = (i ^ i >> 33).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        let x = (x ^ x >> 33).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
        self.seed ^ x ^ x >> 33
    }

    /// Refuses what has no meaning for a vocabulary of `vocab` tokens, naming the parameter, its range and the value.
    pub fn validate(&self, vocab: usize) -> Result<(), SubmitError> {
        let share = |v: f32| (0.0..=1.0).contains(&v);
        let numbers = [
            (
                "temperature",
                self.temperature,
                "a finite number, 0 or more",
                self.temperature.is_finite() && self.temperature >= 0.0,
            ),
            ("top_p", self.top_p, SHARE, share(self.top_p)),
            ("min_p", self.min_p, SHARE, share(self.min_p)),
            ("typical_p", self.typical_p, SHARE, share(self.typical_p)),
            ("epsilon_cutoff", self.epsilon_cutoff, SHARE, share(self.epsilon_cutoff)),
            ("eta_cutoff", self.eta_cutoff, SHARE, share(self.eta_cutoff)),
            (
                "repetition_penalty",
                self.repetition_penalty,
                "a finite number above 0",
                self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0,
            ),
            ("frequency_penalty", self.frequency_penalty, "a finite number", self.frequency_penalty.is_finite()),
            ("presence_penalty", self.presence_penalty, "a finite number", self.presence_penalty.is_finite()),
        ];
        for (name, value, expected, good) in numbers {
            if !good {
                return Err(refusal(name, expected, value));
            }
        }
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab {
                return Err(refusal("logit_bias", "tokens of the vocabulary", format!("token {token} of {vocab}")));
            }
            if !bias.is_finite() && bias != f32::NEG_INFINITY {
                return Err(refusal("logit_bias", "finite numbers or -inf", format!("{bias} for token {token}")));
            }
        }
        match self.banned.iter().find(|&&token| token as usize >= vocab) {
            Some(token) => Err(refusal("banned", "tokens of the vocabulary", format!("token {token} of {vocab}"))),
            None => Ok(()),
        }
    }

    /// True where the counts of past tokens matter.
    pub(crate) fn penalises(&self) -> bool {
        self.penalty_window > 0
            && (self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0)
    }
}

fn refusal(name: &'static str, expected: &'static str, found: impl ToString) -> SubmitError {
    SubmitError::Parameter { name, expected, found: found.to_string() }
}

const SHARE: &str = "a number from 0 to 1";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_is_greedy_and_valid() {
        let params = SamplingParams::default();
        assert!(params.is_greedy() && !params.penalises());
        assert_eq!(params.validate(1), Ok(()));
        assert_eq!(params.validate(0), Ok(()));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let p = SamplingParams::default;
        let cases = [
            ("temperature", p().temperature(f32::NAN)),
            ("temperature", p().temperature(-0.1)),
            ("temperature", p().temperature(f32::INFINITY)),
            ("top_p", p().top_p(1.01)),
            ("top_p", p().top_p(-1e-9)),
            ("top_p", p().top_p(f32::NAN)),
            ("min_p", p().min_p(2.0)),
            ("typical_p", p().typical_p(f32::NAN)),
            ("epsilon_cutoff", p().epsilon_cutoff(-1.0)),
            ("eta_cutoff", p().eta_cutoff(f32::INFINITY)),
            ("repetition_penalty", p().repetition_penalty(0.0)),
            ("repetition_penalty", p().repetition_penalty(-1.0)),
            ("repetition_penalty", p().repetition_penalty(f32::NAN)),
            ("frequency_penalty", p().frequency_penalty(f32::NAN)),
            ("presence_penalty", p().presence_penalty(f32::INFINITY)),
            ("logit_bias", p().logit_bias(vec![(0, 1.0), (8, 0.0)])),
            ("logit_bias", p().logit_bias(vec![(1, f32::NAN)])),
            ("logit_bias", p().logit_bias(vec![(1, f32::INFINITY)])),
            ("banned", p().banned(vec![7, u32::MAX])),
        ];
        for (expected, params) in cases {
            match params.validate(8) {
                Err(SubmitError::Parameter { name, .. }) => assert_eq!(name, expected, "{params:?}"),
                other => panic!("{params:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn borders_are_accepted() {
        let p = SamplingParams::default;
        for params in [
            p().top_p(0.0).min_p(1.0).typical_p(0.0),
            p().top_k(usize::MAX).temperature(f32::MAX),
            p().temperature(f32::MIN_POSITIVE).repetition_penalty(f32::MIN_POSITIVE),
            p().logit_bias(vec![(7, f32::NEG_INFINITY), (7, f32::MAX)]).banned(vec![7]),
        ] {
            assert_eq!(params.validate(8), Ok(()), "{params:?}");
        }
    }
}
