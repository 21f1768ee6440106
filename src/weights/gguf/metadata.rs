//! The key-value part of a GGUF file.
//!
//! Invariant: keys are distinct; entries keep the file's order.
#![forbid(unsafe_code)]

use super::cursor::Cursor;
use super::value::MetaValue;
use crate::error::LoadError;
use crate::weights::say::quoted;
use crate::weights::table::NameIndex;

/// Keys and values, in order and by key.
pub(super) struct Metadata {
    entries: Vec<(Box<str>, MetaValue)>,
    by_key: NameIndex,
}

impl Metadata {
    pub(super) fn read(cursor: &mut Cursor<'_>, count: u64) -> Result<Metadata, LoadError> {
        let count = cursor.count(count, MIN_ENTRY_BYTES, &"metadata count")?;
        // Not reserved by the count: an entry in memory is larger than the smallest one in a file.
        let mut entries = Vec::new();
        for index in 0..count {
            let key = cursor.string(&format_args!("key {index}"))?;
            if key.len() > MAX_KEY_BYTES {
                let expected = format!("at most {MAX_KEY_BYTES} bytes");
                return Err(cursor.malformed(&format_args!("key {index}"), expected, key.len()));
            }
            let value = MetaValue::read(cursor, key)?;
            entries.push((Box::from(key), value));
        }
        let by_key = NameIndex::new(entries.len(), |i| &*entries[i].0).map_err(|i| {
            LoadError::malformed(cursor.file(), format!("metadata key {}", quoted(&entries[i].0)), "one entry", "two")
        })?;
        Ok(Metadata { entries, by_key })
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, key: &str) -> Option<&MetaValue> {
        self.by_key.find(key, |i| &*self.entries[i].0).map(|i| &self.entries[i].1)
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &MetaValue)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }
}

/// Length of an empty key, a type, one byte of value.
const MIN_ENTRY_BYTES: usize = 8 + 4 + 1;
/// The format's own bound.
const MAX_KEY_BYTES: usize = 65_535;
