//! IQ2_XS: 32 groups of 8 values, each a code of 9 bits into the grid and seven signs; a scale of 4 bits for two
//! groups: `value = ±d * (0.5 + scale) / 4 * grid`.
#![forbid(unsafe_code)]

use super::{Format, bits, grid};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 2.31 bits: a grid of 8 magnitudes, 512 entries.
pub struct IQ2XS;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    /// Code in the low nine bits, signs above.
    pub(crate) qs: [[u8; 2]; 32],
    pub(crate) scales: [u8; 8],
}

impl Format for IQ2XS {
    const ID: FormatId = FormatId::IQ2XS;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let scale = block.scales[i / 4] >> (i / 2 % 2 * 4) & 15;
            let scale = d * (0.5 + f32::from(scale)) * 0.25;
            let q = u16::from_le_bytes(block.qs[i]);
            bits::signed(out, scale, &grid::IQ2_XS[usize::from(q & 511)], bits::even_signs(u32::from(q >> 9)));
        }
    }
}
