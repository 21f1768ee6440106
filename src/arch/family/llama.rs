//! Llama 1 to 3 and everything of their shape (SmolLM, TinyLlama, Yi, ...): pre-norm, rotary, gated feed-forward.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "llama",
    model_types: &["llama"],
    gguf: Some(GgufHabits { interleaved_qk: true, ..GgufHabits::named("llama") }),
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let bias = c.flag_or("attention_bias", false)?;
    let attn = AttnSpec { qkv_bias: bias, out_bias: bias, ..shape.attn() };
    shape.model(ARCH.name, fields::layer(attn, fields::gated(c)?, norm), norm, c)
}
