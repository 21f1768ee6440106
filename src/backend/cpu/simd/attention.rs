//! Attention of a tile of query rows over one piece of a paged cache, written once over [`Lanes`].
//!
//! ```text
//! s[r][t] = sum over d of q[r][d] * k[t][d]     lane = token, d ascending, one fused chain
//! s = cap * tanh(s)                             where there is a cap
//! m[r] = max s, p[r][t] = 2^(s - m)             over the row's own tokens of the piece
//! l[r] = sum of p                               in 16 lanes by t % 16, then by halves
//! o[r][d] = sum over t of p[r][t] * v[t][d]     lane = dimension, t ascending, one fused chain
//! ```
//!
//! Where values are part of the keys, a piece's are turned into rows first, as exact copies: the same sums, the same bits.
//! Neither product needs a sum across lanes. A row's bits depend on its own tokens alone: those beyond its range are never
//! added, not even with the weight 0, so that garbage in them stays there. How many rows share a tile changes no bit.
#![allow(unsafe_code)]
// Indices over rows and vectors at once: what the compiler turns into registers.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "aarch64")]
use super::lanes::Neon;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512, ScalarFma, Sse41};
use super::lanes::{Base, Bf16, Elem, LANES, Lanes};
use super::math;
use crate::dtype::KvDType;
use std::ops::Range;

/// Tokens between two joins. Pieces start at multiples of it.
pub(in super::super) const PIECE: usize = 256;
/// Vectors of tokens in a piece.
pub(in super::super) const VECTORS: usize = PIECE / LANES;
/// The most rows in a tile, whatever the tier.
pub(in super::super) const MAX_ROWS: usize = 12;
/// Values after the sums of a part: largest score, sum of the weights, and room up to a whole line.
pub(in super::super) const PART_TAIL: usize = LANES;

/// A tile and a piece.
pub(in super::super) struct PieceJob<'a> {
    /// `[qk_dim][height]`, height being [`AttnKernels::height`] of the rows. Scores are powers of two, unless there is a cap.
    pub(in super::super) q: &'a [f32],
    /// Each row's tokens, first and end, counted from the piece's start.
    pub(in super::super) ranges: &'a [(usize, usize)],
    /// For each 16 tokens: their keys, `[qk_dim]` rows of 16 values, `block_size` values apart.
    pub(in super::super) keys: [*const u8; VECTORS],
    /// For each 16 tokens: their values, 16 rows of `v_width`, one after the other.
    pub(in super::super) values: [*const u8; VECTORS],
    /// Width of a key.
    pub(in super::super) qk_dim: usize,
    /// Width of a value, a multiple of 16.
    pub(in super::super) v_width: usize,
    /// Tokens in a block of the cache.
    pub(in super::super) block_size: usize,
    /// Factor on the tanh of the scores.
    pub(in super::super) cap: Option<f32>,
    /// Scratch of `height * PIECE`.
    pub(in super::super) scores: &'a mut [f32],
    /// `[height][v_width + PART_TAIL]`: sums, then the largest score and the sum of weights. Rows without tokens are left.
    pub(in super::super) parts: &'a mut [f32],
}

/// A piece whose values are part of its keys, to be laid out as values.
pub(in super::super) struct TurnJob<'a> {
    /// As in [`PieceJob`].
    pub(in super::super) keys: &'a [*const u8; VECTORS],
    /// The vectors of tokens to turn.
    pub(in super::super) vectors: Range<usize>,
    /// Width of a key.
    pub(in super::super) qk_dim: usize,
    /// Width of a value, a multiple of 16: less than 16 wider than a key.
    pub(in super::super) v_width: usize,
    /// Tokens in a block of the cache.
    pub(in super::super) block_size: usize,
    /// `[PIECE][v_width]` of the cache's type, on cache lines. Vectors that are not turned are left.
    pub(in super::super) to: &'a mut [u8],
}

/// The attention kernels of a tier.
pub(in super::super) struct AttnKernels {
    /// Rows that the tier's tiles have, rising.
    heights: &'static [usize],
    piece_f32: unsafe fn(&mut PieceJob<'_>),
    piece_f16: unsafe fn(&mut PieceJob<'_>),
    piece_bf16: unsafe fn(&mut PieceJob<'_>),
    join: unsafe fn(&mut [f32], &[f32]),
    finish: unsafe fn(&[f32], Option<f32>, &mut [f32]),
    turn_f32: unsafe fn(&mut TurnJob<'_>),
    turn_f16: unsafe fn(&mut TurnJob<'_>),
    turn_bf16: unsafe fn(&mut TurnJob<'_>),
    narrow: unsafe fn(&[f32], &mut [u16]),
}

impl AttnKernels {
    /// The most rows in a tile.
    pub(in super::super) fn tile_rows(&self) -> usize {
        self.heights[self.heights.len() - 1]
    }

    /// Rows of the tile that `rows` rows go into.
    pub(in super::super) fn height(&self, rows: usize) -> usize {
        *self.heights.iter().find(|&&h| h >= rows).expect("no more rows than a tile has")
    }

    /// Runs a tile over a piece of a cache of this type.
    ///
    /// # Safety
    /// For each vector of tokens that a row's range meets, `keys` and `values` point to what the fields' docs say.
    pub(in super::super) unsafe fn piece(&self, dtype: KvDType, job: &mut PieceJob<'_>) {
        let height = self.height(job.ranges.len());
        assert!(job.q.len() >= job.qk_dim * height && job.scores.len() >= height * PIECE && job.v_width.is_multiple_of(LANES));
        assert!(job.parts.len() >= height * (job.v_width + PART_TAIL) && job.ranges.iter().all(|r| r.1 <= PIECE));
        // SAFETY: lengths are as asserted, pointers as the caller promises; the tier's instructions are there.
        unsafe {
            match dtype {
                KvDType::F32 => (self.piece_f32)(job),
                KvDType::F16 => (self.piece_f16)(job),
                KvDType::BF16 => (self.piece_bf16)(job),
            }
        }
    }

    /// Adds a part to what the pieces before it gave; both are `[v_width + PART_TAIL]`.
    pub(in super::super) fn join(&self, state: &mut [f32], part: &[f32]) {
        assert!(state.len() == part.len() && part.len().is_multiple_of(LANES) && part.len() > LANES);
        // SAFETY: the tier's instructions are there.
        unsafe { (self.join)(state, part) }
    }

    /// The weighted mean: sums over the sum of weights. A sink is one more score, a power of two, whose value is 0.
    pub(in super::super) fn finish(&self, state: &[f32], sink: Option<f32>, out: &mut [f32]) {
        assert!(out.len() + PART_TAIL <= state.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.finish)(state, sink, out) }
    }

    /// Lays the first dimensions of a cache's keys out as values.
    ///
    /// # Safety
    /// `keys` of `vectors` point to what [`PieceJob`] says.
    pub(in super::super) unsafe fn turn(&self, dtype: KvDType, job: &mut TurnJob<'_>) {
        let bytes = dtype.bytes();
        assert!(job.vectors.end <= VECTORS && job.to.len() >= job.vectors.end * LANES * job.v_width * bytes);
        assert!(job.v_width.is_multiple_of(LANES) && job.v_width < job.qk_dim + LANES);
        // SAFETY: lengths are as asserted, pointers as the caller promises; the tier's instructions are there.
        unsafe {
            match dtype {
                KvDType::F32 => (self.turn_f32)(job),
                KvDType::F16 => (self.turn_f16)(job),
                KvDType::BF16 => (self.turn_bf16)(job),
            }
        }
    }

    /// To half precision.
    pub(in super::super) fn narrow(&self, from: &[f32], to: &mut [u16]) {
        assert_eq!(from.len(), to.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.narrow)(from, to) }
    }
}

/// The tile shapes of a tier: `rows: token vectors at a time in the scores, value vectors at a time in the sums`.
macro_rules! tier {
    ($table:ident, $module:ident, $lanes:ident, $features:tt, $($rows:literal: $b:literal, $n:literal;)*) => {
        pub(in super::super) static $table: AttnKernels = AttnKernels {
            heights: &[$($rows),*],
            piece_f32: $module::piece::<f32>,
            piece_f16: $module::piece::<u16>,
            piece_bf16: $module::piece::<Bf16>,
            join: $module::join,
            finish: $module::finish,
            turn_f32: $module::turn::<f32>,
            turn_f16: $module::turn::<u16>,
            turn_bf16: $module::turn::<Bf16>,
            narrow: $module::narrow,
        };

        mod $module {
            use super::*;

            enable!($features, pub(super) unsafe fn piece<E: Elem>(job: &mut PieceJob<'_>) {
                let rows = job.ranges.len();
                // SAFETY: `AttnKernels::piece`'s.
                unsafe {
                    $(if rows <= $rows {
                        return super::piece(job, scores::<E, $rows, $b>, softmax, weigh::<E, $rows, $n>, weigh::<E, 1, $n>);
                    })*
                }
            });
            // Each loop is a function: in one of all shapes the compiler runs out of registers.
            enable!($features, #[inline(never)] unsafe fn scores<E: Elem, const R: usize, const B: usize>(
                job: &mut PieceJob<'_>,
                first: usize,
                end: usize,
            ) {
                // SAFETY: the caller's.
                unsafe { super::scores::<$lanes, E, R, B>(job, first, end) }
            });
            enable!($features, #[inline(never)] unsafe fn softmax(job: &mut PieceJob<'_>) {
                super::softmax::<$lanes>(job);
            });
            enable!($features, #[inline(never)] unsafe fn weigh<E: Elem, const R: usize, const N: usize>(
                job: &mut PieceJob<'_>,
                row: usize,
                first: usize,
                end: usize,
            ) {
                // SAFETY: the caller's.
                unsafe { super::weigh::<$lanes, E, R, N>(job, row, first, end) }
            });
            enable!($features, pub(super) unsafe fn join(state: &mut [f32], part: &[f32]) { super::join::<$lanes>(state, part) });
            enable!($features, pub(super) unsafe fn finish(state: &[f32], sink: Option<f32>, out: &mut [f32]) {
                super::finish::<$lanes>(state, sink, out)
            });
            enable!($features, pub(super) unsafe fn turn<E: Elem>(job: &mut TurnJob<'_>) {
                // SAFETY: `AttnKernels::turn`'s.
                unsafe { super::turn::<$lanes, E>(job) }
            });
            enable!($features, pub(super) unsafe fn narrow(from: &[f32], to: &mut [u16]) { super::narrow::<$lanes>(from, to) });
        }
    };
}

tier!(SCALAR, scalar, Base, "", 1: 1, 1; 2: 1, 1; 4: 1, 1;);
#[cfg(target_arch = "x86_64")]
tier!(SCALAR_FMA, scalar_fma, ScalarFma, "fma", 1: 1, 1; 2: 1, 1; 4: 1, 1;);
// Four registers a vector, and a multiply-add needs several more: one row at a time loses nothing.
#[cfg(target_arch = "x86_64")]
tier!(SSE41, sse41, Sse41, "ssse3,sse4.1", 1: 1, 1; 2: 1, 1; 4: 1, 1;);
// 32 registers, four a vector: at most 24 hold sums.
#[cfg(target_arch = "aarch64")]
tier!(NEON, neon, Neon, "neon", 1: 4, 4; 2: 2, 2; 3: 2, 2; 4: 1, 1; 6: 1, 1;);
// 16 registers, two a vector: at most 12 hold sums.
#[cfg(target_arch = "x86_64")]
tier!(AVX2, avx2, Avx2, "avx2,fma,f16c", 1: 4, 4; 2: 2, 2; 3: 2, 2; 4: 1, 1; 6: 1, 1;);
// 32 registers: at most 24 hold sums.
#[cfg(target_arch = "x86_64")]
tier!(AVX512, avx512, Avx512, "avx512f,avx512bw,avx512vl,avx2,fma,f16c",
    1: 8, 4; 2: 4, 4; 3: 4, 4; 4: 4, 4; 6: 4, 4; 8: 2, 2; 12: 2, 2;);

#[inline(always)]
unsafe fn piece(
    job: &mut PieceJob<'_>,
    scores: unsafe fn(&mut PieceJob<'_>, usize, usize),
    softmax: unsafe fn(&mut PieceJob<'_>),
    weigh: unsafe fn(&mut PieceJob<'_>, usize, usize, usize),
    weigh_one: unsafe fn(&mut PieceJob<'_>, usize, usize, usize),
) {
    let (mut first, mut end, mut all_first, mut all_end) = (PIECE, 0, 0, PIECE);
    for &(f, e) in job.ranges {
        (all_first, all_end) = (all_first.max(f), all_end.min(e));
        if f < e {
            (first, end) = (first.min(f), end.max(e));
        }
    }
    if first >= end {
        return;
    }
    // SAFETY: tokens first..end have keys.
    unsafe { scores(job, first / LANES, end.div_ceil(LANES)) };
    // SAFETY: the tier's instructions are there.
    unsafe { softmax(job) };
    let width = job.v_width + PART_TAIL;
    for r in 0..job.ranges.len() {
        job.parts[r * width..][..job.v_width].fill(0.0);
    }
    // Tokens that all rows see go through the whole tile; those of some rows only, row by row, before and after.
    let (all_first, all_end) = if all_first < all_end { (all_first, all_end) } else { (PIECE, PIECE) };
    for r in 0..job.ranges.len() {
        let (f, e) = job.ranges[r];
        // SAFETY: the row's own tokens have values.
        unsafe { weigh_one(job, r, f, e.min(all_first)) };
    }
    // SAFETY: every row's tokens have values.
    unsafe { weigh(job, 0, all_first, all_end) };
    for r in 0..job.ranges.len() {
        let (f, e) = job.ranges[r];
        // SAFETY: the row's own tokens have values.
        unsafe { weigh_one(job, r, f.max(all_end), e) };
    }
}

/// Scores of all rows for the vectors `first..end`, and of those that fill the last group of B up.
#[inline(always)]
unsafe fn scores<L: Lanes, E: Elem, const R: usize, const B: usize>(job: &mut PieceJob<'_>, first: usize, end: usize) {
    for group in (first / B * B..end).step_by(B) {
        let (mut at, mut next) = ([job.keys[first].cast::<E>(); B], [std::ptr::null::<u8>(); B]);
        for b in 0..B {
            at[b] = job.keys[(group + b).clamp(first, end - 1)].cast();
            // After the last keys come the first values.
            next[b] = if group + B < end { job.keys[(group + B + b).min(end - 1)] } else { job.values[(first + b).min(end - 1)] };
        }
        let row_bytes = job.block_size * size_of::<E>();
        let mut acc = [[L::splat(0.0); B]; R];
        let mut d = 0;
        while d < job.qk_dim {
            if R <= AHEAD_ROWS {
                for p in next {
                    L::prefetch(p.wrapping_add(d * row_bytes));
                }
            }
            // SAFETY: `at` points to vectors that have keys: qk_dim rows of them.
            unsafe { score_step::<L, E, R, B>(job.q, &at, job.block_size, d, &mut acc) };
            d += 1;
            if d < job.qk_dim {
                if R <= AHEAD_ROWS && row_bytes >= LINE {
                    for p in next {
                        L::prefetch(p.wrapping_add(d * row_bytes));
                    }
                }
                // SAFETY: as above.
                unsafe { score_step::<L, E, R, B>(job.q, &at, job.block_size, d, &mut acc) };
                d += 1;
            }
        }
        for r in 0..R {
            for b in 0..B {
                let to = &mut job.scores[r * PIECE + (group + b) * LANES..][..LANES];
                acc[r][b].store(to.try_into().expect("16 of them"));
            }
        }
    }
}

/// Dimension `d` of the scores.
#[inline(always)]
unsafe fn score_step<L: Lanes, E: Elem, const R: usize, const B: usize>(
    q: &[f32],
    at: &[*const E; B],
    stride: usize,
    d: usize,
    acc: &mut [[L; B]; R],
) {
    let mut k = [L::splat(0.0); B];
    for b in 0..B {
        // SAFETY: the caller has qk_dim rows of 16 keys there.
        k[b] = E::widen(unsafe { &*at[b].add(d * stride).cast::<[E; LANES]>() });
    }
    for r in 0..R {
        // SAFETY: `q` holds qk_dim times R values.
        let q = L::splat(unsafe { *q.get_unchecked(d * R + r) });
        for b in 0..B {
            acc[r][b] = q.fma(k[b], acc[r][b]);
        }
    }
}

/// Scores to weights, row by row.
#[inline(always)]
fn softmax<L: Lanes>(job: &mut PieceJob<'_>) {
    let width = job.v_width + PART_TAIL;
    let none = L::splat(f32::NEG_INFINITY);
    for (r, &(first, end)) in job.ranges.iter().enumerate() {
        if first >= end {
            continue;
        }
        let (s, _) = job.scores[r * PIECE..][..PIECE].as_chunks_mut::<LANES>();
        let vectors = first / LANES..end.div_ceil(LANES);
        let mut top = none;
        for i in vectors.clone() {
            let mut x = L::load(&s[i]);
            if let Some(cap) = job.cap {
                x = math::tanh(x).mul(L::splat(cap));
                x.store(&mut s[i]);
            }
            top = top.max(x.keep(first as i32 - (i * LANES) as i32, end as i32 - (i * LANES) as i32, none));
        }
        let max = top.top();
        let mut sums = L::splat(0.0);
        for i in vectors {
            let p = math::exp2(L::load(&s[i]).sub(L::splat(max)));
            let p = p.keep(first as i32 - (i * LANES) as i32, end as i32 - (i * LANES) as i32, L::splat(0.0));
            p.store(&mut s[i]);
            sums = sums.add(p);
        }
        job.parts[r * width + job.v_width] = max;
        job.parts[r * width + job.v_width + 1] = sums.sum();
    }
}

/// Adds the tokens `first..end` to the sums of R rows from `row` on.
#[inline(always)]
unsafe fn weigh<L: Lanes, E: Elem, const R: usize, const N: usize>(job: &mut PieceJob<'_>, row: usize, first: usize, end: usize) {
    if first >= end {
        return;
    }
    let mut column = 0;
    while column + N * LANES <= job.v_width {
        // SAFETY: the caller's.
        unsafe { weigh_columns::<L, E, R, N>(job, row, first, end, column) };
        column += N * LANES;
    }
    while column < job.v_width {
        // SAFETY: the caller's.
        unsafe { weigh_columns::<L, E, R, 1>(job, row, first, end, column) };
        column += LANES;
    }
}

#[inline(always)]
unsafe fn weigh_columns<L: Lanes, E: Elem, const R: usize, const N: usize>(
    job: &mut PieceJob<'_>,
    row: usize,
    first: usize,
    end: usize,
    column: usize,
) {
    let width = job.v_width + PART_TAIL;
    let mut acc = [[L::splat(0.0); N]; R];
    for r in 0..R {
        let (from, _) = job.parts[(row + r) * width + column..][..N * LANES].as_chunks::<LANES>();
        for n in 0..N {
            acc[r][n] = L::load(&from[n]);
        }
    }
    let weights = job.scores[row * PIECE..][..R * PIECE].as_ptr();
    let mut t = first;
    while t < end {
        let vector = t / LANES;
        let ahead = job.values[(vector + 2).min((end - 1) / LANES)].wrapping_add(column * size_of::<E>());
        let values = job.values[vector].cast::<E>();
        let stop = end.min((vector + 1) * LANES);
        while t < stop {
            let at = t % LANES * job.v_width;
            if R <= AHEAD_ROWS {
                let mut byte = 0;
                while byte < N * LANES * size_of::<E>() {
                    L::prefetch(ahead.wrapping_add(at * size_of::<E>() + byte));
                    byte += LINE;
                }
            }
            let mut v = [L::splat(0.0); N];
            for n in 0..N {
                // SAFETY: 16 rows of v_width values lie there, and column + 16 N <= v_width.
                v[n] = E::widen(unsafe { &*values.add(at + column + n * LANES).cast::<[E; LANES]>() });
            }
            for r in 0..R {
                // SAFETY: `weights` has R rows of PIECE values, and t < PIECE.
                let p = L::splat(unsafe { *weights.add(r * PIECE + t) });
                for n in 0..N {
                    acc[r][n] = p.fma(v[n], acc[r][n]);
                }
            }
            t += 1;
        }
    }
    for r in 0..R {
        let (to, _) = job.parts[(row + r) * width + column..][..N * LANES].as_chunks_mut::<LANES>();
        for n in 0..N {
            acc[r][n].store(&mut to[n]);
        }
    }
}

#[inline(always)]
fn join<L: Lanes>(state: &mut [f32], part: &[f32]) {
    let width = part.len() - PART_TAIL;
    let (a, b) = (state[width], part[width]);
    let max = if a > b { a } else { b };
    let factors = math::exp2(L::load_part(&[a - max, b - max])).array();
    let (old, new) = (L::splat(factors[0]), L::splat(factors[1]));
    state[width] = max;
    state[width + 1] = L::fma_one(part[width + 1], factors[1], state[width + 1] * factors[0]);
    let (states, _) = state[..width].as_chunks_mut::<LANES>();
    let (parts, _) = part[..width].as_chunks::<LANES>();
    for (s, p) in states.iter_mut().zip(parts) {
        L::load(p).fma(new, L::load(s).mul(old)).store(s);
    }
}

#[inline(always)]
fn finish<L: Lanes>(state: &[f32], sink: Option<f32>, out: &mut [f32]) {
    let (sums, tail) = state.split_at(state.len() - PART_TAIL);
    let (max, sum) = (tail[0], tail[1]);
    let (factor, total) = match sink {
        None => (1.0, sum),
        Some(sink) => {
            let top = if max > sink { max } else { sink };
            let powers = math::exp2(L::load_part(&[max - top, sink - top])).array();
            (powers[0], L::fma_one(sum, powers[0], powers[1]))
        }
    };
    let (factor, total) = (L::splat(factor), L::splat(total));
    for (from, to) in sums.chunks(LANES).zip(out.chunks_mut(LANES)) {
        L::load_part(from).mul(factor).div(total).store_part(to);
    }
}

#[inline(always)]
unsafe fn turn<L: Lanes, E: Elem>(job: &mut TurnJob<'_>) {
    let to = bytemuck::cast_slice_mut::<u8, E>(job.to);
    for i in job.vectors.clone() {
        let from = job.keys[i].cast::<E>();
        let (rows, _) = to[i * LANES * job.v_width..][..LANES * job.v_width].as_chunks_mut::<LANES>();
        for column in (0..job.v_width).step_by(LANES) {
            let mut m = [L::splat(0.0); LANES];
            for d in column..job.qk_dim.min(column + LANES) {
                // SAFETY: qk_dim rows of 16 keys lie there.
                m[d - column] = E::widen(unsafe { &*from.add(d * job.block_size).cast::<[E; LANES]>() });
            }
            L::transpose(&mut m);
            for t in 0..LANES {
                E::narrow(m[t], &mut rows[(t * job.v_width + column) / LANES]);
            }
        }
    }
}

#[inline(always)]
fn narrow<L: Lanes>(from: &[f32], to: &mut [u16]) {
    let (from, from_rest) = from.as_chunks::<LANES>();
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for (from, to) in from.iter().zip(to) {
        L::load(from).store_f16(to);
    }
    let mut last = [0; LANES];
    L::load_part(from_rest).store_f16(&mut last);
    to_rest.copy_from_slice(&last[..to_rest.len()]);
}

/// Bytes of a cache line.
const LINE: usize = 64;
/// Up to so many rows the cache's memory is what limits: fetch ahead. Blocks lie anywhere, so the hardware starts anew in each.
const AHEAD_ROWS: usize = 4;
