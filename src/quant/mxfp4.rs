//! MXFP4: 32 codes of E2M1 and one power of two. The low halves of the bytes hold the first 16 values.
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// OCP microscaling: 4-bit floats (E2M1), one power of two for 32.
pub struct MXFP4;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) exponent: u8,
    pub(crate) qs: [u8; 16],
}

impl Block {
    /// Half of the scale, to go with doubled codes: `2^(exponent - 128)`. All ones are no NaN here, as in the other
    /// readers of GGUF.
    #[inline(always)]
    pub(crate) fn half_scale(&self) -> f32 {
        match self.exponent {
            // Subnormal.
            e @ 0..2 => f32::from_bits(0x0020_0000 << e),
            e => f32::from_bits(u32::from(e - 1) << 23),
        }
    }
}

impl Format for MXFP4 {
    const ID: FormatId = FormatId::MXFP4;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<32>(out);
        let scale = block.half_scale();
        let codes = bits::nibbles(&block.qs);
        for (out, code) in out.iter_mut().zip(codes.as_flattened()) {
            *out = scale * bits::E2M1_DOUBLED[usize::from(code & 15)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_a_power_of_two_for_every_exponent() {
        for exponent in 0..=255u8 {
            let scale = Block { exponent, qs: [0; 16] }.half_scale();
            assert_eq!(f64::from(scale), 2f64.powi(i32::from(exponent) - 128), "{exponent}");
        }
    }
}
