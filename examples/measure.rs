//! Speed of a model on this machine, three ways.
//!
//! ```text
//! cargo run --release --example measure -- --batch 4                        prefill and decode: one JSON object
//! cargo run --release --example measure -- --policy all --rounds 5          scheduling policies on the same requests
//! cargo run --release --example measure -- --shared-prefix 500 --rounds 9   a prompt whose start is cached, and one whose is not
//! ```
//!
//! Of the first, `start_to_first_token_ms` is from the program's beginning to the token after one word, tokenizer included, and is
//! measured once; `prefill_tok_s` counts the tokens of all prompts until each has its first token, `decode_tok_s` those generated
//! after that, all sequences together; figures are medians over `--repeat` runs. The second has the figures of
//! `loquat::sched::sim::Report`, measured; its policies take turns, each round with a new engine for each, so that what else the machine
//! does meets all of them alike. Tokens of prompts are drawn from the model's vocabulary by a seed, and answers are as
//! long as the requests say.

mod support;

use loquat::sched::Scheduler;
use loquat::sched::sim::{Arrival, CostModel};
use loquat::weights::no_progress;
use loquat::{Compute, Engine, EngineConfig, ModelFiles, OpenOptions};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};
use support::args::{Args, Opt, Usage, Wrong};
use support::figures::{Figures, ratios, table};
use support::policies::{self, Policies};
use support::requests::{self, prompt};
use support::serve::{Served, serve};
use support::speed::{Speed, speed};
use support::start::start_to_first_token_ms;
use support::stats::{median, peak_rss_bytes};

const USAGE: Usage = Usage {
    program: "measure",
    about: "Measures prefill and decode speed; or with --policy scheduling, with --shared-prefix alone the prefix cache.",
    words: "",
    options: &[
        support::MODEL,
        support::THREADS,
        Opt { name: "--step-tokens", value: "N", help: "tokens of one step at most (default 128)" },
        Opt { name: "--tier", value: "NAME", help: "kernels to use: scalar, avx2, avx512 (default: the best there is)" },
        Opt { name: "--exact", value: "", help: "f32 activations throughout" },
        Opt { name: "--prompt-tokens", value: "P", help: "tokens of each prompt (default 128; after a shared prefix 16)" },
        Opt { name: "--gen-tokens", value: "G", help: "tokens generated after each (default 64)" },
        Opt { name: "--batch", value: "B", help: "sequences at a time (default 1; with a policy 16)" },
        Opt { name: "--repeat", value: "K", help: "runs (default 3)" },
        Opt { name: "--policy", value: "NAME", help: "static, dynamic, continuous (default), or all, in turn" },
        Opt {
            name: "--requests",
            value: "FILE",
            help: "seconds,prompt_tokens,output_tokens a line; or mixed: made up (default)",
        },
        Opt { name: "--count", value: "N", help: "requests to make up (default 64)" },
        Opt { name: "--rate", value: "R", help: "of them a second, at random times (default: all at once)" },
        Opt { name: "--seed", value: "N", help: "of what is made up (default 0)" },
        Opt { name: "--shared-prefix", value: "P", help: "tokens with which all prompts start" },
        Opt { name: "--cache-tokens", value: "N", help: "tokens in the cache (default: room for B of the longest request)" },
        Opt { name: "--linger", value: "S", help: "static: seconds without an arrival that start a batch (default 1)" },
        Opt { name: "--max-wait", value: "S", help: "dynamic: seconds that a request waits for others (default 0.2)" },
        Opt { name: "--max-chunk", value: "N", help: "continuous: prompt tokens beside decode rows (default 512)" },
        Opt { name: "--rounds", value: "N", help: "with a policy or a shared prefix: runs (default 3)" },
        Opt { name: "--fit", value: "", help: "tell what a step costs, in the simulator's terms" },
        Opt { name: "--json", value: "", help: "print one JSON object, as without policies and prefixes anyway" },
    ],
};
const BLOCK_SIZE: usize = 16;
/// A request that is longer is refused rather than given a cache of its own size.
const MAX_CACHE: usize = 1 << 20;
const MAX_TOKENS: usize = 1 << 20;

fn main() {
    support::end("measure", run(Instant::now()));
}

fn run(begun: Instant) -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let machine = Machine::read(&args)?;
    let of_policies = ["--count", "--rate", "--cache-tokens", "--linger", "--max-wait", "--max-chunk"];
    if ["--policy", "--requests", "--fit"].iter().any(|name| args.flag(name)) {
        refuse(&args, "with policies", &["--prompt-tokens", "--gen-tokens", "--repeat"])?;
        compare(&args, &machine)
    } else if args.flag("--shared-prefix") {
        refuse(&args, "without --policy", &[&of_policies[..], &["--batch", "--gen-tokens", "--repeat"]].concat())?;
        prefix(&args, &machine)
    } else {
        refuse(&args, "without --policy or --shared-prefix", &[&of_policies[..], &["--seed", "--rounds"]].concat())?;
        plain(&args, &machine, begun)
    }
}

/// What would be ignored is a mistake.
fn refuse(args: &Args, when: &str, names: &[&str]) -> Result<(), Wrong> {
    let given = names.iter().find(|name| args.flag(name));
    given.map_or(Ok(()), |name| Err(Wrong(format!("{name} means nothing {when}"))))
}

/// What is the same for all ways to measure.
struct Machine {
    threads: usize,
    tier: Option<String>,
    compute: Compute,
    step_tokens: usize,
}

impl Machine {
    fn read(args: &Args) -> Result<Self, Wrong> {
        Ok(Machine {
            threads: support::threads(args)?,
            tier: args.text("--tier")?.map(str::to_owned),
            compute: if args.flag("--exact") { Compute::Exact } else { Compute::Fast },
            step_tokens: args.number("--step-tokens", 128, 1..=1 << 16)?,
        })
    }

    /// For `max_seqs` sequences, `batch` of them at a time.
    fn config(&self, max_seqs: usize, batch: usize, cache_tokens: usize) -> EngineConfig {
        EngineConfig {
            threads: self.threads,
            tier: self.tier.clone(),
            compute: self.compute,
            block_size: BLOCK_SIZE,
            cache_tokens,
            max_seqs,
            max_batch: batch.min(max_seqs),
            step_tokens: self.step_tokens.max(batch),
            ..EngineConfig::default()
        }
    }
}

fn open(path: &Path) -> Result<ModelFiles, Box<dyn std::error::Error>> {
    Ok(ModelFiles::open(path, &OpenOptions { text: false, ..OpenOptions::default() }, &mut no_progress)?)
}

/// Prefill and decode.
fn plain(args: &Args, machine: &Machine, begun: Instant) -> Result<(), Box<dyn std::error::Error>> {
    let prompt_tokens = args.number("--prompt-tokens", 128usize, 1..=MAX_TOKENS)?;
    let gen_tokens = args.number("--gen-tokens", 64usize, 1..=MAX_TOKENS)?;
    let batch = args.number("--batch", 1, 1..=1 << 12)?;
    let repeat = args.number("--repeat", 3, 1..=1 << 20)?;
    let path = support::model(args)?;
    let config = machine.config(batch, batch, batch * (prompt_tokens + gen_tokens).next_multiple_of(BLOCK_SIZE));
    let start_ms = start_to_first_token_ms(&path, &config, begun)?;
    let mut loads = Vec::new();
    let mut timed = || -> Result<Engine, Box<dyn std::error::Error>> {
        let start = Instant::now();
        let engine = Engine::new(&open(&path)?, config.clone())?;
        loads.push(start.elapsed().as_secs_f64() * 1e3);
        Ok(engine)
    };
    let mut engine = timed()?;
    for _ in 1..repeat {
        // One model at a time, or the peak would be that of two.
        drop(engine);
        engine = timed()?;
    }
    let samples = (0..repeat).map(|k| speed(&mut engine, prompt_tokens, gen_tokens, batch, k as u64));
    let samples = samples.collect::<Result<Vec<_>, _>>()?;
    let of = |f: fn(&Speed) -> f64| median(samples.iter().map(f).collect());
    let report = json!({
        "start_to_first_token_ms": start_ms,
        "load_ms": median(loads),
        "first_token_ms": of(|s| s.first_token_ms),
        "prefill_tok_s": of(|s| s.prefill_tok_s),
        "decode_tok_s": of(|s| s.decode_tok_s),
        "peak_rss_bytes": peak_rss_bytes(),
        "planned_bytes": engine.memory().total_bytes(),
        "tier": engine.model().tier(),
        "version": env!("CARGO_PKG_VERSION"),
        "model": path.display().to_string(),
        "threads": machine.threads,
        "prompt_tokens": prompt_tokens,
        "gen_tokens": gen_tokens,
        "batch": batch,
        "repeat": repeat,
    });
    writeln!(std::io::stdout(), "{report}")?;
    Ok(())
}

/// Policies on the same requests, in turn.
fn compare(args: &Args, machine: &Machine) -> Result<(), Box<dyn std::error::Error>> {
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
    if args.flag("--json") {
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

/// An engine that has run once, a full batch of a few tokens, so that the first step that counts is not the first.
fn warm(
    files: &ModelFiles,
    config: &EngineConfig,
    policy: Box<dyn Scheduler>,
    batch: usize,
) -> Result<Engine, Box<dyn std::error::Error>> {
    let mut engine = Engine::load(files, config.clone(), policy, &mut no_progress)?;
    let few = vec![Arrival::new(Duration::ZERO, 4, 2); batch];
    let vocab = engine.model().spec().vocab;
    serve(&mut engine, &few, &|r| prompt(WARM_SEED, vocab, r, &few[r]))?;
    Ok(engine)
}

/// Tokens that no other seed has: the warm-up leaves nothing that a request could find.
const WARM_SEED: u64 = 0x5EED_0F57_A27E_D000;

/// The time to the first token of a prompt that starts with new tokens, and of one that starts with the same.
fn prefix(args: &Args, machine: &Machine) -> Result<(), Box<dyn std::error::Error>> {
    let shared = args.number("--shared-prefix", 0usize, 1..=MAX_TOKENS)?;
    let own = args.number("--prompt-tokens", 16usize, 1..=MAX_TOKENS)?;
    let rounds = args.number("--rounds", 3usize, 1..=1 << 10)?;
    let seed = args.number("--seed", 0, 0..=u64::MAX)?;
    let path = support::model(args)?;
    let config = machine.config(1, 1, (shared + own + 1).next_multiple_of(BLOCK_SIZE) * 2);
    let policy = Policies { batch: 1, linger: Duration::ZERO, max_wait: Duration::ZERO, max_chunk: usize::MAX };
    let policy = policy.named("continuous").expect("one of the names");
    let mut engine = warm(&open(&path)?, &config, policy, 1)?;
    let vocab = engine.model().spec().vocab;

    let (mut times, mut cached) = ([Vec::new(), Vec::new()], 0);
    for round in 0..rounds {
        let key = round as u64;
        let a = Arrival { prefix_tokens: shared, prefix: key, ..Arrival::new(Duration::ZERO, shared + own, 1) };
        for (k, times) in times.iter_mut().enumerate() {
            let Served { report, .. } = serve(&mut engine, &[a], &|_| prompt(seed, vocab, 2 * round + k, &a))?;
            let outcome = report.requests[0];
            let (Some(ttft), Some(found)) = (outcome.ttft(a.at), outcome.cached) else {
                let limit = engine.max_len();
                return Err(format!("{} tokens do not fit: expected {limit} at most", a.prompt_tokens + 1).into());
            };
            // Of a new prefix the first tokens may be those of another by chance, but never half of it.
            if k == 0 && found > shared / 2 || k == 1 && found < shared {
                let expected = ["next to none", "all"][k];
                return Err(format!("expected {expected} of {shared} shared tokens in the cache, found {found}").into());
            }
            cached = found;
            times.push(ttft.as_secs_f64() * 1e3);
        }
    }
    let ratio = median(times[0].iter().zip(&times[1]).map(|(cold, hit)| cold / hit).collect());
    let [cold, hit] = times.map(median);
    let mut out = std::io::stdout().lock();
    if args.flag("--json") {
        let report = json!({
            "cold_ttft_ms": cold,
            "hit_ttft_ms": hit,
            "cold_over_hit": ratio,
            "shared_prefix": shared,
            "own_tokens": own,
            "cached_tokens": cached,
            "rounds": rounds,
            "seed": seed,
            "tier": engine.model().tier(),
            "version": env!("CARGO_PKG_VERSION"),
            "model": path.display().to_string(),
            "threads": machine.threads,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(out, "prompts of {} tokens, the first {shared} shared; medians of {rounds} rounds", shared + own)?;
    writeln!(out, "time to first token, cold    {cold:>9.2} ms")?;
    writeln!(out, "                    cached   {hit:>9.2} ms, {cached} tokens found")?;
    writeln!(out, "cold / cached                {ratio:>9.2}")?;
    Ok(())
}
