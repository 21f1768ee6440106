//! Q5_0: 32 codes of 5 bits and one scale; `value = d * (code - 16)`. Four bits as in [`q4_0`](super::q4_0), the fifth
//! ones apart, in order.
#![forbid(unsafe_code)]

use super::fit::{self, Codes};
use super::{Encode, Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 5 bits, one f16 scale for 32.
pub struct Q5_0;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) fifth: [u8; 4],
    pub(crate) qs: [u8; 16],
}

impl Format for Q5_0 {
    const ID: FormatId = FormatId::Q5_0;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let d = bits::half(block.d);
        let codes = bits::nibbles(&block.qs);
        let fifth = bits::fifth_bits(&block.fifth);
        for ((out, code), fifth) in bits::exact::<32>(out).iter_mut().zip(codes.as_flattened()).zip(&fifth) {
            *out = d * (f32::from(code | fifth) - 16.0);
        }
    }
}

impl Encode for Q5_0 {
    const LIMIT: f32 = 16.0 * fit::HALF_MAX;

    fn encode(src: &[f32], block: &mut Block) {
        let codes = Codes { low: -16.0, high: 15.0 };
        let d = fit::symmetric(src, codes, &fit::DIVISORS_5_BIT, fit::round_to_half);
        block.d = fit::half_bytes(d);
        let codes = codes.nearest_all::<32>(src, d, 0.0).map(|code| (code + 16.0) as u8);
        let [low, high] = fit::halves(codes);
        block.qs = bits::pack_nibbles(&low, &high);
        block.fifth = bits::pack_fifth_bits(&codes);
    }
}
