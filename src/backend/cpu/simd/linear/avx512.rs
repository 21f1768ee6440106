//! AVX-512 with VNNI. A zmm holds 16 outputs; activations come as embedded broadcasts from the tile.
//!
//! A tile is R rows by a whole panel. Quantised: R <= 6, so that 2 R integer and 2 R f32 sums stay in registers and a
//! broadcast serves two dot products. Plain: R <= 12. Taller tiles, and panels cut in half, lost.
// Two arrays of registers go in step; iterators over both cost spills.
#![allow(clippy::needless_range_loop)]

use super::{Job, LinearFns, PANEL_BYTES, Rows, Tile, ahead};
use crate::backend::cpu::acts::{MAGIC, MAGIC_BITS, WORDS, put_head, scales};
use crate::backend::cpu::panel::{IQ4NL, IQ4XS, MXFP4, Min, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quant, Zero};
use core::arch::x86_64::*;
use core::mem::MaybeUninit;
use core::ops::Range;

pub(in crate::backend::cpu) static LINEAR: LinearFns = LinearFns {
    rows_quant: 6,
    rows_plain: 12,
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
        quant_job::<Q5_0>,
        quant_job::<IQ4NL>,
        quant_job::<IQ4XS>,
        quant_job::<MXFP4>,
    ],
};

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// A loop that the compiler leaves rolled carries its sums through phis and spills some of them: write it out.
macro_rules! unrolled {
    ($i:ident in [$($n:literal),*] $body:block) => { $({ let $i: usize = $n; $body })* };
}

/// Room for the weights of a K slice, spread out.
#[repr(C, align(64))]
struct Spread(MaybeUninit<[u8; PANEL_BYTES]>);

/// From this many tiles on, quants are spread to bytes (and half precision to single) once instead of in every tile.
const SPREAD_FROM: usize = 4;

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn quant_job<Q: Quant>(job: &Job<'_>) {
    assert!(job.w.len() == job.blocks * Q::BYTES, "whole blocks");
    // SAFETY: passed on.
    unsafe {
        if Q::BITS < 8 && job.tiles.len() >= SPREAD_FROM {
            let mut room = Spread(MaybeUninit::uninit());
            let to: *mut u8 = room.0.as_mut_ptr().cast();
            spread::<Q>(job, to);
            tiles::<Q, true>(job, to);
        } else {
            tiles::<Q, false>(job, job.w.as_ptr());
        }
    }
}

/// Writes a slice's quants as bytes: `[sub-block][half][line 8][64]`.
///
/// # Safety
/// The job's blocks are whole, `to` has `PANEL_BYTES` bytes on a cache line.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn spread<Q: Quant>(job: &Job<'_>, mut to: *mut u8) {
    assert!(job.blocks * Q::SUBS * 1024 <= PANEL_BYTES, "a K slice fits");
    for b in 0..job.blocks {
        for j in 0..Q::SUBS {
            // SAFETY: `w` holds the job's blocks and `to` has room, as asserted.
            unsafe {
                let q = job.w.as_ptr().add(b * Q::BYTES + Q::HEAD + j * Q::SUB + Q::SUB_HEAD);
                for h in 0..2 {
                    for l in 0..4 {
                        let (a, b) = groups::<Q>(q, h, l);
                        _mm512_store_si512(to.add((8 * h + l) * 64).cast(), a);
                        _mm512_store_si512(to.add((8 * h + 4 + l) * 64).cast(), b);
                    }
                }
                to = to.add(1024);
            }
        }
    }
}

/// Quants of half `h` of the outputs in storage (or the table's, plus 128): k = 4 l + i, and k = 16 + 4 l + i.
///
/// # Safety
/// `q` points to a sub-block's quants.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn groups<Q: Quant>(q: *const u8, h: usize, l: usize) -> (__m512i, __m512i) {
    // SAFETY: by the contract.
    unsafe {
        if Q::BITS == 8 {
            return (line(q, 8 * h + l), line(q, 8 * h + 4 + l));
        }
        let (nibbles, low) = (line(q, 4 * h + l), _mm512_set1_epi8(15));
        let (mut a, mut b) = (_mm512_and_si512(nibbles, low), _mm512_and_si512(_mm512_srli_epi16::<4>(nibbles), low));
        // After the 8 lines of nibbles those of higher bits.
        let shift = l as i32;
        if Q::BITS == 5 {
            let (bits, fifth) = (line(q, 8 + h), _mm512_set1_epi8(16));
            a = _mm512_or_si512(a, _mm512_and_si512(_mm512_sll_epi16(bits, _mm_cvtsi32_si128(4 - shift)), fifth));
            b = _mm512_or_si512(b, _mm512_and_si512(_mm512_srl_epi16(bits, _mm_cvtsi32_si128(shift)), fifth));
        }
        if Q::BITS == 6 {
            let high = _mm512_set1_epi8(0x30);
            let pairs = |p: usize| {
                let v = line(q, 8 + 2 * h + p);
                let v = match l {
                    0..2 => _mm512_sll_epi16(v, _mm_cvtsi32_si128(4 - 2 * shift)),
                    _ => _mm512_srl_epi16(v, _mm_cvtsi32_si128(2 * shift - 4)),
                };
                _mm512_and_si512(v, high)
            };
            (a, b) = (_mm512_or_si512(a, pairs(0)), _mm512_or_si512(b, pairs(1)));
        }
        if let Some(table) = Q::TABLE {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            let table = _mm512_xor_si512(table, _mm512_set1_epi8(-128));
            (a, b) = (_mm512_shuffle_epi8(table, a), _mm512_shuffle_epi8(table, b));
        }
        (a, b)
    }
}

/// # Safety
/// As [`LinearFns::panel`]; with S, `spread` holds the job's quants as bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn tiles<Q: Quant, const S: bool>(job: &Job<'_>, spread: *const u8) {
    for i in job.tiles.clone() {
        let tile = &job.tile(i);
        // SAFETY: passed on.
        unsafe {
            match tile.rows {
                1 => quant::<Q, 1, S>(job, tile, spread),
                2 => quant::<Q, 2, S>(job, tile, spread),
                3 => quant::<Q, 3, S>(job, tile, spread),
                4 => quant::<Q, 4, S>(job, tile, spread),
                5 => quant::<Q, 5, S>(job, tile, spread),
                6 => quant::<Q, 6, S>(job, tile, spread),
                _ => unreachable!("a tile has 1 to 6 rows"),
            }
        }
    }
}

/// # Safety
/// As [`tiles`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn quant<Q: Quant, const R: usize, const S: bool>(job: &Job<'_>, tile: &Tile<'_>, mut spread: *const u8) {
    assert!(tile.act.len() >= (job.first + job.blocks) * Q::SUBS * WORDS * R, "activations for all blocks");
    // SAFETY: the blocks and their activations are there, as asserted; `spread` too if S.
    unsafe {
        let mut acc = load::<R>(job, tile);
        let few = !S && job.tiles.len() < SPREAD_FROM;
        let mut act = tile.act.as_ptr().add(job.first * Q::SUBS * R * WORDS);
        let mut w = job.w.as_ptr();
        for _ in 0..job.blocks {
            if few {
                ahead(w, Q::BYTES);
            }
            if Q::TWO {
                let d = [half_scale(w, 0), half_scale(w, 1)];
                for j in 0..Q::SUBS {
                    let sub = w.add(Q::HEAD + j * Q::SUB);
                    // f16 times an 8-bit integer is exact.
                    let scale = |k: usize, h: usize| _mm512_mul_ps(d[h], signed_bytes(sub.add(32 * k + 16 * h)));
                    step_two::<Q, R, S>(if S { spread } else { sub.add(Q::SUB_HEAD) }, act, scale, &mut acc);
                    act = act.add(R * WORDS);
                    spread = spread.wrapping_add(1024);
                }
            } else if Q::SUBS > 1 && Q::MIN == Min::None {
                let d = [half_scale(w, 0), half_scale(w, 1)];
                for j in 0..Q::SUBS {
                    let sub = w.add(Q::HEAD + j * Q::SUB);
                    let scale = |h: usize| _mm512_mul_ps(d[h], signed_bytes(sub.add(16 * h)));
                    step::<Q, R, S>(if S { spread } else { sub.add(Q::SUB_HEAD) }, act, scale, scale, &mut acc);
                    act = act.add(R * WORDS);
                    spread = spread.wrapping_add(1024);
                }
            } else if Q::SUBS > 1 {
                let d = [half_scale(w, 0), half_scale(w, 1)];
                let dmin = [half_scale(w.add(64), 0), half_scale(w.add(64), 1)];
                for j in 0..Q::SUBS {
                    let sub = w.add(Q::HEAD + j * Q::SUB);
                    // f16 times a 6-bit integer is exact.
                    let scale = |h: usize| _mm512_mul_ps(d[h], bytes(sub.add(16 * h)));
                    let min = |h: usize| _mm512_mul_ps(dmin[h], bytes(sub.add(32 + 16 * h)));
                    step::<Q, R, S>(if S { spread } else { sub.add(Q::SUB_HEAD) }, act, scale, min, &mut acc);
                    act = act.add(R * WORDS);
                    spread = spread.wrapping_add(1024);
                }
            } else {
                let q = if S { spread } else { w.add(Q::HEAD) };
                let scale = |h: usize| if Q::BRAIN { brain(w, h) } else { half_scale(w, h) };
                step::<Q, R, S>(q, act, scale, |h| half_scale(w.add(64), h), &mut acc);
                act = act.add(R * WORDS);
                spread = spread.wrapping_add(1024);
            }
            w = w.add(Q::BYTES);
        }
        store::<R>(job, tile, &acc);
    }
}

/// One block of 32 k for 32 outputs and R rows.
///
/// # Safety
/// `act` has `WORDS * R` words, `q` a sub-block's quants.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn step<Q: Quant, const R: usize, const S: bool>(
    q: *const u8,
    act: *const u32,
    scale: impl Fn(usize) -> __m512,
    min: impl Fn(usize) -> __m512,
    acc: &mut [[__m512; R]; 2],
) {
    // SAFETY: by the contract.
    unsafe {
        let mut dot = [[_mm512_set1_epi32(MAGIC_BITS); R]; 2];
        // Activations come with the starts for 8 and for 128.
        let start = match Q::ZERO {
            Zero::Eight | Zero::Sixteen => 2,
            Zero::Top => 3,
            _ if Q::TABLE.is_some() => 3,
            _ => 0,
        };
        if start > 0 {
            for r in 0..R {
                let init = *act.add(start * R + r) as i32;
                let init = if Q::ZERO == Zero::Sixteen { init + (init - MAGIC_BITS) } else { init };
                dot[0][r] = _mm512_set1_epi32(init);
                dot[1][r] = dot[0][r];
            }
        }
        let x = act.add(4 * R);
        if S || Q::BITS == 8 {
            unrolled!(g in [0, 1, 2, 3, 4, 5, 6, 7] {
                dots(&mut dot, line(q, g), line(q, 8 + g), x.add(g * R));
            });
        } else {
            unrolled!(l in [0, 1, 2, 3] {
                let (a, c) = groups::<Q>(q, 0, l);
                let (b, d) = groups::<Q>(q, 1, l);
                dots(&mut dot, a, b, x.add(l * R));
                dots(&mut dot, c, d, x.add((4 + l) * R));
            });
        }
        for h in 0..2 {
            let scale = scale(h);
            // MAGIC * scale is exact, so the fma gives dot * scale with its one rounding.
            let magic = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
            let min = if matches!(Q::MIN, Min::None) { scale } else { min(h) };
            for r in 0..R {
                let t = _mm512_fmadd_ps(_mm512_castsi512_ps(dot[h][r]), scale, magic);
                let mut sum = _mm512_fmadd_ps(t, _mm512_set1_ps(f32::from_bits(*act.add(r))), acc[h][r]);
                match Q::MIN {
                    Min::None => {}
                    Min::Plus => sum = _mm512_fmadd_ps(min, _mm512_set1_ps(f32::from_bits(*act.add(R + r))), sum),
                    Min::Minus => sum = _mm512_fnmadd_ps(min, _mm512_set1_ps(f32::from_bits(*act.add(R + r))), sum),
                }
                acc[h][r] = sum;
            }
        }
    }
}

/// As [`step`] for zero-point 32, with a scale for each half of k.
///
/// # Safety
/// `act` has `WORDS * R` words, `q` a sub-block's quants.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn step_two<Q: Quant, const R: usize, const S: bool>(
    q: *const u8,
    act: *const u32,
    scale: impl Fn(usize, usize) -> __m512,
    acc: &mut [[__m512; R]; 2],
) {
    // SAFETY: by the contract.
    unsafe {
        let x = act.add(4 * R);
        let zero_point = _mm512_set1_epi8(32);
        unrolled!(k in [0, 1] {
            let mut dot = [[_mm512_setzero_si512(); R]; 2];
            for r in 0..R {
                // The activations hold sums over the whole block only: 32 times the sum over this half.
                let mut sum = _mm512_setzero_si512();
                unrolled!(g in [0, 1, 2, 3] {
                    sum = _mm512_dpbusd_epi32(sum, zero_point, _mm512_set1_epi32(*x.add((4 * k + g) * R + r) as i32));
                });
                dot[0][r] = _mm512_sub_epi32(_mm512_set1_epi32(MAGIC_BITS), sum);
                dot[1][r] = dot[0][r];
            }
            unrolled!(g in [0, 1, 2, 3] {
                let half = |h: usize| {
                    if S {
                        return line(q, 8 * h + 4 * k + g);
                    }
                    let (low, high) = groups::<Q>(q, h, g);
                    if k == 0 { low } else { high }
                };
                dots(&mut dot, half(0), half(1), x.add((4 * k + g) * R));
            });
            for h in 0..2 {
                let scale = scale(k, h);
                let magic = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
                for r in 0..R {
                    let t = _mm512_fmadd_ps(_mm512_castsi512_ps(dot[h][r]), scale, magic);
                    acc[h][r] = _mm512_fmadd_ps(t, _mm512_set1_ps(f32::from_bits(*act.add(r))), acc[h][r]);
                }
            }
        });
    }
}

/// Four k of 32 outputs against R rows.
///
/// # Safety
/// R words at `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dots<const R: usize>(dot: &mut [[__m512i; R]; 2], a: __m512i, b: __m512i, x: *const u32) {
    for r in 0..R {
        // SAFETY: by the contract.
        let v = unsafe { _mm512_set1_epi32(*x.add(r) as i32) };
        dot[0][r] = _mm512_dpbusd_epi32(dot[0][r], a, v);
        dot[1][r] = _mm512_dpbusd_epi32(dot[1][r], b, v);
    }
}

/// # Safety
/// Line `i` lies in the block at `q`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn line(q: *const u8, i: usize) -> __m512i {
    // SAFETY: by the contract; panels start on a cache line.
    unsafe { _mm512_load_si512(q.add(i * 64).cast()) }
}

/// # Safety
/// 32 f16 at `p`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn half_scale(p: *const u8, half: usize) -> __m512 {
    // SAFETY: by the contract; panels start on a cache line.
    unsafe { _mm512_cvtph_ps(_mm256_load_si256(p.add(32 * half).cast())) }
}

/// # Safety
/// 32 bf16 at `p`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn brain(p: *const u8, half: usize) -> __m512 {
    // SAFETY: by the contract; panels start on a cache line.
    let v = unsafe { _mm256_load_si256(p.add(32 * half).cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v)))
}

/// # Safety
/// 16 bytes at `p`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn bytes(p: *const u8) -> __m512 {
    // SAFETY: by the contract.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(p.cast()))) }
}

/// # Safety
/// 16 bytes at `p`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn signed_bytes(p: *const u8) -> __m512 {
    // SAFETY: by the contract.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(p.cast()))) }
}

/// # Safety
/// As [`LinearFns::panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn load<const R: usize>(job: &Job<'_>, tile: &Tile<'_>) -> [[__m512; R]; 2] {
    let mut acc = [[_mm512_setzero_ps(); R]; 2];
    if job.first != 0 {
        for (h, acc) in acc.iter_mut().enumerate() {
            let mask = mask(job.lanes, h);
            for (r, acc) in acc.iter_mut().enumerate() {
                // SAFETY: masked to the lanes that exist.
                *acc = unsafe { _mm512_maskz_loadu_ps(mask, tile.y.wrapping_add(r * job.y_stride + 16 * h)) };
            }
        }
    }
    acc
}

/// # Safety
/// As [`LinearFns::panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn store<const R: usize>(job: &Job<'_>, tile: &Tile<'_>, acc: &[[__m512; R]; 2]) {
    for (h, acc) in acc.iter().enumerate() {
        let mask = mask(job.lanes, h);
        for (r, acc) in acc.iter().enumerate() {
            // SAFETY: masked to the lanes that exist.
            unsafe { _mm512_mask_storeu_ps(tile.y.wrapping_add(r * job.y_stride + 16 * h), mask, *acc) };
        }
    }
}

#[inline]
fn mask(lanes: usize, half: usize) -> __mmask16 {
    (((1u64 << lanes) - 1) >> (16 * half)) as u16
}

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn plain_job<const F: u8>(job: &Job<'_>) {
    assert!(job.w.len() == job.blocks * if F == F32 { 128 } else { 64 }, "whole blocks");
    // SAFETY: passed on; the loads lie in `w` and the stores in `room`, as asserted.
    unsafe {
        if F != F32 && job.tiles.len() >= SPREAD_FROM {
            assert!(job.blocks * 128 <= PANEL_BYTES, "a K slice fits");
            let mut room = Spread(MaybeUninit::uninit());
            let to: *mut u8 = room.0.as_mut_ptr().cast();
            for b in 0..job.blocks {
                let w = job.w.as_ptr().add(64 * b);
                let pair = if F == F16 { [half_scale(w, 0), half_scale(w, 1)] } else { [brain(w, 0), brain(w, 1)] };
                _mm512_store_ps(to.add(128 * b).cast(), pair[0]);
                _mm512_store_ps(to.add(128 * b + 64).cast(), pair[1]);
            }
            plain_tiles::<F32>(job, to);
        } else {
            plain_tiles::<F>(job, job.w.as_ptr());
        }
    }
}

/// # Safety
/// As [`LinearFns::panel`]; `w` is the weights of the job's blocks as `F`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn plain_tiles<const F: u8>(job: &Job<'_>, w: *const u8) {
    for i in job.tiles.clone() {
        let tile = &job.tile(i);
        // SAFETY: passed on.
        unsafe {
            match tile.rows {
                1 => plain::<F, 1>(job, tile, w),
                2 => plain::<F, 2>(job, tile, w),
                3 => plain::<F, 3>(job, tile, w),
                4 => plain::<F, 4>(job, tile, w),
                5 => plain::<F, 5>(job, tile, w),
                6 => plain::<F, 6>(job, tile, w),
                7 => plain::<F, 7>(job, tile, w),
                8 => plain::<F, 8>(job, tile, w),
                9 => plain::<F, 9>(job, tile, w),
                10 => plain::<F, 10>(job, tile, w),
                11 => plain::<F, 11>(job, tile, w),
                12 => plain::<F, 12>(job, tile, w),
                _ => unreachable!("a tile has 1 to 12 rows"),
            }
        }
    }
}

/// # Safety
/// As [`plain_tiles`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn plain<const F: u8, const R: usize>(job: &Job<'_>, tile: &Tile<'_>, mut w: *const u8) {
    assert!(tile.act.len() >= (job.first + job.blocks) * R, "activations for all k");
    let stride = if F == F32 { 128 } else { 64 };
    // SAFETY: the weights are the caller's, the activations are there, as asserted.
    unsafe {
        let mut acc = load::<R>(job, tile);
        let few = job.tiles.len() < SPREAD_FROM;
        let mut x = tile.act.as_ptr().add(job.first * R);
        for _ in 0..job.blocks {
            if few {
                ahead(w, stride);
            }
            let (a, b) = match F {
                F16 => (half_scale(w, 0), half_scale(w, 1)),
                BF16 => (brain(w, 0), brain(w, 1)),
                _ => (_mm512_load_ps(w.cast()), _mm512_load_ps(w.add(64).cast())),
            };
            for r in 0..R {
                let v = _mm512_set1_ps(f32::from_bits(*x.add(r)));
                acc[0][r] = _mm512_fmadd_ps(a, v, acc[0][r]);
                acc[1][r] = _mm512_fmadd_ps(b, v, acc[1][r]);
            }
            x = x.add(R);
            w = w.add(stride);
        }
        store::<R>(job, tile, &acc);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn quantize(rows: &Rows<'_>, blocks: Range<usize>, out: &mut [u32]) {
    let n = rows.rows;
    for (b, words) in blocks.zip(out.chunks_exact_mut(WORDS * n)) {
        for r in 0..n {
            let v = rows.block(r, b);
            // SAFETY: 32 floats.
            let (a, b) = unsafe { (_mm512_loadu_ps(v.as_ptr()), _mm512_loadu_ps(v.as_ptr().add(16))) };
            let top = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(b)));
            let (scale, inv) = scales(f32::from_bits(_mm512_reduce_max_epi32(top) as u32));
            let (keep, inv) = (if inv != 0.0 { !0 } else { 0 }, _mm512_set1_ps(inv));
            let a = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(a, inv));
            let b = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(b, inv));
            put_head(words, n, r, scale, _mm512_reduce_add_epi32(_mm512_add_epi32(a, b)));
            let q = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
            let mut q_words = [0u32; 8];
            // SAFETY: 32 bytes.
            unsafe { _mm256_storeu_si256(q_words.as_mut_ptr().cast(), q) };
            for (g, word) in q_words.into_iter().enumerate() {
                words[(4 + g) * n + r] = word;
            }
        }
    }
}
