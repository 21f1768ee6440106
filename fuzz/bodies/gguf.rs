//! Any bytes as a GGUF file: it opens or it does not, and what opened keeps its promises.
#![allow(unreachable_pub)] // Included by binaries, which export nothing.

use super::views;
use loquat::weights::{Gguf, MetaArray, MetaValue};

pub fn run(data: &[u8]) {
    let gguf = match Gguf::from_bytes("fuzz", data.to_vec()) {
        Ok(gguf) => gguf,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    views::check(&gguf);
    for (key, value) in gguf.entries() {
        assert!(std::ptr::eq(gguf.metadata(key).expect("a listed key has a value"), value));
        if let Some(n) = value.as_i64() {
            assert_eq!(value.as_u64(), u64::try_from(n).ok());
        }
        if let MetaValue::Array(array) = value {
            check_array(array);
        }
    }
}

fn check_array(array: &MetaArray) {
    for numbers in [array.to_i64s().map(|n| n.len()), array.to_f64s().map(|n| n.len())].into_iter().flatten() {
        assert_eq!(numbers, array.len());
    }
    match array {
        MetaArray::Str(strings) => {
            assert_eq!(strings.iter().len(), strings.len());
            for (index, string) in strings.iter().enumerate() {
                assert_eq!(strings.get(index), Some(string));
            }
        }
        MetaArray::Array(arrays) => arrays.iter().for_each(check_array),
        _ => {}
    }
}
