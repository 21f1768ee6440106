//! Random numbers as a pure function of (seed, position, stream): Philox4x32-10, the counter-based generator of Salmon,
//! Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). There is no state that a batch mate, a
//! replayed step or a rejected draft could advance.
//!
//! Invariant: equal arguments give equal numbers, for ever. A change here changes what every seeded request says.
#![forbid(unsafe_code)]

/// The numbers that belong to one seed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Draws {
    key: [u32; 2],
}

/// What a number at a position is for. Speculation needs several independent ones at the same position.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Stream {
    /// The token itself.
    Token,
    /// The drafter's guess.
    Draft,
    /// Whether a guess is accepted.
    Accept,
    /// The token that replaces a rejected guess.
    Residual,
}

impl Draws {
    /// The numbers of `seed`.
    pub fn new(seed: u64) -> Self {
        Draws { key: [seed as u32, (seed >> 32) as u32] }
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    pub fn uniform(self, position: u64, stream: Stream) -> f64 {
        let lane = match stream {
            Stream::Token => 0,
            Stream::Draft => 1,
            Stream::Accept => 2,
            Stream::Residual => 3,
        };
        let [a, b, _, _] = philox([position as u32, (position >> 32) as u32, lane, 0], self.key);
        let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
        bits as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// Ten rounds: two 32 x 32 -> 64 bit products, halves swapped and mixed with a key that steps along two Weyl sequences.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let p0 = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let p1 = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [(p1 >> 32) as u32 ^ counter[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ counter[3] ^ key[1], p0 as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

#[cfg(test)]
mod tests {
    use super::*;

    const N: usize = 10_000;

    fn stream(seed: u64) -> Vec<f64> {
        (0..N as u64).map(|p| Draws::new(seed).uniform(p, Stream::Token)).collect()
    }

    fn correlation(a: &[f64], b: &[f64]) -> f64 {
        let n = a.len().min(b.len());
        let mean = |v: &[f64]| v[..n].iter().sum::<f64>() / n as f64;
        let (ma, mb) = (mean(a), mean(b));
        let dot = |f: fn(f64, f64) -> f64| (0..n).map(|i| f(a[i] - ma, b[i] - mb)).sum::<f64>();
        dot(|x, y| x * y) / (dot(|x, _| x * x) * dot(|_, y| y * y)).sqrt()
    }

    /// The known answers that Random123, the authors' own implementation, publishes.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn equal_seeds_agree_and_different_ones_do_not() {
        assert_eq!(stream(17), stream(17));
        for (a, b) in [(0, 1), (17, 18), (1, 1 << 32), (u64::MAX, 0)] {
            let equal = stream(a).iter().zip(stream(b)).filter(|(x, y)| **x == *y).count();
            assert_eq!(equal, 0, "seeds {a} and {b}");
        }
    }

    /// Over positions, over seeds at one position, and over streams: 100 cells, 99 degrees of freedom; 1 in 10^6 passes
    /// 168. The seeds are fixed, so the test cannot flicker.
    #[test]
    fn draws_are_uniform() {
        let over_seeds: Vec<f64> = (0..N as u64).map(|s| Draws::new(s).uniform(5, Stream::Token)).collect();
        let accept: Vec<f64> = (0..N as u64).map(|p| Draws::new(3).uniform(p, Stream::Accept)).collect();
        for (name, draws) in [("seed 0", stream(0)), ("seed 42", stream(42)), ("seeds", over_seeds), ("accept", accept)] {
            let mut cells = [0usize; 100];
            for u in &draws {
                assert!((0.0..1.0).contains(u));
                cells[(u * 100.0) as usize] += 1;
            }
            let expected = N as f64 / 100.0;
            let chi: f64 = cells.iter().map(|&c| (c as f64 - expected).powi(2) / expected).sum();
            assert!(chi > 45.0 && chi < 168.0, "{name}: chi-square {chi}");
        }
    }

    /// Five standard deviations of the sample correlation of independent numbers.
    #[test]
    fn neighbours_are_independent() {
        let bound = 5.0 / (N as f64).sqrt();
        for seed in [0, 1, 12_345] {
            let draws = stream(seed);
            for lag in [1, 2, 3, 64] {
                assert!(correlation(&draws, &draws[lag..]).abs() < bound, "seed {seed}, lag {lag}");
            }
            assert!(correlation(&draws, &stream(seed + 1)).abs() < bound, "seeds {seed} and {}", seed + 1);
            assert!(correlation(&draws, &stream(seed + 1)[1..]).abs() < bound);
            let residual: Vec<f64> = (0..N as u64).map(|p| Draws::new(seed).uniform(p, Stream::Residual)).collect();
            assert!(correlation(&draws, &residual).abs() < bound);
        }
    }
}
