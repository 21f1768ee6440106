//! From a row of logits to a token: parameters, penalties, filters and the draw. Knows rows of numbers and token ids,
//! nothing of models, sequences or time, and does no I/O.
//!
//! Invariants: a draw depends on the seed and the position alone, so batching, preemption or drafting cannot change it;
//! every sum runs in a fixed order over software `exp` and `log`, so the same row gives the same token on every PC; a row
//! that holds a NaN is an error, never a token.
//!
//! A [`SamplerState`] belongs to one sequence, a [`Sampler`] is scratch that any number of sequences share:
//!
//! ```
//! use loquat::sample::{Sampler, SamplerState, SamplingParams};
//!
//! let params = SamplingParams::default().temperature(0.7).top_p(0.9).seed(7);
//! let mut state = SamplerState::new(params, 4, 16)?;
//! let mut sampler = Sampler::new(4)?;
//! state.push(2);
//! let token = sampler.sample(&state, &[0.1, 3.0, -1.0, 0.5])?.token;
//! state.push(token);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod draw;
mod exp;
mod params;
mod sampler;
mod select;
mod state;

pub use draw::{Draws, Stream};
pub use params::SamplingParams;
pub use sampler::{Law, SampleError, Sampled, Sampler};
pub use state::SamplerState;
