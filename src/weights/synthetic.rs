//! Weights out of a seed: tensors of given names, shapes and formats with values like a model's, for benches and tests that
//! must not need a download.
//!
//! Invariant: a tensor's bytes follow from the seed, its name, its values' spread, its format and its length alone, on every
//! machine: integer arithmetic and single IEEE operations only, no library function.
#![forbid(unsafe_code)]

mod blocks;

use super::table::NameIndex;
use super::{TensorView, WeightSource};
use crate::dtype::FormatId;
use crate::error::LoadError;
use crate::weights::say::quoted;
use half::{bf16, f16};
use std::fmt;
use std::sync::OnceLock;

/// A tensor to make.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticTensor {
    /// Its name.
    pub name: String,
    /// Dimensions, the slowest first.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub format: FormatId,
    /// What it holds.
    pub fill: Fill,
}

/// The values of a synthetic tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Fill {
    /// Around 0 with this standard deviation, close to a normal distribution. In block formats the codes are uniform and the
    /// scales make the deviation right to a factor of two; in integer formats all bits are random.
    Normal(f32),
    /// The same value everywhere, as norms have at first. Only F32, F16, BF16 and F64 can hold it.
    Constant(f32),
}

/// A source of tensors that are made when they are first asked for, and then stay.
pub struct Synthetic {
    seed: u64,
    tensors: Vec<SyntheticTensor>,
    bytes: Vec<OnceLock<Box<[u8]>>>,
    by_name: NameIndex,
}

impl Synthetic {
    /// Refuses sizes that overflow, rows that are no whole blocks, two tensors of one name, spreads that are not finite and
    /// positive, and constants in a format that cannot hold them. Cost: nothing is made yet.
    pub fn new(seed: u64, tensors: Vec<SyntheticTensor>) -> Result<Synthetic, LoadError> {
        for tensor in &tensors {
            tensor.check()?;
        }
        let by_name = NameIndex::new(tensors.len(), |i| &tensors[i].name)
            .map_err(|i| LoadError::malformed(LABEL, quoted(&tensors[i].name), "one tensor of that name", "two"))?;
        let bytes = tensors.iter().map(|_| OnceLock::new()).collect();
        Ok(Synthetic { seed, tensors, bytes, by_name })
    }
}

impl WeightSource for Synthetic {
    fn label(&self) -> &str {
        LABEL
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors.iter().map(|tensor| tensor.name.as_str()))
    }

    /// Makes the tensor the first time: a nanosecond or so a byte.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let i = self.by_name.find(name, |i| &self.tensors[i].name)?;
        let tensor = &self.tensors[i];
        let bytes = self.bytes[i].get_or_init(|| tensor.make(self.seed));
        Some(TensorView { format: tensor.format, shape: &tensor.shape, bytes })
    }

    fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes().expect("checked when the source was made") as u64).sum()
    }
}

impl fmt::Debug for Synthetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Synthetic").field("seed", &self.seed).field("tensors", &self.tensors.len()).finish()
    }
}

impl SyntheticTensor {
    fn check(&self) -> Result<(), LoadError> {
        let block_len = self.format.block_len();
        let row_len = self.shape.last().copied().unwrap_or(1);
        if !row_len.is_multiple_of(block_len) {
            return Err(LoadError::PartialBlock { tensor: self.name.clone(), row_len, block_len, format: self.format });
        }
        let bad = |at: &str, expected: &str, found: String| {
            Err(LoadError::malformed(LABEL, format!("{at} of tensor {}", quoted(&self.name)), expected, found))
        };
        if self.bytes().is_none() {
            return bad("shape", "a size that fits the address space", format!("{:?}", self.shape));
        }
        match self.fill {
            Fill::Normal(std) if !(std.is_finite() && std > 0.0) => bad("fill", "a finite deviation above 0", std.to_string()),
            Fill::Constant(_) if !is_float(self.format) => Err(LoadError::TensorFormat {
                tensor: self.name.clone(),
                expected: "F32, F16, BF16 or F64 for a constant",
                found: self.format,
            }),
            _ => Ok(()),
        }
    }

    fn bytes(&self) -> Option<usize> {
        let values = self.shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))?;
        self.format.bytes_of(values).filter(|&bytes| isize::try_from(bytes).is_ok())
    }

    fn make(&self, seed: u64) -> Box<[u8]> {
        let mut bytes = vec![0u8; self.bytes().expect("checked when the source was made")];
        let mut draws = Draws::new(seed, &self.name);
        match self.fill {
            Fill::Constant(value) => fill_floats(self.format, &mut bytes, || value),
            Fill::Normal(std) if is_float(self.format) => fill_floats(self.format, &mut bytes, || draws.normal() * std),
            Fill::Normal(std) => {
                draws.fill(&mut bytes);
                blocks::set_scales(self.format, &mut bytes, std);
            }
        }
        bytes.into()
    }
}

fn is_float(format: FormatId) -> bool {
    matches!(format, FormatId::F32 | FormatId::F16 | FormatId::BF16 | FormatId::F64)
}

fn fill_floats(format: FormatId, bytes: &mut [u8], mut next: impl FnMut() -> f32) {
    match format {
        FormatId::F32 => bytes.as_chunks_mut().0.iter_mut().for_each(|value| *value = next().to_le_bytes()),
        FormatId::F16 => bytes.as_chunks_mut().0.iter_mut().for_each(|value| *value = f16::from_f32(next()).to_le_bytes()),
        FormatId::BF16 => bytes.as_chunks_mut().0.iter_mut().for_each(|value| *value = bf16::from_f32(next()).to_le_bytes()),
        FormatId::F64 => bytes.as_chunks_mut().0.iter_mut().for_each(|value| *value = f64::from(next()).to_le_bytes()),
        other => unreachable!("{other} is no float format"),
    }
}

/// The stream of one tensor: splitmix64, a counter put through a mixing function.
struct Draws(u64);

impl Draws {
    fn new(seed: u64, name: &str) -> Draws {
        // FNV-1a over the name, so that tensors differ and adding one leaves the others as they are.
        let name = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        Draws(mix(seed) ^ name)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// The sum of four uniform numbers, scaled to deviation 1: bounded by 3.46, close to normal, and exact everywhere, which a
    /// logarithm and a cosine are only at five times the cost.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        // Four times (2^16 - 1) / 2, and 1 / sqrt(4 * (2^32 - 1) / 12).
        (sum as f32 - 131_070.0) * 2.642_954e-5
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        let (words, tail) = bytes.as_chunks_mut::<8>();
        for word in words {
            *word = self.next().to_le_bytes();
        }
        let last = self.next().to_le_bytes();
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const LABEL: &str = "synthetic weights";

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize], format: FormatId, fill: Fill) -> SyntheticTensor {
        SyntheticTensor { name: name.to_owned(), shape: shape.to_vec(), format, fill }
    }

    #[test]
    fn the_stream_is_pinned() {
        let first: Vec<u64> = std::iter::repeat_with({
            let mut draws = Draws::new(7, "a");
            move || draws.next()
        })
        .take(2)
        .collect();
        assert_eq!(first, PINNED);
    }

    #[test]
    fn normal_values_have_the_deviation_asked_for() {
        let source = Synthetic::new(1, vec![tensor("w", &[64, 1024], FormatId::F32, Fill::Normal(0.02))]).unwrap();
        let view = source.tensor("w").unwrap();
        let values: Vec<f64> = view.bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b).into()).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let std = (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
        assert!(mean.abs() < 4.0 * 0.02 / 256.0, "{mean}");
        assert!((std - 0.02).abs() < 0.0003, "{std}");
    }

    #[test]
    fn same_seed_same_bytes_other_seed_other_bytes() {
        for &format in FormatId::ALL {
            let make = |seed, name: &str| {
                let source = Synthetic::new(seed, vec![tensor(name, &[3, 512], format, Fill::Normal(0.02))]).unwrap();
                let view = source.tensor(name).unwrap();
                assert_eq!(view.bytes.len(), format.bytes_of(3 * 512).unwrap());
                assert_eq!(source.total_bytes(), view.bytes.len() as u64);
                view.bytes.to_vec()
            };
            assert_eq!(make(1, "w"), make(1, "w"), "{format}");
            assert_ne!(make(1, "w"), make(2, "w"), "{format}");
            assert_ne!(make(1, "w"), make(1, "v"), "{format}");
        }
    }

    #[test]
    fn refuses_what_cannot_be_made() {
        let make = |t: SyntheticTensor| Synthetic::new(0, vec![t]).unwrap_err();
        assert!(matches!(make(tensor("w", &[2, 33], FormatId::Q4_0, Fill::Normal(1.0))), LoadError::PartialBlock { .. }));
        assert!(matches!(make(tensor("w", &[usize::MAX, 2], FormatId::F32, Fill::Normal(1.0))), LoadError::Malformed { .. }));
        assert!(matches!(make(tensor("w", &[2], FormatId::F32, Fill::Normal(f32::NAN))), LoadError::Malformed { .. }));
        assert!(matches!(make(tensor("w", &[32], FormatId::Q4_0, Fill::Constant(1.0))), LoadError::TensorFormat { .. }));
        let twice = vec![tensor("w", &[1], FormatId::F32, Fill::Constant(1.0)); 2];
        assert!(matches!(Synthetic::new(0, twice).unwrap_err(), LoadError::Malformed { .. }));
    }

    /// From an independent implementation: a change here changes every bench.
    const PINNED: [u64; 2] = [0x76a4_5c6a_290f_c000, 0x85b8_fb54_4cb8_668a];
}
