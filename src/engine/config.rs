//! What a caller decides when an engine is built.
#![forbid(unsafe_code)]

use crate::arch::ModelSpec;
use crate::backend::cpu::{Compute, CpuOptions};
use crate::batch::BatchLimits;
use crate::dtype::KvDType;
use crate::error::ConfigError;
use crate::model::{ModelLimits, Want};

/// Settings of an [`Engine`](super::Engine). `..Default::default()` gives one caller's chat on one thread.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Threads, the caller's own included: 1 starts none.
    pub threads: usize,
    /// Kernel tier by name (`scalar`, `avx2`, `avx512`), or the best that the machine has.
    pub tier: Option<String>,
    /// How quantised weights meet activations.
    pub compute: Compute,
    /// Type of cached keys and values.
    pub kv_dtype: KvDType,
    /// Tokens in a cache block: a power of two from 16 to 256.
    pub block_size: usize,
    /// Tokens that the cache holds for all sequences together, rounded up to whole blocks.
    pub cache_tokens: usize,
    /// Sequences that may be in the engine: waiting, running and held. 1 to 2^20.
    pub max_seqs: usize,
    /// Sequences that may run in one step: 1 to 65,536, at most `max_seqs`.
    pub max_batch: usize,
    /// Tokens that one step may run: the length of a prefill chunk, and what sizes the activations. At most 65,536, at least
    /// `max_batch`: each running sequence has one.
    pub step_tokens: usize,
    /// Refuse to allocate more than this in all.
    pub memory_limit_bytes: Option<u64>,
    /// Allow requests that want the logits of their prompt's tokens. Costs `step_tokens` rows of logits.
    pub prompt_logits: bool,
    /// Hand hidden states to the observer, beside the logits, and allow requests for [embeddings](super::Request::embed).
    /// Costs `step_tokens` rows of hidden states.
    pub hidden: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            threads: 1,
            tier: None,
            compute: Compute::Fast,
            kv_dtype: KvDType::F16,
            block_size: 16,
            cache_tokens: 4096,
            max_seqs: 64,
            max_batch: 16,
            step_tokens: 128,
            memory_limit_bytes: None,
            prompt_logits: false,
            hidden: false,
        }
    }
}

impl EngineConfig {
    pub(super) fn cpu(&self) -> CpuOptions {
        CpuOptions { threads: self.threads, tier: self.tier.clone(), compute: self.compute }
    }

    pub(super) fn want(&self) -> Want {
        Want { logits: true, hidden: self.hidden }
    }

    /// The sizes of the model's buffers.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] for a setting out of its range.
    pub(super) fn limits(&self, spec: &ModelSpec) -> Result<ModelLimits, ConfigError> {
        let within = |field: &str, value: usize, least: usize, most: usize| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(ConfigError::invalid(field, format!("{least} to {most}"), value)),
        };
        within("max_seqs", self.max_seqs, 1, 1 << 20)?;
        within("max_batch", self.max_batch, 1, 1 << 16)?;
        if self.max_batch > self.max_seqs {
            let expected = format!("at most max_seqs, {}", self.max_seqs);
            return Err(ConfigError::invalid("max_batch", expected, self.max_batch));
        }
        within("step_tokens", self.step_tokens, 1, 1 << 16)?;
        if self.step_tokens < self.max_batch {
            let expected = format!("at least max_batch, {}", self.max_batch);
            return Err(ConfigError::invalid("step_tokens", expected, self.step_tokens));
        }
        within("cache_tokens", self.cache_tokens, 1, 1 << 30)?;
        within("block_size", self.block_size, 16, 256)?;
        if !self.block_size.is_power_of_two() {
            return Err(ConfigError::invalid("block_size", "a power of two", self.block_size));
        }
        let blocks = self.cache_tokens.div_ceil(self.block_size);
        let per_seq = blocks.min(spec.context.div_ceil(self.block_size)).max(1);
        let most = u32::MAX as usize / per_seq;
        if self.max_batch > most {
            let expected = format!("at most {most} for block tables of {per_seq} entries (cache_tokens, block_size)");
            return Err(ConfigError::invalid("max_batch", expected, self.max_batch));
        }
        Ok(ModelLimits {
            batch: BatchLimits {
                tokens: self.step_tokens,
                seqs: self.max_batch,
                // Blocks can be shared by sequences, so tables may add up to more than the pool.
                blocks: per_seq * self.max_batch,
                rows: if self.prompt_logits { self.step_tokens } else { self.max_batch },
            },
            blocks,
            block_size: self.block_size,
            kv_dtype: self.kv_dtype,
        })
    }
}
