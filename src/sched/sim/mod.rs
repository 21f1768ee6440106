//! A simulator: the real [`Ledger`](super::Ledger) and any [`Scheduler`], a clock that a [`CostModel`] moves, and no
//! model. It tells how a policy would serve a day's requests in a second, and gives the same answer every time.
//!
//! ```
//! use loquat::sched::ContinuousBatching;
//! use loquat::sched::sim::{Arrival, CostModel, SimConfig, replay, simulate};
//! use std::time::Duration;
//!
//! // A second for a step, and nothing for what it runs.
//! let cost = CostModel { step: 1.0, row: 0.0, prefill_token: 0.0, attended_token: 0.0 };
//! let config = SimConfig::new(8, 16, 128, cost);
//! let requests = [Arrival::new(Duration::ZERO, 20, 3), Arrival::new(Duration::from_millis(500), 20, 2)];
//! let (report, log) = simulate(&config, &requests, &mut ContinuousBatching::default())?;
//! // The second comes in the middle of the first step, and both run in the second and the third.
//! assert_eq!(report.makespan, Duration::from_secs(3));
//! assert_eq!(report.requests[1].ttft(requests[1].at), Some(Duration::from_millis(1500)));
//! assert_eq!(replay(&log)?, report);
//! # Ok::<(), loquat::sched::sim::SimError>(())
//! ```
//!
//! Where it is simpler than an engine: what arrives during a step is seen at its end; tokens are numbers out of a seed; nothing drafts,
//! and there is one rotary regime.
//!
//! Invariants: a report is a function of settings, requests and the policy's decisions alone; each request ends in one way.
#![forbid(unsafe_code)]

mod arrivals;
mod cost;
mod error;
mod log;
mod report;
mod run;
mod trace;

pub use arrivals::{Arrival, Arrivals, Lengths, RequestKind};
pub use cost::{CostModel, CostSample, StepLoad};
pub use error::SimError;
pub use log::{Log, Ran, Turn, replay};
pub use report::{End, Outcome, Percentiles, Report};
pub use trace::parse_trace;

use super::{LedgerConfig, Scheduler};

/// Settings of a simulation.
#[derive(Clone, PartialEq, Debug)]
pub struct SimConfig {
    /// Blocks in the cache.
    pub blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Longest sequence of the model.
    pub context: usize,
    /// Sequences at a time, waiting ones included; more are refused.
    pub max_seqs: usize,
    /// Sequences in a step.
    pub step_seqs: usize,
    /// Tokens in a step.
    pub step_tokens: usize,
    /// How long a step takes.
    pub cost: CostModel,
    /// Of the tokens.
    pub seed: u64,
    /// Recount all of the ledger's [invariants](super::Ledger::check) in every step. Slow, and a panic where one is broken.
    pub check: bool,
    /// Turns that the policy gets: one that runs for ever without an end ends here.
    pub max_turns: usize,
}

impl SimConfig {
    /// Room for `blocks` blocks of `block_size` tokens and a model of `context` positions; the rest as in
    /// [`LedgerConfig::new`], and up to 10 million turns.
    pub fn new(blocks: usize, block_size: usize, context: usize, cost: CostModel) -> Self {
        let LedgerConfig { max_seqs, step_seqs, step_tokens, .. } = LedgerConfig::new(blocks, block_size, context);
        let max_turns = 10_000_000;
        SimConfig { blocks, block_size, context, max_seqs, step_seqs, step_tokens, cost, seed: 0, check: false, max_turns }
    }

    fn ledger(&self) -> LedgerConfig {
        let mut sizes = LedgerConfig::new(self.blocks, self.block_size, self.context);
        (sizes.max_seqs, sizes.step_seqs, sizes.step_tokens) = (self.max_seqs, self.step_seqs, self.step_tokens);
        sizes
    }
}

/// Serves `arrivals`, in any order, by `policy`, and tells how it went and what was decided. Runs on the calling thread until every
/// request has ended. Memory: the log, a few dozen bytes for each item of each step.
///
/// # Errors
/// [`SimError::Parameter`] for requests without tokens and costs out of their range, [`SimError::Config`] for sizes that make no
/// ledger; [`SimError::Stalled`] and [`SimError::Endless`] for a policy that leaves requests behind.
pub fn simulate(config: &SimConfig, arrivals: &[Arrival], policy: &mut dyn Scheduler) -> Result<(Report, Log), SimError> {
    let mut log = Log { config: config.clone(), arrivals: arrivals.to_vec(), turns: Vec::new() };
    let report = run::run(config, arrivals, policy, &mut log.turns)?;
    Ok((report, log))
}
