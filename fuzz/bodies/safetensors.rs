//! Any bytes as a safetensors file, and as the index of two small shards.
#![allow(unreachable_pub)] // Included by binaries, which export nothing.

use super::views;
use loquat::weights::{Bytes, Safetensors};

pub fn run(data: &[u8]) {
    match Safetensors::from_bytes("fuzz", data.to_vec()) {
        Ok(file) => {
            views::check(&file);
            for (key, _) in file.entries() {
                assert!(file.metadata(key).is_some());
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Ok(text) = std::str::from_utf8(data) {
        let mut shard = |name: &str| match name {
            "a.safetensors" => Some(shard("a", "b")),
            "b.safetensors" => Some(shard("c", "d")),
            _ => None,
        };
        match Safetensors::from_shards("fuzz", text, &mut shard) {
            Ok(shards) => views::check(&shards),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

/// A file with two tensors.
fn shard(first: &str, second: &str) -> Bytes {
    let header = format!(
        r#"{{"{first}":{{"dtype":"F16","shape":[2],"data_offsets":[0,4]}},"{second}":{{"dtype":"U8","shape":[],"data_offsets":[4,5]}}}}"#
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([1, 2, 3, 4, 5]);
    Bytes::from(file)
}
