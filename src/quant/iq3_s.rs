//! IQ3_S: eight groups of 32 values; a group is eight codes of 9 bits into the grid, 32 signs, and a scale of 4 bits:
//! `value = ±d * (1 + 2 * scale) * grid`.
#![forbid(unsafe_code)]

use super::{Format, bits, grid};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 3.44 bits: a grid of 4 magnitudes, 512 entries.
pub struct IQ3S;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    /// Low eight bits of the codes.
    pub(crate) qs: [[u8; 8]; 8],
    /// The ninth bits, a byte for a group.
    pub(crate) high: [u8; 8],
    pub(crate) signs: [[u8; 4]; 8],
    pub(crate) scales: [u8; 4],
}

impl Format for IQ3S {
    const ID: FormatId = FormatId::IQ3S;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let scale = block.scales[group / 2] >> (group % 2 * 4) & 15;
            let scale = d * f32::from(1 + 2 * scale);
            let entry = |j: usize| {
                let high = block.high[group] >> j & 1;
                grid::IQ3_S[usize::from(block.qs[group][j]) | usize::from(high) << 8]
            };
            for (j, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let pair = [entry(2 * j), entry(2 * j + 1)];
                bits::signed(out, scale, pair.as_flattened(), block.signs[group][j]);
            }
        }
    }
}
