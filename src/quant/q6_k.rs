//! Q6_K: 16 groups of 16 codes of 6 bits; `value = d * scale * (code - 32)`, scale a signed byte.
//!
//! Half a block has 64 bytes of low bits and 32 of high ones: its first 64 values use the low halves of the 64 bytes,
//! its last 64 the high halves; bits 0 and 1 of the high bytes belong to the first 32 values, and so on.
#![forbid(unsafe_code)]

use super::fit::{self, Codes};
use super::{Encode, Format, bits};
use crate::dtype::FormatId;
use bytemuck::{Pod, Zeroable};

/// 6 bits, 8-bit scales for 16, in blocks of 256.
pub struct Q6K;

/// As it lies in the file.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    pub(crate) low: [[u8; 64]; 2],
    pub(crate) high: [[u8; 32]; 2],
    pub(crate) scales: [i8; 16],
    pub(crate) d: [u8; 2],
}

impl Format for Q6K {
    const ID: FormatId = FormatId::Q6K;
    type Block = Block;

    #[inline]
    fn decode(block: &Block, out: &mut [f32]) {
        let out = bits::exact::<256>(out);
        let d = bits::half(block.d);
        for (half, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let low = bits::nibbles(&block.low[half]);
            let low = low.as_flattened().as_chunks::<16>().0;
            let high = block.high[half].as_chunks::<16>().0;
            for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let scale = d * f32::from(block.scales[8 * half + group]);
                let shift = group / 2 * 2;
                for ((out, low), high) in out.iter_mut().zip(&low[group]).zip(&high[group % 2]) {
                    *out = scale * (f32::from(low | (high >> shift & 3) << 4) - 32.0);
                }
            }
        }
    }
}

const CODES: Codes = Codes { low: -32.0, high: 31.0 };

impl Encode for Q6K {
    const LIMIT: f32 = 128.0 * 32.0 * fit::HALF_MAX;

    fn encode(src: &[f32], block: &mut Block) {
        let groups = src.as_chunks::<16>().0;
        let mut wanted = [0.0; 16];
        for (wanted, group) in wanted.iter_mut().zip(groups) {
            *wanted = fit::symmetric(group, CODES, &fit::DIVISORS_6_BIT, |scale| scale);
        }
        // The signed byte reaches one further down than up: its end goes to the largest scale.
        let largest = fit::extreme(&wanted);
        let d = fit::round_to_half(largest / -128.0);
        block.d = fit::half_bytes(d);
        let mut codes = [0u8; 256];
        for ((group, wanted), (scale, codes)) in
            groups.iter().zip(wanted).zip(block.scales.iter_mut().zip(codes.as_chunks_mut::<16>().0))
        {
            let best = best_scale(group, wanted, d);
            *scale = best as i8;
            *codes = CODES.nearest_all::<16>(group, d * best, 0.0).map(|code| (code + 32.0) as u8);
        }
        for (half, codes) in codes.as_chunks::<128>().0.iter().enumerate() {
            let [first, last] = codes.as_chunks::<64>().0 else { unreachable!("128 is twice 64") };
            block.low[half] = bits::pack_nibbles(first, last);
            block.high[half] = std::array::from_fn(|j| (0..4).fold(0, |bits, k| bits | codes[32 * k + j] >> 4 << (2 * k)));
        }
    }
}

/// The byte of least squared error among those next to `wanted / d` and, because either sign may have been as good for
/// the group alone while only one of them reaches -128, to `-wanted / d`.
fn best_scale(group: &[f32; 16], wanted: f32, d: f32) -> f32 {
    let mut best = (f32::INFINITY, 0.0);
    for wanted in [wanted, -wanted] {
        for scale in fit::neighbours(wanted, d, -128.0, 127.0) {
            let error = CODES.error(group, d * scale, 0.0);
            if error < best.0 {
                best = (error, scale);
            }
        }
    }
    best.1
}
