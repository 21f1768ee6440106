//! Tiers of 128-bit vectors, written once over [`Four`]: V vectors of four outputs by up to four rows. Same panels, same
//! order, same bits. A tier's file supplies the vectors and the integer sums; [`table`] makes its kernels.
//!
//! Quants are unpacked to signed bytes first, their zero-points taken off, and all rows of a tile pass over them; so their
//! sums need no correction. Sums are then converted and multiplied, as in the scalar tier: where there is no fused
//! multiply-add, taking them out of a constant would cost several times that.
// Several arrays of registers go in step; iterators over them cost spills.
#![allow(clippy::needless_range_loop)]

use super::{Job, Tile, ahead};
use crate::backend::cpu::acts::WORDS;
use crate::backend::cpu::panel::{Min, Quant, Zero};

/// Four f32 lanes, and how a tier multiplies integers for as many outputs.
///
/// # Safety
/// The methods are compiled into functions that enable the tier's instructions, and run where they are there. What a pointer
/// must point to is said at each; none need be aligned.
pub(super) trait Four: Copy {
    /// Four i32.
    type Sums: Copy;
    /// 16 bytes: four k of four outputs.
    type Bytes: Copy;

    /// The same value in each lane.
    unsafe fn splat(v: f32) -> Self;
    /// Four f32.
    unsafe fn load(p: *const f32) -> Self;
    /// Room for four f32.
    unsafe fn store(self, p: *mut f32);
    /// Four f16.
    unsafe fn halves(p: *const u8) -> Self;
    /// Four bf16.
    unsafe fn brains(p: *const u8) -> Self;
    /// Four unsigned bytes.
    unsafe fn bytes(p: *const u8) -> Self;
    /// Four signed bytes.
    unsafe fn signed_bytes(p: *const u8) -> Self;
    /// `self * o`.
    unsafe fn mul(self, o: Self) -> Self;
    /// `-self`.
    unsafe fn neg(self) -> Self;
    /// `self * b + c` with one rounding.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// As numbers.
    unsafe fn numbers(sums: Self::Sums) -> Self;

    /// The same byte 16 times.
    unsafe fn byte(v: u8) -> Self::Bytes;
    /// 16 bytes.
    unsafe fn line(p: *const u8) -> Self::Bytes;
    /// `a & b`.
    unsafe fn and(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a | b`.
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a - b` in each byte, modulo 256.
    unsafe fn less(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Bits to the left, or to the right by a negative number; what comes from other bytes is any.
    unsafe fn shift(a: Self::Bytes, left: i32) -> Self::Bytes;
    /// What a table has at `places`, all below 16.
    unsafe fn of(table: &[i8; 16], places: Self::Bytes) -> Self::Bytes;
    /// Sums over `count`, 4 or 8, groups of four k from `from` on of signed bytes and R rows. `x`: 8 words of each row. Products
    /// of `fit` pairs of bytes add up in an i16; where that is more than one, bytes are 32 at most in size.
    unsafe fn dot<const R: usize, const V: usize>(
        q: &[[Self::Bytes; V]; 8],
        x: *const u32,
        from: usize,
        count: usize,
        fit: usize,
    ) -> [[Self::Sums; V]; R];
}

/// One tile and the outputs of a panel from the third argument on.
pub(super) type Kernel = unsafe fn(&Job<'_>, &Tile<'_>, usize);

pub(super) const F32: u8 = 0;
pub(super) const F16: u8 = 1;
pub(super) const BF16: u8 = 2;

/// The table of a tier: its name, a module for its functions, its vectors, its instructions, vectors of outputs at a time.
macro_rules! table {
    ($table:ident, $module:ident, $four:ty, $features:tt, $v:literal) => {
        pub(in crate::backend::cpu) static $table: LinearFns = LinearFns {
            rows_quant: 4,
            rows_plain: 4,
            quantize: $module::quantize,
            panel: [
                $module::plain::<{ four::F32 }>,
                $module::plain::<{ four::F16 }>,
                $module::plain::<{ four::BF16 }>,
                $module::quant::<Q8_0>,
                $module::quant::<Q4_0>,
                $module::quant::<Q4_1>,
                $module::quant::<Q4K>,
                $module::quant::<Q5_1>,
                $module::quant::<Q5K>,
                $module::quant::<Q6K>,
                $module::quant::<Q5_0>,
                $module::quant::<IQ4NL>,
                $module::quant::<IQ4XS>,
                $module::quant::<MXFP4>,
            ],
        };

        mod $module {
            use super::*;

            enable!(
                $features,
                pub(super) unsafe fn quantize(rows: &Rows<'_>, blocks: Range<usize>, out: &mut [u32]) {
                    scalar::quantize(rows, blocks, out);
                }
            );
            enable!(
                $features,
                pub(super) unsafe fn quant<Q: Quant>(job: &Job<'_>) {
                    let kernels =
                        [quant_rows::<Q, 1>, quant_rows::<Q, 2>, quant_rows::<Q, 3>, quant_rows::<Q, 4> as four::Kernel];
                    // SAFETY: passed on.
                    unsafe { four::run(job, 4 * $v, kernels) }
                }
            );
            // Each shape is a function: in one of all of them the compiler runs out of registers.
            enable!(
                $features,
                #[inline(never)]
                unsafe fn quant_rows<Q: Quant, const R: usize>(job: &Job<'_>, tile: &Tile<'_>, first: usize) {
                    // SAFETY: passed on.
                    unsafe { four::quant::<$four, Q, R, $v>(job, tile, first) }
                }
            );
            enable!(
                $features,
                pub(super) unsafe fn plain<const F: u8>(job: &Job<'_>) {
                    let kernels =
                        [plain_rows::<F, 1>, plain_rows::<F, 2>, plain_rows::<F, 3>, plain_rows::<F, 4> as four::Kernel];
                    // SAFETY: passed on.
                    unsafe { four::run(job, 4 * $v, kernels) }
                }
            );
            enable!(
                $features,
                #[inline(never)]
                unsafe fn plain_rows<const F: u8, const R: usize>(job: &Job<'_>, tile: &Tile<'_>, first: usize) {
                    // SAFETY: passed on.
                    unsafe { four::plain::<$four, F, R, $v>(job, tile, first) }
                }
            );
        }
    };
}
pub(super) use table;

/// Runs all tiles of a job, `width` outputs at a time.
///
/// # Safety
/// As [`LinearFns::panel`](super::LinearFns::panel).
#[inline(always)]
pub(super) unsafe fn run(job: &Job<'_>, width: usize, kernels: [Kernel; 4]) {
    for i in job.tiles.clone() {
        let tile = &job.tile(i);
        for first in (0..job.lanes).step_by(width) {
            // SAFETY: passed on.
            unsafe { kernels[tile.rows - 1](job, tile, first) };
        }
    }
}

/// # Safety
/// As [`LinearFns::panel`](super::LinearFns::panel); the tile has R rows, and `first` is a multiple of 4 V below 32.
#[inline(always)]
pub(super) unsafe fn quant<I: Four, Q: Quant, const R: usize, const V: usize>(job: &Job<'_>, tile: &Tile<'_>, first: usize) {
    assert!(job.w.len() == job.blocks * Q::BYTES, "whole blocks");
    assert!(tile.act.len() >= (job.first + job.blocks) * Q::SUBS * WORDS * R, "activations for all blocks");
    let touch = first == 0 && job.tiles.len() < 4;
    // SAFETY: the blocks and their activations are there, as asserted; `y` is the caller's.
    unsafe {
        let mut acc = load::<I, R, V>(job, tile, first);
        let mut act = tile.act.as_ptr().add(job.first * Q::SUBS * R * WORDS);
        let mut w = job.w.as_ptr();
        for _ in 0..job.blocks {
            if touch {
                ahead(w, Q::BYTES);
            }
            let (mut d, mut m) = ([I::splat(0.0); V], [I::splat(0.0); V]);
            for v in 0..V {
                let at = 2 * (first + 4 * v);
                d[v] = if Q::BRAIN { I::brains(w.add(at)) } else { I::halves(w.add(at)) };
                if Q::MIN != Min::None {
                    m[v] = I::halves(w.add(64 + at));
                }
            }
            for j in 0..Q::SUBS {
                let sub = w.add(Q::HEAD + j * Q::SUB);
                let q = unpack::<I, Q, V>(sub.add(Q::SUB_HEAD), first);
                let x = act.add(4 * R);
                let parts = if Q::TWO { 2 } else { 1 };
                for part in 0..parts {
                    let (mut scale, mut min) = (d, m);
                    for v in 0..V {
                        // Half precision times 8 bits is exact.
                        let p = sub.add(first + 4 * v);
                        match Q::MIN {
                            _ if Q::SUBS == 1 => {}
                            Min::None => scale[v] = d[v].mul(I::signed_bytes(p.add(32 * part))),
                            _ => (scale[v], min[v]) = (d[v].mul(I::bytes(p)), m[v].mul(I::bytes(p.add(32)))),
                        }
                    }
                    let dot = I::dot::<R, V>(&q, x, 4 * part, 8 / parts, Q::FIT);
                    add::<I, Q, R, V>(act, &dot, &scale, &min, &mut acc);
                }
                act = act.add(R * WORDS);
            }
            w = w.add(Q::BYTES);
        }
        store::<I, R, V>(job, tile, first, &acc);
    }
}

/// The quants of 4 V outputs from `first` on as signed bytes, vectors for four k.
///
/// # Safety
/// `q` points to a sub-block's quants.
#[inline(always)]
unsafe fn unpack<I: Four, Q: Quant, const V: usize>(q: *const u8, first: usize) -> [[I::Bytes; V]; 8] {
    let (half, part) = (first / 16, first % 16 * 4);
    // SAFETY: by the contract.
    unsafe {
        let mut out = [[I::byte(0); V]; 8];
        let (low, fifth, pair) = (I::byte(15), I::byte(16), I::byte(0x30));
        let zero = I::byte(match Q::ZERO {
            Zero::None => 0,
            Zero::Eight => 8,
            Zero::Sixteen => 16,
            Zero::ThirtyTwo => 32,
            Zero::Top => 128,
        });
        for v in 0..V {
            // Line `l` of `lines` a half, `from` bytes on.
            let at = |from: usize, lines: usize, l: usize| q.wrapping_add(from + (lines * half + l) * 64 + part + 16 * v);
            for g in 0..8 {
                let mut bytes = I::line(if Q::BITS == 8 { at(0, 8, g) } else { at(0, 4, g % 4) });
                if Q::BITS < 8 {
                    bytes = I::and(if g < 4 { bytes } else { I::shift(bytes, -4) }, low);
                }
                if Q::BITS == 5 {
                    bytes = I::or(bytes, I::and(I::shift(I::line(at(512, 1, 0)), 4 - g as i32), fifth));
                }
                if Q::BITS == 6 {
                    bytes = I::or(bytes, I::and(I::shift(I::line(at(512, 2, g / 4)), 4 - 2 * (g % 4) as i32), pair));
                }
                if let Some(table) = Q::TABLE {
                    bytes = I::of(table, bytes);
                }
                if Q::ZERO != Zero::None {
                    bytes = I::less(bytes, zero);
                }
                out[g][v] = bytes;
            }
        }
        out
    }
}

/// Integer sums of a block, or of half of it, times their scales.
///
/// # Safety
/// `act` has the block's `WORDS * R` words.
#[inline(always)]
unsafe fn add<I: Four, Q: Quant, const R: usize, const V: usize>(
    act: *const u32,
    dot: &[[I::Sums; V]; R],
    scale: &[I; V],
    min: &[I; V],
    acc: &mut [[I; V]; R],
) {
    for r in 0..R {
        // SAFETY: by the contract.
        unsafe {
            let scale_x = I::splat(f32::from_bits(*act.add(r)));
            let sum = I::splat(f32::from_bits(*act.add(R + r)));
            for v in 0..V {
                let t = I::numbers(dot[r][v]).mul(scale[v]);
                acc[r][v] = t.fma(scale_x, acc[r][v]);
                match Q::MIN {
                    Min::None => {}
                    Min::Plus => acc[r][v] = min[v].fma(sum, acc[r][v]),
                    Min::Minus => acc[r][v] = min[v].neg().fma(sum, acc[r][v]),
                }
            }
        }
    }
}

/// # Safety
/// As [`quant`].
#[inline(always)]
pub(super) unsafe fn plain<I: Four, const F: u8, const R: usize, const V: usize>(job: &Job<'_>, tile: &Tile<'_>, first: usize) {
    let stride = if F == F32 { 128 } else { 64 };
    assert!(job.w.len() == job.blocks * stride, "whole blocks");
    assert!(tile.act.len() >= (job.first + job.blocks) * R, "activations for all k");
    let touch = first == 0 && job.tiles.len() < 4;
    // SAFETY: as in `quant`.
    unsafe {
        let mut acc = load::<I, R, V>(job, tile, first);
        let mut x = tile.act.as_ptr().add(job.first * R);
        let mut w = job.w.as_ptr();
        for _ in 0..job.blocks {
            if touch {
                ahead(w, stride);
            }
            let mut a = [I::splat(0.0); V];
            for v in 0..V {
                let n = first + 4 * v;
                a[v] = match F {
                    F16 => I::halves(w.add(2 * n)),
                    BF16 => I::brains(w.add(2 * n)),
                    _ => I::load(w.add(4 * n).cast()),
                };
            }
            for r in 0..R {
                let x = I::splat(f32::from_bits(*x.add(r)));
                for v in 0..V {
                    acc[r][v] = a[v].fma(x, acc[r][v]);
                }
            }
            x = x.add(R);
            w = w.add(stride);
        }
        store::<I, R, V>(job, tile, first, &acc);
    }
}

/// What the sums start from.
///
/// # Safety
/// As [`quant`].
#[inline(always)]
unsafe fn load<I: Four, const R: usize, const V: usize>(job: &Job<'_>, tile: &Tile<'_>, first: usize) -> [[I; V]; R] {
    // SAFETY: the tier's instructions are there.
    let mut acc = [[unsafe { I::splat(0.0) }; V]; R];
    if job.first == 0 {
        return acc;
    }
    for r in 0..R {
        for v in 0..V {
            let n = first + 4 * v;
            let from = tile.y.wrapping_add(r * job.y_stride + n);
            let left = job.lanes.saturating_sub(n);
            // SAFETY: the values read are of lanes that exist.
            unsafe {
                if left >= 4 {
                    acc[r][v] = I::load(from);
                } else {
                    let mut part = [0.0; 4];
                    from.copy_to_nonoverlapping(part.as_mut_ptr(), left);
                    acc[r][v] = I::load(part.as_ptr());
                }
            }
        }
    }
    acc
}

/// # Safety
/// As [`quant`].
#[inline(always)]
unsafe fn store<I: Four, const R: usize, const V: usize>(job: &Job<'_>, tile: &Tile<'_>, first: usize, acc: &[[I; V]; R]) {
    for r in 0..R {
        for v in 0..V {
            let n = first + 4 * v;
            let to = tile.y.wrapping_add(r * job.y_stride + n);
            let left = job.lanes.saturating_sub(n);
            // SAFETY: the values written are of lanes that exist.
            unsafe {
                if left >= 4 {
                    acc[r][v].store(to);
                } else {
                    let mut part = [0.0; 4];
                    acc[r][v].store(part.as_mut_ptr());
                    part.as_ptr().copy_to_nonoverlapping(to, left);
                }
            }
        }
    }
}
