//! The lanes of SSE4.1: four registers, and in integers and doubles what the processor lacks.

use super::{LANES, Lanes};
use std::arch::x86_64::*;

/// An expression of intrinsics.
macro_rules! with {
    ($e:expr) => {
        // SAFETY: these lanes and functions are used only by functions that enable the tier's instructions, which run only
        // where `Tier::available` found them; loads and stores are of whole arrays.
        unsafe { $e }
    };
}

/// Lanes 0 to 3, 4 to 7 and so on.
#[derive(Clone, Copy)]
pub(in super::super) struct Sse41(__m128, __m128, __m128, __m128);

/// The same function on every quarter.
macro_rules! each {
    ($f:expr, $($x:expr),*) => {
        with!(Sse41($f($($x.0),*), $f($($x.1),*), $f($($x.2),*), $f($($x.3),*)))
    };
}

/// `a * b + c` with one rounding: [`fused`](super::super::fused), twice two lanes.
#[inline(always)]
pub(in super::super) fn fma(a: __m128, b: __m128, c: __m128) -> __m128 {
    #[inline(always)]
    fn half(a: __m128d, b: __m128d, c: __m128d) -> __m128d {
        with!({
            let p = _mm_mul_pd(a, b);
            let s = _mm_add_pd(p, c);
            let back = _mm_sub_pd(s, p);
            let e = _mm_add_pd(_mm_sub_pd(p, _mm_sub_pd(s, back)), _mm_sub_pd(c, back));
            // False where `e` is NaN.
            let inexact = _mm_castpd_si128(_mm_cmplt_pd(_mm_setzero_pd(), _mm_andnot_pd(_mm_set1_pd(-0.0), e)));
            let signs = _mm_srai_epi32::<31>(_mm_castpd_si128(_mm_xor_pd(s, e)));
            // -1 where the rounding went away from zero.
            let back = _mm_and_si128(inexact, _mm_shuffle_epi32::<0b11_11_01_01>(signs));
            let odd = _mm_srli_epi64::<63>(inexact);
            _mm_castsi128_pd(_mm_or_si128(_mm_add_epi64(_mm_castpd_si128(s), back), odd))
        })
    }
    with!({
        let low = half(_mm_cvtps_pd(a), _mm_cvtps_pd(b), _mm_cvtps_pd(c));
        let high = half(_mm_cvtps_pd(_mm_movehl_ps(a, a)), _mm_cvtps_pd(_mm_movehl_ps(b, b)), _mm_cvtps_pd(_mm_movehl_ps(c, c)));
        _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high))
    })
}

/// Four halves, one in the low end of each lane, widened exactly; as `f16::to_f32`.
#[inline(always)]
pub(in super::super) fn widen(h: __m128i) -> __m128 {
    with!({
        let sign = _mm_slli_epi32::<16>(_mm_and_si128(h, _mm_set1_epi32(0x8000)));
        let abs = _mm_and_si128(h, _mm_set1_epi32(0x7fff));
        let moved = _mm_slli_epi32::<13>(abs);
        let normal = _mm_add_epi32(moved, _mm_set1_epi32(112 << 23));
        // 2^-14 + man * 2^-24, and the first taken away: exact, and without a subnormal operand, which would be slow.
        let least = _mm_set1_epi32(113 << 23);
        let small = _mm_sub_ps(_mm_castsi128_ps(_mm_add_epi32(moved, least)), _mm_castsi128_ps(least));
        // The largest exponent again, and for a NaN the quiet bit.
        let quiet = _mm_and_si128(_mm_cmpgt_epi32(abs, _mm_set1_epi32(0x7c00)), _mm_set1_epi32(0x40_0000));
        let special = _mm_or_si128(_mm_add_epi32(normal, _mm_set1_epi32(112 << 23)), quiet);
        let is_small = _mm_cmpgt_epi32(_mm_set1_epi32(0x400), abs);
        let is_special = _mm_cmpgt_epi32(abs, _mm_set1_epi32(0x7bff));
        let v = _mm_blendv_epi8(normal, special, is_special);
        let v = _mm_blendv_epi8(v, _mm_castps_si128(small), is_small);
        _mm_castsi128_ps(_mm_or_si128(v, sign))
    })
}

/// Four f32 to halves, one in the low end of each lane; as `f16::from_f32`.
#[inline(always)]
fn narrow(v: __m128) -> __m128i {
    with!({
        let bits = _mm_castps_si128(v);
        let sign = _mm_and_si128(_mm_srli_epi32::<16>(bits), _mm_set1_epi32(0x8000));
        let abs = _mm_and_si128(bits, _mm_set1_epi32(0x7fff_ffff));
        let odd = _mm_and_si128(_mm_srli_epi32::<13>(abs), _mm_set1_epi32(1));
        let rounded = _mm_srli_epi32::<13>(_mm_add_epi32(_mm_add_epi32(abs, _mm_set1_epi32(0xfff)), odd));
        let normal = _mm_sub_epi32(rounded, _mm_set1_epi32(112 << 10));
        // A subnormal half: adding 0.5 puts its unit, 2^-24, on the last bit of an f32 in [0.5, 1).
        let half = _mm_set1_ps(0.5);
        let small = _mm_sub_epi32(_mm_castps_si128(_mm_add_ps(_mm_castsi128_ps(abs), half)), _mm_castps_si128(half));
        let payload = _mm_and_si128(_mm_srli_epi32::<13>(abs), _mm_set1_epi32(0x3ff));
        let nan = _mm_or_si128(payload, _mm_set1_epi32(0x7e00));
        let h = _mm_blendv_epi8(normal, small, _mm_cmpgt_epi32(_mm_set1_epi32(0x3880_0000), abs));
        let h = _mm_blendv_epi8(h, _mm_set1_epi32(0x7c00), _mm_cmpgt_epi32(abs, _mm_set1_epi32(0x477f_efff)));
        let h = _mm_blendv_epi8(h, nan, _mm_cmpgt_epi32(abs, _mm_set1_epi32(0x7f80_0000)));
        _mm_or_si128(h, sign)
    })
}

impl Lanes for Sse41 {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        let v = with!(_mm_set1_ps(v));
        Sse41(v, v, v, v)
    }
    #[inline(always)]
    fn load(p: &[f32; LANES]) -> Self {
        let p = p.as_ptr();
        with!(Sse41(_mm_loadu_ps(p), _mm_loadu_ps(p.add(4)), _mm_loadu_ps(p.add(8)), _mm_loadu_ps(p.add(12))))
    }
    #[inline(always)]
    fn load_f16(p: &[u16; LANES]) -> Self {
        let p = p.as_ptr().cast::<__m128i>();
        let (a, b) = with!((_mm_loadu_si128(p), _mm_loadu_si128(p.add(1))));
        let zero = with!(_mm_setzero_si128());
        let (low, high) = with!((_mm_unpacklo_epi16(a, zero), _mm_unpackhi_epi16(a, zero)));
        let (low_b, high_b) = with!((_mm_unpacklo_epi16(b, zero), _mm_unpackhi_epi16(b, zero)));
        Sse41(widen(low), widen(high), widen(low_b), widen(high_b))
    }
    #[inline(always)]
    fn store(self, p: &mut [f32; LANES]) {
        let p = p.as_mut_ptr();
        with!(_mm_storeu_ps(p, self.0));
        with!(_mm_storeu_ps(p.add(4), self.1));
        with!(_mm_storeu_ps(p.add(8), self.2));
        with!(_mm_storeu_ps(p.add(12), self.3));
    }
    #[inline(always)]
    fn store_f16(self, p: &mut [u16; LANES]) {
        let p = p.as_mut_ptr().cast::<__m128i>();
        with!(_mm_storeu_si128(p, _mm_packus_epi32(narrow(self.0), narrow(self.1))));
        with!(_mm_storeu_si128(p.add(1), _mm_packus_epi32(narrow(self.2), narrow(self.3))));
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        each!(_mm_add_ps, self, o)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        each!(_mm_sub_ps, self, o)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        each!(_mm_mul_ps, self, o)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        each!(_mm_div_ps, self, o)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Sse41(fma(self.0, b.0, c.0), fma(self.1, b.1, c.1), fma(self.2, b.2, c.2), fma(self.3, b.3, c.3))
    }
    #[inline(always)]
    fn fma_one(a: f32, b: f32, c: f32) -> f32 {
        with!(_mm_cvtss_f32(fma(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c))))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        each!(_mm_max_ps, self, o)
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        each!(_mm_min_ps, self, o)
    }
    #[inline(always)]
    fn round(self) -> Self {
        const MODE: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        each!(_mm_round_ps::<MODE>, self)
    }
    #[inline(always)]
    fn scale_exponent(self, n: Self) -> Self {
        #[inline(always)]
        fn quarter(p: __m128, n: __m128) -> __m128 {
            with!(_mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(p), _mm_slli_epi32::<23>(_mm_cvtps_epi32(n)))))
        }
        Sse41(quarter(self.0, n.0), quarter(self.1, n.1), quarter(self.2, n.2), quarter(self.3, n.3))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        let sign = Self::splat(-0.0);
        each!(_mm_andnot_ps, sign, self)
    }
    #[inline(always)]
    fn with_sign(self, o: Self) -> Self {
        let sign = Self::splat(-0.0);
        let (value, sign) = (self.abs(), each!(_mm_and_ps, sign, o));
        each!(_mm_or_ps, value, sign)
    }
    #[inline(always)]
    fn if_less(self, limit: Self, a: Self, b: Self) -> Self {
        let less = each!(_mm_cmplt_ps, self, limit);
        each!(_mm_blendv_ps, b, a, less)
    }
    #[inline(always)]
    fn keep(self, first: i32, end: i32, o: Self) -> Self {
        #[inline(always)]
        fn quarter(x: __m128, o: __m128, first: i32, end: i32) -> __m128 {
            with!({
                let i = _mm_setr_epi32(0, 1, 2, 3);
                let before = _mm_cmpgt_epi32(_mm_set1_epi32(first), i);
                let within = _mm_andnot_si128(before, _mm_cmpgt_epi32(_mm_set1_epi32(end), i));
                _mm_blendv_ps(o, x, _mm_castsi128_ps(within))
            })
        }
        Sse41(
            quarter(self.0, o.0, first, end),
            quarter(self.1, o.1, first - 4, end - 4),
            quarter(self.2, o.2, first - 8, end - 8),
            quarter(self.3, o.3, first - 12, end - 12),
        )
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        with!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
    #[inline(always)]
    fn transpose(m: &mut [Self; LANES]) {
        #[inline(always)]
        fn four(a: __m128, b: __m128, c: __m128, d: __m128) -> [__m128; 4] {
            with!({
                let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
                let (ab_high, cd_high) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
                [_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab), _mm_movelh_ps(ab_high, cd_high), _mm_movehl_ps(cd_high, ab_high)]
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
