//! Q8_0: 32 signed bytes and one scale; `value = d * code`.
#![forbid(unsafe_code)]

use super::fit::{self, Codes};
use super::{Encode, Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 8 bits, one f16 scale for 32.
pub struct Q8_0;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) qs: [i8; 32],
}

impl Format for Q8_0 {
    const ID: FormatId = FormatId::Q8_0;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let d = bits::half(block.d);
        for (out, q) in bits::exact::<32>(out).iter_mut().zip(&block.qs) {
            *out = d * f32::from(*q);
        }
    }
}

impl Encode for Q8_0 {
    const LIMIT: f32 = 127.0 * fit::HALF_MAX;

    fn encode(src: &[f32], block: &mut Block) {
        // -128 stays unused: kernels multiply bytes after taking absolute values.
        let codes = Codes { low: -127.0, high: 127.0 };
        let d = fit::symmetric(src, codes, &[127.0, 127.25, 126.75], fit::round_to_half);
        block.d = fit::half_bytes(d);
        for (q, code) in block.qs.iter_mut().zip(codes.nearest_all::<32>(src, d, 0.0)) {
            *q = code as i8;
        }
    }
}
