//! F16: IEEE half precision, rounded to nearest even when written.
#![forbid(unsafe_code)]

use super::{Encode, Format, bits};
use crate::dtype::FormatId;

/// IEEE half precision.
pub struct F16;

impl Format for F16 {
    const ID: FormatId = FormatId::F16;
    type Block = [u8; 2];

    #[inline]
    fn decode(block: &[u8; 2], out: &mut [f32]) {
        out[0] = bits::half(*block);
    }
}

impl Encode for F16 {
    const LIMIT: f32 = 65504.0;

    fn encode(src: &[f32], block: &mut [u8; 2]) {
        *block = half::f16::from_f32(src[0]).to_le_bytes();
    }
}
