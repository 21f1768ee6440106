//! IQ1_M: the grid of [`iq1_s`](super::iq1_s) with a scale for 16 values and a shift for 8.
//!
//! There is no room for the f16 scale of the block: its four digits of 4 bits lie on top of the four words of scales.
#![forbid(unsafe_code)]

use super::{Format, bits, grid};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 1.75 bits: the grid of IQ1_S with finer scales.
pub struct IQ1M;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    /// Low eight bits of the codes.
    pub(crate) qs: [u8; 32],
    /// For each code the high three bits and the shift's sign, two codes to a byte.
    pub(crate) high: [u8; 16],
    /// Four scales of 3 bits, and a digit of `d` on top.
    pub(crate) scales: [[u8; 2]; 4],
}

impl Format for IQ1M {
    const ID: FormatId = FormatId::IQ1M;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let scales = block.scales.map(u16::from_le_bytes);
        let digits = scales.map(|word| word >> 12);
        let d = bits::half_bits(digits[0] | digits[1] << 4 | digits[2] << 8 | digits[3] << 12);
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let scale = scales[i / 8] >> (i / 2 % 4 * 3) & 7;
            let scale = d * f32::from(2 * scale + 1);
            let high = block.high[i / 2] >> (i % 2 * 4);
            let shift = if high & 8 == 0 { 0.125 } else { -0.125 };
            let code = usize::from(block.qs[i]) | usize::from(high & 7) << 8;
            for (out, g) in out.iter_mut().zip(&grid::IQ1[code]) {
                *out = scale * (f32::from(*g) + shift);
            }
        }
    }
}
