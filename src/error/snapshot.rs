//! What can be wrong with a snapshot, or with taking one.
#![forbid(unsafe_code)]

use thiserror::Error;

/// Why a snapshot cannot be taken or taken back. The engine is as it was.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The bytes are not what the format says.
    #[error("snapshot: {at}: expected {expected}, found {found}")]
    Malformed {
        /// The field.
        at: &'static str,
        /// What the format demands there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// Written by another version of the format.
    #[error("snapshot: version {found} is not read by this crate, which reads version {expected}")]
    Version {
        /// What is read.
        expected: u32,
        /// What it is.
        found: u32,
    },
    /// The bytes have changed since they were written.
    #[error("snapshot: damaged: the checksum says {expected:032x}, the bytes give {found:032x}")]
    Checksum {
        /// As written.
        expected: u128,
        /// As the bytes are.
        found: u128,
    },
    /// Of another model.
    #[error("snapshot: made with another model: expected {expected}, found {found}")]
    Model {
        /// The model here, and its fingerprint.
        expected: String,
        /// The snapshot's.
        found: String,
    },
    /// Cached keys and values of another type or shape than the engine's cache has.
    #[error("snapshot: {what}: expected {expected}, found {found}")]
    Cache {
        /// The type or the shape.
        what: &'static str,
        /// The engine's.
        expected: String,
        /// The snapshot's.
        found: String,
    },
    /// Nobody has told the engine which model it runs.
    #[error("the engine's model has no fingerprint: build the engine from files, or call Engine::identify")]
    Unidentified,
    /// A cached value that 8 bits cannot stand for.
    #[error("cached value {value} of token {token} in group {group}: expected a finite number")]
    NotFinite {
        /// Group of layers.
        group: usize,
        /// Position.
        token: usize,
        /// What it is.
        value: f32,
    },
    /// The system has not the memory.
    #[error("the system refused {needed_bytes} bytes for a snapshot")]
    Refused {
        /// Bytes of it.
        needed_bytes: u64,
    },
}

impl SnapshotError {
    pub(crate) fn malformed(at: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        SnapshotError::Malformed { at, expected: expected.to_string(), found: found.to_string() }
    }
}
