//! Pieces that several formats share: half-precision scales, halves of bytes, masks of signs, E2M1.
#![forbid(unsafe_code)]

/// The 16 levels of the IQ4 formats.
pub(crate) const IQ4_LEVELS: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// A block's output as an array, so that the loops over it need no bounds checks.
#[inline(always)]
pub(super) fn exact<const N: usize>(out: &mut [f32]) -> &mut [f32; N] {
    out.try_into().expect("callers pass one block's values")
}

/// Half to single precision. Exact, without branches, and without a subnormal operand on the way, so that a host that
/// flushes subnormals to zero gets the same bits; `half` chooses an instruction for every single value instead.
#[inline(always)]
pub(super) fn half(bytes: [u8; 2]) -> f32 {
    half_bits(u16::from_le_bytes(bytes))
}

#[inline(always)]
pub(super) fn half_bits(h: u16) -> f32 {
    const BIAS: u32 = (127 - 15) << 23;
    let magnitude = u32::from(h & 0x7fff) << 13;
    let normal = magnitude + BIAS;
    // As an integer of the subnormals' unit: put it below the leading 1 of 2^-14 and take that 1 away again.
    let one = f32::from_bits(BIAS + (1 << 23));
    let subnormal = (f32::from_bits(magnitude + BIAS + (1 << 23)) - one).to_bits();
    // The exponent's largest value moves to the largest one of the wider type; NaN becomes quiet, as in hardware.
    let quiet = u32::from(h & 0x7fff > 0x7c00) << 22;
    let special = (normal + BIAS) | quiet;
    let bits = if magnitude < 0x400 << 13 {
        subnormal
    } else if magnitude >= 0x7c00 << 13 {
        special
    } else {
        normal
    };
    f32::from_bits(bits | u32::from(h & 0x8000) << 16)
}

/// The low halves of the bytes, then the high ones.
#[inline(always)]
pub(super) fn nibbles<const N: usize>(bytes: &[u8; N]) -> [[u8; N]; 2] {
    [bytes.map(|b| b & 15), bytes.map(|b| b >> 4)]
}

/// 32 bits as bytes of 0 or 16, the fifth bit of a 5-bit code.
#[inline(always)]
pub(super) fn fifth_bits(bits: &[u8; 4]) -> [[u8; 8]; 4] {
    bits.map(|bits| (BYTE_MASKS[usize::from(bits)] & (16 * ONES)).to_le_bytes())
}

/// The inverse of [`fifth_bits`]: bit 4 of each code.
pub(super) fn pack_fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    let mut out = [0; 4];
    for (j, code) in codes.iter().enumerate() {
        out[j / 8] |= (code >> 4 & 1) << (j % 8);
    }
    out
}

/// The inverse of [`nibbles`], for codes of at most 4 bits (a fifth one is dropped).
pub(super) fn pack_nibbles<const N: usize>(low: &[u8; N], high: &[u8; N]) -> [u8; N] {
    std::array::from_fn(|j| (low[j] & 15) | (high[j] & 15) << 4)
}

/// Eight levels of a grid, with a minus where the bit of `signs` is set. Levels are above 0, so that a sign needs no
/// carry into the next byte, and the product with a scale has the same bits as the negated product.
#[inline(always)]
pub(super) fn signed(levels: [i8; 8], signs: u8) -> [i8; 8] {
    negated(levels, BYTE_MASKS[usize::from(signs)])
}

/// The same with seven stored signs and an eighth that makes the number of minus signs even.
#[inline(always)]
pub(super) fn signed_evenly(levels: [i8; 8], seven: u32) -> [i8; 8] {
    negated(levels, EVEN_MASKS[(seven & 127) as usize])
}

#[inline(always)]
fn negated(levels: [i8; 8], mask: u64) -> [i8; 8] {
    let levels = u64::from_le_bytes(levels.map(|level| level as u8));
    ((levels ^ mask) + (mask & ONES)).to_le_bytes().map(|level| level as i8)
}

/// E2M1 as a number, doubled so that it is whole; the scales that go with it are halved. The format's negative zero
/// reads as zero. Arithmetic, because a table costs a load for each value where this is vectors.
#[inline(always)]
pub(super) fn e2m1_doubled(code: u8) -> f32 {
    let magnitude = u32::from(code & 7) << 22;
    // The only subnormal is 1, doubled: half of a step above 2, without the 2.
    let subnormal = f32::from_bits(magnitude + (128 << 23)) - 2.0;
    let normal = f32::from_bits(magnitude + (127 << 23));
    let value = if magnitude < 2 << 22 { subnormal } else { normal };
    f32::from_bits(value.to_bits() | u32::from(code & 8) << 28) + 0.0
}

const ONES: u64 = 0x0101_0101_0101_0101;

/// For each byte a mask: byte `j` is all ones where bit `j` is set.
static BYTE_MASKS: [u64; 256] = {
    let mut out = [0; 256];
    let mut bits = 0;
    while bits < 256 {
        let mut j = 0;
        while j < 8 {
            if bits >> j & 1 == 1 {
                out[bits] |= 0xff << (8 * j);
            }
            j += 1;
        }
        bits += 1;
    }
    out
};

/// The masks of seven bits and the parity bit on top of them.
static EVEN_MASKS: [u64; 128] = {
    let mut out = [0; 128];
    let mut seven = 0u32;
    while seven < 128 {
        out[seven as usize] = BYTE_MASKS[(seven | (seven.count_ones() & 1) << 7) as usize];
        seven += 1;
    }
    out
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_converts_as_the_half_crate_does() {
        for h in 0..=u16::MAX {
            let expected = half::f16::from_bits(h).to_f32();
            assert_eq!(half_bits(h).to_bits(), expected.to_bits(), "{h:#06x}");
        }
    }

    #[test]
    fn bits_and_nibbles_round_trip() {
        for seed in 0..=255u8 {
            let codes: [u8; 32] = std::array::from_fn(|j| seed.wrapping_mul(29).wrapping_add(j as u8 * 7) & 31);
            let bits = pack_fifth_bits(&codes);
            assert_eq!(fifth_bits(&bits).as_flattened(), codes.map(|c| c & 16));
            let (low, high): ([u8; 16], [u8; 16]) = (codes[..16].try_into().unwrap(), codes[16..].try_into().unwrap());
            let [low_again, high_again] = nibbles(&pack_nibbles(&low, &high));
            assert_eq!((low_again, high_again), (low.map(|c| c & 15), high.map(|c| c & 15)));
        }
    }

    #[test]
    fn signs_go_to_their_levels() {
        let levels = [1, 127, 8, 25, 43, 62, 4, 15];
        for signs in 0..=255u8 {
            let expected: [i8; 8] = std::array::from_fn(|j| if signs >> j & 1 == 1 { -levels[j] } else { levels[j] });
            assert_eq!(signed(levels, signs), expected);
            if signs.count_ones().is_multiple_of(2) {
                assert_eq!(signed_evenly(levels, u32::from(signs)), expected);
            }
        }
    }

    #[test]
    fn e2m1_has_its_sixteen_values() {
        let values: [f32; 8] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0];
        for code in 0..8u8 {
            let value = values[usize::from(code)];
            assert_eq!(e2m1_doubled(code).to_bits(), value.to_bits());
            assert_eq!(e2m1_doubled(code | 8).to_bits(), (0.0 - value).to_bits());
        }
    }
}
