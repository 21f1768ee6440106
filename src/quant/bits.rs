//! Pieces that several formats share: half-precision scales, halves of bytes, masks of signs, E2M1.
#![forbid(unsafe_code)]

/// The values of E2M1, doubled so that they are whole; the scales that go with them are halved. The negative zero of
/// the format reads as zero.
pub(super) const E2M1_DOUBLED: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// The 16 levels of the IQ4 formats.
pub(super) const IQ4_LEVELS: [f32; 16] =
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
pub(super) fn fifth_bits(bits: &[u8; 4]) -> [u8; 32] {
    let mut out = [0; 32];
    for (out, bits) in out.as_chunks_mut::<8>().0.iter_mut().zip(bits) {
        for (j, out) in out.iter_mut().enumerate() {
            *out = if bits & (1 << j) == 0 { 0 } else { 16 };
        }
    }
    out
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

/// Seven stored signs and the eighth, which makes the number of minus signs even.
#[inline(always)]
pub(super) fn even_signs(seven: u32) -> u8 {
    let seven = seven & 127;
    (seven | (seven.count_ones() & 1) << 7) as u8
}

/// `out = scale * grid`, with a minus where the bit of `signs` is set.
#[inline(always)]
pub(super) fn signed(out: &mut [f32], scale: f32, grid: &[i8], signs: u8) {
    for (j, (out, g)) in out.iter_mut().zip(grid).enumerate() {
        let minus = if signs & (1 << j) == 0 { 0 } else { 1 << 31 };
        *out = f32::from_bits((scale * f32::from(*g)).to_bits() ^ minus);
    }
}

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
            assert_eq!(fifth_bits(&bits), codes.map(|c| c & 16));
            let (low, high): ([u8; 16], [u8; 16]) = (codes[..16].try_into().unwrap(), codes[16..].try_into().unwrap());
            let [low_again, high_again] = nibbles(&pack_nibbles(&low, &high));
            assert_eq!((low_again, high_again), (low.map(|c| c & 15), high.map(|c| c & 15)));
        }
    }

    #[test]
    fn the_number_of_minus_signs_is_even() {
        for seven in 0..128 {
            let signs = even_signs(seven);
            assert_eq!(u32::from(signs & 127), seven);
            assert_eq!(signs.count_ones() % 2, 0);
        }
    }
}
