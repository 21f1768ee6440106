//! Every block and who holds it. What runs (and what is pinned) has a [`Hold`]; what was computed lies in the prefix tree, where
//! others find it. Nothing else holds blocks: a sequence that ends, waits or is preempted leaves its blocks to the tree, which
//! gives them up, the least recently used first, when somebody needs the room.
//!
//! | a hold's blocks | who may write them |
//! | --- | --- |
//! | `0..nodes.len()`: whole, computed, in the tree | nobody |
//! | the rest | the holder alone; one that a fork shares is copied first |
//!
//! A group with a window may have holes: entries of a table that lie behind it are [`BlockId::NONE`], and nodes of the tree may
//! have lost their block of it. A prefix can be used where the blocks that its next token sees are all there.
//!
//! Invariants: in a group without a window every node has its block, so that taking a leaf's blocks breaks no path; a node on
//! some hold's path is never taken.
#![forbid(unsafe_code)]

use super::kv::Kv;
use crate::cache::{NodeId, RadixTree, RootKey};
use crate::error::{ConfigError, SubmitError};
use crate::ids::{BlockGroup, BlockId, MAX_GROUPS, TokenId};

/// The blocks of one running sequence, or of a pin.
#[derive(Default)]
pub(super) struct Hold {
    /// The path in the tree that the tables start with.
    pub(super) nodes: Vec<NodeId>,
    /// A table for each group, all of one length; empty for groups that there are not.
    pub(super) tables: [Vec<BlockId>; MAX_GROUPS],
    /// Entries before this one were given back, or never needed.
    first: [usize; MAX_GROUPS],
}

/// A cached prefix.
#[derive(Clone, Copy, Default)]
pub(super) struct Found {
    /// Whole blocks.
    pub(super) nodes: usize,
    /// A block after them whose first tokens match.
    pub(super) partial: Option<NodeId>,
    /// Tokens in all.
    pub(super) tokens: usize,
}

pub(super) struct Blocks {
    pub(super) block_size: usize,
    pub(super) groups: Vec<BlockGroup>,
    pub(super) pools: Vec<Kv>,
    pub(super) tree: RadixTree,
    /// Blocks taken from the tree so far.
    pub(super) evicted: u64,
}

impl Hold {
    /// Room for `len` entries in each of `groups` tables.
    ///
    /// # Errors
    /// Where the system has not the memory.
    pub(super) fn reserve(&mut self, len: usize, groups: usize) -> Result<(), ()> {
        reserve(&mut self.nodes, len)?;
        self.tables[..groups].iter_mut().try_for_each(|t| reserve(t, len))
    }

    pub(super) fn len(&self) -> usize {
        self.tables[0].len()
    }

    /// Blocks of a group, without the holes.
    pub(super) fn blocks(&self, g: usize) -> usize {
        self.tables[g].iter().filter(|b| **b != BlockId::NONE).count()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tables[0].is_empty()
    }
}

/// Room for `len` values in all.
pub(super) fn reserve<T>(list: &mut Vec<T>, len: usize) -> Result<(), ()> {
    list.try_reserve_exact(len.saturating_sub(list.len())).map_err(|_| ())
}

impl Blocks {
    /// # Errors
    /// [`ConfigError`] where the system has not the memory.
    pub(super) fn new(block_size: usize, groups: &[BlockGroup]) -> Result<Self, ConfigError> {
        let pools = groups.iter().map(|g| Kv::new(g.blocks)).collect::<Result<_, _>>()?;
        let tree = RadixTree::new(nodes(groups), block_size, groups.len())?;
        Ok(Blocks { block_size, pools, tree, groups: groups.to_vec(), evicted: 0 })
    }

    /// Bytes of [`new`](Self::new).
    pub(super) fn bytes(block_size: usize, groups: &[BlockGroup]) -> usize {
        let tree = RadixTree::bytes(nodes(groups), block_size, groups.len());
        groups.iter().map(|g| Kv::bytes(g.blocks)).fold(tree, usize::saturating_add)
    }

    /// The longest prefix of `tokens` that can be used, and each node on the way, some perhaps beyond it. Changes nothing.
    /// Cost: O(tokens * log of siblings).
    pub(super) fn find(&self, key: RootKey, tokens: &[TokenId], mut path: impl FnMut(NodeId)) -> Found {
        let bs = self.block_size;
        // For each group, the index from which on no block is missing.
        let mut from = [0; MAX_GROUPS];
        let (mut best, mut at) = (Found::default(), None);
        for (depth, chunk) in tokens.chunks(bs).enumerate() {
            let Some((node, len)) = self.tree.find(at, key, chunk) else { break };
            let whole = len == bs;
            let tokens = depth * bs + len;
            let mut usable = true;
            for (g, group) in self.groups.iter().enumerate() {
                if self.tree.block(node, g).is_none() {
                    from[g] = depth + 1;
                }
                usable &= from[g] <= group.first_block(tokens, bs);
            }
            if usable {
                best = Found { nodes: depth + usize::from(whole), partial: (!whole).then_some(node), tokens };
            }
            if !whole {
                break;
            }
            path(node);
            at = Some(node);
        }
        best
    }

    /// Takes hold of the longest cached prefix of `tokens`, as far as its blocks are whole. A partial one after them is the
    /// caller's to copy.
    pub(super) fn adopt(&mut self, key: RootKey, tokens: &[TokenId], hold: &mut Hold) -> Found {
        debug_assert!(hold.is_empty() && hold.nodes.is_empty(), "a hold adopts once");
        let found = self.find(key, tokens, |node| hold.nodes.push(node));
        hold.nodes.truncate(found.nodes);
        for &node in &hold.nodes {
            self.tree.retain(node);
        }
        for (g, group) in self.groups.iter().enumerate() {
            let first = group.first_block(found.tokens, self.block_size);
            for (k, &node) in hold.nodes.iter().enumerate() {
                let block = if k < first { None } else { self.tree.block(node, g) };
                if let Some(block) = block {
                    self.pools[g].retain(block);
                    self.tree.unlist(g, node);
                }
                hold.tables[g].push(block.unwrap_or(BlockId::NONE));
            }
        }
        found
    }

    /// Tokens from `start` on that the hold could come to have room for, at most `want`; entries before `skip` of a group need no
    /// block, and `copies` blocks of each are for others.
    pub(super) fn room(&self, hold: &Hold, skip: [usize; MAX_GROUPS], copies: usize, start: usize, want: usize) -> usize {
        let blocks = self.pools.iter().zip(skip).map(|(p, skip)| (hold.len().max(skip) + p.available()).saturating_sub(copies));
        let room = blocks.map(|b| b.saturating_mul(self.block_size).saturating_sub(start));
        room.min().map_or(0, |room| room.min(want))
    }

    /// Gives the hold blocks for `tokens` tokens, as [`room`](Self::room) promised; entries before `skip` of a group stay empty.
    pub(super) fn extend(&mut self, hold: &mut Hold, tokens: usize, skip: [usize; MAX_GROUPS]) {
        for (g, skip) in skip.into_iter().enumerate().take(self.groups.len()) {
            for k in hold.tables[g].len()..tokens.div_ceil(self.block_size) {
                let block = match k < skip {
                    true => BlockId::NONE,
                    false => self.take(g).expect("as many blocks as were counted"),
                };
                hold.tables[g].push(block);
            }
        }
    }

    /// A block with one active holder, taken from the tree where none is free.
    pub(super) fn take(&mut self, g: usize) -> Option<BlockId> {
        loop {
            if let Some(block) = self.pools[g].alloc() {
                return Some(block);
            }
            if !self.evict(g) {
                return None;
            }
        }
    }

    /// A second hold of the first `len` blocks.
    pub(super) fn share(&mut self, from: &Hold, len: usize, to: &mut Hold) {
        to.first = from.first;
        for &node in &from.nodes {
            self.tree.retain(node);
            to.nodes.push(node);
        }
        for g in 0..self.groups.len() {
            for &block in &from.tables[g][..len] {
                if block != BlockId::NONE {
                    self.pools[g].retain(block);
                }
                to.tables[g].push(block);
            }
        }
    }

    /// Puts whole blocks of the `tokens` that are computed into the tree. Where it has the same already, the hold takes the tree's
    /// and frees its own: same tokens, same bits.
    pub(super) fn donate(&mut self, hold: &mut Hold, key: RootKey, tokens: &[TokenId]) {
        let bs = self.block_size;
        while let Some(chunk) = tokens.get(hold.nodes.len() * bs..(hold.nodes.len() + 1) * bs) {
            if !self.donate_block(hold, key, chunk) {
                return;
            }
        }
    }

    /// Ends a hold: the blocks of the `tokens` that are computed go to the tree, the others are free.
    pub(super) fn retire(&mut self, hold: &mut Hold, key: RootKey, tokens: &[TokenId]) {
        self.donate(hold, key, tokens);
        let tail = &tokens[(hold.nodes.len() * self.block_size).min(tokens.len())..];
        if !tail.is_empty() && tail.len() < self.block_size {
            self.donate_block(hold, key, tail);
        }
        self.release(hold);
    }

    /// Ends a hold and keeps nothing of it that is not in the tree.
    pub(super) fn release(&mut self, hold: &mut Hold) {
        for k in (0..hold.len()).rev() {
            for g in 0..self.groups.len() {
                self.give_back(g, hold.tables[g][k], true);
            }
            if let Some(node) = hold.nodes.get(k) {
                self.tree.release(*node);
            }
        }
        hold.nodes.clear();
        hold.tables.iter_mut().for_each(Vec::clear);
        hold.first = [0; MAX_GROUPS];
    }

    /// Gives back what lies behind the windows of the token after the `computed` first ones. The tree keeps it as long as nobody
    /// needs the room, but no longer: it is of use to those alone who part from this sequence just there.
    pub(super) fn slide(&mut self, hold: &mut Hold, computed: usize) {
        for g in 0..self.groups.len() {
            let first = self.groups[g].first_block(computed, self.block_size).min(hold.len());
            for k in hold.first[g]..first {
                let block = std::mem::replace(&mut hold.tables[g][k], BlockId::NONE);
                self.give_back(g, block, false);
            }
            hold.first[g] = hold.first[g].max(first);
        }
    }

    /// Cuts the tables to `len` blocks, none of them in the tree.
    pub(super) fn truncate(&mut self, hold: &mut Hold, len: usize) {
        debug_assert!(len >= hold.nodes.len(), "blocks in the tree stay");
        for g in 0..self.groups.len() {
            for k in len..hold.tables[g].len() {
                self.give_back(g, hold.tables[g][k], true);
            }
            hold.tables[g].truncate(len);
        }
    }

    /// For each group the first block that the token after `tokens` sees.
    pub(super) fn first_blocks(&self, tokens: usize) -> [usize; MAX_GROUPS] {
        let mut first = [0; MAX_GROUPS];
        for (first, group) in first.iter_mut().zip(&self.groups) {
            *first = group.first_block(tokens, self.block_size);
        }
        first
    }

    /// Blocks of the first group that a hold needs at most once so many tokens are computed.
    pub(super) fn blocks_at(&self, tokens: usize) -> usize {
        let group = &self.groups[0];
        tokens.div_ceil(self.block_size).saturating_sub(group.first_block(tokens, self.block_size))
    }

    /// The longest sequence that could run alone with the blocks that are not pinned, `pinned` of each group.
    pub(super) fn longest(&self, pinned: &[usize; MAX_GROUPS]) -> usize {
        let of = |(g, group): (usize, &BlockGroup)| {
            let blocks = group.blocks.saturating_sub(pinned[g]);
            match group.window {
                // What the next token sees, wherever it lies in its blocks, and the block that it goes to.
                Some(w) if blocks > (w - 1).div_ceil(self.block_size) + 1 => usize::MAX,
                _ => blocks.saturating_mul(self.block_size),
            }
        };
        self.groups.iter().enumerate().map(of).min().unwrap_or(0)
    }

    fn windowed(&self, g: usize) -> bool {
        self.groups[g].window.is_some()
    }

    /// Takes a block that the tree has as well, and the leaf whose it is, out of there: its holder is about to write on in it.
    pub(super) fn disown(&mut self, g: usize, block: BlockId) {
        if let Some(leaf) = self.pools[g].node(block) {
            self.take_blocks(leaf);
            self.tree.remove(leaf);
        }
    }

    /// Lets go of a block. Where only the tree has it then, its group may take it from there.
    pub(super) fn give_back(&mut self, g: usize, block: BlockId, recent: bool) {
        if block == BlockId::NONE {
            return;
        }
        self.pools[g].release(block);
        if let Some(node) = self.pools[g].node(block).filter(|_| self.windowed(g) && self.pools[g].idle(block)) {
            self.tree.list(g, node, recent);
        }
    }

    /// Puts the block after those that are in the tree there too, holding its first `chunk`.
    fn donate_block(&mut self, hold: &mut Hold, key: RootKey, chunk: &[TokenId]) -> bool {
        let (k, parent) = (hold.nodes.len(), hold.nodes.last().copied());
        debug_assert!(k < hold.len(), "what is computed lies in blocks");
        let node = match self.tree.find(parent, key, chunk) {
            Some((node, len)) if len == chunk.len() => node,
            Some((node, len)) if len == self.tree.len_of(node) => {
                // A part of a block, and now there is more of it. Nobody stands on parts.
                self.take_blocks(node);
                self.tree.grow(node, chunk);
                node
            }
            _ => match self.new_node(parent, key, chunk) {
                Some(node) => node,
                None => return false,
            },
        };
        self.tree.retain(node);
        hold.nodes.push(node);
        for g in 0..self.groups.len() {
            let ours = hold.tables[g][k];
            if ours == BlockId::NONE {
                continue;
            }
            match self.tree.block(node, g) {
                Some(theirs) if theirs == ours => {}
                Some(theirs) => {
                    self.pools[g].retain(theirs);
                    self.tree.unlist(g, node);
                    self.pools[g].release(ours);
                    hold.tables[g][k] = theirs;
                }
                // A node that has more tokens than ours has lost its block: ours would not do.
                None if self.tree.len_of(node) == chunk.len() => {
                    self.pools[g].put(ours, node);
                    self.tree.set_block(node, g, Some(ours));
                }
                None => {}
            }
        }
        true
    }

    fn new_node(&mut self, parent: Option<NodeId>, key: RootKey, chunk: &[TokenId]) -> Option<NodeId> {
        let node = self.tree.insert(parent, key, chunk);
        node.or_else(|| if self.drop_oldest() { self.tree.insert(parent, key, chunk) } else { None })
    }

    /// Takes a block of group `g` from the tree; it is free now, unless a copy of the open step reads it still.
    fn evict(&mut self, g: usize) -> bool {
        if !self.windowed(g) {
            return self.drop_oldest();
        }
        let Some(node) = self.tree.oldest_in(g) else { return false };
        self.forget(g, node);
        true
    }

    /// Drops the leaf that nobody has used for the longest time.
    fn drop_oldest(&mut self) -> bool {
        let Some(node) = self.tree.oldest().filter(|n| self.tree.is_leaf(*n)) else { return false };
        self.take_blocks(node);
        self.tree.remove(node);
        true
    }

    fn take_blocks(&mut self, node: NodeId) {
        debug_assert_eq!(self.tree.users(node), 0, "somebody stands on {node:?}");
        for g in 0..self.groups.len() {
            self.forget(g, node);
        }
    }

    fn forget(&mut self, g: usize, node: NodeId) {
        self.tree.unlist(g, node);
        if let Some(block) = self.tree.set_block(node, g, None) {
            self.pools[g].take(block);
            self.evicted += 1;
        }
    }
}

/// Nodes of the tree. Without a window every node has a block; with windows alone, nodes without blocks keep long paths together.
fn nodes(groups: &[BlockGroup]) -> usize {
    groups[0].blocks.saturating_mul(if groups[0].window.is_some() { 4 } else { 1 })
}

/// What a sequence's memory would have taken.
pub(super) fn refused(tokens: usize, blocks: usize, groups: usize) -> SubmitError {
    let entries = blocks.saturating_mul(groups + 1).saturating_mul(size_of::<BlockId>());
    let needed_bytes = tokens.saturating_mul(size_of::<TokenId>()).saturating_add(entries) as u64;
    SubmitError::Refused { tokens, needed_bytes }
}
