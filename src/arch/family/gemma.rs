//! Gemma 1: llama with scaled embeddings, norm weights that have 1 added to them, and gelu.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "gemma",
    model_types: &["gemma"],
    gguf: Some(GgufHabits { defaults: super::gemma2::GGUF_DEFAULTS, ..GgufHabits::named("gemma") }),
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    // The activation has two names. The first files say gelu and mean its tanh form.
    let c = &match c.str_or("hidden_act", "gelu")? {
        "gelu" => c.clone(),
        _ => c.renamed(&[("hidden_act", "hidden_activation")]),
    };
    let c = &c.or(&[("hidden_activation", Plain::Text("gelu_pytorch_tanh")), ("tie_word_embeddings", Plain::Flag(true))]);
    let shape = fields::Shape::read(c)?;
    let norm = fields::gemma_norm(c)?;
    let bias = c.flag_or("attention_bias", false)?;
    let attn = AttnSpec { qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let mut spec = shape.model(ARCH.name, fields::layer(attn, fields::gemma_gated(c)?, norm), norm, c)?;
    spec.embed_scale = (shape.hidden as f32).sqrt();
    Ok(spec)
}
