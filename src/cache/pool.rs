//! The blocks of a KV cache, counted. Everything is O(1) and nothing is allocated after construction. The pool does not
//! know who holds a block: it counts.
//!
//! Invariant: a block is free or has references, never both.
#![forbid(unsafe_code)]

use crate::error::{ConfigError, reserved};
use crate::ids::BlockId;

/// Reference counts and a free list. See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct BlockPool {
    refs: Vec<u32>,
    free: Vec<BlockId>,
}

impl BlockPool {
    /// `len` free blocks.
    ///
    /// # Errors
    /// [`ConfigError`] where `len` does not fit a [`BlockId`], or the system has not the memory.
    pub(crate) fn new(len: usize) -> Result<Self, ConfigError> {
        let names = u32::try_from(len).map_err(|_| ConfigError::invalid("blocks", format!("at most {}", u32::MAX), len))?;
        let (mut refs, mut free) = (reserved("the block pool", len)?, reserved("the block pool", len)?);
        refs.resize(len, 0);
        // Reversed, so that low blocks go out first: a small load stays in a small part of the cache.
        free.extend((0..names).rev().map(BlockId));
        Ok(BlockPool { refs, free })
    }

    /// Bytes of [`new`](Self::new).
    pub(crate) fn bytes(len: usize) -> usize {
        len.saturating_mul(size_of::<u32>() + size_of::<BlockId>())
    }

    /// A free block, now with one reference; `None` where all are taken.
    pub(crate) fn alloc(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        debug_assert_eq!(self.refs[block.index()], 0, "{block:?} is free and held");
        self.refs[block.index()] = 1;
        Some(block)
    }

    /// Adds a reference to a held block.
    ///
    /// # Panics
    /// Where the block is free: the caller lost count.
    pub(crate) fn retain(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.index()];
        assert!(*refs > 0, "{block:?} is retained while free");
        *refs += 1;
    }

    /// Takes a reference away and says whether that was the last one, which frees the block.
    ///
    /// # Panics
    /// Where the block is free: a double release. Checked in every build, because the alternative is two sequences in one
    /// block and wrong answers.
    pub(crate) fn release(&mut self, block: BlockId) -> bool {
        let refs = &mut self.refs[block.index()];
        assert!(*refs > 0, "{block:?} is released twice");
        *refs -= 1;
        let last = *refs == 0;
        if last {
            self.free.push(block);
        }
        last
    }

    /// References to a block; 0 means free.
    pub(crate) fn refs(&self, block: BlockId) -> u32 {
        self.refs[block.index()]
    }

    /// Free blocks.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// All blocks, free or not.
    pub(crate) fn len(&self) -> usize {
        self.refs.len()
    }

    /// Recounts everything, for tests.
    ///
    /// # Panics
    /// Where the invariant is broken.
    pub(crate) fn check(&self) {
        let mut listed = vec![false; self.len()];
        for block in &self.free {
            assert!(!std::mem::replace(&mut listed[block.index()], true), "{block:?} is free twice");
        }
        for (i, (&refs, &free)) in self.refs.iter().zip(&listed).enumerate() {
            assert_eq!(refs == 0, free, "block {i}: {refs} references, free: {free}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// The model: a map from held blocks to their counts.
        #[test]
        fn a_pool_counts_as_a_map_does(len in 1_usize..9, acts in prop::collection::vec((0_u8..3, 0_usize..9), 0..200)) {
            let mut pool = BlockPool::new(len).unwrap();
            let mut model = BTreeMap::<BlockId, u32>::new();
            for (act, pick) in acts {
                let held = model.keys().copied().nth(pick % model.len().max(1));
                match (act, held) {
                    (0, _) => match pool.alloc() {
                        Some(block) => prop_assert_eq!(model.insert(block, 1), None),
                        None => prop_assert_eq!(model.len(), len),
                    },
                    (1, Some(block)) => {
                        pool.retain(block);
                        *model.get_mut(&block).unwrap() += 1;
                    }
                    (2, Some(block)) => {
                        let left = model[&block] - 1;
                        prop_assert_eq!(pool.release(block), left == 0);
                        if left == 0 { model.remove(&block); } else { model.insert(block, left); }
                    }
                    _ => {}
                }
                pool.check();
                prop_assert_eq!(pool.free(), len - model.len());
                for b in (0..len as u32).map(BlockId) {
                    prop_assert_eq!(pool.refs(b), model.get(&b).copied().unwrap_or(0));
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "released twice")]
    fn a_double_release_is_caught() {
        let mut pool = BlockPool::new(1).unwrap();
        let block = pool.alloc().unwrap();
        pool.release(block);
        pool.release(block);
    }
}
