//! The stock policies by name, and how they are set.
// Each example uses its part of this.
#![allow(dead_code)]

use loquat::sched::{ContinuousBatching, DynamicBatching, Scheduler, StaticBatching};
use std::time::Duration;

/// The baseline first.
pub(crate) const NAMES: [&str; 3] = ["static", "dynamic", "continuous"];

/// Settings for all of them.
#[derive(Clone, Copy)]
pub(crate) struct Policies {
    /// Sequences in a static or dynamic batch.
    pub(crate) batch: usize,
    /// [`StaticBatching::linger`].
    pub(crate) linger: Duration,
    /// [`DynamicBatching::max_wait`].
    pub(crate) max_wait: Duration,
    /// [`ContinuousBatching::max_chunk`].
    pub(crate) max_chunk: usize,
}

impl Policies {
    /// The policy of a name, if there is one.
    pub(crate) fn named(&self, name: &str) -> Option<Box<dyn Scheduler>> {
        Some(match name {
            "static" => Box::new(StaticBatching::new(self.batch).linger(self.linger)),
            "dynamic" => Box::new(DynamicBatching::new(self.batch, self.max_wait)),
            "continuous" => Box::new(ContinuousBatching::default().max_chunk(self.max_chunk)),
            _ => return None,
        })
    }
}
