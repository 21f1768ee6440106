//! Granite 3: llama with factors on embeddings, scores, results and logits.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "granite",
    model_types: &["granite"],
    gguf: Some(GgufHabits { interleaved_qk: true, ..GgufHabits::named("granite") }),
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("logit_scale", "logits_scaling")]);
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let bias = c.flag_or("attention_bias", false)?;
    let scale = fields::factor(c, "attention_multiplier", Some(1.0))?;
    let attn = AttnSpec { scale, qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let mut layer = fields::layer(attn, fields::gated(c)?, norm);
    layer.wiring.residual_scale = fields::factor(c, "residual_multiplier", Some(1.0))?;
    let mut spec = shape.model(ARCH.name, layer, norm, c)?;
    spec.embed_scale = fields::factor(c, "embedding_multiplier", Some(1.0))?;
    spec.head.scale = (1.0 / c.positive_or("logits_scaling", Some(1.0))?) as f32;
    Ok(spec)
}
