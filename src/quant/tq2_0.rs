//! TQ2_0: ternary values in codes of 2 bits; `value = d * (code - 1)`. The codes lie as in [`q2_k`](super::q2_k).
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// Ternary, four to a byte.
pub struct TQ2_0;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) qs: [[u8; 32]; 2],
    pub(crate) d: [u8; 2],
}

impl Format for TQ2_0 {
    const ID: FormatId = FormatId::TQ2_0;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (i, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (out, q) in out.iter_mut().zip(&block.qs[i / 4]) {
                *out = d * (f32::from(q >> (i % 4 * 2) & 3) - 1.0);
            }
        }
    }
}
