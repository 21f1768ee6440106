//! What Q4_K and Q5_K share: eight scales and eight minima of 6 bits in 12 bytes, and how to choose them.
#![forbid(unsafe_code)]

use super::fit::{self, Codes};

/// The largest magnitude that fits both ways: a minimum of `63 * dmin`, a scale of `63 * d` times 15.
pub(super) const LIMIT: f32 = 63.0 * fit::HALF_MAX;

/// Numbers below 64, one of each kind for a group of 32 values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Scales {
    pub(super) scales: [u8; 8],
    pub(super) mins: [u8; 8],
}

impl Scales {
    /// The first four scales have bytes 0 to 3, the first four minima 4 to 7, each in the low six bits. Of the other
    /// four the low four bits share bytes 8 to 11 (scale below, minimum above) and the high two lie on top of 0 to 7.
    #[inline(always)]
    pub(super) fn unpack(bytes: &[u8; 12]) -> Scales {
        let mut out = Scales { scales: [0; 8], mins: [0; 8] };
        for j in 0..4 {
            out.scales[j] = bytes[j] & 63;
            out.mins[j] = bytes[j + 4] & 63;
            out.scales[j + 4] = bytes[j + 8] & 15 | bytes[j] >> 6 << 4;
            out.mins[j + 4] = bytes[j + 8] >> 4 | bytes[j + 4] >> 6 << 4;
        }
        out
    }

    /// The inverse of [`unpack`](Self::unpack).
    pub(super) fn pack(&self) -> [u8; 12] {
        let mut out = [0; 12];
        for j in 0..4 {
            out[j] = self.scales[j] | self.scales[j + 4] >> 4 << 6;
            out[j + 4] = self.mins[j] | self.mins[j + 4] >> 4 << 6;
            out[j + 8] = self.scales[j + 4] & 15 | (self.mins[j + 4] & 15) << 4;
        }
        out
    }
}

/// A block before packing.
pub(super) struct Fitted {
    pub(super) d: [u8; 2],
    pub(super) dmin: [u8; 2],
    pub(super) scales: Scales,
    pub(super) codes: [[u8; 32]; 8],
}

/// Chooses everything for 256 values with codes from 0 to `high`.
///
/// ```text
/// for each group: the line  scale * code - min,  min >= 0, of least squared error
/// d = the largest scale / 63, dmin = the largest min / 63, both rounded to a half
/// for each group: of the scales and minima next to the wanted ones the pair of least squared error
/// for each value: the nearest code
/// ```
///
/// Choosing pairs after d and dmin are rounded is what plain rounding of each loses: a scale that comes out too small
/// wants a minimum that comes out too small.
pub(super) fn fit(src: &[f32], high: f32) -> Fitted {
    let codes = Codes { low: 0.0, high };
    let groups = src.as_chunks::<32>().0;
    let mut lines = [fit::Line { scale: 0.0, min: 0.0 }; 8];
    for (line, group) in lines.iter_mut().zip(groups) {
        *line = fit::affine(group, codes, 0.0, |v| v);
    }
    let d = fit::round_to_half(lines.iter().fold(0.0, |most: f32, line| most.max(line.scale)) / 63.0);
    let dmin = fit::round_to_half(lines.iter().fold(0.0, |most: f32, line| most.max(-line.min)) / 63.0);
    let mut out = Fitted {
        d: fit::half_bytes(d),
        dmin: fit::half_bytes(dmin),
        scales: Scales { scales: [0; 8], mins: [0; 8] },
        codes: [[0; 32]; 8],
    };
    for (i, (group, line)) in groups.iter().zip(lines).enumerate() {
        let mut best = (f32::INFINITY, 0.0, 0.0);
        for scale in fit::neighbours(line.scale, d, 0.0, 63.0) {
            for min in fit::neighbours(-line.min, dmin, 0.0, 63.0) {
                let error = codes.error(group, d * scale, -(dmin * min));
                if error < best.0 {
                    best = (error, scale, min);
                }
            }
        }
        let (_, scale, min) = best;
        out.scales.scales[i] = scale as u8;
        out.scales.mins[i] = min as u8;
        out.codes[i] = codes.nearest_all::<32>(group, d * scale, -(dmin * min)).map(|code| code as u8);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_scales_round_trip() {
        for seed in 0..64u8 {
            let scales = std::array::from_fn(|j| seed.wrapping_mul(37).wrapping_add(j as u8 * 11) & 63);
            let mins = std::array::from_fn(|j| seed.wrapping_mul(23).wrapping_add((j as u8).wrapping_mul(45)) & 63);
            let packed = Scales { scales, mins };
            assert_eq!(Scales::unpack(&packed.pack()), packed);
        }
        for byte in 0..=255u8 {
            let bytes = std::array::from_fn(|j| byte.rotate_left(j as u32) ^ (j as u8).wrapping_mul(19));
            assert_eq!(Scales::unpack(&bytes).pack(), bytes);
        }
    }
}
