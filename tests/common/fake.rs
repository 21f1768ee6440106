//! A model without weights. Its cache remembers which token was written where, so that a foreign or stale slot in a block
//! table is found at once, in each group of layers and as far back as the group's window reaches; the next token follows from
//! all tokens before it and can be computed without any engine. It fails when it is told to, and leaves rubbish behind as a
//! device does.

use super::made::Sizes;
use loquat::arch::{Arch, Config, ModelSpec, Naming};
use loquat::batch::{Batch, BatchLimits};
use loquat::engine::{Engine, EngineParts};
use loquat::model::{Logits, MemoryPlan, Model, Progress, Want};
use loquat::sched::{ContinuousBatching, Scheduler};
use loquat::{BlockCopy, BlockGroup, BlockId, RunError, TokenId};
use std::collections::HashSet;
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
    groups: Vec<BlockGroup>,
    /// Slots of the host store lie behind the blocks of their group.
    swap: Vec<usize>,
    /// Layer l is in group l modulo their number.
    layers: Vec<Vec<Option<Slot>>>,
    states: bool,
    step: Option<(Batch, Want, usize)>,
    faults: Arc<Faults>,
}

/// Sizes of the engine around a [`Fake`].
#[derive(Clone, Copy, Debug)]
pub struct FakeSizes {
    /// Blocks of the only group, where `groups` names none.
    pub blocks: usize,
    /// Groups of layers, the farthest reach first; a window is at least 2.
    pub groups: &'static [BlockGroup],
    /// Host-store slots of each group; where empty, none.
    pub swap: &'static [usize],
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
        FakeSizes {
            blocks: 8,
            groups: &[],
            swap: &[],
            max_seqs: 16,
            seqs: 4,
            tokens: 24,
            dynamic_from: None,
            hidden: false,
            states: true,
        }
    }
}

pub fn engine(sizes: FakeSizes, faults: &Arc<Faults>) -> Engine {
    engine_with(sizes, faults, Box::new(ContinuousBatching::default()))
}

pub fn engine_with(sizes: FakeSizes, faults: &Arc<Faults>, scheduler: Box<dyn Scheduler>) -> Engine {
    let mut groups = sizes.groups.to_vec();
    if groups.is_empty() {
        groups.push(BlockGroup { blocks: sizes.blocks, window: None });
    }
    assert!(groups.iter().all(|g| g.window.is_none_or(|w| w > 1)), "a token follows from the one before it");
    let swap = if sizes.swap.is_empty() { vec![0; groups.len()] } else { sizes.swap.to_vec() };
    let layers = Sizes::TINY.layers.max(groups.len());
    let mut config = Sizes { vocab: VOCAB, context: 200, layers, ..Sizes::TINY }.config();
    if let Some(original) = sizes.dynamic_from {
        config["max_position_embeddings"] = original.into();
        config["rope_scaling"] = serde_json::json!({ "rope_type": "dynamic", "factor": 2.0 });
    }
    let config = Config::from_json(&config.to_string()).unwrap();
    let mut spec = (Arch::find(&config, Naming::HuggingFace).unwrap().spec)(&config).unwrap();
    let most = groups.iter().map(|g| g.blocks).max().unwrap();
    // Tables for as long a sequence as the context allows, which is more than the usual cache.
    let table = most.max(200usize.div_ceil(BLOCK));
    let limits = BatchLimits { tokens: sizes.tokens, seqs: sizes.seqs, blocks: table * sizes.seqs, rows: sizes.tokens };
    let layers = (0..layers).map(|l| l % groups.len()).map(|g| vec![None; (groups[g].blocks + swap[g]) * BLOCK]).collect();
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        layer.attn.window = groups[l % groups.len()].window;
    }
    let (states, faults) = (sizes.states, faults.clone());
    let model = Box::new(Fake { spec, limits, groups, swap, layers, states, step: None, faults });
    Engine::from_parts(EngineParts {
        model,
        scheduler,
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

/// The logits after `tokens`.
pub fn row(tokens: &[TokenId]) -> Vec<f32> {
    let past = tokens.iter().fold(0, |past, &t| mix(past, t));
    (0..VOCAB as TokenId).map(|t| logit(past, t)).collect()
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
    fn group_of(&self, layer: usize) -> usize {
        layer % self.groups.len()
    }

    fn layer(&mut self, l: usize, batch: &Batch) {
        let g = self.group_of(l);
        let distinct: HashSet<_> = batch.slots(g).iter().collect();
        assert_eq!(distinct.len(), batch.tokens().len(), "two tokens have one slot of group {g}");
        for s in 0..batch.seqs() {
            let slot_of = |g: usize, p: u32| {
                let table = &batch.blocks(g)[batch.block_indptr(g)[s] as usize..batch.block_indptr(g)[s + 1] as usize];
                let block = table[p as usize / BLOCK];
                assert!(block.index() < self.groups[g].blocks, "{block:?} of group {g} at position {p} of sequence {s}");
                block.index() * BLOCK + p as usize % BLOCK
            };
            let slot = |p: u32| slot_of(g, p);
            let regime = self.spec.ropes[0].regime(batch.totals()[s] as usize);
            for t in batch.q_indptr()[s] as usize..batch.q_indptr()[s + 1] as usize {
                let (position, token) = (batch.positions()[t], batch.tokens()[t]);
                assert_eq!(batch.slots(g)[t] as usize, slot(position), "the slot of position {position} in group {g}");
                let before = position.checked_sub(1).map(|p| self.layers[l][slot(p)].expect("written before"));
                let past = mix(before.map_or(0, |b| b.past), token);
                self.layers[l][slot(position)] = Some(Slot { token, position, past, regime });
            }
            // Everything that attention would read is this sequence's own, of this regime, and the same in all layers.
            let start = batch.positions()[batch.q_indptr()[s] as usize];
            let first = |g: usize| self.groups[g].window.map_or(0, |w| (start + 1).saturating_sub(w as u32));
            let mut past = None;
            for p in first(g)..batch.kv_lens()[s] {
                let found = self.layers[l][slot(p)].expect("written before");
                // Of what lies behind the window only the first group knows.
                let all = past.map_or(if p == 0 { mix(0, found.token) } else { found.past }, |past| mix(past, found.token));
                past = Some(all);
                assert_eq!(found, Slot { position: p, past: all, regime, ..found }, "position {p} of sequence {s}, layer {l}");
                if p >= first(0) {
                    assert_eq!(self.layers[0][slot_of(0, p)], Some(found), "layer {l} against the first");
                }
            }
        }
    }

    fn head(&self, batch: &Batch, want: Want, out: &mut Logits) {
        out.reset(batch.rows().len(), VOCAB, self.spec.hidden, want);
        for (r, &t) in batch.rows().iter().enumerate() {
            let slot = self.layers[0][batch.slots(0)[t as usize] as usize].expect("written in this step");
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

/// A [`Slot`] as bytes.
const SLOT_BYTES: usize = 20;

impl Fake {
    /// Where a block begins, or a slot of the host store.
    fn place(&self, group: usize, block: BlockId, store: bool) -> usize {
        let (base, most) = if store { (self.groups[group].blocks, self.swap[group]) } else { (0, self.groups[group].blocks) };
        assert!(block.index() < most, "{block:?} of {most} in group {group}, host store: {store}");
        (base + block.index()) * BLOCK
    }

    fn copy(&mut self, copies: &[BlockCopy], from_store: bool, to_store: bool) -> Result<(), RunError> {
        for (i, copy) in copies.iter().enumerate() {
            if i + 1 == copies.len() {
                self.faults.call()?;
            }
            self.faults.copied.fetch_add(1, Ordering::Relaxed);
            let (from, to) = (self.place(copy.group, copy.from, from_store), self.place(copy.group, copy.to, to_store));
            let groups = self.groups.len();
            for (_, layer) in self.layers.iter_mut().enumerate().filter(|(l, _)| l % groups == copy.group) {
                layer.copy_within(from..from + BLOCK, to);
            }
        }
        Ok(())
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

    fn groups(&self) -> &[BlockGroup] {
        &self.groups
    }

    fn swap_blocks(&self) -> &[usize] {
        &self.swap
    }

    fn token_bytes(&self, group: usize) -> usize {
        (0..self.layers.len()).filter(|l| self.group_of(*l) == group).count() * SLOT_BYTES
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
                    for &slot in batch.slots(self.group_of(stage)) {
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

    fn copy_blocks(&mut self, copies: &[BlockCopy]) -> Result<(), RunError> {
        self.copy(copies, false, false)
    }

    fn swap_out(&mut self, copies: &[BlockCopy]) -> Result<(), RunError> {
        self.copy(copies, false, true)
    }

    fn swap_in(&mut self, copies: &[BlockCopy]) -> Result<(), RunError> {
        self.copy(copies, true, false)
    }

    fn read_block(&mut self, group: usize, block: BlockId, tokens: usize, out: &mut [u8]) -> Result<(), RunError> {
        self.faults.call()?;
        assert_eq!(out.len(), tokens * self.token_bytes(group), "bytes of {tokens} tokens");
        let first = self.place(group, block, false);
        let layers = self.layers.iter().enumerate().filter(|(l, _)| self.group_of(*l) == group);
        let slots = layers.flat_map(|(_, layer)| &layer[first..first + tokens]);
        for (to, slot) in out.chunks_exact_mut(SLOT_BYTES).zip(slots) {
            let s = slot.expect("written before");
            to[..4].copy_from_slice(&s.token.to_le_bytes());
            to[4..8].copy_from_slice(&s.position.to_le_bytes());
            to[8..16].copy_from_slice(&s.past.to_le_bytes());
            to[16..].copy_from_slice(&s.regime.to_le_bytes());
        }
        Ok(())
    }

    fn write_block(&mut self, group: usize, block: BlockId, tokens: usize, bytes: &[u8]) -> Result<(), RunError> {
        self.faults.call()?;
        assert_eq!(bytes.len(), tokens * self.token_bytes(group), "bytes of {tokens} tokens");
        let (first, groups) = (self.place(group, block, false), self.groups.len());
        let layers = self.layers.iter_mut().enumerate().filter(|(l, _)| l % groups == group);
        let slots = layers.flat_map(|(_, layer)| &mut layer[first..first + tokens]);
        for (from, slot) in bytes.chunks_exact(SLOT_BYTES).zip(slots) {
            let word = |at: usize| u32::from_le_bytes(from[at..at + 4].try_into().unwrap());
            let past = u64::from_le_bytes(from[8..16].try_into().unwrap());
            *slot = Some(Slot { token: word(0), position: word(4), past, regime: word(16) });
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
