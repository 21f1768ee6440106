//! The lanes of AVX2 (two registers) and AVX-512 (one).

use super::{LANES, Lanes};
use std::arch::x86_64::*;

/// An expression of intrinsics.
macro_rules! with {
    ($e:expr) => {
        // SAFETY: lanes of this type are used only by functions that enable the tier's instructions, which run only where
        // `Tier::available` found them; loads and stores are of whole arrays.
        unsafe { $e }
    };
}

/// AVX2, FMA and F16C: lanes 0 to 7, then 8 to 15.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(__m256, __m256);

/// The same intrinsic on both halves.
macro_rules! both {
    ($f:ident, $($x:expr),*) => {
        with!(Avx2($f($($x.0),*), $f($($x.1),*)))
    };
}

/// Eight rows of eight: row i, column j goes to row j, column i. No closures around intrinsics: they would stay calls.
#[inline(always)]
fn transpose8(m: &mut [__m256; 8]) {
    // Within four rows: half h of vector j holds their column 4h + j.
    for rows in m.as_chunks_mut::<4>().0 {
        let [a, b, c, d] = *rows;
        let (ab, cd) = with!((_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d)));
        let (ab_high, cd_high) = with!((_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d)));
        rows[0] = with!(_mm256_shuffle_ps::<0x44>(ab, cd));
        rows[1] = with!(_mm256_shuffle_ps::<0xee>(ab, cd));
        rows[2] = with!(_mm256_shuffle_ps::<0x44>(ab_high, cd_high));
        rows[3] = with!(_mm256_shuffle_ps::<0xee>(ab_high, cd_high));
    }
    for j in 0..4 {
        let (top, bottom) = (m[j], m[4 + j]);
        m[j] = with!(_mm256_permute2f128_ps::<0x20>(top, bottom));
        m[4 + j] = with!(_mm256_permute2f128_ps::<0x31>(top, bottom));
    }
}

impl Lanes for Avx2 {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        with!(Avx2(_mm256_set1_ps(v), _mm256_set1_ps(v)))
    }
    #[inline(always)]
    fn load(p: &[f32; LANES]) -> Self {
        let p = p.as_ptr();
        with!(Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))))
    }
    #[inline(always)]
    fn load_f16(p: &[u16; LANES]) -> Self {
        let p = p.as_ptr().cast::<__m128i>();
        with!(Avx2(_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p.add(1)))))
    }
    #[inline(always)]
    fn store(self, p: &mut [f32; LANES]) {
        let p = p.as_mut_ptr();
        with!(_mm256_storeu_ps(p, self.0));
        with!(_mm256_storeu_ps(p.add(8), self.1));
    }
    #[inline(always)]
    fn store_f16(self, p: &mut [u16; LANES]) {
        let p = p.as_mut_ptr().cast::<__m128i>();
        with!(_mm_storeu_si128(p, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)));
        with!(_mm_storeu_si128(p.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1)));
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        both!(_mm256_add_ps, self, o)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        both!(_mm256_sub_ps, self, o)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        both!(_mm256_mul_ps, self, o)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        both!(_mm256_div_ps, self, o)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        both!(_mm256_fmadd_ps, self, b, c)
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        both!(_mm256_max_ps, self, o)
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        both!(_mm256_min_ps, self, o)
    }
    #[inline(always)]
    fn round(self) -> Self {
        const MODE: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        with!(Avx2(_mm256_round_ps::<MODE>(self.0), _mm256_round_ps::<MODE>(self.1)))
    }
    #[inline(always)]
    fn scale_exponent(self, n: Self) -> Self {
        #[inline(always)]
        fn half(p: __m256, n: __m256) -> __m256 {
            with!(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n)))))
        }
        Avx2(half(self.0, n.0), half(self.1, n.1))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        let sign = Self::splat(-0.0);
        both!(_mm256_andnot_ps, sign, self)
    }
    #[inline(always)]
    fn with_sign(self, o: Self) -> Self {
        let sign = Self::splat(-0.0);
        let (value, sign) = (self.abs(), both!(_mm256_and_ps, sign, o));
        both!(_mm256_or_ps, value, sign)
    }
    #[inline(always)]
    fn if_less(self, limit: Self, a: Self, b: Self) -> Self {
        #[inline(always)]
        fn half(x: __m256, limit: __m256, a: __m256, b: __m256) -> __m256 {
            with!(_mm256_blendv_ps(b, a, _mm256_cmp_ps::<_CMP_LT_OQ>(x, limit)))
        }
        Avx2(half(self.0, limit.0, a.0, b.0), half(self.1, limit.1, a.1, b.1))
    }
    #[inline(always)]
    fn keep(self, first: i32, end: i32, o: Self) -> Self {
        #[inline(always)]
        fn half(x: __m256, o: __m256, first: i32, end: i32) -> __m256 {
            with!({
                let i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), i);
                let within = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), i));
                _mm256_blendv_ps(o, x, _mm256_castsi256_ps(within))
            })
        }
        Avx2(half(self.0, o.0, first, end), half(self.1, o.1, first - 8, end - 8))
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        with!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
    #[inline(always)]
    fn transpose(m: &mut [Self; LANES]) {
        let mut quarters = [[with!(_mm256_setzero_ps()); 8]; 4];
        for i in 0..8 {
            let (top, bottom) = (m[i], m[8 + i]);
            (quarters[0][i], quarters[1][i], quarters[2][i], quarters[3][i]) = (top.0, bottom.0, top.1, bottom.1);
        }
        let [a, b, c, d] = &mut quarters;
        transpose8(a);
        transpose8(b);
        transpose8(c);
        transpose8(d);
        for i in 0..8 {
            m[i] = Avx2(a[i], b[i]);
            m[8 + i] = Avx2(c[i], d[i]);
        }
    }
}

/// AVX-512 F, BW and VL.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(__m512);

impl Lanes for Avx512 {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        with!(Avx512(_mm512_set1_ps(v)))
    }
    #[inline(always)]
    fn load(p: &[f32; LANES]) -> Self {
        with!(Avx512(_mm512_loadu_ps(p.as_ptr())))
    }
    #[inline(always)]
    fn load_f16(p: &[u16; LANES]) -> Self {
        with!(Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.as_ptr().cast()))))
    }
    #[inline(always)]
    fn store(self, p: &mut [f32; LANES]) {
        with!(_mm512_storeu_ps(p.as_mut_ptr(), self.0));
    }
    #[inline(always)]
    fn store_f16(self, p: &mut [u16; LANES]) {
        with!(_mm256_storeu_si256(p.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)));
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        with!(Avx512(_mm512_add_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        with!(Avx512(_mm512_sub_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        with!(Avx512(_mm512_mul_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        with!(Avx512(_mm512_div_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        with!(Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        with!(Avx512(_mm512_max_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        with!(Avx512(_mm512_min_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn round(self) -> Self {
        with!(Avx512(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
    }
    #[inline(always)]
    fn scale_exponent(self, n: Self) -> Self {
        with!({
            let n = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(n.0));
            Avx512(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(self.0), n)))
        })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        with!(Avx512(_mm512_abs_ps(self.0)))
    }
    #[inline(always)]
    fn with_sign(self, o: Self) -> Self {
        with!({
            let sign = _mm512_and_si512(_mm512_castps_si512(o.0), _mm512_set1_epi32(i32::MIN));
            Avx512(_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(_mm512_abs_ps(self.0)), sign)))
        })
    }
    #[inline(always)]
    fn if_less(self, limit: Self, a: Self, b: Self) -> Self {
        with!(Avx512(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, limit.0), b.0, a.0)))
    }
    #[inline(always)]
    fn keep(self, first: i32, end: i32, o: Self) -> Self {
        // The lowest n bits, n being held to 0..=16.
        let below = |n: i32| (1u32 << n.clamp(0, 16)) - 1;
        let mask = (below(end) & !below(first)) as __mmask16;
        with!(Avx512(_mm512_mask_blend_ps(mask, o.0, self.0)))
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        with!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
    #[inline(always)]
    fn transpose(m: &mut [Self; LANES]) {
        // Within four rows: quarter q of vector j holds their column 4q + j.
        for rows in m.as_chunks_mut::<4>().0 {
            let [a, b, c, d] = rows.map(|v| v.0);
            let (ab, ab_high) = with!((_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
            let (cd, cd_high) = with!((_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
            let pairs = [(ab, cd), (ab_high, cd_high)];
            for (i, (x, y)) in pairs.into_iter().enumerate() {
                let (x, y) = with!((_mm512_castps_pd(x), _mm512_castps_pd(y)));
                rows[2 * i] = with!(Avx512(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y))));
                rows[2 * i + 1] = with!(Avx512(_mm512_castpd_ps(_mm512_unpackhi_pd(x, y))));
            }
        }
        // Then the quarters: even ones by 0x88, odd ones by 0xdd.
        for j in 0..4 {
            let [a, b, c, d] = [m[j].0, m[4 + j].0, m[8 + j].0, m[12 + j].0];
            let (ab, cd) = with!((_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d)));
            let (ab_odd, cd_odd) = with!((_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(c, d)));
            m[j] = with!(Avx512(_mm512_shuffle_f32x4::<0x88>(ab, cd)));
            m[4 + j] = with!(Avx512(_mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd)));
            m[8 + j] = with!(Avx512(_mm512_shuffle_f32x4::<0xdd>(ab, cd)));
            m[12 + j] = with!(Avx512(_mm512_shuffle_f32x4::<0xdd>(ab_odd, cd_odd)));
        }
    }
}
