//! Q4_K: eight groups of 32 codes of 4 bits; `value = d * scale * code - dmin * min`, scale and min 6 bits each.
//!
//! Two groups share 32 bytes: the first has the low halves.
#![forbid(unsafe_code)]

use super::k_scales::{self, Scales};
use super::{Encode, Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 4 bits, 6-bit scales and minima for 32, in blocks of 256.
pub struct Q4K;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) dmin: [u8; 2],
    pub(crate) scales: [u8; 12],
    pub(crate) qs: [[u8; 32]; 4],
}

impl Format for Q4K {
    const ID: FormatId = FormatId::Q4K;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let (d, dmin) = (bits::half(block.d), bits::half(block.dmin));
        let Scales { scales, mins } = Scales::unpack(&block.scales);
        for (pair, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
            let codes = bits::nibbles(&block.qs[pair]);
            for (half, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let scale = d * f32::from(scales[2 * pair + half]);
                let min = dmin * f32::from(mins[2 * pair + half]);
                for (out, code) in out.iter_mut().zip(&codes[half]) {
                    *out = scale * f32::from(*code) - min;
                }
            }
        }
    }
}

impl Encode for Q4K {
    const LIMIT: f32 = k_scales::LIMIT;

    fn encode(src: &[f32], block: &mut Block) {
        let fitted = k_scales::fit(src, 15.0);
        (block.d, block.dmin, block.scales) = (fitted.d, fitted.dmin, fitted.scales.pack());
        for (qs, [low, high]) in block.qs.iter_mut().zip(fitted.codes.as_chunks::<2>().0) {
            *qs = bits::pack_nibbles(low, high);
        }
    }
}
