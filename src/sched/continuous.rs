//! Continuous batching (Yu et al., 2022) with chunked prefill (Agrawal et al., 2023): sequences join and leave at every step,
//! and a long prompt is run in chunks beside the decode rows instead of in front of them.
//!
//! ```text
//! rank all running sequences
//! the first in rank             whatever it needs: somebody always gets on
//! decode rows, by rank          cheap, and somebody is reading along
//! prefill chunks, by rank       from what the step has left
//! waiting sequences, by rank    while all that run could be completed as far as they are known, and one token more
//! no block for one of them      preempt those ranked behind it, the last first
//! ```
//!
//! Rank is the time at which a sequence is due, earlier by `ageing` for each level of priority:
//!
//! ```text
//! due  = arrival + patience           without a deadline
//!        min(deadline, the same)      with one; one that has passed at arrival is none
//! rank = due - priority * ageing
//! ```
//!
//! That is "earliest deadline first" (Liu and Layland, 1973), everybody else given a deadline too. Nothing in it changes
//! while a sequence waits or runs: two of them age alike, so that their order is fixed when the second arrives. As a deadline brings a
//! sequence forward by `patience` at most, **nobody starves**: whoever arrives more than `patience + (their priority - mine) *
//! ageing` after me comes after me, however urgent; so only finitely many ever come before me.
//!
//! With [`prefix_worth`](ContinuousBatching::prefix_worth), those that wait are admitted by another rank, earlier by so much for
//! each token that is cached of them: longest prefix first (Zheng et al., 2024, "SGLang"), as far as that outweighs the wait. The
//! bound on how much later one may arrive and pass grows by as much as a whole context is worth.
//!
//! Why there is no livelock. Only those ranked behind are preempted: the first in rank never is, and as it could fill the
//! whole pool if it must, every step gets it on. A preempted sequence is admitted again only when there is room for all that
//! run and for itself, each with one token more than is known; so between two preemptions of one sequence some sequence has
//! grown into another block or another rotary regime, or was forked. That bounds them all: each such growth costs each of the
//! others one preemption at most, so that with `n` sequences there are at most `n - 1` for each block that is filled, beside
//! those for forks and regimes.
#![forbid(unsafe_code)]

use super::{NoRoom, Preempt, Scheduler, SeqView, StepBuilder};
use crate::ids::SeqId;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::mem;
use std::time::Duration;

/// See the module's documentation. Its lists are sized at the first step, for as many sequences as there can be.
#[derive(Debug)]
pub struct ContinuousBatching {
    /// Prefill tokens in a step that has decode rows, all sequences together. Small keeps the time between two tokens short, large
    /// keeps the time to the first token short. At least one runs.
    pub max_chunk: usize,
    /// Guesses to ask for with each decode row; the engine clamps them to what its drafter gives.
    pub draft: usize,
    /// How much waiting one level of priority is worth.
    pub ageing: Duration,
    /// How long after its arrival a sequence without a deadline is due: the most that a deadline can gain over such a one, in
    /// time of arrival. 0: deadlines count for nothing.
    pub patience: Duration,
    /// How much waiting a token that is already cached is worth, for admission: with 50 ms a sequence passes one that arrived 10
    /// seconds before it by a shared prefix that is 200 tokens longer. 0, the default, costs nothing; else each waiting
    /// sequence is looked up in each step that could admit one, and again in one that admits several, at O(its tokens).
    pub prefix_worth: Duration,
    running: Vec<Entry>,
    waiting: BinaryHeap<Reverse<Entry>>,
    /// Guesses for each decode row of this step.
    guesses: usize,
}

/// Sorts by rank; the smallest comes first. Names break ties, and rise in the order of submission.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Entry {
    rank: i128,
    seq: SeqId,
    /// Known tokens still to run; 0 once it is preempted.
    left: usize,
    total: usize,
}

impl ContinuousBatching {
    /// With this [`max_chunk`](Self::max_chunk).
    #[must_use]
    pub fn max_chunk(mut self, tokens: usize) -> Self {
        self.max_chunk = tokens;
        self
    }

    /// With this [`ageing`](Self::ageing).
    #[must_use]
    pub fn ageing(mut self, a_level: Duration) -> Self {
        self.ageing = a_level;
        self
    }

    /// With this [`prefix_worth`](Self::prefix_worth).
    #[must_use]
    pub fn prefix_worth(mut self, a_token: Duration) -> Self {
        self.prefix_worth = a_token;
        self
    }

    /// With this [`patience`](Self::patience).
    #[must_use]
    pub fn patience(mut self, without_deadline: Duration) -> Self {
        self.patience = without_deadline;
        self
    }
}

impl Default for ContinuousBatching {
    /// Chunks of 512 tokens, up to 8 guesses, 10 seconds a level of priority, as many of patience.
    fn default() -> Self {
        ContinuousBatching {
            max_chunk: 512,
            draft: 8,
            ageing: Duration::from_secs(10),
            patience: Duration::from_secs(10),
            prefix_worth: Duration::ZERO,
            running: Vec::new(),
            waiting: BinaryHeap::new(),
            guesses: 0,
        }
    }
}

impl Scheduler for ContinuousBatching {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        self.running.clear();
        self.running.reserve(step.max_seqs());
        self.waiting.clear();
        self.waiting.reserve(step.max_seqs());
        let (ageing, patience) = (self.ageing, self.patience);
        self.running.extend(step.running().map(|s| Entry::new(s, ageing, patience)));
        self.running.sort_unstable();

        let decodes = self.running.iter().filter(|e| e.left == 1).count();
        // No row's guesses may take another row's token, or push anybody out.
        self.guesses = self.draft.min(step.max_draft()).min((step.token_budget() / decodes.max(1)).saturating_sub(1));
        if self.guesses > 0 && self.needed(step, self.guesses) > step.free_blocks() {
            self.guesses = 0;
        }
        // Decode rows come first in the budget, and a step that reads no prompt at all would let the others wait for ever.
        let mut chunk = match decodes {
            0 => step.token_budget(),
            _ => self.max_chunk.min(step.token_budget().saturating_sub(decodes)).max(1),
        };
        if let Some(first) = self.running.first() {
            let decodes = first.left == 1;
            self.run(step, 0, decodes, &mut chunk);
        }
        for decodes in [true, false] {
            for i in 1..self.running.len() {
                self.run(step, i, decodes, &mut chunk);
            }
        }
        self.admit(step, chunk);
    }
}

impl ContinuousBatching {
    /// Gives the `i`-th in rank its turn, if it has one in this round; takes room from those behind it.
    fn run(&mut self, step: &mut StepBuilder<'_>, i: usize, decodes: bool, chunk: &mut usize) {
        let Entry { seq, left, .. } = self.running[i];
        if left == 0 || (left == 1) != decodes || (!decodes && *chunk == 0) {
            return;
        }
        loop {
            let refused = if decodes {
                step.decode(seq, self.guesses).err()
            } else {
                step.prefill(seq, *chunk).map(|granted| *chunk -= granted).err()
            };
            if refused != Some(NoRoom::Blocks) || !self.preempt_behind(step, i) {
                return;
            }
        }
    }

    /// Blocks that those that run need to complete what is known of them, and so many tokens more.
    fn needed(&self, step: &StepBuilder<'_>, more: usize) -> usize {
        self.running.iter().filter(|e| e.left > 0).map(|e| step.blocks_for(e.seq, e.total + more)).sum()
    }

    /// Preempts the last in rank behind `i` that is not in the plan yet: into the host store, where that has the room.
    fn preempt_behind(&mut self, step: &mut StepBuilder<'_>, i: usize) -> bool {
        let mut preempt = |seq| step.preempt(seq, Preempt::Swap) || step.preempt(seq, Preempt::Recompute);
        let victim = self.running[i + 1..].iter_mut().rev().find(|e| e.left > 0 && preempt(e.seq));
        victim.map(|e| e.left = 0).is_some()
    }

    /// Admits waiting sequences strictly by rank: one that fits must not pass one that does not, or a long prompt would never
    /// find its room.
    fn admit(&mut self, step: &mut StepBuilder<'_>, mut chunk: usize) {
        if chunk == 0 || step.token_budget() == 0 || step.seq_budget() == 0 {
            return;
        }
        // The first is found without ranking the others: in a full cache it does not fit, and that is that.
        let Some(mut next) = self.ranked(step).min() else { return };
        // What those that run will need to complete what is known of them. A sequence preempted above is not running any more:
        // its blocks are counted as free.
        let mut promised = self.needed(step, 1);
        let mut alone = self.running.iter().all(|e| e.left == 0);
        let mut ranked = false;
        loop {
            // Alone it need not ask: it was submitted because the pool can hold it.
            if !alone && promised + step.blocks_for(next.seq, next.total + 1) > step.free_blocks() {
                return;
            }
            match step.prefill(next.seq, chunk) {
                Ok(granted) => chunk -= granted,
                Err(_) => return,
            }
            promised += step.blocks_for(next.seq, next.total + 1);
            alone = false;
            if chunk == 0 || step.seq_budget() == 0 {
                return;
            }
            if !ranked {
                ranked = true;
                let mut heap = mem::take(&mut self.waiting).into_vec();
                heap.extend(self.ranked(step).map(Reverse));
                self.waiting = BinaryHeap::from(heap);
            }
            let Some(Reverse(entry)) = self.waiting.pop() else { return };
            next = entry;
        }
    }

    /// Those that wait, by their rank for admission.
    fn ranked(&self, step: &StepBuilder<'_>) -> impl Iterator<Item = Entry> {
        let (ageing, patience, worth) = (self.ageing, self.patience, self.prefix_worth.as_nanos() as i128);
        step.waiting().map(move |s| {
            let mut entry = Entry::new(s, ageing, patience);
            if worth > 0 {
                entry.rank -= worth.saturating_mul(step.cached_prefix(s.id()) as i128);
            }
            entry
        })
    }
}

impl Entry {
    fn new(s: SeqView<'_>, ageing: Duration, patience: Duration) -> Self {
        // 128 bits: no arrival, priority and ageing overflow.
        let [arrival, ageing, patience] = [s.arrival(), ageing, patience].map(|t| t.as_nanos() as i128);
        let deadline = s.deadline().map(|t| t.as_nanos() as i128).filter(|t| *t > arrival);
        let due = deadline.map_or(arrival + patience, |t| t.min(arrival + patience));
        let rank = due - i128::from(s.priority()) * ageing;
        Entry { rank, seq: s.id(), left: s.left(), total: s.total() }
    }
}
