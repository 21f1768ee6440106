//! Words for errors about files: names that came out of a file are quoted, escaped and clipped, so that a hostile one can
//! neither fill a log nor move a terminal's cursor.
#![forbid(unsafe_code)]

use crate::error::LoadError;

/// A name from a file, fit to stand in a message.
pub(super) fn quoted(name: &str) -> String {
    format!("{:?}", clipped(name))
}

/// At most `CLIP` bytes of `text`, cut between characters.
pub(super) fn clipped(text: &str) -> &str {
    &text[..text.floor_char_boundary(CLIP)]
}

pub(super) fn unsupported(file: &str, what: impl Into<String>, found: impl ToString, supported: impl Into<String>) -> LoadError {
    LoadError::Unsupported { file: file.to_owned(), what: what.into(), found: found.to_string(), supported: supported.into() }
}

/// Longer than any tensor name or metadata key of a published model.
const CLIP: usize = 160;
