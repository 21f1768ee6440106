//! What fast arithmetic costs: of a text, the divergence of its distributions from those of f32 activations and an f32 cache on
//! exactly dequantised weights, in nats, and the perplexity of both.
//!
//! The text is cut into windows that are run each by itself. The second half of each window is told apart: where a program scores
//! that alone, so that every token has a context, the figures of the two are those to compare.

use crate::support::args::{Args, Wrong};
use crate::support::stats::median;
use crate::{BLOCK_SIZE, Machine, json_wanted, open, support};
use loquat::{Compute, Engine, EngineConfig, EventKind, FinishReason, KvDType, ModelFiles, Request, Status, TokenId};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::{Arc, Mutex};

/// One position of the text.
struct Scored {
    position: usize,
    /// Of the fast distribution from the exact one.
    divergence: f64,
    same_top: bool,
    /// Negative log-likelihoods of the token that follows.
    exact: f64,
    fast: f64,
}

/// Figures over positions.
struct Figures {
    positions: usize,
    mean: f64,
    median: f64,
    p99: f64,
    max: f64,
    same_top: f64,
    exact_perplexity: f64,
    fast_perplexity: f64,
}

impl Figures {
    fn of(scored: &[&Scored]) -> Self {
        let n = scored.len().max(1) as f64;
        let mean = |f: fn(&Scored) -> f64| scored.iter().map(|s| f(s)).sum::<f64>() / n;
        let mut sorted: Vec<f64> = scored.iter().map(|s| s.divergence).collect();
        sorted.sort_by(f64::total_cmp);
        Figures {
            positions: scored.len(),
            mean: mean(|s| s.divergence),
            median: median(sorted.clone()),
            p99: sorted.get(sorted.len() * 99 / 100).copied().unwrap_or(f64::NAN),
            max: sorted.last().copied().unwrap_or(f64::NAN),
            same_top: mean(|s| f64::from(u8::from(s.same_top))),
            exact_perplexity: mean(|s| s.exact).exp(),
            fast_perplexity: mean(|s| s.fast).exp(),
        }
    }

    fn json(&self) -> Value {
        json!({
            "positions": self.positions,
            "kl_mean": self.mean,
            "kl_median": self.median,
            "kl_p99": self.p99,
            "kl_max": self.max,
            "same_top": self.same_top,
            "exact_perplexity": self.exact_perplexity,
            "fast_perplexity": self.fast_perplexity,
        })
    }
}

/// The divergence of fast arithmetic.
pub(crate) fn accuracy(args: &Args, machine: &Machine) -> Result<(), Box<dyn std::error::Error>> {
    let window = args.number("--window", 1024usize, 2..=1 << 16)?;
    let windows = args.number("--windows", 1usize, 1..=1 << 10)?;
    let source = args.path("--accuracy").expect("the option that leads here");
    let ids = ids(&source)?;
    if ids.len() < window * windows {
        let (found, name) = (ids.len(), source.display());
        return Err(Wrong(format!("--accuracy: expected {windows} windows of {window} tokens, found {found} in {name}")).into());
    }
    let path = support::model(args)?;
    let files = open(&path)?;
    let mut exact = engine(&files, machine, window, Compute::Exact, KvDType::F32)?;
    let mut fast = engine(&files, machine, window, Compute::Fast, KvDType::F16)?;
    let mut scored = Vec::new();
    for text in ids.chunks_exact(window).take(windows) {
        let rows = rows(&mut exact, text)?;
        scored.extend(compared(&mut fast, text, rows)?);
    }
    let all = Figures::of(&scored.iter().collect::<Vec<_>>());
    let half = Figures::of(&scored.iter().filter(|s| s.position >= window / 2).collect::<Vec<_>>());
    let mut out = std::io::stdout().lock();
    if json_wanted(args)? {
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": path.display().to_string(),
            "tier": fast.model().tier(),
            "window": window,
            "windows": windows,
            "all": all.json(),
            "second_half": half.json(),
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(out, "{}: fast arithmetic against exact, {windows} windows of {window} tokens", path.display())?;
    writeln!(
        out,
        "{:<12} {:>9} {:>10} {:>10} {:>10} {:>10} {:>9} {:>11} {:>11}",
        "positions", "", "mean KL", "median", "99 %", "most", "same top", "ppl exact", "ppl fast"
    )?;
    for (name, f) in [("all", all), ("second half", half)] {
        let Figures { positions, mean, median, p99, max, same_top, exact_perplexity, fast_perplexity } = f;
        write!(out, "{name:<12} {positions:>9} {mean:>10.6} {median:>10.6} {p99:>10.6} {max:>10.6} ")?;
        writeln!(out, "{:>7.2} % {exact_perplexity:>11.4} {fast_perplexity:>11.4}", same_top * 100.0)?;
    }
    Ok(())
}

fn ids(path: &std::path::Path) -> Result<Vec<TokenId>, Wrong> {
    let wrong = |what: String| Wrong(format!("--accuracy {}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    let value: Value = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    let list = value["ids"].as_array().ok_or_else(|| wrong("expected an object with a list of ids, found none".into()))?;
    let id =
        |v: &Value| v.as_u64().and_then(|n| TokenId::try_from(n).ok()).ok_or_else(|| wrong(format!("expected an id, found {v}")));
    list.iter().map(id).collect()
}

fn engine(
    files: &ModelFiles,
    machine: &Machine,
    window: usize,
    compute: Compute,
    kv_dtype: KvDType,
) -> Result<Engine, Box<dyn std::error::Error>> {
    let config = machine.config(1, 1, (window + 1).next_multiple_of(BLOCK_SIZE));
    Ok(Engine::new(files, EngineConfig { compute, kv_dtype, prompt_logits: true, ..config })?)
}

/// Logits at every position of `text` but the last, one row after the other.
fn rows(engine: &mut Engine, text: &[TokenId]) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    let last = text.len() - 1;
    let rows = Arc::new(Mutex::new(Vec::with_capacity(last * engine.model().spec().vocab)));
    let seen = rows.clone();
    engine.observe(move |row| {
        if row.position < last {
            seen.lock().unwrap_or_else(|e| e.into_inner()).extend_from_slice(row.logits);
        }
    });
    finish(engine, text)?;
    Ok(std::mem::take(&mut *rows.lock().unwrap_or_else(|e| e.into_inner())))
}

/// The same positions by another engine.
fn compared(engine: &mut Engine, text: &[TokenId], truth: Vec<f32>) -> Result<Vec<Scored>, Box<dyn std::error::Error>> {
    let scored = Arc::new(Mutex::new(Vec::new()));
    let (seen, tokens) = (scored.clone(), text.to_vec());
    engine.observe(move |row| {
        let Some(&next) = tokens.get(row.position + 1) else { return };
        let vocab = row.logits.len();
        let exact = &truth[row.position * vocab..][..vocab];
        let (exact_sum, fast_sum) = (log_sum_exp(exact), log_sum_exp(row.logits));
        let divergence = exact.iter().zip(row.logits).map(|(e, f)| {
            let (e, f) = (f64::from(*e) - exact_sum, f64::from(*f) - fast_sum);
            e.exp() * (e - f)
        });
        let scored = Scored {
            position: row.position,
            divergence: divergence.sum(),
            same_top: top(exact) == top(row.logits),
            exact: exact_sum - f64::from(exact[next as usize]),
            fast: fast_sum - f64::from(row.logits[next as usize]),
        };
        seen.lock().unwrap_or_else(|e| e.into_inner()).push(scored);
    });
    finish(engine, text)?;
    let scored = std::mem::take(&mut *scored.lock().unwrap_or_else(|e| e.into_inner()));
    match scored.len() + 1 == text.len() {
        true => Ok(scored),
        false => Err(format!("expected {} rows of logits, found {}", text.len() - 1, scored.len()).into()),
    }
}

fn finish(engine: &mut Engine, text: &[TokenId]) -> Result<(), Box<dyn std::error::Error>> {
    engine.submit(Request { prompt_logits: true, ..Request::new(text, 1) })?;
    while engine.step()? == Status::Stepped {
        while let Some(event) = engine.next_event() {
            if let EventKind::Finished(FinishReason::Failed(error)) = event.kind {
                return Err(error.into());
            }
        }
    }
    engine.stop_observing();
    Ok(())
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
    f64::from(max) + logits.iter().map(|&v| f64::from(v - max).exp()).sum::<f64>().ln()
}

fn top(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0)
}
