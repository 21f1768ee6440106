//! NVFP4: four groups of 16 codes of E2M1, each with a scale in E4M3 whose sign does not count. In a group of 8 bytes
//! the low halves hold the first 8 values.
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 4-bit floats (E2M1), an unsigned E4M3 scale for 16, in blocks of 64.
pub struct NVFP4;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) scales: [u8; 4],
    pub(crate) qs: [[u8; 8]; 4],
}

impl Block {
    /// Half of a group's scale, to go with doubled codes. The byte that would be NaN counts as 0, but not the one with
    /// the sign bit set: so do the other readers of GGUF.
    #[inline(always)]
    pub(crate) fn half_scale(&self, group: usize) -> f32 {
        let byte = self.scales[group];
        if byte == 127 {
            return 0.0;
        }
        let (exponent, mantissa) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
        match exponent {
            0 => mantissa as f32 * (1.0 / 1024.0),
            _ => f32::from_bits((exponent + 127 - 8) << 23 | mantissa << 20),
        }
    }
}

impl Format for NVFP4 {
    const ID: FormatId = FormatId::NVFP4;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<64>(out);
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = block.half_scale(group);
            let codes = bits::nibbles(&block.qs[group]);
            for (out, code) in out.iter_mut().zip(codes.as_flattened()) {
                *out = scale * bits::E2M1_DOUBLED[usize::from(code & 15)];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_half_of_e4m3_for_every_byte() {
        for byte in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
            let whole = match exponent {
                0 => mantissa / 8.0 * 2f32.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
            };
            let expected = if byte == 127 { 0.0 } else { whole / 2.0 };
            let block = Block { scales: [byte; 4], qs: [[0; 8]; 4] };
            assert_eq!(block.half_scale(3), expected, "{byte:#04x}");
        }
    }
}
