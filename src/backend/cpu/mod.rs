//! The CPU backend: packed panels of weights, fork-join threads, kernel tiers chosen at run time. One [`Cpu`] is one set of
//! threads; nothing global, and no thread where one is asked for.
//!
//! | file | holds |
//! | --- | --- |
//! | `ops` | the [`Backend`](super::Backend) operations, each a few lines over the files below |
//! | `pool`, `float_env` | threads, and the floating-point mode they compute in |
//! | `arena` | memory on huge pages |
//! | `panel`, `weight` | how weights lie, and how they come there from a file |
//! | `unpack` | from panels back to the file's rows |
//! | `acts`, `simd/linear` | matrices |
//! | `kv`, `attention`, `simd/attention` | the cache and what reads it |
//! | `vector`, `simd/vector` | norms, rotations, activations |
//! | `moe` | mixtures of experts |
//! | `peak` | what a core can do at most |
//!
//! Invariant: a result has the same bits on every tier and for any number of threads.

mod acts;
mod arena;
mod attention;
mod float_env;
mod kv;
mod moe;
mod ops;
mod panel;
mod peak;
mod pool;
mod simd;
mod step;
#[cfg(test)]
mod synthetic;
mod unpack;
mod vector;
mod weight;

pub use kv::CpuKv;
pub use peak::Peak;
pub use step::CpuStep;
pub use unpack::{PANEL_LAYOUT, check_panels, has_panels, unpack};
pub use weight::CpuWeight;

use crate::error::ConfigError;
use arena::{Aligned, Arena};
use pool::Pool;
use simd::Tier;

/// What a [`Cpu`] is built with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CpuOptions {
    /// Threads that compute, the caller's among them: 1 starts none.
    pub threads: usize,
    /// Name of the kernel tier, one of [`Cpu::tiers`]. `None` takes the one that the environment variable `LOQUAT_CPU` names,
    /// or without it the fastest that the machine has. All give the same bits.
    pub tier: Option<String>,
    /// How matrices are multiplied.
    pub compute: Compute,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions { threads: 1, tier: None, compute: Compute::default() }
    }
}

/// How matrices are multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Compute {
    /// f32 activations against exactly dequantised weights: the instrument for comparisons. Quantised weights are decoded
    /// anew for every product, which is slow.
    Exact,
    /// Activations as 8-bit integers, one scale for 32, against quantised weights: the production path. Plain weights are
    /// multiplied as in [`Exact`](Self::Exact), and so are quantised formats without a kernel of their own.
    #[default]
    Fast,
}

/// This machine's processor as a device. `Send`: it may move between threads; dropping it joins its workers.
pub struct Cpu {
    pool: Pool,
    /// That the pool has, or is to have.
    threads: usize,
    tier: &'static Tier,
    compute: Compute,
    arena: Arena,
}

/// Activations on the CPU: f32 values on cache lines.
pub struct CpuBuf(Aligned<f32>);

impl Cpu {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] for a number of threads out of range or refused by the system, and for a tier that this
    /// machine does not run.
    pub fn new(options: &CpuOptions) -> Result<Self, ConfigError> {
        let mut cpu = Self::unstarted(options)?;
        cpu.pool = Pool::new(options.threads)
            .map_err(|e| ConfigError::invalid("threads", "as many as the system allows", format!("{} ({e})", options.threads)))?;
        Ok(cpu)
    }

    /// The same without its threads: for planning memory, which depends on how many there will be.
    ///
    /// # Errors
    /// As [`new`](Self::new), but for the system's refusal.
    pub fn unstarted(options: &CpuOptions) -> Result<Self, ConfigError> {
        let tier = Tier::choose(options.tier.as_deref())?;
        if !(1..=MAX_THREADS).contains(&options.threads) {
            return Err(ConfigError::invalid("threads", format!("1 to {MAX_THREADS}"), options.threads));
        }
        let pool = Pool::new(1).expect("one thread is the caller");
        Ok(Cpu { pool, threads: options.threads, tier, compute: options.compute, arena: Arena::default() })
    }

    /// Names of the tiers that this machine runs, the slowest first.
    pub fn tiers() -> impl Iterator<Item = &'static str> {
        Tier::available().map(|t| t.name)
    }

    /// Threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// How matrices are multiplied.
    pub fn compute(&self) -> Compute {
        self.compute
    }
}

/// More than any machine has cores to spare; guards against a number that was never meant as one.
const MAX_THREADS: usize = 1024;
