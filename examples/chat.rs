//! A conversation at the terminal. Each turn reuses the cache of the turns before. Ctrl-C stops the answer, not the program;
//! an empty line does nothing, `/quit` or the end of the input ends it.

mod support;

use loquat::weights::no_progress;
use loquat::{Engine, EngineConfig, FinishReason, GenerateOptions, ModelFiles, OpenOptions, Polled, Session};
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use support::args::{Opt, Usage};

const USAGE: Usage = Usage {
    program: "chat",
    about: "Talks with a model.",
    words: "",
    options: &[
        support::MODEL,
        Opt { name: "--system", value: "TEXT", help: "what the model is told before the first turn" },
        Opt { name: "--max-tokens", value: "N", help: "tokens of an answer at most (default 512)" },
        Opt { name: "--context", value: "N", help: "tokens of the whole conversation (default 4096, or what the model allows)" },
        support::SAMPLING[0],
        support::SAMPLING[1],
        support::SAMPLING[2],
        support::SAMPLING[3],
        support::SAMPLING[4],
        support::THREADS,
        Opt { name: "--stats", value: "", help: "after each answer, say how many tokens were run and how many were cached" },
    ],
};

fn main() {
    if let Err(error) = run() {
        support::fail(format_args!("chat: {error}"));
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let options = GenerateOptions {
        max_tokens: args.number("--max-tokens", 512, 1..=1 << 20)?,
        sampling: support::sampling(&args)?,
        ..GenerateOptions::default()
    };
    let context = args.number("--context", 4096, 1..=1 << 24)?;
    let threads = support::threads(&args)?;
    let files = ModelFiles::open(support::model(&args)?, &OpenOptions::default(), &mut no_progress)?;
    let cache_tokens = context.min(files.spec().context);
    let mut engine = Engine::new(&files, EngineConfig { threads, cache_tokens, max_batch: 1, ..EngineConfig::default() })?;
    let mut session = Session::new(&files)?;
    if let Some(system) = args.text("--system")? {
        session.say("system", system);
    }

    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = interrupted.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))?;
    let mut out = std::io::stdout();
    let mut input = std::io::stdin().lock();
    loop {
        write!(out, "> ")?;
        out.flush()?;
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 || line.trim() == "/quit" {
            writeln!(out)?;
            return Ok(());
        }
        if line.trim().is_empty() {
            continue;
        }
        session.say("user", line.trim());
        interrupted.store(false, Ordering::Relaxed);
        // An answer that does not fit, or a template that refuses, ends the turn and not the conversation.
        if let Err(error) = session.start(&mut engine, &options) {
            session.unsay();
            writeln!(out, "[{error}]")?;
            continue;
        }
        loop {
            match session.poll(&mut engine)? {
                Polled::Text(text) => write!(out, "{text}")?,
                Polled::Pending => _ = engine.step()?,
                Polled::Done(FinishReason::Failed(error)) => {
                    write!(out, "[{error}]")?;
                    break;
                }
                Polled::Done(_) => break,
            }
            out.flush()?;
            if interrupted.load(Ordering::Relaxed) {
                // What is left of the answer comes with the next polls.
                session.stop(&mut engine);
                interrupted.store(false, Ordering::Relaxed);
                write!(out, " [stopped]")?;
            }
        }
        writeln!(out)?;
        if args.flag("--stats") {
            let all = session.tokens().len();
            eprintln!("[{all} tokens in all, {} generated now, {} found cached]", session.generated(), session.reused());
        }
    }
}
