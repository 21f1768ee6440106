//! IQ1_S: eight groups of 32 values; a group is four codes of 11 bits into the ternary grid, a scale of 3 bits and the
//! sign of a shift of 1/8: `value = d * (2 * scale + 1) * (grid ± 1/8)`.
#![forbid(unsafe_code)]

use super::{Format, bits, grid};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 1.56 bits: a grid of 8 ternary values, 2048 entries.
pub struct IQ1S;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    /// Low eight bits of the codes.
    pub(crate) qs: [[u8; 4]; 8],
    /// Four times the high three bits of a code, the scale, and on top the shift's sign.
    pub(crate) high: [[u8; 2]; 8],
}

impl Format for IQ1S {
    const ID: FormatId = FormatId::IQ1S;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let high = u16::from_le_bytes(block.high[group]);
            let scale = d * f32::from(2 * (high >> 12 & 7) + 1);
            let shift = if high & 0x8000 == 0 { 0.125 } else { -0.125 };
            for (j, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let code = u16::from(block.qs[group][j]) | (high >> (3 * j) & 7) << 8;
                for (out, g) in out.iter_mut().zip(&grid::IQ1[usize::from(code)]) {
                    *out = scale * (f32::from(*g) + shift);
                }
            }
        }
    }
}
