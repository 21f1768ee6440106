//! An engine under test: what it said of each sequence, and the bits of every row of logits that it showed.

use loquat::engine::{Engine, EngineConfig, EventKind, FinishReason, Request, Status};
use loquat::model::ModelFiles;
use loquat::{SeqId, TokenId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Rows of one sequence by position.
pub type Rows = BTreeMap<usize, Vec<u32>>;

pub struct Lane {
    pub engine: Engine,
    pub tokens: BTreeMap<SeqId, Vec<TokenId>>,
    pub ended: BTreeMap<SeqId, FinishReason>,
    rows: Arc<Mutex<BTreeMap<SeqId, Rows>>>,
}

impl Lane {
    pub fn new(files: &ModelFiles, config: EngineConfig) -> Self {
        Lane::around(Engine::new(files, config).unwrap())
    }

    pub fn around(mut engine: Engine) -> Self {
        let rows = Arc::new(Mutex::new(BTreeMap::<SeqId, Rows>::new()));
        let seen = rows.clone();
        engine.observe(move |row| {
            let bits = row.logits.iter().map(|v| v.to_bits()).collect();
            seen.lock().unwrap().entry(row.seq).or_default().insert(row.position, bits);
        });
        Lane { engine, rows, tokens: BTreeMap::new(), ended: BTreeMap::new() }
    }

    #[track_caller]
    pub fn submit(&mut self, request: Request) -> SeqId {
        self.engine.submit(request).unwrap()
    }

    /// Goes on with a held sequence; what it said before is forgotten.
    #[track_caller]
    pub fn resume(&mut self, seq: SeqId, request: Request) {
        self.engine.resume(seq, request).unwrap();
        self.tokens.remove(&seq);
        self.ended.remove(&seq);
    }

    pub fn step(&mut self) -> Status {
        let status = self.engine.step().unwrap();
        self.listen();
        status
    }

    /// Takes the events, and recounts the ledger.
    pub fn listen(&mut self) {
        while let Some(event) = self.engine.next_event() {
            match event.kind {
                EventKind::Token { token, .. } => {
                    assert!(!self.ended.contains_key(&event.seq), "{}: a token after the end", event.seq);
                    self.tokens.entry(event.seq).or_default().push(token);
                }
                EventKind::Finished(reason) => {
                    assert_eq!(self.ended.insert(event.seq, reason), None, "{}: ended twice", event.seq);
                }
                other => panic!("{other:?}"),
            }
        }
        self.engine.ledger().check();
    }

    /// Steps until these have ended.
    pub fn finish(&mut self, seqs: &[SeqId]) {
        while !seqs.iter().all(|s| self.ended.contains_key(s)) {
            assert_ne!(self.step(), Status::Idle(None), "idle with work left");
        }
    }

    pub fn tokens_of(&self, seq: SeqId) -> &[TokenId] {
        self.tokens.get(&seq).map_or(&[], Vec::as_slice)
    }

    pub fn rows_of(&self, seq: SeqId) -> Rows {
        self.rows.lock().unwrap().get(&seq).cloned().unwrap_or_default()
    }
}
