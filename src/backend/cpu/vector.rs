//! Row operations over the threads: rows are shared out where there is work enough to pay for a fork.
//!
//! Invariant: a row's result depends on that row alone.
#![allow(unsafe_code)]

use super::pool::{Disjoint, Pool};
use super::simd::{LANES, Tier};
use crate::arch::{Activation, NormSpec, RopeStyle};
use crate::backend::Heads;
use std::ops::Range;

/// `x += delta` where there is a delta, then `out = norm(x) * weight (+ bias)`, each `[rows, width]`.
#[allow(clippy::too_many_arguments)]
pub(super) fn add_norm(
    pool: &Pool,
    tier: &Tier,
    width: usize,
    x: &mut [f32],
    delta: Option<&[f32]>,
    norm: &NormSpec,
    weight: &[f32],
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    assert!(x.len() == out.len() && x.len().is_multiple_of(width), "{} and {} values of rows of {width}", x.len(), out.len());
    let (delta, weight, bias) = (delta.map(|d| &d[..x.len()]), &weight[..width], bias.map(|b| &b[..width]));
    let rows = x.len() / width;
    let (x, out) = (Disjoint::new(x), Disjoint::new(out));
    pool.for_each_chunk(rows, grain(width), |_, rows| {
        let values = rows.start * width..rows.end * width;
        // SAFETY: a row is handed out once, and each is its own part of both.
        let (x, out) = unsafe { (x.slice(values.clone()), out.slice(values.clone())) };
        if let Some(delta) = delta {
            tier.vector.add(x, &delta[values]);
        }
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            tier.vector.norm(*norm, x, weight, bias, out);
        }
    });
}

/// Turns the first `rotary` values of each head in place; `angles` is `[rows, rotary]`: `rotary / 2` cosines of a row, then
/// as many sines.
pub(super) fn rope(
    pool: &Pool,
    tier: &Tier,
    rows: usize,
    x: &mut [f32],
    heads: Heads,
    angles: &[f32],
    rotary: usize,
    style: RopeStyle,
) {
    assert!(rotary.is_multiple_of(2) && rotary <= heads.dim, "{rotary} of {} values of a head turn", heads.dim);
    assert!(heads.offset + heads.heads * heads.dim <= heads.stride, "{heads:?}: heads beyond their row");
    pool.for_each_row(&mut x[..rows * heads.stride], heads.stride, grain(heads.heads * rotary), |first, x| {
        for (i, row) in x.chunks_exact_mut(heads.stride).enumerate() {
            let (cos, sin) = angles[(first + i) * rotary..][..rotary].split_at(rotary / 2);
            for head in row[heads.offset..][..heads.heads * heads.dim].chunks_exact_mut(heads.dim) {
                tier.vector.rope(style, &mut head[..rotary], cos, sin);
            }
        }
    });
}

/// `out[rows, width] = act(x[.., ..width]) * x[.., width..]`, `x` being `[rows, 2 * width]`.
pub(super) fn gate(pool: &Pool, tier: &Tier, width: usize, act: Activation, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), 2 * out.len(), "values of rows of twice {width} against {width}");
    pool.for_each_row(out, width, grain(4 * width), |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let (a, b) = x[(first + i) * 2 * width..][..2 * width].split_at(width);
            tier.vector.gate(act, a, b, out);
        }
    });
}

/// `x[r] += bias` for each row.
pub(super) fn add_bias(pool: &Pool, tier: &Tier, x: &mut [f32], bias: &[f32]) {
    pool.for_each_row(x, bias.len(), grain(bias.len()), |_, x| {
        for row in x.chunks_exact_mut(bias.len()) {
            tier.vector.add(row, bias);
        }
    });
}

/// `x += delta`.
pub(super) fn add(pool: &Pool, tier: &Tier, x: &mut [f32], delta: &[f32]) {
    assert_eq!(x.len(), delta.len());
    for_each_run(pool, x, PAYS, |values, x| tier.vector.add(x, &delta[values]));
}

/// `x = cap * tanh(x * scale / cap)`; without a cap the factor alone.
pub(super) fn scale_cap(pool: &Pool, tier: &Tier, x: &mut [f32], scale: f32, cap: Option<f32>) {
    let run = if cap.is_some() { PAYS / 4 } else { PAYS };
    for_each_run(pool, x, run, |_, x| tier.vector.scale_cap(x, scale, cap));
}

/// `out[r] = x[wanted[r]]`, rows of `width`.
pub(super) fn gather(width: usize, wanted: &[u32], x: &[f32], out: &mut [f32]) {
    for (&row, out) in wanted.iter().zip(out[..wanted.len() * width].chunks_exact_mut(width)) {
        out.copy_from_slice(&x[row as usize * width..][..width]);
    }
}

/// Runs of about `run` values, cut between vectors so that a value's lane stays the same.
fn for_each_run(pool: &Pool, x: &mut [f32], run: usize, f: impl Fn(Range<usize>, &mut [f32]) + Sync) {
    let len = x.len();
    let x = Disjoint::new(x);
    pool.for_each_chunk(len.div_ceil(LANES), run / LANES, |_, vectors| {
        let values = vectors.start * LANES..len.min(vectors.end * LANES);
        // SAFETY: a vector is handed out once.
        f(values.clone(), unsafe { x.slice(values.clone()) });
    });
}

/// Rows of `width` values of work that make a share.
fn grain(width: usize) -> usize {
    PAYS.div_ceil(width.max(1))
}

/// Values that take about as long as waking a thread: some 2 to 4 us.
const PAYS: usize = 16_384;
