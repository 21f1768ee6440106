//! Qwen 2 and 2.5: llama with biases on q, k and v; windows in the upper layers if they are switched on.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "qwen2",
    model_types: &["qwen2"],
    gguf: Some(GgufHabits::named("qwen2")),
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let attn = AttnSpec { qkv_bias: true, ..shape.attn() };
    let mut spec = shape.model(ARCH.name, fields::layer(attn, fields::gated(c)?, norm), norm, c)?;
    fields::upper_windows(c, &mut spec)?;
    Ok(spec)
}
