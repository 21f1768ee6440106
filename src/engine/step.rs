//! One step: plan, forward, sample (or pool, for an embedding), commit. Between the layers of a forward pass it can pause;
//! everything it needs to go on lies in the engine.
#![forbid(unsafe_code)]

use super::{Engine, Event, EventKind, FinishReason, RowView, Status};
use crate::batch::{BatchItem, RowsWanted};
use crate::error::RunError;
use crate::ids::{MAX_GROUPS, SeqId};
use crate::model::Progress;
use crate::sched::PlanItem;
use std::time::{Duration, Instant};

/// Where the engine stands between two calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// No step is open.
    Between,
    /// A forward pass is under way.
    Forward,
}

impl Engine {
    /// Runs one step to its end: what the scheduler wants to run now, or the rest of a step that was paused.
    ///
    /// # Errors
    /// [`RunError`] where the device failed: nothing of the step was committed, and the next call tries it again.
    pub fn step(&mut self) -> Result<Status, RunError> {
        self.run_step(&mut || false)
    }

    /// Runs steps for about `budget` and comes back: when it is used up, even in the middle of a long prefill, or when
    /// nothing is left to do. The longest overrun is half a layer of one step.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_within(&mut self, budget: Duration) -> Result<Status, RunError> {
        let start = Instant::now();
        loop {
            let status = self.run_step(&mut || start.elapsed() >= budget)?;
            if status != Status::Stepped || start.elapsed() >= budget {
                return Ok(status);
            }
        }
    }

    fn run_step(&mut self, pause: &mut dyn FnMut() -> bool) -> Result<Status, RunError> {
        self.sweep();
        if self.stage == Stage::Between {
            if let Some(idle) = self.begin_step()? {
                return Ok(idle);
            }
            self.stage = Stage::Forward;
            if pause() {
                return Ok(Status::Paused);
            }
        }
        match self.model.advance(pause, &mut self.logits) {
            Ok(Progress::Paused) => Ok(Status::Paused),
            Ok(Progress::Done) => {
                self.stage = Stage::Between;
                self.harvest();
                Ok(Status::Stepped)
            }
            Err(error) => Err(self.give_up(error)),
        }
    }

    /// Lets the scheduler plan and hands the batch to the model; says so where there is nothing to run.
    fn begin_step(&mut self) -> Result<Option<Status>, RunError> {
        self.make_way();
        let now = self.now();
        let mut builder = self.ledger.begin_step(now)?;
        self.scheduler.schedule(&mut builder);
        let info = builder.finish();
        if !self.ledger.swap_outs().is_empty()
            && let Err(error) = self.model.swap_out(self.ledger.swap_outs())
        {
            self.ledger.swap_failed();
            return Err(self.give_up(error));
        }
        if info.items == 0 {
            return Ok(Some(Status::Idle(info.wake_at)));
        }
        match self.lay_out() {
            Ok(()) => Ok(None),
            Err(error) => Err(self.give_up(error)),
        }
    }

    fn lay_out(&mut self) -> Result<(), RunError> {
        self.model.swap_in(self.ledger.swap_ins())?;
        self.model.copy_blocks(self.ledger.copies())?;
        let groups = self.model.groups().len();
        self.batch.clear();
        for item in self.ledger.plan_items() {
            let run = self.runs.get(&item.seq);
            let view = self.ledger.view(item.seq).expect("a sequence that was planned a moment ago");
            let tables: [_; MAX_GROUPS] = std::array::from_fn(|g| view.block_table(g));
            self.batch.push(BatchItem {
                tokens: &view.tokens()[item.start..item.start + item.len],
                start: item.start,
                total: view.total(),
                tables: &tables[..groups],
                rows: run.map_or(RowsWanted::None, |run| run.rows(item)),
            })?;
        }
        self.model.begin(&self.batch, self.want)
    }

    /// Nothing of the open step counts.
    fn give_up(&mut self, error: RunError) -> RunError {
        self.abandon_step();
        error
    }

    /// Gives up the open step, if there is one; the next call plans it again.
    pub(super) fn abandon_step(&mut self) {
        self.stage = Stage::Between;
        self.ledger.abort_step();
        // The step that they were to end with is over, if not in the way that was hoped for.
        while let Some(seq) = self.runs.iter().filter(|(_, run)| run.stopping).map(|(seq, _)| *seq).min() {
            self.end(seq, FinishReason::Cancelled);
        }
    }

    /// Books what the forward pass left: shows rows, commits items, samples.
    fn harvest(&mut self) {
        let mut row = 0;
        for i in 0..self.ledger.plan_items().len() {
            let item = self.ledger.plan_items()[i];
            // The batch knows how many rows it asked for, even of a sequence that was cancelled since.
            let end = self.batch.q_indptr()[i + 1];
            let first = row;
            row += self.batch.rows()[first..].iter().take_while(|&&t| t < end).count();
            if !self.runs.contains_key(&item.seq) {
                continue;
            }
            let embeds = self.runs.get(&item.seq).is_some_and(|r| r.embedding.is_some());
            let taken_in = match embeds {
                true => self.pool(&item, i),
                false => {
                    self.show(&item, first, row);
                    Ok(())
                }
            };
            self.ledger.commit(item.seq, &[]).expect("an item of the open step, without guesses");
            match taken_in {
                Err(error) => self.end(item.seq, FinishReason::Failed(error)),
                Ok(()) if item.last && embeds => self.embedded(item.seq),
                Ok(()) if item.last && self.runs[&item.seq].prefill => self.end(item.seq, FinishReason::Length),
                Ok(()) if item.last => self.answer(&item, row - 1),
                Ok(()) => {}
            }
            if self.runs.get(&item.seq).is_some_and(|r| r.stopping) {
                self.end(item.seq, FinishReason::Cancelled);
            }
        }
        self.ledger.end_step();
    }

    /// Each position once.
    fn show(&mut self, item: &PlanItem, first: usize, end: usize) {
        let run = self.runs.get_mut(&item.seq).expect("looked up a moment ago");
        let seen = run.shown;
        run.shown = seen.max(item.start + item.len);
        let Some(observer) = &mut self.observer else { return };
        for row in first..end {
            let position = item.start + item.len - (end - row);
            if position >= seen {
                let (logits, hidden) = (self.logits.row(row), self.logits.hidden(row));
                observer(RowView { seq: item.seq, position, logits, hidden });
            }
        }
    }

    /// Continues a sequence by the row at its last token, and with it those that waited for its prompt.
    fn answer(&mut self, item: &PlanItem, row: usize) {
        let followers = self.join_followers(item.seq);
        self.sample(item.seq, row);
        for seq in followers.into_iter().rev() {
            self.show(&PlanItem { seq, ..*item }, row, row + 1);
            self.sample(seq, row);
        }
    }

    fn sample(&mut self, seq: SeqId, row: usize) {
        let run = self.runs.get_mut(&seq).expect("looked up a moment ago");
        let sampled = match self.sampler.sample(&run.sampler, self.logits.row(row)) {
            Ok(sampled) => sampled,
            Err(error) => return self.end(seq, FinishReason::Failed(error.of(seq))),
        };
        let token = sampled.token;
        let top = if sampled.top.is_empty() { Vec::new() } else { sampled.top.to_vec() };
        if run.steered {
            run.asks = true;
            self.asking.push(seq);
            return self.events.push_back(Event { seq, kind: EventKind::Choice { top } });
        }
        self.events.push_back(Event { seq, kind: EventKind::Token { token, logprob: sampled.logprob, top } });
        run.sampler.push(token);
        let stop = run.stop_tokens.contains(&token);
        self.ledger.append(seq, token).expect("a sequence with tokens left, all of them run");
        self.grown(seq, stop);
    }

    /// Ends a sequence that had its last token.
    pub(super) fn grown(&mut self, seq: SeqId, stop: bool) {
        if stop {
            self.end(seq, FinishReason::Stop);
        } else if self.ledger.view(seq).is_some_and(|v| v.remaining() == 0) {
            self.end(seq, FinishReason::Length);
        }
    }
}
