//! Names of things: tokens, sequences, blocks and groups of them. Plain numbers that cannot be mixed up.
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
    /// Stands in a block table for a block that was given back, wholly behind its group's window. Nobody reads it.
    pub const NONE: BlockId = BlockId(u32::MAX);

    /// The block's index in the pool.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A pool of blocks and the layers that share it. Layers whose attention reaches equally far back form a group: a sequence has
/// one block table for each group, and in a group with a window it gives blocks back that lie wholly behind it.
///
/// Groups are listed by reach, the farthest first: layers without a window, where there are any, are group 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockGroup {
    /// Blocks in the pool.
    pub blocks: usize,
    /// A token sees itself and the `window - 1` before it; `None`: all before it.
    pub window: Option<usize>,
}

impl BlockGroup {
    /// Index in a block table of the first block that is still read once `cached` tokens are in the cache: entries before it
    /// mean nothing.
    pub fn first_block(&self, cached: usize, block_size: usize) -> usize {
        self.window.map_or(0, |w| (cached + 1).saturating_sub(w) / block_size)
    }
}

/// One block to be copied, in all layers of its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockCopy {
    /// The group.
    pub group: usize,
    /// What is read.
    pub from: BlockId,
    /// What is written.
    pub to: BlockId,
}

/// The most groups of blocks that a model can have.
pub const MAX_GROUPS: usize = 4;
