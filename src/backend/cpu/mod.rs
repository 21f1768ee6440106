//! The CPU backend: packed panels of weights, fork-join threads, kernel tiers chosen at run time.
//!
//! Invariant: a result has the same bits on every tier and for any number of threads.

mod acts;
mod arena;
mod float_env;
mod panel;
mod pool;
mod simd;
#[cfg(test)]
mod synthetic;
mod weight;

/// How matrices are multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Compute {
    /// f32 activations against exactly dequantised weights: the instrument for comparisons.
    Exact,
    /// Activations as 8-bit integers, one scale for 32, against quantised weights: the production path. Plain weights are
    /// multiplied as in [`Exact`](Self::Exact).
    #[default]
    Fast,
}
