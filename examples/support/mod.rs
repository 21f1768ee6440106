//! What the examples share: reading the command line, finding a model, telling how it went.
// Each example uses its part of this.
#![allow(dead_code)]

pub(crate) mod args;
pub(crate) mod fetch;
pub(crate) mod figures;
pub(crate) mod plot;
pub(crate) mod policies;
pub(crate) mod requests;
pub(crate) mod serve;
pub(crate) mod stats;

use args::{Args, Opt, Wrong};
use loquat::SamplingParams;
use std::io::Write;
use std::path::PathBuf;

/// Ends the program as it went: with a message and 2 for a bad option, 1 for anything else; without a message where nobody
/// reads the output any more.
pub(crate) fn end(program: &str, outcome: Result<(), Box<dyn std::error::Error>>) {
    let Err(error) = outcome else { return };
    let unread = error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
    if !unread {
        let _ = writeln!(std::io::stderr(), "{program}: {error}");
    }
    std::process::exit(if error.is::<Wrong>() { 2 } else { 1 })
}

pub(crate) const MODEL: Opt =
    Opt { name: "--model", value: "PATH", help: "GGUF file, safetensors file, folder with config.json, or packed file" };
pub(crate) const THREADS: Opt = Opt { name: "--threads", value: "N", help: "threads (default: as many as cores)" };

/// How tokens are chosen.
pub(crate) const SAMPLING: [Opt; 5] = [
    Opt { name: "--temperature", value: "T", help: "0 takes the likeliest token (default 0)" },
    Opt { name: "--top-k", value: "K", help: "of the K likeliest tokens (0: all, the default)" },
    Opt { name: "--top-p", value: "P", help: "of the likeliest tokens that make up P (1: all, the default)" },
    Opt { name: "--min-p", value: "P", help: "of tokens at least P times as likely as the likeliest (default 0)" },
    Opt { name: "--seed", value: "N", help: "same seed, same answer (default 0)" },
];

pub(crate) fn sampling(args: &Args) -> Result<SamplingParams, Wrong> {
    let mut params = SamplingParams::default()
        .temperature(args.number("--temperature", 0.0, 0.0..=1e6)?)
        .top_k(args.number("--top-k", 0, 0..=usize::MAX)?)
        .top_p(args.number("--top-p", 1.0, 0.0..=1.0)?)
        .min_p(args.number("--min-p", 0.0, 0.0..=1.0)?);
    params.seed = args.number("--seed", 0, 0..=u64::MAX)?;
    Ok(params)
}

/// The model that was named, or SmolLM2, fetched if it is not in the cache.
pub(crate) fn model(args: &Args) -> Result<PathBuf, String> {
    match args.path("--model") {
        Some(path) => Ok(path),
        None => fetch::fetch(&fetch::SMOLLM2),
    }
}

pub(crate) fn threads(args: &Args) -> Result<usize, Wrong> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    args.number("--threads", cores, 1..=1024)
}
