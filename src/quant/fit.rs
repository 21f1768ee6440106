//! Choosing scales for a block: the least squared error over a short list of candidates, each improved once by least
//! squares for the codes that it leads to.
//!
//! Every search includes the candidate that puts the extreme value on the last code, and every error is that of the
//! scale after rounding to what the format stores, with the nearest codes. So no result is worse than plain rounding.
#![forbid(unsafe_code)]

use half::f16;

/// The largest half.
pub(super) const HALF_MAX: f32 = 65504.0;

/// Codes that the extreme value may get. Negative first: there is one more code on that side. Past the last code the
/// extreme is clipped for the sake of the others.
pub(super) const DIVISORS_4_BIT: [f32; 16] =
    [-8.0, -7.25, -7.5, -7.75, -8.25, -8.5, -8.75, -9.0, -9.25, 7.0, 6.75, 7.25, 7.5, 7.75, 8.0, 8.25];
/// The same for 5 bits.
pub(super) const DIVISORS_5_BIT: [f32; 14] =
    [-16.0, -15.25, -15.5, -15.75, -16.25, -16.5, -16.75, -17.0, 15.0, 14.75, 15.25, 15.5, 15.75, 16.0];
/// The same for 6 bits.
pub(super) const DIVISORS_6_BIT: [f32; 15] =
    [-32.0, -31.25, -31.5, -31.75, -32.25, -32.5, -32.75, -33.0, 31.0, 30.5, 30.75, 31.25, 31.5, 31.75, 32.0];

/// The codes of a format, whole numbers from `low` to `high`.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) low: f32,
    pub(super) high: f32,
}

/// `value = scale * code + min`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) scale: f32,
    pub(super) min: f32,
}

/// Sums over a block, for least squares.
struct Sums {
    q: f32,
    qq: f32,
    qx: f32,
}

impl Codes {
    /// The code nearest to `position`, ties to even.
    #[inline(always)]
    fn nearest(self, position: f32) -> f32 {
        // Adding 1.5 * 2^23 leaves no bits for a fraction: rounds without a call, and in vectors.
        const NO_FRACTION: f32 = 12_582_912.0;
        (position.max(self.low).min(self.high) + NO_FRACTION) - NO_FRACTION
    }

    /// The nearest codes of a whole block of `N`.
    pub(super) fn nearest_all<const N: usize>(self, x: &[f32], scale: f32, min: f32) -> [f32; N] {
        let inverse = inverse(scale);
        std::array::from_fn(|j| self.nearest((x[j] - min) * inverse))
    }

    /// The squared error of a block under the nearest codes.
    pub(super) fn error(self, x: &[f32], scale: f32, min: f32) -> f32 {
        let inverse = inverse(scale);
        sum(x, |x| {
            let difference = scale * self.nearest((x - min) * inverse) + min - x;
            difference * difference
        })
    }

    fn sums(self, x: &[f32], scale: f32, min: f32) -> Sums {
        let inverse = inverse(scale);
        let code = |x: f32| self.nearest((x - min) * inverse);
        Sums { q: sum(x, code), qq: sum(x, |x| code(x) * code(x)), qx: sum(x, |x| code(x) * x) }
    }
}

/// The best `scale` for `value = scale * code`. `round` takes a scale to the nearest one that can be stored.
pub(super) fn symmetric(x: &[f32], codes: Codes, divisors: &[f32], round: impl Fn(f32) -> f32) -> f32 {
    let extreme = extreme(x);
    let mut best = (f32::INFINITY, 0.0);
    let mut consider = |scale: f32| {
        let error = codes.error(x, scale, 0.0);
        if error < best.0 {
            best = (error, scale);
        }
    };
    for divisor in divisors {
        let scale = round(extreme / divisor);
        consider(scale);
        let Sums { qq, qx, .. } = codes.sums(x, scale, 0.0);
        if qq > 0.0 {
            consider(round(qx / qq));
        }
    }
    best.1
}

/// The best line with `min <= most_min`.
pub(super) fn affine(x: &[f32], codes: Codes, most_min: f32, round: impl Fn(f32) -> f32) -> Line {
    // Ranges a little narrower and wider than the values', in codes.
    const STEPS: [f32; 12] = [0.0, -1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0];
    let least = x.iter().fold(most_min, |least, x| least.min(*x));
    let most = x.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
    let mut best = (f32::INFINITY, Line { scale: 0.0, min: 0.0 });
    let mut consider = |scale: f32, min: f32| {
        let line = Line { scale: round(scale), min: round(min) };
        let error = codes.error(x, line.scale, line.min);
        if error < best.0 {
            best = (error, line);
        }
    };
    let (n, total) = (x.len() as f32, sum(x, |x| x));
    for step in STEPS {
        let scale = (most - least) / (codes.high + step);
        consider(scale, least);
        let Sums { q, qq, qx } = codes.sums(x, scale, least);
        let determinant = n * qq - q * q;
        if determinant > 0.0 {
            let (scale, min) = ((n * qx - q * total) / determinant, (qq * total - q * qx) / determinant);
            if min <= most_min {
                consider(scale, min);
            } else if qq > 0.0 {
                consider((qx - most_min * q) / qq, most_min);
            }
        }
    }
    best.1
}

/// The whole numbers within 1 of `wanted / unit`, from `low` to `high`.
pub(super) fn neighbours(wanted: f32, unit: f32, low: f32, high: f32) -> [f32; 3] {
    let middle = Codes { low, high }.nearest(wanted * inverse(unit));
    [middle, (middle - 1.0).max(low), (middle + 1.0).min(high)]
}

/// The value of the largest magnitude, with its sign; the first of equals.
pub(super) fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most: f32, x| if x.abs() > most.abs() { *x } else { most })
}

/// The nearest half that a scale may be: never infinite, for least squares may ask for a little more than the format
/// has; and never zero for a number that is not, for with the smallest half there are still codes to choose.
pub(super) fn round_to_half(v: f32) -> f32 {
    let rounded = f16::from_f32(v.clamp(-HALF_MAX, HALF_MAX)).to_f32();
    if rounded == 0.0 && v != 0.0 { f16::MIN_POSITIVE_SUBNORMAL.to_f32().copysign(v) } else { rounded }
}

/// A half, as stored. `v` is one already.
pub(super) fn half_bytes(v: f32) -> [u8; 2] {
    f16::from_f32(v).to_le_bytes()
}

/// The first 16 and the last 16.
pub(super) fn halves(codes: [u8; 32]) -> [[u8; 16]; 2] {
    [std::array::from_fn(|j| codes[j]), std::array::from_fn(|j| codes[16 + j])]
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// In eight lanes, so that the loop is vectors; the order is fixed. Lengths are multiples of 8.
#[inline(always)]
fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; 8];
    for x in x.as_chunks::<8>().0 {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += f(*x);
        }
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODES: Codes = Codes { low: -8.0, high: 7.0 };

    #[test]
    fn codes_are_the_nearest_and_stay_inside() {
        for (position, expected) in [(0.49, 0.0), (-0.51, -1.0), (2.5, 2.0), (3.5, 4.0), (7.4, 7.0), (1e9, 7.0), (-1e9, -8.0)] {
            assert_eq!(CODES.nearest(position), expected, "{position}");
        }
    }

    #[test]
    fn a_scale_that_can_be_stored_is_found_again() {
        let x: [f32; 32] = std::array::from_fn(|j| (j % 16) as f32 - 8.0).map(|code| code * 0.375);
        let scale = symmetric(&x, CODES, &DIVISORS_4_BIT, round_to_half);
        assert_eq!((scale, CODES.error(&x, scale, 0.0)), (0.375, 0.0));
        let x = x.map(|x| x + 11.0);
        let codes = Codes { low: 0.0, high: 15.0 };
        let line = affine(&x, codes, f32::INFINITY, round_to_half);
        assert_eq!((line.scale, line.min), (0.375, 8.0));
    }

    #[test]
    fn a_bound_on_the_minimum_holds() {
        let x: [f32; 32] = std::array::from_fn(|j| 5.0 + j as f32);
        let line = affine(&x, Codes { low: 0.0, high: 15.0 }, 0.0, |v| v);
        assert!(line.min <= 0.0 && line.scale > 0.0, "{line:?}");
    }

    #[test]
    fn scales_stay_finite_and_off_zero() {
        assert_eq!(round_to_half(1e30), HALF_MAX);
        assert_eq!(round_to_half(-1e30), -HALF_MAX);
        assert_eq!(round_to_half(-1e-30), -f16::MIN_POSITIVE_SUBNORMAL.to_f32());
        assert_eq!(round_to_half(0.0), 0.0);
    }

    #[test]
    fn constant_blocks_have_a_scale_of_their_own() {
        assert_eq!(symmetric(&[0.0; 32], CODES, &DIVISORS_4_BIT, round_to_half), 0.0);
        let line = affine(&[3.5; 32], Codes { low: 0.0, high: 15.0 }, f32::INFINITY, round_to_half);
        assert_eq!(line.min + line.scale * CODES.nearest((3.5 - line.min) * inverse(line.scale)), 3.5);
    }
}
