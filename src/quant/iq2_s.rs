//! IQ2_S: 32 groups of 8 values, each a code of 10 bits into the grid and eight signs; a scale of 4 bits for two
//! groups: `value = ±d * (0.5 + scale) / 4 * grid`.
#![forbid(unsafe_code)]

use super::{Format, bits, grid};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 2.5 bits: a grid of 8 magnitudes, 1024 entries.
pub struct IQ2S;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    /// Low eight bits of the codes.
    pub(crate) qs: [u8; 32],
    pub(crate) signs: [u8; 32],
    /// High two bits of the codes, four to a byte.
    pub(crate) high: [u8; 8],
    pub(crate) scales: [u8; 8],
}

impl Format for IQ2S {
    const ID: FormatId = FormatId::IQ2S;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let scale = block.scales[i / 4] >> (i / 2 % 2 * 4) & 15;
            let scale = d * (0.5 + f32::from(scale)) * 0.25;
            let high = block.high[i / 4] >> (i % 4 * 2) & 3;
            let code = usize::from(block.qs[i]) | usize::from(high) << 8;
            bits::signed(out, scale, &grid::IQ2_S[code], block.signs[i]);
        }
    }
}
