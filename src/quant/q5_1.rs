//! Q5_1: 32 codes of 5 bits, a scale and a minimum; `value = d * code + min`. The codes lie as in
//! [`q5_0`](super::q5_0).
#![forbid(unsafe_code)]

use super::fit::{self, Codes};
use super::{Encode, Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 5 bits, f16 scale and minimum for 32.
pub struct Q5_1;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) min: [u8; 2],
    pub(crate) fifth: [u8; 4],
    pub(crate) qs: [u8; 16],
}

impl Format for Q5_1 {
    const ID: FormatId = FormatId::Q5_1;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let (d, min) = (bits::half(block.d), bits::half(block.min));
        let codes = bits::nibbles(&block.qs);
        let fifth = bits::fifth_bits(&block.fifth);
        for ((out, code), fifth) in bits::exact::<32>(out).iter_mut().zip(codes.as_flattened()).zip(&fifth) {
            *out = d * f32::from(code | fifth) + min;
        }
    }
}

impl Encode for Q5_1 {
    const LIMIT: f32 = fit::HALF_MAX;

    fn encode(src: &[f32], block: &mut Block) {
        let codes = Codes { low: 0.0, high: 31.0 };
        let line = fit::affine(src, codes, f32::INFINITY, fit::round_to_half);
        block.d = fit::half_bytes(line.scale);
        block.min = fit::half_bytes(line.min);
        let codes = codes.nearest_all::<32>(src, line.scale, line.min).map(|code| code as u8);
        let [low, high] = fit::halves(codes);
        block.qs = bits::pack_nibbles(&low, &high);
        block.fifth = bits::pack_fifth_bits(&codes);
    }
}
