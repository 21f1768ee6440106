//! Mixtral: mistral with gated experts, two of eight, say, for each token; the weights of the chosen add up to 1.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::{HF_GATED, Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "mixtral",
    model_types: &["mixtral"],
    gguf: Some(GgufHabits { experts: true, interleaved_qk: true, ..GgufHabits::named("llama") }),
    spec,
    tensors: &[NAMES, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};
const NAMES: Names = &[
    (Role::Router, "model.layers.{l}.block_sparse_moe.gate.weight"),
    (Role::ExpertGate, "model.layers.{l}.block_sparse_moe.experts.{n}.w1.weight"),
    (Role::ExpertUp, "model.layers.{l}.block_sparse_moe.experts.{n}.w3.weight"),
    (Role::ExpertDown, "model.layers.{l}.block_sparse_moe.experts.{n}.w2.weight"),
];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("num_local_experts", "num_experts")]);
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let attn = AttnSpec { window: fields::window(c)?, ..shape.attn() };
    let ffn = fields::experts(c, "intermediate_size", true)?;
    shape.model(ARCH.name, fields::layer(attn, ffn, norm), norm, c)
}
