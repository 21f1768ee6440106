//! The header of one safetensors file, and its check against the file's length. Own code rather than the `safetensors`
//! crate's: that one accepts two tensors of one name, buffers the header several times over, and its errors often name neither
//! tensor nor numbers.
#![forbid(unsafe_code)]

use super::json::{Integers, Nullable, Object, OnPair, Slot, Text, parse_object};
use crate::dtype::FormatId;
use crate::error::LoadError;
use crate::weights::say::{clipped, quoted, unsupported};
use crate::weights::strings::StrArray;
use crate::weights::table::{Entry, NameIndex};
use ::safetensors::Dtype;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::{Error, MapAccess};

/// What a header says, checked.
pub(super) struct Header {
    /// Keys and values by turns.
    pub(super) metadata: StrArray,
    /// In the header's order, all of part 0.
    pub(super) entries: Vec<Entry>,
}

impl Header {
    pub(super) fn parse(label: &str, file: &[u8]) -> Result<Header, LoadError> {
        let malformed = |at: &str, expected: String, found: String| LoadError::malformed(label, at, expected, found);
        let Some((len, rest)) = file.split_first_chunk::<LEN_BYTES>() else {
            return Err(malformed("header length", format!("{LEN_BYTES} bytes"), format!("a file of {}", file.len())));
        };
        let len = u64::from_le_bytes(*len);
        let most = (rest.len() as u64).min(MAX_HEADER_BYTES);
        if len > most {
            let expected = format!("at most {most} in a file of {} bytes", file.len());
            return Err(malformed("header length", expected, len.to_string()));
        }
        let (text, data) = rest.split_at(len as usize);
        if text.first() != Some(&b'{') {
            let found = text.first().map_or("nothing".to_owned(), |b| format!("\"{}\"", b.escape_ascii()));
            return Err(malformed("header", "\"{\"".to_owned(), found));
        }
        let text = std::str::from_utf8(text)
            .map_err(|e| malformed("header", "UTF-8".to_owned(), format!("an invalid sequence at byte {}", e.valid_up_to())))?;
        let mut raw = RawHeader::default();
        parse_object(text, &mut raw)
            .map_err(|e| malformed("header", "the JSON of a header".to_owned(), clipped(&e.to_string()).to_owned()))?;
        check_metadata(label, raw.metadata.as_ref())?;
        let data_start = LEN_BYTES + text.len();
        let entries = raw.tensors.into_iter().map(|tensor| tensor.check(label, data_start, data.len()));
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        check_cover(label, &entries, data_start, data.len())?;
        Ok(Header { metadata: raw.metadata.unwrap_or_default(), entries })
    }
}

/// The header as it stands in the file.
#[derive(Default)]
struct RawHeader {
    metadata: Option<StrArray>,
    tensors: Vec<RawTensor>,
}

impl OnPair for RawHeader {
    fn pair<'de, A: MapAccess<'de>>(&mut self, key: &str, value: Slot<'_, 'de, A>) -> Result<(), A::Error> {
        if key != METADATA {
            let mut tensor = RawTensor { name: key.into(), ..RawTensor::default() };
            value.read(Object(&mut tensor)).map_err(|e| A::Error::custom(format!("tensor {}: {e}", quoted(key))))?;
            self.tensors.push(tensor);
            return Ok(());
        }
        let mut pairs = Pairs(StrArray::default());
        value.read(Nullable(Object(&mut pairs)))?;
        match self.metadata.replace(pairs.0) {
            None => Ok(()),
            Some(_) => Err(A::Error::custom(format!("{METADATA} stands there twice"))),
        }
    }
}

struct Pairs(StrArray);

impl OnPair for Pairs {
    fn pair<'de, A: MapAccess<'de>>(&mut self, key: &str, value: Slot<'_, 'de, A>) -> Result<(), A::Error> {
        self.0.push(key);
        value.read(Text(|text: &str| self.0.push(text)))
    }
}

#[derive(Default)]
struct RawTensor {
    name: Box<str>,
    dtype: Option<Box<str>>,
    shape: Option<Vec<u64>>,
    offsets: Option<Vec<u64>>,
}

impl OnPair for RawTensor {
    fn pair<'de, A: MapAccess<'de>>(&mut self, key: &str, value: Slot<'_, 'de, A>) -> Result<(), A::Error> {
        let twice = match key {
            "dtype" => self.dtype.replace(value.read(Text(|text: &str| clipped(text).into()))?).is_some(),
            "shape" => self.shape.replace(value.read(Integers(MAX_DIMS))?).is_some(),
            "data_offsets" => self.offsets.replace(value.read(Integers(2))?).is_some(),
            _ => return value.skip(),
        };
        if twice { Err(A::Error::custom(format!("{key} stands there twice"))) } else { Ok(()) }
    }
}

impl RawTensor {
    fn check(self, label: &str, data_start: usize, data_bytes: usize) -> Result<Entry, LoadError> {
        let bad = |field: &str, expected: String, found: String| {
            LoadError::malformed(label, format!("{field} of tensor {}", quoted(&self.name)), expected, found)
        };
        let missing = |field: &str| bad(field, "a value".to_owned(), "none".to_owned());
        let dtype = self.dtype.as_deref().ok_or_else(|| missing("dtype"))?;
        let dims = self.shape.as_deref().ok_or_else(|| missing("shape"))?;
        let offsets = self.offsets.as_deref().ok_or_else(|| missing("data_offsets"))?;

        let Some(format) = format_of(dtype) else {
            let supported = DTYPES.map(|(dtype, _)| format!("{dtype:?}")).join(", ");
            return Err(unsupported(label, format!("the dtype of tensor {}", quoted(&self.name)), quoted(dtype), supported));
        };
        // In the shape's order, as every later product of it will be.
        let shape = dims.iter().map(|&dim| usize::try_from(dim)).collect::<Result<Box<[usize]>, _>>().ok();
        let bytes = shape.as_ref().and_then(|shape| shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)));
        let bytes = bytes.and_then(|values| format.bytes_of(values));
        let (Some(shape), Some(bytes)) = (shape, bytes) else {
            return Err(bad("shape", "a size that fits the address space".to_owned(), format!("{dims:?}")));
        };
        let &[start, end] = offsets else {
            return Err(bad("data_offsets", "two offsets".to_owned(), format!("{offsets:?}")));
        };
        if start > end || end > data_bytes as u64 {
            let expected = format!("a range inside {data_bytes} bytes of data");
            return Err(bad("data_offsets", expected, format!("{offsets:?}")));
        }
        if end - start != bytes as u64 {
            let expected = format!("{bytes} bytes for {format} {dims:?}");
            return Err(bad("data_offsets", expected, format!("{} in {offsets:?}", end - start)));
        }
        let range = data_start + start as usize..data_start + end as usize;
        Ok(Entry { name: self.name, format, shape, part: 0, range })
    }
}

fn check_metadata(label: &str, metadata: Option<&StrArray>) -> Result<(), LoadError> {
    let Some(strings) = metadata else { return Ok(()) };
    let key = |i: usize| strings.get(2 * i).expect("keys and values come in pairs");
    match NameIndex::new(strings.len() / 2, key) {
        Ok(_) => Ok(()),
        Err(i) => Err(LoadError::malformed(label, format!("{METADATA} key {}", quoted(key(i))), "one entry", "two")),
    }
}

/// The ranges of all tensors follow each other from the start of the data to its end, as the format demands. This is what
/// finds a file that was cut short, and one with something appended.
fn check_cover(label: &str, entries: &[Entry], data_start: usize, data_bytes: usize) -> Result<(), LoadError> {
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_unstable_by_key(|entry| (entry.range.start, entry.range.end));
    let mut at = data_start;
    for entry in order {
        if entry.range.start != at {
            let expected = format!("a start at {}, where the tensor before it ends", at - data_start);
            let at = format!("data_offsets of tensor {}", quoted(&entry.name));
            return Err(LoadError::malformed(label, at, expected, entry.range.start - data_start));
        }
        at = entry.range.end;
    }
    if at != data_start + data_bytes {
        let expected = format!("{} bytes, the end of the last tensor", at - data_start);
        return Err(LoadError::malformed(label, "data", expected, data_bytes));
    }
    Ok(())
}

/// The names are those of the crate that owns the format.
fn format_of(dtype: &str) -> Option<FormatId> {
    let named: Result<Dtype, serde::de::value::Error> = Dtype::deserialize(dtype.into_deserializer());
    DTYPES.iter().find(|(d, _)| named.as_ref() == Ok(d)).map(|&(_, format)| format)
}

const DTYPES: [(Dtype, FormatId); 12] = [
    (Dtype::F64, FormatId::F64),
    (Dtype::F32, FormatId::F32),
    (Dtype::F16, FormatId::F16),
    (Dtype::BF16, FormatId::BF16),
    (Dtype::F8_E4M3, FormatId::F8E4M3),
    (Dtype::F8_E5M2, FormatId::F8E5M2),
    (Dtype::I8, FormatId::I8),
    (Dtype::U8, FormatId::U8),
    (Dtype::BOOL, FormatId::U8),
    (Dtype::I16, FormatId::I16),
    (Dtype::I32, FormatId::I32),
    (Dtype::I64, FormatId::I64),
];

const METADATA: &str = "__metadata__";
const LEN_BYTES: usize = 8;
/// The format's own bound.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Convolutions have 5; nothing published has more.
const MAX_DIMS: usize = 8;
