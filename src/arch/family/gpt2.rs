//! GPT-2: learned positions, layer norms, plain feed-forward, biases everywhere, matrices stored the other way round.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, Ffn, ModelSpec};
use crate::arch::tensors::{Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "gpt2",
    model_types: &["gpt2"],
    gguf: Some(GgufHabits { defaults: &[("hidden_act", Plain::Text("gelu_new"))], ..GgufHabits::named("gpt2") }),
    spec,
    tensors: &[NAMES],
    stored: Stored { transposed: &[Role::Qkv, Role::AttnOut, Role::Up, Role::Down], ..Stored::USUAL },
    prefixes: &[("transformer.", "")],
    ignored: &[".attn.bias", ".attn.masked_bias"],
};
pub(super) const NAMES: Names = &[
    (Role::Embed, "transformer.wte.weight"),
    (Role::Positions, "transformer.wpe.weight"),
    (Role::FinalNorm, "transformer.ln_f.weight"),
    (Role::FinalNormBias, "transformer.ln_f.bias"),
    (Role::Head, "lm_head.weight"),
    (Role::AttnNorm, "transformer.h.{l}.ln_1.weight"),
    (Role::AttnNormBias, "transformer.h.{l}.ln_1.bias"),
    (Role::Qkv, "transformer.h.{l}.attn.c_attn.weight"),
    (Role::QkvBias, "transformer.h.{l}.attn.c_attn.bias"),
    (Role::AttnOut, "transformer.h.{l}.attn.c_proj.weight"),
    (Role::AttnOutBias, "transformer.h.{l}.attn.c_proj.bias"),
    (Role::FfnNorm, "transformer.h.{l}.ln_2.weight"),
    (Role::FfnNormBias, "transformer.h.{l}.ln_2.bias"),
    (Role::Up, "transformer.h.{l}.mlp.c_fc.weight"),
    (Role::UpBias, "transformer.h.{l}.mlp.c_fc.bias"),
    (Role::Down, "transformer.h.{l}.mlp.c_proj.weight"),
    (Role::DownBias, "transformer.h.{l}.mlp.c_proj.bias"),
];

/// The fields' older names.
pub(super) const ALIASES: &[(&str, &str)] = &[
    ("n_embd", "hidden_size"),
    ("n_head", "num_attention_heads"),
    ("n_layer", "num_hidden_layers"),
    ("n_positions", "max_position_embeddings"),
    ("n_inner", "intermediate_size"),
    ("activation_function", "hidden_act"),
    ("layer_norm_epsilon", "layer_norm_eps"),
];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(ALIASES).or(&[("tie_word_embeddings", Plain::Flag(true)), ("hidden_act", Plain::Text("gelu_new"))]);
    let shape = fields::Shape::read(c)?;
    let norm = fields::layer_norm(c, 1e-5)?;
    c.refuse("add_cross_attention", &false.into())?;
    c.refuse("scale_attn_by_inverse_layer_idx", &false.into())?;
    c.refuse("scale_attn_weights", &true.into())?;
    let attn = AttnSpec { rope: None, qkv_bias: true, out_bias: true, ..shape.attn() };
    let ffn = Ffn::Plain {
        intermediate: fields::bounded(c, "intermediate_size", Some(4 * shape.hidden), 1 << 22)?,
        act: fields::activation(c, "hidden_act", None)?,
        bias: true,
    };
    let mut spec = shape.model_with(ARCH.name, fields::layer(attn, ffn, norm), norm, Vec::new(), c)?;
    spec.position_table = true;
    Ok(spec)
}
