//! The mechanism of scheduling: every sequence, every block, and what may become of them. It decides nothing: policies do,
//! through [`StepBuilder`](super::StepBuilder), and hosts do, through the calls below. Knows no model, no bytes and no clock.
//!
//! | a sequence's positions | in the cache | its blocks there |
//! | --- | --- | --- |
//! | `0..cached` | valid, in the regime of its length | may be shared with other sequences |
//! | `cached..total` | to be run | its own; a block that is shared is copied before it is written |
//!
//! Invariants: what waits or is held can lose its blocks, from the end, the least recently used first; what runs cannot. Two
//! sequences that share a block share all blocks before it. A sequence's memory is reserved when it is submitted or resumed, so
//! that a step allocates nothing. A failed call changes nothing.
#![forbid(unsafe_code)]

use super::kv::Kv;
use super::seq::{Seq, SeqView, Slab, State};
use super::step::Step;
use crate::error::{ConfigError, SubmitError};
use crate::ids::{BlockId, SeqId, TokenId};
use std::time::Duration;

/// Names the rotary regime of a sequence of so many known tokens: cached keys are valid only in the regime that they were
/// written in.
pub type Regime = Box<dyn Fn(usize) -> u32 + Send>;

/// Sizes of a [`Ledger`].
pub struct LedgerConfig {
    /// Blocks in the cache.
    pub blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Sequences at a time, whatever their state.
    pub max_seqs: usize,
    /// Sequences in one step.
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
    /// Room for `blocks` blocks of `block_size` tokens and a model of `context` positions; the rest at moderate values: 1024
    /// sequences, steps of 256 sequences and 2048 tokens, no drafts.
    pub fn new(blocks: usize, block_size: usize, context: usize) -> Self {
        LedgerConfig {
            blocks,
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
    /// Keep it with what it has cached when it finishes, for a follow-up.
    pub hold: bool,
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

/// See the module's documentation.
pub struct Ledger {
    pub(super) cfg: LedgerConfig,
    pub(super) seqs: Slab,
    pub(super) kv: Kv,
    pub(super) step: Step,
}

impl Ledger {
    /// An empty ledger.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] for a size of 0, and where slots or positions would not fit 32 bits;
    /// [`ConfigError::Refused`] where the system has not the memory.
    pub fn new(cfg: LedgerConfig) -> Result<Self, ConfigError> {
        let sizes = [
            ("blocks", cfg.blocks),
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
        let slots = cfg.blocks.checked_mul(cfg.block_size);
        if slots.is_none_or(|s| u32::try_from(s).is_err()) {
            return Err(ConfigError::invalid(
                "blocks * block_size",
                "at most 2^32 - 1",
                format!("{} * {}", cfg.blocks, cfg.block_size),
            ));
        }
        // A step holds at most one item a token, and no more sequences than there can be.
        let items = cfg.step_seqs.min(cfg.step_tokens).min(cfg.max_seqs);
        Ok(Ledger { kv: Kv::new(cfg.blocks)?, seqs: Slab::new(), step: Step::new(items)?, cfg })
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
        let (mut tokens, mut blocks) = (new.tokens, Vec::new());
        let max_blocks = limit.div_ceil(self.cfg.block_size);
        reserve(&mut tokens, limit).and_then(|()| reserve(&mut blocks, max_blocks)).map_err(|()| refused(limit, max_blocks))?;
        let i = self.seqs.insert(State::Vacant, tokens, limit, blocks);
        let seq = &mut self.seqs[i];
        (seq.arrival, seq.priority, seq.deadline, seq.hold) = (now, new.priority, new.deadline, new.hold);
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
        let i = self.held(seq)?;
        let total = self.seqs[i].tokens.len().saturating_add(more.len());
        if max_tokens == 0 && total > 0 {
            return Err(SubmitError::NoTokens);
        }
        let limit = self.admissible(total, max_tokens)?;
        let max_blocks = limit.div_ceil(self.cfg.block_size);
        let s = &mut self.seqs[i];
        let room = reserve(&mut s.tokens, limit).and_then(|()| reserve(&mut s.blocks, max_blocks));
        room.map_err(|()| refused(limit, max_blocks))?;
        s.tokens.extend_from_slice(more);
        (s.turn, s.limit, s.arrival) = (total, limit, now);
        let computed = s.computed.min(total - 1);
        self.lower(i, computed);
        self.follow_regime(i);
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
        let computed = s.computed.min(len);
        self.lower(i, computed);
        self.follow_regime(i);
        Ok(())
    }

    /// A second sequence with the same tokens and the same cached blocks, in the same state. Blocks are copied when one of the
    /// two first writes into them.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that is neither held nor running, or whose run is in the open step;
    /// [`SubmitError::QueueFull`], [`SubmitError::Refused`].
    pub fn fork(&mut self, seq: SeqId, now: Duration) -> Result<SeqId, SubmitError> {
        let i = self.unplanned(seq, "held or running")?;
        if self.seqs[i].state == State::Waiting {
            return Err(self.misuse(seq, "held or running"));
        }
        self.room_for_one_more()?;
        let parent = &self.seqs[i];
        let (limit, max_blocks) = (parent.limit, parent.limit.div_ceil(self.cfg.block_size));
        let (mut tokens, mut blocks) = (Vec::new(), Vec::new());
        reserve(&mut tokens, limit).and_then(|()| reserve(&mut blocks, max_blocks)).map_err(|()| refused(limit, max_blocks))?;
        tokens.extend_from_slice(&parent.tokens);
        let k = self.seqs.insert(State::Vacant, tokens, limit, blocks);
        let (parent, active) = (&self.seqs[i], self.seqs[i].active());
        let (state, turn, hold, computed) = (parent.state, parent.turn, parent.hold, parent.computed);
        let (regime, priority, deadline) = (parent.regime, parent.priority, parent.deadline);
        let child = &mut self.seqs[k];
        (child.turn, child.hold, child.computed, child.regime) = (turn, hold, computed, regime);
        (child.priority, child.deadline, child.arrival) = (priority, deadline, now);
        let id = child.id;
        for b in 0..computed.div_ceil(self.cfg.block_size) {
            let block = self.seqs[i].blocks[b];
            self.kv.retain(block, active);
            self.seqs[k].blocks.push(block);
        }
        self.seqs.enlist(k, state);
        if !active {
            self.seqs.rest(k);
        }
        Ok(id)
    }

    /// Adds the token that was sampled from a sequence's last run.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] unless it runs, all its tokens have been run, and it may still grow.
    pub fn append(&mut self, seq: SeqId, token: TokenId) -> Result<(), SubmitError> {
        let i = self.unplanned(seq, "running")?;
        let s = &mut self.seqs[i];
        if s.state != State::Running || s.left() > 0 {
            return Err(self.misuse(seq, "all known tokens run"));
        }
        if s.tokens.len() >= s.limit {
            return Err(SubmitError::Sequence { seq, expected: "tokens left of max_tokens", found: "none left" });
        }
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
        self.retire(i, State::Held);
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
    /// at the earliest. Forks of it go on.
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

    /// Blocks that nothing holds.
    pub fn free_blocks(&self) -> usize {
        self.kv.pool().free()
    }

    /// Free blocks, and those that could be taken from waiting and held sequences.
    pub fn available_blocks(&self) -> usize {
        self.kv.available()
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
        for (what, limit) in [("the context", self.cfg.context), ("the cache", self.cfg.blocks * self.cfg.block_size)] {
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

    /// Cached keys of another regime are worthless.
    fn follow_regime(&mut self, i: usize) {
        let s = &self.seqs[i];
        if s.computed > 0 && (self.cfg.regime)(s.tokens.len()) != s.regime {
            self.lower(i, 0);
        }
    }

    /// Forgets what is cached from `computed` on. Blocks past that are worth their room only: an active sequence keeps those
    /// that it has alone, to write them again, and gives the shared ones back.
    pub(super) fn lower(&mut self, i: usize, computed: usize) {
        let (seq, kv) = (&mut self.seqs[i], &mut self.kv);
        seq.computed = computed;
        let active = seq.active();
        let valid = computed.div_ceil(self.cfg.block_size);
        let mut kept = valid;
        for k in valid..seq.blocks.len() {
            let block = seq.blocks[k];
            if active && !kv.shared(block) {
                seq.blocks[kept] = block;
                kept += 1;
            } else {
                kv.release(block, active);
            }
        }
        seq.blocks.truncate(kept);
        if kept == 0 {
            self.seqs.unrest(i);
        }
    }

    /// Takes a running sequence's place away: it keeps what is cached until somebody needs the room.
    pub(super) fn retire(&mut self, i: usize, state: State) {
        let was_active = self.seqs[i].active();
        self.seqs.enlist(i, state);
        if was_active {
            self.deactivate(i);
        }
        let computed = self.seqs[i].computed;
        self.lower(i, computed);
    }

    pub(super) fn deactivate(&mut self, i: usize) {
        for &block in &self.seqs[i].blocks {
            self.kv.deactivate(block);
        }
        self.seqs.rest(i);
    }

    pub(super) fn activate(&mut self, i: usize) {
        self.seqs.unrest(i);
        for &block in &self.seqs[i].blocks {
            self.kv.activate(block);
        }
    }

    fn remove(&mut self, i: usize) {
        let seq = &mut self.seqs[i];
        let active = seq.active();
        for block in seq.blocks.drain(..) {
            self.kv.release(block, active);
        }
        self.seqs.remove(i);
    }
}

/// Room for `len` values in all.
fn reserve<T>(list: &mut Vec<T>, len: usize) -> Result<(), ()> {
    list.try_reserve_exact(len.saturating_sub(list.len())).map_err(|_| ())
}

fn refused(tokens: usize, blocks: usize) -> SubmitError {
    let needed_bytes = (tokens * size_of::<TokenId>() + blocks * size_of::<BlockId>()) as u64;
    SubmitError::Refused { tokens, needed_bytes }
}
