//! Serves a list of requests by a real engine and the wall clock, and tells how it went in the words of the simulator, so that
//! the two can be compared: what `loquat::sched::sim` computes, this measures.
//!
//! Each step is looked at between its plan and its forward pass, where the engine can pause: what it runs, and what room is held.
// Each example uses its part of this.
#![allow(dead_code)]

use loquat::sched::SeqState;
use loquat::sched::sim::{Arrival, CostSample, End, Outcome, Percentiles, Report, StepLoad};
use loquat::{Engine, Event, EventKind, FinishReason, Request, SeqId, Status, SubmitError, TokenId};
use std::collections::HashMap;
use std::time::Duration;

/// What came of it.
pub(crate) struct Served {
    pub(crate) report: Report,
    /// Each step that ran.
    pub(crate) steps: Vec<CostSample>,
}

/// Serves `arrivals` until each has ended; `prompt` has the tokens of one. What can never run counts as refused.
pub(crate) fn serve(
    engine: &mut Engine,
    arrivals: &[Arrival],
    prompt: &dyn Fn(usize) -> Vec<TokenId>,
) -> Result<Served, Box<dyn std::error::Error>> {
    let mut order: Vec<usize> = (0..arrivals.len()).collect();
    order.sort_by_key(|&r| arrivals[r].at);
    let mut run = Run {
        start: engine.now(),
        arrivals,
        order,
        next: 0,
        live: HashMap::new(),
        outcomes: vec![Outcome::default(); arrivals.len()],
        steps: Vec::new(),
        slots: (0.0, 0.0),
        tokens: 0,
        end: Duration::ZERO,
    };
    let preempted = engine.ledger().stats().preemptions;
    loop {
        run.receive(engine, prompt)?;
        let began = engine.now();
        let status = engine.step_within(Duration::ZERO)?;
        if let Status::Idle(wake_at) = status {
            match run.idle_until(wake_at) {
                Some(when) => std::thread::sleep((run.start + when).saturating_sub(engine.now())),
                None if run.live.is_empty() => break,
                None => return Err(format!("the policy leaves {} requests behind", run.live.len()).into()),
            }
            continue;
        }
        let (load, held, empty) = run.look(engine);
        // The rest of it.
        if status == Status::Paused {
            engine.step()?;
        }
        run.end = engine.now() - run.start;
        let seconds = (engine.now() - began).as_secs_f64();
        run.steps.push(CostSample { load, seconds });
        run.slots.0 += held as f64 * seconds;
        run.slots.1 += empty as f64 * seconds;
        run.events(engine)?;
    }
    let preemptions = engine.ledger().stats().preemptions - preempted;
    Ok(run.served(preemptions as usize))
}

struct Run<'a> {
    /// By the engine's clock; other times are after this.
    start: Duration,
    arrivals: &'a [Arrival],
    /// Requests in the order of their arrival, and how many have come.
    order: Vec<usize>,
    next: usize,
    live: HashMap<SeqId, usize>,
    outcomes: Vec<Outcome>,
    steps: Vec<CostSample>,
    /// Cache slots held times seconds, and those of them without a token.
    slots: (f64, f64),
    tokens: usize,
    /// End of the last step.
    end: Duration,
}

impl Run<'_> {
    /// Whatever has come by now.
    fn receive(&mut self, engine: &mut Engine, prompt: &dyn Fn(usize) -> Vec<TokenId>) -> Result<(), Box<dyn std::error::Error>> {
        let now = engine.now() - self.start;
        for (&seq, _) in self.live.iter().filter(|(_, r)| self.cancel_of(**r).is_some_and(|t| t <= now)) {
            engine.cancel(seq)?;
        }
        self.events(engine)?;
        while let Some(&r) = self.order.get(self.next)
            && self.arrivals[r].at <= now
        {
            self.next += 1;
            let a = self.arrivals[r];
            // Before its prompt is made up: a trace may say anything.
            if a.prompt_tokens.saturating_add(a.output_tokens) > engine.max_len() {
                self.outcomes[r].end = End::Refused;
                continue;
            }
            let mut request = Request::new(prompt(r), a.output_tokens).priority(a.priority);
            request.deadline = a.deadline.and_then(|d| (self.start + a.at).checked_add(d));
            match engine.submit(request) {
                Ok(seq) => drop(self.live.insert(seq, r)),
                Err(SubmitError::TooLong { .. } | SubmitError::QueueFull { .. }) => self.outcomes[r].end = End::Refused,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// What the open step does, and the slots of cache that are held and empty while it does.
    fn look(&mut self, engine: &Engine) -> (StepLoad, usize, usize) {
        let ledger = engine.ledger();
        let mut load = StepLoad::default();
        let mut ends = HashMap::new();
        for item in ledger.plan_items() {
            match item.last && item.len == 1 {
                true => load.rows += 1,
                false => load.prefill_tokens += item.len,
            }
            load.attended_tokens += (item.start + 1..=item.start + item.len).sum::<usize>();
            ends.insert(item.seq, item.start + item.len);
            if let Some(&r) = self.live.get(&item.seq) {
                self.outcomes[r].cached.get_or_insert(item.start);
            }
        }
        let size = ledger.config().block_size;
        let holders = ledger.all().filter(|s| s.state() == SeqState::Running || ends.contains_key(&s.id()));
        let empty = holders.map(|s| {
            let tokens = ends.get(&s.id()).copied().unwrap_or(s.cached());
            (s.block_table(0).len() * size).saturating_sub(tokens)
        });
        (load, ledger.stats().active * size, empty.sum())
    }

    /// Books what has happened.
    fn events(&mut self, engine: &mut Engine) -> Result<(), Box<dyn std::error::Error>> {
        while let Some(Event { seq, kind }) = engine.next_event() {
            let Some(&r) = self.live.get(&seq) else { continue };
            let outcome = &mut self.outcomes[r];
            match kind {
                EventKind::Token { .. } => {
                    outcome.first.get_or_insert(self.end);
                    outcome.last = Some(self.end);
                    outcome.tokens += 1;
                    self.tokens += 1;
                }
                EventKind::Finished(reason) => {
                    outcome.end = match reason {
                        FinishReason::Failed(error) => return Err(error.into()),
                        FinishReason::Cancelled => End::Cancelled,
                        _ => End::Finished,
                    };
                    self.live.remove(&seq);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The next time at which anything happens, unless something is due already.
    fn idle_until(&self, wake_at: Option<Duration>) -> Option<Duration> {
        let arrival = self.order.get(self.next).map(|&r| self.arrivals[r].at);
        let cancel = self.live.values().filter_map(|&r| self.cancel_of(r)).min();
        let wake_at = wake_at.filter(|_| !self.live.is_empty()).map(|t| t.saturating_sub(self.start));
        [arrival, cancel, wake_at].into_iter().flatten().min()
    }

    fn cancel_of(&self, r: usize) -> Option<Duration> {
        self.arrivals[r].at.checked_add(self.arrivals[r].cancel?)
    }

    fn served(self, preemptions: usize) -> Served {
        let all = || self.arrivals.iter().zip(&self.outcomes);
        let count = |end| all().filter(|(_, o)| o.end == end).count();
        let late = |(a, o): &(&Arrival, &Outcome)| {
            let due = a.deadline.map(|d| a.at.saturating_add(d));
            o.end != End::Refused && due.is_some_and(|due| o.end != End::Finished || o.last.is_none_or(|t| t > due))
        };
        let makespan = self.end.saturating_sub(self.arrivals.iter().map(|a| a.at).min().unwrap_or_default());
        let hits = all().filter_map(|(a, o)| Some((a.prompt_tokens, o.cached?)));
        let (prompts, cached) = hits.fold((0, 0), |sum, x| (sum.0 + x.0, sum.1 + x.1));
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let report = Report {
            makespan,
            steps: self.steps.len(),
            tokens: self.tokens,
            throughput_tok_s: share(self.tokens as f64, makespan.as_secs_f64()),
            ttft: Percentiles::of(all().filter_map(|(a, o)| o.ttft(a.at)).collect()),
            tpot: Percentiles::of(all().filter_map(|(_, o)| o.tpot()).collect()),
            waste: share(self.slots.1, self.slots.0),
            hit_rate: share(cached as f64, prompts as f64),
            preemptions,
            finished: count(End::Finished),
            cancelled: count(End::Cancelled),
            refused: count(End::Refused),
            late: all().filter(late).count(),
            requests: self.outcomes.clone(),
        };
        Served { report, steps: self.steps }
    }
}
