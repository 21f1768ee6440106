//! The stock policies on the same requests, without a model: a table, and a plot of how long the requests waited.
//!
//! ```text
//! cargo run --release --example simulate
//! cargo run --release --example simulate -- --requests trace.csv --json
//! ```
//!
//! The requests are conversations out of a seed, or a trace: see `loquat::sched::sim::parse_trace` for its form. What a step costs
//! is of the order of a model of a billion weights on a desktop's processor; put in figures of your own to plan with them.

mod support;

use loquat::sched::sim::{Arrival, Arrivals, CostModel, Lengths, Outcome, Report, RequestKind, SimConfig, simulate};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;
use support::args::{Args, Opt, Usage, Wrong};
use support::figures::{Figures, table};
use support::plot::{Panel, svg};
use support::policies::{self, Policies};

const USAGE: Usage = Usage {
    program: "simulate",
    about: "Compares scheduling policies on the same requests; prints a table and writes a plot.",
    words: "",
    options: &[
        Opt { name: "--requests", value: "FILE", help: "seconds,prompt_tokens,output_tokens a line (default: made up)" },
        Opt { name: "--seed", value: "N", help: "of the requests that are made up, and of all tokens (default 0)" },
        Opt { name: "--count", value: "N", help: "requests to make up (default 300)" },
        Opt { name: "--rate", value: "R", help: "of them a second (default 0.5)" },
        Opt { name: "--batch", value: "B", help: "sequences that run at a time (default 16)" },
        Opt { name: "--cache-tokens", value: "N", help: "tokens in the cache (default 5120, or the longest request)" },
        Opt { name: "--cost", value: "A,B,C,D", help: "seconds of a step, and for each row, prefill token and attended token" },
        Opt { name: "--svg", value: "FILE", help: "where to write the plot (default simulate.svg; with --json none)" },
        Opt { name: "--json", value: "", help: "print one JSON object and nothing else" },
    ],
};

/// Without `--cost`.
const COST: CostModel = CostModel { step: 0.04, row: 0.005, prefill_token: 0.005, attended_token: 2e-6 };
const BLOCK_SIZE: usize = 16;
/// A request that is longer is refused rather than given a cache of its own size.
const MAX_CACHE: usize = 1 << 22;

fn main() {
    support::end("simulate", run());
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let seed = args.number("--seed", 0, 0..=u64::MAX)?;
    let batch = args.number("--batch", 16usize, 1..=1 << 12)?;
    let requests = requests(&args, seed)?;
    if requests.is_empty() {
        return Err(Wrong("expected at least one request, found none".into()).into());
    }
    let longest = requests.iter().map(|a| a.prompt_tokens.saturating_add(a.output_tokens)).max().unwrap_or(0);
    let tokens = args.number("--cache-tokens", longest.clamp(5120, MAX_CACHE), 1..=MAX_CACHE)?;
    let blocks = tokens.div_ceil(BLOCK_SIZE);
    let mut config = SimConfig::new(blocks, BLOCK_SIZE, blocks * BLOCK_SIZE, cost(&args)?);
    (config.seed, config.max_seqs, config.step_seqs) = (seed, requests.len(), batch);
    config.step_tokens = 256.max(batch);

    let settings = Policies { batch, linger: Duration::from_secs(5), max_wait: Duration::from_millis(200), max_chunk: 64 };
    let mut reports = Vec::new();
    for name in policies::NAMES {
        let mut policy = settings.named(name).expect("one of the names");
        reports.push((name, simulate(&config, &requests, &mut *policy)?.0));
    }
    let figures: Vec<(&str, Figures)> = reports.iter().map(|(name, r)| (*name, Figures::of(r))).collect();

    let mut out = std::io::stdout().lock();
    let refused = reports[0].1.refused;
    if args.flag("--json") {
        if refused > 0 {
            // Standard output belongs to the object.
            writeln!(std::io::stderr(), "simulate: {refused} requests did not fit and were refused")?;
        }
        let object = figures.iter().map(|(name, figures)| ((*name).to_owned(), figures.json())).collect();
        writeln!(out, "{:#}", serde_json::Value::Object(object))?;
    } else {
        writeln!(out, "{} requests, {refused} of them refused; batches of {batch}, {tokens} tokens of cache", requests.len())?;
        table(&mut out, &figures)?;
    }
    let default = (!args.flag("--json")).then(|| PathBuf::from("simulate.svg"));
    if let Some(path) = args.path("--svg").or(default) {
        let heading = format!("{} requests, seed {seed}", requests.len());
        std::fs::write(&path, plot(&heading, &requests, &reports)).map_err(|e| format!("{}: {e}", path.display()))?;
        if !args.flag("--json") {
            writeln!(out, "\nplot written to {}", path.display())?;
        }
    }
    Ok(())
}

fn requests(args: &Args, seed: u64) -> Result<Vec<Arrival>, Box<dyn std::error::Error>> {
    if let Some(path) = args.path("--requests") {
        return Ok(support::requests::read(&path)?);
    }
    // Conversations under a common instruction, and among them texts that are long and may take their time.
    let log_normal = |median, sigma, max| Lengths::LogNormal { median, sigma, max };
    let chat = RequestKind {
        weight: 0.8,
        prefix_tokens: 96,
        prefix_share: 0.7,
        priority: 1,
        ..RequestKind::new(log_normal(60.0, 0.8, 600), log_normal(50.0, 0.8, 400))
    };
    let text = RequestKind { weight: 0.2, ..RequestKind::new(log_normal(300.0, 0.6, 1500), log_normal(120.0, 0.6, 600)) };
    let rate = args.number("--rate", 0.5, 1e-6..=1e6)?;
    let requests = args.number("--count", 300, 1..=1 << 20)?;
    Ok(Arrivals { seed, requests, rate, mix: vec![chat, text] }.generate()?)
}

fn cost(args: &Args) -> Result<CostModel, Wrong> {
    match args.list::<f64>("--cost")?.as_deref() {
        None => Ok(COST),
        Some(&[step, row, prefill_token, attended_token]) => Ok(CostModel { step, row, prefill_token, attended_token }),
        Some(found) => Err(Wrong(format!("--cost: expected 4 numbers, found {}", found.len()))),
    }
}

fn plot(heading: &str, requests: &[Arrival], reports: &[(&str, Report)]) -> String {
    let times = |of: fn(&Arrival, &Outcome) -> Option<Duration>| {
        let one = |r: &Report| requests.iter().zip(&r.requests).filter_map(|(a, o)| of(a, o)).collect();
        reports.iter().map(|(name, r)| (*name, one(r))).collect()
    };
    let panels = [
        Panel { title: "Time to first token", lines: times(|a, o| o.ttft(a.at)) },
        Panel { title: "Time per output token", lines: times(|_, o| o.tpot()) },
    ];
    svg(heading, &panels)
}
