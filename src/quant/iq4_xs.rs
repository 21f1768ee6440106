//! IQ4_XS: eight groups of 32 codes into the table of [`iq4_nl`](super::iq4_nl); `value = d * (scale - 32) * level`,
//! scale 6 bits, four in `scales_low` and two in `scales_high`.
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 4 bits through the table of IQ4_NL, 6-bit scales for 32, in blocks of 256.
pub struct IQ4XS;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) scales_high: [u8; 2],
    pub(crate) scales_low: [u8; 4],
    pub(crate) qs: [[u8; 16]; 8],
}

impl Block {
    /// The scale of group `i`.
    #[inline(always)]
    pub(crate) fn scale(&self, i: usize) -> i8 {
        let low = self.scales_low[i / 2] >> (i % 2 * 4) & 15;
        let high = self.scales_high[i / 4] >> (i % 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    }
}

impl Format for IQ4XS {
    const ID: FormatId = FormatId::IQ4XS;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let scale = d * f32::from(block.scale(group));
            let codes = bits::nibbles(&block.qs[group]);
            for (out, code) in out.iter_mut().zip(codes.as_flattened()) {
                *out = scale * bits::IQ4_LEVELS[usize::from(code & 15)];
            }
        }
    }
}
