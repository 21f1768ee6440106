//! A model without weights. Its cache remembers which token was written where, so that a foreign or stale slot in a block
//! table is found at once; the next token follows from all tokens before it and can be computed without any engine. It fails
//! when it is told to, and leaves rubbish behind as a device does.

use super::made::Sizes;
use loquat::arch::{Arch, Config, ModelSpec, Naming};
use loquat::batch::{Batch, BatchLimits};
use loquat::engine::{Engine, EngineParts};
use loquat::model::{Logits, MemoryPlan, Model, Progress, Want};
use loquat::sched::ContinuousBatching;
use loquat::{BlockId, RunError, TokenId};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const VOCAB: usize = 64;
pub const BLOCK: usize = 16;
/// After this token come logits with a NaN, one of +inf, nothing but -inf.
pub const NAN: TokenId = 61;
pub const INFINITE: TokenId = 62;
pub const NOTHING: TokenId = 63;

/// What the test tells the model, and what it sees of it.
#[derive(Default)]
pub struct Faults {
    /// Calls so far that can fail.
    pub calls: AtomicUsize,
    /// The first call that fails, from 1, and how many do.
    pub first: AtomicUsize,
    pub count: AtomicUsize,
    /// Blocks copied.
    pub copied: AtomicUsize,
}

impl Faults {
    pub fn at(first: usize, count: usize) -> Arc<Self> {
        Arc::new(Faults { first: first.into(), count: count.into(), ..Faults::default() })
    }

    pub fn fired(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0 && self.calls.load(Ordering::Relaxed) >= self.first.load(Ordering::Relaxed)
    }

    fn call(&self) -> Result<(), RunError> {
        let n = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let first = self.first.load(Ordering::Relaxed);
        match n >= first && n - first < self.count.load(Ordering::Relaxed) {
            true => Err(RunError::Device { device: "fake".into(), message: format!("call {n} fails") }),
            false => Ok(()),
        }
    }
}

/// What is cached of a token.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Slot {
    token: TokenId,
    position: u32,
    /// Stands for all tokens up to this one.
    past: u64,
    regime: u32,
}

pub struct Fake {
    spec: ModelSpec,
    limits: BatchLimits,
    blocks: usize,
    layers: Vec<Vec<Option<Slot>>>,
    states: bool,
    step: Option<(Batch, Want, usize)>,
    faults: Arc<Faults>,
}

/// Sizes of the engine around a [`Fake`].
#[derive(Clone, Copy)]
pub struct FakeSizes {
    pub blocks: usize,
    pub max_seqs: usize,
    pub seqs: usize,
    pub tokens: usize,
    /// Rotary frequencies that change with the length from here on.
    pub dynamic_from: Option<usize>,
    /// Allow embeddings.
    pub hidden: bool,
    /// Leave the hidden states that they need.
    pub states: bool,
}

impl Default for FakeSizes {
    fn default() -> Self {
        FakeSizes { blocks: 8, max_seqs: 16, seqs: 4, tokens: 24, dynamic_from: None, hidden: false, states: true }
    }
}

pub fn engine(sizes: FakeSizes, faults: &Arc<Faults>) -> Engine {
    let mut config = Sizes { vocab: VOCAB, context: 200, ..Sizes::TINY }.config();
    if let Some(original) = sizes.dynamic_from {
        config["max_position_embeddings"] = original.into();
        config["rope_scaling"] = serde_json::json!({ "rope_type": "dynamic", "factor": 2.0 });
    }
    let config = Config::from_json(&config.to_string()).unwrap();
    let spec = (Arch::find(&config, Naming::HuggingFace).unwrap().spec)(&config).unwrap();
    let limits = BatchLimits { tokens: sizes.tokens, seqs: sizes.seqs, blocks: sizes.blocks * sizes.seqs, rows: sizes.tokens };
    let slots = vec![None; sizes.blocks * BLOCK];
    let layers = vec![slots; spec.layers.len()];
    let (blocks, states, faults) = (sizes.blocks, sizes.states, faults.clone());
    let model = Box::new(Fake { spec, limits, blocks, layers, states, step: None, faults });
    Engine::from_parts(EngineParts {
        model,
        scheduler: Box::new(ContinuousBatching::default()),
        max_seqs: sizes.max_seqs,
        prompt_logits: true,
        want: Want { logits: true, hidden: sizes.hidden },
        plan: MemoryPlan::default(),
    })
    .unwrap()
}

/// The `n` tokens that the model says after `tokens`, greedily.
pub fn continuation(tokens: &[TokenId], n: usize) -> Vec<TokenId> {
    let mut past = tokens.iter().fold(0, |past, &t| mix(past, t));
    let mut next = || {
        let row: Vec<f32> = (0..VOCAB as TokenId).map(|t| logit(past, t)).collect();
        let token = (0..VOCAB).fold(0, |best, t| if row[t] > row[best] { t } else { best }) as TokenId;
        past = mix(past, token);
        token
    };
    (0..n).map(|_| next()).collect()
}

fn mix(past: u64, token: TokenId) -> u64 {
    let x = (past ^ u64::from(token).wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ x >> 29
}

/// Never one of the tokens with a meaning.
fn logit(past: u64, token: TokenId) -> f32 {
    if token >= NAN { -1.0 } else { (mix(past, token) >> 40) as f32 / (1 << 24) as f32 }
}

impl Fake {
    fn layer(&mut self, l: usize, batch: &Batch) {
        let bs = BLOCK as u32;
        for s in 0..batch.seqs() {
            let table = &batch.blocks()[batch.block_indptr()[s] as usize..batch.block_indptr()[s + 1] as usize];
            let slot = |p: u32| (table[(p / bs) as usize].0 * bs + p % bs) as usize;
            let regime = self.spec.ropes[0].regime(batch.totals()[s] as usize);
            for t in batch.q_indptr()[s] as usize..batch.q_indptr()[s + 1] as usize {
                let (position, token) = (batch.positions()[t], batch.tokens()[t]);
                assert_eq!(batch.slots()[t] as usize, slot(position), "the slot of position {position}");
                let before = position.checked_sub(1).map(|p| self.layers[l][slot(p)].expect("written before"));
                let past = mix(before.map_or(0, |b| b.past), token);
                self.layers[l][slot(position)] = Some(Slot { token, position, past, regime });
            }
            // Everything that attention would read is this sequence's own, of this regime, and the same in all layers.
            let mut past = 0;
            for p in 0..batch.kv_lens()[s] {
                let found = self.layers[l][slot(p)].expect("written before");
                past = mix(past, found.token);
                assert_eq!(found, Slot { position: p, past, regime, ..found }, "position {p} of sequence {s}, layer {l}");
                assert_eq!(self.layers[0][slot(p)], Some(found), "layer {l} against the first");
            }
        }
    }

    fn head(&self, batch: &Batch, want: Want, out: &mut Logits) {
        out.reset(batch.rows().len(), VOCAB, self.spec.hidden, want);
        for (r, &t) in batch.rows().iter().enumerate() {
            let slot = self.layers[0][batch.slots()[t as usize] as usize].expect("written in this step");
            let row = out.row_mut(r);
            for (token, out) in row.iter_mut().enumerate() {
                *out = if slot.token == NOTHING { f32::NEG_INFINITY } else { logit(slot.past, token as TokenId) };
            }
            match slot.token {
                NAN => row[5] = f32::NAN,
                INFINITE => row[6] = f32::INFINITY,
                _ => {}
            }
        }
        if self.states && batch.wants_states() {
            let states = out.reset_states(batch.tokens().len());
            for (state, &token) in states.chunks_exact_mut(self.spec.hidden).zip(batch.tokens()) {
                state.fill(token as f32);
                state[1] = if token == NAN { f32::NAN } else { 1.0 };
            }
        }
    }
}

impl Model for Fake {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn limits(&self) -> BatchLimits {
        self.limits
    }

    fn block_size(&self) -> usize {
        BLOCK
    }

    fn blocks(&self) -> usize {
        self.blocks
    }

    fn begin(&mut self, batch: &Batch, want: Want) -> Result<(), RunError> {
        self.step = None;
        self.faults.call()?;
        self.step = Some((batch.clone(), want, 0));
        Ok(())
    }

    fn advance(&mut self, pause: &mut dyn FnMut() -> bool, logits: &mut Logits) -> Result<Progress, RunError> {
        while let Some((batch, want, stage)) = self.step.take() {
            if let Err(error) = self.faults.call() {
                // Half a layer was written, and wrongly.
                if stage < self.layers.len() {
                    for &slot in batch.slots() {
                        self.layers[stage][slot as usize] = Some(Slot { token: 0, position: 999, past: 1, regime: 7 });
                    }
                }
                return Err(error);
            }
            if stage == self.layers.len() {
                self.head(&batch, want, logits);
                return Ok(Progress::Done);
            }
            self.layer(stage, &batch);
            self.step = Some((batch, want, stage + 1));
            if pause() {
                return Ok(Progress::Paused);
            }
        }
        Ok(Progress::Done)
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), RunError> {
        for (i, (from, to)) in pairs.iter().enumerate() {
            if i + 1 == pairs.len() {
                self.faults.call()?;
            }
            self.faults.copied.fetch_add(1, Ordering::Relaxed);
            for layer in &mut self.layers {
                layer.copy_within(from.index() * BLOCK..(from.index() + 1) * BLOCK, to.index() * BLOCK);
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        "a fake".into()
    }

    fn tier(&self) -> &'static str {
        "fake"
    }
}
