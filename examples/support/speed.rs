//! Speed of prefill and decode of equal requests that come at once.
// Each example uses its part of this.
#![allow(dead_code)]

use super::requests::prompt;
use loquat::sched::sim::Arrival;
use loquat::{Engine, EventKind, Request};
use std::time::{Duration, Instant};

pub(crate) struct Speed {
    pub(crate) first_token_ms: f64,
    pub(crate) prefill_tok_s: f64,
    pub(crate) decode_tok_s: f64,
}

/// Runs `batch` requests of `prompt_tokens` tokens out of `seed`, each until it has `gen_tokens` more.
pub(crate) fn speed(
    engine: &mut Engine,
    prompt_tokens: usize,
    gen_tokens: usize,
    batch: usize,
    seed: u64,
) -> Result<Speed, Box<dyn std::error::Error>> {
    let vocab = engine.model().spec().vocab;
    let arrival = Arrival::new(Duration::ZERO, prompt_tokens, gen_tokens);
    let prompts: Vec<_> = (0..batch).map(|r| prompt(seed, vocab, r, &arrival)).collect();
    let start = Instant::now();
    for tokens in prompts {
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
    Ok(Speed {
        first_token_ms: first.unwrap_or(whole).as_secs_f64() * 1e3,
        prefill_tok_s: (batch * prompt_tokens) as f64 / begun,
        decode_tok_s: if after == 0 { 0.0 } else { f64::from(after) / decode },
    })
}
