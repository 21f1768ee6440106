//! Speed of a model, as one JSON object on standard output; figures are medians over `--repeat` runs.
//!
//! `prefill_tok_s` counts the tokens of all prompts until each has its first token, `decode_tok_s` those generated after
//! that, all sequences together.

mod support;

use loquat::weights::no_progress;
use loquat::{Compute, Engine, EngineConfig, EventKind, ModelFiles, OpenOptions, Request};
use std::io::Write;
use std::time::Instant;
use support::args::{Opt, Usage};
use support::stats::{median, peak_rss_bytes};

const USAGE: Usage = Usage {
    program: "measure",
    about: "Measures prefill and decode speed; prints one JSON object.",
    words: "",
    options: &[
        support::MODEL,
        support::THREADS,
        Opt { name: "--prompt-tokens", value: "P", help: "tokens of each prompt (default 128)" },
        Opt { name: "--gen-tokens", value: "G", help: "tokens generated after each (default 64)" },
        Opt { name: "--batch", value: "B", help: "sequences at a time (default 1)" },
        Opt { name: "--repeat", value: "K", help: "runs (default 3)" },
        Opt { name: "--step-tokens", value: "N", help: "tokens of one step at most (default 128)" },
        Opt { name: "--tier", value: "NAME", help: "kernels to use: scalar, avx2, avx512 (default: the best there is)" },
        Opt { name: "--exact", value: "", help: "f32 activations throughout" },
    ],
};

fn main() {
    support::end("measure", run());
}

struct Sample {
    first_token_ms: f64,
    prefill_tok_s: f64,
    decode_tok_s: f64,
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let prompt_tokens = args.number("--prompt-tokens", 128usize, 1..=1 << 20)?;
    let gen_tokens = args.number("--gen-tokens", 64usize, 1..=1 << 20)?;
    let batch = args.number("--batch", 1, 1..=1 << 12)?;
    let repeat = args.number("--repeat", 3, 1..=1 << 20)?;
    let step_tokens = args.number("--step-tokens", 128, 1..=1 << 16)?.max(batch);
    let threads = support::threads(&args)?;
    let path = support::model(&args)?;

    let config = EngineConfig {
        threads,
        tier: args.text("--tier")?.map(str::to_owned),
        compute: if args.flag("--exact") { Compute::Exact } else { Compute::Fast },
        cache_tokens: batch * (prompt_tokens + gen_tokens).next_multiple_of(EngineConfig::default().block_size),
        max_seqs: batch,
        max_batch: batch,
        step_tokens,
        ..EngineConfig::default()
    };
    let load = || -> Result<Engine, Box<dyn std::error::Error>> {
        let files = ModelFiles::open(&path, &OpenOptions { text: false, ..OpenOptions::default() }, &mut no_progress)?;
        Ok(Engine::new(&files, config.clone())?)
    };
    let mut loads = Vec::new();
    let mut timed = || {
        let start = Instant::now();
        let engine = load();
        loads.push(start.elapsed().as_secs_f64() * 1e3);
        engine
    };
    let mut engine = timed()?;
    for _ in 1..repeat {
        // One model at a time, or the peak would be that of two.
        drop(engine);
        engine = timed()?;
    }

    let samples =
        (0..repeat).map(|k| sample(&mut engine, prompt_tokens, gen_tokens, batch, k as u64)).collect::<Result<Vec<_>, _>>()?;
    let of = |f: fn(&Sample) -> f64| median(samples.iter().map(f).collect());
    let report = serde_json::json!({
        "load_ms": median(loads),
        "first_token_ms": of(|s| s.first_token_ms),
        "prefill_tok_s": of(|s| s.prefill_tok_s),
        "decode_tok_s": of(|s| s.decode_tok_s),
        "peak_rss_bytes": peak_rss_bytes(),
        "planned_bytes": engine.memory().total_bytes(),
        "tier": engine.model().tier(),
        "version": env!("CARGO_PKG_VERSION"),
        "model": path.display().to_string(),
        "threads": threads,
        "prompt_tokens": prompt_tokens,
        "gen_tokens": gen_tokens,
        "batch": batch,
        "repeat": repeat,
    });
    writeln!(std::io::stdout(), "{report}")?;
    Ok(())
}

fn sample(
    engine: &mut Engine,
    prompt: usize,
    gen_tokens: usize,
    batch: usize,
    seed: u64,
) -> Result<Sample, Box<dyn std::error::Error>> {
    let vocab = engine.model().spec().vocab as u64;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    let mut token = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab) as u32
    };
    let start = Instant::now();
    for _ in 0..batch {
        let tokens: Vec<u32> = (0..prompt).map(|_| token()).collect();
        engine.submit(Request::new(tokens, gen_tokens))?;
    }
    let (mut ended, mut begun, mut after) = (0, 0, 0);
    let (mut first, mut all_begun) = (None, None);
    let mut seen = std::collections::HashSet::new();
    while ended < batch {
        engine.step()?;
        while let Some(event) = engine.next_event() {
            match event.kind {
                EventKind::Token { .. } => {
                    if all_begun.is_some() {
                        after += 1;
                    }
                    if seen.insert(event.seq) {
                        begun += 1;
                        first.get_or_insert_with(|| start.elapsed());
                    }
                }
                EventKind::Finished(_) => ended += 1,
                _ => {}
            }
        }
        if begun == batch {
            all_begun.get_or_insert_with(|| start.elapsed());
        }
    }
    let whole = start.elapsed();
    let begun = all_begun.unwrap_or(whole).as_secs_f64();
    let decode = whole.as_secs_f64() - begun;
    Ok(Sample {
        first_token_ms: first.unwrap_or(whole).as_secs_f64() * 1e3,
        prefill_tok_s: (batch * prompt) as f64 / begun,
        decode_tok_s: if after == 0 { 0.0 } else { f64::from(after) / decode },
    })
}
