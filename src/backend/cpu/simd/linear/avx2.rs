//! AVX2 with FMA and F16C. Same panels, same order, same bits.
//!
//! Quantised: the weights of 8 outputs (a quarter of a panel) by 32 k are unpacked into 8 registers, and all rows of a tile
//! pass over them; their sums lie in memory, one load and store for 256 products. So weights stream once, in order, whatever
//! the number of rows. `maddubs` sums of unsigned quants fit an i16 for a while ([`Quant::FIT`]), and one `madd` then widens
//! them all. With zero-point 128 quants are signed, so the sign moves to the activation (which is never -128).
//!
//! AVX-VNNI multiplies and adds four bytes at once: nothing overflows, and quants of 8 bits stay as they are stored, since
//! what is too much is taken out where the sum starts.
//!
//! Plain: sums stay in registers, R rows by 16 or 32 outputs. Half of a panel at a time goes over [`PASS`] k.
//!
//! A block's words lie row after row here, `[r][WORDS]`, and in place of the start for zero-point 128 there is that for
//! zero-point 32 and the first half of k.
// Several arrays of registers go in step; iterators over them cost spills.
#![allow(clippy::needless_range_loop)]

mod dot;

use super::{Job, LinearFns, PANEL_BYTES, Rows, Tile, ahead};
use crate::backend::cpu::acts::{MAGIC, MAGIC_BITS, WORDS, put_head, scales};
use crate::backend::cpu::panel::{IQ4NL, IQ4XS, LANES, MXFP4, Min, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quant};
use core::arch::x86_64::*;
use core::mem::MaybeUninit;
use core::ops::Range;
#[cfg(test)]
use dot::Emulated;
use dot::{Dot, Fours, Pairs, Vnni};

pub(in crate::backend::cpu) static LINEAR: LinearFns = table::<Pairs>();
/// The same with AVX-VNNI.
pub(in crate::backend::cpu) static LINEAR_VNNI: LinearFns = table::<Fours<Vnni>>();
/// The same code on processors without.
#[cfg(test)]
pub(super) static LINEAR_EMULATED: LinearFns = table::<Fours<Emulated>>();

const fn table<D: Dot>() -> LinearFns {
    LinearFns {
        rows_quant: MANY,
        rows_plain: 6,
        quantize,
        panel: [
            plain_job::<F32>,
            plain_job::<F16>,
            plain_job::<BF16>,
            quant_job::<Q8_0, D>,
            quant_job::<Q4_0, D>,
            quant_job::<Q4_1, D>,
            quant_job::<Q4K, D>,
            quant_job::<Q5_1, D>,
            quant_job::<Q5K, D>,
            quant_job::<Q6K, D>,
            quant_job::<Q5_0, D>,
            quant_job::<IQ4NL, D>,
            quant_job::<IQ4XS, D>,
            quant_job::<MXFP4, D>,
        ],
    }
}

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// The most rows in a tile: their sums take 8 KiB, a block's activations 3 KiB.
const MANY: usize = 64;
/// Where clearing room for [`MANY`] would be felt.
const FEW: usize = 8;

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quant_job<Q: Quant, D: Dot>(job: &Job<'_>) {
    for i in job.tiles.clone() {
        let (tile, first) = (&job.tile(i), i == job.tiles.start);
        // SAFETY: passed on.
        unsafe {
            match tile.rows {
                1 => quant::<Q, D, 1>(job, tile, first),
                2 => quant::<Q, D, 2>(job, tile, first),
                3 => quant::<Q, D, 3>(job, tile, first),
                ..=FEW => quant::<Q, D, FEW>(job, tile, first),
                _ => quant::<Q, D, MANY>(job, tile, first),
            }
        }
    }
}

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quant<Q: Quant, D: Dot, const R: usize>(job: &Job<'_>, tile: &Tile<'_>, first: bool) {
    let rows = if R < FEW { R } else { tile.rows };
    assert!(rows <= R, "a tile has 1 to {MANY} rows");
    assert!(job.w.len() == job.blocks * Q::BYTES, "whole blocks");
    assert!(tile.act.len() >= (job.first + job.blocks) * Q::SUBS * WORDS * rows, "activations for all blocks");
    // SAFETY: the blocks and their activations are there, as asserted; `y` is the caller's.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 4]; R];
        load(job, tile, &mut acc[..rows]);
        let mut act = tile.act.as_ptr().add(job.first * Q::SUBS * rows * WORDS);
        let mut w = job.w.as_ptr();
        for _ in 0..job.blocks {
            for j in 0..Q::SUBS {
                let sub = w.add(Q::HEAD + j * Q::SUB);
                if first {
                    // As many lines as are read, so that they come one by one.
                    ahead(sub, Q::BYTES / Q::SUBS);
                }
                for quarter in 0..4 {
                    step::<Q, D, R>(w, sub, quarter, act, &mut acc, rows);
                }
                act = act.add(rows * WORDS);
            }
            w = w.add(Q::BYTES);
        }
        store(job, tile, &acc[..rows]);
    }
}

/// One block of 32 k for 8 outputs and all rows.
///
/// # Safety
/// `act` has `WORDS` words for each row, `w` is a block and `sub` its sub-block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<Q: Quant, D: Dot, const R: usize>(
    w: *const u8,
    sub: *const u8,
    quarter: usize,
    act: *const u32,
    acc: &mut [[__m256; 4]; R],
    rows: usize,
) {
    // SAFETY: by the contract.
    unsafe {
        let d = if Q::BRAIN { brain(w, quarter) } else { half_scale(w, quarter) };
        let part = |i: usize| sub.add(32 * i + 8 * quarter);
        let (scales, min) = match Q::MIN {
            _ if Q::TWO => ([_mm256_mul_ps(d, signed_bytes(part(0))), _mm256_mul_ps(d, signed_bytes(part(1)))], d),
            Min::None if Q::SUBS == 1 => ([d; 2], d),
            Min::None => ([_mm256_mul_ps(d, signed_bytes(part(0))); 2], d),
            _ if Q::SUBS == 1 => ([d; 2], half_scale(w.add(64), quarter)),
            _ => {
                let m = half_scale(w.add(64), quarter);
                ([_mm256_mul_ps(d, bytes(part(0))); 2], _mm256_mul_ps(m, bytes(part(1))))
            }
        };
        // MAGIC * scale is exact, so the fma gives dot * scale with its one rounding.
        let magic = scales.map(|s| _mm256_mul_ps(s, _mm256_set1_ps(-MAGIC)));
        let signed = Q::SIGNED && !(D::FOURS && Q::BITS == 8);
        let q = unpack::<Q>(sub.add(Q::SUB_HEAD), quarter, signed);
        let abs = if signed { q.map(|q| _mm256_abs_epi8(q)) } else { q };
        for r in 0..rows {
            let act = act.add(r * WORDS);
            let scale_x = _mm256_set1_ps(f32::from_bits(*act));
            let a = &mut acc[r][quarter];
            let mut add = |dot: __m256i, half: usize| {
                let t = _mm256_fmadd_ps(_mm256_castsi256_ps(dot), scales[half], magic[half]);
                *a = _mm256_fmadd_ps(t, scale_x, *a);
            };
            if Q::TWO {
                add(D::dot::<Q>(&q, &abs, act, 0, 4), 0);
                add(D::dot::<Q>(&q, &abs, act, 4, 4), 1);
            } else {
                add(D::dot::<Q>(&q, &abs, act, 0, 8), 0);
            }
            let sum = || _mm256_set1_ps(f32::from_bits(*act.add(1)));
            match Q::MIN {
                Min::None => {}
                Min::Plus => *a = _mm256_fmadd_ps(min, sum(), *a),
                Min::Minus => *a = _mm256_fnmadd_ps(min, sum(), *a),
            }
        }
    }
}

/// The quants of 8 outputs, a vector for four k: with a table as signed bytes, and of 8 bits where `signed`; else as they are
/// stored.
///
/// # Safety
/// `q` points to a sub-block's quants.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<Q: Quant>(q: *const u8, quarter: usize, signed: bool) -> [__m256i; 8] {
    let (half, part) = (quarter / 2, quarter % 2);
    let mut out = [_mm256_setzero_si256(); 8];
    // Line `l` of `lines` a half.
    // SAFETY: by the contract; panels start on a cache line.
    let line =
        |q: *const u8, lines: usize, l: usize| unsafe { _mm256_load_si256(q.add((lines * half + l) * 64 + 32 * part).cast()) };
    if Q::BITS == 8 {
        for g in 0..8 {
            out[g] = line(q, 8, g);
            if signed {
                out[g] = _mm256_xor_si256(out[g], _mm256_set1_epi8(-128));
            }
        }
        return out;
    }
    let low = _mm256_set1_epi8(15);
    for l in 0..4 {
        let line = line(q, 4, l);
        out[l] = _mm256_and_si256(line, low);
        out[4 + l] = _mm256_and_si256(_mm256_srli_epi16::<4>(line), low);
    }
    // SAFETY: the lines of higher bits follow.
    let above = unsafe { q.add(512) };
    if Q::BITS == 5 {
        let (bits, fifth) = (line(above, 1, 0), _mm256_set1_epi8(16));
        for g in 0..8 {
            out[g] = _mm256_or_si256(out[g], _mm256_and_si256(shift(bits, 4 - g as i32), fifth));
        }
    }
    if Q::BITS == 6 {
        let (pairs, high) = ([line(above, 2, 0), line(above, 2, 1)], _mm256_set1_epi8(0x30));
        for g in 0..8 {
            out[g] = _mm256_or_si256(out[g], _mm256_and_si256(shift(pairs[g / 4], 4 - 2 * (g % 4) as i32), high));
        }
    }
    if let Some(table) = Q::TABLE {
        // SAFETY: 16 bytes.
        let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        out = out.map(|codes| _mm256_shuffle_epi8(table, codes));
    }
    out
}

/// Bits to the left, or to the right by a negative number; what crosses bytes is for the caller to mask.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn shift(v: __m256i, left: i32) -> __m256i {
    match left {
        0 => v,
        1.. => _mm256_sll_epi16(v, _mm_cvtsi32_si128(left)),
        _ => _mm256_srl_epi16(v, _mm_cvtsi32_si128(-left)),
    }
}

/// # Safety
/// As [`LinearFns::panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain_job<const F: u8>(job: &Job<'_>) {
    let stride = if F == F32 { 128 } else { 64 };
    assert!(job.w.len() == job.blocks * stride, "whole blocks");
    // SAFETY: the weights are there, as asserted; the rest is passed on.
    unsafe {
        if F != F32 && job.tiles.len() >= SPREAD_FROM {
            assert!(job.blocks <= SPREAD, "a K slice fits");
            let mut room = Spread(MaybeUninit::uninit());
            let to: *mut f32 = room.0.as_mut_ptr().cast();
            for k in 0..job.blocks {
                for quarter in 0..4 {
                    _mm256_store_ps(to.add(32 * k + 8 * quarter), weights::<F>(job.w.as_ptr().add(stride * k), quarter));
                }
            }
            plain_tiles::<F32>(job, to.cast(), false);
        } else {
            plain_tiles::<F>(job, job.w.as_ptr(), true);
        }
    }
}

/// From this many tiles on, half precision is widened once instead of in every tile.
const SPREAD_FROM: usize = 3;
/// k of a slice that several tiles go over.
const SPREAD: usize = PANEL_BYTES / (4 * LANES);

/// Room for a slice's weights, widened.
#[repr(C, align(64))]
struct Spread(MaybeUninit<[f32; LANES * SPREAD]>);

/// # Safety
/// As [`LinearFns::panel`]; the weights are at `w`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain_tiles<const F: u8>(job: &Job<'_>, w: *const u8, first: bool) {
    for i in job.tiles.clone() {
        let (tile, first) = (&job.tile(i), first && i == job.tiles.start);
        // SAFETY: passed on.
        unsafe {
            match tile.rows {
                1 => plain::<F, 1, 4>(job, tile, w, first),
                2 => plain::<F, 2, 4>(job, tile, w, first),
                3 => plain::<F, 3, 4>(job, tile, w, first),
                4 => plain::<F, 4, 2>(job, tile, w, first),
                5 => plain::<F, 5, 2>(job, tile, w, first),
                6 => plain::<F, 6, 2>(job, tile, w, first),
                _ => unreachable!("a tile has 1 to 6 rows"),
            }
        }
    }
}

/// `Q` quarters at a time.
///
/// # Safety
/// As [`LinearFns::panel`]; the weights are at `w`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain<const F: u8, const R: usize, const Q: usize>(job: &Job<'_>, tile: &Tile<'_>, w: *const u8, first: bool) {
    let stride = if F == F32 { 128 } else { 64 };
    assert!(tile.act.len() >= (job.first + job.blocks) * R, "activations for all k");
    // SAFETY: as in `quant`.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 4]; R];
        load(job, tile, &mut acc);
        for from in (0..job.blocks).step_by(PASS) {
            let here = PASS.min(job.blocks - from);
            let x = &tile.act[(job.first + from) * R..][..here * R];
            for part in 0..4 / Q {
                pass::<F, R, Q>(w.add(from * stride), x, part, first, &mut acc);
            }
        }
        store(job, tile, &acc);
    }
}

/// Some k of R rows for `Q` quarters of a panel.
///
/// # Safety
/// `x` has R values for each of the `32 * x.len() / R` weights at `w`.
// In one function with all passes the compiler runs out of registers.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pass<const F: u8, const R: usize, const Q: usize>(
    w: *const u8,
    x: &[u32],
    part: usize,
    first: bool,
    acc: &mut [[__m256; 4]; R],
) {
    let stride = if F == F32 { 128 } else { 64 };
    let mut sums = [[_mm256_setzero_ps(); Q]; R];
    for r in 0..R {
        for q in 0..Q {
            sums[r][q] = acc[r][part * Q + q];
        }
    }
    // SAFETY: by the contract.
    unsafe {
        let mut w = w;
        for (k, x) in x.chunks_exact(R).enumerate() {
            if first {
                // Each pass names a part of the lines that the next ones read.
                if Q == 4 {
                    ahead(w, stride);
                } else if F == F32 {
                    ahead(w.wrapping_add(64 * part), 64);
                } else if k % 2 == part {
                    ahead(w, 64);
                }
            }
            // Few registers are left: two weights and one value, or three values and one weight.
            if Q == 2 {
                let a: [__m256; 2] = [weights::<F>(w, 2 * part), weights::<F>(w, 2 * part + 1)];
                for r in 0..R {
                    let x = _mm256_set1_ps(f32::from_bits(x[r]));
                    for q in 0..Q {
                        sums[r][q] = _mm256_fmadd_ps(a[q], x, sums[r][q]);
                    }
                }
            } else {
                let mut xs = [_mm256_setzero_ps(); R];
                for r in 0..R {
                    xs[r] = _mm256_set1_ps(f32::from_bits(x[r]));
                }
                for q in 0..Q {
                    let a = weights::<F>(w, part * Q + q);
                    for r in 0..R {
                        sums[r][q] = _mm256_fmadd_ps(a, xs[r], sums[r][q]);
                    }
                }
            }
            w = w.add(stride);
        }
    }
    for r in 0..R {
        for q in 0..Q {
            acc[r][part * Q + q] = sums[r][q];
        }
    }
}

/// k in a pass over some of the outputs before the others': 8 KiB of f32.
const PASS: usize = 64;

/// Eight of a plain format's 32 weights at `w`.
///
/// # Safety
/// 32 weights at `w`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn weights<const F: u8>(w: *const u8, quarter: usize) -> __m256 {
    // SAFETY: by the contract.
    unsafe {
        match F {
            F16 => half_scale(w, quarter),
            BF16 => brain(w, quarter),
            _ => _mm256_load_ps(w.add(32 * quarter).cast()),
        }
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

/// Where sums go on from: zero, or what is in `y`.
///
/// # Safety
/// As [`LinearFns::panel`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(job: &Job<'_>, tile: &Tile<'_>, acc: &mut [[__m256; 4]]) {
    if job.first == 0 {
        return;
    }
    for (r, acc) in acc.iter_mut().enumerate() {
        for (quarter, acc) in acc.iter_mut().enumerate() {
            // SAFETY: masked to the lanes that exist.
            *acc = unsafe { _mm256_maskload_ps(tile.y.wrapping_add(r * job.y_stride + 8 * quarter), mask(job.lanes, quarter)) };
        }
    }
}

/// # Safety
/// As [`LinearFns::panel`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(job: &Job<'_>, tile: &Tile<'_>, acc: &[[__m256; 4]]) {
    for (r, acc) in acc.iter().enumerate() {
        for (quarter, acc) in acc.iter().enumerate() {
            // SAFETY: masked to the lanes that exist.
            unsafe { _mm256_maskstore_ps(tile.y.wrapping_add(r * job.y_stride + 8 * quarter), mask(job.lanes, quarter), *acc) };
        }
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
            let sums = [_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3])].map(|s| {
                let s = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256::<1>(s));
                let s = _mm_add_epi32(s, _mm_shuffle_epi32::<0b01_00_11_10>(s));
                _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32::<0b00_00_00_01>(s)))
            });
            let words = &mut words[r * WORDS..][..WORDS];
            put_head(words, 1, 0, scale, sums[0] + sums[1]);
            words[3] = (MAGIC_BITS - 32 * sums[0]) as u32;
            // Packing interleaves the 128-bit halves: words 0 2 4 6 1 3 5 7 come out in order.
            let q = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
            let q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            // SAFETY: 32 bytes after the four words.
            unsafe { _mm256_storeu_si256(words[4..].as_mut_ptr().cast(), q) };
        }
    }
}
