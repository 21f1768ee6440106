//! What a simulation came to. Sums are of whole numbers, so that the same decisions give the same report, bit for bit.
#![forbid(unsafe_code)]

use super::Arrival;
use std::time::Duration;

/// How a policy served a list of requests.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    /// From the first arrival to the end of the last step.
    pub makespan: Duration,
    /// Steps that ran something.
    pub steps: usize,
    /// Tokens generated.
    pub tokens: usize,
    /// Tokens generated a second of the makespan; 0 where that is 0.
    pub throughput_tok_s: f64,
    /// Time to first token, from arrival, over the requests that got one; none where none did.
    pub ttft: Option<Percentiles>,
    /// Time per output token after the first, the mean of each request, over those with two or more.
    pub tpot: Option<Percentiles>,
    /// Of the cache slots that running sequences hold, averaged over time: the share with no token in them at the step's end.
    pub waste: f64,
    /// Of the prompt tokens of all requests that ran: the share that their first run found in the cache.
    pub hit_rate: f64,
    /// Times that a sequence lost its place to another.
    pub preemptions: usize,
    /// Requests that got all their tokens.
    pub finished: usize,
    /// Requests that were cancelled before.
    pub cancelled: usize,
    /// Requests that the ledger did not take: too long for it ever, or too many at a time.
    pub refused: usize,
    /// Requests with a deadline that were taken and were not finished by it, cancelled ones among them.
    pub late: usize,
    /// Each request, in the order in which they were given.
    pub requests: Vec<Outcome>,
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// How it ended.
    pub end: End,
    /// When its first token came, after the simulation's start.
    pub first: Option<Duration>,
    /// When its last token came.
    pub last: Option<Duration>,
    /// Tokens generated.
    pub tokens: usize,
    /// Tokens of its prompt that its first run found in the cache; none if it never ran.
    pub cached: Option<usize>,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum End {
    /// It has not come yet, or goes on.
    #[default]
    Open,
    /// With all its tokens.
    Finished,
    /// By its owner.
    Cancelled,
    /// At the door.
    Refused,
}

/// The values that so many per cent of all do not exceed: the smallest of which that is true (nearest rank).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Percentiles {
    /// Half.
    pub p50: Duration,
    /// Nine of ten.
    pub p90: Duration,
    /// All but one in a hundred.
    pub p99: Duration,
}

impl Percentiles {
    /// None of an empty list.
    pub fn of(mut values: Vec<Duration>) -> Option<Self> {
        values.sort_unstable();
        let at = |p: usize| values.get((values.len() * p).div_ceil(100).saturating_sub(1)).copied();
        Some(Percentiles { p50: at(50)?, p90: at(90)?, p99: at(99)? })
    }
}

impl Outcome {
    /// Time to first token of a request that came at `at`.
    pub fn ttft(&self, at: Duration) -> Option<Duration> {
        self.first.map(|t| t.saturating_sub(at))
    }

    /// Mean time per token after the first.
    pub fn tpot(&self) -> Option<Duration> {
        let later = u32::try_from(self.tokens).ok()?.checked_sub(1).filter(|n| *n > 0)?;
        Some((self.last? - self.first?) / later)
    }
}

/// A report in the making.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) outcomes: Vec<Outcome>,
    pub(super) steps: usize,
    pub(super) tokens: usize,
    pub(super) preemptions: usize,
    /// End of the last step.
    pub(super) end: Duration,
    /// Slots held times nanoseconds, and those of them that were empty.
    held: u128,
    empty: u128,
}

impl Tally {
    pub(super) fn new(requests: usize) -> Self {
        Tally { outcomes: vec![Outcome::default(); requests], ..Tally::default() }
    }

    pub(super) fn slots(&mut self, held: usize, empty: usize, time: Duration) {
        self.held = self.held.saturating_add((held as u128).saturating_mul(time.as_nanos()));
        self.empty = self.empty.saturating_add((empty as u128).saturating_mul(time.as_nanos()));
    }

    pub(super) fn report(self, arrivals: &[Arrival]) -> Report {
        let all = || arrivals.iter().zip(&self.outcomes);
        let count = |end| all().filter(|(_, o)| o.end == end).count();
        let late = |(a, o): &(&Arrival, &Outcome)| {
            let due = a.deadline.map(|d| a.at.saturating_add(d));
            o.end != End::Refused && due.is_some_and(|due| o.end != End::Finished || o.last.is_none_or(|t| t > due))
        };
        let start = arrivals.iter().map(|a| a.at).min().unwrap_or_default();
        let makespan = self.end.saturating_sub(start);
        let (prompts, cached) =
            all().filter_map(|(a, o)| Some((a.prompt_tokens, o.cached?))).fold((0, 0), |s, x| (s.0 + x.0, s.1 + x.1));
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        Report {
            makespan,
            steps: self.steps,
            tokens: self.tokens,
            throughput_tok_s: share(self.tokens as f64, makespan.as_secs_f64()),
            ttft: Percentiles::of(all().filter_map(|(a, o)| o.ttft(a.at)).collect()),
            tpot: Percentiles::of(all().filter_map(|(_, o)| o.tpot()).collect()),
            waste: share(self.empty as f64, self.held as f64),
            hit_rate: share(cached as f64, prompts as f64),
            preemptions: self.preemptions,
            finished: count(End::Finished),
            cancelled: count(End::Cancelled),
            refused: count(End::Refused),
            late: all().filter(late).count(),
            requests: self.outcomes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn nearest_rank() {
        assert_eq!(Percentiles::of(Vec::new()), None);
        assert_eq!(Percentiles::of(vec![s(7)]), Some(Percentiles { p50: s(7), p90: s(7), p99: s(7) }));
        let of = |n: u64| Percentiles::of((1..=n).rev().map(s).collect()).unwrap();
        assert_eq!(of(2), Percentiles { p50: s(1), p90: s(2), p99: s(2) });
        assert_eq!(of(10), Percentiles { p50: s(5), p90: s(9), p99: s(10) });
        assert_eq!(of(100), Percentiles { p50: s(50), p90: s(90), p99: s(99) });
        assert_eq!(of(101), Percentiles { p50: s(51), p90: s(91), p99: s(100) });
    }

    #[test]
    fn counts_and_shares() {
        let arrival = |at, deadline: Option<u64>| Arrival { deadline: deadline.map(s), ..Arrival::new(s(at), 10, 3) };
        let arrivals = [arrival(2, Some(6)), arrival(2, Some(5)), arrival(3, Some(1)), arrival(1, Some(9)), arrival(4, None)];
        let done = Outcome { end: End::Finished, first: Some(s(4)), last: Some(s(8)), tokens: 3, cached: Some(4) };
        let mut tally = Tally { steps: 6, tokens: 7, preemptions: 1, end: s(8), ..Tally::default() };
        // On time; late; cancelled with one token; refused; cancelled before it ran.
        let cancelled = Outcome { end: End::Cancelled, last: done.first, tokens: 1, cached: Some(0), ..done };
        let never = Outcome { end: End::Cancelled, ..Outcome::default() };
        tally.outcomes = vec![done, done, cancelled, Outcome { end: End::Refused, ..Outcome::default() }, never];
        tally.slots(10, 5, s(1));
        tally.slots(20, 1, s(2));
        let r = tally.report(&arrivals);
        assert_eq!((r.makespan, r.throughput_tok_s), (s(7), 1.0));
        assert_eq!((r.finished, r.cancelled, r.refused, r.late), (2, 2, 1, 2));
        assert_eq!(r.ttft, Some(Percentiles { p50: s(2), p90: s(2), p99: s(2) }));
        assert_eq!(r.tpot, Some(Percentiles { p50: s(2), p90: s(2), p99: s(2) }));
        assert_eq!((r.waste, r.hit_rate), (7.0 / 50.0, 8.0 / 30.0));
    }
}
