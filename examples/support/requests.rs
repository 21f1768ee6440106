//! Requests for a comparison of policies: out of a file, or made up; and the tokens of their prompts.
// Each example uses its part of this.
#![allow(dead_code)]

use loquat::TokenId;
use loquat::sched::sim::{Arrival, Arrivals, Lengths, RequestKind, SimError, parse_trace};
use std::path::Path;

/// A trace: see [`parse_trace`] for its form.
pub(crate) fn read(path: &Path) -> Result<Vec<Arrival>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    parse_trace(&text).map_err(|e| format!("{}: {e}", path.display()))
}

/// Three of four are short talk, the others texts that read and write five times as much: what waits behind what decides how a
/// policy does. `rate` a second; infinite, all at once.
pub(crate) fn mixed(seed: u64, requests: usize, rate: f64) -> Result<Vec<Arrival>, SimError> {
    let lengths = |median, max| Lengths::LogNormal { median, sigma: 0.7, max };
    let talk = RequestKind { weight: 0.75, ..RequestKind::new(lengths(40.0, 200), lengths(30.0, 120)) };
    let text = RequestKind { weight: 0.25, ..RequestKind::new(lengths(200.0, 600), lengths(150.0, 400)) };
    Arrivals { seed, requests, rate, mix: vec![talk, text] }.generate()
}

/// Tokens of the `r`-th request's prompt, any of `vocab`: those of its prefix follow from `seed` and the prefix, the others from
/// `seed` and `r`.
pub(crate) fn prompt(seed: u64, vocab: usize, r: usize, a: &Arrival) -> Vec<TokenId> {
    let stream = |key: u64| {
        let mut state = mixed_bits(seed ^ mixed_bits(key));
        std::iter::repeat_with(move || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            (mixed_bits(state) % vocab as u64) as TokenId
        })
    };
    // Even keys are prefixes, odd ones requests.
    let prefix = stream(a.prefix.wrapping_mul(2)).take(a.prefix_tokens);
    prefix.chain(stream((r as u64).wrapping_mul(2) + 1)).take(a.prompt_tokens).collect()
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
fn mixed_bits(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
