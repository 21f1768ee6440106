//! Sequences that wait, but not for their turn: for the first of their group to run the prompt, or for the token that their caller
//! chooses. Policies do not see them. They hold no blocks: nobody can be kept from running by one who waits for somebody else.
//!
//! Invariant: a parked sequence is waiting, and [`Ledger::append`] or [`Ledger::unpark`] brings it back to the others that do.
#![forbid(unsafe_code)]

use super::ledger::Ledger;
use super::seq::State;
use crate::ids::SeqId;
use std::mem;

impl Ledger {
    /// Takes a waiting sequence out of the sight of policies.
    pub(crate) fn park(&mut self, seq: SeqId) {
        if let Some(i) = self.seqs.find(seq).filter(|&i| self.seqs[i].state == State::Waiting && self.seqs[i].planned.is_none()) {
            self.seqs[i].parked = true;
        }
    }

    /// Lets a parked sequence wait like others.
    pub(crate) fn unpark(&mut self, seq: SeqId) {
        if let Some(i) = self.seqs.find(seq) {
            self.seqs[i].parked = false;
        }
    }

    /// Parks a running sequence that has no token to run. What was computed of it is found again, as long as nobody needs the room.
    pub(crate) fn step_aside(&mut self, seq: SeqId) {
        let runs = |i: &usize| {
            let s = &self.seqs[*i];
            s.state == State::Running && s.planned.is_none() && s.left() == 0
        };
        if let Some(i) = self.seqs.find(seq).filter(runs) {
            self.vacate(i);
            self.seqs.enlist(i, State::Waiting);
            self.seqs[i].parked = true;
        }
    }

    /// Gives a parked sequence what another one of the same tokens has run, all of them: it runs from now on with the same blocks, as
    /// a fork does, where one more may run. Otherwise it stays parked, and its next token comes all the same: it will find the others
    /// cached. False where it is not parked.
    pub(crate) fn join(&mut self, seq: SeqId, of: SeqId) -> bool {
        let (Some(i), Some(k)) = (self.seqs.find(of), self.seqs.find(seq)) else { return false };
        if !self.seqs[k].parked {
            return false;
        }
        // What the other one was seen to run counts as seen.
        self.seqs[k].reuse = usize::MAX;
        let parent = &self.seqs[i];
        debug_assert_eq!(parent.tokens, self.seqs[k].tokens, "one of another group");
        if parent.state != State::Running || parent.left() > 0 || self.running() >= self.cfg.step_seqs {
            return true;
        }
        let (computed, regime) = (parent.computed, parent.regime);
        let mut held = mem::take(&mut self.seqs[k].held);
        self.blocks.share(&self.seqs[i].held, computed.div_ceil(self.cfg.block_size), &mut held);
        let child = &mut self.seqs[k];
        (child.held, child.computed, child.regime, child.parked) = (held, computed, regime, false);
        child.hit.get_or_insert(computed);
        self.stats.looked_up_tokens += computed as u64;
        self.stats.hit_tokens += computed as u64;
        self.seqs.enlist(k, State::Running);
        true
    }
}
