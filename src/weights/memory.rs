//! Weights that are already in memory: a program that ships a model inside its own archive hands over the bytes and gets the
//! source that a file with these bytes would have been. Each format has its own entry as well: [`Gguf::from_bytes`],
//! [`Gguf::from_parts`], [`Safetensors::from_bytes`] and [`Safetensors::from_shards`].
#![forbid(unsafe_code)]

use super::bytes::Bytes;
use super::gguf::{self, Gguf};
use super::open::Opened;
use super::safetensors::Safetensors;
use super::say::unsupported;
use crate::error::LoadError;
use std::sync::Arc;

/// Opens one file's bytes in whichever format they are. `label` stands for the file in messages; bytes are an
/// `Arc<[u8]>`, a `&'static [u8]`, a `Vec<u8>` or [`Bytes`], and are not copied.
pub fn open_bytes(label: impl Into<String>, bytes: impl Into<Bytes>) -> Result<Opened, LoadError> {
    let (label, bytes) = (label.into(), bytes.into());
    match Kind::of(&bytes) {
        Some(Kind::Gguf) => Ok(Opened::Gguf(Arc::new(Gguf::from_bytes(label, bytes)?))),
        Some(Kind::Safetensors) => Ok(Opened::Safetensors(Arc::new(Safetensors::from_bytes(label, bytes)?))),
        None => Err(unknown(&label, &bytes)),
    }
}

/// What a file's first bytes say it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Gguf,
    Safetensors,
}

impl Kind {
    /// `start` holds the first [`KIND_BYTES`] of the file, or all of it.
    pub(super) fn of(start: &[u8]) -> Option<Kind> {
        if start.starts_with(&gguf::MAGIC) {
            Some(Kind::Gguf)
        } else if start.get(8) == Some(&b'{') {
            // The header's length, which any eight bytes can be, and the header's first byte.
            Some(Kind::Safetensors)
        } else {
            None
        }
    }
}

/// Neither format, with a word on what else it may be.
pub(super) fn unknown(label: &str, start: &[u8]) -> LoadError {
    let found = match start {
        [] => "an empty file".to_owned(),
        [b'P', b'K', 3, 4, ..] => "a zip archive, as PyTorch writes".to_owned(),
        [0x80, 2..=5, ..] => "a Python pickle".to_owned(),
        _ if start.starts_with(b"version https://git-lfs") => "a Git LFS pointer: the file itself was not fetched".to_owned(),
        _ => format!("a file that starts with \"{}\"", start[..start.len().min(8)].escape_ascii()),
    };
    unsupported(label, "this kind of file", found, "GGUF and safetensors")
}

/// Enough of a file's start for [`Kind::of`] and [`unknown`].
pub(super) const KIND_BYTES: usize = 32;
