//! F8_E4M3 without infinities: the largest value is 448, all ones mean NaN.
#![forbid(unsafe_code)]

use super::Format;
use crate::dtype::FormatId;

/// 8-bit float, 4 bits of exponent, no infinity.
pub struct F8E4M3;

impl Format for F8E4M3 {
    const ID: FormatId = FormatId::F8E4M3;
    type Block = [u8; 1];

    #[inline]
    fn decode(block: &[u8; 1], out: &mut [f32]) {
        const BIAS: u32 = (127 - 7) << 23;
        let magnitude = u32::from(block[0] & 127) << 20;
        // Subnormals as in `bits::half_bits`.
        let one = f32::from_bits(BIAS + (1 << 23));
        let subnormal = (f32::from_bits(magnitude + BIAS + (1 << 23)) - one).to_bits();
        let nan = if magnitude == 127 << 20 { 0x7fc0_0000 } else { 0 };
        let bits = if magnitude < 8 << 20 { subnormal } else { (magnitude + BIAS) | nan };
        out[0] = f32::from_bits(bits | u32::from(block[0] & 128) << 24);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_the_value_of_its_fields() {
        for byte in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f32.powi(-6),
                15 if mantissa == 7.0 => f32::NAN,
                _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
            };
            let expected = if byte < 128 { magnitude } else { -magnitude };
            let mut out = [0.0];
            F8E4M3::decode(&[byte], &mut out);
            assert!(out[0].to_bits() == expected.to_bits() || out[0].is_nan() && expected.is_nan(), "{byte:#04x}");
        }
    }
}
