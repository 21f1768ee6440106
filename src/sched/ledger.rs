//! The mechanism of scheduling: every sequence, every block, and what may become of them. It decides nothing: policies do,
//! through [`StepBuilder`](super::StepBuilder), and hosts do, through the calls below. Knows no model, no bytes and no clock.
//!
//! | a running sequence's positions | in the cache | its blocks there |
//! | --- | --- | --- |
//! | `0..cached` | valid, in the regime of its length | whole ones lie in the prefix tree, for everybody |
//! | `cached..total` | to be run | its own; a block that is shared is copied before it is written |
//!
//! What does not run holds no blocks: what was computed of it lies in the tree, and is found again when it is admitted, as far as
//! nobody needed the room. So is what any other sequence with the same key has computed.
//!
//! Invariants: a block is held by what runs, by pins and by the tree. At most `step_seqs` sequences run. A sequence's memory is
//! reserved when it is submitted or resumed, so that a step allocates nothing. A failed call changes nothing.
#![forbid(unsafe_code)]

use super::blocks::{Blocks, Hold, refused, reserve};
use super::pins::Pins;
use super::seq::{Seq, SeqView, Slab, State};
use super::step::Step;
use super::swap::{Store, Swapped};
use crate::cache::RootKey;
use crate::error::{ConfigError, SubmitError};
use crate::ids::{BlockGroup, MAX_GROUPS, SeqId, TokenId};
use std::mem;
use std::time::Duration;

/// Names the rotary regime of a sequence of so many known tokens: cached keys are valid only in the regime that they were
/// written in.
pub type Regime = Box<dyn Fn(usize) -> u32 + Send>;

/// Sizes of a [`Ledger`].
pub struct LedgerConfig {
    /// The cache's pools of blocks, by how far back their layers reach: 1 to [`MAX_GROUPS`].
    pub groups: Vec<BlockGroup>,
    /// For each group the blocks of the host store, for [`Preempt::Swap`](super::Preempt::Swap); empty: there is none.
    pub swap: Vec<usize>,
    /// Tokens in a block.
    pub block_size: usize,
    /// Sequences at a time, whatever their state.
    pub max_seqs: usize,
    /// Sequences in one step, and the most that run at a time.
    pub step_seqs: usize,
    /// Tokens in one step, guesses included.
    pub step_tokens: usize,
    /// Longest sequence of the model.
    pub context: usize,
    /// Guesses a sequence and step; 0 where nothing drafts.
    pub max_draft: usize,
    /// Rotary regime by length; one for all lengths by default.
    pub regime: Regime,
}

impl LedgerConfig {
    /// Room for `blocks` blocks of `block_size` tokens and a model of `context` positions without windows; the rest at moderate
    /// values: 1024 sequences, steps of 256 sequences and 2048 tokens, no drafts, no host store.
    pub fn new(blocks: usize, block_size: usize, context: usize) -> Self {
        LedgerConfig {
            groups: vec![BlockGroup { blocks, window: None }],
            swap: Vec::new(),
            block_size,
            max_seqs: 1024,
            step_seqs: 256,
            step_tokens: 2048,
            context,
            max_draft: 0,
            regime: Box::new(|_| 0),
        }
    }
}

/// A sequence about to be submitted.
#[derive(Clone, Debug, Default)]
pub struct NewSeq {
    /// The prompt, at least one token.
    pub tokens: Vec<TokenId>,
    /// Tokens that may be appended, at least one.
    pub max_tokens: usize,
    /// Higher is more urgent.
    pub priority: i32,
    /// When its owner would like it done. Policies may look at it; the ledger does not.
    pub deadline: Option<Duration>,
    /// Keep it when it finishes, for a follow-up.
    pub hold: bool,
    /// Cached blocks are shared among sequences of one key only: what else than tokens decides what they hold, as an adapter
    /// does, or who may profit from whom.
    pub key: u64,
    /// Take up no more cached tokens than this: the others are run, because somebody wants to see them run. Those that it has
    /// run itself count as seen.
    pub reuse: Option<usize>,
}

/// Sequences by state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// With tokens to run, not admitted.
    pub waiting: usize,
    /// Admitted.
    pub running: usize,
    /// Finished and kept.
    pub held: usize,
}

/// What the cache has done so far, and holds now. Blocks are those of the first group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct CacheStats {
    /// Blocks there are.
    pub blocks: usize,
    /// Of them, blocks that running sequences and pins hold.
    pub active: usize,
    /// Of them, blocks that only the prefix tree holds: they can be had.
    pub cached: usize,
    /// Nodes of the prefix tree.
    pub nodes: usize,
    /// Known tokens of all sequences admitted, each time they were.
    pub looked_up_tokens: u64,
    /// Of them, tokens that were found cached and not run again.
    pub hit_tokens: u64,
    /// Blocks of all groups that the tree had to give up.
    pub evicted_blocks: u64,
    /// Times a sequence lost its place.
    pub preemptions: u64,
    /// Of them, with its blocks moved to the host store.
    pub swaps: u64,
}

/// See the module's documentation.
pub struct Ledger {
    pub(super) cfg: LedgerConfig,
    pub(super) seqs: Slab,
    pub(super) blocks: Blocks,
    pub(super) store: Store,
    pub(super) pins: Pins,
    pub(super) step: Step,
    /// Only what it counts itself.
    pub(super) stats: CacheStats,
}

impl Ledger {
    /// An empty ledger.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] for a size of 0, groups out of order, and where slots or positions would not fit 32 bits;
    /// [`ConfigError::Refused`] where the system has not the memory.
    pub fn new(mut cfg: LedgerConfig) -> Result<Self, ConfigError> {
        let sizes = [
            ("block_size", cfg.block_size),
            ("max_seqs", cfg.max_seqs),
            ("step_seqs", cfg.step_seqs),
            ("step_tokens", cfg.step_tokens),
            ("context", cfg.context),
        ];
        for (name, size) in sizes {
            if size == 0 || u32::try_from(size).is_err() {
                return Err(ConfigError::invalid(name, "1 to 2^32 - 1", size));
            }
        }
        if !(1..=MAX_GROUPS).contains(&cfg.groups.len()) {
            return Err(ConfigError::invalid("groups", format!("1 to {MAX_GROUPS}"), cfg.groups.len()));
        }
        let reach = |g: &BlockGroup| g.window.unwrap_or(usize::MAX);
        for (g, group) in cfg.groups.iter().enumerate() {
            let slots = group.blocks.checked_mul(cfg.block_size);
            if group.blocks == 0 || slots.is_none_or(|s| u32::try_from(s).is_err()) {
                let found = format!("{} * {} in group {g}", group.blocks, cfg.block_size);
                return Err(ConfigError::invalid("blocks", "1 to 2^32 - 1 tokens in all", found));
            }
            if group.window == Some(0) || (g > 0 && reach(group) >= reach(&cfg.groups[g - 1])) {
                let found = format!("{:?} in group {g}", group.window);
                return Err(ConfigError::invalid("window", "at least 1, and less from group to group", found));
            }
        }
        if !cfg.swap.is_empty() && cfg.swap.len() != cfg.groups.len() {
            return Err(ConfigError::invalid("swap", format!("a size for each of {} groups", cfg.groups.len()), cfg.swap.len()));
        }
        if cfg.swap.iter().all(|n| *n == 0) {
            cfg.swap.clear();
        }
        // A step holds at most one item a token, and no more sequences than there can be.
        let items = cfg.step_seqs.min(cfg.step_tokens).min(cfg.max_seqs);
        Ok(Ledger {
            blocks: Blocks::new(cfg.block_size, &cfg.groups)?,
            store: Store::new(&cfg.swap)?,
            pins: Pins::default(),
            seqs: Slab::new(),
            step: Step::new(items, cfg.groups.len())?,
            stats: CacheStats::default(),
            cfg,
        })
    }

    /// Bytes that [`new`](Self::new) allocates for the bookkeeping of blocks, the largest part of it.
    pub fn bytes(cfg: &LedgerConfig) -> usize {
        Blocks::bytes(cfg.block_size, &cfg.groups).saturating_add(Store::bytes(&cfg.swap))
    }

    /// Takes a sequence in, as waiting. Reserves the memory of its whole life.
    ///
    /// # Errors
    /// [`SubmitError::EmptyPrompt`], [`SubmitError::NoTokens`]; [`SubmitError::TooLong`] where it could not run even alone;
    /// [`SubmitError::QueueFull`]; [`SubmitError::Refused`] where the system has not the memory.
    pub fn submit(&mut self, new: NewSeq, now: Duration) -> Result<SeqId, SubmitError> {
        if new.max_tokens == 0 && !new.tokens.is_empty() {
            return Err(SubmitError::NoTokens);
        }
        self.submit_any(new, now)
    }

    /// As [`Ledger::submit`], for a sequence that may be run only, without a token appended to it: `max_tokens` can be 0.
    ///
    /// # Errors
    /// As [`Ledger::submit`], but for [`SubmitError::NoTokens`].
    pub fn submit_any(&mut self, new: NewSeq, now: Duration) -> Result<SeqId, SubmitError> {
        let limit = self.admissible(new.tokens.len(), new.max_tokens)?;
        self.room_for_one_more()?;
        let mut tokens = new.tokens;
        let mut memory = (Hold::default(), Swapped::default());
        self.reserve_memory(limit, &mut tokens, &mut memory.0, &mut memory.1)?;
        let i = self.seqs.insert(State::Vacant, tokens, limit, memory);
        let seq = &mut self.seqs[i];
        (seq.arrival, seq.priority, seq.deadline) = (now, new.priority, new.deadline);
        (seq.hold, seq.key, seq.reuse) = (new.hold, new.key, new.reuse.unwrap_or(usize::MAX));
        let id = seq.id;
        self.seqs.enlist(i, State::Waiting);
        Ok(id)
    }

    /// Continues a held sequence with `more` tokens, as waiting. What is still cached is not run again, except the last token
    /// where nothing else would be left to run.
    ///
    /// # Errors
    /// As [`Ledger::submit`], and [`SubmitError::Sequence`] for one that is not held.
    pub fn resume(&mut self, seq: SeqId, more: &[TokenId], max_tokens: usize, now: Duration) -> Result<(), SubmitError> {
        self.resume_with(seq, more, max_tokens, None, now)
    }

    /// As [`Ledger::resume`], taking up no more cached tokens than `reuse`: see [`NewSeq::reuse`].
    ///
    /// # Errors
    /// As [`Ledger::resume`].
    pub fn resume_with(
        &mut self,
        seq: SeqId,
        more: &[TokenId],
        max_tokens: usize,
        reuse: Option<usize>,
        now: Duration,
    ) -> Result<(), SubmitError> {
        let i = self.held(seq)?;
        let total = self.seqs[i].tokens.len().saturating_add(more.len());
        if max_tokens == 0 && total > 0 {
            return Err(SubmitError::NoTokens);
        }
        let limit = self.admissible(total, max_tokens)?;
        let s = &mut self.seqs[i];
        let (mut tokens, mut held, mut swap) = (mem::take(&mut s.tokens), mem::take(&mut s.held), mem::take(&mut s.swap));
        let room = self.reserve_memory(limit, &mut tokens, &mut held, &mut swap);
        let s = &mut self.seqs[i];
        (s.tokens, s.held, s.swap) = (tokens, held, swap);
        room?;
        s.tokens.extend_from_slice(more);
        (s.turn, s.limit, s.arrival, s.hit, s.reuse) = (total, limit, now, None, reuse.unwrap_or(usize::MAX));
        self.seqs.enlist(i, State::Waiting);
        Ok(())
    }

    /// Forgets a held sequence's tokens from `len` on.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that is not held, [`SubmitError::Parameter`] where it has fewer tokens.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), SubmitError> {
        let i = self.held(seq)?;
        let s = &mut self.seqs[i];
        if len > s.tokens.len() {
            let found = format!("{len} of {}", s.tokens.len());
            return Err(SubmitError::Parameter { name: "len", expected: "at most the sequence's length", found });
        }
        s.tokens.truncate(len);
        (s.turn, s.limit) = (len, len);
        Ok(())
    }

    /// A second sequence with the same tokens, in the same state. Where it runs it has the same blocks; a block is copied when one
    /// of the two first writes into it.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that is neither held nor running nor parked, or whose run is in the open step;
    /// [`SubmitError::QueueFull`] where as many sequences are there, or run, as there may; [`SubmitError::Refused`].
    pub fn fork(&mut self, seq: SeqId, now: Duration) -> Result<SeqId, SubmitError> {
        let i = self.unplanned(seq, "held or running")?;
        if self.seqs[i].state == State::Waiting && !self.seqs[i].parked {
            return Err(self.misuse(seq, "held or running"));
        }
        self.room_for_one_more()?;
        if self.seqs[i].state == State::Running && self.running() >= self.cfg.step_seqs {
            return Err(SubmitError::QueueFull { limit: self.cfg.step_seqs });
        }
        let limit = self.seqs[i].limit;
        let (mut tokens, mut memory) = (Vec::new(), (Hold::default(), Swapped::default()));
        self.reserve_memory(limit, &mut tokens, &mut memory.0, &mut memory.1)?;
        let parent = &self.seqs[i];
        tokens.extend_from_slice(&parent.tokens);
        self.blocks.share(&parent.held, parent.computed.div_ceil(self.cfg.block_size), &mut memory.0);
        let k = self.seqs.insert(State::Vacant, tokens, limit, memory);
        let parent = &self.seqs[i];
        let (state, turn, hold, computed, hit) = (parent.state, parent.turn, parent.hold, parent.computed, parent.hit);
        let (regime, priority, deadline, key, parked) =
            (parent.regime, parent.priority, parent.deadline, parent.key, parent.parked);
        let child = &mut self.seqs[k];
        (child.turn, child.hold, child.computed, child.regime, child.hit) = (turn, hold, computed, regime, hit);
        (child.priority, child.deadline, child.arrival, child.key) = (priority, deadline, now, key);
        child.parked = parked;
        let id = child.id;
        self.seqs.enlist(k, state);
        Ok(id)
    }

    /// Adds the token that was sampled from a sequence's last run. One that is parked is not any more.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] unless it may still grow, and runs with all its tokens run, or is parked.
    pub fn append(&mut self, seq: SeqId, token: TokenId) -> Result<(), SubmitError> {
        let i = self.unplanned(seq, "running")?;
        let s = &mut self.seqs[i];
        if !s.parked && (s.state != State::Running || s.left() > 0) {
            return Err(self.misuse(seq, "all known tokens run"));
        }
        if s.tokens.len() >= s.limit {
            return Err(SubmitError::Sequence { seq, expected: "tokens left of max_tokens", found: "none left" });
        }
        s.parked = false;
        s.tokens.push(token);
        self.follow_regime(i);
        Ok(())
    }

    /// Ends a running or waiting sequence and says whether it is now held; otherwise it is gone and its blocks are back.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that is held already, or whose run is in the open step.
    pub fn finish(&mut self, seq: SeqId) -> Result<bool, SubmitError> {
        let i = self.unplanned(seq, "running or waiting")?;
        if self.seqs[i].state == State::Held {
            return Err(self.misuse(seq, "running or waiting"));
        }
        if !self.seqs[i].hold {
            self.remove(i);
            return Ok(false);
        }
        self.vacate(i);
        self.store.drop_slots(&mut self.seqs[i].swap);
        self.seqs[i].parked = false;
        self.seqs.enlist(i, State::Held);
        Ok(true)
    }

    /// Lets go of a held sequence.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that is not held.
    pub fn release(&mut self, seq: SeqId) -> Result<(), SubmitError> {
        let i = self.held(seq)?;
        self.remove(i);
        Ok(())
    }

    /// Ends a sequence in whatever state, even in the open step: its blocks are back at once, and given out by the next step
    /// at the earliest. Forks of it go on, and what was computed of it stays cached as long as nobody needs the room.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that is gone.
    pub fn cancel(&mut self, seq: SeqId) -> Result<(), SubmitError> {
        let i = self.seqs.find(seq).ok_or_else(|| self.misuse(seq, "any state"))?;
        self.remove(i);
        Ok(())
    }

    /// A sequence, unless it is gone.
    pub fn view(&self, seq: SeqId) -> Option<SeqView<'_>> {
        self.seqs.find(seq).map(|i| SeqView(&self.seqs[i]))
    }

    /// All sequences, in no order.
    pub fn all(&self) -> impl Iterator<Item = SeqView<'_>> {
        self.seqs.all().map(SeqView)
    }

    /// How many sequences there are.
    pub fn counts(&self) -> Counts {
        let (waiting, running) = (self.seqs.waiting.len(), self.seqs.running.len());
        Counts { waiting, running, held: self.seqs.live() - waiting - running }
    }

    /// Blocks of the first group that nothing holds, not even the prefix tree.
    pub fn free_blocks(&self) -> usize {
        self.blocks.pools[0].free()
    }

    /// Blocks of the first group that could be had: free ones, and those that only the prefix tree holds.
    pub fn available_blocks(&self) -> usize {
        self.blocks.pools[0].available()
    }

    /// Tokens that a waiting or held sequence would find cached were it admitted now; of a running one, those it has. Cost:
    /// O(tokens).
    pub fn cached_prefix(&self, seq: SeqId) -> usize {
        let Some(s) = self.seqs.find(seq).map(|i| &self.seqs[i]) else { return 0 };
        if s.active() {
            return s.computed;
        }
        let known = if s.state == State::Waiting { s.reusable() } else { &s.tokens };
        self.blocks.find(self.key_of(s), known, |_| ()).tokens.max(s.swap.tokens)
    }

    /// What the cache has done so far, and holds now.
    pub fn stats(&self) -> CacheStats {
        let pool = &self.blocks.pools[0];
        let cached = pool.available() - pool.free();
        CacheStats {
            blocks: pool.len(),
            active: pool.len() - pool.available(),
            cached,
            nodes: self.blocks.tree.len(),
            evicted_blocks: self.blocks.evicted,
            ..self.stats
        }
    }

    /// The longest sequence that it could run, prompt and growth together: by the context, the cache and what is pinned there.
    pub fn max_len(&self) -> usize {
        self.cfg.context.min(self.blocks.longest(&self.pins.blocks))
    }

    /// The sizes it was built with.
    pub fn config(&self) -> &LedgerConfig {
        &self.cfg
    }

    /// Prompt and growth together, where they fit.
    fn admissible(&self, prompt: usize, max_tokens: usize) -> Result<usize, SubmitError> {
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        let tokens = prompt.saturating_add(max_tokens);
        let cache = if self.pins.is_empty() { "the cache" } else { "the cache beside what is pinned" };
        for (what, limit) in [("the context", self.cfg.context), (cache, self.blocks.longest(&self.pins.blocks))] {
            if tokens > limit {
                return Err(SubmitError::TooLong { tokens, what, limit });
            }
        }
        Ok(tokens)
    }

    fn room_for_one_more(&self) -> Result<(), SubmitError> {
        match self.seqs.live() >= self.cfg.max_seqs || self.seqs.exhausted() {
            true => Err(SubmitError::QueueFull { limit: self.cfg.max_seqs }),
            false => Ok(()),
        }
    }

    fn held(&self, seq: SeqId) -> Result<usize, SubmitError> {
        match self.seqs.find(seq) {
            Some(i) if self.seqs[i].state == State::Held => Ok(i),
            _ => Err(self.misuse(seq, "held")),
        }
    }

    fn unplanned(&self, seq: SeqId, expected: &'static str) -> Result<usize, SubmitError> {
        match self.seqs.find(seq) {
            Some(i) if self.seqs[i].planned.is_none() => Ok(i),
            _ => Err(self.misuse(seq, expected)),
        }
    }

    pub(super) fn misuse(&self, seq: SeqId, expected: &'static str) -> SubmitError {
        let found = match self.seqs.find(seq).map(|i| &self.seqs[i]) {
            None => "gone",
            Some(Seq { planned: Some(_), .. }) => "in the open step",
            Some(s) if s.state == State::Waiting => "waiting",
            Some(s) if s.state == State::Held => "held",
            Some(s) if s.left() == 0 => "running, its next token not appended yet",
            Some(_) => "running",
        };
        SubmitError::Sequence { seq, expected, found }
    }

    /// Where a sequence's blocks are looked for, and shared.
    pub(super) fn key_of(&self, s: &Seq) -> RootKey {
        RootKey { key: s.key, regime: (self.cfg.regime)(s.tokens.len()) }
    }

    /// Sequences that run, and those that the open step admits.
    pub(super) fn running(&self) -> usize {
        self.seqs.running.len() + self.step.admitted
    }

    /// Cached keys of another regime are worthless.
    fn follow_regime(&mut self, i: usize) {
        let s = &self.seqs[i];
        if s.computed > 0 && (self.cfg.regime)(s.tokens.len()) != s.regime {
            self.vacate(i);
        }
    }

    /// Leaves what is computed of a sequence to the tree: it holds nothing any more.
    pub(super) fn vacate(&mut self, i: usize) {
        let s = &mut self.seqs[i];
        let key = RootKey { key: s.key, regime: s.regime };
        self.blocks.retire(&mut s.held, key, &s.tokens[..s.computed]);
        s.reuse = s.reuse.max(s.computed);
        s.computed = 0;
    }

    fn remove(&mut self, i: usize) {
        if self.seqs[i].planned.is_some() {
            // Its blocks may not hold yet what they are to hold.
            self.blocks.release(&mut self.seqs[i].held);
            self.seqs[i].computed = 0;
        }
        self.vacate(i);
        self.store.drop_slots(&mut self.seqs[i].swap);
        self.seqs.remove(i);
    }

    /// The memory of a sequence's whole life.
    fn reserve_memory(
        &self,
        limit: usize,
        tokens: &mut Vec<TokenId>,
        held: &mut Hold,
        swap: &mut Swapped,
    ) -> Result<(), SubmitError> {
        let (blocks, groups) = (limit.div_ceil(self.cfg.block_size), self.cfg.groups.len());
        let room = reserve(tokens, limit).and_then(|()| held.reserve(blocks, groups));
        room.and_then(|()| swap.reserve(blocks, &self.store)).map_err(|()| refused(limit, blocks, groups))
    }
}
