//! Which model a model is, told cheaply: a number from its configuration, the names, shapes and formats of its tensors, and a few
//! bytes of each. Also the hash behind it, which snapshots are summed with.
//!
//! Invariant: the same bytes give the same number on every machine. Guards against accidents, not against forgers: whoever
//! wants two models of one number can make them.
#![forbid(unsafe_code)]

use super::ModelFiles;
use crate::weights::WeightSource;
use std::fmt;

/// Names a model's weights and configuration: see [`ModelFiles::fingerprint`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Fingerprint(pub(crate) u128);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl ModelFiles {
    /// A number that tells this model from others, taken once and then remembered: from what the configuration means, every
    /// tensor's name, shape and format, and up to 1 KiB of each tensor in four places. Cost: four pages of the file for each
    /// tensor.
    ///
    /// It tells apart models of other sizes, other training, fine-tuning that touches whole tensors, and other storage
    /// formats of the same weights. It does not see a change of a few values between the places it looks at, the tokenizer,
    /// or the chat template; nor does it know in how many files the tensors lie. A version of this crate that reads more out
    /// of a configuration gives another number.
    pub fn fingerprint(&self) -> Fingerprint {
        *self.fingerprint.get_or_init(|| {
            let mut digest = Digest::default();
            // Everything that decides what the weights compute, and nothing can be forgotten.
            digest.text(&format!("{:?}", self.spec()));
            digest.update(&self.weights_digest.unwrap_or_else(|| weights_digest(self.weights())).to_le_bytes());
            Fingerprint(digest.finish())
        })
    }
}

/// The part of a fingerprint that tells weights apart. A packed file says which it had before it was packed.
pub(super) fn weights_digest(source: &dyn WeightSource) -> u128 {
    let mut digest = Digest::default();
    let mut names: Vec<_> = source.names().collect();
    names.sort_unstable();
    for name in names {
        let Some(view) = source.tensor(name) else { continue };
        digest.text(name);
        digest.text(view.format.name());
        digest.number(view.shape.len() as u64);
        view.shape.iter().for_each(|&n| digest.number(n as u64));
        digest.number(view.bytes.len() as u64);
        let last = view.bytes.len().saturating_sub(SAMPLE);
        for i in 0..SAMPLES {
            let at = last / (SAMPLES - 1) * i;
            digest.update(&view.bytes[at..(at + SAMPLE).min(view.bytes.len())]);
        }
        // The system maps a file's neighbouring pages with each: together they would be a good part of it.
        source.release(name);
    }
    digest.finish()
}

/// Places of a tensor that are looked at, and bytes of each.
const SAMPLES: usize = 4;
const SAMPLE: usize = 256;

/// 128 bits of any bytes, at several gigabytes a second. Two lanes take in the words of eight bytes, little-endian, the last one
/// filled up with zeros:
///
/// ```text
/// a = rotl((a ^ word) * A, 29);  b = rotl((b ^ rotl(word, 32)) * B, 31)
/// result = mix(b ^ len) << 64 | mix(a ^ len)
/// ```
///
/// Each step maps lane and word to a lane one to one, so that a change within one word is always seen.
#[derive(Clone, Debug)]
pub(crate) struct Digest {
    a: u64,
    b: u64,
    len: u64,
    /// Bytes of a word that is not complete, from the lowest on.
    tail: u64,
}

impl Default for Digest {
    fn default() -> Self {
        Digest { a: A, b: B, len: 0, tail: 0 }
    }
}

impl Digest {
    /// Takes bytes in; in how many calls makes no difference.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !self.len.is_multiple_of(8) || bytes.len() < 8 {
            let Some((&byte, rest)) = bytes.split_first() else { return };
            self.tail |= u64::from(byte) << (8 * (self.len % 8));
            self.len += 1;
            bytes = rest;
            if self.len.is_multiple_of(8) {
                let word = std::mem::take(&mut self.tail);
                self.word(word);
            }
        }
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|w| self.word(u64::from_le_bytes(*w)));
        self.len += 8 * words.len() as u64;
        self.update(rest);
    }

    /// Takes a number in.
    pub(crate) fn number(&mut self, n: u64) {
        self.update(&n.to_le_bytes());
    }

    /// Takes a text in, so that it does not run into the next.
    pub(crate) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.update(text.as_bytes());
    }

    pub(crate) fn finish(mut self) -> u128 {
        if !self.len.is_multiple_of(8) {
            let word = self.tail;
            self.word(word);
        }
        u128::from(mix(self.b ^ self.len)) << 64 | u128::from(mix(self.a ^ self.len))
    }

    fn word(&mut self, word: u64) {
        self.a = (self.a ^ word).wrapping_mul(A).rotate_left(29);
        self.b = (self.b ^ word.rotate_left(32)).wrapping_mul(B).rotate_left(31);
    }
}

/// MurmurHash3's last step: one to one, and every bit of the input moves every bit of the result.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Odd, with as many ones as zeros: the golden ratio's and the square root of three's fractions.
const A: u64 = 0x9e37_79b9_7f4a_7c15;
const B: u64 = 0xbb67_ae85_84ca_a73b;

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> u128 {
        let mut digest = Digest::default();
        digest.update(bytes);
        digest.finish()
    }

    #[test]
    fn pieces_do_not_matter_and_every_bit_does() {
        let bytes: Vec<u8> = (0..61u8).map(|i| i.wrapping_mul(37)).collect();
        let whole = of(&bytes);
        for cut in 0..=bytes.len() {
            let mut digest = Digest::default();
            digest.update(&bytes[..cut]);
            digest.update(&bytes[cut..]);
            assert_eq!(digest.finish(), whole);
            assert!(cut == bytes.len() || of(&bytes[..cut]) != whole);
        }
        for bit in 0..8 * bytes.len() {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            let (x, y) = (of(&other), whole);
            assert!(x as u64 != y as u64 && x >> 64 != y >> 64, "bit {bit}");
        }
        assert_ne!(of(&[0; 7]), of(&[0; 8]));
    }
}
