//! Scheduling policies on the same requests, in turn: the figures of `loquat::sched::sim::Report`, measured.

use crate::support;
use crate::support::args::{Args, Wrong};
use crate::support::figures::{Figures, ratios, table};
use crate::support::policies::{self, Policies};
use crate::support::requests::{self, prompt};
use crate::support::serve::serve;
use crate::{BLOCK_SIZE, MAX_TOKENS, Machine, json_wanted, open, refuse, warm};
use loquat::sched::sim::{Arrival, CostModel};
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

/// A request that is longer is refused rather than given a cache of its own size.
const MAX_CACHE: usize = 1 << 20;

/// Policies on the same requests, in turn.
pub(crate) fn compare(args: &Args, machine: &Machine) -> Result<(), Box<dyn std::error::Error>> {
    let seed = args.number("--seed", 0, 0..=u64::MAX)?;
    let batch = args.number("--batch", 16usize, 1..=1 << 12)?;
    let rounds = args.number("--rounds", 3usize, 1..=1 << 10)?;
    let seconds = |name, default| args.number(name, default, 0.0..=1e9).map(Duration::from_secs_f64);
    let (linger, max_wait) = (seconds("--linger", 1.0)?, seconds("--max-wait", 0.2)?);
    let settings = Policies { batch, linger, max_wait, max_chunk: args.number("--max-chunk", 512, 1..=1 << 16)? };
    let names = match args.text("--policy")?.unwrap_or("continuous") {
        "all" => policies::NAMES.to_vec(),
        name => match policies::NAMES.iter().find(|n| **n == name) {
            Some(name) => vec![*name],
            None => return Err(Wrong(format!("--policy: expected {} or all, found {name:?}", policies::NAMES.join(", "))).into()),
        },
    };
    let arrivals = arrivals(args, seed)?;
    let path = support::model(args)?;
    let files = open(&path)?;
    let longest = arrivals.iter().map(|a| a.prompt_tokens.saturating_add(a.output_tokens)).max().unwrap_or(1);
    let room = longest.min(files.spec().context).next_multiple_of(BLOCK_SIZE).saturating_mul(batch).min(MAX_CACHE);
    let cache_tokens = args.number("--cache-tokens", room, 1..=MAX_CACHE)?;
    let config = machine.config(arrivals.len().clamp(batch, 1 << 20), batch, cache_tokens);

    let mut figures = vec![Vec::new(); names.len()];
    let (mut steps, mut refused, mut tier) = (Vec::new(), 0, String::new());
    for round in 0..rounds {
        for k in 0..names.len() {
            let which = (k + round) % names.len();
            let policy = settings.named(names[which]).expect("one of the names");
            let mut engine = warm(&files, &config, policy, batch)?;
            let vocab = engine.model().spec().vocab;
            let served = serve(&mut engine, &arrivals, &|r| prompt(seed, vocab, r, &arrivals[r]))?;
            figures[which].push(Figures::of(&served.report));
            refused = served.report.refused;
            tier = engine.model().tier().to_string();
            steps.extend(served.steps);
        }
    }
    let cost = if args.flag("--fit") { Some(CostModel::fit(&steps)?) } else { None };
    let rows: Vec<(&str, Figures)> = names.iter().zip(&figures).map(|(name, runs)| (*name, Figures::median(runs))).collect();
    // Of each round its own, so that a slow minute does not fall to one of the two.
    let over = |runs: &Vec<Figures>| -> Vec<Figures> { runs.iter().zip(&figures[0]).map(|(run, base)| run.over(base)).collect() };
    let against: Vec<(&str, Figures)> =
        names.iter().zip(&figures).skip(1).map(|(name, runs)| (*name, Figures::median(&over(runs)))).collect();

    let mut out = std::io::stdout().lock();
    let (count, threads) = (arrivals.len(), machine.threads);
    if json_wanted(args)? {
        let object = |rows: &[(&str, Figures)], json: fn(&Figures) -> Value| -> Value {
            Value::Object(rows.iter().map(|(name, figures)| ((*name).to_owned(), json(figures))).collect())
        };
        let mut report = json!({
            "policies": object(&rows, Figures::json),
            "requests": count,
            "refused": refused,
            "rounds": rounds,
            "batch": batch,
            "cache_tokens": cache_tokens,
            "seed": seed,
            "tier": tier,
            "version": env!("CARGO_PKG_VERSION"),
            "model": path.display().to_string(),
            "threads": threads,
        });
        if !against.is_empty() {
            report["against_static"] = object(&against, Figures::json_ratios);
        }
        if let Some(CostModel { step, row, prefill_token, attended_token }) = cost {
            report["cost"] = json!([step, row, prefill_token, attended_token]);
        }
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(out, "{count} requests, {refused} of them refused; batches of {batch}, {cache_tokens} tokens of cache")?;
    writeln!(out, "medians of {rounds} rounds on {threads} threads, {tier}")?;
    table(&mut out, &rows)?;
    if !against.is_empty() {
        ratios(&mut out, names[0], &against)?;
    }
    if let Some(CostModel { step, row, prefill_token, attended_token }) = cost {
        writeln!(out, "\nfor simulate: --cost {step:.3e},{row:.3e},{prefill_token:.3e},{attended_token:.3e}")?;
    }
    Ok(())
}

fn arrivals(args: &Args, seed: u64) -> Result<Vec<Arrival>, Box<dyn std::error::Error>> {
    let mut arrivals = match args.path("--requests") {
        Some(path) if path.as_os_str() != "mixed" => {
            refuse(args, "with requests out of a file", &["--count", "--rate"])?;
            requests::read(&path)?
        }
        _ => {
            let count = args.number("--count", 64, 1..=1 << 20)?;
            requests::mixed(seed, count, args.number("--rate", f64::INFINITY, 1e-6..=1e6)?)?
        }
    };
    if arrivals.is_empty() {
        return Err(Wrong("expected at least one request, found none".into()).into());
    }
    let shared = args.number("--shared-prefix", 0usize, 0..=MAX_TOKENS)?;
    if shared > 0 && arrivals.iter().any(|a| a.prefix_tokens > 0) {
        return Err(Wrong("--shared-prefix: expected requests without prefixes of their own, found some with".into()).into());
    }
    if shared > 0 {
        for a in &mut arrivals {
            a.prompt_tokens = a.prompt_tokens.saturating_add(shared);
            a.prefix_tokens = shared;
        }
    }
    Ok(arrivals)
}
