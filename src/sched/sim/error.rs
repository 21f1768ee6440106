//! What can be wrong with a simulation.
#![forbid(unsafe_code)]

use crate::error::ConfigError;
use std::time::Duration;
use thiserror::Error;

/// What can be wrong with a [simulation](super), or come of it.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum SimError {
    /// A line of a trace.
    #[error("trace, line {line}: {field}: expected {expected}, found {found}")]
    Trace {
        /// Counted from 1.
        line: usize,
        /// The column.
        field: &'static str,
        /// What would do.
        expected: String,
        /// What is there, its beginning where it is long.
        found: String,
    },
    /// A number out of its range, or numbers that contradict each other.
    #[error("{name}: expected {expected}, found {found}")]
    Parameter {
        /// Which.
        name: String,
        /// What would do.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The policy plans nothing and asks for no later call, though there are sequences that have not ended.
    #[error("after {at:?} the scheduler plans nothing for the {unfinished} sequences that have not ended")]
    Stalled {
        /// Sequences that wait or run.
        unfinished: usize,
        /// Time of the simulation.
        at: Duration,
    },
    /// The policy was asked as often as the settings allow.
    #[error("{unfinished} requests have not ended after {limit} turns of the scheduler")]
    Endless {
        /// Requests that are still to come, wait or run.
        unfinished: usize,
        /// Turns that were allowed.
        limit: usize,
    },
    /// A log says one thing, and its decisions led to another.
    #[error("replay, turn {turn}: expected {expected}, found {found}")]
    Replay {
        /// The policy's turn, counted from 0.
        turn: usize,
        /// What the log says.
        expected: String,
        /// What came of it.
        found: String,
    },
    /// Sizes that make no ledger.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl SimError {
    pub(super) fn parameter(name: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> Self {
        SimError::Parameter { name: name.into(), expected: expected.into(), found: found.to_string() }
    }
}
