//! Static batching: the way of batch jobs, and the baseline that Orca (Yu et al., OSDI 2022) calls request-level scheduling. A
//! batch is filled, run until its last sequence ends, and only then followed by the next.
//!
//! ```text
//! a batch runs                              run it; nobody joins
//! `size` sequences wait                     start a batch with them
//! fewer wait, nobody came for `linger`      start it with those: the tail of a finite workload
//! otherwise                                 wait; ask to be called when `linger` is over
//! ```
//!
//! Its price: a short answer's place stays empty until the longest answer is complete, and whoever comes a moment too late waits for
//! a whole batch. Its merit: room for whole lives is made sure of at the start, so that as a rule nobody is ever preempted.
//!
//! Strictly in order of arrival, whatever the priorities and deadlines. Every batch ends its first sequence at least, and the first
//! in line is in the next: with n sequences running or before it in line, one starts in the (n + 1)-th batch from now at
//! the latest.
#![forbid(unsafe_code)]

use super::fixed::FixedBatch;
use super::{Scheduler, StepBuilder};
use std::time::Duration;

/// See the module's documentation. Full batches only, but for the tail.
///
/// A batch is smaller where a step holds fewer sequences than `size`, or the pool fewer whole lives. It asks for no guesses.
#[derive(Debug)]
pub struct StaticBatching {
    /// Sequences in a batch. 0 counts as 1.
    pub size: usize,
    /// When nobody has arrived for so long, those that wait are a batch, full or not. With [`Duration::MAX`] the last sequences of
    /// a workload wait until others come to fill their batch: for ever, if none does.
    pub linger: Duration,
    batch: FixedBatch,
}

impl StaticBatching {
    /// Batches of `size` sequences; the tail starts after a second without an arrival.
    pub fn new(size: usize) -> Self {
        StaticBatching { size, linger: Duration::from_secs(1), batch: FixedBatch::default() }
    }

    /// With this [`linger`](Self::linger).
    #[must_use]
    pub fn linger(mut self, quiet: Duration) -> Self {
        self.linger = quiet;
        self
    }
}

impl Scheduler for StaticBatching {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        if self.batch.run(step) {
            return;
        }
        let Some(newest) = step.waiting().map(|s| s.arrival()).max() else { return };
        let size = FixedBatch::full(step, self.size);
        let quiet = FixedBatch::due(newest, self.linger);
        if step.waiting().take(size).count() == size || quiet.is_some_and(|t| t <= step.now()) {
            self.batch.start(step, size);
            self.batch.run(step);
        } else if let Some(t) = quiet {
            step.wake_at(t);
        }
    }
}
