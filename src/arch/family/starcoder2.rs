//! StarCoder 2: layer norms, a plain feed-forward, biases everywhere, windows.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, Ffn, ModelSpec};
use crate::arch::tensors::{HF_GATED, HF_NORM_BIASES, Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "starcoder2",
    model_types: &["starcoder2"],
    gguf: Some(GgufHabits { defaults: &[("hidden_act", Plain::Text("gelu_pytorch_tanh"))], ..GgufHabits::named("starcoder2") }),
    spec,
    tensors: &[NAMES, HF_GATED, HF_NORM_BIASES],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};
const NAMES: Names = &[
    (Role::Up, "model.layers.{l}.mlp.c_fc.weight"),
    (Role::UpBias, "model.layers.{l}.mlp.c_fc.bias"),
    (Role::Down, "model.layers.{l}.mlp.c_proj.weight"),
    (Role::DownBias, "model.layers.{l}.mlp.c_proj.bias"),
];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("norm_epsilon", "layer_norm_eps")]).or(&[("tie_word_embeddings", Plain::Flag(true))]);
    let shape = fields::Shape::read(c)?;
    let norm = fields::layer_norm(c, 1e-5)?;
    let bias = c.flag_or("use_bias", true)?;
    let attn = AttnSpec { window: fields::window(c)?, qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let ffn = Ffn::Plain {
        intermediate: fields::intermediate(c, "intermediate_size")?,
        act: fields::activation(c, "hidden_act", Some("gelu_pytorch_tanh"))?,
        bias,
    };
    shape.model(ARCH.name, fields::layer(attn, ffn, norm), norm, c)
}
