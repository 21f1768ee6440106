//! NEON: two vectors of outputs at a time, and integers by whichever of three ways the processor has.
//!
//! | tier | four k of four outputs |
//! | --- | --- |
//! | `neon` | byte products to 16 bits (`smull`, `smlal`), added in pairs to 32 (`sadalp`) |
//! | `dotprod` | one `sdot` |
//! | `i8mm` | `smmla`: two outputs, two rows and eight k at once; `sdot` for a row without a mate |
//!
//! The instructions of the last two have no stable intrinsics, so they are written as they are.
// Several arrays of registers go in step; iterators over them cost spills.
#![allow(clippy::needless_range_loop)]

use super::four::{self, Four};
use super::{Job, LinearFns, Rows, Tile, scalar};
use crate::backend::cpu::panel::{IQ4NL, IQ4XS, MXFP4, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quant};
use core::arch::aarch64::*;
use core::arch::asm;
use core::marker::PhantomData;
use core::ops::Range;

four::table!(NEON, neon, Neon<Plain>, "neon", 2);
four::table!(DOTPROD, dotprod, Neon<Dot>, "neon,dotprod", 2);
four::table!(I8MM, i8mm, Neon<Matrix>, "neon,dotprod,i8mm", 2);

struct Neon<S>(float32x4_t, PhantomData<S>);

impl<S> Clone for Neon<S> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Neon<S> {}

/// Sums of products of bytes for R rows and V vectors of four outputs.
trait Sums<const R: usize, const V: usize>: Sized {
    /// # Safety
    /// The tier's instructions are there.
    unsafe fn new() -> Self;
    /// Adds two groups of four k. With `small` at most 8 products come to a place, of at most 32 and 127 in size.
    ///
    /// # Safety
    /// Two words of each of R rows at `x`; the tier's instructions are there.
    unsafe fn add(&mut self, groups: [&[int8x16_t; V]; 2], x: *const u32, small: bool);
    /// # Safety
    /// The tier's instructions are there.
    unsafe fn finish(self, small: bool) -> [[int32x4_t; V]; R];
}

/// Which sums a tier has.
trait Kind: 'static {
    type Sums<const R: usize, const V: usize>: Sums<R, V>;
}

struct Plain;
struct Dot;
struct Matrix;

impl Kind for Plain {
    type Sums<const R: usize, const V: usize> = PlainSums<R, V>;
}
impl Kind for Dot {
    type Sums<const R: usize, const V: usize> = DotSums<R, V>;
}
impl Kind for Matrix {
    type Sums<const R: usize, const V: usize> = MatrixSums<R, V>;
}

// The intrinsics ask for nothing beyond the trait's contract: instructions, and what the pointers point to.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<S: Kind> Four for Neon<S> {
    type Sums = int32x4_t;
    type Bytes = uint8x16_t;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        unsafe { Neon(vdupq_n_f32(v), PhantomData) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Neon(vld1q_f32(p), PhantomData) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { vst1q_f32(p, self.0) }
    }
    #[inline(always)]
    unsafe fn halves(p: *const u8) -> Self {
        unsafe { Neon(vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))), PhantomData) }
    }
    #[inline(always)]
    unsafe fn brains(p: *const u8) -> Self {
        unsafe { Neon(vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(p)))), PhantomData) }
    }
    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self {
        unsafe {
            let four = vcreate_u8(u64::from(p.cast::<u32>().read_unaligned()));
            Neon(vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four)))), PhantomData)
        }
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self {
        unsafe {
            let four = vcreate_s8(u64::from(p.cast::<u32>().read_unaligned()));
            Neon(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four)))), PhantomData)
        }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        unsafe { Neon(vmulq_f32(self.0, o.0), PhantomData) }
    }
    #[inline(always)]
    unsafe fn neg(self) -> Self {
        unsafe { Neon(vnegq_f32(self.0), PhantomData) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        unsafe { Neon(vfmaq_f32(c.0, self.0, b.0), PhantomData) }
    }
    #[inline(always)]
    unsafe fn numbers(sums: int32x4_t) -> Self {
        unsafe { Neon(vcvtq_f32_s32(sums), PhantomData) }
    }

    #[inline(always)]
    unsafe fn byte(v: u8) -> uint8x16_t {
        unsafe { vdupq_n_u8(v) }
    }
    #[inline(always)]
    unsafe fn line(p: *const u8) -> uint8x16_t {
        unsafe { vld1q_u8(p) }
    }
    #[inline(always)]
    unsafe fn and(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        unsafe { vandq_u8(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        unsafe { vorrq_u8(a, b) }
    }
    #[inline(always)]
    unsafe fn less(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
        unsafe { vsubq_u8(a, b) }
    }
    #[inline(always)]
    unsafe fn shift(a: uint8x16_t, left: i32) -> uint8x16_t {
        // A negative count shifts to the right.
        unsafe { vshlq_u8(a, vdupq_n_s8(left as i8)) }
    }
    #[inline(always)]
    unsafe fn of(table: &[i8; 16], places: uint8x16_t) -> uint8x16_t {
        unsafe { vqtbl1q_u8(vld1q_u8(table.as_ptr().cast()), places) }
    }

    #[inline(always)]
    unsafe fn dot<const R: usize, const V: usize>(
        q: &[[uint8x16_t; V]; 8],
        x: *const u32,
        from: usize,
        count: usize,
        fit: usize,
    ) -> [[int32x4_t; V]; R] {
        unsafe {
            let small = fit > 1;
            let mut sums = S::Sums::<R, V>::new();
            for g in (from..from + count).step_by(2) {
                let mut two = [[vdupq_n_s8(0); V]; 2];
                for v in 0..V {
                    two[0][v] = vreinterpretq_s8_u8(q[g][v]);
                    two[1][v] = vreinterpretq_s8_u8(q[g + 1][v]);
                }
                sums.add([&two[0], &two[1]], x.add(g * R), small);
            }
            sums.finish(small)
        }
    }
}

/// A word in each lane.
///
/// # Safety
/// A word at `p`.
#[inline(always)]
unsafe fn word(p: *const u32) -> int8x16_t {
    // SAFETY: by the contract; NEON is part of aarch64.
    unsafe { vreinterpretq_s8_u32(vld1q_dup_u32(p)) }
}

/// The first two outputs of each vector, then the others; in 16 bits as long as they fit.
struct PlainSums<const R: usize, const V: usize> {
    short: [[[int16x8_t; 2]; V]; R],
    long: [[[int32x4_t; 2]; V]; R],
}

impl<const R: usize, const V: usize> Sums<R, V> for PlainSums<R, V> {
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: by the contract.
        unsafe { PlainSums { short: [[[vdupq_n_s16(0); 2]; V]; R], long: [[[vdupq_n_s32(0); 2]; V]; R] } }
    }

    #[inline(always)]
    unsafe fn add(&mut self, groups: [&[int8x16_t; V]; 2], x: *const u32, small: bool) {
        for r in 0..R {
            // SAFETY: by the contract.
            unsafe {
                let (xa, xb) = (word(x.add(r)), word(x.add(R + r)));
                for v in 0..V {
                    let (a, b) = (groups[0][v], groups[1][v]);
                    let [low, high] = &mut self.short[r][v];
                    if small {
                        *low = vmlal_s8(*low, vget_low_s8(a), vget_low_s8(xa));
                        *high = vmlal_high_s8(*high, a, xa);
                    } else {
                        // Two products of 128 * 127 fit.
                        *low = vmull_s8(vget_low_s8(a), vget_low_s8(xa));
                        *high = vmull_high_s8(a, xa);
                    }
                    *low = vmlal_s8(*low, vget_low_s8(b), vget_low_s8(xb));
                    *high = vmlal_high_s8(*high, b, xb);
                    if !small {
                        let long = &mut self.long[r][v];
                        *long = [vpadalq_s16(long[0], *low), vpadalq_s16(long[1], *high)];
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn finish(self, small: bool) -> [[int32x4_t; V]; R] {
        // SAFETY: by the contract.
        unsafe {
            let mut sums = [[vdupq_n_s32(0); V]; R];
            for r in 0..R {
                for v in 0..V {
                    let ([low, high], long) = (self.short[r][v], self.long[r][v]);
                    let [low, high] = if small { [vpaddlq_s16(low), vpaddlq_s16(high)] } else { long };
                    sums[r][v] = vpaddq_s32(low, high);
                }
            }
            sums
        }
    }
}

/// `sum[i] += w[4 i..][..4] . x[4 i..][..4]`.
///
/// # Safety
/// The processor has `dotprod`.
#[inline(always)]
unsafe fn sdot(mut sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: by the contract; registers only.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum, in(vreg) w, in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// `sum[2 i + j] += w[8 i..][..8] . x[8 j..][..8]`.
///
/// # Safety
/// The processor has `i8mm`.
#[inline(always)]
unsafe fn smmla(mut sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: by the contract; registers only.
    unsafe {
        asm!(
            "smmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum, in(vreg) w, in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

struct DotSums<const R: usize, const V: usize>([[int32x4_t; V]; R]);

impl<const R: usize, const V: usize> Sums<R, V> for DotSums<R, V> {
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: by the contract.
        unsafe { DotSums([[vdupq_n_s32(0); V]; R]) }
    }

    #[inline(always)]
    unsafe fn add(&mut self, groups: [&[int8x16_t; V]; 2], x: *const u32, _: bool) {
        for g in 0..2 {
            for r in 0..R {
                // SAFETY: by the contract.
                unsafe {
                    let x = word(x.add(g * R + r));
                    for v in 0..V {
                        self.0[r][v] = sdot(self.0[r][v], groups[g][v], x);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn finish(self, _: bool) -> [[int32x4_t; V]; R] {
        self.0
    }
}

/// Rows 2 i and 2 i + 1 share their sums: those of a vector's first two outputs lie at row 2 i, those of its others at row
/// 2 i + 1. A last row without a mate has sums of its own.
struct MatrixSums<const R: usize, const V: usize>([[int32x4_t; V]; R]);

impl<const R: usize, const V: usize> Sums<R, V> for MatrixSums<R, V> {
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: by the contract.
        unsafe { MatrixSums([[vdupq_n_s32(0); V]; R]) }
    }

    #[inline(always)]
    unsafe fn add(&mut self, groups: [&[int8x16_t; V]; 2], x: *const u32, _: bool) {
        // SAFETY: by the contract.
        unsafe {
            for pair in 0..R / 2 {
                let r = 2 * pair;
                // Eight k of a row in each half.
                let (a, b) = (vld1_u32(x.add(r)), vld1_u32(x.add(R + r)));
                let x = vreinterpretq_s8_u32(vcombine_u32(vzip1_u32(a, b), vzip2_u32(a, b)));
                for v in 0..V {
                    // Eight k of an output in each half.
                    let (a, b) = (vreinterpretq_s32_s8(groups[0][v]), vreinterpretq_s32_s8(groups[1][v]));
                    let (first, last) = (vzip1q_s32(a, b), vzip2q_s32(a, b));
                    self.0[r][v] = smmla(self.0[r][v], vreinterpretq_s8_s32(first), x);
                    self.0[r + 1][v] = smmla(self.0[r + 1][v], vreinterpretq_s8_s32(last), x);
                }
            }
            if R % 2 == 1 {
                for g in 0..2 {
                    let x = word(x.add(g * R + R - 1));
                    for v in 0..V {
                        self.0[R - 1][v] = sdot(self.0[R - 1][v], groups[g][v], x);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn finish(mut self, _: bool) -> [[int32x4_t; V]; R] {
        for pair in 0..R / 2 {
            for v in 0..V {
                let (first, last) = (self.0[2 * pair][v], self.0[2 * pair + 1][v]);
                // SAFETY: by the contract.
                (self.0[2 * pair][v], self.0[2 * pair + 1][v]) = unsafe { (vuzp1q_s32(first, last), vuzp2q_s32(first, last)) };
            }
        }
        self.0
    }
}
