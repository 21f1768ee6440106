//! Half precision in plain Rust, bit for bit what F16C and AVX-512 do.
#![forbid(unsafe_code)]

/// Widens exactly; a signalling NaN is quieted, as the hardware does.
#[inline(always)]
pub(super) fn to_f32(h: u16) -> f32 {
    let sign = u32::from(h & 0x8000) << 16;
    let exp = u32::from(h >> 10) & 0x1f;
    let man = u32::from(h & 0x3ff);
    match exp {
        // man * 2^-24 is exact.
        0 => f32::from_bits(sign | (man as f32 * f32::from_bits(0x3380_0000)).to_bits()),
        31 => f32::from_bits(sign | 0x7f80_0000 | man << 13 | if man != 0 { 0x40_0000 } else { 0 }),
        _ => f32::from_bits(sign | (exp + 112) << 23 | man << 13),
    }
}

/// Rounds to nearest, ties to even; beyond the largest half an infinity.
#[inline(always)]
pub(super) fn from_f32(v: f32) -> u16 {
    let bits = v.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let abs = bits & 0x7fff_ffff;
    if abs > 0x7f80_0000 {
        return sign | 0x7e00 | (abs >> 13 & 0x3ff) as u16;
    }
    if abs >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    if abs < 0x3880_0000 {
        // A subnormal half: adding 0.5 puts its unit, 2^-24, on the last bit of an f32 in [0.5, 1).
        let r = f32::from_bits(abs) + 0.5;
        return sign | (r.to_bits() - 0x3f00_0000) as u16;
    }
    let odd = abs >> 13 & 1;
    sign | ((abs + 0xfff + odd) >> 13).wrapping_sub(112 << 10) as u16
}
