//! Who runs next. The [`Ledger`] is the mechanism: it owns every sequence and every block. A [`Scheduler`] is a policy: it looks
//! at [views](SeqView) and acts through a [`StepBuilder`], so that no policy can leak a block, overrun the pool or lose a
//! sequence: a bad one is slow, never wrong. Neither knows a model, a thread or a clock: time comes in as a `Duration` since
//! the engine's start.
//!
//! | policy | a sequence joins | it is preempted |
//! | --- | --- | --- |
//! | [`StaticBatching`] | with a full batch, once the last has ended | as a rule never |
//! | [`DynamicBatching`] | with a batch, full or as soon as its oldest has waited long enough | as a rule never |
//! | [`ContinuousBatching`] | any step, by its rank | for one before it in rank, where the pool is too small for both |
//!
//! Each is written to be read, and a policy of one's own is a few lines. This one runs whatever is shortest, one sequence at a time:
//!
//! ```
//! use loquat::sched::{Ledger, LedgerConfig, NewSeq, Scheduler, StepBuilder};
//! use std::time::Duration;
//!
//! struct ShortestFirst;
//!
//! impl Scheduler for ShortestFirst {
//!     fn schedule(&mut self, step: &mut StepBuilder<'_>) {
//!         // One that runs goes on until it ends; then the shortest of those that wait.
//!         let running = step.running().next();
//!         let next = running.or_else(|| step.waiting().min_by_key(|s| (s.left(), s.id())));
//!         if let Some(seq) = next.map(|s| s.id()) {
//!             // As much of it as the step and the pool hold. Nothing else runs, so that there is always room for some.
//!             let _ = step.prefill(seq, usize::MAX);
//!         }
//!     }
//! }
//!
//! let mut ledger = Ledger::new(LedgerConfig::new(64, 16, 512))?;
//! let prompt = |n| NewSeq { tokens: vec![7; n], max_tokens: 3, ..NewSeq::default() };
//! let long = ledger.submit(prompt(40), Duration::ZERO)?;
//! let short = ledger.submit(prompt(5), Duration::ZERO)?;
//!
//! // What an engine does, without a model: every token "sampled" here is a 9.
//! let mut ended = Vec::new();
//! while ended.len() < 2 {
//!     let mut step = ledger.begin_step(Duration::ZERO)?;
//!     ShortestFirst.schedule(&mut step);
//!     step.finish();
//!     // ... ledger.copies(), then the forward pass over ledger.plan_items(), then for each item:
//!     let item = ledger.plan_items()[0];
//!     ledger.commit(item.seq, &[])?;
//!     ledger.end_step();
//!     if item.last {
//!         ledger.append(item.seq, 9)?;
//!         if ledger.view(item.seq).is_some_and(|s| s.remaining() == 0) {
//!             ledger.finish(item.seq)?;
//!             ended.push(item.seq);
//!         }
//!     }
//! }
//! assert_eq!(ended, [short, long]);
//! assert_eq!(ledger.available_blocks(), 64);
//! # Ok::<(), loquat::Error>(())
//! ```
//!
//! Invariants: every submitted sequence ends in exactly one way: finished, released or cancelled. A step never exceeds its
//! budget. Those of the mechanism are in the modules, and [`Ledger::check`] recounts them.
#![forbid(unsafe_code)]

mod blocks;
mod check;
mod continuous;
mod dynamic_batching;
mod fixed;
mod kv;
mod ledger;
mod park;
mod pins;
mod seq;
mod static_batching;
mod step;
mod swap;

pub mod sim;

pub use continuous::ContinuousBatching;
pub use dynamic_batching::DynamicBatching;
pub use ledger::{CacheStats, Counts, Ledger, LedgerConfig, NewSeq, Regime};
pub use pins::{CachedBlock, PinId};
pub use seq::{SeqState, SeqView};
pub use static_batching::StaticBatching;
pub use step::{PlanItem, StepBuilder, StepInfo};

use thiserror::Error;

/// Decides what the next step runs.
pub trait Scheduler: Send {
    /// Fills one step. Called with an empty plan; what is left unplanned has its turn in a later step.
    fn schedule(&mut self, step: &mut StepBuilder<'_>);
}

/// Why a reservation was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum NoRoom {
    /// The step is full, of tokens or sequences; or as many sequences run as a step has places.
    #[error("the step is full")]
    Budget,
    /// No block is free, and none can be had without a preemption.
    #[error("no block is free")]
    Blocks,
    /// The sequence is gone, held, in the plan already, or not in a state that allows the call.
    #[error("the sequence cannot run now")]
    NotReady,
}

/// What becomes of a preempted sequence's cached blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Preempt {
    /// They stay in the prefix cache as long as nobody needs the room; what is gone by then is computed anew.
    Recompute,
    /// They are moved to host memory, too, and moved back instead of computed anew.
    Swap,
}
