//! How large a model's step and cache may get, and the bytes that this costs before any of them is allocated.
#![forbid(unsafe_code)]

use super::buffers::{Widths, activation_bytes};
use super::load::weight_bytes;
use super::{Logits, ModelFiles, Want};
use crate::arch::ModelSpec;
use crate::backend::{Backend, KvShape};
use crate::batch::BatchLimits;
use crate::dtype::KvDType;
use crate::error::{ConfigError, LoadError};
use crate::ids::BlockGroup;

/// Sizes of a model's buffers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelLimits {
    /// The largest batch: at least 1 of each.
    pub batch: BatchLimits,
    /// The KV cache's pools: one for each of the [layers' groups](ModelSpec::groups), of the same window and at least 1 block;
    /// slots fit 32 bits.
    pub groups: Vec<BlockGroup>,
    /// Blocks of each group that the host store holds beside the cache; may be 0.
    pub swap: Vec<usize>,
    /// Tokens in a block: a power of two from 16 to 256.
    pub block_size: usize,
    /// Type of cached values.
    pub kv_dtype: KvDType,
}

impl ModelLimits {
    /// Pools of `blocks` blocks for each group of layers, and no host store: a sequence never needs to give a block back.
    pub fn even(spec: &ModelSpec, batch: BatchLimits, blocks: usize, block_size: usize, kv_dtype: KvDType) -> Self {
        let groups: Vec<_> = spec.groups().windows().iter().map(|&window| BlockGroup { blocks, window }).collect();
        ModelLimits { batch, swap: vec![0; groups.len()], groups, block_size, kv_dtype }
    }

    /// # Errors
    /// [`ConfigError::Invalid`] for sizes that no cache or batch can have, and groups that are not the layers'.
    pub(super) fn check(&self, spec: &ModelSpec) -> Result<(), ConfigError> {
        if !self.block_size.is_power_of_two() || !(16..=256).contains(&self.block_size) {
            return Err(ConfigError::invalid("block_size", "a power of two from 16 to 256", self.block_size));
        }
        let most = u32::MAX as usize / self.block_size;
        let windows: Vec<_> = self.groups.iter().map(|g| g.window).collect();
        let layers = spec.groups();
        if windows != layers.windows() {
            let expected = format!("windows {:?}", layers.windows());
            return Err(ConfigError::invalid("groups", expected, format!("{windows:?}")));
        }
        if self.swap.len() != self.groups.len() {
            return Err(ConfigError::invalid("swap", format!("{} groups", self.groups.len()), self.swap.len()));
        }
        for (g, (group, &swap)) in self.groups.iter().zip(&self.swap).enumerate() {
            for (what, blocks, least) in [("groups", group.blocks, 1), ("swap", swap, 0)] {
                if !(least..=most).contains(&blocks) {
                    let expected = format!("{least} to {most} blocks of {} tokens", self.block_size);
                    return Err(ConfigError::invalid(format!("{what}[{g}]"), expected, blocks));
                }
            }
        }
        self.batch.check(1)
    }

    /// The cache that `spec` needs for these limits.
    pub fn kv_shape(&self, spec: &ModelSpec) -> KvShape {
        KvShape {
            layers: spec.layers.iter().map(|l| l.attn.dims()).collect(),
            group_of: spec.groups().layers().to_vec(),
            blocks: self.groups.iter().map(|g| g.blocks).collect(),
            swap: self.swap.clone(),
            block_size: self.block_size,
            dtype: self.kv_dtype,
        }
    }
}

/// Bytes of a model and its engine, known before anything is allocated. Code, file mappings and the few kilobytes of
/// bookkeeping are not counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryPlan {
    /// Weights as the backend holds them.
    pub weight_bytes: u64,
    /// The KV cache and its host store.
    pub kv_bytes: u64,
    /// Activations and results of a step.
    pub activation_bytes: u64,
    /// Kernel scratch.
    pub scratch_bytes: u64,
}

impl MemoryPlan {
    /// All of them.
    pub fn total_bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.activation_bytes + self.scratch_bytes
    }

    /// The plan for these files on `backend`. Reads headers alone.
    ///
    /// # Errors
    /// Limits out of range, missing tensors and shapes that disagree with the configuration, as when loading.
    pub fn of<B: Backend>(files: &ModelFiles, backend: &B, limits: &ModelLimits) -> Result<Self, LoadError> {
        let spec = files.spec();
        limits.check(spec)?;
        let (shape, widths) = (limits.kv_shape(spec), Widths::of(spec));
        Ok(MemoryPlan {
            weight_bytes: weight_bytes(files, backend)?,
            kv_bytes: backend.kv_bytes(&shape),
            activation_bytes: activation_bytes(spec, limits),
            scratch_bytes: backend.step_bytes(&limits.batch, widths.max_columns, &shape, &widths.moe),
        })
    }

    /// Adds the host's copy of a step's results.
    pub fn with_logits(mut self, spec: &ModelSpec, rows: usize, want: Want) -> Self {
        self.activation_bytes += Logits::bytes(rows, spec, want);
        self
    }

    /// Adds the host's copy of the hidden states of a step's tokens.
    pub fn with_states(mut self, spec: &ModelSpec, tokens: usize) -> Self {
        self.activation_bytes += 4 * tokens as u64 * spec.hidden as u64;
        self
    }
}
