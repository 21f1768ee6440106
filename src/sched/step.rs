//! One step from its first reservation to its last commit.
//!
//! ```text
//! begin_step -> policy acts on the StepBuilder -> finish -> copies, forward pass -> commit each item -> end_step
//!                                            \-> drop: nothing reserved      \-> abort_step: nothing committed
//! ```
//!
//! A sequence changes its state when its item is committed, not before: until then everything about an item can be undone,
//! and undoing costs what doing cost. Only what was taken away stays so: preemptions, and cached blocks that had to make room.
//!
//! Invariants: a step never exceeds its budgets; a sequence is in a plan once at most; an item's blocks cover it and those that
//! it writes are its own; no source of a copy is written, and no two copies have one destination, so that copies may be done
//! in any order.
#![forbid(unsafe_code)]

use super::ledger::Ledger;
use super::seq::{SeqView, State};
use super::{NoRoom, Preempt};
use crate::error::{ConfigError, RunError, SubmitError, reserved};
use crate::ids::{BlockId, SeqId, TokenId};
use std::time::Duration;

/// One sequence's share of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanItem {
    /// The sequence.
    pub seq: SeqId,
    /// Position of the first token to run.
    pub start: usize,
    /// Known tokens to run, at least one.
    pub len: usize,
    /// The run reaches the last known token, so that its logits are wanted.
    pub last: bool,
    /// Guesses there is room for after the known tokens.
    pub draft: usize,
}

/// What came of a policy's turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepInfo {
    /// Sequences in the plan. With none the step is over already.
    pub items: usize,
    /// Tokens in the plan, guesses included.
    pub tokens: usize,
    /// Sequences that lost their place to another.
    pub preempted: usize,
    /// When the policy wants to be asked again even if nothing happens.
    pub wake_at: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Closed,
    Building,
    Open,
}

/// What it takes to undo an item.
#[derive(Clone, Copy)]
struct Undo {
    slot: usize,
    /// Length of the block table before.
    blocks: usize,
    /// The shared block that a copy stands in for.
    original: Option<BlockId>,
}

pub(super) struct Step {
    pub(super) phase: Phase,
    now: Duration,
    pub(super) plan: Vec<PlanItem>,
    undo: Vec<Undo>,
    pub(super) copies: Vec<(BlockId, BlockId)>,
    info: StepInfo,
}

impl Step {
    pub(super) fn new(items: usize) -> Result<Self, ConfigError> {
        Ok(Step {
            phase: Phase::Closed,
            now: Duration::ZERO,
            plan: reserved("a step's plan", items)?,
            undo: reserved("a step's plan", items)?,
            // At most one copy an item: only the block that holds the first position to be written can be shared.
            copies: reserved("a step's plan", items)?,
            info: StepInfo::default(),
        })
    }
}

/// All that a policy can touch. Whatever it does, no block leaks, no budget or pool is overrun and no sequence is lost.
pub struct StepBuilder<'a> {
    ledger: &'a mut Ledger,
}

impl StepBuilder<'_> {
    /// Time of the step since the engine's start.
    pub fn now(&self) -> Duration {
        self.ledger.step.now
    }

    /// Waiting sequences not in this step's plan: preempted ones first, the others in order of arrival.
    pub fn waiting(&self) -> impl Iterator<Item = SeqView<'_>> {
        self.ledger.seqs.iter(&self.ledger.seqs.waiting).filter(|s| s.planned.is_none()).map(SeqView)
    }

    /// Running sequences not in this step's plan, in order of admission.
    pub fn running(&self) -> impl Iterator<Item = SeqView<'_>> {
        self.ledger.seqs.iter(&self.ledger.seqs.running).filter(|s| s.planned.is_none() && s.left() > 0).map(SeqView)
    }

    /// A sequence, unless it is gone.
    pub fn view(&self, seq: SeqId) -> Option<SeqView<'_>> {
        self.ledger.view(seq)
    }

    /// Tokens that the step still has room for.
    pub fn token_budget(&self) -> usize {
        self.ledger.cfg.step_tokens - self.ledger.step.info.tokens
    }

    /// Sequences that the step still has room for.
    pub fn seq_budget(&self) -> usize {
        self.ledger.cfg.step_seqs.saturating_sub(self.ledger.step.plan.len())
    }

    /// The most guesses a decode row can get; 0 where nothing drafts.
    pub fn max_draft(&self) -> usize {
        self.ledger.cfg.max_draft
    }

    /// The most sequences there can be, in all lists: a bound for a policy's own memory.
    pub fn max_seqs(&self) -> usize {
        self.ledger.cfg.max_seqs
    }

    /// Blocks that could still be had in this step, counting what waiting and held sequences would give up.
    pub fn free_blocks(&self) -> usize {
        self.ledger.kv.available()
    }

    /// Blocks out of [`StepBuilder::free_blocks`] that a sequence needs before its first `tokens` positions are its own.
    /// Cost: O(1), for a waiting sequence O(cached blocks).
    pub fn blocks_for(&self, seq: SeqId, tokens: usize) -> usize {
        let l = &*self.ledger;
        let Some(s) = l.seqs.find(seq).map(|i| &l.seqs[i]) else { return 0 };
        let idle = if s.active() { 0 } else { s.blocks.iter().filter(|&&b| l.kv.idle(b)).count() };
        let copy = s.computed % l.cfg.block_size > 0 && l.kv.shared(s.blocks[s.computed / l.cfg.block_size]);
        tokens.div_ceil(l.cfg.block_size).saturating_sub(s.blocks.len()) + idle + usize::from(copy)
    }

    /// Runs up to `tokens` of a sequence's known tokens, and admits it where it waits. Says how many were granted: fewer where
    /// the step's budget, the sequence or the pool ends.
    ///
    /// # Errors
    /// [`NoRoom`] where not even one can run; nothing has changed then, except that idle sequences may have lost cached blocks.
    pub fn prefill(&mut self, seq: SeqId, tokens: usize) -> Result<usize, NoRoom> {
        let i = self.runnable(seq)?;
        let s = &self.ledger.seqs[i];
        let want = tokens.min(s.left()).min(self.token_budget());
        if tokens == 0 {
            return Err(NoRoom::NotReady);
        }
        let len = self.ledger.reserve(i, want)?;
        self.ledger.plan(i, len, 0);
        Ok(len)
    }

    /// Runs a running sequence's last known token, and makes room for up to `draft` guesses after it. Says for how many:
    /// fewer where the engine has no drafter, the budget, the sequence's own limit or the pool ends, or where the rotary
    /// regime would change under a guess.
    ///
    /// # Errors
    /// [`NoRoom`] where not even the one token can run.
    pub fn decode(&mut self, seq: SeqId, draft: usize) -> Result<usize, NoRoom> {
        let i = self.runnable(seq)?;
        let (l, s) = (&*self.ledger, &self.ledger.seqs[i]);
        if s.state != State::Running || s.left() != 1 {
            return Err(NoRoom::NotReady);
        }
        let total = s.tokens.len();
        // The token sampled after the last guess needs a place in the sequence too.
        let most = draft.min(l.cfg.max_draft).min(self.token_budget() - 1).min((s.limit - total).saturating_sub(1));
        let regime = (l.cfg.regime)(total);
        let draft = (1..=most).take_while(|d| (l.cfg.regime)(total + d) == regime).count();
        let granted = self.ledger.reserve(i, 1 + draft)?;
        self.ledger.plan(i, 1, granted - 1);
        Ok(granted - 1)
    }

    /// Takes a running sequence's place away and says whether it could: one that is already in the plan keeps its place. It
    /// waits from now on, and loses of its cached blocks what others come to need.
    pub fn preempt(&mut self, seq: SeqId, how: Preempt) -> bool {
        let Preempt::Recompute = how;
        let l = &mut *self.ledger;
        let Some(i) = l.seqs.find(seq) else { return false };
        let s = &mut l.seqs[i];
        if s.state != State::Running || s.planned.is_some() || s.left() == 0 {
            return false;
        }
        s.preemptions = s.preemptions.saturating_add(1);
        l.step.info.preempted += 1;
        l.retire(i, State::Waiting);
        true
    }

    /// Asks to be called again at `when` even if nothing arrives. The earliest of several counts.
    pub fn wake_at(&mut self, when: Duration) {
        let wake_at = &mut self.ledger.step.info.wake_at;
        *wake_at = Some(wake_at.map_or(when, |w| w.min(when)));
    }

    /// Ends the policy's turn. The step is open until [`Ledger::end_step`] or [`Ledger::abort_step`], unless its plan is empty.
    /// A builder that is dropped instead undoes its reservations.
    pub fn finish(self) -> StepInfo {
        let step = &mut self.ledger.step;
        step.phase = if step.plan.is_empty() { Phase::Closed } else { Phase::Open };
        StepInfo { items: step.plan.len(), ..step.info }
    }

    fn runnable(&self, seq: SeqId) -> Result<usize, NoRoom> {
        let l = &*self.ledger;
        let i = l.seqs.find(seq).ok_or(NoRoom::NotReady)?;
        let s = &l.seqs[i];
        if s.planned.is_some() || s.left() == 0 || s.state == State::Held {
            return Err(NoRoom::NotReady);
        }
        if self.token_budget() == 0 || self.seq_budget() == 0 {
            return Err(NoRoom::Budget);
        }
        Ok(i)
    }
}

impl Drop for StepBuilder<'_> {
    fn drop(&mut self) {
        if self.ledger.step.phase == Phase::Building {
            self.ledger.close();
        }
    }
}

impl Ledger {
    /// Opens a step.
    ///
    /// # Errors
    /// [`RunError::StepOpen`] where the last one is open still.
    pub fn begin_step(&mut self, now: Duration) -> Result<StepBuilder<'_>, RunError> {
        if self.step.phase != Phase::Closed {
            return Err(RunError::StepOpen);
        }
        self.step.phase = Phase::Building;
        self.step.now = now;
        self.step.info = StepInfo::default();
        Ok(StepBuilder { ledger: self })
    }

    /// What the open step runs. A sequence that was cancelled meanwhile is still listed, and its [view](Ledger::view) is gone.
    pub fn plan_items(&self) -> &[PlanItem] {
        &self.step.plan
    }

    /// Blocks to copy before the open step's forward pass, `(from, to)`. The order does not matter.
    pub fn copies(&self) -> &[(BlockId, BlockId)] {
        &self.step.copies
    }

    /// True between a [`StepBuilder::finish`] with a plan and the step's end.
    pub fn step_is_open(&self) -> bool {
        self.step.phase != Phase::Closed
    }

    /// Books an item of the open step as run. `accepted` are those of its guesses that proved right: they are appended, and
    /// the room of the others is given back. The token sampled after them comes by [`Ledger::append`].
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for a sequence without an item, [`SubmitError::Parameter`] for more guesses than there was
    /// room for.
    pub fn commit(&mut self, seq: SeqId, accepted: &[TokenId]) -> Result<(), SubmitError> {
        let found = self.seqs.find(seq).and_then(|i| Some((i, self.seqs[i].planned?)));
        let Some((i, item)) = found.filter(|_| self.step.phase == Phase::Open) else {
            return Err(self.misuse(seq, "an item of the open step"));
        };
        let PlanItem { len, draft, .. } = self.step.plan[item as usize];
        if accepted.len() > draft {
            let found = format!("{} of {draft}", accepted.len());
            return Err(SubmitError::Parameter { name: "accepted", expected: "at most the planned guesses", found });
        }
        if self.seqs[i].state == State::Waiting {
            self.seqs.enlist(i, State::Running);
        }
        let s = &mut self.seqs[i];
        s.planned = None;
        s.regime = (self.cfg.regime)(s.tokens.len());
        s.computed += len + accepted.len();
        s.tokens.extend_from_slice(accepted);
        let needed = s.tokens.len().div_ceil(self.cfg.block_size);
        for block in s.blocks.drain(needed.min(s.blocks.len())..) {
            self.kv.release(block, true);
        }
        Ok(())
    }

    /// Closes the open step. Items that were not committed are as if they had not been planned. Without an open step it does
    /// nothing.
    pub fn end_step(&mut self) {
        self.close();
    }

    /// Closes a step whose forward pass failed: nothing is committed that was not before. Where nothing else happens, a policy that
    /// preempted nobody comes to the same plan again: what it took from idle sequences, it now finds free. Preemptions
    /// stand. To run the very same plan again, leave the step open: copies and runs may be repeated.
    pub fn abort_step(&mut self) {
        self.close();
    }

    fn close(&mut self) {
        for k in 0..self.step.plan.len() {
            let Undo { slot, blocks, original } = self.step.undo[k];
            let seq = &mut self.seqs[slot];
            // Committed, or cancelled and perhaps another sequence's slot by now.
            if seq.id != self.step.plan[k].seq || seq.planned != Some(k as u32) {
                continue;
            }
            for block in seq.blocks.drain(blocks..) {
                self.kv.release(block, true);
            }
            if let Some(original) = original {
                let copy = std::mem::replace(&mut seq.blocks[seq.computed / self.cfg.block_size], original);
                self.kv.retain(original, true);
                self.kv.release(copy, true);
            }
            seq.planned = None;
            if seq.state == State::Waiting {
                self.deactivate(slot);
            }
        }
        for (from, _) in self.step.copies.drain(..) {
            self.kv.release(from, true);
        }
        self.step.plan.clear();
        self.step.undo.clear();
        self.step.phase = Phase::Closed;
    }

    /// Makes up to `want` positions after the cached ones writable for a sequence that is not in the plan, at least one. What
    /// it takes to undo that is pushed; [`Ledger::plan`] must follow.
    fn reserve(&mut self, i: usize, want: usize) -> Result<usize, NoRoom> {
        let bs = self.cfg.block_size;
        let s = &self.seqs[i];
        let (start, have, waits) = (s.computed, s.blocks.len(), !s.active());
        // An idle sequence's own blocks count as available, but it is about to use them.
        let own = if waits { s.blocks.iter().filter(|&&b| self.kv.idle(b)).count() } else { 0 };
        let partial = (start % bs > 0).then(|| s.blocks[start / bs]);
        // From idle sharers the block can be taken instead of copied, should all others be gone.
        let must_copy = partial.is_some_and(|b| self.kv.users(b) > u32::from(!waits));
        let room = (self.kv.available() - own).checked_sub(usize::from(must_copy)).ok_or(NoRoom::Blocks)?;
        let got = want.min((have + room) * bs - start);
        if got == 0 {
            return Err(NoRoom::Blocks);
        }
        if waits {
            self.activate(i);
        }
        for _ in have..(start + got).div_ceil(bs) {
            let block = self.take_block().expect("as many blocks as were counted");
            self.seqs[i].blocks.push(block);
        }
        let mut undo = Undo { slot: i, blocks: have, original: None };
        if let Some(from) = partial.filter(|&b| self.kv.shared(b)) {
            match self.take_block() {
                Some(to) => {
                    undo.original = Some(from);
                    // Its reference stays with the copy until the step is over: nobody can be given the source or write it
                    // in place, so that copies can be made twice and undoing them finds it as it was.
                    self.seqs[i].blocks[start / bs] = to;
                    self.step.copies.push((from, to));
                }
                None => self.take_over(from),
            }
        }
        self.step.undo.push(undo);
        Ok(got)
    }

    fn plan(&mut self, i: usize, len: usize, draft: usize) {
        let s = &mut self.seqs[i];
        s.planned = Some(self.step.plan.len() as u32);
        let last = s.computed + len == s.tokens.len();
        self.step.plan.push(PlanItem { seq: s.id, start: s.computed, len, last, draft });
        self.step.info.tokens += len + draft;
    }

    /// A block for an active sequence, taken from an idle one where none is free.
    fn take_block(&mut self) -> Option<BlockId> {
        while self.kv.pool().free() == 0 {
            if !self.reclaim() {
                return None;
            }
        }
        self.kv.alloc()
    }

    /// Takes one block from the end of the least recently used idle sequence that has one alone there: blocks shared among idle
    /// sequences go when nothing else is left, and those that an active one shares bring no room.
    fn reclaim(&mut self) -> bool {
        for shared in [false, true] {
            let mut at = self.seqs.next_idle(None);
            while let Some(i) = at {
                let block = *self.seqs[i].blocks.last().expect("a listed sequence has blocks");
                if self.kv.idle(block) && (shared || !self.kv.shared(block)) {
                    self.drop_last(i);
                    return true;
                }
                at = self.seqs.next_idle(Some(i));
            }
        }
        false
    }

    /// Makes every idle sharer forget `block`. It is the last of each: all blocks behind it have been reclaimed.
    fn take_over(&mut self, block: BlockId) {
        let mut at = self.seqs.next_idle(None);
        while let Some(i) = at {
            at = self.seqs.next_idle(Some(i));
            if self.seqs[i].blocks.last() == Some(&block) {
                self.drop_last(i);
            }
        }
        debug_assert!(!self.kv.shared(block), "{block:?} is still shared");
    }

    fn drop_last(&mut self, i: usize) {
        let s = &mut self.seqs[i];
        let block = s.blocks.pop().expect("a listed sequence has blocks");
        self.kv.release(block, false);
        let computed = s.computed.min(s.blocks.len() * self.cfg.block_size);
        self.lower(i, computed);
    }
}
