//! BF16: the upper half of a single, rounded to nearest even when written.
#![forbid(unsafe_code)]

use super::{Encode, Format};
use crate::dtype::FormatId;

/// The upper half of a single.
pub struct BF16;

impl Format for BF16 {
    const ID: FormatId = FormatId::BF16;
    type Block = [u8; 2];

    #[inline]
    fn decode(block: &[u8; 2], out: &mut [f32]) {
        out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
    }
}

impl Encode for BF16 {
    /// The largest finite one.
    const LIMIT: f32 = f32::from_bits(0x7f7f_0000);

    fn encode(src: &[f32], block: &mut [u8; 2]) {
        *block = half::bf16::from_f32(src[0]).to_le_bytes();
    }
}
