//! The loops, over any lanes. Knows no tier and no cache: pointers, strides and how far.
//!
//! Invariant: each sum is one chain in rising order of dimensions, or of tokens, whatever the number of rows and vectors.
#![allow(unsafe_code)]
// Indices over rows and vectors at once: what the compiler turns into registers.
#![allow(clippy::needless_range_loop)]

use super::super::lanes::{Elem, LANES, Lanes};
use super::super::math;
use super::{PART_TAIL, PIECE, VECTORS};
use std::ops::Range;

/// Where keys lie: row d of a vector of 16 tokens is `stride` values after row d - 1.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub(super) at: &'a [*const u8; VECTORS],
    pub(super) vectors: (usize, usize),
    pub(super) stride: usize,
    pub(super) qk_dim: usize,
    /// What is read after them, vector by vector.
    pub(super) after: &'a [*const u8; VECTORS],
}

/// Where values lie: a token's row is `stride` values after the one before, in vectors of 16 tokens.
#[derive(Clone, Copy)]
pub(super) struct Values<'a> {
    pub(super) at: &'a [*const u8; VECTORS],
    pub(super) stride: usize,
    /// How many of a row's, a multiple of 16.
    pub(super) columns: usize,
    /// Where their sums are in a part.
    pub(super) column: usize,
    pub(super) v_width: usize,
}

/// Up to R rows side by side, times a factor. Rows that the kernel has and nobody needs are copies of the first.
#[inline(always)]
pub(super) fn queries<const R: usize>(rows: &[&[f32]], factor: f32, to: &mut [f32]) {
    let (to, _) = to.as_chunks_mut::<R>();
    let rows: [&[f32]; R] = std::array::from_fn(|r| &rows[if r < rows.len() { r } else { 0 }][..to.len()]);
    for (d, to) in to.iter_mut().enumerate() {
        for r in 0..R {
            to[r] = rows[r][d] * factor;
        }
    }
}

/// Scores `[R][PIECE]` of R rows for the vectors, and of those that fill the last group of B up.
#[inline(always)]
pub(super) unsafe fn scores<L: Lanes, E: Elem, const R: usize, const B: usize>(q: &[f32], keys: &Keys<'_>, scores: &mut [f32]) {
    let (first, end) = keys.vectors;
    let mut group = first;
    while group < end {
        let (mut at, mut next) = ([keys.at[first].cast::<E>(); B], [std::ptr::null::<u8>(); B]);
        for b in 0..B {
            at[b] = keys.at[(group + b).min(end - 1)].cast();
            // After the last keys come the first values.
            let i = group + b + B.max(KEYS_AHEAD);
            next[b] = if i < end { keys.at[i] } else { keys.after[(first + i - end).min(end - 1)] };
        }
        let row_bytes = keys.stride * size_of::<E>();
        let mut acc = [[L::splat(0.0); B]; R];
        let mut d = 0;
        while d + 2 <= keys.qk_dim {
            if R <= AHEAD_ROWS {
                for p in &mut next {
                    L::prefetch(*p);
                    if row_bytes >= LINE {
                        L::prefetch(p.wrapping_add(row_bytes));
                    }
                    *p = p.wrapping_add(2 * row_bytes);
                }
            }
            // SAFETY: `at` points to vectors that have keys: qk_dim rows of them.
            unsafe {
                score_step::<L, E, R, B>(q, &at, d, &mut acc);
                for p in &mut at {
                    *p = p.wrapping_add(keys.stride);
                }
                score_step::<L, E, R, B>(q, &at, d + 1, &mut acc);
                for p in &mut at {
                    *p = p.wrapping_add(keys.stride);
                }
            }
            d += 2;
        }
        if d < keys.qk_dim {
            // SAFETY: as above.
            unsafe { score_step::<L, E, R, B>(q, &at, d, &mut acc) };
        }
        for b in 0..B {
            if group + b < end {
                for r in 0..R {
                    let to = &mut scores[r * PIECE + (group + b) * LANES..][..LANES];
                    acc[r][b].store(to.try_into().expect("16 of them"));
                }
            }
        }
        group += B;
    }
}

/// Dimension `d` of the scores.
#[inline(always)]
unsafe fn score_step<L: Lanes, E: Elem, const R: usize, const B: usize>(
    q: &[f32],
    at: &[*const E; B],
    d: usize,
    acc: &mut [[L; B]; R],
) {
    for b in 0..B {
        // SAFETY: the caller has qk_dim rows of 16 keys there.
        let k: L = E::widen(unsafe { &*at[b].cast::<[E; LANES]>() });
        for r in 0..R {
            // SAFETY: `q` holds qk_dim times R values.
            let q = L::splat(unsafe { *q.get_unchecked(d * R + r) });
            acc[r][b] = q.fma(k, acc[r][b]);
        }
    }
}

/// Scores to weights, row by row, and parts to no sums yet.
#[inline(always)]
pub(super) fn softmax<L: Lanes>(
    ranges: &[(usize, usize)],
    cap: Option<f32>,
    scores: &mut [f32],
    parts: &mut [f32],
    v_width: usize,
) {
    let none = L::splat(f32::NEG_INFINITY);
    for (r, &(first, end)) in ranges.iter().enumerate() {
        if first >= end {
            continue;
        }
        let (s, _) = scores[r * PIECE..][..PIECE].as_chunks_mut::<LANES>();
        let (from, to) = (first / LANES, end.div_ceil(LANES));
        let mut top = none;
        for i in from..to {
            let mut x = L::load(&s[i]);
            if let Some(cap) = cap {
                x = math::tanh(x).mul(L::splat(cap));
                x.store(&mut s[i]);
            }
            top = top.max(seen(x, i * LANES, first, end, none));
        }
        let max = top.top();
        let (mut sums, most) = (L::splat(0.0), L::splat(max));
        for i in from..to {
            let p = seen(math::exp2(L::load(&s[i]).sub(most)), i * LANES, first, end, L::splat(0.0));
            p.store(&mut s[i]);
            sums = sums.add(p);
        }
        let (part, tail) = parts[r * (v_width + PART_TAIL)..][..v_width + PART_TAIL].split_at_mut(v_width);
        part.fill(0.0);
        (tail[0], tail[1]) = (max, sums.sum());
    }
}

/// The lanes of tokens `first..end`, the others from `o`; lane 0 is token `at`. Only vectors at the ends have others.
#[inline(always)]
fn seen<L: Lanes>(x: L, at: usize, first: usize, end: usize, o: L) -> L {
    if at >= first && at + LANES <= end { x } else { x.keep(first as i32 - at as i32, end as i32 - at as i32, o) }
}

/// Adds tokens to the sums of the first `rows` of R rows that all see them.
#[inline(always)]
pub(super) unsafe fn weigh<L: Lanes, E: Elem, const R: usize, const N: usize>(
    weights: &[f32],
    values: &Values<'_>,
    tokens: Range<usize>,
    rows: usize,
    parts: &mut [f32],
) {
    let mut column = 0;
    while column + N * LANES <= values.columns {
        // SAFETY: the caller's.
        unsafe { weigh_columns::<L, E, R, N>(weights, values, tokens.clone(), rows, column, parts) };
        column += N * LANES;
    }
    while column < values.columns {
        // SAFETY: the caller's.
        unsafe { weigh_columns::<L, E, R, 1>(weights, values, tokens.clone(), rows, column, parts) };
        column += LANES;
    }
}

#[inline(always)]
unsafe fn weigh_columns<L: Lanes, E: Elem, const R: usize, const N: usize>(
    weights: &[f32],
    values: &Values<'_>,
    tokens: Range<usize>,
    rows: usize,
    column: usize,
    parts: &mut [f32],
) {
    let (mut t, end, stride) = (tokens.start, tokens.end, values.stride);
    let mut acc = load_sums::<L, R, N>(values, rows, column, parts);
    let weights = weights[..R * PIECE].as_ptr();
    while t < end {
        let vector = t / LANES;
        let ahead = values.at[(vector + VALUES_AHEAD).min((end - 1) / LANES)].wrapping_add(column * size_of::<E>());
        let from = values.at[vector].cast::<E>();
        let stop = end.min((vector + 1) * LANES);
        while t < stop {
            let at = t % LANES * stride;
            if R <= AHEAD_ROWS {
                let mut byte = 0;
                while byte < N * LANES * size_of::<E>() {
                    L::prefetch(ahead.wrapping_add(at * size_of::<E>() + byte));
                    byte += LINE;
                }
            }
            for n in 0..N {
                // SAFETY: 16 rows of stride values lie there, and column + 16 N <= columns <= stride.
                let v: L = E::widen(unsafe { &*from.add(at + column + n * LANES).cast::<[E; LANES]>() });
                for r in 0..R {
                    // SAFETY: `weights` has R rows of PIECE values, and t < PIECE.
                    let p = L::splat(unsafe { *weights.add(r * PIECE + t) });
                    acc[r][n] = p.fma(v, acc[r][n]);
                }
            }
            t += 1;
        }
    }
    store_sums(&acc, values, rows, column, parts);
}

/// The same for tokens that not all of the rows see: `ranges` says which. What a row does not see is not added to it, not even
/// with the weight 0, which would be a NaN of an infinity and the wrong zero of a negative value.
#[inline(always)]
pub(super) unsafe fn weigh_some<L: Lanes, E: Elem, const R: usize>(
    weights: &[f32],
    values: &Values<'_>,
    tokens: Range<usize>,
    ranges: &[(usize, usize)],
    parts: &mut [f32],
) {
    let (zero, weights) = (L::splat(0.0), &weights[..R * PIECE]);
    for column in (0..values.columns).step_by(LANES) {
        let mut acc = load_sums::<L, R, 1>(values, ranges.len(), column, parts);
        for t in tokens.clone() {
            let at = t % LANES * values.stride + column;
            // SAFETY: 16 rows of stride values lie there, and column + 16 <= columns <= stride.
            let v: L = E::widen(unsafe { &*values.at[t / LANES].cast::<E>().add(at).cast::<[E; LANES]>() });
            for r in 0..R {
                let seen = ranges.get(r).is_some_and(|&(first, end)| first <= t && t < end);
                let sum = L::splat(weights[r * PIECE + t]).fma(v, acc[r][0]);
                acc[r][0] = L::splat(if seen { -1.0 } else { 1.0 }).if_less(zero, sum, acc[r][0]);
            }
        }
        store_sums(&acc, values, ranges.len(), column, parts);
    }
}

#[inline(always)]
fn load_sums<L: Lanes, const R: usize, const N: usize>(
    values: &Values<'_>,
    rows: usize,
    column: usize,
    parts: &[f32],
) -> [[L; N]; R] {
    let mut acc = [[L::splat(0.0); N]; R];
    for r in 0..R {
        if r < rows {
            let at = r * (values.v_width + PART_TAIL) + values.column + column;
            let (from, _) = parts[at..][..N * LANES].as_chunks::<LANES>();
            for n in 0..N {
                acc[r][n] = L::load(&from[n]);
            }
        }
    }
    acc
}

#[inline(always)]
fn store_sums<L: Lanes, const R: usize, const N: usize>(
    acc: &[[L; N]; R],
    values: &Values<'_>,
    rows: usize,
    column: usize,
    parts: &mut [f32],
) {
    for r in 0..R {
        if r < rows {
            let at = r * (values.v_width + PART_TAIL) + values.column + column;
            let (to, _) = parts[at..][..N * LANES].as_chunks_mut::<LANES>();
            for n in 0..N {
                acc[r][n].store(&mut to[n]);
            }
        }
    }
}

/// Keys as f32, `[vector][qk_dim][16]`.
#[inline(always)]
pub(super) unsafe fn widen_keys<L: Lanes, E: Elem>(keys: &Keys<'_>, to: &mut [f32]) {
    let (first, end) = keys.vectors;
    let (to, _) = to.as_chunks_mut::<LANES>();
    for (i, to) in (first..end).zip(to.chunks_exact_mut(keys.qk_dim)) {
        let (from, after) = (keys.at[i].cast::<E>(), keys.after[i]);
        for (d, to) in to.iter_mut().enumerate() {
            L::prefetch(after.wrapping_add(d * keys.stride * size_of::<E>()));
            // SAFETY: the caller has qk_dim rows of 16 keys there.
            E::widen::<L>(unsafe { &*from.add(d * keys.stride).cast::<[E; LANES]>() }).store(to);
        }
    }
}

/// The columns of values as f32, `[token][columns]`, from token 0 on.
#[inline(always)]
pub(super) unsafe fn widen_values<L: Lanes, E: Elem>(values: &Values<'_>, vectors: Range<usize>, to: &mut [f32]) {
    let width = values.columns / LANES;
    let (to, _) = to.as_chunks_mut::<LANES>();
    for i in vectors {
        for t in 0..LANES {
            for n in 0..width {
                let at = t * values.stride + values.column + n * LANES;
                // SAFETY: 16 rows of stride values lie there, and column + columns <= stride.
                let v: L = E::widen(unsafe { &*values.at[i].cast::<E>().add(at).cast::<[E; LANES]>() });
                v.store(&mut to[(i * LANES + t) * width + n]);
            }
        }
    }
}

/// The same from keys, whose first dimensions are the values.
#[inline(always)]
pub(super) unsafe fn turn_values<L: Lanes, E: Elem>(keys: &Keys<'_>, values: &Values<'_>, to: &mut [f32]) {
    let width = values.columns / LANES;
    let (to, _) = to.as_chunks_mut::<LANES>();
    for i in keys.vectors.0..keys.vectors.1 {
        let from = keys.at[i].cast::<E>();
        for n in 0..width {
            let first = values.column + n * LANES;
            let mut m = [L::splat(0.0); LANES];
            for d in first..keys.qk_dim.min(first + LANES) {
                // SAFETY: qk_dim rows of 16 keys lie there.
                m[d - first] = E::widen(unsafe { &*from.add(d * keys.stride).cast::<[E; LANES]>() });
            }
            L::transpose(&mut m);
            for t in 0..LANES {
                m[t].store(&mut to[(i * LANES + t) * width + n]);
            }
        }
    }
}

#[inline(always)]
pub(super) fn join<L: Lanes>(state: &mut [f32], part: &[f32]) {
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
pub(super) fn finish<L: Lanes>(state: &[f32], sink: Option<f32>, out: &mut [f32]) {
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
    let (sums, _) = sums.as_chunks::<LANES>();
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    for (from, to) in sums.iter().zip(&mut *whole) {
        L::load(from).mul(factor).div(total).store(to);
    }
    if !rest.is_empty() {
        L::load(&sums[whole.len()]).mul(factor).div(total).store_part(rest);
    }
}

#[inline(always)]
pub(super) fn narrow<L: Lanes>(from: &[f32], to: &mut [u16]) {
    let (from, from_rest) = from.as_chunks::<LANES>();
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for (from, to) in from.iter().zip(to) {
        L::load(from).store_f16(to);
    }
    let mut last = [0; LANES];
    L::load_part(from_rest).store_f16(&mut last);
    to_rest.copy_from_slice(&last[..to_rest.len()]);
}

/// Vectors of keys that are fetched ahead, at least, and of values. One is too near for few rows; more than two lost.
const KEYS_AHEAD: usize = 2;
const VALUES_AHEAD: usize = 2;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Up to so many rows the cache's memory is what limits: fetch ahead. Blocks lie anywhere, so the hardware starts anew in each.
const AHEAD_ROWS: usize = 4;
