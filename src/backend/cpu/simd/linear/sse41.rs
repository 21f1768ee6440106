//! SSE4.1 and SSSE3: a vector of outputs at a time. There are no fused multiply-adds, so [`lanes`] makes them of doubles.
//!
//! Integers as in the AVX2 tier: `maddubs` sums of unsigned quants fit an i16 for a while (eight with nibbles: 8 * 2 * 15 *
//! 128 = 30720; four with five bits: 4 * 2 * 31 * 128 = 31744), and one `madd` then widens them all. Signed quants give their
//! sign to the activation (2 * 128 * 127 = 32512 fits: an activation is never -128), and every group is widened.

use super::four::{self, Four};
use super::{Job, LinearFns, Rows, Tile, scalar};
use crate::backend::cpu::panel::{Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0, Quant};
use crate::backend::cpu::simd::lanes::sse41 as lanes;
use core::arch::x86_64::*;
use core::ops::Range;

four::table!(LINEAR, kernels, Sse41, "ssse3,sse4.1", 1);

#[derive(Clone, Copy)]
struct Sse41(__m128);

// The intrinsics ask for nothing beyond the trait's contract: instructions, and what the pointers point to.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Four for Sse41 {
    type Sums = __m128i;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        unsafe { Sse41(_mm_set1_ps(v)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Sse41(_mm_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn halves(p: *const u8) -> Self {
        unsafe { Sse41(lanes::widen(_mm_cvtepu16_epi32(_mm_loadl_epi64(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn brains(p: *const u8) -> Self {
        unsafe { Sse41(_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self {
        unsafe { Sse41(_mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned())))) }
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self {
        unsafe { Sse41(_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned())))) }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        unsafe { Sse41(_mm_mul_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn neg(self) -> Self {
        unsafe { Sse41(_mm_xor_ps(self.0, _mm_set1_ps(-0.0))) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Sse41(lanes::fma(self.0, b.0, c.0))
    }
    #[inline(always)]
    unsafe fn numbers(sums: __m128i, n: i32) -> Self {
        unsafe { Sse41(_mm_cvtepi32_ps(_mm_add_epi32(sums, _mm_set1_epi32(n)))) }
    }

    #[inline(always)]
    unsafe fn nibbles<const R: usize, const V: usize>(q: *const u8, x: *const u32) -> [[__m128i; V]; R] {
        unsafe {
            let (low, ones) = (_mm_set1_epi8(15), _mm_set1_epi16(1));
            let mut sums = [[_mm_setzero_si128(); V]; R];
            for l in 0..4 {
                for v in 0..V {
                    let line = _mm_loadu_si128(q.add(64 * l + 16 * v).cast());
                    let (a, b) = (_mm_and_si128(line, low), _mm_and_si128(_mm_srli_epi16::<4>(line), low));
                    for r in 0..R {
                        let (xa, xb) = (word(x.add(l * R + r)), word(x.add((4 + l) * R + r)));
                        let both = _mm_add_epi16(_mm_maddubs_epi16(a, xa), _mm_maddubs_epi16(b, xb));
                        sums[r][v] = _mm_add_epi16(sums[r][v], both);
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    sums[r][v] = _mm_madd_epi16(sums[r][v], ones);
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn bytes_of<const R: usize, const V: usize>(
        q: *const u8,
        x: *const u32,
        groups: usize,
        signed: bool,
    ) -> [[__m128i; V]; R] {
        unsafe {
            let (ones, flip) = (_mm_set1_epi16(1), _mm_set1_epi8(-128));
            let mut sums = [[_mm_setzero_si128(); V]; R];
            for four in (0..groups).step_by(4) {
                let mut short = [[_mm_setzero_si128(); V]; R];
                for g in four..four + 4 {
                    for v in 0..V {
                        let line = _mm_loadu_si128(q.add(64 * g + 16 * v).cast());
                        let w = if signed { _mm_xor_si128(line, flip) } else { line };
                        let abs = _mm_abs_epi8(w);
                        for r in 0..R {
                            let x = word(x.add(g * R + r));
                            if signed {
                                let pairs = _mm_maddubs_epi16(abs, _mm_sign_epi8(x, w));
                                sums[r][v] = _mm_add_epi32(sums[r][v], _mm_madd_epi16(pairs, ones));
                            } else {
                                short[r][v] = _mm_add_epi16(short[r][v], _mm_maddubs_epi16(line, x));
                            }
                        }
                    }
                }
                if !signed {
                    for r in 0..R {
                        for v in 0..V {
                            sums[r][v] = _mm_add_epi32(sums[r][v], _mm_madd_epi16(short[r][v], ones));
                        }
                    }
                }
            }
            sums
        }
    }
}

/// Four activations in each lane.
///
/// # Safety
/// A word at `p`.
#[inline(always)]
unsafe fn word(p: *const u32) -> __m128i {
    // SAFETY: by the contract.
    unsafe { _mm_set1_epi32(*p as i32) }
}
