//! GPT-NeoX and Pythia: attention and feed-forward side by side, each behind a layer norm of its own; part of each head turns.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, Ffn, LayerSpec, ModelSpec, Wiring};
use crate::arch::tensors::{Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "gpt_neox",
    model_types: &["gpt_neox"],
    gguf: Some(GgufHabits { defaults: &[("hidden_act", Plain::Text("gelu"))], ..GgufHabits::named("gptneox") }),
    spec,
    tensors: &[NAMES],
    stored: Stored { grouped_qkv: true, ..Stored::USUAL },
    prefixes: &[],
    ignored: &["attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"],
};
const NAMES: Names = &[
    (Role::Embed, "gpt_neox.embed_in.weight"),
    (Role::FinalNorm, "gpt_neox.final_layer_norm.weight"),
    (Role::FinalNormBias, "gpt_neox.final_layer_norm.bias"),
    (Role::Head, "embed_out.weight"),
    (Role::AttnNorm, "gpt_neox.layers.{l}.input_layernorm.weight"),
    (Role::AttnNormBias, "gpt_neox.layers.{l}.input_layernorm.bias"),
    (Role::Qkv, "gpt_neox.layers.{l}.attention.query_key_value.weight"),
    (Role::QkvBias, "gpt_neox.layers.{l}.attention.query_key_value.bias"),
    (Role::AttnOut, "gpt_neox.layers.{l}.attention.dense.weight"),
    (Role::AttnOutBias, "gpt_neox.layers.{l}.attention.dense.bias"),
    (Role::FfnNorm, "gpt_neox.layers.{l}.post_attention_layernorm.weight"),
    (Role::FfnNormBias, "gpt_neox.layers.{l}.post_attention_layernorm.bias"),
    (Role::Up, "gpt_neox.layers.{l}.mlp.dense_h_to_4h.weight"),
    (Role::UpBias, "gpt_neox.layers.{l}.mlp.dense_h_to_4h.bias"),
    (Role::Down, "gpt_neox.layers.{l}.mlp.dense_4h_to_h.weight"),
    (Role::DownBias, "gpt_neox.layers.{l}.mlp.dense_4h_to_h.bias"),
];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")]);
    // A quarter of each head, where nothing else is said; a section that says it comes first.
    let c = &c.or(&[("partial_rotary_factor", Plain::Number(0.25)), ("hidden_act", Plain::Text("gelu"))]);
    let shape = fields::Shape::read(c)?;
    let norm = fields::layer_norm(c, 1e-5)?;
    let bias = c.flag_or("qkv_bias", c.flag_or("attention_bias", true)?)?;
    let attn = AttnSpec { qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let ffn = Ffn::Plain {
        intermediate: fields::intermediate(c, "intermediate_size")?,
        act: fields::activation(c, "hidden_act", None)?,
        bias: true,
    };
    let wiring = Wiring { parallel: c.flag_or("use_parallel_residual", true)?, ..Wiring::pre_norm(norm) };
    shape.model(ARCH.name, LayerSpec { attn, ffn, wiring }, norm, c)
}
