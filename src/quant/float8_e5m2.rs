//! F8_E5M2: the upper byte of a half, infinities and NaN included.
#![forbid(unsafe_code)]

use super::{Format, bits};
use crate::dtype::FormatId;

/// 8-bit float, 5 bits of exponent.
pub struct F8E5M2;

impl Format for F8E5M2 {
    const ID: FormatId = FormatId::F8E5M2;
    type Block = [u8; 1];

    #[inline]
    fn decode(block: &[u8; 1], out: &mut [f32]) {
        out[0] = bits::half_bits(u16::from(block[0]) << 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_the_value_of_its_fields() {
        for byte in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(byte >> 2 & 31), f32::from(byte & 3));
            let magnitude = match exponent {
                0 => mantissa / 4.0 * 2f32.powi(-14),
                31 if mantissa == 0.0 => f32::INFINITY,
                31 => f32::NAN,
                _ => (1.0 + mantissa / 4.0) * 2f32.powi(exponent - 15),
            };
            let expected = if byte < 128 { magnitude } else { -magnitude };
            let mut out = [0.0];
            F8E5M2::decode(&[byte], &mut out);
            assert!(out[0].to_bits() == expected.to_bits() || out[0].is_nan() && expected.is_nan(), "{byte:#04x}");
        }
    }
}
