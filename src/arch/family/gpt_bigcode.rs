//! StarCoder 1 and SantaCoder: gpt2 with one key head for all queries, and matrices stored as everywhere.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, Ffn, ModelSpec};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "gpt_bigcode",
    model_types: &["gpt_bigcode"],
    gguf: Some(GgufHabits { defaults: &[("hidden_act", Plain::Text("gelu_pytorch_tanh"))], ..GgufHabits::named("starcoder") }),
    spec,
    tensors: &[super::gpt2::NAMES],
    stored: Stored { grouped_qkv: true, ..Stored::USUAL },
    prefixes: &[("transformer.", "")],
    ignored: &[".attn.bias", ".attn.masked_bias"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(super::gpt2::ALIASES).or(&[("tie_word_embeddings", Plain::Flag(true))]);
    let kv_heads = if c.flag_or("multi_query", true)? { 1 } else { c.count("num_attention_heads")? };
    let c = &c.or(&[("num_key_value_heads", Plain::Count(kv_heads as u64))]);
    let shape = fields::Shape::read(c)?;
    let norm = fields::layer_norm(c, 1e-5)?;
    c.refuse("add_cross_attention", &false.into())?;
    c.refuse("scale_attn_weights", &true.into())?;
    let attn = AttnSpec { rope: None, qkv_bias: true, out_bias: true, ..shape.attn() };
    let ffn = Ffn::Plain {
        intermediate: fields::bounded(c, "intermediate_size", Some(4 * shape.hidden), 1 << 22)?,
        act: fields::activation(c, "hidden_act", Some("gelu_pytorch_tanh"))?,
        bias: true,
    };
    let mut spec = shape.model_with(ARCH.name, fields::layer(attn, ffn, norm), norm, Vec::new(), c)?;
    spec.position_table = true;
    Ok(spec)
}
