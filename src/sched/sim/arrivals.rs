//! Requests out of a seed: Poisson arrivals of a mix of kinds. Every number is a function of (seed, request, what it is for), so
//! that a longer list begins like a shorter one; and as the logarithms are software, it is the same list on every machine.
#![forbid(unsafe_code)]

use super::SimError;
use crate::sample::{Draws, Stream};
use std::time::Duration;

/// One request of a simulation. Times are durations since its start, or since the request's arrival where that is said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Arrival {
    /// When it comes.
    pub at: Duration,
    /// Tokens of its prompt, the shared prefix included; at least 1.
    pub prompt_tokens: usize,
    /// Tokens that it generates; at least 1.
    pub output_tokens: usize,
    /// Higher is more urgent.
    pub priority: i32,
    /// When it should be complete, after its arrival.
    pub deadline: Option<Duration>,
    /// When its owner gives up, after its arrival.
    pub cancel: Option<Duration>,
    /// Tokens at the start of its prompt that it shares with all of the same `prefix`.
    pub prefix_tokens: usize,
    /// Which prefix.
    pub prefix: u64,
}

impl Arrival {
    /// A request without priority, deadline or prefix.
    pub fn new(at: Duration, prompt_tokens: usize, output_tokens: usize) -> Self {
        Arrival { at, prompt_tokens, output_tokens, ..Arrival::default() }
    }

    /// # Errors
    /// [`SimError::Parameter`] for no tokens, and for a prefix longer than the prompt.
    pub(super) fn validate(&self, k: usize) -> Result<(), SimError> {
        for (name, tokens) in [("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)] {
            if tokens == 0 {
                return Err(SimError::parameter(format!("{name} of request {k}"), "at least 1", 0));
            }
        }
        if self.prefix_tokens > self.prompt_tokens {
            let expected = format!("at most its prompt's {}", self.prompt_tokens);
            return Err(SimError::parameter(format!("prefix_tokens of request {k}"), expected, self.prefix_tokens));
        }
        Ok(())
    }
}

/// How long prompts or answers are, in tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Lengths {
    /// All the same.
    Fixed(usize),
    /// Each from `min` to `max` as likely as any other.
    Uniform {
        /// The shortest.
        min: usize,
        /// The longest.
        max: usize,
    },
    /// Many short, a few long: the logarithm is normal, as that of real conversations nearly is.
    LogNormal {
        /// Half are shorter.
        median: f64,
        /// Standard deviation of the logarithm: 1 puts one in six above 2.7 medians.
        sigma: f64,
        /// Longer ones are cut to this.
        max: usize,
    },
}

/// One kind of request in a mix.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RequestKind {
    /// Its share of the mix, relative to the others' weights.
    pub weight: f64,
    /// Lengths of prompts, without the shared prefix.
    pub prompt: Lengths,
    /// Lengths of answers.
    pub output: Lengths,
    /// Length of the prefix that requests of this kind share.
    pub prefix_tokens: usize,
    /// The share of them that have it in front of their prompt.
    pub prefix_share: f64,
    /// Priority of all of them.
    pub priority: i32,
    /// Deadline of all of them, after their arrival.
    pub deadline: Option<Duration>,
    /// The share that is cancelled.
    pub cancel_share: f64,
    /// They are cancelled at any time up to this one, after their arrival.
    pub cancel_within: Duration,
}

impl RequestKind {
    /// With these lengths and nothing else.
    pub fn new(prompt: Lengths, output: Lengths) -> Self {
        RequestKind {
            weight: 1.0,
            prompt,
            output,
            prefix_tokens: 0,
            prefix_share: 0.0,
            priority: 0,
            deadline: None,
            cancel_share: 0.0,
            cancel_within: Duration::ZERO,
        }
    }
}

/// Requests to be generated.
#[derive(Clone, PartialEq, Debug)]
pub struct Arrivals {
    /// Same seed, same requests.
    pub seed: u64,
    /// How many.
    pub requests: usize,
    /// Requests a second on average; gaps are exponential (a Poisson process). Infinite: all at time 0.
    pub rate: f64,
    /// What they are; at least one kind.
    pub mix: Vec<RequestKind>,
}

impl Arrivals {
    /// The requests in the order of their arrival. Cost: O(requests * kinds).
    ///
    /// # Errors
    /// [`SimError::Parameter`] for numbers out of their range.
    pub fn generate(&self) -> Result<Vec<Arrival>, SimError> {
        self.validate()?;
        let draws = Draws::new(self.seed);
        let whole: f64 = self.mix.iter().map(|k| k.weight).sum();
        let mut at = 0.0;
        let mut list = Vec::new();
        for r in 0..self.requests {
            let draw = |what: What| draws.uniform(r as u64 * WHATS + what as u64, Stream::Token);
            at += -libm::log(1.0 - draw(What::Gap)) / self.rate;
            let mut share = draw(What::Kind) * whole;
            let chosen = self.mix.iter().position(|k| {
                share -= k.weight;
                share < 0.0
            });
            // Rounding can leave a crumb of the whole; it belongs to the last kind.
            let prefix = chosen.unwrap_or(self.mix.len() - 1);
            let kind = &self.mix[prefix];
            let shared = if draw(What::Prefix) < kind.prefix_share { kind.prefix_tokens } else { 0 };
            let prompt = kind.prompt.draw(draw(What::Prompt), draw(What::PromptAngle));
            let late = |_| SimError::parameter("arrival in seconds", "at most 2^64 - 1", at);
            list.push(Arrival {
                at: Duration::try_from_secs_f64(at).map_err(late)?,
                prompt_tokens: prompt.saturating_add(shared),
                output_tokens: kind.output.draw(draw(What::Output), draw(What::OutputAngle)),
                priority: kind.priority,
                deadline: kind.deadline,
                cancel: (draw(What::Cancel) < kind.cancel_share).then(|| kind.cancel_within.mul_f64(draw(What::CancelAt))),
                prefix_tokens: shared,
                prefix: prefix as u64,
            });
        }
        Ok(list)
    }

    fn validate(&self) -> Result<(), SimError> {
        let number = |name: &str, value: f64, expected: &str, good: bool| match good {
            true => Ok(()),
            false => Err(SimError::parameter(name, expected, value)),
        };
        number("rate", self.rate, "more than 0", self.rate > 0.0)?;
        if self.mix.is_empty() {
            return Err(SimError::parameter("mix", "at least one kind", 0));
        }
        for kind in &self.mix {
            number("weight", kind.weight, "a finite number, more than 0", kind.weight.is_finite() && kind.weight > 0.0)?;
            for (name, share) in [("prefix_share", kind.prefix_share), ("cancel_share", kind.cancel_share)] {
                number(name, share, "0 to 1", (0.0..=1.0).contains(&share))?;
            }
            kind.prompt.validate("prompt")?;
            kind.output.validate("output")?;
        }
        Ok(())
    }
}

impl Lengths {
    fn validate(self, name: &str) -> Result<(), SimError> {
        let (good, expected) = match self {
            Lengths::Fixed(n) => (n > 0, "at least 1"),
            Lengths::Uniform { min, max } => (1 <= min && min <= max, "1 <= min <= max"),
            Lengths::LogNormal { median, sigma, max } => {
                let finite = median.is_finite() && sigma.is_finite();
                (finite && median > 0.0 && sigma >= 0.0 && max > 0, "finite numbers, median > 0, sigma >= 0, max >= 1")
            }
        };
        match good {
            true => Ok(()),
            false => Err(SimError::parameter(format!("lengths of the {name}"), expected, format!("{self:?}"))),
        }
    }

    /// From two numbers in [0, 1).
    fn draw(self, u: f64, angle: f64) -> usize {
        match self {
            Lengths::Fixed(n) => n,
            // In f64: `max - min + 1` may not fit. The cast saturates.
            Lengths::Uniform { min, max } => min.saturating_add((u * ((max - min) as f64 + 1.0)) as usize).min(max),
            Lengths::LogNormal { median, sigma, max } => {
                // Box and Muller, 1958.
                let normal = libm::sqrt(-2.0 * libm::log(1.0 - u)) * libm::cos(std::f64::consts::TAU * angle);
                (libm::round(median * libm::exp(sigma * normal)) as usize).clamp(1, max)
            }
        }
    }
}

/// What a number of a request is for.
#[derive(Clone, Copy)]
enum What {
    Gap,
    Kind,
    Prompt,
    PromptAngle,
    Output,
    OutputAngle,
    Prefix,
    Cancel,
    CancelAt,
}

/// At least as many as there are of [`What`].
const WHATS: u64 = 16;
