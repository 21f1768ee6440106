//! GGUF files, versions 2 and 3, little endian: metadata first, then a table of tensors, then their bytes. A model split over
//! several files is one source. Knows the container and not what the keys mean, but for the three that shape the container:
//! `general.alignment` and `split.*`.
//!
//! Invariant: after opening, each tensor's range lies inside its file, overlaps no other, and has the length of its blocks.
#![forbid(unsafe_code)]

mod cursor;
mod metadata;
mod split;
mod tensors;
mod value;
mod write;

pub(super) use split::number_of;
pub use value::{MetaArray, MetaValue};
pub(crate) use write::{HeadTensor, write_head};

use super::bytes::{Bytes, LoadMode, Loader, OnProgress};
use super::say::unsupported;
use super::table::Table;
use super::{TensorView, WeightSource};
use crate::error::LoadError;
use cursor::Cursor;
use metadata::Metadata;
use split::Split;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// An open GGUF model: metadata and tensors.
pub struct Gguf {
    version: u32,
    metadata: Metadata,
    table: Table,
}

impl Gguf {
    /// Opens `path`, and where its name ends like `-00001-of-00003.gguf` the other files of the set, any of which may be
    /// given. Everything is checked before this returns.
    pub fn open(path: impl AsRef<Path>, mode: LoadMode, progress: &mut OnProgress<'_>) -> Result<Gguf, LoadError> {
        let path = path.as_ref();
        let files = split::files_of(path);
        let mut loader = Loader::new(mode, progress, files.iter().map(|file| file.as_path()))?;
        let mut parts = Vec::with_capacity(files.len());
        for (index, file) in files.iter().enumerate() {
            let label = file.to_string_lossy().into_owned();
            let part = Part::parse(label, loader.load(file)?)?;
            part.expect_place(index, files.len())?;
            parts.push(part);
        }
        Gguf::from_checked(parts)
    }

    /// A file that the program holds: `label` stands for it in messages. Cost: the header; the bytes are not copied.
    pub fn from_bytes(label: impl Into<String>, bytes: impl Into<Bytes>) -> Result<Gguf, LoadError> {
        Gguf::from_parts([(label.into(), bytes.into())])
    }

    /// The files of a split model, in order, each with what stands for it in messages.
    pub fn from_parts(parts: impl IntoIterator<Item = (String, Bytes)>) -> Result<Gguf, LoadError> {
        let parts = parts.into_iter().map(|(label, bytes)| Part::parse(label, bytes)).collect::<Result<Vec<_>, _>>()?;
        for (index, part) in parts.iter().enumerate() {
            part.expect_place(index, parts.len())?;
        }
        Gguf::from_checked(parts)
    }

    /// The version of the container.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The value of a key. Of a split model, the first file's.
    pub fn metadata(&self, key: &str) -> Option<&MetaValue> {
        self.metadata.get(key)
    }

    /// All keys and values in the file's order.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&str, &MetaValue)> {
        self.metadata.iter()
    }

    /// The bytes of a tensor, to be kept beyond this.
    pub(crate) fn bytes(&self, name: &str) -> Option<Bytes> {
        self.table.bytes(name)
    }

    /// The tensors are to be used in place: they may lie on huge pages, where the system has any for files.
    pub(crate) fn ask_for_huge_pages(&self) {
        self.table.ask_for_huge_pages();
    }

    /// What lies before the first tensor, of a split model in the first file.
    pub(crate) fn head(&self) -> &[u8] {
        self.table.head()
    }

    fn from_checked(parts: Vec<Part>) -> Result<Gguf, LoadError> {
        let announced = parts.first().and_then(|part| part.split.tensors);
        let mut bytes = Vec::with_capacity(parts.len());
        let mut entries = Vec::new();
        let mut first = None;
        for (index, mut part) in parts.into_iter().enumerate() {
            for entry in &mut part.entries {
                entry.part = index;
            }
            // The only part of a whole file keeps its own list: growing a second one would double it.
            if index == 0 {
                entries = part.entries;
            } else {
                entries.append(&mut part.entries);
            }
            bytes.push(part.bytes);
            first.get_or_insert((part.label, part.version, part.metadata));
        }
        let Some((label, version, metadata)) = first else {
            return Err(LoadError::malformed("no files", "parts", "at least one", 0));
        };
        if let Some(announced) = announced.filter(|&n| n != entries.len() as u64) {
            return Err(LoadError::malformed(label, split::TENSORS, format!("{announced} tensors in all files"), entries.len()));
        }
        Ok(Gguf { version, metadata, table: Table::new(label, bytes, entries)? })
    }
}

impl WeightSource for Gguf {
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

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gguf")
            .field("label", &self.label())
            .field("version", &self.version)
            .field("metadata", &self.metadata.len())
            .field("tensors", &self.table.len())
            .finish()
    }
}

/// One file, parsed and checked on its own.
struct Part {
    label: String,
    version: u32,
    metadata: Metadata,
    split: Split,
    entries: Vec<super::table::Entry>,
    bytes: Bytes,
}

impl Part {
    fn parse(label: String, bytes: Bytes) -> Result<Part, LoadError> {
        let mut cursor = Cursor::new(&label, &bytes);
        let version = read_version(&mut cursor, &label)?;
        let tensor_count = cursor.u64(&"tensor count")?;
        let metadata_count = cursor.u64(&"metadata count")?;
        let metadata = Metadata::read(&mut cursor, metadata_count)?;
        let split = Split::of(&metadata, &label)?;
        let entries = tensors::read(&mut cursor, tensor_count, alignment(&metadata, &label)?)?;
        Ok(Part { version, metadata, split, entries, label, bytes })
    }

    fn expect_place(&self, index: usize, parts: usize) -> Result<(), LoadError> {
        self.split.expect(index, parts, &self.label)
    }
}

fn read_version(cursor: &mut Cursor<'_>, label: &str) -> Result<u32, LoadError> {
    let magic = cursor.array::<4>(&"magic")?;
    if magic != MAGIC {
        return Err(LoadError::malformed(label, "magic", "GGUF", format!("\"{}\"", magic.escape_ascii())));
    }
    let version = cursor.u32(&"version")?;
    match version {
        2 | 3 => Ok(version),
        // A small number in the other byte order: the rest of the file is in that order too.
        _ if version & 0xffff == 0 && version != 0 => {
            let found = format!("big endian, version {}", version.swap_bytes());
            Err(unsupported(label, "the byte order", found, "little endian"))
        }
        _ => Err(unsupported(label, "the GGUF version", version, "2 and 3")),
    }
}

fn alignment(metadata: &Metadata, label: &str) -> Result<u64, LoadError> {
    let Some(value) = metadata.get(ALIGNMENT) else { return Ok(DEFAULT_ALIGNMENT) };
    match value.as_u64() {
        Some(alignment) if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT => Ok(alignment),
        _ => {
            let found = value.as_i64().map_or_else(|| value.type_name().to_owned(), |n| n.to_string());
            Err(LoadError::malformed(label, ALIGNMENT, format!("a power of two of at most {MAX_ALIGNMENT}"), found))
        }
    }
}

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// The largest page of a common system; every file seen uses 32.
const MAX_ALIGNMENT: u64 = 65_536;
