//! Qwen 3: llama with norms on each head of q and k.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "qwen3",
    model_types: &["qwen3"],
    gguf: Some(GgufHabits::named("qwen3")),
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let bias = c.flag_or("attention_bias", false)?;
    let attn = AttnSpec { qk_norm: fields::head_norms(norm), qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let mut spec = shape.model(ARCH.name, fields::layer(attn, fields::gated(c)?, norm), norm, c)?;
    fields::upper_windows(c, &mut spec)?;
    Ok(spec)
}
