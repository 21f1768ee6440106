//! The 128-bit sum in saved sessions and packed files: its definition, written a second time.
#![allow(unreachable_pub)] // Included by binaries, which export nothing.

pub fn digest(bytes: &[u8]) -> [u8; 16] {
    let (a0, b0) = (0x9e37_79b9_7f4a_7c15u64, 0xbb67_ae85_84ca_a73bu64);
    let (mut a, mut b) = (a0, b0);
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let word = u64::from_le_bytes(word);
        a = (a ^ word).wrapping_mul(a0).rotate_left(29);
        b = (b ^ word.rotate_left(32)).wrapping_mul(b0).rotate_left(31);
    }
    let mix = |mut x: u64| {
        x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        x ^ (x >> 33)
    };
    let len = bytes.len() as u64;
    (u128::from(mix(b ^ len)) << 64 | u128::from(mix(a ^ len))).to_le_bytes()
}
