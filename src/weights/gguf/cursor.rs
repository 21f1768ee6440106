//! Reads numbers and strings off a byte slice. Each read is checked against what is left, so that no count in a file is
//! believed before the bytes behind it were seen.
#![forbid(unsafe_code)]

use crate::error::LoadError;
use crate::weights::strings::StrArray;
use std::fmt::Display;

/// A position in a file's bytes. The `what` of each call names the thing read, for messages.
pub(super) struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a str, bytes: &'a [u8]) -> Self {
        Cursor { file, bytes, at: 0 }
    }

    pub(super) fn file(&self) -> &'a str {
        self.file
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn file_len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn array<const N: usize>(&mut self, what: &dyn Display) -> Result<[u8; N], LoadError> {
        let bytes = self.take(N as u64, what)?;
        Ok(bytes.try_into().expect("take returns as many bytes as it was asked for"))
    }

    pub(super) fn u32(&mut self, what: &dyn Display) -> Result<u32, LoadError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &dyn Display) -> Result<u64, LoadError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of items that take at least `min_bytes` each: more than what is left could hold is an error now, before
    /// anything is reserved for them.
    pub(super) fn count(&self, count: u64, min_bytes: usize, what: &dyn Display) -> Result<usize, LoadError> {
        let most = self.left() / min_bytes;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => {
                let expected = format!("at most {most}, as {} bytes are left", self.left());
                Err(self.malformed(what, expected, count))
            }
        }
    }

    /// `count` items of `N` bytes.
    pub(super) fn items<const N: usize>(&mut self, count: u64, what: &dyn Display) -> Result<&'a [[u8; N]], LoadError> {
        let count = self.count(count, N, what)?;
        let (items, rest) = self.take((count * N) as u64, what)?.as_chunks::<N>();
        debug_assert!(rest.is_empty());
        Ok(items)
    }

    /// A string: its length, then as many bytes of UTF-8.
    pub(super) fn string(&mut self, what: &dyn Display) -> Result<&'a str, LoadError> {
        let start = self.at;
        let len = self.u64(&format_args!("length of {what}"))?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|e| {
            let at = format!("{what} at byte {start}");
            LoadError::malformed(self.file, at, "UTF-8", format!("an invalid sequence at byte {} of {len}", e.valid_up_to()))
        })
    }

    /// `count` strings, one after the other, checked together: a vocabulary is most of a file's head. `None` where anything is wrong
    /// with them; nothing is taken then, and [`string`](Self::string) finds out what. `count` was checked.
    pub(super) fn strings(&mut self, count: usize) -> Option<StrArray> {
        let left = &self.bytes[self.at..];
        let len_at = |at: usize| usize::try_from(u64::from_le_bytes(*left.get(at..)?.first_chunk()?)).ok();
        let (mut end, mut text_bytes) = (0usize, 0);
        for _ in 0..count {
            let len = len_at(end)?;
            // Both are below the file's length then, and so is their sum.
            end = len.checked_add(end + 8).filter(|&end| end <= left.len())?;
            text_bytes += len;
        }
        let (mut text, mut ends) = (Vec::with_capacity(text_bytes), Vec::with_capacity(count));
        let mut at = 0;
        for _ in 0..count {
            let len = len_at(at)?;
            text.extend_from_slice(&left[at + 8..][..len]);
            ends.push(text.len());
            at += 8 + len;
        }
        let list = StrArray::of_parts(text, ends)?;
        self.at += end;
        Some(list)
    }

    pub(super) fn malformed(&self, what: &dyn Display, expected: impl Into<String>, found: impl ToString) -> LoadError {
        LoadError::malformed(self.file, format!("{what} at byte {}", self.at), expected, found)
    }

    fn take(&mut self, len: u64, what: &dyn Display) -> Result<&'a [u8], LoadError> {
        let left = &self.bytes[self.at..];
        match usize::try_from(len).ok().and_then(|len| left.get(..len)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => Err(self.malformed(what, format!("{len} bytes"), format!("{} before the end of the file", left.len()))),
        }
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
}
