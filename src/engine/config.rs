//! What a caller decides when an engine is built.
#![forbid(unsafe_code)]

use crate::arch::ModelSpec;
use crate::backend::cpu::{Compute, CpuOptions};
use crate::batch::BatchLimits;
use crate::dtype::KvDType;
use crate::error::ConfigError;
use crate::ids::BlockGroup;
use crate::model::{ModelLimits, Want};

/// Settings of an [`Engine`](super::Engine). `..Default::default()` gives one caller's chat on one thread.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Threads, the caller's own included: 1 starts none.
    pub threads: usize,
    /// Kernel tier by name, one of [`Cpu::tiers`](crate::backend::cpu::Cpu::tiers): on x86-64 `scalar`, `sse41`, `avx2`, `avxvnni`
    /// and `avx512`, on aarch64 `scalar`, `neon`, `dotprod` and `i8mm`. `None` takes the one that the environment variable
    /// `LOQUAT_CPU` names, or without it the fastest that the machine has. All give the same bits.
    pub tier: Option<String>,
    /// How quantised weights meet activations.
    pub compute: Compute,
    /// Type of cached keys and values.
    pub kv_dtype: KvDType,
    /// Tokens in a cache block: a power of two from 16 to 256.
    pub block_size: usize,
    /// Tokens that the cache holds for all sequences together, rounded up to whole blocks. Their memory is reserved at once, and most
    /// systems provide it as blocks are first used. Layers with a window that reaches
    /// less far than the others' hold fewer: what `max_batch` running sequences can see of it, and two more.
    pub cache_tokens: usize,
    /// Tokens that preempted sequences can keep in the host's memory beside the cache, rounded up to whole blocks; 0: none, they
    /// are computed anew. Layers with a window hold fewer, as in the cache, and never more than there.
    pub swap_tokens: usize,
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
            swap_tokens: 0,
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
        within("swap_tokens", self.swap_tokens, 0, 1 << 30)?;
        within("block_size", self.block_size, 16, 256)?;
        if !self.block_size.is_power_of_two() {
            return Err(ConfigError::invalid("block_size", "a power of two", self.block_size));
        }
        let groups = self.groups(spec);
        let longest = if groups[0].window.is_some() { LONGEST / self.block_size } else { 0 };
        let per_seq = groups[0].blocks.max(longest).min(spec.context.div_ceil(self.block_size)).max(1);
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
            swap: self.swap_blocks(&groups),
            groups,
            block_size: self.block_size,
            kv_dtype: self.kv_dtype,
        })
    }

    /// The pools: of a group behind the first, what the running sequences can hold at most of their windows and the tokens of a
    /// step, and a few windows more. A window's tokens but the first that is run, and a sequence's share of the step, can begin and end in the
    /// middle of a block, which is two blocks more; and one is to spare for a copy.
    fn groups(&self, spec: &ModelSpec) -> Vec<BlockGroup> {
        let (size, all) = (self.block_size, self.cache_tokens.div_ceil(self.block_size));
        let pool = |(g, &window): (usize, &Option<usize>)| {
            let blocks = match window {
                Some(w) if g > 0 => {
                    let of_windows = (w - 1).div_ceil(size).saturating_add(3).saturating_mul(self.max_batch + SPARE_WINDOWS);
                    all.min(of_windows.saturating_add(self.step_tokens.div_ceil(size)))
                }
                _ => all,
            };
            BlockGroup { blocks, window }
        };
        spec.groups().windows().iter().enumerate().map(pool).collect()
    }

    /// Host-store slots of each group.
    fn swap_blocks(&self, groups: &[BlockGroup]) -> Vec<usize> {
        let all = self.swap_tokens.div_ceil(self.block_size);
        groups.iter().enumerate().map(|(g, group)| if g == 0 { all } else { all.min(group.blocks) }).collect()
    }
}

/// Windows beyond those of the running sequences, for prefixes that are pinned or cached.
const SPARE_WINDOWS: usize = 2;
/// Tokens that a sequence can come to have in a cache that is smaller, where all layers have windows.
const LONGEST: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Arch, Config, Naming};
    use crate::backend::Backend;
    use crate::backend::cpu::Cpu;

    /// As Gemma 3 of a billion parameters, with 12 layers: five with a window of 512 tokens, one without, and again. Each has one
    /// head of 256 keys and 256 values.
    fn gemma3() -> ModelSpec {
        let config = Config::from_json(
            r#"{"model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
                "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 64, "max_position_embeddings": 32768,
                "sliding_window": 512, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256}"#,
        )
        .unwrap();
        (Arch::find(&config, Naming::HuggingFace).unwrap().spec)(&config).unwrap()
    }

    fn kv_bytes(config: &EngineConfig, spec: &ModelSpec) -> u64 {
        let groups = config.groups(spec);
        let limits = ModelLimits { swap: config.swap_blocks(&groups), groups, ..config.limits(spec).unwrap() };
        Cpu::unstarted(&config.cpu()).unwrap().kv_bytes(&limits.kv_shape(spec))
    }

    #[test]
    fn windows_make_a_cache_small() {
        let spec = gemma3();
        assert_eq!(spec.groups().windows(), [None, Some(512)]);
        assert_eq!(spec.groups().layers(), [1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]);
        let config = EngineConfig { cache_tokens: 32_768, max_batch: 4, step_tokens: 128, ..EngineConfig::default() };
        // 32,768 / 16 blocks; 4 sequences and 2 more of 511 / 16 blocks, rounded up, and 3; 128 / 16 for the step.
        let groups = config.groups(&spec);
        assert_eq!(groups, [(2048, None), (6 * (32 + 3) + 8, Some(512))].map(|(blocks, window)| BlockGroup { blocks, window }));
        // 16 tokens of 512 values of two bytes in a block of a layer.
        let block = 16 * 512 * 2;
        let mut full = spec.clone();
        full.layers.iter_mut().for_each(|l| l.attn.window = None);
        assert_eq!(kv_bytes(&config, &full), 12 * 2048 * block);
        assert_eq!(kv_bytes(&config, &spec), (2 * 2048 + 10 * 218) * block);
        // 384 MiB and 98.

        // A host store: slots as the cache has blocks, and not more of the windowed ones.
        let config = EngineConfig { swap_tokens: 16_384, ..config };
        assert_eq!(config.swap_blocks(&groups), [1024, 218]);
        assert_eq!(kv_bytes(&config, &spec), (2 * (2048 + 1024) + 10 * (218 + 218)) * block);
        let config = EngineConfig { swap_tokens: 100, ..config };
        assert_eq!(config.swap_blocks(&groups), [7, 7]);
        // A small cache is not made larger by a window.
        let config = EngineConfig { cache_tokens: 1024, ..config };
        assert_eq!(config.groups(&spec)[1].blocks, 64);
    }

    /// However the tokens of a step are shared out, and wherever the sequences stand.
    #[test]
    fn a_windowed_pool_holds_what_a_step_needs() {
        for (window, max_batch, step_tokens, block_size) in
            [(1, 1, 1, 16), (16, 4, 4, 16), (17, 3, 40, 16), (512, 4, 128, 16), (100, 2, 64, 64), (130, 5, 33, 32)]
        {
            let mut spec = gemma3();
            spec.layers.iter_mut().filter(|l| l.attn.window.is_some()).for_each(|l| l.attn.window = Some(window));
            let config = EngineConfig { cache_tokens: 1 << 20, max_batch, step_tokens, block_size, ..EngineConfig::default() };
            let group = config.groups(&spec)[1];
            let held = |start: usize, len: usize| (start + len).div_ceil(block_size) - group.first_block(start, block_size);
            let most = |len: usize| (2 * window..2 * window + 2 * block_size).map(|start| held(start, len)).max().unwrap();
            // One sequence with all but a token for each of the others, or equal shares; a copied block beside.
            let rest = max_batch - 1;
            let uneven = most(step_tokens - rest) + rest * most(1) + max_batch;
            let even = max_batch * (most(step_tokens.div_ceil(max_batch)) + 1);
            assert!(uneven.max(even) <= group.blocks, "{uneven}, {even}, {group:?}");
        }
    }
}
