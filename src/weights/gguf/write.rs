//! The head of a GGUF file, version 3: keys and values, then the table of tensors, as [`super::Gguf`] reads them.
//!
//! Invariant: what is written is read back equal.
#![forbid(unsafe_code)]

use super::value::{self, MetaArray, MetaValue};
use super::{ALIGNMENT, MAGIC};
use crate::dtype::FormatId;

/// A tensor as the table lists it.
pub(crate) struct HeadTensor {
    pub(crate) name: String,
    /// One that GGUF has a number for.
    pub(crate) format: FormatId,
    /// The slowest dimension first; 1 to 4 of them.
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: u64,
}

/// Everything before the bytes of the first tensor, which follow each other in the order of the table, each padded to `alignment`.
pub(crate) fn write_head<'a>(
    entries: impl IntoIterator<Item = (&'a str, &'a MetaValue)>,
    tensors: &[HeadTensor],
    alignment: u32,
) -> Vec<u8> {
    let mut out = Vec::from(MAGIC);
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    let own = MetaValue::U32(alignment);
    let mut list: Vec<(&str, &MetaValue)> = entries.into_iter().filter(|(key, _)| *key != ALIGNMENT).collect();
    list.push((ALIGNMENT, &own));
    out.extend((list.len() as u64).to_le_bytes());
    for (key, value) in list {
        string(key, &mut out);
        out.extend(kind(value).to_le_bytes());
        write_value(value, &mut out);
    }
    let mut offset = 0u64;
    for t in tensors {
        string(&t.name, &mut out);
        out.extend((t.shape.len() as u32).to_le_bytes());
        t.shape.iter().rev().for_each(|&dim| out.extend((dim as u64).to_le_bytes()));
        out.extend(t.format.ggml_type().expect("a format of GGUF").to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset = (offset + t.bytes).next_multiple_of(alignment.into());
    }
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
    out
}

fn string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn kind(value: &MetaValue) -> u32 {
    match value {
        MetaValue::U8(_) => value::U8,
        MetaValue::I8(_) => value::I8,
        MetaValue::U16(_) => value::U16,
        MetaValue::I16(_) => value::I16,
        MetaValue::U32(_) => value::U32,
        MetaValue::I32(_) => value::I32,
        MetaValue::U64(_) => value::U64,
        MetaValue::I64(_) => value::I64,
        MetaValue::F32(_) => value::F32,
        MetaValue::F64(_) => value::F64,
        MetaValue::Bool(_) => value::BOOL,
        MetaValue::Str(_) => value::STRING,
        MetaValue::Array(_) => value::ARRAY,
    }
}

fn write_value(value: &MetaValue, out: &mut Vec<u8>) {
    match value {
        MetaValue::U8(n) => out.extend(n.to_le_bytes()),
        MetaValue::I8(n) => out.extend(n.to_le_bytes()),
        MetaValue::U16(n) => out.extend(n.to_le_bytes()),
        MetaValue::I16(n) => out.extend(n.to_le_bytes()),
        MetaValue::U32(n) => out.extend(n.to_le_bytes()),
        MetaValue::I32(n) => out.extend(n.to_le_bytes()),
        MetaValue::U64(n) => out.extend(n.to_le_bytes()),
        MetaValue::I64(n) => out.extend(n.to_le_bytes()),
        MetaValue::F32(x) => out.extend(x.to_le_bytes()),
        MetaValue::F64(x) => out.extend(x.to_le_bytes()),
        MetaValue::Bool(b) => out.push((*b).into()),
        MetaValue::Str(text) => string(text, out),
        MetaValue::Array(array) => write_array(array, out),
    }
}

fn write_array(array: &MetaArray, out: &mut Vec<u8>) {
    let kind = match array {
        MetaArray::U8(_) => value::U8,
        MetaArray::I8(_) => value::I8,
        MetaArray::U16(_) => value::U16,
        MetaArray::I16(_) => value::I16,
        MetaArray::U32(_) => value::U32,
        MetaArray::I32(_) => value::I32,
        MetaArray::U64(_) => value::U64,
        MetaArray::I64(_) => value::I64,
        MetaArray::F32(_) => value::F32,
        MetaArray::F64(_) => value::F64,
        MetaArray::Bool(_) => value::BOOL,
        MetaArray::Str(_) => value::STRING,
        MetaArray::Array(_) => value::ARRAY,
    };
    out.extend(kind.to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        MetaArray::U8(items) => out.extend(&items[..]),
        MetaArray::I8(items) => items.iter().for_each(|n| out.extend(n.to_le_bytes())),
        MetaArray::U16(items) => items.iter().for_each(|n| out.extend(n.to_le_bytes())),
        MetaArray::I16(items) => items.iter().for_each(|n| out.extend(n.to_le_bytes())),
        MetaArray::U32(items) => items.iter().for_each(|n| out.extend(n.to_le_bytes())),
        MetaArray::I32(items) => items.iter().for_each(|n| out.extend(n.to_le_bytes())),
        MetaArray::U64(items) => items.iter().for_each(|n| out.extend(n.to_le_bytes())),
        MetaArray::I64(items) => items.iter().for_each(|n| out.extend(n.to_le_bytes())),
        MetaArray::F32(items) => items.iter().for_each(|x| out.extend(x.to_le_bytes())),
        MetaArray::F64(items) => items.iter().for_each(|x| out.extend(x.to_le_bytes())),
        MetaArray::Bool(items) => out.extend(items.iter().map(|&b| u8::from(b))),
        MetaArray::Str(strings) => strings.iter().for_each(|text| string(text, out)),
        MetaArray::Array(arrays) => arrays.iter().for_each(|array| write_array(array, out)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Gguf;
    use super::*;
    use crate::weights::WeightSource;

    #[test]
    fn a_head_is_read_back() {
        let strings = MetaArray::Str(Box::new(["", "é"].into_iter().collect()));
        let entries = [
            ("b", MetaValue::Bool(true)),
            ("f", MetaValue::F32(1.5)),
            ("u", MetaValue::U64(u64::MAX)),
            ("s", MetaValue::Str("text".into())),
            ("l", MetaValue::Array(MetaArray::Array([strings, MetaArray::I16([-3, 4].into())].into()))),
        ];
        let tensors = [
            HeadTensor { name: "x".into(), format: FormatId::I8, shape: vec![3], bytes: 3 },
            HeadTensor { name: "y".into(), format: FormatId::F32, shape: vec![2, 1], bytes: 8 },
        ];
        let mut file = write_head(entries.iter().map(|(key, value)| (*key, value)), &tensors, 64);
        let head = file.len();
        file.extend([1, 2, 3]);
        file.resize(head + 64, 0);
        file.extend([7; 8]);
        let gguf = Gguf::from_bytes("written", file).unwrap();
        for (key, value) in &entries {
            assert_eq!(gguf.metadata(key), Some(value));
        }
        assert_eq!(gguf.head().len(), head);
        let y = gguf.tensor("y").unwrap();
        assert_eq!((y.format, y.shape, y.bytes), (FormatId::F32, &[2, 1][..], &[7; 8][..]));
        assert_eq!(&gguf.bytes("x").unwrap()[..], [1, 2, 3]);
    }
}
