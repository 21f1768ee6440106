//! Q3_K: 16 groups of 16 signed codes of 3 bits; `value = d * (scale - 32) * code`, scale 6 bits.
//!
//! The low two bits lie as in [`q2_k`](super::q2_k). The third bits of 32 values share the bytes of `high`, one bit
//! position for each 32; a set bit means that 4 is not taken away.
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 3 bits, 6-bit scales for 16, in blocks of 256.
pub struct Q3K;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) high: [u8; 32],
    pub(crate) qs: [[u8; 32]; 2],
    pub(crate) scales: [u8; 12],
    pub(crate) d: [u8; 2],
}

impl Block {
    /// The scale of group `i`: low four bits in the first eight bytes, high two in the last four.
    #[inline(always)]
    pub(crate) fn scale(&self, i: usize) -> i8 {
        let low = self.scales[i % 8] >> (i / 8 * 4) & 15;
        let high = self.scales[8 + i % 4] >> (i / 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    }
}

impl Format for Q3K {
    const ID: FormatId = FormatId::Q3K;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(block.scale(group));
            let (half, shift, first) = (group / 8, group % 8 / 2 * 2, group % 2 * 16);
            let high = &block.high[first..first + 16];
            for ((out, q), high) in out.iter_mut().zip(&block.qs[half][first..first + 16]).zip(high) {
                let code = (q >> shift & 3) | (high >> (group / 2) & 1) << 2;
                *out = scale * (f32::from(code) - 4.0);
            }
        }
    }
}
