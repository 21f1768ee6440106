//! Q5_K: [`q4_k`](super::q4_k) with a fifth bit for each code. The fifth bits of the 32nd part share a byte: bit 0
//! belongs to the first group, bit 7 to the last.
#![forbid(unsafe_code)]

use super::k_scales::{self, Scales};
use super::{Encode, Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 5 bits, 6-bit scales and minima for 32, in blocks of 256.
pub struct Q5K;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) dmin: [u8; 2],
    pub(crate) scales: [u8; 12],
    pub(crate) fifth: [u8; 32],
    pub(crate) qs: [[u8; 32]; 4],
}

impl Format for Q5K {
    const ID: FormatId = FormatId::Q5K;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let (d, dmin) = (bits::half(block.d), bits::half(block.dmin));
        let Scales { scales, mins } = Scales::unpack(&block.scales);
        for (pair, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
            let codes = bits::nibbles(&block.qs[pair]);
            for (half, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let group = 2 * pair + half;
                let scale = d * f32::from(scales[group]);
                let min = dmin * f32::from(mins[group]);
                for ((out, code), fifth) in out.iter_mut().zip(&codes[half]).zip(&block.fifth) {
                    *out = scale * f32::from(code | (fifth >> group & 1) << 4) - min;
                }
            }
        }
    }
}

impl Encode for Q5K {
    const LIMIT: f32 = k_scales::LIMIT;

    fn encode(src: &[f32], block: &mut Block) {
        let fitted = k_scales::fit(src, 31.0);
        (block.d, block.dmin, block.scales) = (fitted.d, fitted.dmin, fitted.scales.pack());
        for (qs, [low, high]) in block.qs.iter_mut().zip(fitted.codes.as_chunks::<2>().0) {
            *qs = bits::pack_nibbles(low, high);
        }
        block.fifth = [0; 32];
        for (group, codes) in fitted.codes.iter().enumerate() {
            for (fifth, code) in block.fifth.iter_mut().zip(codes) {
                *fifth |= (code >> 4 & 1) << group;
            }
        }
    }
}
