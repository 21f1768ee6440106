//! A conversation at the terminal. Each turn reuses the cache of the turns before. Ctrl-C stops the answer, not the program;
//! an empty line does nothing, `/reset` begins a new conversation, `/quit` or the end of the input ends the program.

mod support;

use loquat::weights::no_progress;
use loquat::{Engine, EngineConfig, Error, FinishReason, GenerateOptions, ModelFiles, OpenOptions, Polled, Session, SubmitError};
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use support::args::{Opt, Usage};

const USAGE: Usage = Usage {
    program: "chat",
    about: "Talks with a model. /reset begins anew, /quit ends.",
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
    support::end("chat", run());
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
    let system = args.text("--system")?;
    let begin = || -> Result<Session, Error> {
        let mut session = Session::new(&files)?;
        if let Some(system) = system {
            session.say("system", system);
        }
        Ok(session)
    };
    let mut session = begin()?;

    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = interrupted.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))?;
    let mut out = std::io::stdout();
    let mut input = std::io::stdin().lock();
    loop {
        write!(out, "> ")?;
        out.flush()?;
        let mut line = Vec::new();
        let ended = input.read_until(b'\n', &mut line)? == 0;
        let line = match std::str::from_utf8(&line) {
            Ok(line) => line.trim(),
            Err(error) => {
                writeln!(out, "[expected a line of UTF-8, found another byte at {}]", error.valid_up_to())?;
                continue;
            }
        };
        if ended || line == "/quit" {
            writeln!(out)?;
            return Ok(());
        }
        if line == "/reset" {
            session = begin()?;
            continue;
        }
        if line.is_empty() {
            continue;
        }
        session.say("user", line);
        interrupted.store(false, Ordering::Relaxed);
        // An answer that does not fit, or a template that refuses, ends the turn and not the conversation.
        if let Err(error) = session.start(&mut engine, &options) {
            session.unsay();
            match error {
                Error::Submit(SubmitError::TooLong { .. }) => writeln!(out, "[no room is left: {error}; /reset begins anew]")?,
                error => writeln!(out, "[{error}]")?,
            }
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
            let (generated, reused) = (session.generated(), session.reused());
            writeln!(std::io::stderr(), "[{all} tokens in all, {generated} generated now, {reused} found cached]")?;
        }
    }
}
