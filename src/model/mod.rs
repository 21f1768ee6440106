//! From files to a model, and the one forward pass. A model knows tokens, positions and cache blocks; it knows no sequence,
//! request or scheduler.
//!
//! Invariant: a row of logits depends only on tokens, positions and cache content.
#![forbid(unsafe_code)]

mod buffers;
mod files;
mod fingerprint;
mod gguf;
mod inventory;
mod load;
mod packed;
mod parts;
mod plan;
mod tensors;
mod transformer;

pub(crate) use fingerprint::Digest;

pub use files::{ModelFiles, OpenOptions, SideTexts};
pub use fingerprint::Fingerprint;
pub use packed::{PackOptions, pack};
pub use plan::{MemoryPlan, ModelLimits};
pub use transformer::Transformer;

use crate::arch::ModelSpec;
use crate::batch::{Batch, BatchLimits};
use crate::dtype::KvDType;
use crate::error::{ConfigError, RunError, reserved};
use crate::ids::{BlockCopy, BlockGroup, BlockId};

/// What a step is to leave in [`Logits`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Want {
    /// Logits of the wanted rows.
    pub logits: bool,
    /// Hidden states of the wanted rows, after the final norm.
    pub hidden: bool,
}

/// Results of a step, `[R, ..]` in the order of the batch's rows. The caller owns it; its memory is kept from step to step.
#[derive(Clone, Debug, Default)]
pub struct Logits {
    rows: usize,
    vocab: usize,
    width: usize,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    states: Vec<f32>,
}

impl Logits {
    /// Room for `rows` rows, so that no step allocates.
    ///
    /// # Errors
    /// [`ConfigError::Refused`] where the system has not the memory.
    pub fn with_capacity(rows: usize, spec: &ModelSpec, want: Want) -> Result<Self, ConfigError> {
        let room = |wanted: bool, width: usize| reserved("logits", if wanted { rows.saturating_mul(width) } else { 0 });
        Ok(Logits {
            rows: 0,
            vocab: spec.vocab,
            width: spec.hidden,
            logits: room(want.logits, spec.vocab)?,
            hidden: room(want.hidden, spec.hidden)?,
            states: Vec::new(),
        })
    }

    /// And room for the [states](Self::states) of `tokens` tokens.
    ///
    /// # Errors
    /// [`ConfigError::Refused`] where the system refuses the memory.
    pub fn with_states(mut self, tokens: usize, spec: &ModelSpec) -> Result<Self, ConfigError> {
        self.states = reserved("hidden states", tokens.saturating_mul(spec.hidden))?;
        Ok(self)
    }

    /// Bytes of [`with_capacity`](Self::with_capacity).
    pub fn bytes(rows: usize, spec: &ModelSpec, want: Want) -> u64 {
        let width = if want.logits { spec.vocab } else { 0 } + if want.hidden { spec.hidden } else { 0 };
        (rows as u64).saturating_mul(4 * width as u64)
    }

    /// Prepares for a step's results: as many rows, zeroed. For implementations of [`Model`].
    pub fn reset(&mut self, rows: usize, vocab: usize, width: usize, want: Want) {
        (self.rows, self.vocab, self.width) = (rows, vocab, width);
        self.logits.clear();
        self.hidden.clear();
        self.states.clear();
        self.logits.resize(if want.logits { rows * vocab } else { 0 }, 0.0);
        self.hidden.resize(if want.hidden { rows * width } else { 0 }, 0.0);
    }

    /// Rows, R.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Logits of row `r`, `[vocab]`, or nothing where none were wanted.
    pub fn row(&self, r: usize) -> &[f32] {
        self.logits.get(r * self.vocab..(r + 1) * self.vocab).unwrap_or(&[])
    }

    /// Logits of row `r`, to be written.
    pub fn row_mut(&mut self, r: usize) -> &mut [f32] {
        self.logits.get_mut(r * self.vocab..(r + 1) * self.vocab).unwrap_or(&mut [])
    }

    /// Hidden state of row `r` after the final norm, `[hidden]`, or nothing where none were wanted.
    pub fn hidden(&self, r: usize) -> &[f32] {
        self.hidden.get(r * self.width..(r + 1) * self.width).unwrap_or(&[])
    }

    /// Hidden states after the final norm of all tokens of the batch, `[T, hidden]`, where an item wanted
    /// [`RowsWanted::States`](crate::batch::RowsWanted::States); or nothing.
    pub fn states(&self) -> &[f32] {
        &self.states
    }

    /// The same, zeroed, to be written. For implementations of [`Model`], after [`reset`](Self::reset).
    pub fn reset_states(&mut self, tokens: usize) -> &mut [f32] {
        self.states.clear();
        self.states.resize(tokens * self.width, 0.0);
        &mut self.states
    }

    fn all_mut(&mut self) -> (&mut [f32], &mut [f32]) {
        (&mut self.logits, &mut self.hidden)
    }
}

/// How far a step has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// The pause was taken: call [`Model::advance`] again.
    Paused,
    /// The results are there.
    Done,
}

/// Tokens in, rows of logits out.
pub trait Model: Send {
    /// The model's numbers.
    fn spec(&self) -> &ModelSpec;

    /// The largest batch.
    fn limits(&self) -> BatchLimits;

    /// Tokens in a block of the cache.
    fn block_size(&self) -> usize;

    /// The pools of the cache's blocks, 1 to [`MAX_GROUPS`](crate::MAX_GROUPS), the farthest reach first. A sequence has a block
    /// table for each.
    fn groups(&self) -> &[BlockGroup];

    /// Slots of each group in the host store, where blocks can be put aside.
    fn swap_blocks(&self) -> &[usize];

    /// Bytes of a token's keys and values in the layers of a group, as [`read_block`](Self::read_block) gives them; 0 where there
    /// is no such group.
    fn token_bytes(&self, group: usize) -> usize;

    /// Type of the cache's values; `None` where they are of none of these, and no snapshot can hold them.
    fn kv_dtype(&self) -> Option<KvDType> {
        None
    }

    /// Lays a batch out. A step that was begun before and not finished is dropped; what it wrote to the cache lies in slots
    /// that a repeated step writes again.
    ///
    /// # Errors
    /// [`RunError::BatchTooLarge`]; [`RunError::BadBatch`] for a batch made for another block size or other groups, and for
    /// tokens outside the vocabulary; or what the device says.
    fn begin(&mut self, batch: &Batch, want: Want) -> Result<(), RunError>;

    /// Runs the step that was begun, layer by layer, asking `pause` between the halves of a layer; it stops where that says
    /// true. Without a step begun it is done at once.
    ///
    /// # Errors
    /// What the device says; the step is then dropped.
    fn advance(&mut self, pause: &mut dyn FnMut() -> bool, logits: &mut Logits) -> Result<Progress, RunError>;

    /// Copies whole blocks, in order, each in all layers of its group.
    ///
    /// # Errors
    /// [`RunError::BadBatch`] for groups and blocks that there are not, with nothing copied; and what the device says.
    fn copy_blocks(&mut self, copies: &[BlockCopy]) -> Result<(), RunError>;

    /// Copies whole blocks to the host store, in order: `from` is a block of the cache, `to` a slot of the store.
    ///
    /// # Errors
    /// As [`copy_blocks`](Self::copy_blocks), and for slots that there are not.
    fn swap_out(&mut self, copies: &[BlockCopy]) -> Result<(), RunError>;

    /// Copies whole blocks back, in order: `from` is a slot of the store, `to` a block of the cache.
    ///
    /// # Errors
    /// As [`swap_out`](Self::swap_out).
    fn swap_in(&mut self, copies: &[BlockCopy]) -> Result<(), RunError>;

    /// The first `tokens` tokens of a block, into `out` of as many times [`token_bytes`](Self::token_bytes): for each layer of the
    /// group, in order, the keys as `[tokens, kv_heads, qk_dim]`, then the values as `[tokens, kv_heads, v_dim]` unless
    /// they are part of the keys; values of the cache's type in little-endian order. The layout is every device's.
    ///
    /// # Errors
    /// [`RunError::BadBatch`] for a group or block that there is not, more tokens than a block has, and another length; and what
    /// the device says.
    fn read_block(&mut self, group: usize, block: BlockId, tokens: usize, out: &mut [u8]) -> Result<(), RunError>;

    /// Puts into a block what [`read_block`](Self::read_block) gave, of a model with the same weights: bit by bit what the forward
    /// pass left there. Tokens from `tokens` on stay as they are.
    ///
    /// # Errors
    /// As [`read_block`](Self::read_block), with nothing written.
    fn write_block(&mut self, group: usize, block: BlockId, tokens: usize, bytes: &[u8]) -> Result<(), RunError>;

    /// Device and kernels in one line, for people.
    fn describe(&self) -> String;

    /// Name of the kernel tier.
    fn tier(&self) -> &'static str;
}
