//! Rotary position embedding (Su et al., 2021) and its scalings: from a position to cosines and sines. The frequencies are
//! computed in f64 and rounded once; the angle is an f32 product, as in the models' training code. `libm` in place of the
//! system's mathematics library: the same bits on every machine.
//!
//! Invariant: angles depend on the position and on the [regime](RopeSpec::regime) alone.
#![forbid(unsafe_code)]

use std::f64::consts::PI;

/// Which two values of a head turn together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RopeStyle {
    /// `i` and `i + rotary / 2` (GPT-NeoX, Hugging Face Llama).
    HalfSplit,
    /// `2i` and `2i + 1` (GPT-J, the RoFormer paper).
    Interleaved,
}

/// One rotary table of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct RopeSpec {
    /// Values of a head that turn, an even number.
    pub rotary: usize,
    /// Which values pair up.
    pub style: RopeStyle,
    /// Base of the frequencies.
    pub theta: f64,
    /// How long contexts are reached.
    pub scaling: RopeScaling,
}

/// Ways to reach contexts longer than those of the first training.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum RopeScaling {
    /// None.
    Default,
    /// Positions divided by `factor` (Chen et al., 2023).
    Linear {
        /// Of the context.
        factor: f64,
    },
    /// NTK-aware base that follows the current length once it passes `original`. Cached keys turn invalid with each new
    /// token from there on: see [`RopeSpec::regime`].
    Dynamic {
        /// Of the context.
        factor: f64,
        /// Context of the training.
        original: usize,
    },
    /// NTK by parts (Peng et al., 2023).
    Yarn {
        /// Of the context.
        factor: f64,
        /// Context of the first training.
        original: usize,
        /// Turns over the context above which a frequency stays as it is.
        beta_fast: f64,
        /// Turns below which a frequency is divided by `factor`.
        beta_slow: f64,
        /// The bounds of the ramp are rounded to whole indices.
        truncate: bool,
        /// On cosines and sines.
        attention_factor: f64,
    },
    /// Llama 3.1's ramp by wavelength.
    Llama3 {
        /// Of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low` are divided by `factor`.
        low: f64,
        /// Wavelengths below `original / high` stay.
        high: f64,
        /// Context of the first training.
        original: usize,
    },
    /// A divisor for each frequency, one list up to `original` tokens and another beyond (Ding et al., 2024). The list
    /// follows the whole length: see [`RopeSpec::regime`].
    Long {
        /// Divisors up to `original` tokens, `rotary / 2` of them.
        short: Vec<f64>,
        /// Divisors beyond.
        long: Vec<f64>,
        /// Where the lists change.
        original: usize,
        /// On cosines and sines.
        attention_factor: f64,
    },
    /// A divisor for each frequency, whatever the length (GGUF's `rope_freqs`).
    Factors(Vec<f64>),
}

impl RopeSpec {
    /// Names the frequencies in use at a sequence length of `total`. Keys in a cache are valid in the regime that they were
    /// written in; a sequence that passes into another one is computed anew.
    pub fn regime(&self, total: usize) -> u32 {
        match self.scaling {
            RopeScaling::Dynamic { original, .. } if total > original => total as u32,
            RopeScaling::Long { original, .. } if total > original => 1,
            _ => 0,
        }
    }

    /// Positions that a model of `context` positions has: frequencies that follow the length know no end.
    pub fn context(&self, context: usize) -> usize {
        match self.scaling {
            RopeScaling::Dynamic { .. } => 1 << 30,
            _ => context,
        }
    }

    /// Radians a position for each of the `rotary / 2` pairs at a sequence length of `total`, into `out`.
    pub fn frequencies(&self, total: usize, out: &mut [f32]) {
        let dim = self.rotary as f64;
        let base = match self.scaling {
            RopeScaling::Dynamic { factor, original } if total > original => {
                let stretch = factor * total as f64 / original as f64 - (factor - 1.0);
                self.theta * libm::pow(stretch, dim / (dim - 2.0))
            }
            _ => self.theta,
        };
        for (i, out) in out.iter_mut().enumerate() {
            let plain = 1.0 / libm::pow(base, 2.0 * i as f64 / dim);
            *out = self.scaled(i, plain, total) as f32;
        }
    }

    /// True where every frequency, at any length, and the factor on cosines and sines are numbers to compute with. Settings that
    /// make sense one by one can overflow together.
    pub fn is_sound(&self) -> bool {
        let mut out = vec![0.0; self.rotary / 2];
        let finite = [1, 1 << 30].into_iter().all(|total| {
            self.frequencies(total, &mut out);
            out.iter().all(|f| f.is_finite())
        });
        finite && self.attention_factor().is_normal() && self.attention_factor() > 0.0
    }

    /// Factor on cosines and sines.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::Long { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        }
    }

    fn scaled(&self, i: usize, plain: f64, total: usize) -> f64 {
        match &self.scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => plain,
            RopeScaling::Linear { factor } => plain / factor,
            RopeScaling::Factors(divisors) => plain / divisors[i],
            RopeScaling::Long { short, long, original, .. } => plain / if total > *original { long[i] } else { short[i] },
            RopeScaling::Llama3 { factor, low, high, original } => {
                let wavelength = 2.0 * PI / plain;
                let original = *original as f64;
                if wavelength < original / high {
                    plain
                } else if wavelength > original / low {
                    plain / factor
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * plain / factor + smooth * plain
                }
            }
            RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate, .. } => {
                let (mut low, mut high) = (self.yarn_index(*beta_fast, *original), self.yarn_index(*beta_slow, *original));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(self.rotary as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain / factor * ramp + plain * (1.0 - ramp)
            }
        }
    }

    /// The pair that makes `turns` turns over the context of the first training.
    fn yarn_index(&self, turns: f64, original: usize) -> f64 {
        self.rotary as f64 * libm::log(original as f64 / (turns * 2.0 * PI)) / (2.0 * libm::log(self.theta))
    }

    /// YaRN's default for the factor on cosines and sines: `0.1 * mscale * ln(factor) + 1`.
    pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 }
    }
}

/// Writes the `rotary / 2` cosines and then as many sines of `position` into `out`.
pub fn angles(frequencies: &[f32], position: u32, factor: f32, out: &mut [f32]) {
    let (cos, sin) = out.split_at_mut(frequencies.len());
    for ((f, c), s) in frequencies.iter().zip(cos).zip(sin) {
        let (sine, cosine) = libm::sincos(f64::from(position as f32 * f));
        *c = cosine as f32 * factor;
        *s = sine as f32 * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(scaling: RopeScaling, total: usize) -> Vec<f32> {
        let mut out = [0.0; 8];
        RopeSpec { rotary: 16, style: RopeStyle::HalfSplit, theta: 10_000.0, scaling }.frequencies(total, &mut out);
        out.to_vec()
    }

    #[test]
    fn plain_frequencies_are_powers_of_the_base() {
        let f = frequencies(RopeScaling::Default, 5);
        assert_eq!(f[0], 1.0);
        assert!((f[4] - 0.01).abs() < 1e-9, "{f:?}");
        assert_eq!(frequencies(RopeScaling::Linear { factor: 4.0 }, 5)[0], 0.25);
    }

    #[test]
    fn dynamic_changes_past_the_original_context_only() {
        let dynamic = RopeScaling::Dynamic { factor: 2.0, original: 64 };
        assert_eq!(frequencies(dynamic.clone(), 64), frequencies(RopeScaling::Default, 64));
        assert_ne!(frequencies(dynamic.clone(), 65), frequencies(dynamic, 66));
    }

    #[test]
    fn yarn_and_llama3_keep_the_fast_pairs_and_divide_the_slow() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original: 32,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.0,
        };
        let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 32 };
        let plain = frequencies(RopeScaling::Default, 1);
        for (scaling, factor) in [(yarn, 4.0), (llama3, 8.0)] {
            let f = frequencies(scaling, 1);
            assert_eq!(f[0], plain[0]);
            assert!((f[7] * factor / plain[7] - 1.0).abs() < 1e-6, "{f:?}");
        }
    }

    #[test]
    fn angles_at_zero_and_one() {
        let mut out = [0.0; 4];
        angles(&[1.0, 0.5], 0, 2.0, &mut out);
        assert_eq!(out, [2.0, 2.0, 0.0, 0.0]);
        angles(&[1.0, 0.5], 1, 1.0, &mut out);
        assert!((out[0] - 0.540_302_3).abs() < 1e-7 && (out[3] - 0.479_425_54).abs() < 1e-7, "{out:?}");
    }
}
