//! GLM 4 (0414): norms around both halves of a layer, half of each head turns, neighbours together.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::rope::RopeStyle;
use crate::arch::spec::{AttnSpec, LayerSpec, ModelSpec};
use crate::arch::tensors::{HF_FUSED, HF_GATED, Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "glm4",
    model_types: &["glm4"],
    gguf: Some(GgufHabits { tensors: GGUF_NAMES, ..GgufHabits::named("glm4") }),
    spec,
    tensors: &[NAMES, HF_FUSED, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};
const NAMES: Names = &[
    (Role::AttnResultNorm, "model.layers.{l}.post_self_attn_layernorm.weight"),
    (Role::FfnResultNorm, "model.layers.{l}.post_mlp_layernorm.weight"),
];

/// Gate and up are one under the name of up.
const GGUF_NAMES: Names = &[(Role::GateUp, "blk.{l}.ffn_up.weight")];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.or(&[("partial_rotary_factor", Plain::Number(0.5)), ("head_dim", Plain::Count(128))]);
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let attn = AttnSpec { qkv_bias: c.flag_or("attention_bias", true)?, ..shape.attn() };
    let layer = LayerSpec { attn, ffn: fields::gated(c)?, wiring: super::gemma2::around(norm) };
    let mut spec = shape.model(ARCH.name, layer, norm, c)?;
    spec.ropes[0].style = RopeStyle::Interleaved;
    Ok(spec)
}
