//! Kernel tiers: one table of function pointers each, chosen once for a backend. Every tier gives the same bits; only speed
//! differs. A new instruction set adds one file a group and one row here.

/// A function with instructions enabled, if any.
macro_rules! enable {
    ("", $($f:tt)*) => { $($f)* };
    ($features:tt, $($f:tt)*) => { #[target_feature(enable = $features)] $($f)* };
}

mod attention;
mod f16;
mod lanes;
mod linear;
mod math;
mod vector;

pub(super) use attention::{AttnKernels, MAX_ROWS, PART_TAIL, PIECE, Stored, VECTORS};
pub(super) use lanes::{Bf16, LANES};
pub(super) use linear::{Input, LinearFns, Product, Products};
pub(super) use vector::VectorKernels;

use crate::error::ConfigError;

/// The kernels of one instruction set.
pub(super) struct Tier {
    /// `scalar`, `avx2` or `avx512`.
    pub(super) name: &'static str,
    /// Matrices.
    pub(super) linear: &'static LinearFns,
    /// Attention over the paged cache.
    pub(super) attention: &'static AttnKernels,
    /// Norms, rotations, activations.
    pub(super) vector: &'static VectorKernels,
}

impl Tier {
    /// The tiers that this machine runs, the slowest first.
    pub(super) fn available() -> impl Iterator<Item = &'static Tier> {
        TIERS.iter().filter(|(_, present)| present()).map(|(tier, _)| *tier)
    }

    /// The fastest of them.
    pub(super) fn best() -> &'static Tier {
        Self::available().last().expect("the scalar tier runs everywhere")
    }

    /// The tier of that name.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] where there is none, or this machine lacks its instructions.
    pub(super) fn named(name: &str) -> Result<&'static Tier, ConfigError> {
        Self::available().find(|t| t.name == name).ok_or_else(|| {
            let names: Vec<_> = Self::available().map(|t| t.name).collect();
            ConfigError::invalid("tier", format!("one that this machine runs: {}", names.join(", ")), name)
        })
    }
}

/// A tier, and whether this machine has its instructions.
type Entry = (&'static Tier, fn() -> bool);

/// The slowest first; of two with the same name a machine runs one.
static TIERS: &[Entry] = &[
    #[cfg(target_arch = "x86_64")]
    (&SCALAR_FMA, has_fma),
    #[cfg(target_arch = "x86_64")]
    (&SCALAR, || !has_fma()),
    #[cfg(not(target_arch = "x86_64"))]
    (&SCALAR, || true),
    #[cfg(target_arch = "x86_64")]
    (&AVX2, has_avx2),
    #[cfg(target_arch = "x86_64")]
    (&AVX512, has_avx512),
];

static SCALAR: Tier = Tier { name: "scalar", linear: &linear::SCALAR, attention: &attention::SCALAR, vector: &vector::SCALAR };
/// The scalar code, compiled for machines with FMA: `mul_add` is a slow call without.
#[cfg(target_arch = "x86_64")]
static SCALAR_FMA: Tier =
    Tier { name: "scalar", linear: &linear::SCALAR_FMA, attention: &attention::SCALAR_FMA, vector: &vector::SCALAR_FMA };
#[cfg(target_arch = "x86_64")]
static AVX2: Tier = Tier { name: "avx2", linear: &linear::AVX2, attention: &attention::AVX2, vector: &vector::AVX2 };
#[cfg(target_arch = "x86_64")]
static AVX512: Tier = Tier { name: "avx512", linear: &linear::AVX512, attention: &attention::AVX512, vector: &vector::AVX512 };

/// Attention in the shapes of AVX-512, on the second scalar tier's machines.
#[cfg(all(test, target_arch = "x86_64"))]
pub(super) static AVX512_TWIN: Tier =
    Tier { name: "avx512 twin", linear: &linear::SCALAR_FMA, attention: &attention::AVX512_TWIN, vector: &vector::SCALAR_FMA };

/// Kernels of the second scalar tier may enable `fma`.
#[cfg(target_arch = "x86_64")]
fn has_fma() -> bool {
    is_x86_feature_detected!("fma")
}

/// Kernels of the tier may enable `avx2,fma,f16c`.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Kernels of the tier may enable `avx512f,avx512bw,avx512vl,avx512vnni` and what `avx2` has.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_found_by_name() {
        for tier in Tier::available() {
            assert_eq!(Tier::named(tier.name).unwrap().name, tier.name);
        }
        assert_eq!(Tier::available().next().unwrap().name, "scalar");
        let error = Tier::named("avx1024").err().unwrap().to_string();
        assert!(error.contains("avx1024") && error.contains(Tier::best().name), "{error}");
    }
}
