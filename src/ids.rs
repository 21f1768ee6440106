//! Names of things: tokens, sequences, blocks. Plain numbers that cannot be mixed up.
#![forbid(unsafe_code)]

use std::fmt;

/// A token: its index in the vocabulary.
pub type TokenId = u32;

/// A sequence, unique for the life of its engine and never given out twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SeqId(pub(crate) u64);

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A block of the KV cache: its index in the pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The block's index in the pool.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
