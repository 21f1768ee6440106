//! The lanes of NEON: four registers. It is part of every aarch64, fused multiply-adds and half precision included.

use super::{LANES, Lanes};
use std::arch::aarch64::*;
use std::arch::asm;

/// An expression of intrinsics.
macro_rules! with {
    ($e:expr) => {
        // SAFETY: NEON is part of aarch64; loads and stores are of whole arrays.
        unsafe { $e }
    };
}

/// Lanes 0 to 3, 4 to 7 and so on.
#[derive(Clone, Copy)]
pub(in super::super) struct Neon(float32x4_t, float32x4_t, float32x4_t, float32x4_t);

/// The same function on every quarter.
macro_rules! each {
    ($f:ident, $($x:expr),*) => {
        with!(Neon($f($($x.0),*), $f($($x.1),*), $f($($x.2),*), $f($($x.3),*)))
    };
}

/// Fetches the cache line of `p`; any address will do.
#[inline(always)]
pub(in super::super) fn prefetch(p: *const u8) {
    // SAFETY: a prefetch never faults.
    unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags)) };
}

#[inline(always)]
fn widen(h: uint16x4_t) -> float32x4_t {
    with!(vcvt_f32_f16(vreinterpret_f16_u16(h)))
}

#[inline(always)]
fn narrow(low: float32x4_t, high: float32x4_t) -> uint16x8_t {
    with!(vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(low)), vreinterpret_u16_f16(vcvt_f16_f32(high))))
}

impl Lanes for Neon {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        let v = with!(vdupq_n_f32(v));
        Neon(v, v, v, v)
    }
    #[inline(always)]
    fn load(p: &[f32; LANES]) -> Self {
        let p = p.as_ptr();
        with!(Neon(vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))))
    }
    #[inline(always)]
    fn load_f16(p: &[u16; LANES]) -> Self {
        let (a, b) = with!((vld1q_u16(p.as_ptr()), vld1q_u16(p.as_ptr().add(8))));
        let (a_low, a_high, b_low, b_high) = with!((vget_low_u16(a), vget_high_u16(a), vget_low_u16(b), vget_high_u16(b)));
        Neon(widen(a_low), widen(a_high), widen(b_low), widen(b_high))
    }
    #[inline(always)]
    fn store(self, p: &mut [f32; LANES]) {
        let p = p.as_mut_ptr();
        with!(vst1q_f32(p, self.0));
        with!(vst1q_f32(p.add(4), self.1));
        with!(vst1q_f32(p.add(8), self.2));
        with!(vst1q_f32(p.add(12), self.3));
    }
    #[inline(always)]
    fn store_f16(self, p: &mut [u16; LANES]) {
        let p = p.as_mut_ptr();
        with!(vst1q_u16(p, narrow(self.0, self.1)));
        with!(vst1q_u16(p.add(8), narrow(self.2, self.3)));
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        each!(vaddq_f32, self, o)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        each!(vsubq_f32, self, o)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        each!(vmulq_f32, self, o)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        each!(vdivq_f32, self, o)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        each!(vfmaq_f32, c, self, b)
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        // Not the instruction of that name: it makes NaN of any.
        let greater = Masks::greater(self, o);
        greater.select(self, o)
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        let less = Masks::greater(o, self);
        less.select(self, o)
    }
    #[inline(always)]
    fn round(self) -> Self {
        each!(vrndnq_f32, self)
    }
    #[inline(always)]
    fn scale_exponent(self, n: Self) -> Self {
        #[inline(always)]
        fn quarter(p: float32x4_t, n: float32x4_t) -> float32x4_t {
            with!(vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32::<23>(vcvtnq_s32_f32(n)))))
        }
        Neon(quarter(self.0, n.0), quarter(self.1, n.1), quarter(self.2, n.2), quarter(self.3, n.3))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        each!(vabsq_f32, self)
    }
    #[inline(always)]
    fn with_sign(self, o: Self) -> Self {
        let sign = with!(vdupq_n_u32(1 << 31));
        Masks(sign, sign, sign, sign).select(o, self)
    }
    #[inline(always)]
    fn if_less(self, limit: Self, a: Self, b: Self) -> Self {
        Masks::greater(limit, self).select(a, b)
    }
    #[inline(always)]
    fn keep(self, first: i32, end: i32, o: Self) -> Self {
        #[inline(always)]
        fn quarter(first: i32, end: i32) -> uint32x4_t {
            const COUNT: [i32; 4] = [0, 1, 2, 3];
            with!({
                let i = vld1q_s32(COUNT.as_ptr());
                vandq_u32(vcgeq_s32(i, vdupq_n_s32(first)), vcltq_s32(i, vdupq_n_s32(end)))
            })
        }
        let masks =
            Masks(quarter(first, end), quarter(first - 4, end - 4), quarter(first - 8, end - 8), quarter(first - 12, end - 12));
        masks.select(self, o)
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        prefetch(p);
    }
    #[inline(always)]
    fn transpose(m: &mut [Self; LANES]) {
        #[inline(always)]
        fn four(a: float32x4_t, b: float32x4_t, c: float32x4_t, d: float32x4_t) -> [float32x4_t; 4] {
            with!({
                let (ab, cd) = (vtrn1q_f32(a, b), vtrn1q_f32(c, d));
                let (ab_odd, cd_odd) = (vtrn2q_f32(a, b), vtrn2q_f32(c, d));
                let (ab, cd) = (vreinterpretq_f64_f32(ab), vreinterpretq_f64_f32(cd));
                let (ab_odd, cd_odd) = (vreinterpretq_f64_f32(ab_odd), vreinterpretq_f64_f32(cd_odd));
                [
                    vreinterpretq_f32_f64(vtrn1q_f64(ab, cd)),
                    vreinterpretq_f32_f64(vtrn1q_f64(ab_odd, cd_odd)),
                    vreinterpretq_f32_f64(vtrn2q_f64(ab, cd)),
                    vreinterpretq_f32_f64(vtrn2q_f64(ab_odd, cd_odd)),
                ]
            })
        }
        let from = *m;
        for i in 0..4 {
            let [a, b, c, d] = [from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]];
            let blocks = [four(a.0, b.0, c.0, d.0), four(a.1, b.1, c.1, d.1), four(a.2, b.2, c.2, d.2), four(a.3, b.3, c.3, d.3)];
            for (j, v) in blocks.into_iter().flatten().enumerate() {
                match i {
                    0 => m[j].0 = v,
                    1 => m[j].1 = v,
                    2 => m[j].2 = v,
                    _ => m[j].3 = v,
                }
            }
        }
    }
}

/// All ones or zeros for each lane.
#[derive(Clone, Copy)]
struct Masks(uint32x4_t, uint32x4_t, uint32x4_t, uint32x4_t);

impl Masks {
    /// Where `a > b`.
    #[inline(always)]
    fn greater(a: Neon, b: Neon) -> Self {
        with!(Masks(vcgtq_f32(a.0, b.0), vcgtq_f32(a.1, b.1), vcgtq_f32(a.2, b.2), vcgtq_f32(a.3, b.3)))
    }

    /// Bits of `a` where the mask's are set, of `b` elsewhere.
    #[inline(always)]
    fn select(self, a: Neon, b: Neon) -> Neon {
        each!(vbslq_f32, self, a, b)
    }
}
