//! The prefix cache: the time to the first token of a prompt whose start is cached, and of one whose is not.

use crate::support;
use crate::support::args::Args;
use crate::support::policies::Policies;
use crate::support::requests::prompt;
use crate::support::serve::{Served, serve};
use crate::support::stats::median;
use crate::{BLOCK_SIZE, MAX_TOKENS, Machine, json_wanted, open, warm};
use loquat::sched::sim::Arrival;
use serde_json::json;
use std::io::Write;
use std::time::Duration;

/// The time to the first token of a prompt that starts with new tokens, and of one that starts with the same.
pub(crate) fn prefix(args: &Args, machine: &Machine) -> Result<(), Box<dyn std::error::Error>> {
    let shared = args.number("--shared-prefix", 0usize, 1..=MAX_TOKENS)?;
    let own = args.number("--prompt-tokens", 16usize, 1..=MAX_TOKENS)?;
    let rounds = args.number("--rounds", 3usize, 1..=1 << 10)?;
    let seed = args.number("--seed", 0, 0..=u64::MAX)?;
    let path = support::model(args)?;
    let config = machine.config(1, 1, (shared + own + 1).next_multiple_of(BLOCK_SIZE) * 2);
    let policy = Policies { batch: 1, linger: Duration::ZERO, max_wait: Duration::ZERO, max_chunk: usize::MAX };
    let policy = policy.named("continuous").expect("one of the names");
    let mut engine = warm(&open(&path)?, &config, policy, 1)?;
    let vocab = engine.model().spec().vocab;

    let (mut times, mut cached) = ([Vec::new(), Vec::new()], 0);
    for round in 0..rounds {
        let key = round as u64;
        let a = Arrival { prefix_tokens: shared, prefix: key, ..Arrival::new(Duration::ZERO, shared + own, 1) };
        for (k, times) in times.iter_mut().enumerate() {
            let Served { report, .. } = serve(&mut engine, &[a], &|_| prompt(seed, vocab, 2 * round + k, &a))?;
            let outcome = report.requests[0];
            let (Some(ttft), Some(found)) = (outcome.ttft(a.at), outcome.cached) else {
                let limit = engine.max_len();
                return Err(format!("{} tokens do not fit: expected {limit} at most", a.prompt_tokens + 1).into());
            };
            // Of a new prefix the first tokens may be those of another by chance, but never half of it.
            if k == 0 && found > shared / 2 || k == 1 && found < shared {
                let expected = ["next to none", "all"][k];
                return Err(format!("expected {expected} of {shared} shared tokens in the cache, found {found}").into());
            }
            cached = found;
            times.push(ttft.as_secs_f64() * 1e3);
        }
    }
    let ratio = median(times[0].iter().zip(&times[1]).map(|(cold, hit)| cold / hit).collect());
    let [cold, hit] = times.map(median);
    let mut out = std::io::stdout().lock();
    if json_wanted(args)? {
        let report = json!({
            "cold_ttft_ms": cold,
            "hit_ttft_ms": hit,
            "cold_over_hit": ratio,
            "shared_prefix": shared,
            "own_tokens": own,
            "cached_tokens": cached,
            "rounds": rounds,
            "seed": seed,
            "tier": engine.model().tier(),
            "version": env!("CARGO_PKG_VERSION"),
            "model": path.display().to_string(),
            "threads": machine.threads,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(out, "prompts of {} tokens, the first {shared} shared; medians of {rounds} rounds", shared + own)?;
    writeln!(out, "time to first token, cold    {cold:>9.2} ms")?;
    writeln!(out, "                    cached   {hit:>9.2} ms, {cached} tokens found")?;
    writeln!(out, "cold / cached                {ratio:>9.2}")?;
    Ok(())
}
