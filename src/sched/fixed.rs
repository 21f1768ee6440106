//! A batch that nobody joins: what static and dynamic batching have in common. They differ in when one starts.
//!
//! ```text
//! start   take waiting sequences in their order while the pool holds each to the last token that it may have
//! run     the first of the batch        whatever it needs
//!         decode rows, in order         one token each
//!         prompts, in order             in chunks, from what the step has left; who has had one is admitted
//! over    once none of it runs, and none is left to be admitted
//! ```
//!
//! The batch is what runs, and those chosen that have not had their first chunk. So forks of a running sequence are of the batch,
//! and a sequence that ends in it and is resumed is not. The room for whole lives is there from the start; only forks, and shared
//! blocks that a new rotary regime makes worthless, can take it away. Then the last of the batch is preempted, and nobody is
//! admitted any more.
//!
//! Invariant: the first of the batch gets on in every step, and each of its sequences is preempted once at most.
#![forbid(unsafe_code)]

use super::{NoRoom, Preempt, SeqState, StepBuilder};
use crate::ids::SeqId;
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct FixedBatch {
    /// Chosen and not admitted yet.
    joining: Vec<Chosen>,
    /// The whole batch, during a step.
    members: Vec<Member>,
}

#[derive(Clone, Copy, Debug)]
struct Chosen {
    seq: SeqId,
    arrival: Duration,
    total: usize,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    seq: SeqId,
    /// Known tokens still to run; 0 once it is preempted.
    left: usize,
}

impl FixedBatch {
    /// The size of a full batch: no more sequences than a step holds, and a token in each step for all of them.
    pub(super) fn full(step: &StepBuilder<'_>, size: usize) -> usize {
        size.min(step.seq_budget()).min(step.token_budget()).min(step.max_seqs()).max(1)
    }

    /// When a wait is over; a wait of [`Duration::MAX`] never is.
    pub(super) fn due(from: Duration, wait: Duration) -> Option<Duration> {
        from.checked_add(wait).filter(|_| wait < Duration::MAX)
    }

    /// Chooses up to `size` of those that wait. Only for when no batch [runs](Self::run).
    pub(super) fn start(&mut self, step: &StepBuilder<'_>, size: usize) {
        let mut room = step.free_blocks();
        for s in step.waiting().take(size) {
            let need = step.blocks_for(s.id(), s.total() + s.remaining());
            // Alone it need not ask: it was submitted because the pool can hold it.
            if need > room && !self.joining.is_empty() {
                break;
            }
            room = room.saturating_sub(need);
            self.joining.push(Chosen { seq: s.id(), arrival: s.arrival(), total: s.total() });
        }
    }

    /// Runs the batch one step further; false where there is none.
    pub(super) fn run(&mut self, step: &mut StepBuilder<'_>) -> bool {
        // Once, and no allocation later.
        self.joining.reserve(step.max_seqs().saturating_sub(self.joining.len()));
        self.members.clear();
        self.members.reserve(step.max_seqs());

        self.joining.retain(|c| {
            // One that was admitted, ended and was resumed waits too, with another arrival or more tokens.
            let waits = step.view(c.seq).filter(|s| s.state() == SeqState::Waiting && !s.parked());
            waits.is_some_and(|s| (s.arrival(), s.total()) == (c.arrival, c.total))
        });
        self.members.extend(step.running().map(|s| Member { seq: s.id(), left: s.left() }));
        let running = self.members.len();
        let decodes = self.members.iter().filter(|m| m.left == 1).count();
        let left = |seq| step.view(seq).map_or(0, |s| s.left());
        self.members.extend(self.joining.iter().map(|c| Member { seq: c.seq, left: left(c.seq) }));
        if self.members.is_empty() {
            return false;
        }

        let mut chunk = step.token_budget().saturating_sub(decodes).max(1);
        self.turn(step, 0, running, &mut chunk);
        for i in 1..running {
            if self.members[i].left == 1 {
                self.turn(step, i, running, &mut chunk);
            }
        }
        for i in 1..self.members.len() {
            if i >= running || self.members[i].left > 1 {
                self.turn(step, i, running, &mut chunk);
            }
        }
        true
    }

    /// Runs the `i`-th of the batch; takes room from those behind it. The first `running` are admitted.
    fn turn(&mut self, step: &mut StepBuilder<'_>, i: usize, running: usize, chunk: &mut usize) {
        let Member { seq, left } = self.members[i];
        let decodes = i < running && left == 1;
        if left == 0 || (!decodes && *chunk == 0) || (i >= running && self.joining.is_empty()) {
            return;
        }
        loop {
            let refused = if decodes {
                step.decode(seq, 0).err()
            } else {
                step.prefill(seq, *chunk).map(|granted| *chunk -= granted).err()
            };
            if refused != Some(NoRoom::Blocks) || i + 1 >= running {
                return;
            }
            let behind = self.members[i + 1..running].iter_mut().rev();
            let Some(last) = behind.into_iter().find(|m| m.left > 0 && step.preempt(m.seq, Preempt::Recompute)) else { return };
            last.left = 0;
            self.joining.clear();
        }
    }
}
