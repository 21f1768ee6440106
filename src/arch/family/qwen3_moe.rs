//! Qwen 3 with experts: as qwen3, with a mixture of experts in most layers.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::{HF_EXPERTS, HF_GATED};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "qwen3_moe",
    model_types: &["qwen3_moe"],
    gguf: Some(GgufHabits { experts: true, defaults: &[("norm_topk_prob", Plain::Flag(true))], ..GgufHabits::named("qwen3moe") }),
    spec,
    tensors: &[HF_EXPERTS, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("num_local_experts", "num_experts")]);
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let bias = c.flag_or("attention_bias", false)?;
    let window = if c.flag_or("use_sliding_window", false)? { fields::window(c)? } else { None };
    let attn = AttnSpec { window, qk_norm: fields::head_norms(norm), qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let ffn = fields::experts(c, "moe_intermediate_size", c.flag_or("norm_topk_prob", false)?)?;
    let mut spec = shape.model(ARCH.name, fields::layer(attn, ffn, norm), norm, c)?;
    let step = c.count_or("decoder_sparse_step", Some(1))?;
    let dense = c.wholes("mlp_only_layers")?.unwrap_or_default();
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        if dense.contains(&(l as u64)) || !(l + 1).is_multiple_of(step) {
            layer.ffn = fields::gated(c)?;
        }
    }
    Ok(spec)
}
