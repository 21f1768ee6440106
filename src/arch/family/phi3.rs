//! Phi 3 and 4 (mini, medium): llama with fused projections, windows, and lists of rotary divisors for long contexts.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::{HF_FUSED, HF_GATED, Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "phi3",
    model_types: &["phi3"],
    gguf: Some(GgufHabits { tensors: GGUF_NAMES, ..GgufHabits::named("phi3") }),
    spec,
    tensors: &[HF_FUSED, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

/// Gate and up are one under the name of up.
const GGUF_NAMES: Names = &[(Role::GateUp, "blk.{l}.ffn_up.weight")];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let attn = AttnSpec { window: fields::window(c)?, ..shape.attn() };
    shape.model(ARCH.name, fields::layer(attn, fields::gated(c)?, norm), norm, c)
}
