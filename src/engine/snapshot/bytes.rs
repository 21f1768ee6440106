//! The frame around every snapshot, and the plain values in it. Knows no engine.
//!
//! ```text
//! 0   magic     89 "LOQUAT" 0a
//! 8   version   u32         all numbers little-endian
//! 12  kind      u32         1 a prefix, 2 a session, which is a prefix and then the session's own
//! 16  checksum  u128        of bytes 0..16 and 32.., by `Digest`
//! 32  model     u128        its fingerprint
//! 48  label     text        the same for people; a text is a u64 of bytes, then UTF-8
//! ..  contents
//! ```
//!
//! Invariant: what is read lies within the bytes, and allocates no more than a constant times what it was read from.
#![forbid(unsafe_code)]

use crate::error::SnapshotError;
use crate::ids::TokenId;
use crate::model::{Digest, Fingerprint};
use serde_json::{Map, Number, Value};

/// What a snapshot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Tokens and what is cached of them.
    Prefix = 1,
    /// A prefix and a conversation.
    Session = 2,
}

/// A snapshot as it is written.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    /// The frame's beginning.
    pub(super) fn new(kind: Kind, model: Fingerprint, label: &str) -> Self {
        let mut w = Writer(Vec::new());
        w.bytes(MAGIC);
        w.u32(VERSION);
        w.u32(kind as u32);
        w.u128(0);
        w.u128(model.0);
        w.text(label);
        w
    }

    /// Room for `bytes` more.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<(), SnapshotError> {
        let needed_bytes = (self.0.len() as u64).saturating_add(bytes as u64);
        self.0.try_reserve_exact(bytes).map_err(|_| SnapshotError::Refused { needed_bytes })
    }

    /// The whole, summed.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let sum = checksum(&self.0);
        self.0[SUM_AT..SUM_AT + 16].copy_from_slice(&sum.to_le_bytes());
        self.0
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// `len` zeros, to be written.
    pub(super) fn zeros(&mut self, len: usize) -> &mut [u8] {
        let at = self.0.len();
        self.0.resize(at + len, 0);
        &mut self.0[at..]
    }

    pub(crate) fn u8(&mut self, n: u8) {
        self.0.push(n);
    }

    pub(super) fn u32(&mut self, n: u32) {
        self.bytes(&n.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, n: u64) {
        self.bytes(&n.to_le_bytes());
    }

    fn u128(&mut self, n: u128) {
        self.bytes(&n.to_le_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.u64(text.len() as u64);
        self.bytes(text.as_bytes());
    }

    /// JSON as tagged values: floats keep every bit, which JSON's text does not promise.
    pub(crate) fn json(&mut self, value: &Value) {
        match value {
            Value::Null => self.u8(0),
            Value::Bool(b) => self.u8(1 + u8::from(*b)),
            Value::Number(n) => match (n.as_u64(), n.as_i64()) {
                (Some(n), _) => {
                    self.u8(3);
                    self.u64(n);
                }
                (None, Some(n)) => {
                    self.u8(4);
                    self.u64(n as u64);
                }
                (None, None) => {
                    self.u8(5);
                    self.u64(n.as_f64().unwrap_or(0.0).to_bits());
                }
            },
            Value::String(s) => {
                self.u8(6);
                self.text(s);
            }
            Value::Array(all) => {
                self.u8(7);
                self.u64(all.len() as u64);
                all.iter().for_each(|v| self.json(v));
            }
            Value::Object(all) => {
                self.u8(8);
                self.u64(all.len() as u64);
                for (key, value) in all {
                    self.text(key);
                    self.json(value);
                }
            }
        }
    }
}

/// A snapshot as it is read.
#[derive(Clone)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Checks the frame; what follows are the contents.
    pub(super) fn open(bytes: &'a [u8], kind: Kind, model: Fingerprint, label: &str) -> Result<Self, SnapshotError> {
        let mut r = Reader(bytes);
        let magic = r.take("magic", MAGIC.len())?;
        if magic != MAGIC {
            return Err(SnapshotError::malformed("magic", MAGIC.escape_ascii(), magic.escape_ascii()));
        }
        match r.u32("version")? {
            VERSION => {}
            found => return Err(SnapshotError::Version { expected: VERSION, found }),
        }
        let found_kind = r.u32("kind")?;
        let expected = u128::from_le_bytes(r.array("checksum")?);
        let found = checksum(bytes);
        if found != expected {
            return Err(SnapshotError::Checksum { expected, found });
        }
        if found_kind != kind as u32 {
            let name = |k| match k {
                1 => "1, a prefix".to_owned(),
                2 => "2, a session".to_owned(),
                k => k.to_string(),
            };
            return Err(SnapshotError::malformed("kind", name(kind as u32), name(found_kind)));
        }
        let found = Fingerprint(u128::from_le_bytes(r.array("model")?));
        let found_label = r.text("label")?;
        if found != model {
            let (expected, found) = (format!("{label} ({model})"), format!("{found_label} ({found})"));
            return Err(SnapshotError::Model { expected, found });
        }
        Ok(r)
    }

    /// Nothing may be left.
    pub(crate) fn end(&self) -> Result<(), SnapshotError> {
        match self.0.len() {
            0 => Ok(()),
            n => Err(SnapshotError::malformed("end", "the last byte", format_args!("{n} more"))),
        }
    }

    pub(super) fn take(&mut self, at: &'static str, len: usize) -> Result<&'a [u8], SnapshotError> {
        let short = || SnapshotError::malformed(at, format_args!("{len} bytes"), self.0.len());
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, at: &'static str) -> Result<[u8; N], SnapshotError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(at, N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self, at: &'static str) -> Result<u8, SnapshotError> {
        self.array(at).map(|[n]| n)
    }

    pub(super) fn u32(&mut self, at: &'static str) -> Result<u32, SnapshotError> {
        self.array(at).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, at: &'static str) -> Result<u64, SnapshotError> {
        self.array(at).map(u64::from_le_bytes)
    }

    /// A number of things that this machine can count.
    pub(crate) fn count(&mut self, at: &'static str) -> Result<usize, SnapshotError> {
        let n = self.u64(at)?;
        usize::try_from(n).map_err(|_| SnapshotError::malformed(at, format_args!("at most {}", usize::MAX), n))
    }

    pub(crate) fn bool(&mut self, at: &'static str) -> Result<bool, SnapshotError> {
        match self.u8(at)? {
            n @ 0..=1 => Ok(n == 1),
            n => Err(SnapshotError::malformed(at, "0 or 1", n)),
        }
    }

    pub(crate) fn text(&mut self, at: &'static str) -> Result<&'a str, SnapshotError> {
        let len = self.count(at)?;
        let bytes = self.take(at, len)?;
        std::str::from_utf8(bytes).map_err(|e| SnapshotError::malformed(at, "UTF-8", e))
    }

    pub(super) fn tokens(&mut self, vocab: usize) -> Result<Vec<TokenId>, SnapshotError> {
        let count = self.count("tokens")?;
        let bytes = count.checked_mul(size_of::<TokenId>());
        let bytes =
            bytes.ok_or_else(|| SnapshotError::malformed("tokens", format_args!("at most {} bytes", self.0.len()), count))?;
        let tokens: Vec<_> = self.take("tokens", bytes)?.as_chunks().0.iter().map(|b| TokenId::from_le_bytes(*b)).collect();
        match tokens.iter().find(|t| **t as usize >= vocab) {
            Some(token) => Err(SnapshotError::malformed("tokens", format_args!("below {vocab}"), token)),
            None => Ok(tokens),
        }
    }

    pub(crate) fn json(&mut self, at: &'static str) -> Result<Value, SnapshotError> {
        self.json_within(at, MOST_DEPTH)
    }

    pub(crate) fn json_object(&mut self, at: &'static str) -> Result<Map<String, Value>, SnapshotError> {
        match self.json(at)? {
            Value::Object(map) => Ok(map),
            other => Err(SnapshotError::malformed(at, "an object", other)),
        }
    }

    fn json_within(&mut self, at: &'static str, depth: usize) -> Result<Value, SnapshotError> {
        let deeper = depth.checked_sub(1);
        let deeper = deeper.ok_or_else(|| SnapshotError::malformed(at, format_args!("at most {MOST_DEPTH} levels"), "more"));
        Ok(match self.u8(at)? {
            0 => Value::Null,
            n @ 1..=2 => Value::Bool(n == 2),
            3 => self.u64(at)?.into(),
            4 => (self.u64(at)? as i64).into(),
            5 => {
                let found = f64::from_bits(self.u64(at)?);
                Number::from_f64(found).ok_or_else(|| SnapshotError::malformed(at, "a finite number", found))?.into()
            }
            6 => self.text(at)?.into(),
            // Whatever the count says: each value takes at least a byte.
            7 => {
                let (count, deeper) = (self.u64(at)?, deeper?);
                let mut all = Vec::new();
                for _ in 0..count {
                    all.push(self.json_within(at, deeper)?);
                }
                all.into()
            }
            8 => {
                let (count, deeper) = (self.u64(at)?, deeper?);
                let mut all = Map::new();
                for _ in 0..count {
                    all.insert(self.text(at)?.to_owned(), self.json_within(at, deeper)?);
                }
                all.into()
            }
            n => return Err(SnapshotError::malformed(at, "a value's tag, 0 to 8", n)),
        })
    }
}

fn checksum(bytes: &[u8]) -> u128 {
    let mut digest = Digest::default();
    digest.update(&bytes[..SUM_AT]);
    digest.update(&bytes[SUM_AT + 16..]);
    digest.finish()
}

const MAGIC: &[u8] = b"\x89LOQUAT\n";
const VERSION: u32 = 1;
const SUM_AT: usize = 16;
/// Of JSON in JSON, as in serde_json.
const MOST_DEPTH: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_comes_back_bit_by_bit() {
        let value =
            json!({ "a": [null, true, false, 0, -1, u64::MAX, i64::MIN, 0.1, 1e300, -0.0, 5e-324], "": { "x": "\u{e9}" } });
        let mut w = Writer(Vec::new());
        w.json(&value);
        let mut r = Reader(&w.0);
        let back = r.json("test").unwrap();
        r.end().unwrap();
        assert_eq!(back, value);
        assert_eq!(back["a"][9].as_f64().unwrap().to_bits(), (-0.0f64).to_bits());
        for len in 0..w.0.len() {
            assert!(Reader(&w.0[..len]).json("test").is_err());
        }
    }

    #[test]
    fn lengths_beyond_the_bytes_are_refused_before_anything_is_allocated() {
        for tag in [6, 7, 8] {
            let mut w = Writer(vec![tag]);
            w.u64(u64::MAX);
            assert!(Reader(&w.0).json("test").is_err());
        }
        for count in [1, u64::MAX / 4, u64::MAX] {
            let mut w = Writer(Vec::new());
            w.u64(count);
            assert!(Reader(&w.0).tokens(10).is_err());
        }
        let mut deep = Writer(Vec::new());
        for _ in 0..100_000 {
            deep.u8(7);
            deep.u64(1);
        }
        assert!(Reader(&deep.0).json("test").is_err());
    }
}
