//! AVX2 with FMA and F16C: 8 outputs (a quarter of a panel) by up to four rows. Same panels, same order, same bits.
//!
//! Unsigned quants: `maddubs` sums fit an i16 for a while (eight with nibbles: 8 * 2 * 15 * 128 = 30720; four with five
//! bits: 4 * 2 * 31 * 128 = 31744), and one `madd` then widens them all. With zero-point 128 the quants are signed, so the
//! sign moves to the activation (2 * 128 * 127 = 32512 fits: an activation is never -128) and every group is widened.

use super::{Job, LinearFns, Rows, Tile, ahead};
use crate::backend::cpu::acts::{MAGIC, MAGIC_BITS, WORDS, put_head, scales};
use crate::backend::cpu::panel::{Min, Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0, Quant, Zero};
use core::arch::x86_64::*;
use core::ops::Range;

pub(in crate::backend::cpu) static LINEAR: LinearFns = LinearFns {
    rows_quant: 4,
    rows_plain: 4,
    quantize,
    panel: [
        plain_job::<F32>,
        plain_job::<F16>,
        plain_job::<BF16>,
        quant_job::<Q8_0>,
        quant_job::<Q4_0>,
        quant_job::<Q4_1>,
        quant_job::<Q4K>,
        quant_job::<Q5_1>,
        quant_job::<Q5K>,
        quant_job::<Q6K>,
    ],
};

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quant_job<Q: Quant>(job: &Job<'_>) {
    for i in job.tiles.clone() {
        let tile = &job.tile(i);
        for quarter in 0..job.lanes.div_ceil(8) {
            // SAFETY: passed on.
            unsafe {
                match tile.rows {
                    1 => quant::<Q, 1>(job, tile, quarter),
                    2 => quant::<Q, 2>(job, tile, quarter),
                    3 => quant::<Q, 3>(job, tile, quarter),
                    4 => quant::<Q, 4>(job, tile, quarter),
                    _ => unreachable!("a tile has 1 to 4 rows"),
                }
            }
        }
    }
}

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quant<Q: Quant, const R: usize>(job: &Job<'_>, tile: &Tile<'_>, quarter: usize) {
    assert!(job.w.len() == job.blocks * Q::BYTES, "whole blocks");
    assert!(tile.act.len() >= (job.first + job.blocks) * Q::SUBS * WORDS * R, "activations for all blocks");
    // SAFETY: the blocks and their activations are there, as asserted; `y` is the caller's.
    unsafe {
        let mut acc = load::<R>(job, tile, quarter);
        let mut act = tile.act.as_ptr().add(job.first * Q::SUBS * R * WORDS);
        let mut w = job.w.as_ptr();
        let first_touch = quarter == 0 && job.tiles.len() < 4;
        for _ in 0..job.blocks {
            if first_touch {
                ahead(w, Q::BYTES);
            }
            let d = half_scale(w, quarter);
            let m = if Q::MIN == Min::None { d } else { half_scale(w.add(64), quarter) };
            for j in 0..Q::SUBS {
                let sub = w.add(Q::HEAD + j * Q::SUB);
                let (scale, min) = match Q::SUBS {
                    1 => (d, m),
                    _ if Q::TWO => {
                        let s = |half: usize| _mm256_mul_ps(d, signed_bytes(sub.add(32 * half + 8 * quarter)));
                        step_two::<R>(sub.add(Q::SUB_HEAD), quarter, act, [s(0), s(1)], &mut acc);
                        act = act.add(R * WORDS);
                        continue;
                    }
                    _ => (_mm256_mul_ps(d, bytes(sub.add(8 * quarter))), _mm256_mul_ps(m, bytes(sub.add(32 + 8 * quarter)))),
                };
                step::<Q, R>(sub.add(Q::SUB_HEAD), quarter, act, scale, min, &mut acc);
                act = act.add(R * WORDS);
            }
            w = w.add(Q::BYTES);
        }
        store::<R>(job, tile, quarter, &acc);
    }
}

/// One block of 32 k for 8 outputs and R rows.
///
/// # Safety
/// `act` has `WORDS * R` words, `q` a sub-block's quants.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<Q: Quant, const R: usize>(
    q: *const u8,
    quarter: usize,
    act: *const u32,
    scale: __m256,
    min: __m256,
    acc: &mut [__m256; R],
) {
    // SAFETY: by the contract.
    unsafe {
        let x = act.add(4 * R);
        let ones = _mm256_set1_epi16(1);
        let magic = _mm256_set1_epi32(MAGIC_BITS);
        let mut dot = [_mm256_setzero_si256(); R];
        let (half, part) = (quarter / 2, quarter % 2);
        let line = |lines: usize, l: usize| _mm256_load_si256(q.add((lines * half + l) * 64 + 32 * part).cast());
        let word = |i: usize, r: usize| _mm256_set1_epi32(*x.add(i * R + r) as i32);
        if Q::WIDE && matches!(Q::ZERO, Zero::Top) {
            let flip = _mm256_set1_epi8(-128);
            for g in 0..8 {
                let w = _mm256_xor_si256(line(8, g), flip);
                let abs = _mm256_abs_epi8(w);
                for (r, dot) in dot.iter_mut().enumerate() {
                    let v = _mm256_sign_epi8(word(g, r), w);
                    *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(_mm256_maddubs_epi16(abs, v), ones));
                }
            }
            for dot in &mut dot {
                *dot = _mm256_add_epi32(*dot, magic);
            }
        } else if Q::WIDE {
            let mut sums = [magic; R];
            for four in 0..2 {
                dot = [_mm256_setzero_si256(); R];
                for g in 4 * four..4 * four + 4 {
                    let w = line(8, g);
                    for (r, dot) in dot.iter_mut().enumerate() {
                        *dot = _mm256_add_epi16(*dot, _mm256_maddubs_epi16(w, word(g, r)));
                    }
                }
                for (sum, dot) in sums.iter_mut().zip(dot) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(dot, ones));
                }
            }
            dot = sums;
        } else {
            let low = _mm256_set1_epi8(15);
            for l in 0..4 {
                let line = line(4, l);
                let lo = _mm256_and_si256(line, low);
                let hi = _mm256_and_si256(_mm256_srli_epi16::<4>(line), low);
                for (r, dot) in dot.iter_mut().enumerate() {
                    let (a, b) = (_mm256_maddubs_epi16(lo, word(l, r)), _mm256_maddubs_epi16(hi, word(4 + l, r)));
                    *dot = _mm256_add_epi16(*dot, _mm256_add_epi16(a, b));
                }
            }
            for (r, dot) in dot.iter_mut().enumerate() {
                let init = if matches!(Q::ZERO, Zero::Eight) { *act.add(2 * R + r) as i32 } else { MAGIC_BITS };
                *dot = _mm256_add_epi32(_mm256_madd_epi16(*dot, ones), _mm256_set1_epi32(init));
            }
        }
        // MAGIC * scale is exact, so the fma gives dot * scale with its one rounding.
        let magic = _mm256_mul_ps(scale, _mm256_set1_ps(-MAGIC));
        for r in 0..R {
            let t = _mm256_fmadd_ps(_mm256_castsi256_ps(dot[r]), scale, magic);
            acc[r] = _mm256_fmadd_ps(t, _mm256_set1_ps(f32::from_bits(*act.add(r))), acc[r]);
            let sum = || _mm256_set1_ps(f32::from_bits(*act.add(R + r)));
            match Q::MIN {
                Min::None => {}
                Min::Plus => acc[r] = _mm256_fmadd_ps(min, sum(), acc[r]),
                Min::Minus => acc[r] = _mm256_fnmadd_ps(min, sum(), acc[r]),
            }
        }
    }
}

/// As [`step`] for zero-point 128, with a scale for each half of k.
///
/// # Safety
/// `act` has `WORDS * R` words, `q` a sub-block's quants.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step_two<const R: usize>(q: *const u8, quarter: usize, act: *const u32, scales: [__m256; 2], acc: &mut [__m256; R]) {
    // SAFETY: by the contract.
    unsafe {
        let x = act.add(4 * R);
        let (ones, flip) = (_mm256_set1_epi16(1), _mm256_set1_epi8(-128));
        let (half, part) = (quarter / 2, quarter % 2);
        for (k, scale) in scales.into_iter().enumerate() {
            let mut dot = [_mm256_set1_epi32(MAGIC_BITS); R];
            for g in 4 * k..4 * k + 4 {
                let w = _mm256_xor_si256(_mm256_load_si256(q.add((8 * half + g) * 64 + 32 * part).cast()), flip);
                let abs = _mm256_abs_epi8(w);
                for (r, dot) in dot.iter_mut().enumerate() {
                    let v = _mm256_sign_epi8(_mm256_set1_epi32(*x.add(g * R + r) as i32), w);
                    *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(_mm256_maddubs_epi16(abs, v), ones));
                }
            }
            let magic = _mm256_mul_ps(scale, _mm256_set1_ps(-MAGIC));
            for r in 0..R {
                let t = _mm256_fmadd_ps(_mm256_castsi256_ps(dot[r]), scale, magic);
                acc[r] = _mm256_fmadd_ps(t, _mm256_set1_ps(f32::from_bits(*act.add(r))), acc[r]);
            }
        }
    }
}

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain_job<const F: u8>(job: &Job<'_>) {
    for i in job.tiles.clone() {
        let tile = &job.tile(i);
        for quarter in 0..job.lanes.div_ceil(8) {
            // SAFETY: passed on.
            unsafe {
                match tile.rows {
                    1 => plain::<F, 1>(job, tile, quarter),
                    2 => plain::<F, 2>(job, tile, quarter),
                    3 => plain::<F, 3>(job, tile, quarter),
                    4 => plain::<F, 4>(job, tile, quarter),
                    _ => unreachable!("a tile has 1 to 4 rows"),
                }
            }
        }
    }
}

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain<const F: u8, const R: usize>(job: &Job<'_>, tile: &Tile<'_>, quarter: usize) {
    let stride = if F == F32 { 128 } else { 64 };
    assert!(job.w.len() == job.blocks * stride, "whole blocks");
    assert!(tile.act.len() >= (job.first + job.blocks) * R, "activations for all k");
    // SAFETY: as in `quant`.
    unsafe {
        let mut acc = load::<R>(job, tile, quarter);
        let mut x = tile.act.as_ptr().add(job.first * R);
        let mut w = job.w.as_ptr();
        let first_touch = quarter == 0 && job.tiles.len() < 4;
        for _ in 0..job.blocks {
            if first_touch {
                ahead(w, stride);
            }
            let a = match F {
                F16 => half_scale(w, quarter),
                BF16 => brain(w, quarter),
                _ => _mm256_load_ps(w.add(32 * quarter).cast()),
            };
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = _mm256_fmadd_ps(a, _mm256_set1_ps(f32::from_bits(*x.add(r))), *acc);
            }
            x = x.add(R);
            w = w.add(stride);
        }
        store::<R>(job, tile, quarter, &acc);
    }
}

/// # Safety
/// 32 f16 at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half_scale(p: *const u8, quarter: usize) -> __m256 {
    // SAFETY: by the contract; panels start on a cache line.
    unsafe { _mm256_cvtph_ps(_mm_load_si128(p.add(16 * quarter).cast())) }
}

/// # Safety
/// 32 bf16 at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn brain(p: *const u8, quarter: usize) -> __m256 {
    // SAFETY: by the contract; panels start on a cache line.
    let v = unsafe { _mm_load_si128(p.add(16 * quarter).cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(v)))
}

/// # Safety
/// 8 bytes at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes(p: *const u8) -> __m256 {
    // SAFETY: by the contract.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) }
}

/// # Safety
/// 8 bytes at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn signed_bytes(p: *const u8) -> __m256 {
    // SAFETY: by the contract.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn mask(lanes: usize, quarter: usize) -> __m256i {
    let left = lanes.saturating_sub(8 * quarter) as i32;
    _mm256_cmpgt_epi32(_mm256_set1_epi32(left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// # Safety
/// As [`LinearFns::panel`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<const R: usize>(job: &Job<'_>, tile: &Tile<'_>, quarter: usize) -> [__m256; R] {
    let mut acc = [_mm256_setzero_ps(); R];
    if job.first != 0 {
        let mask = mask(job.lanes, quarter);
        for (r, acc) in acc.iter_mut().enumerate() {
            // SAFETY: masked to the lanes that exist.
            *acc = unsafe { _mm256_maskload_ps(tile.y.wrapping_add(r * job.y_stride + 8 * quarter), mask) };
        }
    }
    acc
}

/// # Safety
/// As [`LinearFns::panel`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store<const R: usize>(job: &Job<'_>, tile: &Tile<'_>, quarter: usize, acc: &[__m256; R]) {
    let mask = mask(job.lanes, quarter);
    for (r, acc) in acc.iter().enumerate() {
        // SAFETY: masked to the lanes that exist.
        unsafe { _mm256_maskstore_ps(tile.y.wrapping_add(r * job.y_stride + 8 * quarter), mask, *acc) };
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize(rows: &Rows<'_>, blocks: Range<usize>, out: &mut [u32]) {
    let abs = _mm256_set1_epi32(0x7fff_ffff);
    let n = rows.rows;
    for (b, words) in blocks.zip(out.chunks_exact_mut(WORDS * n)) {
        for r in 0..n {
            let v = rows.block(r, b);
            // SAFETY: 32 floats.
            let v = [0, 8, 16, 24].map(|i| unsafe { _mm256_loadu_ps(v.as_ptr().add(i)) });
            let a = v.map(|v| _mm256_and_si256(_mm256_castps_si256(v), abs));
            let top = _mm256_max_epi32(_mm256_max_epi32(a[0], a[1]), _mm256_max_epi32(a[2], a[3]));
            let top = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256::<1>(top));
            let top = _mm_max_epi32(top, _mm_shuffle_epi32::<0b01_00_11_10>(top));
            let top = _mm_max_epi32(top, _mm_shuffle_epi32::<0b00_00_00_01>(top));
            let (scale, inv) = scales(f32::from_bits(_mm_cvtsi128_si32(top) as u32));
            let (keep, inv) = (_mm256_set1_epi32(if inv != 0.0 { -1 } else { 0 }), _mm256_set1_ps(inv));
            let q = v.map(|v| _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(v, inv)), keep));
            let sum = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
            let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b01_00_11_10>(sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b00_00_00_01>(sum));
            put_head(words, n, r, scale, _mm_cvtsi128_si32(sum));
            // Packing interleaves the 128-bit halves: words 0 2 4 6 1 3 5 7 come out in order.
            let q = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
            let q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            let mut q_words = [0u32; 8];
            // SAFETY: 32 bytes.
            unsafe { _mm256_storeu_si256(q_words.as_mut_ptr().cast(), q) };
            for (g, word) in q_words.into_iter().enumerate() {
                words[(4 + g) * n + r] = word;
            }
        }
    }
}
