//! Q2_K: 16 groups of 16 codes of 2 bits; `value = d * scale * code - dmin * min`, scale and min 4 bits each.
//!
//! The codes of half a block share 32 bytes: bits 0 and 1 hold its first 32 values, bits 2 and 3 the next, and so on.
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 2 bits, 4-bit scales and minima for 16, in blocks of 256.
pub struct Q2K;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) scales: [u8; 16],
    pub(crate) qs: [[u8; 32]; 2],
    pub(crate) d: [u8; 2],
    pub(crate) dmin: [u8; 2],
}

impl Format for Q2K {
    const ID: FormatId = FormatId::Q2K;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let (d, dmin) = (bits::half(block.d), bits::half(block.dmin));
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(block.scales[group] & 15);
            let min = dmin * f32::from(block.scales[group] >> 4);
            let (half, shift, first) = (group / 8, group % 8 / 2 * 2, group % 2 * 16);
            for (out, q) in out.iter_mut().zip(&block.qs[half][first..first + 16]) {
                *out = scale * f32::from(q >> shift & 3) - min;
            }
        }
    }
}
