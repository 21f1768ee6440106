//! TQ1_0: ternary digits, five to a byte; `value = d * (digit - 1)`.
//!
//! A byte holds a fraction of 256: times 3 gives the first digit above the byte and the rest of the fraction in it. The
//! digits of equal rank lie together: 5 x 32 values from 32 bytes, 5 x 16 from 16, and 4 x 4 from the last four.
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// Ternary, five to a byte.
pub struct TQ1_0;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) wide: [u8; 32],
    pub(crate) narrow: [u8; 16],
    pub(crate) rest: [u8; 4],
    pub(crate) d: [u8; 2],
}

impl Format for TQ1_0 {
    const ID: FormatId = FormatId::TQ1_0;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        let (wide, out) = out.split_at_mut(160);
        let (narrow, rest) = out.split_at_mut(80);
        digits(&block.wide, d, wide);
        digits(&block.narrow, d, narrow);
        digits(&block.rest, d, rest);
    }
}

#[inline(always)]
fn digits<const N: usize>(fractions: &[u8; N], d: f32, out: &mut [f32]) {
    let mut fractions = *fractions;
    for out in out.as_chunks_mut::<N>().0 {
        for (out, fraction) in out.iter_mut().zip(&mut fractions) {
            let digit = u16::from(*fraction) * 3 >> 8;
            *out = d * (f32::from(digit) - 1.0);
            *fraction = fraction.wrapping_mul(3);
        }
    }
}
