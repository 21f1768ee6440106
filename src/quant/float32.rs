//! F32: the values themselves, little endian.
#![forbid(unsafe_code)]

use super::{Encode, Format};
use crate::dtype::FormatId;

/// IEEE single precision.
pub struct F32;

impl Format for F32 {
    const ID: FormatId = FormatId::F32;
    type Block = [u8; 4];

    #[inline]
    fn decode(block: &[u8; 4], out: &mut [f32]) {
        out[0] = f32::from_le_bytes(*block);
    }
}

impl Encode for F32 {
    const LIMIT: f32 = f32::MAX;

    fn encode(src: &[f32], block: &mut [u8; 4]) {
        *block = src[0].to_le_bytes();
    }
}
