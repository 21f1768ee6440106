//! The truth that the other tiers are held to. Per output, row and block of 32 k:
//!
//! ```text
//! dot  = sum of q_w * q_x                     exact in i32
//! t    = dot as f32 * scale_w                 one rounding
//! acc  = fma(t, scale_x, acc)                 one rounding
//! acc  = fma(min_w, scale_x * sum_x, acc)     formats with a minimum
//! ```
//!
//! (with two scales to a block: the first three lines for k below 16, then for the others)
//!
//! and for plain weights `acc = fma(w, x, acc)` for k ascending.
//!
//! Without an FMA instruction a fused multiply-add takes ten others. So all of it is compiled once more with `fma` enabled, and
//! x86 machines that have it take that.

use super::{Job, LinearFns, Rows, Tile};
use crate::backend::cpu::acts::{WORDS, put_head, quantize_block};
use crate::backend::cpu::panel::{
    IQ4NL, IQ4XS, LANES, MXFP4, Min, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quant, f16_at, scale_and_min, value,
};
use crate::backend::cpu::simd::fused::{EVERYWHERE, fma};
use core::ops::Range;
use half::bf16;

pub(in crate::backend::cpu) static LINEAR: LinearFns = LinearFns {
    rows_quant: 4,
    rows_plain: 4,
    quantize,
    panel: [
        plain_base::<F32>,
        plain_base::<F16>,
        plain_base::<BF16>,
        quant_base::<Q8_0>,
        quant_base::<Q4_0>,
        quant_base::<Q4_1>,
        quant_base::<Q4K>,
        quant_base::<Q5_1>,
        quant_base::<Q5K>,
        quant_base::<Q6K>,
        quant_base::<Q5_0>,
        quant_base::<IQ4NL>,
        quant_base::<IQ4XS>,
        quant_base::<MXFP4>,
    ],
};

#[cfg(target_arch = "x86_64")]
pub(in crate::backend::cpu) static LINEAR_FMA: LinearFns = LinearFns {
    rows_quant: 4,
    rows_plain: 4,
    quantize,
    panel: [
        plain_fma::<F32>,
        plain_fma::<F16>,
        plain_fma::<BF16>,
        quant_fma::<Q8_0>,
        quant_fma::<Q4_0>,
        quant_fma::<Q4_1>,
        quant_fma::<Q4K>,
        quant_fma::<Q5_1>,
        quant_fma::<Q5K>,
        quant_fma::<Q6K>,
        quant_fma::<Q5_0>,
        quant_fma::<IQ4NL>,
        quant_fma::<IQ4XS>,
        quant_fma::<MXFP4>,
    ],
};

#[inline(always)]
pub(super) fn quantize(rows: &Rows<'_>, blocks: Range<usize>, out: &mut [u32]) {
    for (b, words) in blocks.zip(out.chunks_exact_mut(WORDS * rows.rows)) {
        for r in 0..rows.rows {
            let (scale, q) = quantize_block(rows.block(r, b));
            put_head(words, rows.rows, r, scale, q.iter().map(|&q| i32::from(q)).sum());
            for (g, q) in q.as_chunks::<4>().0.iter().enumerate() {
                words[(4 + g) * rows.rows + r] = u32::from_le_bytes(q.map(|q| q as u8));
            }
        }
    }
}

/// # Safety
/// As [`LinearFns::panel`].
unsafe fn quant_base<Q: Quant>(job: &Job<'_>) {
    // SAFETY: passed on.
    unsafe { quant::<Q, EVERYWHERE>(job) }
}

/// # Safety
/// As [`LinearFns::panel`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma")]
unsafe fn quant_fma<Q: Quant>(job: &Job<'_>) {
    // SAFETY: passed on.
    unsafe { quant::<Q, true>(job) }
}

/// # Safety
/// As [`LinearFns::panel`].
unsafe fn plain_base<P: Plain>(job: &Job<'_>) {
    // SAFETY: passed on.
    unsafe { plain::<P, EVERYWHERE>(job) }
}

/// # Safety
/// As [`LinearFns::panel`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma")]
unsafe fn plain_fma<P: Plain>(job: &Job<'_>) {
    // SAFETY: passed on.
    unsafe { plain::<P, true>(job) }
}

/// # Safety
/// As [`LinearFns::panel`].
#[inline(always)]
unsafe fn quant<Q: Quant, const FUSED: bool>(job: &Job<'_>) {
    assert!(job.w.len() == job.blocks * Q::BYTES, "whole blocks");
    for tile in job.tiles.clone().map(|i| job.tile(i)) {
        for r in 0..tile.rows {
            // SAFETY: passed on.
            let y = unsafe { row(job, &tile, r) };
            let mut acc = start(job, y);
            for (b, block) in job.w.chunks_exact(Q::BYTES).enumerate() {
                for j in 0..Q::SUBS {
                    let words = &tile.act[((job.first + b) * Q::SUBS + j) * WORDS * tile.rows..][..WORDS * tile.rows];
                    let sub = &block[Q::HEAD + j * Q::SUB..][..Q::SUB];
                    step::<Q, FUSED>(block, sub, words, tile.rows, r, &mut acc);
                }
            }
            y.copy_from_slice(&acc[..y.len()]);
        }
    }
}

#[inline(always)]
fn step<Q: Quant, const FUSED: bool>(block: &[u8], sub: &[u8], words: &[u32], rows: usize, r: usize, acc: &mut [f32; LANES]) {
    let word = |i: usize| words[i * rows + r];
    let (scale_x, sum_x) = (f32::from_bits(word(0)), f32::from_bits(word(1)));
    let parts = if Q::TWO { 2 } else { 1 };
    for part in 0..parts {
        let mut dot = [0; LANES];
        for g in part * 4..part * 4 + 8 / parts {
            let x = word(4 + g).to_le_bytes().map(|q| i32::from(q as i8));
            for (n, dot) in dot.iter_mut().enumerate() {
                for (i, x) in x.iter().enumerate() {
                    *dot += value::<Q>(&sub[Q::SUB_HEAD..], n, 4 * g + i) * x;
                }
            }
        }
        for (n, (acc, dot)) in acc.iter_mut().zip(dot).enumerate() {
            let (scale, min) = scale_and_min::<Q>(block, sub, n, part);
            *acc = fma::<FUSED>(dot as f32 * scale, scale_x, *acc);
            match Q::MIN {
                Min::None => {}
                Min::Plus => *acc = fma::<FUSED>(min, sum_x, *acc),
                Min::Minus => *acc = fma::<FUSED>(-min, sum_x, *acc),
            }
        }
    }
}

/// A plain format's way to a number.
trait Plain {
    const BYTES: usize;
    fn at(block: &[u8], n: usize) -> f32;
}

struct F32;
struct F16;
struct BF16;

impl Plain for F32 {
    const BYTES: usize = 4 * LANES;

    #[inline(always)]
    fn at(block: &[u8], n: usize) -> f32 {
        f32::from_le_bytes(block[4 * n..][..4].try_into().expect("four bytes"))
    }
}

impl Plain for F16 {
    const BYTES: usize = 2 * LANES;

    #[inline(always)]
    fn at(block: &[u8], n: usize) -> f32 {
        f16_at(block, n)
    }
}

impl Plain for BF16 {
    const BYTES: usize = 2 * LANES;

    #[inline(always)]
    fn at(block: &[u8], n: usize) -> f32 {
        f32::from_bits(u32::from(bf16::from_le_bytes([block[2 * n], block[2 * n + 1]]).to_bits()) << 16)
    }
}

/// # Safety
/// As [`LinearFns::panel`].
#[inline(always)]
unsafe fn plain<P: Plain, const FUSED: bool>(job: &Job<'_>) {
    assert!(job.w.len() == job.blocks * P::BYTES, "whole blocks");
    for tile in job.tiles.clone().map(|i| job.tile(i)) {
        for r in 0..tile.rows {
            // SAFETY: passed on.
            let y = unsafe { row(job, &tile, r) };
            let mut acc = start(job, y);
            let x = tile.act[job.first * tile.rows..].chunks_exact(tile.rows);
            for (block, x) in job.w.chunks_exact(P::BYTES).zip(x) {
                let x = f32::from_bits(x[r]);
                for (n, acc) in acc.iter_mut().enumerate() {
                    *acc = fma::<FUSED>(P::at(block, n), x, *acc);
                }
            }
            y.copy_from_slice(&acc[..y.len()]);
        }
    }
}

/// The outputs of row `r`.
///
/// # Safety
/// As [`LinearFns::panel`].
#[inline(always)]
unsafe fn row<'a>(job: &Job<'_>, tile: &Tile<'_>, r: usize) -> &'a mut [f32] {
    // SAFETY: the caller owns `lanes` values in each row of `y`.
    unsafe { core::slice::from_raw_parts_mut(tile.y.add(r * job.y_stride), job.lanes) }
}

#[inline(always)]
fn start(job: &Job<'_>, y: &[f32]) -> [f32; LANES] {
    let mut acc = [0.0; LANES];
    if job.first != 0 {
        acc[..y.len()].copy_from_slice(y);
    }
    acc
}
