//! A scheduler of one's own: a game in which characters talk now, and the world's books are written in the background.
//!
//! ```text
//! cargo run --release --example custom_scheduler
//! ```
//!
//! Talk must not wait for books, and books must not wait for ever. [`FairShare`] is all it takes: the ledger beneath sees to it
//! that a policy can be slow, never wrong. The model here is a tiny one of random weights, so that nothing is fetched; what it
//! writes makes no sense, and the timeline shows who wrote when.

mod support;

use loquat::sched::{NoRoom, Preempt, SeqView};
use loquat::weights::{Fill, Synthetic, SyntheticTensor, no_progress};
use loquat::{Engine, EngineConfig, EventKind, FormatId, ModelFiles, Request, Scheduler, SeqId, SideTexts, Status, StepBuilder};
use std::io::Write;
use std::sync::Arc;
use support::args::{Opt, Usage};

const USAGE: Usage = Usage {
    program: "custom_scheduler",
    about: "Runs dialogue and background text under a fair-share scheduler; prints who had a turn in each step.",
    words: "",
    options: &[Opt { name: "--reserved", value: "N", help: "of 3 places, those that the background keeps (default 1)" }],
};

/// Requests of a priority above 0 are dialogue, the others background. Of the places in a step dialogue takes as many as it
/// needs, the youngest background text giving way, but for those reserved for the background while it has work.
struct FairShare {
    reserved: usize,
    /// Who has work: dialogue before background, those that run before those that wait, the oldest first.
    queue: Vec<Entry>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    background: bool,
    waits: bool,
    // Names rise in the order of submission.
    seq: SeqId,
}

impl Scheduler for FairShare {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        let entry = |s: SeqView<'_>, waits| Entry { background: s.priority() <= 0, waits, seq: s.id() };
        self.queue.clear();
        self.queue.extend(step.running().map(|s| entry(s, false)));
        self.queue.extend(step.waiting().map(|s| entry(s, true)));
        self.queue.sort_unstable();

        let places = step.seq_budget();
        let dialogues = self.queue.iter().filter(|e| !e.background).count();
        let talking = self.queue.iter().filter(|e| !e.background && !e.waits).count();
        let reserved = self.reserved.min(self.queue.len() - dialogues);
        // Dialogue that runs keeps its place: the background comes to its share as talk ends.
        let talk = dialogues.min(places.saturating_sub(reserved)).max(talking);
        self.queue.drain(talk..dialogues);
        for e in self.queue.drain(places.min(self.queue.len())..) {
            step.preempt(e.seq, Preempt::Recompute);
        }
        for k in 0..self.queue.len() {
            // A token for each of those behind, and no prompt takes a whole step.
            let spare = step.token_budget().saturating_sub(self.queue.len() - k - 1);
            while step.prefill(self.queue[k].seq, spare.min(CHUNK)) == Err(NoRoom::Blocks) {
                // The cache is full: the last in the queue makes room.
                let mut behind = self.queue[k + 1..].iter().rev();
                if !behind.any(|e| step.preempt(e.seq, Preempt::Recompute)) {
                    break;
                }
            }
        }
    }
}

/// Tokens of one sequence in one step.
const CHUNK: usize = 4;

fn main() {
    support::end("custom_scheduler", run());
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let reserved = args.number("--reserved", 1, 0..=3)?;
    let config = EngineConfig { max_batch: 3, step_tokens: 8, cache_tokens: 256, ..EngineConfig::default() };
    let policy = FairShare { reserved, queue: Vec::new() };
    let mut engine = Engine::load(&tiny_model()?, config, Box::new(policy), &mut no_progress)?;

    // (step in which it comes, name, prompt tokens, tokens to write, priority)
    let script = [
        (0, "book of stars", 24, 24, 0),
        (0, "book of herbs", 24, 24, 0),
        (10, "guard: Halt!", 8, 12, 1),
        (12, "thief: Me?", 8, 10, 1),
        (14, "crowd: There!", 8, 6, 1),
        (38, "guard: You!", 8, 8, 1),
    ];
    let mut lines: Vec<(SeqId, &str, String)> = Vec::new();
    for step in 0.. {
        for (_, name, prompt, write, priority) in script.iter().filter(|s| s.0 == step) {
            let request = Request::new(vec![7; *prompt], *write).priority(*priority);
            lines.push((engine.submit(request)?, name, " ".repeat(step)));
        }
        let cached = |engine: &Engine, seq| engine.view(seq).map(|s| s.cached());
        let before: Vec<_> = lines.iter().map(|l| cached(&engine, l.0)).collect();
        let status = engine.step()?;
        let wrote: Vec<SeqId> = std::iter::from_fn(|| engine.next_event())
            .filter(|event| matches!(event.kind, EventKind::Token { .. }))
            .map(|event| event.seq)
            .collect();
        if status == Status::Idle(None) {
            break;
        }
        for ((seq, _, line), before) in lines.iter_mut().zip(before) {
            let now = cached(&engine, *seq);
            line.push(match before {
                _ if wrote.contains(seq) => '#',
                None => ' ',
                Some(_) if now > before => 'r',
                Some(_) => '.',
            });
        }
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "A column is a step.  r reads its prompt   # writes a token   . waits\n")?;
    for (_, name, line) in &lines {
        writeln!(out, "{name:<15}{}", line.trim_end())?;
    }
    Ok(())
}

/// One layer of random weights.
fn tiny_model() -> Result<ModelFiles, loquat::Error> {
    let tensor = |name: &str, shape: &[usize]| SyntheticTensor {
        name: name.into(),
        shape: shape.into(),
        format: FormatId::F32,
        fill: if shape.len() == 1 { Fill::Constant(1.0) } else { Fill::Normal(0.2) },
    };
    let layer = |name: &str, shape: &[usize]| tensor(&format!("model.layers.0.{name}.weight"), shape);
    let tensors = vec![
        tensor("model.embed_tokens.weight", &[96, 32]),
        layer("input_layernorm", &[32]),
        layer("self_attn.q_proj", &[32, 32]),
        layer("self_attn.k_proj", &[16, 32]),
        layer("self_attn.v_proj", &[16, 32]),
        layer("self_attn.o_proj", &[32, 32]),
        layer("post_attention_layernorm", &[32]),
        layer("mlp.gate_proj", &[64, 32]),
        layer("mlp.up_proj", &[64, 32]),
        layer("mlp.down_proj", &[32, 64]),
        tensor("model.norm.weight", &[32]),
    ];
    let config = r#"{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;
    let texts = SideTexts { config: Some(config.into()), ..SideTexts::default() };
    Ok(ModelFiles::from_texts(Arc::new(Synthetic::new(7, tensors)?), &texts, false)?)
}
