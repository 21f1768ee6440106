//! OLMo 1: llama with layer norms that have neither weights nor biases.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec, NormSpec};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "olmo",
    model_types: &["olmo"],
    gguf: Some(GgufHabits { interleaved_qk: true, ..GgufHabits::named("olmo") }),
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let shape = fields::Shape::read(c)?;
    if c.has("clip_qkv") && c.number("clip_qkv")? != 0.0 {
        return Err(c.invalid("clip_qkv", "nothing: clipping is not carried out", c.number("clip_qkv")?));
    }
    let norm = NormSpec { weight: false, bias: false, ..NormSpec::layer(1e-5) };
    let bias = c.flag_or("attention_bias", false)?;
    let attn = AttnSpec { qkv_bias: bias, out_bias: bias, ..shape.attn() };
    shape.model(ARCH.name, fields::layer(attn, fields::gated(c)?, norm), norm, c)
}
