//! Every decision of a simulation, and the policy that takes them again.
#![forbid(unsafe_code)]

use super::{Arrival, Report, SimConfig, SimError, run};
use crate::ids::SeqId;
use crate::sched::{PlanItem, Preempt, Scheduler, StepBuilder};
use std::time::Duration;

/// Whatever it takes to run a simulation again without its policy.
#[derive(Clone, PartialEq, Debug)]
pub struct Log {
    /// Its settings.
    pub config: SimConfig,
    /// Its requests.
    pub arrivals: Vec<Arrival>,
    /// The policy's turns, those in which it planned nothing among them.
    pub turns: Vec<Turn>,
}

/// One turn of the policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Time of the step's start.
    pub at: Duration,
    /// Sequences that lost their place, in that order.
    pub preempted: Vec<SeqId>,
    /// What the step ran.
    pub items: Vec<Ran>,
    /// When the policy wanted to be called again.
    pub wake_at: Option<Duration>,
}

/// One request's share of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ran {
    /// Its index among the arrivals.
    pub request: usize,
    /// Its item in the plan.
    pub item: PlanItem,
}

/// Takes the decisions of a log again and says what they come to: the same report, for the same log comes of it.
///
/// # Errors
/// [`SimError::Replay`] at the first turn that comes to something else than the log says, as with a log that was altered. Of a
/// policy that preempts a sequence and plans it again within one turn, the turn cannot always be repeated.
pub fn replay(log: &Log) -> Result<Report, SimError> {
    let mut turns = Vec::new();
    let again = run::run(&log.config, &log.arrivals, &mut Playback { turns: &log.turns, next: 0 }, &mut turns);
    if turns == log.turns {
        return again;
    }
    let turn = turns.iter().zip(&log.turns).take_while(|(a, b)| a == b).count();
    let shown = |turn: Option<&Turn>| turn.map_or("the end".to_owned(), |t| format!("{t:?}"));
    Err(SimError::Replay { turn, expected: shown(log.turns.get(turn)), found: shown(turns.get(turn)) })
}

struct Playback<'a> {
    turns: &'a [Turn],
    next: usize,
}

impl Scheduler for Playback<'_> {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        let Some(turn) = self.turns.get(self.next) else { return };
        self.next += 1;
        // Room that is made too early is still there when it is needed. What cannot be done again shows in the new log.
        for seq in &turn.preempted {
            step.preempt(*seq, Preempt::Recompute);
        }
        for Ran { item, .. } in &turn.items {
            let _ = step.prefill(item.seq, item.len);
        }
        if let Some(when) = turn.wake_at {
            step.wake_at(when);
        }
    }
}
