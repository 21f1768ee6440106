//! One group's pool as the ledger sees it: for each block also how many of its holders are *active* (running sequences, pins,
//! copies of the open step), so that the number of blocks that could be had is known without a search. Every other holder is a
//! node of the prefix tree.
//!
//! Invariants: `active <= refs`; `reclaimable` is the number of held blocks without an active holder; a block is at most one
//! node's.
#![forbid(unsafe_code)]

use crate::cache::{BlockPool, NodeId};
use crate::error::{ConfigError, reserved};
use crate::ids::BlockId;

pub(super) struct Kv {
    pool: BlockPool,
    active: Vec<u32>,
    /// The tree's node that has the block.
    nodes: Vec<Option<NodeId>>,
    reclaimable: usize,
}

impl Kv {
    pub(super) fn new(blocks: usize) -> Result<Self, ConfigError> {
        let (mut active, mut nodes) = (reserved("the block pool", blocks)?, reserved("the block pool", blocks)?);
        active.resize(blocks, 0);
        nodes.resize(blocks, None);
        Ok(Kv { pool: BlockPool::new(blocks)?, active, nodes, reclaimable: 0 })
    }

    /// Bytes of [`new`](Self::new).
    pub(super) fn bytes(blocks: usize) -> usize {
        blocks.saturating_mul(size_of::<u32>() + size_of::<Option<NodeId>>()).saturating_add(BlockPool::bytes(blocks))
    }

    /// A free block with one active holder.
    pub(super) fn alloc(&mut self) -> Option<BlockId> {
        let block = self.pool.alloc()?;
        self.active[block.index()] = 1;
        Some(block)
    }

    /// One more active holder.
    pub(super) fn retain(&mut self, block: BlockId) {
        self.change(block, |kv| {
            kv.pool.retain(block);
            kv.active[block.index()] += 1;
        });
    }

    /// One active holder less.
    pub(super) fn release(&mut self, block: BlockId) {
        self.change(block, |kv| {
            kv.active[block.index()] -= 1;
            kv.pool.release(block);
        });
    }

    /// The tree holds it too, as `node`'s.
    pub(super) fn put(&mut self, block: BlockId, node: NodeId) {
        self.change(block, |kv| kv.pool.retain(block));
        self.nodes[block.index()] = Some(node);
    }

    /// The tree holds it no longer.
    pub(super) fn take(&mut self, block: BlockId) {
        self.change(block, |kv| _ = kv.pool.release(block));
        self.nodes[block.index()] = None;
    }

    /// The node whose block it is.
    pub(super) fn node(&self, block: BlockId) -> Option<NodeId> {
        self.nodes[block.index()]
    }

    /// Somebody else holds it than the one who asks: it must not be written.
    pub(super) fn shared(&self, block: BlockId) -> bool {
        self.pool.refs(block) > 1
    }

    /// Holders that are active.
    pub(super) fn users(&self, block: BlockId) -> u32 {
        self.active[block.index()]
    }

    /// Held by the tree only.
    pub(super) fn idle(&self, block: BlockId) -> bool {
        self.active[block.index()] == 0 && self.pool.refs(block) > 0
    }

    /// Blocks that could be had: free ones, and those that only the tree holds.
    pub(super) fn available(&self) -> usize {
        self.pool.free() + self.reclaimable
    }

    pub(super) fn free(&self) -> usize {
        self.pool.free()
    }

    pub(super) fn len(&self) -> usize {
        self.pool.len()
    }

    fn change(&mut self, block: BlockId, act: impl FnOnce(&mut Self)) {
        self.reclaimable -= usize::from(self.idle(block));
        act(self);
        self.reclaimable += usize::from(self.idle(block));
    }

    /// Compares every count with a recount, block by block.
    pub(super) fn check(&self, refs: &[u32], active: &[u32]) {
        self.pool.check();
        for i in 0..self.pool.len() {
            let block = BlockId(i as u32);
            assert_eq!(self.pool.refs(block), refs[i], "references to {block:?}");
            assert_eq!(self.active[i], active[i], "active holders of {block:?}");
        }
        let idle = (0..self.pool.len()).filter(|&i| self.idle(BlockId(i as u32))).count();
        assert_eq!(self.reclaimable, idle, "blocks that could be taken");
    }
}
