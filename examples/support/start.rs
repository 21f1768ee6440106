//! From the start of a program to the first token.
// Each example uses its part of this.
#![allow(dead_code)]

use loquat::engine::Status;
use loquat::text::EncodeOptions;
use loquat::{Engine, EngineConfig, EventKind, ModelFiles, Request};
use std::path::Path;
use std::time::Instant;

/// Milliseconds from `begun`, the program's beginning, to the first token after one word: weights, tokenizer, template and all.
pub(crate) fn start_to_first_token_ms(
    path: &Path,
    config: &EngineConfig,
    begun: Instant,
) -> Result<f64, Box<dyn std::error::Error>> {
    let files = ModelFiles::load(path)?;
    let word = match files.tokenizer() {
        Ok(tokenizer) => tokenizer.encode("Hello", EncodeOptions::default())?,
        Err(_) => vec![1],
    };
    let mut engine = Engine::new(&files, config.clone())?;
    engine.submit(Request::new(word, 1))?;
    loop {
        let status = engine.step()?;
        while let Some(event) = engine.next_event() {
            if let EventKind::Token { .. } = event.kind {
                return Ok(begun.elapsed().as_secs_f64() * 1e3);
            }
        }
        if status == Status::Idle(None) {
            return Err("no token came".into());
        }
    }
}
