//! Kernel tiers: one table of function pointers each, chosen once for a backend. Every tier gives the same bits; only speed
//! differs. A new instruction set adds one file a group and one row here.

/// A function with instructions enabled, if any.
macro_rules! enable {
    ("", $($f:tt)*) => { $($f)* };
    ($features:tt, $($f:tt)*) => { #[target_feature(enable = $features)] $($f)* };
}

mod attention;
mod f16;
mod fused;
mod lanes;
mod linear;
mod math;
mod vector;

pub(super) use attention::{AttnKernels, MAX_ROWS, PART_TAIL, PIECE, Stored, VECTORS};
pub(super) use lanes::{Bf16, LANES};
pub(super) use linear::{Input, LinearFns, Product, Products};
pub(super) use vector::VectorKernels;

use crate::error::ConfigError;
use std::ffi::OsString;

/// The kernels of one instruction set.
pub(super) struct Tier {
    /// As in [`TIERS`].
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

    /// The tier of that name; without one, that of [`ENVIRONMENT`]'s, or the fastest.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] where there is none of that name, or this machine lacks its instructions.
    pub(super) fn choose(name: Option<&str>) -> Result<&'static Tier, ConfigError> {
        Self::chosen(name, std::env::var_os(ENVIRONMENT))
    }

    fn chosen(name: Option<&str>, environment: Option<OsString>) -> Result<&'static Tier, ConfigError> {
        match (name, environment) {
            (Some(name), _) => Self::find("tier", name),
            (None, Some(name)) if !name.is_empty() => Self::find(ENVIRONMENT, &name.to_string_lossy()),
            _ => Ok(Self::best()),
        }
    }

    /// The tier of that name.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] where there is none, or this machine lacks its instructions.
    #[cfg(test)]
    pub(super) fn named(name: &str) -> Result<&'static Tier, ConfigError> {
        Self::find("tier", name)
    }

    fn find(field: &str, name: &str) -> Result<&'static Tier, ConfigError> {
        Self::available().find(|t| t.name == name).ok_or_else(|| {
            let names: Vec<_> = Self::available().map(|t| t.name).collect();
            ConfigError::invalid(field, format!("one that this machine runs: {}", names.join(", ")), name)
        })
    }
}

/// The variable that names the tier of a backend whose options name none. The only one that the library reads.
pub(super) const ENVIRONMENT: &str = "LOQUAT_CPU";

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
    #[cfg(target_arch = "aarch64")]
    (&NEON, || true),
    #[cfg(target_arch = "aarch64")]
    (&DOTPROD, has_dotprod),
    #[cfg(target_arch = "aarch64")]
    (&I8MM, has_i8mm),
    #[cfg(target_arch = "x86_64")]
    (&SSE41, has_sse41),
    #[cfg(target_arch = "x86_64")]
    (&AVX2, has_avx2),
    #[cfg(target_arch = "x86_64")]
    (&AVXVNNI, has_avxvnni),
    #[cfg(target_arch = "x86_64")]
    (&AVX512, has_avx512),
];

static SCALAR: Tier = Tier { name: "scalar", linear: &linear::SCALAR, attention: &attention::SCALAR, vector: &vector::SCALAR };
/// The scalar code, compiled for machines with FMA.
#[cfg(target_arch = "x86_64")]
static SCALAR_FMA: Tier =
    Tier { name: "scalar", linear: &linear::SCALAR_FMA, attention: &attention::SCALAR_FMA, vector: &vector::SCALAR_FMA };
#[cfg(target_arch = "aarch64")]
static NEON: Tier = Tier { name: "neon", linear: &linear::NEON, attention: &attention::NEON, vector: &vector::NEON };
#[cfg(target_arch = "aarch64")]
static DOTPROD: Tier = Tier { name: "dotprod", linear: &linear::DOTPROD, ..NEON };
#[cfg(target_arch = "aarch64")]
static I8MM: Tier = Tier { name: "i8mm", linear: &linear::I8MM, ..NEON };
#[cfg(target_arch = "x86_64")]
static SSE41: Tier = Tier { name: "sse41", linear: &linear::SSE41, attention: &attention::SSE41, vector: &vector::SSE41 };
#[cfg(target_arch = "x86_64")]
static AVX2: Tier = Tier { name: "avx2", linear: &linear::AVX2, attention: &attention::AVX2, vector: &vector::AVX2 };
#[cfg(target_arch = "x86_64")]
static AVXVNNI: Tier = Tier { name: "avxvnni", linear: &linear::AVXVNNI, ..AVX2 };
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

/// Kernels of the tier may enable `neon,dotprod`.
#[cfg(target_arch = "aarch64")]
fn has_dotprod() -> bool {
    std::arch::is_aarch64_feature_detected!("dotprod")
}

/// Kernels of the tier may enable `neon,dotprod,i8mm`.
#[cfg(target_arch = "aarch64")]
fn has_i8mm() -> bool {
    has_dotprod() && std::arch::is_aarch64_feature_detected!("i8mm")
}

/// Kernels of the tier may enable `ssse3,sse4.1`.
#[cfg(target_arch = "x86_64")]
fn has_sse41() -> bool {
    is_x86_feature_detected!("ssse3") && is_x86_feature_detected!("sse4.1")
}

/// Kernels of the tier may enable `avx2,fma,f16c`.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Kernels of the tier may enable what `avx2` has, and write `vpdpbusd` in its VEX encoding.
#[cfg(target_arch = "x86_64")]
fn has_avxvnni() -> bool {
    has_avx2() && is_x86_feature_detected!("avxvnni")
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

    #[test]
    fn options_come_before_the_environment() {
        let choose = |name: Option<&str>, environment: Option<&str>| {
            Tier::chosen(name, environment.map(OsString::from)).map(|t| t.name).map_err(|e| e.to_string())
        };
        let best = Tier::best().name;
        assert_eq!(choose(None, None).unwrap(), best);
        assert_eq!(choose(None, Some("")).unwrap(), best);
        assert_eq!(choose(None, Some("scalar")).unwrap(), "scalar");
        assert_eq!(choose(Some(best), Some("scalar")).unwrap(), best);
        assert_eq!(choose(Some("scalar"), Some("avx1024")).unwrap(), "scalar");
        let error = choose(None, Some("avx1024")).unwrap_err();
        assert!(error.contains(ENVIRONMENT) && error.contains("avx1024") && error.contains(best), "{error}");
        // A tier of another architecture is none of this machine's.
        let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        assert!(choose(Some(foreign), None).is_err());
    }
}
