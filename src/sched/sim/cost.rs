//! How long a step takes: a base and a price for each of three things that it does, given or fitted to measured steps.
//! Knows no machine: whoever measures, measures.
#![forbid(unsafe_code)]

use super::SimError;
use std::time::Duration;

/// What a step has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepLoad {
    /// Decode rows: sequences that run their last known token alone.
    pub rows: usize,
    /// Tokens of prompts, or of answers that are computed anew.
    pub prefill_tokens: usize,
    /// Cached tokens that all tokens of the step look at, themselves included, added up: position + 1 for each.
    pub attended_tokens: usize,
}

/// Seconds that a step takes: `step + row * rows + prefill_token * prefill_tokens + attended_token * attended_tokens`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CostModel {
    /// Whatever the step runs: weights are read once.
    pub step: f64,
    /// Each decode row.
    pub row: f64,
    /// Each prefill token.
    pub prefill_token: f64,
    /// Each attended token.
    pub attended_token: f64,
}

/// A step that was measured.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CostSample {
    /// What it ran.
    pub load: StepLoad,
    /// How long it took.
    pub seconds: f64,
}

impl CostModel {
    /// The prices, none of them negative, with the least sum of squared errors over `samples`. Cost: O(samples).
    ///
    /// # Errors
    /// [`SimError::Parameter`] for a time that is negative or not finite, and where the samples do not tell the four prices
    /// apart: rows, prefill tokens and attended tokens must vary, and not all together.
    pub fn fit(samples: &[CostSample]) -> Result<Self, SimError> {
        for (k, s) in samples.iter().enumerate() {
            if !(s.seconds.is_finite() && s.seconds >= 0.0) {
                return Err(SimError::parameter(format!("seconds of sample {k}"), "a finite number, at least 0", s.seconds));
            }
        }
        // Columns of length 1, so that one threshold does for all; a column of zeros fails it below.
        let norms: [f64; N] = std::array::from_fn(|c| norm(samples.iter().map(|s| features(&s.load)[c])));
        let scaled = |s: &CostSample| -> [f64; N] {
            let x = features(&s.load);
            std::array::from_fn(|c| if norms[c] > 0.0 { x[c] / norms[c] } else { 0.0 })
        };
        let (mut gram, mut right) = ([[0.0; N]; N], [0.0; N]);
        for s in samples {
            let x = scaled(s);
            for i in 0..N {
                right[i] += x[i] * s.seconds;
                for j in 0..N {
                    gram[i][j] += x[i] * x[j];
                }
            }
        }
        if solve(&gram, &right, ALL).is_none() {
            let expected = "steps whose rows, prefill tokens and attended tokens vary independently, 4 at least";
            return Err(SimError::parameter("samples", expected, format!("{} that do not", samples.len())));
        }
        // The best prices that are not negative are the best free ones over some subset, the others at 0. There are 16.
        let error = |x: &[f64; N]| -> f64 { samples.iter().map(|s| (dot(&scaled(s), x) - s.seconds).powi(2)).sum() };
        let free = (0..=ALL).filter_map(|subset| solve(&gram, &right, subset)).filter(|x| x.iter().all(|v| *v >= 0.0));
        let best = free.map(|x| (error(&x), x)).min_by(|a, b| a.0.total_cmp(&b.0));
        let (_, x) = best.expect("all prices at 0 are a candidate");
        let [step, row, prefill_token, attended_token] = std::array::from_fn(|c| x[c] / norms[c]);
        Ok(CostModel { step, row, prefill_token, attended_token })
    }

    /// Seconds of a step.
    pub fn seconds(&self, load: &StepLoad) -> f64 {
        dot(&features(load), &self.prices())
    }

    /// The same as a time.
    ///
    /// # Errors
    /// [`SimError::Parameter`] where a price is negative or not finite, or the time is too long for a [`Duration`].
    pub fn time(&self, load: &StepLoad) -> Result<Duration, SimError> {
        for (name, price) in ["step", "row", "prefill_token", "attended_token"].iter().zip(self.prices()) {
            if !(price.is_finite() && price >= 0.0) {
                return Err(SimError::parameter(format!("cost of a {name}"), "a finite number, at least 0", price));
            }
        }
        let seconds = self.seconds(load);
        let long = |_| SimError::parameter("seconds of a step", "at most 2^64 - 1", seconds);
        Duration::try_from_secs_f64(seconds).map_err(long)
    }

    fn prices(&self) -> [f64; N] {
        [self.step, self.row, self.prefill_token, self.attended_token]
    }
}

fn features(load: &StepLoad) -> [f64; N] {
    [1.0, load.rows as f64, load.prefill_tokens as f64, load.attended_tokens as f64]
}

fn dot(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt()
}

/// Solves the equations of the columns in `subset`, the others at 0, by elimination with the largest pivot; none where they
/// are not independent.
fn solve(gram: &[[f64; N]; N], right: &[f64; N], subset: u32) -> Option<[f64; N]> {
    let columns: Vec<usize> = (0..N).filter(|c| subset >> c & 1 == 1).collect();
    let mut rows: Vec<Vec<f64>> =
        columns.iter().map(|&i| columns.iter().map(|&j| gram[i][j]).chain([right[i]]).collect()).collect();
    let n = columns.len();
    for k in 0..n {
        let pivot = (k..n).max_by(|&a, &b| rows[a][k].abs().total_cmp(&rows[b][k].abs()))?;
        rows.swap(k, pivot);
        if rows[k][k].abs() < SINGULAR {
            return None;
        }
        let above = rows[k].clone();
        for row in rows.iter_mut().enumerate().filter(|(i, _)| *i != k).map(|(_, row)| row) {
            let factor = row[k] / above[k];
            for (value, above) in row.iter_mut().zip(&above) {
                *value -= factor * above;
            }
        }
    }
    let mut x = [0.0; N];
    for (k, &c) in columns.iter().enumerate() {
        x[c] = rows[k][n] / rows[k][k];
    }
    Some(x)
}

const N: usize = 4;
const ALL: u32 = (1 << N) - 1;
/// With columns of length 1 a pivot is the share of a column that those before it do not explain; rounding alone leaves
/// about 1e-15.
const SINGULAR: f64 = 1e-9;
