//! Turns random bytes into blocks with sane scales: codes stay random, scale fields are set so that decoded values have about
//! the deviation asked for. Knows of each format only where its scales lie and how large its codes are.
#![forbid(unsafe_code)]

use crate::dtype::FormatId;
use half::f16;

/// Overwrites the scales of every block of `bytes`, which hold whole blocks of `format`.
pub(super) fn set_scales(format: FormatId, bytes: &mut [u8], std: f32) {
    use FormatId as F;
    match format {
        // Root mean squares of the codes when all codes are equally likely. Where blocks have scales of their own inside,
        // those are random too and are part of the mean; `min` is what brings the mean of the values to 0.
        F::Q4_0 => f16_at(format, bytes, 0, std / 4.64),
        F::Q4_1 => with_min(format, bytes, 0, std / 4.61, -7.5),
        F::Q5_0 => f16_at(format, bytes, 0, std / 9.25),
        F::Q5_1 => with_min(format, bytes, 0, std / 9.23, -15.5),
        F::Q8_0 => f16_at(format, bytes, 0, std / 73.9),
        F::Q2K => with_min(format, bytes, 80, std / 13.9, 1.5),
        F::Q3K => f16_at(format, bytes, 108, std / 43.3),
        F::Q4K => with_min(format, bytes, 0, std / 258.0, 7.5),
        F::Q5K => with_min(format, bytes, 0, std / 527.0, 15.5),
        F::Q6K => f16_at(format, bytes, 208, std / 1366.0),
        F::IQ2XXS | F::IQ2XS | F::IQ2S => f16_at(format, bytes, 0, std / 55.0),
        F::IQ3XXS => f16_at(format, bytes, 0, std / 138.0),
        F::IQ3S => f16_at(format, bytes, 0, std / 148.0),
        F::IQ1S => f16_at(format, bytes, 0, std / 7.4),
        F::IQ1M => blocks(format, bytes).for_each(|block| spread_f16(&mut block[48..56], std / 7.4)),
        F::IQ4NL => f16_at(format, bytes, 0, std / 70.0),
        F::IQ4XS => f16_at(format, bytes, 0, std / 1295.0),
        F::TQ1_0 => f16_at(format, bytes, 52, std / 0.82),
        F::TQ2_0 => {
            f16_at(format, bytes, 64, std / 0.71);
            // Two bits hold four codes and ternary has three.
            blocks(format, bytes).for_each(|block| block[..64].iter_mut().for_each(|b| *b &= !((*b & (*b >> 1) & 0x55) << 1)));
        }
        // Scales that are powers of two: the nearest, by a divisor that is the codes' mean square root over sqrt(2).
        F::MXFP4 => {
            let scale = (127 + exponent(std / 2.07)).clamp(1, 254) as u8;
            blocks(format, bytes).for_each(|block| block[0] = scale);
        }
        F::NVFP4 => {
            let scale = e4m3_power_of_two(exponent(std / 2.07));
            blocks(format, bytes).for_each(|block| block[..4].fill(scale));
        }
        F::F8E4M3 => {
            let high = ((exponent(std / 1.08) + 7).clamp(0, 14) as u8) << 3;
            bytes.iter_mut().for_each(|b| *b = (*b & 0x87) | high);
        }
        F::F8E5M2 => {
            let high = ((exponent(std / 1.08) + 15).clamp(0, 30) as u8) << 2;
            bytes.iter_mut().for_each(|b| *b = (*b & 0x83) | high);
        }
        // Integers have no scale; the float formats never come here.
        F::I8 | F::U8 | F::I16 | F::I32 | F::I64 | F::F32 | F::F16 | F::BF16 | F::F64 => {}
    }
}

fn blocks(format: FormatId, bytes: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
    bytes.chunks_exact_mut(format.block_bytes())
}

fn f16_at(format: FormatId, bytes: &mut [u8], at: usize, scale: f32) {
    let scale = f16::from_f32(scale).to_le_bytes();
    blocks(format, bytes).for_each(|block| block[at..at + 2].copy_from_slice(&scale));
}

/// A scale and beside it a minimum, `min` times as large.
fn with_min(format: FormatId, bytes: &mut [u8], at: usize, scale: f32, min: f32) {
    f16_at(format, bytes, at, scale);
    f16_at(format, bytes, at + 2, scale * min);
}

/// IQ1_M keeps its scale in the upper four bits of four 16-bit words.
fn spread_f16(words: &mut [u8], scale: f32) {
    let bits = f16::from_f32(scale).to_bits();
    for (i, word) in words.chunks_exact_mut(2).enumerate() {
        word[1] = (word[1] & 0x0f) | (((bits >> (4 * i)) & 0xf) as u8) << 4;
    }
}

/// The exponent of the power of two at or below `x`, which is positive: read off the bits, exact everywhere.
fn exponent(x: f32) -> i32 {
    ((x.to_bits() >> 23) & 0xff) as i32 - 127
}

/// 2^`exponent` in E4M3, as near as that format comes.
fn e4m3_power_of_two(exponent: i32) -> u8 {
    match exponent {
        ..=-9 => 1,
        -8..=-7 => 1 << (exponent + 9),
        _ => ((exponent + 7).min(15) as u8) << 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_lie_where_the_formats_have_them() {
        let scale = f16::from_f32(0.5).to_le_bytes();
        let mut block = [0xffu8; 18];
        set_scales(FormatId::Q4_0, &mut block, 0.5 * 4.64);
        assert_eq!(block[..2], scale);
        assert!(block[2..].iter().all(|&b| b == 0xff));

        let mut block = [0xffu8; 56];
        set_scales(FormatId::IQ1M, &mut block, 0.5 * 7.4);
        let word = |i: usize| u16::from_le_bytes([block[48 + 2 * i], block[49 + 2 * i]]);
        let bits = (word(0) >> 12) | ((word(1) >> 8) & 0x00f0) | ((word(2) >> 4) & 0x0f00) | (word(3) & 0xf000);
        assert_eq!(bits, f16::from_f32(0.5).to_bits());
        assert!(block[..48].iter().all(|&b| b == 0xff));

        let mut block: Vec<u8> = (0..66).collect();
        set_scales(FormatId::TQ2_0, &mut block, 1.0);
        assert!(block[..64].iter().all(|b| (b & (b >> 1)) & 0x55 == 0));
    }

    #[test]
    fn powers_of_two_in_small_floats() {
        assert_eq!(exponent(1.0), 0);
        assert_eq!(exponent(0.02), -6);
        assert_eq!(e4m3_power_of_two(0), 0x38);
        assert_eq!(e4m3_power_of_two(-6), 0x08);
        assert_eq!(e4m3_power_of_two(-7), 0x04);
        assert_eq!(e4m3_power_of_two(-20), 0x01);
    }
}
