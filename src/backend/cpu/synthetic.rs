//! Seeded weights and activations for tests.
#![forbid(unsafe_code)]

use crate::dtype::FormatId;
use crate::quant;

pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// In [-1, 1).
    fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Roughly normal values.
pub(super) fn normals(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng(seed);
    (0..len).map(|_| (0..6).map(|_| rng.unit()).sum::<f32>() * 0.7).collect()
}

/// `len` weights in the file's layout: encoded where the crate can, else random bytes that decode to moderate numbers.
pub(super) fn weights(format: FormatId, len: usize, seed: u64) -> Vec<u8> {
    let codec = quant::codec(format).expect("a weight format");
    let mut rng = Rng(seed);
    let mut out = vec![0; format.bytes_of(len).expect("whole blocks")];
    let mut values = vec![0.0; format.block_len()];
    for block in out.chunks_exact_mut(format.block_bytes()) {
        match codec.encode {
            Some(encode) if format.is_plain() => encode(&[rng.unit() * 0.1], block),
            _ if format == FormatId::F64 => block.copy_from_slice(&f64::from(rng.unit()).to_le_bytes()),
            // Random bits use every quant; encoding would take long.
            _ => loop {
                block.fill_with(|| rng.bits() as u8);
                (codec.decode)(block, &mut values);
                if values.iter().all(|v| v.abs() < 100.0) {
                    break;
                }
            },
        }
    }
    out
}
