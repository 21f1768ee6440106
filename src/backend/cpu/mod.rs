//! The CPU backend: packed panels of weights, fork-join threads, kernel tiers chosen at run time.
//!
//! Invariant: a result has the same bits on every tier and for any number of threads.

mod attention;
mod float_env;
mod kv;
mod pool;
mod simd;
mod vector;
