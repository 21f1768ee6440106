//! How the AVX2 tier and its variant with AVX-VNNI sum products of bytes. Eight vectors hold 32 k of 8 outputs; a row's
//! activations are one block's words.

use crate::backend::cpu::acts::MAGIC_BITS;
use crate::backend::cpu::panel::{Quant, Zero};
use core::arch::asm;
use core::arch::x86_64::*;
use core::marker::PhantomData;

/// How bytes are multiplied and added.
pub(super) trait Dot: 'static {
    /// Four at once: nothing overflows.
    const FOURS: bool;

    /// The sum of the products of `count` vectors from `from` on with a row's activations, as the bits of an f32 plus
    /// `MAGIC`. `abs` are the magnitudes of signed quants.
    ///
    /// # Safety
    /// `act` has `WORDS` words; the tier's instructions are there.
    unsafe fn dot<Q: Quant>(q: &[__m256i; 8], abs: &[__m256i; 8], act: *const u32, from: usize, count: usize) -> __m256i;
}

/// Where the sum of the vectors from `from` on starts.
///
/// # Safety
/// `act` has `WORDS` words.
#[inline(always)]
unsafe fn start<Q: Quant>(act: *const u32, from: usize) -> i32 {
    // SAFETY: by the contract.
    let word = |i: usize| unsafe { *act.add(i) as i32 };
    match Q::ZERO {
        Zero::Eight => word(2),
        Zero::Sixteen => word(2) + (word(2) - MAGIC_BITS),
        Zero::ThirtyTwo if from == 0 => word(3),
        // 8 and 32 times sums of the whole and of the first half: 32 times that of the second.
        Zero::ThirtyTwo => MAGIC_BITS - 4 * (MAGIC_BITS - word(2)) + (MAGIC_BITS - word(3)),
        Zero::None | Zero::Top => MAGIC_BITS,
    }
}

/// Two to an i16.
pub(super) struct Pairs;

impl Dot for Pairs {
    const FOURS: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dot<Q: Quant>(q: &[__m256i; 8], abs: &[__m256i; 8], act: *const u32, from: usize, count: usize) -> __m256i {
        let product = |g: usize| {
            // SAFETY: by the contract.
            let x = _mm256_set1_epi32(unsafe { *act.add(4 + g) as i32 });
            if Q::SIGNED { _mm256_maddubs_epi16(abs[g], _mm256_sign_epi8(x, q[g])) } else { _mm256_maddubs_epi16(q[g], x) }
        };
        // SAFETY: by the contract.
        let mut sum = _mm256_set1_epi32(unsafe { start::<Q>(act, from) });
        for first in (from..from + count).step_by(Q::FIT) {
            let mut part = product(first);
            for g in first + 1..(first + Q::FIT).min(from + count) {
                part = _mm256_add_epi16(part, product(g));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
        }
        sum
    }
}

/// Four to an i32.
pub(super) struct Fours<I>(PhantomData<I>);

impl<I: Dpbusd> Dot for Fours<I> {
    const FOURS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dot<Q: Quant>(q: &[__m256i; 8], abs: &[__m256i; 8], act: *const u32, from: usize, count: usize) -> __m256i {
        // SAFETY: by the contract.
        unsafe {
            let init = match Q::BITS {
                // 128 times the sum, of which there is 8 times.
                8 => MAGIC_BITS - 16 * (MAGIC_BITS - *act.add(2) as i32),
                _ => start::<Q>(act, from),
            };
            let mut sum = _mm256_set1_epi32(init);
            for g in from..from + count {
                let x = _mm256_set1_epi32(*act.add(4 + g) as i32);
                sum = match Q::SIGNED && Q::BITS != 8 {
                    true => I::dpbusd(sum, abs[g], _mm256_sign_epi8(x, q[g])),
                    false => I::dpbusd(sum, q[g], x),
                };
            }
            sum
        }
    }
}

/// An instruction, or what stands for it.
pub(super) trait Dpbusd: 'static {
    /// `sum + w . x` in each lane: four unsigned bytes by four signed ones, exactly.
    ///
    /// # Safety
    /// The tier's instructions are there.
    unsafe fn dpbusd(sum: __m256i, w: __m256i, x: __m256i) -> __m256i;
}

/// AVX-VNNI. Written as it is: the functions around it are those of a tier that does not have it.
pub(super) struct Vnni;

impl Dpbusd for Vnni {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dpbusd(mut sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: by the contract; registers only.
        unsafe {
            asm!(
                "{{vex}} vpdpbusd {0}, {1}, {2}",
                inout(ymm_reg) sum, in(ymm_reg) w, in(ymm_reg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }
}

/// Even and odd bytes apart.
#[cfg(test)]
pub(super) struct Emulated;

#[cfg(test)]
impl Dpbusd for Emulated {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dpbusd(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        let (w_even, w_odd) = (_mm256_and_si256(w, _mm256_set1_epi16(255)), _mm256_srli_epi16::<8>(w));
        let (x_even, x_odd) = (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x));
        let both = _mm256_add_epi32(_mm256_madd_epi16(w_even, x_even), _mm256_madd_epi16(w_odd, x_odd));
        _mm256_add_epi32(sum, both)
    }
}
