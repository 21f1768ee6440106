//! Safetensors: one file, or the shards that an index names. A file is the length of its header, the header in JSON, then
//! the tensors' bytes without a gap.
//!
//! Invariant: after opening, the ranges of each file's tensors cover its data exactly, and the tensors of the shards are
//! those of the index, each in the shard that the index says.
#![forbid(unsafe_code)]

mod header;
mod index;
mod json;

use super::bytes::{Bytes, LoadMode, Loader, OnProgress};
use super::open::read_text_file;
use super::strings::StrArray;
use super::table::Table;
use super::{TensorView, WeightSource};
use crate::error::LoadError;
use header::Header;
use index::Index;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// An open safetensors model.
pub struct Safetensors {
    /// Keys and values by turns.
    metadata: StrArray,
    table: Table,
}

impl Safetensors {
    /// Opens one file, or all shards where `path` ends in `.index.json`. Everything is checked before this returns.
    pub fn open(path: impl AsRef<Path>, mode: LoadMode, progress: &mut OnProgress<'_>) -> Result<Safetensors, LoadError> {
        let path = path.as_ref();
        let label = path.to_string_lossy().into_owned();
        if !label.ends_with(INDEX_SUFFIX) {
            return Safetensors::from_bytes(label, Bytes::open(path, mode, progress)?);
        }
        let index = Index::parse(&label, &read_text_file(path, MAX_INDEX_BYTES)?)?;
        let files: Vec<_> = index.shards.iter().map(|shard| path.with_file_name(&**shard)).collect();
        if let Some(at) = files.iter().position(|file| matches!(file.try_exists(), Ok(false))) {
            return Err(index.missing_shard(&label, &index.shards[at]));
        }
        let mut loader = Loader::new(mode, progress, files.iter().map(|file| file.as_path()))?;
        Safetensors::from_index(label, &index, |at, _| {
            let file = &files[at];
            Ok(Some((file.to_string_lossy().into_owned(), loader.load(file)?)))
        })
    }

    /// A file that the program holds: `label` stands for it in messages. Cost: the header; the bytes are not copied.
    pub fn from_bytes(label: impl Into<String>, bytes: impl Into<Bytes>) -> Result<Safetensors, LoadError> {
        let (label, bytes) = (label.into(), bytes.into());
        let Header { metadata, entries } = Header::parse(&label, &bytes)?;
        Ok(Safetensors { metadata, table: Table::new(label, vec![bytes], entries)? })
    }

    /// Shards that the program holds: `index_json` is the text of the index, `shard` gives the bytes of a file it names.
    pub fn from_shards(
        label: impl Into<String>,
        index_json: &str,
        shard: &mut dyn FnMut(&str) -> Option<Bytes>,
    ) -> Result<Safetensors, LoadError> {
        let label = label.into();
        let index = Index::parse(&label, index_json)?;
        Safetensors::from_index(label, &index, |_, name| Ok(shard(name).map(|bytes| (name.to_owned(), bytes))))
    }

    /// The value of a key of `__metadata__`; of shards, the first one's.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.entries().find(|&(found, _)| found == key).map(|(_, value)| value)
    }

    /// All of `__metadata__`, in the file's order.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut strings = self.metadata.iter();
        std::iter::from_fn(move || Some((strings.next()?, strings.next()?)))
    }

    fn from_index(
        label: String,
        index: &Index,
        mut load: impl FnMut(usize, &str) -> Result<Option<(String, Bytes)>, LoadError>,
    ) -> Result<Safetensors, LoadError> {
        let mut parts = Vec::with_capacity(index.shards.len());
        let mut all = Vec::new();
        let mut metadata = None;
        for (at, name) in index.shards.iter().enumerate() {
            let (shard_label, bytes) = load(at, name)?.ok_or_else(|| index.missing_shard(&label, name))?;
            let mut header = Header::parse(&shard_label, &bytes)?;
            index.check_shard(&label, at, &header.entries)?;
            for entry in &mut header.entries {
                entry.part = at;
            }
            all.append(&mut header.entries);
            metadata.get_or_insert(header.metadata);
            parts.push(bytes);
        }
        index.check_count(&label, &all)?;
        Ok(Safetensors { metadata: metadata.unwrap_or_default(), table: Table::new(label, parts, all)? })
    }
}

impl WeightSource for Safetensors {
    fn label(&self) -> &str {
        self.table.label()
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        self.table.names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.table.tensor(name)
    }

    fn total_bytes(&self) -> u64 {
        self.table.total_bytes()
    }

    fn release(&self, name: &str) {
        self.table.release(name);
    }

    fn release_part(&self, name: &str, range: Range<usize>) {
        self.table.release_part(name, range);
    }
}

impl fmt::Debug for Safetensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Safetensors").field("label", &self.label()).field("tensors", &self.table.len()).finish()
    }
}

pub(super) const INDEX_SUFFIX: &str = ".index.json";
/// The largest published index has about 100,000 tensors and 10 MB.
const MAX_INDEX_BYTES: u64 = 100_000_000;
