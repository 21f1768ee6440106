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
//! in any order, after what is swapped out.
#![forbid(unsafe_code)]

use super::ledger::Ledger;
use super::seq::{SeqView, State};
use super::{NoRoom, Preempt};
use crate::cache::RootKey;
use crate::error::{ConfigError, RunError, SubmitError, reserved};
use crate::ids::{BlockCopy, BlockId, MAX_GROUPS, SeqId, TokenId};
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
    before: Before,
}

/// What an item's sequence held.
#[derive(Clone, Copy)]
enum Before {
    /// Nothing: it found a prefix.
    Nothing,
    /// So many blocks; where there is a copy, it stands in for these shared blocks.
    Blocks { len: usize, originals: Option<[BlockId; MAX_GROUPS]> },
}

pub(super) struct Step {
    pub(super) phase: Phase,
    now: Duration,
    pub(super) plan: Vec<PlanItem>,
    undo: Vec<Undo>,
    pub(super) copies: Vec<BlockCopy>,
    /// Waiting sequences in the plan.
    pub(super) admitted: usize,
    info: StepInfo,
}

impl Step {
    pub(super) fn new(items: usize, groups: usize) -> Result<Self, ConfigError> {
        Ok(Step {
            phase: Phase::Closed,
            now: Duration::ZERO,
            plan: reserved("a step's plan", items)?,
            undo: reserved("a step's plan", items)?,
            // At most one copy an item and group: only the block that holds the first position to be written can be shared.
            copies: reserved("a step's plan", items.saturating_mul(groups))?,
            admitted: 0,
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

    /// Waiting sequences not in this step's plan: preempted ones first, the others in order of arrival. Without those that are
    /// [parked](SeqView::parked).
    pub fn waiting(&self) -> impl Iterator<Item = SeqView<'_>> {
        self.ledger.seqs.iter(&self.ledger.seqs.waiting).filter(|s| s.planned.is_none() && !s.parked).map(SeqView)
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

    /// Blocks that could still be had in this step, counting what the prefix cache would give up. Where layers see windows of
    /// different lengths, the blocks are those that reach farthest: of the others there are enough for all that may run.
    pub fn free_blocks(&self) -> usize {
        self.ledger.available_blocks()
    }

    /// Tokens that a waiting sequence would find cached. Cost: O(tokens).
    pub fn cached_prefix(&self, seq: SeqId) -> usize {
        self.ledger.cached_prefix(seq)
    }

    /// Blocks out of [`StepBuilder::free_blocks`] that a sequence needs before its first `tokens` positions are its own.
    /// Cost: O(1), for a waiting sequence O(its tokens).
    pub fn blocks_for(&self, seq: SeqId, tokens: usize) -> usize {
        let l = &*self.ledger;
        let (blocks, pool) = (&l.blocks, &l.blocks.pools[0]);
        let Some(s) = l.seqs.find(seq).map(|i| &l.seqs[i]) else { return 0 };
        let most = blocks.blocks_at(tokens);
        if s.held.is_empty() {
            // What others run on is there; what only the tree holds counts as free.
            let mut there = 0;
            let found = blocks.find(l.key_of(s), s.reusable(), |node| {
                there += usize::from(blocks.tree.block(node, 0).is_some_and(|b| !pool.idle(b)));
            });
            return most.saturating_sub(there.min(found.nodes)) + usize::from(found.partial.is_some());
        }
        let at = s.computed / l.cfg.block_size;
        let copy = s.computed % l.cfg.block_size > 0 && pool.users(s.held.tables[0][at]) > 1;
        tokens.div_ceil(l.cfg.block_size).saturating_sub(s.held.len()).min(most) + usize::from(copy)
    }

    /// Runs up to `tokens` of a sequence's known tokens, and admits it where it waits: it takes up what is cached of it and runs
    /// what is not, at least its last token. Says how many were granted: fewer where the step's budget, the sequence or the pool
    /// ends.
    ///
    /// # Errors
    /// [`NoRoom`] where not even one can run; nothing has changed then.
    pub fn prefill(&mut self, seq: SeqId, tokens: usize) -> Result<usize, NoRoom> {
        let i = self.runnable(seq)?;
        let want = tokens.min(self.token_budget());
        if tokens == 0 {
            return Err(NoRoom::NotReady);
        }
        let s = &self.ledger.seqs[i];
        let len = if s.held.is_empty() { self.ledger.admit(i, want)? } else { self.ledger.reserve(i, want.min(s.left()))? };
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
        let draft = match most {
            0 => 0,
            _ => {
                let regime = (l.cfg.regime)(total);
                (1..=most).take_while(|d| (l.cfg.regime)(total + d) == regime).count()
            }
        };
        // One whose regime has changed has nothing cached, unless it is a single token.
        let granted = if s.held.is_empty() { self.ledger.admit(i, 1)? } else { self.ledger.reserve(i, 1 + draft)? };
        self.ledger.plan(i, 1, granted - 1);
        Ok(granted - 1)
    }

    /// Takes a running sequence's place away and says whether it could: one that is already in the plan keeps its place, and
    /// there may be too little room in the host store to swap it there. It waits from now on; what was computed of it stays in
    /// the prefix cache as long as nobody needs the room, and in the host store until it runs again.
    pub fn preempt(&mut self, seq: SeqId, how: Preempt) -> bool {
        let l = &mut *self.ledger;
        let Some(i) = l.seqs.find(seq) else { return false };
        let s = &mut l.seqs[i];
        if s.state != State::Running || s.planned.is_some() || s.left() == 0 {
            return false;
        }
        match how {
            Preempt::Recompute => {}
            Preempt::Swap if !l.store.put(s, &l.blocks) => return false,
            Preempt::Swap => l.stats.swaps += 1,
        }
        s.preemptions = s.preemptions.saturating_add(1);
        l.stats.preemptions += 1;
        l.step.info.preempted += 1;
        l.vacate(i);
        l.seqs.enlist(i, State::Waiting);
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
        if s.planned.is_some() || s.parked || s.left() == 0 || s.state == State::Held {
            return Err(NoRoom::NotReady);
        }
        if self.token_budget() == 0 || self.seq_budget() == 0 {
            return Err(NoRoom::Budget);
        }
        if s.state == State::Waiting && l.running() >= l.cfg.step_seqs {
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
        self.settle_swaps();
        self.step.phase = Phase::Building;
        self.step.now = now;
        self.step.info = StepInfo::default();
        Ok(StepBuilder { ledger: self })
    }

    /// What the open step runs. A sequence that was cancelled meanwhile is still listed, and its [view](Ledger::view) is gone.
    pub fn plan_items(&self) -> &[PlanItem] {
        &self.step.plan
    }

    /// Blocks to copy before the open step's forward pass, after the [swap-outs](Ledger::swap_outs). The order does not matter.
    pub fn copies(&self) -> &[BlockCopy] {
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
        let start = self.seqs[i].computed;
        if self.seqs[i].state == State::Waiting {
            self.seqs.enlist(i, State::Running);
            self.step.admitted -= 1;
            let s = &mut self.seqs[i];
            s.hit.get_or_insert(start);
            self.store.drop_slots(&mut s.swap);
            self.stats.looked_up_tokens += s.tokens.len() as u64;
            self.stats.hit_tokens += start as u64;
        }
        let s = &mut self.seqs[i];
        s.planned = None;
        s.regime = (self.cfg.regime)(s.tokens.len());
        s.computed += len + accepted.len();
        s.tokens.extend_from_slice(accepted);
        let key = RootKey { key: s.key, regime: s.regime };
        self.blocks.truncate(&mut s.held, s.tokens.len().div_ceil(self.cfg.block_size));
        self.blocks.donate(&mut s.held, key, &s.tokens[..s.computed]);
        self.blocks.slide(&mut s.held, s.computed);
        Ok(())
    }

    /// Closes the open step. Items that were not committed are as if they had not been planned. Without an open step it does
    /// nothing.
    pub fn end_step(&mut self) {
        self.close();
    }

    /// Closes a step whose forward pass failed: nothing is committed that was not before. Preemptions stand, and what the prefix
    /// cache gave up is gone: it is free now. To run the very same plan again, leave the step open: copies and runs may be
    /// repeated.
    pub fn abort_step(&mut self) {
        self.close();
    }

    fn close(&mut self) {
        for k in 0..self.step.plan.len() {
            let Undo { slot, before } = self.step.undo[k];
            let seq = &mut self.seqs[slot];
            // Committed, or cancelled and perhaps another sequence's slot by now.
            if seq.id != self.step.plan[k].seq || seq.planned != Some(k as u32) {
                continue;
            }
            seq.planned = None;
            match before {
                Before::Nothing => {
                    self.blocks.release(&mut seq.held);
                    seq.computed = 0;
                }
                Before::Blocks { len, originals } => {
                    self.blocks.truncate(&mut seq.held, len);
                    let at = seq.computed / self.cfg.block_size;
                    for (g, original) in originals.iter().flat_map(|o| o.iter().take(self.cfg.groups.len()).enumerate()) {
                        let copy = std::mem::replace(&mut seq.held.tables[g][at], *original);
                        self.blocks.pools[g].retain(*original);
                        self.blocks.give_back(g, copy, true);
                    }
                }
            }
        }
        for copy in self.step.copies.drain(..) {
            self.blocks.give_back(copy.group, copy.from, true);
        }
        self.store.ins.clear();
        self.step.plan.clear();
        self.step.undo.clear();
        self.step.admitted = 0;
        self.step.phase = Phase::Closed;
    }

    /// Finds what is cached of a sequence that holds nothing, and makes up to `want` positions after that writable, at least
    /// one. What it takes to undo that is pushed; [`Ledger::plan`] must follow.
    fn admit(&mut self, i: usize, want: usize) -> Result<usize, NoRoom> {
        let (key, groups) = (self.key_of(&self.seqs[i]), self.cfg.groups.len());
        let Ledger { seqs, blocks, store, step, cfg, .. } = self;
        let s = &mut seqs[i];
        let mut most = s.reusable().len();
        loop {
            let found = blocks.adopt(key, &s.tokens[..most], &mut s.held);
            let stored = s.swap.tokens > found.tokens;
            let start = if stored { s.swap.tokens } else { found.tokens };
            let skip = if stored { blocks.first_blocks(start) } else { [0; MAX_GROUPS] };
            let copied = step.copies.len();
            if let Some(node) = found.partial.filter(|_| !stored) {
                for g in 0..groups {
                    let from = blocks.tree.block(node, g).expect("a usable prefix has the blocks that its next token sees");
                    // Held until the step is over: room for others is not made here, and copies can be made twice.
                    blocks.pools[g].retain(from);
                    step.copies.push(BlockCopy { group: g, from, to: BlockId::NONE });
                }
            }
            let got = blocks.room(&s.held, skip, 0, start, want.min(s.tokens.len() - start));
            if got > 0 {
                blocks.extend(&mut s.held, start + got, skip);
                for copy in &mut step.copies[copied..] {
                    copy.to = s.held.tables[copy.group][found.nodes];
                }
                if stored {
                    store.fetch(s, found.nodes, blocks);
                }
                s.computed = start;
                step.undo.push(Undo { slot: i, before: Before::Nothing });
                return Ok(got);
            }
            let partial = step.copies.len() > copied;
            for copy in step.copies.drain(copied..) {
                blocks.give_back(copy.group, copy.from, true);
            }
            blocks.release(&mut s.held);
            if !partial {
                return Err(NoRoom::Blocks);
            }
            // There is no room for a copy: whole blocks alone.
            most = found.nodes * cfg.block_size;
        }
    }

    /// Makes up to `want` positions after the cached ones writable for a sequence that holds blocks, at least one. What it takes
    /// to undo that is pushed; [`Ledger::plan`] must follow.
    fn reserve(&mut self, i: usize, want: usize) -> Result<usize, NoRoom> {
        let groups = self.cfg.groups.len();
        let Ledger { seqs, blocks, step, cfg, .. } = self;
        let s = &mut seqs[i];
        let (bs, start, len) = (cfg.block_size, s.computed, s.held.len());
        let at = start / bs;
        let partial = (start % bs > 0).then(|| s.held.tables[0][at]);
        // Forks that run share it. Where only the tree does, it need not.
        let copy = partial.is_some_and(|b| blocks.pools[0].users(b) > 1);
        let got = match !copy && start + want <= len * bs {
            // Most decode rows write on in their last block, and need no other.
            true => want,
            false => blocks.room(&s.held, [0; MAX_GROUPS], usize::from(copy), start, want),
        };
        if got == 0 || (copy && blocks.pools.iter().any(|p| p.available() == 0)) {
            return Err(NoRoom::Blocks);
        }
        let mut originals = None;
        if copy {
            let mut from = [BlockId::NONE; MAX_GROUPS];
            for (g, from) in from.iter_mut().enumerate().take(groups) {
                let to = blocks.take(g).expect("as many blocks as were counted");
                // Its reference stays with the copy until the step is over: nobody can be given the source or write it in
                // place, so that copies can be made twice and undoing them finds it as it was.
                *from = std::mem::replace(&mut s.held.tables[g][at], to);
                step.copies.push(BlockCopy { group: g, from: *from, to });
            }
            originals = Some(from);
        } else if let Some(block) = partial {
            blocks.disown(0, block);
        }
        blocks.extend(&mut s.held, start + got, [0; MAX_GROUPS]);
        step.undo.push(Undo { slot: i, before: Before::Blocks { len, originals } });
        Ok(got)
    }

    fn plan(&mut self, i: usize, len: usize, draft: usize) {
        let s = &mut self.seqs[i];
        self.step.admitted += usize::from(s.state == State::Waiting);
        s.planned = Some(self.step.plan.len() as u32);
        let last = s.computed + len == s.tokens.len();
        self.step.plan.push(PlanItem { seq: s.id, start: s.computed, len, last, draft });
        self.step.info.tokens += len + draft;
    }
}
