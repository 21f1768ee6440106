//! IQ2_XXS: eight groups of 32 values; a group is four codes of 8 bits into the grid, four times seven signs, and a
//! scale of 4 bits: `value = ±d * (0.5 + scale) / 4 * grid`.
#![forbid(unsafe_code)]

use super::{Format, bits, grid};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 2.06 bits: a grid of 8 magnitudes, 256 entries.
pub struct IQ2XXS;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) groups: [Group; 8],
}

/// 32 values.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Group {
    pub(crate) codes: [u8; 4],
    /// Four times seven bits of signs; the scale on top.
    pub(crate) signs_scale: [u8; 4],
}

impl Format for IQ2XXS {
    const ID: FormatId = FormatId::IQ2XXS;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (group, out) in block.groups.iter().zip(out.as_chunks_mut::<32>().0) {
            let signs_scale = u32::from_le_bytes(group.signs_scale);
            let scale = d * (0.5 + (signs_scale >> 28) as f32) * 0.25;
            for (j, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let grid = &grid::IQ2_XXS[usize::from(group.codes[j])];
                bits::signed(out, scale, grid, bits::even_signs(signs_scale >> (7 * j)));
            }
        }
    }
}
