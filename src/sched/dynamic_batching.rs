//! Dynamic batching, as inference servers for models that answer in one pass have it (Clipper's adaptive batching, Crankshaw et al.,
//! NSDI 2017; Triton's dynamic batcher): a batch starts when it is full, or when its oldest request has waited long enough.
//!
//! ```text
//! a batch runs                                  run it; nobody joins
//! `size` sequences wait                         start a batch with them
//! the oldest of fewer has waited `max_wait`     start it with those
//! otherwise                                     wait; ask to be called when `max_wait` is over
//! ```
//!
//! Against static batching it bounds the wait for company: it trades a batch's size for the time to the first token by one
//! number. It still waits for the longest answer of the batch that runs; continuous batching does not.
//!
//! Strictly in order of arrival, whatever the priorities and deadlines. Every batch ends its first sequence at least, and the first
//! in line is in the next: with n sequences running or before it in line, one starts in the (n + 1)-th batch from now at the latest,
//! and the pool stays idle for `max_wait` at most before each of these.
#![forbid(unsafe_code)]

use super::fixed::FixedBatch;
use super::{Scheduler, StepBuilder};
use std::time::Duration;

/// See the module's documentation.
///
/// A batch is smaller where a step holds fewer sequences than `size`, or the pool fewer whole lives. It asks for no guesses.
#[derive(Debug)]
pub struct DynamicBatching {
    /// Sequences in a batch at most. 0 counts as 1.
    pub size: usize,
    /// The longest that a sequence waits for others to fill its batch. 0: whatever waits starts at once.
    pub max_wait: Duration,
    batch: FixedBatch,
}

impl DynamicBatching {
    /// Batches of up to `size` sequences, none of which waits longer than `max_wait` for another.
    pub fn new(size: usize, max_wait: Duration) -> Self {
        DynamicBatching { size, max_wait, batch: FixedBatch::default() }
    }
}

impl Scheduler for DynamicBatching {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        if self.batch.run(step) {
            return;
        }
        let Some(oldest) = step.waiting().map(|s| s.arrival()).min() else { return };
        let size = FixedBatch::full(step, self.size);
        let due = FixedBatch::due(oldest, self.max_wait);
        if step.waiting().take(size).count() == size || due.is_some_and(|t| t <= step.now()) {
            self.batch.start(step, size);
            self.batch.run(step);
        } else if let Some(t) = due {
            step.wake_at(t);
        }
    }
}
