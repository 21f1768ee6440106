//! What one core can compute at most with the instructions that a tier's matrices are made of: the figure that a kernel's speed
//! is a share of. Knows no kernel: registers only, no memory.
//!
//! Invariant: a product and its sum count as two operations, in f32 and in 8-bit integers alike.
#![allow(unsafe_code)]

use super::Cpu;

/// Operations a second of one core, in billions.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Peak {
    /// Fused multiplications and additions of f32.
    pub f32_gop_s: f64,
    /// Products of 8-bit integers and their sums: `vpdpbusd` with AVX-512, else `vpmaddubsw` alone, without the instruction that
    /// widens its sums.
    pub int8_gop_s: f64,
}

impl Cpu {
    /// Measures for about 50 ms what one core computes at most with this tier's instructions, of `avx2` and `avx512`; nothing for
    /// the scalar tier, whose instructions are the compiler's choice, and for others, whose figures nobody has asked for yet.
    pub fn peak(&self) -> Option<Peak> {
        #[cfg(target_arch = "x86_64")]
        let peak = x86::peak(self.tier.name);
        #[cfg(not(target_arch = "x86_64"))]
        let peak = None;
        peak
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Peak;
    use core::arch::x86_64::*;
    use std::hint::black_box;
    use std::time::{Duration, Instant};

    /// Of a tier that this machine runs.
    pub(super) fn peak(tier: &str) -> Option<Peak> {
        match tier {
            "avx2" => {
                // SAFETY: a tier is there only where the machine has its instructions, these among them.
                let f32_gop_s = best(|| unsafe { fma_256() });
                // SAFETY: as above.
                let int8_gop_s = best(|| unsafe { maddubs_256() });
                Some(Peak { f32_gop_s, int8_gop_s })
            }
            "avx512" => {
                // SAFETY: as above.
                let f32_gop_s = best(|| unsafe { fma_512() });
                // SAFETY: as above.
                let int8_gop_s = best(|| unsafe { dpbusd_512() });
                Some(Peak { f32_gop_s, int8_gop_s })
            }
            _ => None,
        }
    }

    /// Billions of operations a second in the fastest of many runs: whatever else the machine does only slows it.
    fn best(run: impl Fn() -> u64) -> f64 {
        let (began, mut most) = (Instant::now(), 0.0f64);
        while began.elapsed() < Duration::from_millis(25) {
            let start = Instant::now();
            let operations = run();
            most = most.max(operations as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        most
    }

    /// A loop over independent sums, more of them than an instruction takes cycles: only the units that compute are waited for.
    /// Gives the operations it did.
    macro_rules! peak_loop {
        ($name:ident, $features:literal, $sums:literal, $operations:literal, $zero:expr, $one:expr, $step:expr) => {
            #[target_feature(enable = $features)]
            fn $name() -> u64 {
                const ROUNDS: u64 = 20_000;
                let (mut sums, one) = (black_box([$zero; $sums]), black_box($one));
                for _ in 0..ROUNDS {
                    for sum in &mut sums {
                        *sum = $step(*sum, one);
                    }
                }
                black_box(sums);
                ROUNDS * $sums * $operations
            }
        };
    }

    peak_loop!(fma_256, "avx2,fma", 12, 16, _mm256_setzero_ps(), _mm256_set1_ps(1.0), |s, x| _mm256_fmadd_ps(s, x, x));
    peak_loop!(maddubs_256, "avx2", 12, 64, _mm256_setzero_si256(), _mm256_set1_epi8(1), |s, x| _mm256_maddubs_epi16(s, x));
    peak_loop!(fma_512, "avx512f", 24, 32, _mm512_setzero_ps(), _mm512_set1_ps(1.0), |s, x| _mm512_fmadd_ps(s, x, x));
    peak_loop!(dpbusd_512, "avx512f,avx512vnni", 24, 128, _mm512_setzero_si512(), _mm512_set1_epi8(1), |s, x| {
        _mm512_dpbusd_epi32(s, x, x)
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::CpuOptions;

    #[test]
    fn tiers_that_are_measured_have_a_peak() {
        for tier in Cpu::tiers() {
            let cpu = Cpu::new(&CpuOptions { tier: Some(tier.into()), ..CpuOptions::default() }).unwrap();
            let peak = cpu.peak();
            assert_eq!(peak.is_some(), ["avx2", "avx512"].contains(&tier), "{tier}");
            // No core is a hundred times slower or faster than those of today.
            let plausible = |v: f64| (0.1..1e5).contains(&v);
            assert!(peak.is_none_or(|p| plausible(p.f32_gop_s) && plausible(p.int8_gop_s)), "{tier}: {peak:?}");
        }
    }
}
