//! Speed of a model on this machine, and what it costs in accuracy.
//!
//! ```text
//! cargo run --release --example measure -- --prompt-tokens 128,512 --depth 0,1024 --batch 1,8   prefill and decode, a line each
//! cargo run --release --example measure -- --depth 1024 --profile                              the same by operation
//! cargo run --release --example measure -- --policy all --rounds 5                             scheduling policies on the same requests
//! cargo run --release --example measure -- --shared-prefix 500 --rounds 9                      a prompt whose start is cached, and one whose is not
//! cargo run --release --example measure -- --accuracy tests/fixtures/smollm2/text.json         fast arithmetic against exact
//! ```
//!
//! A prefill is timed from its submission to the first token of each prompt; a decode is so many steps, each of one row for every
//! sequence, behind a prompt of `--depth` tokens that was run before and is not counted. Both count the tokens of all sequences together, and
//! figures are medians over `--repeat` runs. Policies have the figures of `loquat::sched::sim::Report`, measured; they take turns, each
//! round with a new engine for each, so that what else the machine does meets all of them alike. Tokens of prompts are drawn from
//! the model's vocabulary by a seed, and answers are as long as the requests say.

mod accuracy;
mod compare;
mod prefix;
mod profile;
mod speed;
#[path = "../support/mod.rs"]
mod support;

use loquat::sched::Scheduler;
use loquat::sched::sim::Arrival;
use loquat::weights::no_progress;
use loquat::{Compute, Engine, EngineConfig, ModelFiles, OpenOptions};
use std::path::Path;
use std::time::Duration;
use support::args::{Args, Opt, Usage, Wrong};
use support::requests::prompt;
use support::serve::serve;

const USAGE: Usage = Usage {
    program: "measure",
    about: "Measures prefill and decode speed; or with --policy scheduling, with --shared-prefix alone the prefix cache, with \
            --accuracy what fast arithmetic costs.",
    words: "",
    options: &[
        support::MODEL,
        support::THREADS,
        Opt { name: "--step-tokens", value: "N", help: "tokens of one step at most (default 128)" },
        Opt { name: "--tier", value: "NAME", help: "kernels to use, as scalar or avx2 (default: the best there is)" },
        Opt { name: "--exact", value: "", help: "f32 activations throughout" },
        Opt {
            name: "--prompt-tokens",
            value: "P,..",
            help: "lengths of prompts; 0: no prefill (default 128; one, after a shared prefix: 16)",
        },
        Opt { name: "--depth", value: "D,..", help: "tokens before those that are decoded (default 0)" },
        Opt { name: "--gen-tokens", value: "G", help: "tokens decoded at each depth; 0: no decode (default 64)" },
        Opt { name: "--batch", value: "B,..", help: "sequences at a time (default 1; with a policy one number, 16)" },
        Opt { name: "--shared", value: "", help: "decode: all sequences of a batch behind one prompt" },
        Opt { name: "--repeat", value: "K", help: "runs (default 3)" },
        Opt { name: "--profile", value: "", help: "where the time of a step goes, by operation" },
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
        Opt {
            name: "--accuracy",
            value: "FILE",
            help: "JSON with ids, a list of tokens of a text: fast arithmetic against exact",
        },
        Opt { name: "--window", value: "N", help: "of its tokens that are run at a time (default 1024)" },
        Opt { name: "--windows", value: "N", help: "so many windows (default 1)" },
        Opt { name: "--format", value: "NAME", help: "table (default) or json, one object" },
        Opt { name: "--json", value: "", help: "the same as --format json" },
    ],
};
const BLOCK_SIZE: usize = 16;
const MAX_TOKENS: usize = 1 << 20;

const OF_SPEED: &[&str] = &["--depth", "--shared", "--profile", "--gen-tokens", "--repeat"];
const OF_POLICIES: &[&str] =
    &["--policy", "--requests", "--fit", "--count", "--rate", "--cache-tokens", "--linger", "--max-wait", "--max-chunk"];
const OF_ACCURACY: &[&str] = &["--window", "--windows"];

fn main() {
    support::end("measure", run());
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let machine = Machine::read(&args)?;
    json_wanted(&args)?;
    if args.flag("--accuracy") {
        let others = ["--exact", "--prompt-tokens", "--batch", "--seed", "--shared-prefix", "--rounds"];
        refuse(&args, "with --accuracy", &[OF_SPEED, OF_POLICIES, &others].concat())?;
        return accuracy::accuracy(&args, &machine);
    }
    refuse(&args, "without --accuracy", OF_ACCURACY)?;
    if ["--policy", "--requests", "--fit"].iter().any(|name| args.flag(name)) {
        refuse(&args, "with policies", &[OF_SPEED, &["--prompt-tokens"]].concat())?;
        compare::compare(&args, &machine)
    } else if args.flag("--shared-prefix") {
        refuse(&args, "without --policy", OF_POLICIES)?;
        refuse(&args, "with --shared-prefix", &[OF_SPEED, &["--batch"]].concat())?;
        prefix::prefix(&args, &machine)
    } else {
        refuse(&args, "without --policy or --shared-prefix", &[OF_POLICIES, &["--rounds", "--seed"]].concat())?;
        speed::speed(&args, &machine)
    }
}

/// What would be ignored is a mistake.
fn refuse(args: &Args, when: &str, names: &[&str]) -> Result<(), Wrong> {
    let given = names.iter().find(|name| args.flag(name));
    given.map_or(Ok(()), |name| Err(Wrong(format!("{name} means nothing {when}"))))
}

/// One object, or a table.
fn json_wanted(args: &Args) -> Result<bool, Wrong> {
    match (args.text("--format")?, args.flag("--json")) {
        (None, json) => Ok(json),
        (Some("json"), _) => Ok(true),
        (Some("table"), false) => Ok(false),
        (Some("table"), true) => Err(Wrong("--json: expected no --format but json beside it, found table".into())),
        (Some(other), _) => Err(Wrong(format!("--format: expected table or json, found {other:?}"))),
    }
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
