//! Selections over rows of numbers that sort no more than they must: the maximum, the k-th largest value, a head that
//! carries a given mass, and the draw.
//!
//! Invariant: results and the order of every sum are defined by values and indices alone, never by how a partition or
//! a sort happens to move elements, so a newer standard library cannot change them.
#![forbid(unsafe_code)]

use super::exp::{FLOOR, exp_falling};
use crate::error::{ConfigError, reserved};
use crate::ids::TokenId;

/// The largest number of a row and the first place where it stands, or the first NaN. An empty row has -inf at 0.
///
/// Cost: one pass; blocks are compared lane by lane so that the compiler can use vectors.
pub(super) fn argmax(row: &[f32]) -> Result<(usize, f32), usize> {
    let mut best = (0, f32::NEG_INFINITY);
    for (block, values) in row.chunks(BLOCK).enumerate() {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let mut nan = [false; LANES];
        let (whole, rest) = values.as_chunks::<LANES>();
        for chunk in whole {
            for lane in 0..LANES {
                lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
                nan[lane] |= chunk[lane].is_nan();
            }
        }
        let max = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, |a, v| if v > a { v } else { a });
        if nan.contains(&true) || rest.iter().any(|v| v.is_nan()) {
            let at = values.iter().position(|v| v.is_nan()).expect("a NaN was just seen in this block");
            return Err(block * BLOCK + at);
        }
        if max > best.1 {
            best = (block, max);
        }
    }
    let start = best.0 * BLOCK;
    let block = row.get(start..).unwrap_or_default();
    Ok((start + block.iter().position(|&v| v == best.1).unwrap_or(0), best.1))
}

/// The `k`-th largest number of a row (`k` at least 1), or -inf where fewer than `k` are above it. `buffer` is scratch; it
/// needs room for 2 k + 256 numbers or the whole row, whichever is less.
///
/// Cost: one pass that looks at each number once and stores few: only what beats the k-th largest so far, thinned out
/// whenever the buffer is full.
pub(super) fn kth_largest(row: &[f32], k: usize, buffer: &mut Vec<f32>) -> f32 {
    let room = k.saturating_mul(2).saturating_add(256);
    let mut bar = f32::NEG_INFINITY;
    buffer.clear();
    for values in row.chunks(LANES) {
        if values.iter().fold(false, |any, &value| any | (value > bar)) {
            for &value in values.iter().filter(|&&value| value > bar) {
                buffer.push(value);
            }
            if buffer.len() + LANES > room {
                bar = thin_out(buffer, k);
            }
        }
    }
    if buffer.len() < k { f32::NEG_INFINITY } else { thin_out(buffer, k) }
}

fn thin_out(buffer: &mut Vec<f32>, k: usize) -> f32 {
    let (_, &mut kth, _) = buffer.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    buffer.truncate(k);
    kth
}

/// The tokens still in play, in rising order, with what they weigh.
#[derive(Debug)]
pub(super) struct Candidates {
    pub(super) tokens: Vec<TokenId>,
    /// Logit minus the row's maximum, over the temperature: 0 or below.
    pub(super) scores: Vec<f32>,
    /// `exp(score)`: above 0, at most 1.
    pub(super) weights: Vec<f32>,
    order: Vec<u64>,
    buckets: Vec<f64>,
}

impl Candidates {
    /// With room for `vocab` tokens.
    pub(super) fn with_capacity(vocab: usize) -> Result<Self, ConfigError> {
        Ok(Candidates {
            tokens: reserved("the sampler", vocab)?,
            scores: reserved("the sampler", vocab)?,
            weights: reserved("the sampler", vocab)?,
            order: reserved("the sampler", vocab)?,
            buckets: reserved("the sampler", BUCKETS)?,
        })
    }

    /// The tokens whose logit is `least` or more, weighed against the row's maximum `max`. Tokens whose weight rounds to
    /// zero are gone: no draw could reach them.
    pub(super) fn collect(&mut self, row: &[f32], least: f32, max: f32, temperature: f32) {
        self.tokens.clear();
        self.scores.clear();
        self.weights.clear();
        if least == f32::NEG_INFINITY {
            self.tokens.extend(0..row.len() as TokenId);
            self.scores.extend(row.iter().map(|&logit| (logit - max) / temperature));
        } else {
            for (token, &logit) in row.iter().enumerate().filter(|&(_, &logit)| logit >= least) {
                self.tokens.push(token as TokenId);
                self.scores.push((logit - max) / temperature);
            }
        }
        self.weights.resize(self.scores.len(), 0.0);
        self.weights.iter_mut().zip(&self.scores).for_each(|(weight, &score)| *weight = exp_falling(score));
        if self.scores.iter().fold(0.0f32, |a, &s| if s < a { s } else { a }) < FLOOR {
            self.retain(|_, _, weight| weight > 0.0);
        }
    }

    /// One token and nothing else.
    pub(super) fn set_one(&mut self, token: TokenId) {
        self.tokens.clear();
        self.scores.clear();
        self.weights.clear();
        self.tokens.push(token);
        self.scores.push(0.0);
        self.weights.push(1.0);
    }

    /// Keeps the candidates for which `keep(index, score, weight)` holds.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(usize, f32, f32) -> bool) {
        let mut kept = 0;
        // Every candidate is moved, kept or not: a branch that is taken at random costs more than three stores.
        for i in 0..self.tokens.len() {
            let (token, score, weight) = (self.tokens[i], self.scores[i], self.weights[i]);
            (self.tokens[kept], self.scores[kept], self.weights[kept]) = (token, score, weight);
            kept += usize::from(keep(i, score, weight));
        }
        self.tokens.truncate(kept);
        self.scores.truncate(kept);
        self.weights.truncate(kept);
    }

    /// The sum of the weights.
    pub(super) fn total(&self) -> f64 {
        sum(&self.weights)
    }

    /// Entropy of the distribution, in nats.
    pub(super) fn entropy(&self, total: f64) -> f64 {
        let mean_score: f64 = self.scores.iter().zip(&self.weights).map(|(&s, &w)| f64::from(s) * f64::from(w)).sum();
        libm::log(total) - mean_score / total
    }

    /// Keeps the most probable candidates until their share of the mass reaches `share`; at least one.
    pub(super) fn keep_head(&mut self, share: f64) {
        let total = self.total();
        // All candidates below this weight together are lighter than the tail that goes; half of it leaves room for
        // rounding. With real logits few are left for the rest.
        let light = (0.5 * (1.0 - share) * total / self.tokens.len() as f64) as f32;
        self.retain(|_, _, weight| weight >= light);
        // 0 - score is never -0, whose bits would spoil the order of keys.
        self.keep_mass(share * total, |score| 0.0 - score, false);
    }

    /// Keeps the candidates with the smallest keys (0 or above, from the score) until their mass reaches `goal`; at least
    /// one. Equal keys at the border: all of them where `ties` says so, else the lower ids.
    ///
    /// ```text
    /// spread the mass over buckets by key; walk the buckets until the mass would be reached;
    /// sort that one bucket by (key, id) and walk it to the border; keep everything up to there
    /// ```
    ///
    /// Cost: three passes and the sort of one bucket of 1,024, whatever the share.
    pub(super) fn keep_mass(&mut self, goal: f64, key: impl Fn(f32) -> f32, ties: bool) {
        let range = self.scores.iter().map(|&s| key(s)).fold(0.0f32, f32::max).min(MAX_RANGE);
        let scale = if range > 0.0 { BUCKETS as f32 / range } else { 0.0 };
        let bucket_of = |key: f32| ((key * scale) as usize).min(BUCKETS - 1);

        self.buckets.clear();
        self.buckets.resize(BUCKETS, 0.0);
        for (&score, &weight) in self.scores.iter().zip(&self.weights) {
            self.buckets[bucket_of(key(score))] += f64::from(weight);
        }
        let (mut mass, mut border_bucket) = (0.0, None);
        for (bucket, &weight) in self.buckets.iter().enumerate().filter(|&(_, &weight)| weight > 0.0) {
            mass += border_bucket.map_or(0.0, |last: usize| self.buckets[last]);
            border_bucket = Some(bucket);
            if mass + weight >= goal {
                break;
            }
        }
        let Some(border_bucket) = border_bucket else { return };

        // Keys are not negative, so their bits sort as they do.
        let entry = |i: usize, key: f32| u64::from(key.to_bits()) << 32 | i as u64;
        self.order.clear();
        let in_bucket = self.scores.iter().enumerate().map(|(i, &s)| (i, key(s)));
        self.order.extend(in_bucket.filter(|&(_, k)| bucket_of(k) == border_bucket).map(|(i, k)| entry(i, k)));
        self.order.sort_unstable();
        let mut border = u64::MAX;
        for &at in &self.order {
            mass += f64::from(self.weights[at as u32 as usize]);
            if mass >= goal {
                border = if ties { at | u64::from(u32::MAX) } else { at };
                break;
            }
        }
        self.retain(|i, score, _| {
            let key = key(score);
            let bucket = bucket_of(key);
            bucket < border_bucket || bucket == border_bucket && entry(i, key) <= border
        });
    }

    /// The token under `u`, from [0, 1), when the weights lie side by side. There is at least one candidate.
    pub(super) fn pick(&self, u: f64, total: f64) -> TokenId {
        let mut left = u * total;
        let mut blocks = self.weights.chunks(SUM_BLOCK).enumerate();
        // The last block takes what rounding leaves over, and so does the last token of a block.
        let (block, weights) = loop {
            let (block, weights) = blocks.next().expect("there is at least one candidate");
            let mass = block_sum(weights);
            if left < mass || blocks.len() == 0 {
                break (block, weights);
            }
            left -= mass;
        };
        let mut reached = 0.0;
        let at = weights.iter().position(|&weight| {
            reached += f64::from(weight);
            left < reached
        });
        self.tokens[block * SUM_BLOCK + at.unwrap_or(weights.len() - 1)]
    }

    /// Bytes for a vocabulary of `vocab`.
    pub(super) const fn bytes(vocab: usize) -> usize {
        vocab * (4 + 4 + 4 + 8) + BUCKETS * 8
    }
}

/// The sum of `exp(v - max)` over a row.
pub(super) fn sum_exp(row: &[f32], max: f32) -> f64 {
    let mut weights = [0.0; SUM_BLOCK];
    let blocks = row.chunks(SUM_BLOCK).map(|block| {
        let weights = &mut weights[..block.len()];
        weights.iter_mut().zip(block).for_each(|(weight, &logit)| *weight = exp_falling(logit - max));
        block_sum(weights)
    });
    blocks.sum()
}

/// The `n` largest numbers of a row with their places, largest first, the lower place among equals.
pub(super) fn largest(row: &[f32], n: usize, scratch: &mut Candidates, out: &mut Vec<(TokenId, f32)>) {
    out.clear();
    if n == 0 {
        return;
    }
    let bar = kth_largest(row, n.min(row.len()), &mut scratch.weights);
    scratch.order.clear();
    // Bits of a float that rise with it; inverted, so that the largest sorts first.
    let falling = |v: f32| {
        let bits = (v + 0.0).to_bits();
        !(if bits >> 31 == 1 { !bits } else { bits | 1 << 31 })
    };
    let above = row.iter().enumerate().filter(|&(_, &v)| v >= bar && v > f32::NEG_INFINITY);
    scratch.order.extend(above.map(|(i, &v)| u64::from(falling(v)) << 32 | i as u64));
    scratch.order.sort_unstable();
    out.extend(scratch.order.iter().take(n).map(|&at| (at as u32, row[at as u32 as usize])));
}

/// Blocks are summed on their own, so that the processor can work on several at once; then the blocks, in order.
fn sum(weights: &[f32]) -> f64 {
    weights.chunks(SUM_BLOCK).map(block_sum).sum()
}

fn block_sum(weights: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (whole, rest) = weights.as_chunks::<8>();
    for chunk in whole {
        (0..8).for_each(|lane| lanes[lane] += f64::from(chunk[lane]));
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&w| f64::from(w)).sum::<f64>()
}

const BLOCK: usize = 1024;
const LANES: usize = 16;
const SUM_BLOCK: usize = 64;
const BUCKETS: usize = 1024;
/// Keys beyond this many nats share the last bucket: their weight is below 10^-13 of the largest.
const MAX_RANGE: f32 = 32.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn row(len: usize, seed: u64, levels: u64) -> Vec<f32> {
        let mut state = seed;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 33) % levels) as f32 / levels as f32 * 20.0 - 10.0
            })
            .collect()
    }

    fn sorted(row: &[f32]) -> Vec<(TokenId, f32)> {
        let mut all: Vec<(TokenId, f32)> = (0..).zip(row.iter().copied()).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all
    }

    #[test]
    fn argmax_is_the_first_maximum() {
        for len in [1, 2, 15, 16, 17, 255, 1023, 1024, 1025, 5000] {
            for levels in [3, 1_000_000] {
                let row = row(len, len as u64, levels);
                let (at, max) = argmax(&row).unwrap();
                assert_eq!((at as TokenId, max), sorted(&row)[0]);
            }
        }
        assert_eq!(argmax(&[]), Ok((0, f32::NEG_INFINITY)));
        assert_eq!(argmax(&[f32::NEG_INFINITY; 40]), Ok((0, f32::NEG_INFINITY)));
        assert_eq!(argmax(&[-3.0, f32::INFINITY, f32::INFINITY]), Ok((1, f32::INFINITY)));
    }

    #[test]
    fn argmax_finds_every_nan() {
        for len in [1, 17, 1024, 3000] {
            for at in [0, len / 2, len - 1] {
                let mut row = row(len, 1, 1000);
                row[at] = f32::NAN;
                row[len - 1] = f32::NAN;
                assert_eq!(argmax(&row), Err(at));
            }
        }
    }

    #[test]
    fn kth_largest_equals_a_sort() {
        let mut buffer = Vec::new();
        for (len, levels) in [(1, 5), (300, 4), (3000, 7), (3000, 1 << 30)] {
            let mut row = row(len, 9, levels);
            for k in [1, 2, 40, 299, 300, 3000] {
                if k <= len {
                    assert_eq!(kth_largest(&row, k, &mut buffer), sorted(&row)[k - 1].1, "{len} {k}");
                }
            }
            row[0] = f32::NEG_INFINITY;
            assert_eq!(kth_largest(&row, len, &mut buffer), f32::NEG_INFINITY);
            row.sort_by(f32::total_cmp);
            assert_eq!(kth_largest(&row, 1, &mut buffer), *row.last().unwrap());
        }
    }

    #[test]
    fn keep_head_equals_a_sort() {
        for levels in [1, 2, 7, 1 << 30] {
            for temperature in [0.05, 1.0, 1e6] {
                for share in [0.0, 1e-9, 0.3, 0.5, 0.95, 0.999_999] {
                    let row = row(700, 3, levels);
                    let mut candidates = Candidates::with_capacity(700).unwrap();
                    let max = argmax(&row).unwrap().1;
                    candidates.collect(&row, f32::NEG_INFINITY, max, temperature);
                    let weight_of = |t: TokenId| exp_falling((row[t as usize] - max) / temperature);
                    let goal = share * candidates.total();
                    let mut expected = Vec::new();
                    let mut mass = 0.0;
                    for (token, _) in sorted(&row) {
                        if weight_of(token) > 0.0 && (expected.is_empty() || mass < goal * (1.0 - 1e-12)) {
                            expected.push(token);
                            mass += f64::from(weight_of(token));
                        }
                    }
                    expected.sort_unstable();
                    candidates.keep_head(share);
                    assert_eq!(candidates.tokens, expected, "levels {levels}, temperature {temperature}, share {share}");
                }
                let mut candidates = Candidates::with_capacity(700).unwrap();
                let row = row(700, 3, levels);
                candidates.collect(&row, f32::NEG_INFINITY, argmax(&row).unwrap().1, temperature);
                let total = candidates.total();
                candidates.keep_head(1.0);
                assert!(candidates.total() >= total * (1.0 - 1e-12), "the whole mass, up to rounding");
            }
        }
    }

    #[test]
    fn pick_covers_the_line() {
        let mut candidates = Candidates::with_capacity(200).unwrap();
        candidates.collect(&row(200, 5, 1 << 30), -5.0, 10.0, 1.0);
        let total = candidates.total();
        let (first, last) = (candidates.tokens[0], *candidates.tokens.last().unwrap());
        assert_eq!(candidates.pick(0.0, total), first);
        assert_eq!(candidates.pick(1.0 - f64::EPSILON / 2.0, total), last);
        let mut reached = 0.0;
        for i in 0..candidates.tokens.len() {
            let middle = reached + f64::from(candidates.weights[i]) / 2.0;
            assert_eq!(candidates.pick(middle / total, total), candidates.tokens[i]);
            reached += f64::from(candidates.weights[i]);
        }
    }

    #[test]
    fn largest_equals_a_sort() {
        let (mut scratch, mut out) = (Candidates::with_capacity(500).unwrap(), Vec::new());
        for levels in [1, 3, 1 << 30] {
            let row = row(500, 77, levels);
            for n in [0, 1, 5, 255, 500, 600] {
                largest(&row, n, &mut scratch, &mut out);
                assert_eq!(out, sorted(&row)[..n.min(500)]);
            }
        }
    }
}
