//! The tensors of a source whose bytes lie in one file or several. Formats differ in how the table comes to be, not in how
//! it is used.
//!
//! Invariant: names are distinct, and each range lies inside its part and has the length that format and shape demand.
#![forbid(unsafe_code)]

use super::bytes::Bytes;
use super::say::quoted;
use super::{TensorView, WeightSource};
use crate::dtype::FormatId;
use crate::error::LoadError;
use std::cmp::Ordering;
use std::ops::Range;

/// One tensor.
pub(super) struct Entry {
    pub(super) name: Box<str>,
    pub(super) format: FormatId,
    pub(super) shape: Box<[usize]>,
    /// The file, by its index.
    pub(super) part: usize,
    /// In that file.
    pub(super) range: Range<usize>,
}

/// All of them.
pub(super) struct Table {
    label: String,
    parts: Vec<Bytes>,
    entries: Vec<Entry>,
    by_name: NameIndex,
}

impl Table {
    /// The caller has checked ranges, formats and shapes; two tensors of one name are an error here.
    pub(super) fn new(label: String, parts: Vec<Bytes>, entries: Vec<Entry>) -> Result<Table, LoadError> {
        for entry in &entries {
            let len = entry.range.end - entry.range.start;
            let values = entry.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            assert!(values.and_then(|n| entry.format.bytes_of(n)) == Some(len), "a tensor's length follows from its shape");
            assert!(entry.range.end <= parts[entry.part].len(), "a tensor lies inside its file");
        }
        let by_name = NameIndex::new(entries.len(), |i| &entries[i].name).map_err(|i| {
            LoadError::malformed(&label, format!("tensor {}", quoted(&entries[i].name)), "one tensor of that name", "two")
        })?;
        Ok(Table { label, parts, entries, by_name })
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The bytes of a tensor, to be kept.
    pub(super) fn bytes(&self, name: &str) -> Option<Bytes> {
        self.entry(name).map(|entry| self.parts[entry.part].part(entry.range.clone()))
    }

    /// See [`Bytes::ask_for_huge_pages`].
    pub(super) fn ask_for_huge_pages(&self) {
        self.parts.iter().for_each(Bytes::ask_for_huge_pages);
    }

    /// What lies before the first tensor of the first file.
    pub(super) fn head(&self) -> &[u8] {
        let Some(first) = self.parts.first() else { return &[] };
        let end = self.entries.iter().filter(|e| e.part == 0).map(|e| e.range.start).min();
        &first[..end.unwrap_or(first.len())]
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.by_name.find(name, |i| &self.entries[i].name).map(|i| &self.entries[i])
    }
}

impl WeightSource for Table {
    fn label(&self) -> &str {
        &self.label
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.entries.iter().map(|entry| &*entry.name))
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let entry = self.entry(name)?;
        let bytes = &self.parts[entry.part][entry.range.clone()];
        Some(TensorView { format: entry.format, shape: &entry.shape, bytes })
    }

    fn total_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.range.len() as u64).sum()
    }

    fn release(&self, name: &str) {
        if let Some(entry) = self.entry(name) {
            self.parts[entry.part].release(entry.range.clone());
        }
    }

    fn release_part(&self, name: &str, range: Range<usize>) {
        if let Some(entry) = self.entry(name).filter(|e| range.start <= range.end && range.end <= e.range.len()) {
            self.parts[entry.part].release(entry.range.start + range.start..entry.range.start + range.end);
        }
    }
}

/// Finds names in a list that keeps its own order. A sorted permutation rather than a hash map: half the memory, no second
/// copy of the names, and no input makes it slow.
pub(super) struct NameIndex(Vec<usize>);

impl NameIndex {
    /// `Err` holds the index of a name that was there before.
    pub(super) fn new<'n>(len: usize, name: impl Fn(usize) -> &'n str) -> Result<NameIndex, usize> {
        let mut order: Vec<usize> = (0..len).collect();
        order.sort_unstable_by(|&a, &b| name(a).cmp(name(b)).then(a.cmp(&b)));
        match order.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
            Some(pair) => Err(pair[1]),
            None => Ok(NameIndex(order)),
        }
    }

    pub(super) fn find<'n>(&self, wanted: &str, name: impl Fn(usize) -> &'n str) -> Option<usize> {
        let at = self.0.binary_search_by(|&i| -> Ordering { name(i).cmp(wanted) }).ok()?;
        Some(self.0[at])
    }
}
