//! F64: doubles, rounded to the nearest single; what is beyond the singles becomes an infinity.
#![forbid(unsafe_code)]

use super::Format;
use crate::dtype::FormatId;

/// IEEE double precision.
pub struct F64;

impl Format for F64 {
    const ID: FormatId = FormatId::F64;
    type Block = [u8; 8];

    #[inline]
    fn decode(block: &[u8; 8], out: &mut [f32]) {
        out[0] = f64::from_le_bytes(*block) as f32;
    }
}
