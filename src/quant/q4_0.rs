//! Q4_0: 32 codes of 4 bits and one scale; `value = d * (code - 8)`. The low halves of the bytes hold the first 16.
#![forbid(unsafe_code)]

use super::fit::{self, Codes};
use super::{Encode, Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 4 bits, one f16 scale for 32.
pub struct Q4_0;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) qs: [u8; 16],
}

impl Format for Q4_0 {
    const ID: FormatId = FormatId::Q4_0;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let d = bits::half(block.d);
        let codes = bits::nibbles(&block.qs);
        for (out, code) in bits::exact::<32>(out).iter_mut().zip(codes.as_flattened()) {
            *out = d * (f32::from(*code) - 8.0);
        }
    }
}

impl Encode for Q4_0 {
    const LIMIT: f32 = 8.0 * fit::HALF_MAX;

    fn encode(src: &[f32], block: &mut Block) {
        let codes = Codes { low: -8.0, high: 7.0 };
        let d = fit::symmetric(src, codes, &fit::DIVISORS_4_BIT, fit::round_to_half);
        block.d = fit::half_bytes(d);
        let [low, high] = fit::halves(codes.nearest_all::<32>(src, d, 0.0).map(|code| (code + 8.0) as u8));
        block.qs = bits::pack_nibbles(&low, &high);
    }
}
