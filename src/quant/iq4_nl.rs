//! IQ4_NL: 32 codes into a table of 16 levels that are dense around zero; `value = d * level`. The low halves of the
//! bytes hold the first 16 values.
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 4 bits through a table of 16 values, one f16 scale for 32.
pub struct IQ4NL;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) d: [u8; 2],
    pub(crate) qs: [u8; 16],
}

impl Format for IQ4NL {
    const ID: FormatId = FormatId::IQ4NL;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<32>(out);
        let d = bits::half(block.d);
        let codes = bits::nibbles(&block.qs);
        for (out, code) in out.iter_mut().zip(codes.as_flattened()) {
            *out = d * bits::IQ4_LEVELS[usize::from(code & 15)];
        }
    }
}
