//! IQ3_XXS: eight groups of 32 values; a group is eight codes of 8 bits into the grid, four times seven signs, and a
//! scale of 4 bits: `value = ±d * (0.5 + scale) / 2 * grid`.
#![forbid(unsafe_code)]

use super::{Format, bits, grid};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 3.06 bits: a grid of 4 magnitudes, 256 entries.
pub struct IQ3XXS;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) qs: [[u8; 8]; 8],
    /// Four times seven bits of signs; the scale on top.
    pub(crate) signs_scales: [[u8; 4]; 8],
}

impl Format for IQ3XXS {
    const ID: FormatId = FormatId::IQ3XXS;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let signs_scale = u32::from_le_bytes(block.signs_scales[group]);
            let scale = d * (0.5 + (signs_scale >> 28) as f32) * 0.5;
            let codes = block.qs[group].as_chunks::<2>().0;
            for (j, (out, [a, b])) in out.as_chunks_mut::<8>().0.iter_mut().zip(codes).enumerate() {
                let pair = [grid::IQ3_XXS[usize::from(*a)], grid::IQ3_XXS[usize::from(*b)]];
                bits::signed(out, scale, pair.as_flattened(), bits::even_signs(signs_scale >> (7 * j)));
            }
        }
    }
}
