//! Mixtures of experts: routes rows, sorts them by expert, and runs many experts' matrices as one product.
//!
//! ```text
//! for each row:   scores; ranks (scores + correction, groups that lost last); the top_k; weights; sorted by expert
//! counting sort:  pairs of row and slot by expert, rows in order
//! for runs of experts whose pairs fit the scratch:   gather; gate_up; gate; down; out[row] += weight * result
//! ```
//!
//! Invariant: a row's sum runs in ascending order of its experts, each product depends on its row alone, so no bit depends
//! on the other rows, on the runs or on the threads. Experts without rows are not read.
#![allow(unsafe_code)]

use super::Cpu;
use super::arena::Aligned;
use super::pool::{Disjoint, Pool};
use super::simd::{Product, Products, Tier};
use super::vector::{self, grain};
use crate::arch::{Groups, RouteSpec, Score};
use crate::backend::{Expert, MoeArgs, MoeShape};
use crate::error::RunError;
use std::ops::Range;

/// Room for the largest mixture over the largest batch.
pub(super) struct MoeScratch {
    /// Pairs of a row and one of its experts that run at once.
    pairs: usize,
    index: Aligned<u32>,
    values: Aligned<f32>,
}

impl MoeScratch {
    /// Rows that go through matrices at once: those of one expert at least, and all of a single row's.
    pub(super) fn pairs(tokens: usize, shape: &MoeShape) -> usize {
        tokens.max(shape.top_k)
    }

    /// Bytes that [`new`](Self::new) allocates.
    pub(super) fn bytes(tokens: usize, shape: &MoeShape) -> u64 {
        let (index, values) = Self::lens(tokens, shape);
        (index as u64).saturating_add(values as u64).saturating_mul(4)
    }

    pub(super) fn new(tokens: usize, shape: &MoeShape) -> Result<Self, RunError> {
        let (index, values) = Self::lens(tokens, shape);
        let pairs = Self::pairs(tokens, shape);
        Ok(MoeScratch { pairs, index: Aligned::zeroed(index)?, values: Aligned::zeroed(values)? })
    }

    /// Values of both arrays, as [`parts`](Self::parts) cuts them.
    fn lens(tokens: usize, shape: &MoeShape) -> (usize, usize) {
        let &MoeShape { experts, top_k, intermediate, hidden } = shape;
        if experts == 0 {
            return (0, 0);
        }
        let both = experts.saturating_mul(2);
        let index = tokens.saturating_mul(both.saturating_add(top_k.saturating_mul(3))).saturating_add(both.saturating_add(2));
        let inside = Self::pairs(tokens, shape).saturating_mul(hidden.saturating_add(intermediate.saturating_mul(3)));
        (index, tokens.saturating_mul(experts.saturating_add(top_k)).saturating_add(inside))
    }

    fn parts(&mut self, rows: usize, args: &MoeArgs<'_, Cpu>) -> Parts<'_> {
        let (experts, top_k) = (args.route.experts, args.route.top_k);
        let (mut index, mut values) = (&mut self.index[..], &mut self.values[..]);
        Parts {
            scores: cut(&mut values, rows * experts),
            ranks: cut(&mut index, rows * 2 * experts),
            chosen: cut(&mut index, rows * top_k),
            weights: cut(&mut values, rows * top_k),
            place: cut(&mut index, rows * top_k),
            row: cut(&mut index, rows * top_k),
            busy: cut(&mut index, experts),
            starts: cut(&mut index, experts + 2),
            x: cut(&mut values, self.pairs * args.hidden),
            gate_up: cut(&mut values, self.pairs * 2 * args.intermediate),
            inner: cut(&mut values, self.pairs * args.intermediate),
        }
    }
}

/// The scratch, cut for one call. R rows, P pairs that run at once.
struct Parts<'a> {
    /// `[R, experts]`.
    scores: &'a mut [f32],
    /// The experts' ranks, then the groups': `[R, 2 * experts]`.
    ranks: &'a mut [u32],
    /// A row's experts, ascending: `[R, top_k]`.
    chosen: &'a mut [u32],
    /// Their weights.
    weights: &'a mut [f32],
    /// Where each stands among the pairs sorted by expert.
    place: &'a mut [u32],
    /// The row of each pair, sorted by expert.
    row: &'a mut [u32],
    /// Experts with rows.
    busy: &'a mut [u32],
    /// Pairs of expert e are `starts[e]..starts[e + 1]`.
    starts: &'a mut [u32],
    /// What goes into the experts, later what comes out: `[P, hidden]`.
    x: &'a mut [f32],
    /// `[P, 2 * intermediate]`.
    gate_up: &'a mut [f32],
    /// `[P, intermediate]`.
    inner: &'a mut [f32],
}

/// `out[r]`: the weighted sum of row r's experts over `x[r]`. `words` is the matrices' scratch.
#[allow(clippy::too_many_arguments)]
pub(super) fn moe(
    pool: &Pool,
    tier: &Tier,
    rows: usize,
    x: &[f32],
    args: &MoeArgs<'_, Cpu>,
    scratch: &mut MoeScratch,
    words: &mut [u32],
    out: &mut [f32],
) {
    let (route, experts) = (args.route, args.experts);
    assert!(experts.len() == route.experts && (1..=route.experts).contains(&route.top_k), "{route:?}, {} experts", experts.len());
    let (most, hidden, intermediate) = (scratch.pairs, args.hidden, args.intermediate);
    let mut parts = scratch.parts(rows, args);
    let correction = args.correction.map(|c| &c.0[..route.experts]);
    choose(pool, tier, route, &args.scores.0[..rows * route.experts], correction, &mut parts);
    let count = sort(route, &mut parts);
    let Parts { chosen, weights, place, row, busy, starts, x: inside, gate_up, inner, .. } = parts;
    let (busy, starts) = (&busy[..count], &*starts);

    out.fill(0.0);
    let mut next = 0;
    while next < busy.len() {
        let of = |i: usize| starts[busy[i] as usize] as usize..starts[busy[i] as usize + 1] as usize;
        let (from, first) = (next, of(next).start);
        while next < busy.len() && of(next).end - first <= most {
            next += 1;
        }
        let pairs = of(next - 1).end - first;
        let expert = |i: usize| -> (&Expert<Cpu>, Range<usize>) {
            let pairs = of(from + i);
            (&experts[busy[from + i] as usize], pairs.start - first..pairs.end - first)
        };

        let (inside, gate_up, inner) =
            (&mut inside[..pairs * hidden], &mut gate_up[..pairs * 2 * intermediate], &mut inner[..pairs * intermediate]);
        pool.for_each_row(inside, hidden, grain(hidden), |at, to| {
            for (to, &row) in to.chunks_exact_mut(hidden).zip(&row[first + at..]) {
                to.copy_from_slice(&x[row as usize * hidden..][..hidden]);
            }
        });
        let product = |i| {
            let (e, rows) = expert(i);
            let bias = e.gate_up_bias.as_ref().map(|b| &b.0[..2 * intermediate]);
            Product { w: &e.gate_up, bias, before: rows.start, rows, x: 0, y: 0 }
        };
        let all = Products { count: next - from, of: &product, x: inside, x_stride: hidden, y_stride: 2 * intermediate };
        tier.linear.products(pool, &all, words, gate_up);
        vector::gate(pool, tier, intermediate, args.glu, gate_up, inner);
        let product = |i| {
            let (e, rows) = expert(i);
            let bias = e.down_bias.as_ref().map(|b| &b.0[..hidden]);
            Product { w: &e.down, bias, before: rows.start, rows, x: 0, y: 0 }
        };
        let all = Products { count: next - from, of: &product, x: inner, x_stride: intermediate, y_stride: hidden };
        tier.linear.products(pool, &all, words, inside);

        let (now, top_k) = (busy[from]..=busy[next - 1], route.top_k);
        pool.for_each_row(out, hidden, grain(top_k * hidden), |row, out| {
            for (i, out) in out.chunks_exact_mut(hidden).enumerate() {
                let slots = (row + i) * top_k..(row + i + 1) * top_k;
                for slot in slots.filter(|&slot| now.contains(&chosen[slot])) {
                    let result = &inside[(place[slot] as usize - first) * hidden..][..hidden];
                    tier.vector.add(out, result, weights[slot]);
                }
            }
        });
    }
}

/// Fills `chosen` and `weights`.
fn choose(pool: &Pool, tier: &Tier, route: &RouteSpec, logits: &[f32], correction: Option<&[f32]>, parts: &mut Parts<'_>) {
    let (experts, top_k) = (route.experts, route.top_k);
    let (scores, ranks) = (Disjoint::new(parts.scores), Disjoint::new(parts.ranks));
    let (chosen, weights) = (Disjoint::new(parts.chosen), Disjoint::new(parts.weights));
    pool.for_each_chunk(logits.len() / experts, grain(experts * (top_k + 4)), |_, rows| {
        for r in rows {
            // SAFETY: a row is handed out once, and each is its own part of the four.
            let (scores, ranks, chosen, weights) = unsafe {
                (
                    scores.slice(r * experts..(r + 1) * experts),
                    ranks.slice(r * 2 * experts..(r + 1) * 2 * experts),
                    chosen.slice(r * top_k..(r + 1) * top_k),
                    weights.slice(r * top_k..(r + 1) * top_k),
                )
            };
            scores.copy_from_slice(&logits[r * experts..][..experts]);
            route_row(tier, route, correction, scores, ranks, chosen, weights);
        }
    });
}

/// One row: `scores` holds its logits.
fn route_row(
    tier: &Tier,
    route: &RouteSpec,
    correction: Option<&[f32]>,
    scores: &mut [f32],
    ranks: &mut [u32],
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    match route.score {
        Score::Softmax => tier.vector.softmax(scores),
        Score::Sigmoid => tier.vector.sigmoid(scores),
        Score::SoftmaxOfChosen => {}
    }
    let scores = &*scores;
    let value = |e: usize| correction.map_or(scores[e], |c| scores[e] + c[e]);
    let (ranks, groups) = ranks.split_at_mut(scores.len());
    ranks.iter_mut().enumerate().for_each(|(e, r)| *r = rank(value(e)));
    if let Some(spec) = route.groups {
        mask_groups(spec, value, ranks, groups);
    }
    for (e, w) in chosen.iter_mut().zip(&mut *weights) {
        let best = take(ranks);
        (*e, *w) = (best as u32, scores[best]);
    }
    if route.score == Score::SoftmaxOfChosen {
        tier.vector.softmax(weights);
    } else if route.normalize {
        // From the best on; what is added keeps scores that have all underflowed at zero.
        let sum = weights.iter().sum::<f32>() + 1e-20;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= route.scale);
    for i in 1..chosen.len() {
        let mut j = i;
        while j > 0 && chosen[j - 1] > chosen[j] {
            chosen.swap(j - 1, j);
            weights.swap(j - 1, j);
            j -= 1;
        }
    }
}

/// Puts the experts of groups that are not among the best behind all others.
fn mask_groups(spec: Groups, value: impl Fn(usize) -> f32, ranks: &mut [u32], groups: &mut [u32]) {
    let Groups { count, top, best } = spec;
    assert!(count > 0 && ranks.len().is_multiple_of(count), "{} experts in {count} groups", ranks.len());
    let size = ranks.len() / count;
    let groups = &mut groups[..count];
    for (g, (ranks, group)) in ranks.chunks_exact_mut(size).zip(&mut *groups).enumerate() {
        let sum = (0..best.min(size)).map(|_| value(g * size + take(ranks))).sum();
        *group = rank(sum);
    }
    for _ in 0..top.min(count) {
        take(groups);
    }
    for (g, (ranks, group)) in ranks.chunks_exact_mut(size).zip(&*groups).enumerate() {
        for (i, r) in ranks.iter_mut().enumerate() {
            *r = if *group == TAKEN { rank(value(g * size + i)) } else { MASKED };
        }
    }
}

/// Where a score stands among others: larger scores have larger ranks, and NaN the largest, so that it is not passed over in
/// silence. Never [`TAKEN`] or [`MASKED`].
fn rank(v: f32) -> u32 {
    if v.is_nan() {
        return u32::MAX;
    }
    // Both zeros are the same.
    let bits = (v + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// Chosen already.
const TAKEN: u32 = 0;
/// In a group that lost.
const MASKED: u32 = 1;

/// The first of the largest, which is taken.
fn take(ranks: &mut [u32]) -> usize {
    let mut best = 0;
    for (i, &r) in ranks.iter().enumerate() {
        if r > ranks[best] {
            best = i;
        }
    }
    ranks[best] = TAKEN;
    best
}

/// Sorts the pairs by expert, and says how many experts have any.
fn sort(route: &RouteSpec, parts: &mut Parts<'_>) -> usize {
    let Parts { chosen, place, row, busy, starts, .. } = parts;
    // Counted two further on: placing moves each start to where the next expert's is to be.
    starts.fill(0);
    for &e in chosen.iter() {
        starts[e as usize + 2] += 1;
    }
    let mut count = 0;
    for e in 0..route.experts {
        if starts[e + 2] > 0 {
            busy[count] = e as u32;
            count += 1;
        }
        starts[e + 2] += starts[e + 1];
    }
    for (slot, (&e, place)) in chosen.iter().zip(place.iter_mut()).enumerate() {
        let at = &mut starts[e as usize + 1];
        *place = *at;
        row[*at as usize] = (slot / route.top_k) as u32;
        *at += 1;
    }
    count
}

fn cut<'a, T>(from: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (part, rest) = std::mem::take(from).split_at_mut(len);
    *from = rest;
    part
}

#[cfg(test)]
mod tests;
