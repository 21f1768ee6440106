//! Prefixes that stay: pinned ones, which nobody's need for room takes away, and ones that come from elsewhere, computed
//! earlier or on another machine.
//!
//! Invariant: beside what is pinned every living sequence could still run alone.
#![forbid(unsafe_code)]

use super::blocks::{Found, Hold, refused};
use super::ledger::Ledger;
use crate::cache::RootKey;
use crate::error::SubmitError;
use crate::ids::{BlockId, MAX_GROUPS, TokenId};

/// A pinned prefix: see [`Ledger::pin`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PinId(u64);

/// A block that holds a part of a sequence's cached tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CachedBlock {
    /// Its group.
    pub group: usize,
    /// Its index in the sequence's block table.
    pub index: usize,
    /// The block.
    pub block: BlockId,
    /// Tokens of the sequence in it, from its start on.
    pub tokens: usize,
}

#[derive(Default)]
pub(super) struct Pins {
    pins: Vec<(PinId, Hold)>,
    serial: u64,
    /// Blocks of each group that pins hold; those of two pins count twice.
    pub(super) blocks: [usize; MAX_GROUPS],
}

impl Pins {
    pub(super) fn is_empty(&self) -> bool {
        self.pins.is_empty()
    }

    pub(super) fn holds(&self) -> impl Iterator<Item = &Hold> {
        self.pins.iter().map(|(_, hold)| hold)
    }
}

impl Ledger {
    /// Keeps the cached prefix of `tokens` until it is [unpinned](Self::unpin), whatever room others need, and says how many
    /// tokens it has: whole blocks of those that are cached under `key` now, for sequences of up to `total` tokens.
    ///
    /// # Errors
    /// [`SubmitError::Parameter`] where not even one block of them is cached; [`SubmitError::TooLong`] where some sequence could
    /// not run any more beside it; [`SubmitError::Refused`] where the system has not the memory.
    pub fn pin(&mut self, key: u64, tokens: &[TokenId], total: usize) -> Result<(PinId, usize), SubmitError> {
        let (bs, root) = (self.cfg.block_size, self.root(key, total));
        let blocks = tokens.len() / bs;
        let (mut hold, mut tokens) = (Hold::default(), tokens);
        let memory = hold.reserve(blocks, self.cfg.groups.len()).and_then(|()| self.pins.pins.try_reserve(1).map_err(|_| ()));
        memory.map_err(|()| refused(tokens.len(), blocks, self.cfg.groups.len()))?;
        // What can be used up to the middle of a block need not be usable up to its start.
        let found = loop {
            let found = self.blocks.find(root, tokens, |_| ());
            if found.partial.is_none() {
                break found;
            }
            tokens = &tokens[..found.nodes * bs];
        };
        if found.nodes == 0 {
            let expected = "a prefix of which at least one whole block is cached";
            return Err(SubmitError::Parameter { name: "tokens", expected, found: format!("none of {blocks} blocks cached") });
        }
        self.blocks.adopt(root, &tokens[..found.tokens], &mut hold);
        let mut held = self.pins.blocks;
        held.iter_mut().enumerate().for_each(|(g, held)| *held += hold.blocks(g));
        let limit = self.blocks.longest(&held);
        if let Some(tokens) = self.seqs.all().map(|s| s.limit).filter(|l| *l > limit).max() {
            self.blocks.release(&mut hold);
            return Err(SubmitError::TooLong { tokens, what: "the cache beside the pinned prefix", limit });
        }
        let id = PinId(self.pins.serial);
        self.pins.serial += 1;
        self.pins.blocks = held;
        self.pins.pins.push((id, hold));
        Ok((id, found.tokens))
    }

    /// Lets a pinned prefix go: it stays cached as long as nobody needs the room.
    ///
    /// # Errors
    /// [`SubmitError::Parameter`] for one that is not pinned any more.
    pub fn unpin(&mut self, pin: PinId) -> Result<(), SubmitError> {
        let Some(at) = self.pins.pins.iter().position(|(id, _)| *id == pin) else {
            return Err(SubmitError::Parameter { name: "pin", expected: "one not unpinned yet", found: format!("{pin:?}") });
        };
        let (_, mut hold) = self.pins.pins.remove(at);
        self.pins.blocks.iter_mut().enumerate().for_each(|(g, held)| *held -= hold.blocks(g));
        self.blocks.release(&mut hold);
        Ok(())
    }

    /// The blocks that hold what is cached of `tokens` under `key`, as far as a sequence of just these tokens could use it:
    /// tokens, and the blocks of those that the next token sees. Of a group with a window also the blocks of the `back` tokens
    /// before those, as far as they are still cached without a gap. Of a sequence that runs, whole blocks. Valid until the
    /// next call that changes the ledger.
    pub fn cached_blocks(&self, key: u64, tokens: &[TokenId], back: usize) -> (usize, Vec<CachedBlock>) {
        let mut path = Vec::new();
        let Found { nodes, partial, tokens } = self.blocks.find(self.root(key, tokens.len()), tokens, |node| path.push(node));
        path.truncate(nodes);
        path.extend(partial);
        let (bs, mut all) = (self.cfg.block_size, Vec::new());
        for (group, g) in self.cfg.groups.iter().enumerate() {
            let block = |index: usize| path.get(index).and_then(|&node| self.blocks.tree.block(node, group));
            let mut first = g.first_block(tokens, bs);
            let least = g.first_block(tokens, 1).saturating_sub(back) / bs;
            while first > least && block(first - 1).is_some() {
                first -= 1;
            }
            for index in first..tokens.div_ceil(bs) {
                let block = block(index).expect("a usable prefix has the blocks that its next token sees");
                all.push(CachedBlock { group, index, block, tokens: bs.min(tokens - index * bs) });
            }
        }
        (tokens, all)
    }

    /// Takes a prefix in that was computed elsewhere: the first `cached` of `tokens`, in the regime of a sequence of so many.
    /// `fill` is handed the blocks that are not cached yet, to write what they are to hold; the prefix tree has them then.
    /// Where `fill` fails, nothing has changed, but that cached blocks may have made room.
    ///
    /// `from` says for each group the first token that `fill` could write, where that is before what the next token sees: as much
    /// is taken in as there is room for. Those who part from the prefix a little before its end find what they see then.
    ///
    /// # Errors
    /// [`SubmitError::Parameter`] while a step is open, which may yet write to blocks of a sequence that was cancelled since;
    /// [`SubmitError::TooLong`] where there are not as many blocks to be had, [`SubmitError::Refused`], and what `fill` says.
    pub fn import<E: From<SubmitError>>(
        &mut self,
        key: u64,
        tokens: &[TokenId],
        cached: usize,
        from: &[usize],
        fill: impl FnOnce(&[CachedBlock]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.step_is_open() {
            let (name, expected) = ("import", "between two steps");
            return Err(SubmitError::Parameter { name, expected, found: "in an open step".into() }.into());
        }
        let (bs, root) = (self.cfg.block_size, self.root(key, tokens.len()));
        let done = &tokens[..cached.min(tokens.len())];
        let (blocks, groups) = (done.len().div_ceil(bs), self.cfg.groups.len());
        let mut hold = Hold::default();
        hold.reserve(blocks, groups).map_err(|()| refused(done.len(), blocks, groups))?;
        if self.blocks.adopt(root, done, &mut hold).tokens == done.len() {
            // It is there, and now the most recently used.
            self.blocks.release(&mut hold);
            return Ok(());
        }
        let known = hold.len();
        let least = self.blocks.first_blocks(done.len());
        let mut skip = least;
        for (skip, from) in skip.iter_mut().zip(from) {
            *skip = from.div_ceil(bs).min(*skip);
        }
        if self.blocks.room(&hold, skip, 0, 0, done.len()) < done.len() {
            skip = least;
        }
        let room = self.blocks.room(&hold, skip, 0, 0, done.len());
        if room < done.len() {
            self.blocks.release(&mut hold);
            return Err(SubmitError::TooLong { tokens: done.len(), what: "what the cache has free", limit: room }.into());
        }
        self.blocks.extend(&mut hold, done.len(), skip);
        let new: Vec<_> = (0..groups)
            .flat_map(|group| (skip[group].max(known)..blocks).map(move |index| (group, index)))
            .map(|(group, index)| {
                let (block, tokens) = (hold.tables[group][index], bs.min(done.len() - index * bs));
                CachedBlock { group, index, block, tokens }
            })
            .collect();
        let filled = fill(&new);
        match filled {
            Ok(()) => self.blocks.retire(&mut hold, root, done),
            Err(_) => self.blocks.release(&mut hold),
        }
        filled
    }

    fn root(&self, key: u64, total: usize) -> RootKey {
        RootKey { key, regime: (self.cfg.regime)(total) }
    }
}
