//! The host store: where blocks of preempted sequences wait in host memory, instead of being computed anew. Knows slots, not
//! bytes: whoever drives the ledger moves them, as [`Ledger::swap_outs`] and [`Ledger::swap_ins`] say.
//!
//! Invariants: a slot is one waiting sequence's, or free. A sequence has slots for all that its next token sees, or for nothing.
#![forbid(unsafe_code)]

use super::blocks::{Blocks, reserve};
use super::ledger::Ledger;
use super::seq::Seq;
use crate::cache::BlockPool;
use crate::error::{ConfigError, reserved};
use crate::ids::{BlockCopy, BlockGroup, BlockId, MAX_GROUPS};

/// What a sequence has in the host store.
#[derive(Default)]
pub(super) struct Swapped {
    /// Tokens that were computed; 0: nothing is stored.
    pub(super) tokens: usize,
    /// For each group the slots of the last blocks.
    slots: [Vec<BlockId>; MAX_GROUPS],
    /// The copies to the store are not known to be done.
    fresh: bool,
}

pub(super) struct Store {
    pools: Vec<BlockPool>,
    outs: Vec<BlockCopy>,
    pub(super) ins: Vec<BlockCopy>,
}

impl Swapped {
    /// Room for the slots of `len` blocks, where there is a store.
    pub(super) fn reserve(&mut self, len: usize, store: &Store) -> Result<(), ()> {
        let slots = self.slots.iter_mut().zip(&store.pools);
        slots.filter(|(_, pool)| pool.len() > 0).try_for_each(|(slots, _)| reserve(slots, len))
    }
}

impl Store {
    pub(super) fn new(slots: &[usize]) -> Result<Self, ConfigError> {
        let all = slots.iter().fold(0, |sum: usize, n| sum.saturating_add(*n));
        let pools = slots.iter().map(|&n| BlockPool::new(n)).collect::<Result<_, _>>()?;
        Ok(Store { pools, outs: reserved("the host store", all)?, ins: reserved("the host store", all)? })
    }

    /// Bytes of [`new`](Self::new).
    pub(super) fn bytes(slots: &[usize]) -> usize {
        let all = slots.iter().fold(0, |sum: usize, n| sum.saturating_add(*n));
        BlockPool::bytes(all).saturating_add(all.saturating_mul(2 * size_of::<BlockCopy>()))
    }

    /// Slots for a running sequence's blocks, and the copies to them; false where there are too few.
    pub(super) fn put(&mut self, s: &mut Seq, blocks: &Blocks) -> bool {
        let live = |group: &BlockGroup| group.first_block(s.computed, blocks.block_size)..s.computed.div_ceil(blocks.block_size);
        let mut needs = blocks.groups.iter().zip(&self.pools);
        if s.computed == 0 || self.pools.is_empty() || needs.any(|(group, pool)| pool.free() < live(group).len()) {
            return false;
        }
        for (g, group) in blocks.groups.iter().enumerate() {
            for &from in &s.held.tables[g][live(group)] {
                let to = self.pools[g].alloc().expect("as many slots as were counted");
                s.swap.slots[g].push(to);
                self.outs.push(BlockCopy { group: g, from, to });
            }
        }
        (s.swap.tokens, s.swap.fresh) = (s.computed, true);
        true
    }

    /// Copies of the stored blocks to a sequence's new ones, from the `skip`-th block of its tables on.
    pub(super) fn fetch(&mut self, s: &Seq, skip: usize, blocks: &Blocks) {
        let end = s.swap.tokens.div_ceil(blocks.block_size);
        for g in 0..blocks.groups.len() {
            let slots = &s.swap.slots[g];
            for (k, &from) in (end - slots.len()..end).zip(slots).filter(|(k, _)| *k >= skip) {
                self.ins.push(BlockCopy { group: g, from, to: s.held.tables[g][k] });
            }
        }
    }

    /// Frees a sequence's slots.
    pub(super) fn drop_slots(&mut self, swap: &mut Swapped) {
        for (g, slots) in swap.slots.iter_mut().enumerate() {
            slots.drain(..).for_each(|slot| _ = self.pools[g].release(slot));
        }
        (swap.tokens, swap.fresh) = (0, false);
    }

    pub(super) fn check<'a>(&self, seqs: impl Iterator<Item = &'a Seq>, blocks: &Blocks) {
        let mut refs: Vec<Vec<u32>> = self.pools.iter().map(|p| vec![0; p.len()]).collect();
        for s in seqs {
            for (g, slots) in s.swap.slots.iter().enumerate() {
                slots.iter().for_each(|slot| refs[g][slot.index()] += 1);
                let Some(group) = blocks.groups.get(g) else { continue };
                let (bs, tokens) = (blocks.block_size, s.swap.tokens);
                let live = if tokens > 0 { tokens.div_ceil(bs) - group.first_block(tokens, bs) } else { 0 };
                assert_eq!(slots.len(), live, "{}: slots of group {g} for {tokens} tokens", s.id);
            }
        }
        for (pool, refs) in self.pools.iter().zip(&refs) {
            pool.check();
            for (i, &n) in refs.iter().enumerate() {
                assert_eq!(pool.refs(BlockId(i as u32)), n, "references to slot {i}");
            }
        }
    }
}

impl Ledger {
    /// Blocks to copy to the host store, `from` being a block of the cache and `to` a slot of the store: before the
    /// [copies](Ledger::copies) and the [`swap_ins`](Ledger::swap_ins) of the step whose policy swapped them out, and even where
    /// its plan is empty. They count as done when the next step begins.
    pub fn swap_outs(&self) -> &[BlockCopy] {
        &self.store.outs
    }

    /// Blocks to copy from the host store before the open step's forward pass, `from` being a slot and `to` a block.
    pub fn swap_ins(&self) -> &[BlockCopy] {
        &self.store.ins
    }

    /// Says that [`swap_outs`](Ledger::swap_outs) could not be done: the sequences concerned will be computed anew, and the open step
    /// is [aborted](Ledger::abort_step), as it may have one of them in its plan already.
    pub fn swap_failed(&mut self) {
        self.abort_step();
        self.store.outs.clear();
        for s in self.seqs.all_mut().filter(|s| s.swap.fresh) {
            self.store.drop_slots(&mut s.swap);
        }
    }

    /// The swap-outs so far are done.
    pub(super) fn settle_swaps(&mut self) {
        if !self.store.outs.is_empty() {
            self.store.outs.clear();
            self.seqs.all_mut().for_each(|s| s.swap.fresh = false);
        }
    }
}
