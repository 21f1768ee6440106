//! Engines run to the end, and what they showed.

use loquat::backend::cpu::Compute;
use loquat::engine::{Engine, EngineConfig, EventKind, FinishReason, Request, Status};
use loquat::model::{ModelFiles, OpenOptions};
use loquat::weights::no_progress;
use loquat::{KvDType, SeqId, TokenId};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

pub fn open(path: &Path) -> ModelFiles {
    ModelFiles::open(path, &OpenOptions::default(), &mut no_progress).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// f32 activations and an f32 cache: what golden logits are compared with.
pub fn exact() -> EngineConfig {
    EngineConfig { compute: Compute::Exact, kv_dtype: KvDType::F32, cache_tokens: 2048, ..EngineConfig::default() }
}

pub type Rows = BTreeMap<(SeqId, usize), (Vec<f32>, Vec<f32>)>;

/// Records every row of logits (and hidden states) that the engine computes.
pub fn record(engine: &mut Engine) -> Arc<Mutex<Rows>> {
    let rows = Arc::new(Mutex::new(Rows::new()));
    let seen = rows.clone();
    engine.observe(move |row| {
        seen.lock().unwrap().insert((row.seq, row.position), (row.logits.to_vec(), row.hidden.to_vec()));
    });
    rows
}

/// Steps until nothing is left; the tokens of each sequence in the order of `seqs`.
pub fn finish(engine: &mut Engine, seqs: &[SeqId]) -> Vec<Vec<TokenId>> {
    let mut out = vec![Vec::new(); seqs.len()];
    let mut ended = 0;
    while ended < seqs.len() {
        let status = engine.step().unwrap();
        while let Some(event) = engine.next_event() {
            let i = seqs.iter().position(|s| *s == event.seq).expect("an event of a known sequence");
            match event.kind {
                EventKind::Token { token, .. } => out[i].push(token),
                EventKind::Finished(FinishReason::Stop | FinishReason::Length) => ended += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(ended == seqs.len() || status != Status::Idle(None), "idle with work left");
    }
    out
}

/// One prompt alone: its generated tokens, and logits by position.
pub fn alone(files: &ModelFiles, config: EngineConfig, prompt: &[TokenId], max_tokens: usize) -> (Vec<TokenId>, Vec<Vec<f32>>) {
    let mut engine = Engine::new(files, EngineConfig { prompt_logits: true, ..config }).unwrap();
    let rows = record(&mut engine);
    let seq = engine.submit(Request { prompt_logits: true, ..Request::new(prompt, max_tokens) }).unwrap();
    let tokens = finish(&mut engine, &[seq]).remove(0);
    let rows = std::mem::take(&mut *rows.lock().unwrap());
    (tokens, rows.into_values().map(|(logits, _)| logits).collect())
}
