//! What a policy came to, in eight figures: as a table, as JSON, and against another policy's.
// Each example uses its part of this.
#![allow(dead_code)]

use super::stats::median;
use loquat::sched::sim::{Percentiles, Report};
use std::io::Write;
use std::time::Duration;

/// One for each of [`NAMES`]; none where no request had it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures([Option<f64>; NAMES.len()]);

/// Tokens a second, milliseconds, shares, and a count.
const NAMES: [&str; 8] =
    ["throughput_tok_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "waste", "hit_rate", "preemptions"];
/// Of the names, the first so many are speeds and times: their ratios mean something.
const COMPARED: usize = 5;

impl Figures {
    pub(crate) fn of(r: &Report) -> Self {
        let ms = |p: Option<Percentiles>, which: fn(Percentiles) -> Duration| p.map(|p| which(p).as_secs_f64() * 1e3);
        Figures([
            Some(r.throughput_tok_s),
            ms(r.ttft, |p| p.p50),
            ms(r.ttft, |p| p.p99),
            ms(r.tpot, |p| p.p50),
            ms(r.tpot, |p| p.p99),
            Some(r.waste),
            Some(r.hit_rate),
            Some(r.preemptions as f64),
        ])
    }

    /// The middle of each figure over several runs.
    pub(crate) fn median(runs: &[Figures]) -> Self {
        Figures(std::array::from_fn(|i| {
            let values: Vec<f64> = runs.iter().filter_map(|run| run.0[i]).collect();
            (!values.is_empty()).then(|| median(values))
        }))
    }

    /// Speeds and times as multiples of `other`'s; the rest is left out.
    pub(crate) fn over(&self, other: &Figures) -> Self {
        Figures(std::array::from_fn(|i| match (self.0[i], other.0[i]) {
            (Some(a), Some(b)) if i < COMPARED && b > 0.0 => Some(a / b),
            _ => None,
        }))
    }

    /// An object with a member for each figure.
    pub(crate) fn json(&self) -> serde_json::Value {
        NAMES.iter().zip(self.0).map(|(name, value)| ((*name).to_owned(), value.into())).collect::<serde_json::Map<_, _>>().into()
    }

    /// As [`Figures::json`], of what [`Figures::over`] left.
    pub(crate) fn json_ratios(&self) -> serde_json::Value {
        let ratios = NAMES.iter().zip(self.0).take(COMPARED);
        ratios.map(|(name, value)| ((*name).to_owned(), value.into())).collect::<serde_json::Map<_, _>>().into()
    }
}

/// A line for each policy.
pub(crate) fn table(out: &mut impl Write, rows: &[(&str, Figures)]) -> std::io::Result<()> {
    writeln!(out, "\n            throughput  time to first token, ms   time per token, ms  cache slots  prompt from  preemp-")?;
    writeln!(out, "policy           tok/s       p50       p99        p50       p99        empty        cache    tions")?;
    for (name, Figures(values)) in rows {
        let [speed, t50, t99, o50, o99, waste, hits, preemptions] = *values;
        let ms = |value: Option<f64>| match value {
            None => "-".to_owned(),
            Some(ms) if ms < 99.95 => format!("{ms:.1}"),
            Some(ms) => format!("{ms:.0}"),
        };
        let [t50, t99, o50, o99] = [t50, t99, o50, o99].map(ms);
        let [speed, waste, hits, preemptions] = [speed, waste, hits, preemptions].map(Option::unwrap_or_default);
        write!(out, "{name:<12} {speed:>9.1} {t50:>9} {t99:>9}  {o50:>9} {o99:>9}")?;
        writeln!(out, " {:>10.1} % {:>10.1} % {preemptions:>8.0}", waste * 100.0, hits * 100.0)?;
    }
    Ok(())
}

/// A line for each policy, of multiples of `base`'s speeds and times.
pub(crate) fn ratios(out: &mut impl Write, base: &str, rows: &[(&str, Figures)]) -> std::io::Result<()> {
    writeln!(out, "\nas multiples of {base}")?;
    for (name, Figures(values)) in rows {
        let ratio = |value: Option<f64>| value.map_or("-".to_owned(), |r| format!("{r:.2}"));
        let [speed, t50, t99, o50, o99, ..] = values.map(ratio);
        writeln!(out, "{name:<12} {speed:>9} {t50:>9} {t99:>9}  {o50:>9} {o99:>9}")?;
    }
    Ok(())
}
