//! Sequences as the ledger keeps them: slots that are used again, names that are not, and lists threaded through the slots,
//! so that moving a sequence from one list to another costs the same however long they are.
#![forbid(unsafe_code)]

use super::blocks::Hold;
use super::swap::Swapped;
use crate::ids::{BlockId, SeqId, TokenId};
use std::time::Duration;

/// Where a sequence stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SeqState {
    /// Has tokens to run and is not admitted. What was computed of it lies in the prefix cache, as long as nobody needs the room.
    Waiting,
    /// Admitted: its blocks are its own until it ends or is preempted.
    Running,
    /// Finished and kept for a follow-up: its tokens are. What was computed of it lies in the prefix cache.
    Held,
}

/// Read-only look at a sequence.
#[derive(Clone, Copy)]
pub struct SeqView<'a>(pub(super) &'a Seq);

impl<'a> SeqView<'a> {
    /// Its name. Names rise in the order of submission.
    pub fn id(self) -> SeqId {
        self.0.id
    }

    /// Where it stands.
    pub fn state(self) -> SeqState {
        match self.0.state {
            State::Waiting => SeqState::Waiting,
            State::Running => SeqState::Running,
            State::Held | State::Vacant => SeqState::Held,
        }
    }

    /// When it was submitted, or resumed.
    pub fn arrival(self) -> Duration {
        self.0.arrival
    }

    /// Higher is more urgent.
    pub fn priority(self) -> i32 {
        self.0.priority
    }

    /// When its owner would like it done, if there is such a time.
    pub fn deadline(self) -> Option<Duration> {
        self.0.deadline
    }

    /// All known tokens: the prompt and what was generated.
    pub fn tokens(self) -> &'a [TokenId] {
        &self.0.tokens
    }

    /// Number of known tokens. Length-dependent rotary scalings go by it.
    pub fn total(self) -> usize {
        self.0.tokens.len()
    }

    /// Tokens whose keys and values it has in blocks of its own: the first position of the next run. 0 unless it runs; for what
    /// a waiting one would find in the prefix cache see [`Ledger::cached_prefix`](super::Ledger::cached_prefix).
    pub fn cached(self) -> usize {
        self.0.computed
    }

    /// Tokens that it found cached when it was first admitted since it was submitted or resumed, and did not run.
    pub fn hit(self) -> usize {
        self.0.hit.unwrap_or(0)
    }

    /// Known tokens still to run: 1 for a decode row, more during a prefill, 0 between a commit and the token sampled
    /// from it. Of a waiting one all, though it may find a part of them cached.
    pub fn left(self) -> usize {
        self.0.left()
    }

    /// Tokens appended since it was submitted or resumed.
    pub fn generated(self) -> usize {
        self.0.tokens.len() - self.0.turn
    }

    /// Tokens that may still be appended.
    pub fn remaining(self) -> usize {
        self.0.limit - self.0.tokens.len()
    }

    /// Times it lost its place to another sequence.
    pub fn preemptions(self) -> u32 {
        self.0.preemptions
    }

    /// Its blocks of a group in the order of positions, [`BlockId::NONE`] where they lie behind the group's window and were given
    /// back. During a step they cover what the step runs. Empty unless it runs.
    pub fn block_table(self, group: usize) -> &'a [BlockId] {
        self.0.held.tables.get(group).map_or(&[], Vec::as_slice)
    }

    /// It waits for another sequence's prompt or for its caller's choice, not for its turn: no policy can run it now.
    pub fn parked(self) -> bool {
        self.0.parked
    }

    /// It was swapped out: its blocks lie in host memory.
    pub fn swapped(self) -> bool {
        self.0.swap.tokens > 0
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Vacant,
    Waiting,
    Running,
    Held,
}

pub(super) struct Seq {
    pub(super) id: SeqId,
    pub(super) state: State,
    /// To be held when it finishes.
    pub(super) hold: bool,
    /// What must agree, besides tokens, for blocks to be shared.
    pub(super) key: u64,
    pub(super) tokens: Vec<TokenId>,
    /// Known tokens when it was submitted or resumed.
    pub(super) turn: usize,
    /// Tokens it may grow to.
    pub(super) limit: usize,
    pub(super) computed: usize,
    /// The regime that `computed` tokens were computed in; means nothing where there are none.
    pub(super) regime: u32,
    /// See [`SeqView::hit`]; none before the first admission.
    pub(super) hit: Option<usize>,
    /// Cached tokens that it may take up.
    pub(super) reuse: usize,
    pub(super) held: Hold,
    pub(super) swap: Swapped,
    pub(super) arrival: Duration,
    pub(super) priority: i32,
    pub(super) deadline: Option<Duration>,
    pub(super) preemptions: u32,
    /// Its item in the plan of the open step.
    pub(super) planned: Option<u32>,
    /// Waiting, and not for room: see [`SeqView::parked`].
    pub(super) parked: bool,
    link: Link,
}

impl Seq {
    pub(super) fn left(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// What it may find cached: at least one token is run, for its logits.
    pub(super) fn reusable(&self) -> &[TokenId] {
        &self.tokens[..self.tokens.len().saturating_sub(1).min(self.reuse)]
    }

    /// It runs, or is about to.
    pub(super) fn active(&self) -> bool {
        self.state == State::Running || self.planned.is_some()
    }
}

/// The slots and the lists through them.
pub(super) struct Slab {
    slots: Vec<Seq>,
    vacant: List,
    pub(super) waiting: List,
    pub(super) running: List,
    live: usize,
    serial: u64,
}

impl Slab {
    pub(super) fn new() -> Self {
        Slab { slots: Vec::new(), vacant: List::new(), waiting: List::new(), running: List::new(), live: 0, serial: 0 }
    }

    /// Slot of a living sequence.
    pub(super) fn find(&self, id: SeqId) -> Option<usize> {
        let slot = (id.0 & SLOT_MASK) as usize;
        self.slots.get(slot).is_some_and(|s| s.id == id && s.state != State::Vacant).then_some(slot)
    }

    /// Sequences alive.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// True once no further name can be given out.
    pub(super) fn exhausted(&self) -> bool {
        self.serial >= 1 << (u64::BITS - SLOT_BITS) || self.live >= SLOT_MASK as usize
    }

    /// A slot for a new sequence. The caller fills in and lists it.
    pub(super) fn insert(&mut self, state: State, tokens: Vec<TokenId>, limit: usize, (held, swap): (Hold, Swapped)) -> usize {
        let slot = self.vacant.pop_front(&mut self.slots).unwrap_or(self.slots.len());
        let id = SeqId(self.serial << SLOT_BITS | slot as u64);
        self.serial += 1;
        self.live += 1;
        let seq = Seq {
            id,
            state,
            hold: false,
            key: 0,
            turn: tokens.len(),
            tokens,
            limit,
            computed: 0,
            regime: 0,
            hit: None,
            reuse: usize::MAX,
            held,
            swap,
            arrival: Duration::ZERO,
            priority: 0,
            deadline: None,
            preemptions: 0,
            planned: None,
            parked: false,
            link: Link::NEW,
        };
        match self.slots.get_mut(slot) {
            Some(s) => *s = seq,
            None => self.slots.push(seq),
        }
        slot
    }

    /// Frees a slot. The caller has taken the blocks back.
    pub(super) fn remove(&mut self, i: usize) {
        self.enlist(i, State::Vacant);
        let seq = &mut self.slots[i];
        debug_assert!(seq.held.is_empty() && seq.swap.tokens == 0, "{} goes with blocks", seq.id);
        seq.planned = None;
        seq.tokens = Vec::new();
        (seq.held, seq.swap) = Default::default();
        self.vacant.push_back(&mut self.slots, i);
        self.live -= 1;
    }

    /// Moves a sequence to the end of the list of `state`; a preempted one comes to the front of the waiting.
    pub(super) fn enlist(&mut self, i: usize, state: State) {
        let from = std::mem::replace(&mut self.slots[i].state, state);
        if self.slots[i].link.listed {
            match from {
                State::Waiting => self.waiting.unlink(&mut self.slots, i),
                State::Running => self.running.unlink(&mut self.slots, i),
                State::Held | State::Vacant => {}
            }
        }
        match state {
            State::Waiting if from == State::Running => self.waiting.push_front(&mut self.slots, i),
            State::Waiting => self.waiting.push_back(&mut self.slots, i),
            State::Running => self.running.push_back(&mut self.slots, i),
            State::Held | State::Vacant => {}
        }
    }

    pub(super) fn iter(&self, list: &List) -> impl Iterator<Item = &Seq> + use<'_> {
        std::iter::successors(self.slots.get(list.head as usize), |s| self.slots.get(s.link.next as usize))
    }

    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut Seq> {
        self.slots.iter_mut().filter(|s| s.state != State::Vacant)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Seq> {
        self.slots.iter().filter(|s| s.state != State::Vacant)
    }
}

impl std::ops::Index<usize> for Slab {
    type Output = Seq;
    fn index(&self, i: usize) -> &Seq {
        &self.slots[i]
    }
}

impl std::ops::IndexMut<usize> for Slab {
    fn index_mut(&mut self, i: usize) -> &mut Seq {
        &mut self.slots[i]
    }
}

/// A doubly linked list through the slots.
pub(super) struct List {
    head: u32,
    tail: u32,
    len: usize,
}

impl List {
    fn new() -> Self {
        List { head: NONE, tail: NONE, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn push_back(&mut self, slots: &mut [Seq], i: usize) {
        slots[i].link = Link { prev: self.tail, next: NONE, listed: true };
        match slots.get_mut(self.tail as usize) {
            Some(tail) => tail.link.next = i as u32,
            None => self.head = i as u32,
        }
        self.tail = i as u32;
        self.len += 1;
    }

    fn push_front(&mut self, slots: &mut [Seq], i: usize) {
        slots[i].link = Link { prev: NONE, next: self.head, listed: true };
        match slots.get_mut(self.head as usize) {
            Some(head) => head.link.prev = i as u32,
            None => self.tail = i as u32,
        }
        self.head = i as u32;
        self.len += 1;
    }

    fn unlink(&mut self, slots: &mut [Seq], i: usize) {
        let Link { prev, next, .. } = std::mem::replace(&mut slots[i].link, Link::NEW);
        match slots.get_mut(prev as usize) {
            Some(s) => s.link.next = next,
            None => self.head = next,
        }
        match slots.get_mut(next as usize) {
            Some(s) => s.link.prev = prev,
            None => self.tail = prev,
        }
        self.len -= 1;
    }

    fn pop_front(&mut self, slots: &mut [Seq]) -> Option<usize> {
        let i = self.head as usize;
        (self.head != NONE).then(|| self.unlink(slots, i))?;
        Some(i)
    }
}

/// A slot is in one list at most: of the vacant, the waiting or the running.
#[derive(Clone, Copy)]
struct Link {
    prev: u32,
    next: u32,
    listed: bool,
}

impl Link {
    const NEW: Link = Link { prev: NONE, next: NONE, listed: false };
}

/// No slot has this index: a slab holds fewer than 2^24.
const NONE: u32 = u32::MAX;
/// Of a name, the low bits are the slot and the others a serial number: a name is found at once and never comes back.
const SLOT_BITS: u32 = 24;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;
