//! Several prompts at once on one engine, each asked by a thread of its own through a handle. A program with an async runtime
//! awaits `stream.recv()` in the same place.
//!
//! ```text
//! cargo run --release --example handle -- Once Twice Thrice
//! ```

mod support;

use loquat::text::EncodeOptions;
use loquat::weights::no_progress;
use loquat::{Engine, EngineConfig, EventKind, HandleOptions, ModelFiles, OpenOptions, Request};
use std::io::Write;
use std::thread;
use support::args::{Opt, Usage, Wrong};

const USAGE: Usage = Usage {
    program: "handle",
    about: "Continues each word, all at once.",
    words: "WORDS",
    options: &[
        support::MODEL,
        Opt { name: "--max-tokens", value: "N", help: "tokens to generate for each at most (default 16)" },
        support::THREADS,
    ],
};

fn main() {
    support::end("handle", run());
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let words = args.sentence()?;
    if words.is_empty() {
        return Err(Wrong("expected words, found none (--help explains the options)".into()).into());
    }
    let max_tokens = args.number("--max-tokens", 16, 1..=1 << 12)?;
    let threads = support::threads(&args)?;
    let files = ModelFiles::open(support::model(&args)?, &OpenOptions::default(), &mut no_progress)?;
    let tokenizer = files.tokenizer()?;
    let engine = Engine::new(&files, EngineConfig { threads, ..EngineConfig::default() })?;

    let (handle, driver) = engine.into_handle(HandleOptions::default());
    thread::scope(|scope| {
        let driver = scope.spawn(move || driver.run());
        let mut askers = Vec::new();
        for word in words.split_whitespace() {
            let request = Request::new(tokenizer.encode(word, EncodeOptions::default())?, max_tokens);
            // Moved in: the driver returns when the last handle is gone.
            let handle = handle.clone();
            askers.push(scope.spawn(move || -> Result<String, loquat::Error> {
                let mut tokens = request.tokens.clone();
                for event in handle.submit(request)? {
                    if let EventKind::Token { token, .. } = event? {
                        tokens.push(token);
                    }
                }
                Ok(tokenizer.decode(&tokens, true))
            }));
        }
        drop(handle);
        let mut out = std::io::stdout().lock();
        for asker in askers {
            writeln!(out, "{}", asker.join().expect("an asker does not panic")?)?;
        }
        driver.join().expect("nothing panics on the driver")?;
        Ok(())
    })
}
