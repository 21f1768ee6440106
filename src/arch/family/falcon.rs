//! Falcon 7B to 180B: attention and feed-forward side by side, one key head or a few. Those that know positions by ALiBi are not
//! among them.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, Ffn, LayerSpec, ModelSpec, Wiring};
use crate::arch::tensors::{Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "falcon",
    model_types: &["falcon"],
    gguf: Some(GgufHabits { tensors: GGUF_NAMES, ..GgufHabits::named("falcon") }),
    spec,
    tensors: &[NAMES],
    stored: Stored { grouped_qkv: true, ..Stored::USUAL },
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};
const NAMES: Names = &[
    (Role::Embed, "transformer.word_embeddings.weight"),
    (Role::FinalNorm, "transformer.ln_f.weight"),
    (Role::FinalNormBias, "transformer.ln_f.bias"),
    (Role::Head, "lm_head.weight"),
    (Role::AttnNorm, "transformer.h.{l}.ln_attn.weight"),
    (Role::AttnNormBias, "transformer.h.{l}.ln_attn.bias"),
    (Role::AttnNorm, "transformer.h.{l}.input_layernorm.weight"),
    (Role::AttnNormBias, "transformer.h.{l}.input_layernorm.bias"),
    (Role::Qkv, "transformer.h.{l}.self_attention.query_key_value.weight"),
    (Role::QkvBias, "transformer.h.{l}.self_attention.query_key_value.bias"),
    (Role::AttnOut, "transformer.h.{l}.self_attention.dense.weight"),
    (Role::AttnOutBias, "transformer.h.{l}.self_attention.dense.bias"),
    (Role::FfnNorm, "transformer.h.{l}.ln_mlp.weight"),
    (Role::FfnNormBias, "transformer.h.{l}.ln_mlp.bias"),
    (Role::FfnNorm, "transformer.h.{l}.post_attention_layernorm.weight"),
    (Role::FfnNormBias, "transformer.h.{l}.post_attention_layernorm.bias"),
    (Role::Up, "transformer.h.{l}.mlp.dense_h_to_4h.weight"),
    (Role::UpBias, "transformer.h.{l}.mlp.dense_h_to_4h.bias"),
    (Role::Down, "transformer.h.{l}.mlp.dense_4h_to_h.weight"),
    (Role::DownBias, "transformer.h.{l}.mlp.dense_4h_to_h.bias"),
];

/// Where there are two norms, the feed-forward's goes first.
const GGUF_NAMES: Names = &[
    (Role::AttnNorm, "blk.{l}.attn_norm_2.weight"),
    (Role::AttnNormBias, "blk.{l}.attn_norm_2.bias"),
    (Role::AttnNorm, "blk.{l}.attn_norm.weight"),
    (Role::AttnNormBias, "blk.{l}.attn_norm.bias"),
    (Role::FfnNorm, "blk.{l}.attn_norm.weight"),
    (Role::FfnNormBias, "blk.{l}.attn_norm.bias"),
];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("n_embed", "hidden_size"), ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")]);
    let c = &c.renamed(&[("layer_norm_epsilon", "layer_norm_eps"), ("intermediate_size", "ffn_hidden_size")]);
    let c = &c.or(&[("tie_word_embeddings", Plain::Flag(true)), ("max_position_embeddings", Plain::Count(2048))]);
    c.refuse("alibi", &false.into())?;
    // Only the newer architecture counts its key heads; of the older one there is one key head or as many as queries.
    let newer = c.flag_or("new_decoder_architecture", false)?;
    let heads = c.count("num_attention_heads")?;
    let kv_heads = match (newer, c.flag_or("multi_query", true)?) {
        (true, _) => c.count_or("num_kv_heads", Some(heads))?,
        (false, true) => 1,
        (false, false) => heads,
    };
    let shape = fields::Shape::read(&c.or(&[("num_key_value_heads", Plain::Count(kv_heads as u64))]))?;
    let norm = fields::layer_norm(c, 1e-5)?;
    let bias = c.flag_or("bias", false)?;
    let attn = AttnSpec { qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let ffn = Ffn::Plain {
        intermediate: fields::bounded(c, "ffn_hidden_size", Some(4 * shape.hidden), 1 << 22)?,
        act: fields::activation(c, "activation", Some("gelu"))?,
        bias,
    };
    let parallel = newer || c.flag_or("parallel_attn", true)?;
    let norms = c.count_or("num_ln_in_parallel_attn", Some(if newer { 2 } else { 1 }))?;
    if norms > 2 {
        return Err(c.invalid("num_ln_in_parallel_attn", "1 or 2", norms));
    }
    let own = !parallel || (newer && norms == 2);
    let wiring = Wiring { ffn_in: own.then_some(norm), parallel, ..Wiring::pre_norm(norm) };
    shape.model(ARCH.name, LayerSpec { attn, ffn, wiring }, norm, c)
}
