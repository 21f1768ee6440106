//! The loop of a simulation: what an engine does, with a clock that the cost model moves.
//!
//! ```text
//! requests and cancels that are due -> policy's turn -> items?  yes: the clock moves by the step's cost; commit, "sample", end
//!                                                               no:  the clock moves to the next arrival, cancel or wake_at
//! ```
#![forbid(unsafe_code)]

use super::report::{End, Tally};
use super::{Arrival, Ran, Report, SimConfig, SimError, StepLoad, Turn};
use crate::ids::{SeqId, TokenId};
use crate::sample::{Draws, Stream};
use crate::sched::{Ledger, NewSeq, Scheduler, SeqState};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

/// Runs to the end, or to the error; `turns` are those that came to pass.
pub(super) fn run(
    config: &SimConfig,
    arrivals: &[Arrival],
    policy: &mut dyn Scheduler,
    turns: &mut Vec<Turn>,
) -> Result<Report, SimError> {
    let mut world = World::new(config, arrivals, turns)?;
    loop {
        world.receive();
        if world.turns.len() >= config.max_turns {
            match world.of.len() + arrivals.len() - world.next {
                0 => break,
                unfinished => return Err(SimError::Endless { unfinished, limit: config.max_turns }),
            }
        }
        let load = world.turn(policy);
        world.check();
        match load {
            Some(load) => world.step(&load)?,
            None => match world.idle_until() {
                Some(when) => world.now = when,
                None if world.of.is_empty() => break,
                None => return Err(SimError::Stalled { unfinished: world.of.len(), at: world.now }),
            },
        }
    }
    Ok(world.tally.report(arrivals))
}

struct World<'a> {
    config: &'a SimConfig,
    arrivals: &'a [Arrival],
    /// Indices of the requests in the order of their arrival, and how many have come.
    order: Vec<usize>,
    next: usize,
    cancels: BinaryHeap<Reverse<(Duration, usize)>>,
    ledger: Ledger,
    /// Blocks of the pool.
    blocks: usize,
    now: Duration,
    /// The requests that wait or run, both ways.
    of: HashMap<SeqId, usize>,
    seqs: Vec<Option<SeqId>>,
    /// Sequences that ran before the policy's turn, and how often they had been preempted.
    running: Vec<(SeqId, u32)>,
    /// Cache slots that the open step holds, and those of them without a token.
    slots: (usize, usize),
    tally: Tally,
    turns: &'a mut Vec<Turn>,
}

impl<'a> World<'a> {
    fn new(config: &'a SimConfig, arrivals: &'a [Arrival], turns: &'a mut Vec<Turn>) -> Result<Self, SimError> {
        arrivals.iter().enumerate().try_for_each(|(k, a)| a.validate(k))?;
        config.cost.time(&StepLoad::default())?;
        let mut order: Vec<usize> = (0..arrivals.len()).collect();
        order.sort_by_key(|&r| arrivals[r].at);
        let ledger = Ledger::new(config.ledger())?;
        Ok(World {
            config,
            arrivals,
            order,
            next: 0,
            cancels: BinaryHeap::new(),
            blocks: ledger.available_blocks(),
            ledger,
            now: Duration::ZERO,
            of: HashMap::new(),
            seqs: vec![None; arrivals.len()],
            running: Vec::new(),
            slots: (0, 0),
            tally: Tally::new(arrivals.len()),
            turns,
        })
    }

    /// Whatever has come by now. Cancels first: who comes as another goes finds its place.
    fn receive(&mut self) {
        while let Some(&Reverse((at, r))) = self.cancels.peek()
            && at <= self.now
        {
            self.cancels.pop();
            if let Some(seq) = self.seqs[r].take() {
                self.ledger.cancel(seq).expect("a sequence that waits or runs");
                self.of.remove(&seq);
                self.tally.outcomes[r].end = End::Cancelled;
            }
        }
        while let Some(&r) = self.order.get(self.next)
            && self.arrivals[r].at <= self.now
        {
            self.next += 1;
            match self.submit(r) {
                Some(seq) => {
                    self.seqs[r] = Some(seq);
                    self.of.insert(seq, r);
                    let Arrival { at, cancel, .. } = self.arrivals[r];
                    // A time past the end of time never comes.
                    self.cancels.extend(cancel.and_then(|c| at.checked_add(c)).map(|t| Reverse((t, r))));
                }
                None => self.tally.outcomes[r].end = End::Refused,
            }
        }
    }

    fn submit(&mut self, r: usize) -> Option<SeqId> {
        let a = &self.arrivals[r];
        // Before its prompt is made up: the list may say anything.
        let most = self.config.context.min(self.config.blocks.saturating_mul(self.config.block_size));
        if a.prompt_tokens.saturating_add(a.output_tokens) > most {
            return None;
        }
        let tokens = (0..a.prompt_tokens).map(|p| self.token(r, p)).collect();
        let deadline = a.deadline.and_then(|d| a.at.checked_add(d));
        let new = NewSeq { tokens, max_tokens: a.output_tokens, priority: a.priority, deadline, ..NewSeq::default() };
        self.ledger.submit(new, a.at).ok()
    }

    /// The token of a request at a position: of its prefix, its prompt or its answer.
    fn token(&self, r: usize, position: usize) -> TokenId {
        let a = &self.arrivals[r];
        let (key, stream) = match position < a.prefix_tokens {
            true => (a.prefix, Stream::Draft),
            false => (r as u64, Stream::Token),
        };
        // An odd factor keeps different keys different.
        let draws = Draws::new(self.config.seed ^ key.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        (draws.uniform(position as u64, stream) * f64::from(1u32 << 31)) as TokenId
    }

    /// Lets the policy plan, and logs it; none where it plans nothing.
    fn turn(&mut self, policy: &mut dyn Scheduler) -> Option<StepLoad> {
        let mut step = self.ledger.begin_step(self.now).expect("no step is open");
        self.running.clear();
        self.running.extend(step.running().map(|s| (s.id(), s.preemptions())));
        policy.schedule(&mut step);
        let lost = |&(seq, before): &(SeqId, u32)| step.view(seq).is_some_and(|s| s.preemptions() > before);
        let mut preempted: Vec<SeqId> = self.running.iter().filter(|r| lost(r)).map(|r| r.0).collect();
        if preempted.len() > 1 {
            // The last to lose its place waits before the others. One that was planned again is not among them: it goes first.
            let line: HashMap<SeqId, usize> = step.waiting().enumerate().map(|(k, s)| (s.id(), k)).collect();
            preempted.sort_by_key(|seq| Reverse(line.get(seq).copied().unwrap_or(usize::MAX)));
        }
        let info = step.finish();
        let items: Vec<Ran> = self.ledger.plan_items().iter().map(|&item| Ran { request: self.of[&item.seq], item }).collect();
        self.tally.preemptions += info.preempted;
        self.turns.push(Turn { at: self.now, preempted, items, wake_at: info.wake_at });
        (info.items > 0).then(|| self.look())
    }

    /// What the open step does, and the room that it and those that it leaves out hold.
    fn look(&mut self) -> StepLoad {
        let items = self.ledger.plan_items();
        let mut load = StepLoad::default();
        let mut ends: HashMap<SeqId, usize> = self.running.iter().map(|&(seq, _)| (seq, 0)).collect();
        for item in items {
            match item.last && item.len == 1 {
                true => load.rows += 1,
                false => load.prefill_tokens += item.len,
            }
            load.attended_tokens += (item.start + 1..=item.start + item.len).sum::<usize>();
            ends.insert(item.seq, item.start + item.len);
        }
        let size = self.config.block_size;
        let holders = ends.iter().filter_map(|(&seq, &end)| Some((self.ledger.view(seq)?, end)));
        let active = holders.filter(|(s, end)| *end > 0 || s.state() == SeqState::Running);
        // A table ends with the block of the last token: without guesses nobody holds room for more.
        let empty = active.map(|(s, end)| end.max(s.cached())).map(|tokens| tokens.next_multiple_of(size) - tokens).sum();
        self.slots = ((self.blocks - self.ledger.available_blocks()) * size, empty);
        load
    }

    /// The step runs and is over.
    fn step(&mut self, load: &StepLoad) -> Result<(), SimError> {
        let time = self.config.cost.time(load)?;
        let late = || SimError::parameter("time of the simulation", "at most 2^64 - 1 seconds", "more");
        self.now = self.now.checked_add(time).ok_or_else(late)?;
        self.tally.slots(self.slots.0, self.slots.1, time);
        self.tally.steps += 1;
        self.tally.end = self.now;
        for k in 0..self.ledger.plan_items().len() {
            let item = self.ledger.plan_items()[k];
            let r = self.of[&item.seq];
            self.ledger.commit(item.seq, &[]).expect("an item of the open step");
            self.tally.outcomes[r].cached.get_or_insert(item.start);
            if item.last {
                self.sampled(item.seq, r);
            }
        }
        self.ledger.end_step();
        self.check();
        Ok(())
    }

    fn sampled(&mut self, seq: SeqId, r: usize) {
        let total = self.ledger.view(seq).expect("just committed").total();
        self.ledger.append(seq, self.token(r, total)).expect("it has tokens left, all of them run");
        let outcome = &mut self.tally.outcomes[r];
        outcome.first.get_or_insert(self.now);
        outcome.last = Some(self.now);
        outcome.tokens += 1;
        self.tally.tokens += 1;
        if self.ledger.view(seq).is_some_and(|s| s.remaining() == 0) {
            self.ledger.finish(seq).expect("it runs");
            self.of.remove(&seq);
            self.seqs[r] = None;
            self.tally.outcomes[r].end = End::Finished;
        }
    }

    /// The next time at which anything happens.
    fn idle_until(&mut self) -> Option<Duration> {
        // Those of requests that have ended happen to nobody.
        while self.cancels.peek().is_some_and(|Reverse((_, r))| self.seqs[*r].is_none()) {
            self.cancels.pop();
        }
        let arrival = self.order.get(self.next).map(|&r| self.arrivals[r].at);
        let cancel = self.cancels.peek().map(|Reverse((at, _))| *at);
        let wake_at = self.turns.last().and_then(|t| t.wake_at).filter(|_| !self.of.is_empty());
        // Before now nothing happens: a policy that wants to be called at once, and again, stalls.
        [arrival, cancel, wake_at].into_iter().flatten().filter(|t| *t > self.now).min()
    }

    fn check(&self) {
        if self.config.check {
            self.ledger.check();
        }
    }
}
