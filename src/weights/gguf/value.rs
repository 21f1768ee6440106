//! Metadata values: thirteen types, arrays of any of them, arrays of arrays.
//!
//! Invariant: memory is proportional to bytes read; nesting is bounded, so that no file can exhaust the stack.
#![forbid(unsafe_code)]

use super::cursor::Cursor;
use crate::error::LoadError;
use crate::weights::say::{quoted, unsupported};
use crate::weights::strings::StrArray;
use std::fmt::Display;

/// The value of a metadata key, in the type that the file gave it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum MetaValue {
    /// GGUF's `uint8`.
    U8(u8),
    /// GGUF's `int8`.
    I8(i8),
    /// GGUF's `uint16`.
    U16(u16),
    /// GGUF's `int16`.
    I16(i16),
    /// GGUF's `uint32`.
    U32(u32),
    /// GGUF's `int32`.
    I32(i32),
    /// GGUF's `uint64`.
    U64(u64),
    /// GGUF's `int64`.
    I64(i64),
    /// GGUF's `float32`.
    F32(f32),
    /// GGUF's `float64`.
    F64(f64),
    /// GGUF's `bool`.
    Bool(bool),
    /// GGUF's `string`, UTF-8.
    Str(Box<str>),
    /// GGUF's `array`.
    Array(MetaArray),
}

/// An array in metadata: one element type for all.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum MetaArray {
    /// Elements of `uint8`.
    U8(Box<[u8]>),
    /// Elements of `int8`.
    I8(Box<[i8]>),
    /// Elements of `uint16`.
    U16(Box<[u16]>),
    /// Elements of `int16`.
    I16(Box<[i16]>),
    /// Elements of `uint32`.
    U32(Box<[u32]>),
    /// Elements of `int32`.
    I32(Box<[i32]>),
    /// Elements of `uint64`.
    U64(Box<[u64]>),
    /// Elements of `int64`.
    I64(Box<[i64]>),
    /// Elements of `float32`.
    F32(Box<[f32]>),
    /// Elements of `float64`.
    F64(Box<[f64]>),
    /// Elements of `bool`.
    Bool(Box<[bool]>),
    /// Strings, all UTF-8.
    Str(Box<StrArray>),
    /// Arrays, which need not be of one type or length.
    Array(Box<[MetaArray]>),
}

impl MetaValue {
    /// An integer of any type that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            MetaValue::U64(n) => Some(n),
            _ => self.as_i64().and_then(|n| u64::try_from(n).ok()),
        }
    }

    /// [`as_u64`](Self::as_u64) where it fits.
    pub fn as_usize(&self) -> Option<usize> {
        self.as_u64().and_then(|n| usize::try_from(n).ok())
    }

    /// An integer of any type that fits.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            MetaValue::U8(n) => Some(n.into()),
            MetaValue::I8(n) => Some(n.into()),
            MetaValue::U16(n) => Some(n.into()),
            MetaValue::I16(n) => Some(n.into()),
            MetaValue::U32(n) => Some(n.into()),
            MetaValue::I32(n) => Some(n.into()),
            MetaValue::U64(n) => i64::try_from(n).ok(),
            MetaValue::I64(n) => Some(n),
            _ => None,
        }
    }

    /// A number of any type; an integer beyond 2^53 is rounded.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            MetaValue::F32(x) => Some(x.into()),
            MetaValue::F64(x) => Some(x),
            MetaValue::U64(n) => Some(n as f64),
            _ => self.as_i64().map(|n| n as f64),
        }
    }

    /// A boolean; a number is none.
    pub fn as_bool(&self) -> Option<bool> {
        if let MetaValue::Bool(flag) = *self { Some(flag) } else { None }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        if let MetaValue::Str(string) = self { Some(string) } else { None }
    }

    /// An array of any type.
    pub fn as_array(&self) -> Option<&MetaArray> {
        if let MetaValue::Array(array) = self { Some(array) } else { None }
    }

    /// An array of strings.
    pub fn as_strs(&self) -> Option<&StrArray> {
        self.as_array().and_then(MetaArray::as_strs)
    }

    /// The type as GGUF calls it.
    pub fn type_name(&self) -> &'static str {
        match self {
            MetaValue::U8(_) => "uint8",
            MetaValue::I8(_) => "int8",
            MetaValue::U16(_) => "uint16",
            MetaValue::I16(_) => "int16",
            MetaValue::U32(_) => "uint32",
            MetaValue::I32(_) => "int32",
            MetaValue::U64(_) => "uint64",
            MetaValue::I64(_) => "int64",
            MetaValue::F32(_) => "float32",
            MetaValue::F64(_) => "float64",
            MetaValue::Bool(_) => "bool",
            MetaValue::Str(_) => "string",
            MetaValue::Array(_) => "array",
        }
    }

    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<MetaValue, LoadError> {
        let key = Value(key);
        let kind = cursor.u32(&format_args!("type of {key}"))?;
        Ok(match kind {
            U8 => MetaValue::U8(u8::from_le_bytes(cursor.array(&key)?)),
            I8 => MetaValue::I8(i8::from_le_bytes(cursor.array(&key)?)),
            U16 => MetaValue::U16(u16::from_le_bytes(cursor.array(&key)?)),
            I16 => MetaValue::I16(i16::from_le_bytes(cursor.array(&key)?)),
            U32 => MetaValue::U32(u32::from_le_bytes(cursor.array(&key)?)),
            I32 => MetaValue::I32(i32::from_le_bytes(cursor.array(&key)?)),
            U64 => MetaValue::U64(u64::from_le_bytes(cursor.array(&key)?)),
            I64 => MetaValue::I64(i64::from_le_bytes(cursor.array(&key)?)),
            F32 => MetaValue::F32(f32::from_le_bytes(cursor.array(&key)?)),
            F64 => MetaValue::F64(f64::from_le_bytes(cursor.array(&key)?)),
            BOOL => MetaValue::Bool(bool_of(cursor.array(&key)?, cursor, &key)?),
            STRING => MetaValue::Str(cursor.string(&key)?.into()),
            ARRAY => MetaValue::Array(MetaArray::read(cursor, &key, 1)?),
            _ => return Err(unknown_type(cursor, &key, kind)),
        })
    }
}

impl MetaArray {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            MetaArray::U8(items) => items.len(),
            MetaArray::I8(items) => items.len(),
            MetaArray::U16(items) => items.len(),
            MetaArray::I16(items) => items.len(),
            MetaArray::U32(items) => items.len(),
            MetaArray::I32(items) => items.len(),
            MetaArray::U64(items) => items.len(),
            MetaArray::I64(items) => items.len(),
            MetaArray::F32(items) => items.len(),
            MetaArray::F64(items) => items.len(),
            MetaArray::Bool(items) => items.len(),
            MetaArray::Str(items) => items.len(),
            MetaArray::Array(items) => items.len(),
        }
    }

    /// True where there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Strings.
    pub fn as_strs(&self) -> Option<&StrArray> {
        if let MetaArray::Str(strings) = self { Some(strings) } else { None }
    }

    /// Single-precision floats, as scores are stored.
    pub fn as_f32s(&self) -> Option<&[f32]> {
        if let MetaArray::F32(items) = self { Some(items) } else { None }
    }

    /// Booleans.
    pub fn as_bools(&self) -> Option<&[bool]> {
        if let MetaArray::Bool(items) = self { Some(items) } else { None }
    }

    /// Integers of any type, where all fit. Allocates.
    pub fn to_i64s(&self) -> Option<Vec<i64>> {
        fn all<T: Copy + Into<i64>>(items: &[T]) -> Option<Vec<i64>> {
            Some(items.iter().map(|&n| n.into()).collect())
        }
        match self {
            MetaArray::U8(items) => all(items),
            MetaArray::I8(items) => all(items),
            MetaArray::U16(items) => all(items),
            MetaArray::I16(items) => all(items),
            MetaArray::U32(items) => all(items),
            MetaArray::I32(items) => all(items),
            MetaArray::I64(items) => all(items),
            MetaArray::U64(items) => items.iter().map(|&n| i64::try_from(n).ok()).collect(),
            _ => None,
        }
    }

    /// Numbers of any type; integers beyond 2^53 are rounded. Allocates.
    pub fn to_f64s(&self) -> Option<Vec<f64>> {
        match self {
            MetaArray::F32(items) => Some(items.iter().map(|&x| x.into()).collect()),
            MetaArray::F64(items) => Some(items.to_vec()),
            MetaArray::U64(items) => Some(items.iter().map(|&n| n as f64).collect()),
            _ => self.to_i64s().map(|items| items.into_iter().map(|n| n as f64).collect()),
        }
    }

    fn read(cursor: &mut Cursor<'_>, key: &Value<'_>, depth: usize) -> Result<MetaArray, LoadError> {
        if depth > MAX_DEPTH {
            return Err(cursor.malformed(key, format!("arrays nested at most {MAX_DEPTH} deep"), "one more"));
        }
        let kind = cursor.u32(&format_args!("element type of {key}"))?;
        let count = cursor.u64(&format_args!("length of {key}"))?;
        macro_rules! numbers {
            ($type:ty) => {
                cursor.items(count, key)?.iter().map(|&bytes| <$type>::from_le_bytes(bytes)).collect()
            };
        }
        Ok(match kind {
            U8 => MetaArray::U8(numbers!(u8)),
            I8 => MetaArray::I8(numbers!(i8)),
            U16 => MetaArray::U16(numbers!(u16)),
            I16 => MetaArray::I16(numbers!(i16)),
            U32 => MetaArray::U32(numbers!(u32)),
            I32 => MetaArray::I32(numbers!(i32)),
            U64 => MetaArray::U64(numbers!(u64)),
            I64 => MetaArray::I64(numbers!(i64)),
            F32 => MetaArray::F32(numbers!(f32)),
            F64 => MetaArray::F64(numbers!(f64)),
            BOOL => MetaArray::Bool(
                cursor.items(count, key)?.iter().map(|&bytes| bool_of(bytes, cursor, key)).collect::<Result<_, _>>()?,
            ),
            STRING => MetaArray::Str(Box::new(strings(cursor, count, key)?)),
            ARRAY => {
                let count = cursor.count(count, MIN_ARRAY_BYTES, key)?;
                let mut items = Vec::with_capacity(count);
                for _ in 0..count {
                    items.push(MetaArray::read(cursor, key, depth + 1)?);
                }
                MetaArray::Array(items.into())
            }
            _ => return Err(unknown_type(cursor, key, kind)),
        })
    }
}

fn strings(cursor: &mut Cursor<'_>, count: u64, key: &Value<'_>) -> Result<StrArray, LoadError> {
    let count = cursor.count(count, MIN_STRING_BYTES, key)?;
    if let Some(list) = cursor.strings(count) {
        return Ok(list);
    }
    let mut list = StrArray::with_capacity(count, 0);
    for index in 0..count {
        list.push(cursor.string(&format_args!("element {index} of {key}"))?);
    }
    Ok(list)
}

fn bool_of(byte: [u8; 1], cursor: &Cursor<'_>, key: &Value<'_>) -> Result<bool, LoadError> {
    match byte {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(cursor.malformed(key, "a boolean, 0 or 1", other)),
    }
}

fn unknown_type(cursor: &Cursor<'_>, key: &Value<'_>, kind: u32) -> LoadError {
    unsupported(cursor.file(), format!("the type of {key}"), kind, "0 to 12")
}

/// A key, as messages about its value name it.
struct Value<'a>(&'a str);

impl Display for Value<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "value of {}", quoted(self.0))
    }
}

/// No published file nests at all; a few levels cost nothing.
const MAX_DEPTH: usize = 8;
const MIN_STRING_BYTES: usize = 8;
const MIN_ARRAY_BYTES: usize = 4 + 8;

// The file's type numbers.
pub(super) const U8: u32 = 0;
pub(super) const I8: u32 = 1;
pub(super) const U16: u32 = 2;
pub(super) const I16: u32 = 3;
pub(super) const U32: u32 = 4;
pub(super) const I32: u32 = 5;
pub(super) const F32: u32 = 6;
pub(super) const BOOL: u32 = 7;
pub(super) const STRING: u32 = 8;
pub(super) const ARRAY: u32 = 9;
pub(super) const U64: u32 = 10;
pub(super) const I64: u32 = 11;
pub(super) const F64: u32 = 12;
