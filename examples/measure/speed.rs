//! Prefill and decode, a cell for each length, depth and number of sequences.
//!
//! A decode cell times steps that are alike: each runs one row of every sequence. The prompts are run before, and each
//! sequence starts with a token of its own behind one that is cached, so that no prefill is left to hide among the steps. That there were as many
//! steps as tokens is checked.

use crate::profile::{self, Profile};
use crate::support;
use crate::support::args::{Args, Wrong};
use crate::support::requests::prompt;
use crate::support::stats::{median, peak_rss_bytes};
use crate::{BLOCK_SIZE, MAX_TOKENS, Machine, WARM_SEED, json_wanted, open};
use loquat::sched::sim::Arrival;
use loquat::{Engine, EventKind, FinishReason, Request, Status, TokenId};
use serde_json::{Value, json};
use std::io::Write;
use std::time::{Duration, Instant};

/// What is timed.
#[derive(Clone, Copy)]
enum Cell {
    /// So many prompts of so many tokens, to the first token of each.
    Prefill { tokens: usize, batch: usize },
    /// So many steps of `batch` rows behind `depth` tokens, each sequence's own or shared by all.
    Decode { depth: usize, steps: usize, batch: usize, shared: bool },
}

impl Cell {
    /// Tokens that count.
    fn tokens(&self) -> usize {
        match *self {
            Cell::Prefill { tokens, batch } => tokens * batch,
            Cell::Decode { steps, batch, .. } => steps * batch,
        }
    }

    fn batch(&self) -> usize {
        match *self {
            Cell::Prefill { batch, .. } | Cell::Decode { batch, .. } => batch,
        }
    }

    /// Cache that it needs: whole blocks, and one for each sequence that may be copied.
    fn cache_tokens(&self) -> usize {
        let room = |tokens: usize| tokens.next_multiple_of(BLOCK_SIZE) + BLOCK_SIZE;
        match *self {
            Cell::Prefill { tokens, batch } => batch * room(tokens + 1),
            Cell::Decode { depth, steps, batch, shared: true } => room(depth) + batch * room(steps + 1),
            Cell::Decode { depth, steps, batch, shared: false } => batch * room(depth + steps + 1),
        }
    }

    fn name(&self) -> String {
        match *self {
            Cell::Prefill { tokens, batch } => format!("prefill {tokens} x {batch}"),
            Cell::Decode { depth, batch, shared, .. } => {
                format!("decode at {depth} x {batch}{}", if shared { ", shared" } else { "" })
            }
        }
    }

    fn json(&self) -> Value {
        match *self {
            Cell::Prefill { tokens, batch } => json!({"what": "prefill", "tokens": tokens, "batch": batch}),
            Cell::Decode { depth, steps, batch, shared } => {
                json!({"what": "decode", "depth": depth, "tokens": steps, "batch": batch, "shared": shared})
            }
        }
    }

    /// Runs it on prompts that no other `seed` has.
    fn run(&self, engine: &mut Engine, seed: u64, profile: Option<&Profile>) -> Result<Duration, Box<dyn std::error::Error>> {
        let vocab = engine.model().spec().vocab;
        let tokens = |r: usize, n: usize| prompt(seed, vocab, r, &Arrival::new(Duration::ZERO, n, 1));
        let (prompts, steps): (Vec<Vec<TokenId>>, usize) = match *self {
            Cell::Prefill { tokens: n, batch } => ((0..batch).map(|r| tokens(r, n)).collect(), 1),
            Cell::Decode { depth, steps, batch, shared } => {
                let own = |r: usize| match shared {
                    true => [tokens(0, depth), vec![(r % vocab) as TokenId]].concat(),
                    false => tokens(r, depth + 1),
                };
                let prompts: Vec<_> = (0..batch).map(own).collect();
                if depth > 0 {
                    for p in &prompts[..if shared { 1 } else { batch }] {
                        engine.submit(Request::prefill(&p[..depth]))?;
                        run(engine, None)?;
                    }
                }
                (prompts, steps)
            }
        };
        if let Some(profile) = profile {
            profile.clear();
        }
        let start = Instant::now();
        for tokens in prompts {
            engine.submit(Request::new(tokens, steps))?;
        }
        let ran = run(engine, profile)?;
        let took = start.elapsed();
        match *self {
            Cell::Decode { .. } if ran != steps => {
                Err(format!("{}: expected {steps} steps of equal rows, found {ran}", self.name()).into())
            }
            _ => Ok(took),
        }
    }
}

/// Steps until nothing is left to do.
fn run(engine: &mut Engine, profile: Option<&Profile>) -> Result<usize, Box<dyn std::error::Error>> {
    let mut steps = 0;
    loop {
        let start = Instant::now();
        let status = engine.step()?;
        if let Some(profile) = profile {
            profile.step(start, status == Status::Stepped);
        }
        while let Some(event) = engine.next_event() {
            if let EventKind::Finished(FinishReason::Failed(error)) = event.kind {
                return Err(error.into());
            }
        }
        match status {
            Status::Stepped => steps += 1,
            Status::Idle(None) => return Ok(steps),
            other => return Err(format!("expected a step or nothing to do, found {other:?}").into()),
        }
    }
}

/// Prefill and decode.
pub(crate) fn speed(args: &Args, machine: &Machine) -> Result<(), Box<dyn std::error::Error>> {
    let cells = cells(args)?;
    let repeat = args.number("--repeat", 3, 1..=1 << 20)?;
    let json = json_wanted(args)?;
    let path = support::model(args)?;
    let most = |f: fn(&Cell) -> usize| cells.iter().map(f).max().unwrap_or(1);
    let config = machine.config(most(Cell::batch), most(Cell::batch), most(Cell::cache_tokens));
    let profile = args.flag("--profile").then(Profile::default);
    let mut loads = Vec::new();
    let mut timed = || -> Result<Engine, Box<dyn std::error::Error>> {
        let start = Instant::now();
        let files = open(&path)?;
        let engine = match &profile {
            Some(profile) => profile::engine(&files, &config, profile)?,
            None => Engine::new(&files, config.clone())?,
        };
        loads.push(start.elapsed().as_secs_f64() * 1e3);
        Ok(engine)
    };
    let mut engine = timed()?;
    for _ in 1..repeat {
        // One model at a time, or the peak would be that of two.
        drop(engine);
        engine = timed()?;
    }
    let mut out = std::io::stdout().lock();
    let mut list = Vec::new();
    if !json {
        let (threads, tier) = (machine.threads, engine.model().tier());
        writeln!(out, "{}, {threads} threads, {tier}, loaded in {:.0} ms", path.display(), median(loads.clone()))?;
        writeln!(out, "medians of {repeat} runs{:>24} {:>11} {:>11} {:>11}", "tok/s", "ms", "least", "most")?;
    }
    // The first step finds nothing in any cache of the machine's.
    let few = Cell::Decode { depth: 0, steps: 2, batch: config.max_batch, shared: false };
    few.run(&mut engine, WARM_SEED, None)?;
    let mut seed = 0;
    for cell in &cells {
        let (mut seconds, mut profiles) = (Vec::new(), Vec::new());
        for _ in 0..repeat {
            seed += 1;
            seconds.push(cell.run(&mut engine, seed, profile.as_ref())?.as_secs_f64());
            profiles.extend(profile.as_ref().map(Profile::taken));
        }
        let middle = median(seconds.clone());
        let speeds: Vec<f64> = seconds.iter().map(|s| cell.tokens() as f64 / s).collect();
        // The run nearest to the median stands for all: of several, parts would not add up to a whole.
        let nearest = (0..repeat).min_by(|a, b| (seconds[*a] - middle).abs().total_cmp(&(seconds[*b] - middle).abs()));
        let nearest = nearest.and_then(|k| profiles.into_iter().nth(k));
        if json {
            let mut value = cell.json();
            value["tok_s"] = median(speeds.clone()).into();
            value["ms"] = (middle * 1e3).into();
            value["samples_tok_s"] = speeds.into();
            if let Some(profile) = nearest {
                value["profile"] = profile.json();
            }
            list.push(value);
        } else {
            let least = seconds.iter().copied().fold(f64::INFINITY, f64::min) * 1e3;
            let most = seconds.iter().copied().fold(0.0, f64::max) * 1e3;
            let (name, tok_s, ms) = (cell.name(), median(speeds), middle * 1e3);
            writeln!(out, "{name:<30} {tok_s:>11.1} {ms:>11.2} {least:>11.2} {most:>11.2}")?;
            if let Some(profile) = nearest {
                profile.table(&mut out)?;
            }
        }
    }
    if json {
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": path.display().to_string(),
            "tier": engine.model().tier(),
            "threads": machine.threads,
            "step_tokens": config.step_tokens,
            "repeat": repeat,
            "load_ms": median(loads),
            "peak_rss_bytes": peak_rss_bytes(),
            "planned_bytes": engine.memory().total_bytes(),
            "cells": list,
        });
        writeln!(out, "{report}")?;
    }
    Ok(())
}

fn cells(args: &Args) -> Result<Vec<Cell>, Wrong> {
    let list = |name: &str, default: usize, least: usize, most: usize| -> Result<Vec<usize>, Wrong> {
        let list = args.list(name)?.unwrap_or_else(|| vec![default]);
        match list.iter().find(|n| !(least..=most).contains(*n)) {
            Some(n) => Err(Wrong(format!("{name}: expected a number from {least} to {most}, found \"{n}\""))),
            None => Ok(list),
        }
    };
    let prompts = list("--prompt-tokens", 128, 0, MAX_TOKENS)?;
    let depths = list("--depth", 0, 0, MAX_TOKENS)?;
    let batches = list("--batch", 1, 1, 1 << 12)?;
    let steps = args.number("--gen-tokens", 64usize, 0..=MAX_TOKENS)?;
    let shared = args.flag("--shared");
    let mut cells = Vec::new();
    for &batch in &batches {
        cells.extend(prompts.iter().filter(|n| **n > 0).map(|&tokens| Cell::Prefill { tokens, batch }));
    }
    for &depth in depths.iter().filter(|_| steps > 0) {
        cells.extend(batches.iter().map(|&batch| Cell::Decode { depth, steps, batch, shared }));
    }
    match cells.is_empty() {
        true => Err(Wrong("--prompt-tokens 0 --gen-tokens 0: expected something to measure, found nothing".into())),
        false => Ok(cells),
    }
}
