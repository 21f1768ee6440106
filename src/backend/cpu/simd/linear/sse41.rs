//! SSE4.1 and SSSE3: a vector of outputs at a time. There are no fused multiply-adds, so [`lanes`] makes them of doubles.
//!
//! Integers: the sign of a quant moves to the activation (which is never -128), and `maddubs` sums of magnitudes fit an i16
//! for a while ([`Quant::FIT`]); one `madd` then widens them all.
// Several arrays of registers go in step; iterators over them cost spills.
#![allow(clippy::needless_range_loop)]

use super::four::{self, Four};
use super::{Job, LinearFns, Rows, Tile, scalar};
use crate::backend::cpu::panel::{IQ4NL, IQ4XS, MXFP4, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quant};
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
    type Bytes = __m128i;

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
    unsafe fn numbers(sums: __m128i) -> Self {
        unsafe { Sse41(_mm_cvtepi32_ps(sums)) }
    }

    #[inline(always)]
    unsafe fn byte(v: u8) -> __m128i {
        unsafe { _mm_set1_epi8(v as i8) }
    }
    #[inline(always)]
    unsafe fn line(p: *const u8) -> __m128i {
        unsafe { _mm_loadu_si128(p.cast()) }
    }
    #[inline(always)]
    unsafe fn and(a: __m128i, b: __m128i) -> __m128i {
        unsafe { _mm_and_si128(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m128i, b: __m128i) -> __m128i {
        unsafe { _mm_or_si128(a, b) }
    }
    #[inline(always)]
    unsafe fn less(a: __m128i, b: __m128i) -> __m128i {
        unsafe { _mm_sub_epi8(a, b) }
    }
    #[inline(always)]
    unsafe fn shift(a: __m128i, left: i32) -> __m128i {
        unsafe {
            match left {
                0 => a,
                1.. => _mm_sll_epi16(a, _mm_cvtsi32_si128(left)),
                _ => _mm_srl_epi16(a, _mm_cvtsi32_si128(-left)),
            }
        }
    }
    #[inline(always)]
    unsafe fn of(table: &[i8; 16], places: __m128i) -> __m128i {
        unsafe { _mm_shuffle_epi8(_mm_loadu_si128(table.as_ptr().cast()), places) }
    }

    #[inline(always)]
    unsafe fn dot<const R: usize, const V: usize>(
        q: &[[__m128i; V]; 8],
        x: *const u32,
        from: usize,
        count: usize,
        fit: usize,
    ) -> [[__m128i; V]; R] {
        unsafe {
            let ones = _mm_set1_epi16(1);
            let mut sums = [[_mm_setzero_si128(); V]; R];
            for v in 0..V {
                for first in (from..from + count).step_by(fit) {
                    let mut short = [_mm_setzero_si128(); R];
                    for g in first..(first + fit).min(from + count) {
                        let abs = _mm_abs_epi8(q[g][v]);
                        for r in 0..R {
                            let signed = _mm_sign_epi8(word(x.add(g * R + r)), q[g][v]);
                            short[r] = _mm_add_epi16(short[r], _mm_maddubs_epi16(abs, signed));
                        }
                    }
                    for r in 0..R {
                        sums[r][v] = _mm_add_epi32(sums[r][v], _mm_madd_epi16(short[r], ones));
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
