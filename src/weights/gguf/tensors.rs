//! The tensor table of a GGUF file: names, shapes, types, offsets; and the check of all of them against the file's length.
#![forbid(unsafe_code)]

use super::cursor::Cursor;
use crate::dtype::FormatId;
use crate::error::LoadError;
use crate::weights::say::{clipped, quoted, unsupported};
use crate::weights::table::Entry;
use std::fmt::{self, Display};

/// Reads `count` entries and checks them against the data that follows, which starts at the next multiple of `alignment`.
pub(super) fn read(cursor: &mut Cursor<'_>, count: u64, alignment: u64) -> Result<Vec<Entry>, LoadError> {
    let count = cursor.count(count, MIN_ENTRY_BYTES, &"tensor count")?;
    // Not reserved by the count: an entry in memory is larger than the smallest one in a file.
    let mut infos = Vec::new();
    for index in 0..count {
        infos.push(Info::read(cursor, index, alignment)?);
    }
    let data_start = (cursor.at() as u64).next_multiple_of(alignment);
    let data_bytes = (cursor.file_len() as u64).saturating_sub(data_start);
    let entries = infos.into_iter().map(|info| info.place(cursor, data_start, data_bytes)).collect::<Result<Vec<_>, _>>()?;
    check_overlaps(&entries, cursor)?;
    Ok(entries)
}

/// An entry as the file has it, its offset relative to the data.
struct Info {
    name: Box<str>,
    format: FormatId,
    shape: Box<[usize]>,
    bytes: u64,
    offset: u64,
}

impl Info {
    fn read(cursor: &mut Cursor<'_>, index: usize, alignment: u64) -> Result<Info, LoadError> {
        let name = cursor.string(&format_args!("name of tensor {index}"))?;
        let file = cursor.file();
        let at = |field| Field { field, tensor: name };
        let bad = |field, expected: String, found: String| LoadError::malformed(file, at(field).to_string(), expected, found);

        let dims = cursor.u32(&at("dimension count"))? as usize;
        if !(1..=MAX_DIMS).contains(&dims) {
            return Err(bad("dimension count", format!("1 to {MAX_DIMS}"), dims.to_string()));
        }
        // The file lists the fastest dimension first.
        let mut shape = [0u64; MAX_DIMS];
        let shape = &mut shape[..dims];
        for dim in shape.iter_mut().rev() {
            *dim = cursor.u64(&at("shape"))?;
        }
        let ggml_type = cursor.u32(&at("type"))?;
        let offset = cursor.u64(&at("offset"))?;

        if shape.contains(&0) {
            return Err(bad("shape", "dimensions of at least 1".to_owned(), format!("{shape:?}")));
        }
        let Some(format) = FormatId::from_ggml(ggml_type) else {
            return Err(unsupported(file, at("the type").to_string(), named_type(ggml_type), supported_types()));
        };
        let overflow = || bad("shape", "a size that fits the address space".to_owned(), format!("{shape:?}"));
        let values = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim)).ok_or_else(overflow)?;
        // Formats of less than a byte a value have more values than bytes: checked apart, for 32-bit systems.
        usize::try_from(values).map_err(|_| overflow())?;
        let row_len = shape[dims - 1];
        let block_len = format.block_len() as u64;
        let sizes = shape.iter().map(|&dim| usize::try_from(dim)).collect::<Result<Box<[usize]>, _>>();
        let sizes = sizes.map_err(|_| overflow())?;
        if row_len % block_len != 0 {
            let (row_len, block_len) = (sizes[dims - 1], format.block_len());
            let tensor = clipped(name).escape_debug().to_string();
            return Err(LoadError::PartialBlock { tensor, row_len, block_len, format });
        }
        let bytes = (values / block_len).checked_mul(format.block_bytes() as u64).ok_or_else(overflow)?;
        if offset % alignment != 0 {
            return Err(bad("offset", format!("a multiple of {alignment}"), offset.to_string()));
        }
        Ok(Info { name: name.into(), format, shape: sizes, bytes, offset })
    }

    /// Where the tensor lies in the file, if it does.
    fn place(self, cursor: &Cursor<'_>, data_start: u64, data_bytes: u64) -> Result<Entry, LoadError> {
        let Info { name, format, shape, bytes, offset } = self;
        if offset.checked_add(bytes).is_none_or(|end| end > data_bytes) {
            let at = Field { field: "data", tensor: &name }.to_string();
            let expected = format!("{bytes} bytes from {offset} on");
            return Err(LoadError::malformed(cursor.file(), at, expected, format!("a data section of {data_bytes} bytes")));
        }
        // Both sums are at most the file's length, which is a slice's.
        let start = (data_start + offset) as usize;
        Ok(Entry { name, format, shape, part: 0, range: start..start + bytes as usize })
    }
}

/// A part of a tensor's entry, as messages name it; formatted only when there is one to write.
struct Field<'a> {
    field: &'a str,
    tensor: &'a str,
}

impl Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of tensor {}", self.field, quoted(self.tensor))
    }
}

fn check_overlaps(entries: &[Entry], cursor: &Cursor<'_>) -> Result<(), LoadError> {
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_unstable_by_key(|entry| entry.range.start);
    for pair in order.windows(2) {
        let (before, after) = (pair[0], pair[1]);
        if after.range.start < before.range.end {
            let at = Field { field: "data", tensor: &after.name }.to_string();
            let expected = format!("a start at or after {}, the end of {}", before.range.end, quoted(&before.name));
            return Err(LoadError::malformed(cursor.file(), at, expected, after.range.start));
        }
    }
    Ok(())
}

/// For types that no file of today should have, the name they once had.
fn named_type(ggml_type: u32) -> String {
    let name = match ggml_type {
        4 => "Q4_2, removed from the format",
        5 => "Q4_3, removed from the format",
        9 => "Q8_1, never stored in files",
        15 => "Q8_K, never stored in files",
        31..=33 => "a rearranged Q4_0, removed from the format",
        36..=38 => "a rearranged IQ4_NL, removed from the format",
        _ => return format!("type {ggml_type}"),
    };
    format!("type {ggml_type} ({name})")
}

fn supported_types() -> String {
    let names: Vec<&str> = FormatId::ALL.iter().filter(|f| f.ggml_type().is_some()).map(|f| f.name()).collect();
    names.join(", ")
}

/// Length of an empty name, dimension count, one dimension, type, offset.
const MIN_ENTRY_BYTES: usize = 8 + 4 + 8 + 4 + 8;
/// The format's own bound.
const MAX_DIMS: usize = 4;
