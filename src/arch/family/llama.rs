//! Llama 1 to 3 and everything of their shape (SmolLM, TinyLlama, Yi, ...): pre-norm, rotary, gated feed-forward.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, Ffn, Glu, HeadSpec, LayerSpec, ModelSpec, NormSpec, Wiring};
use crate::arch::tensors::{HF_GATED, Role};
use crate::arch::{Arch, Config, GgufHabits};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "llama",
    model_types: &["llama"],
    gguf: Some(GgufHabits { interleaved_qk: true }),
    spec,
    tensors: TENSORS,
    ignored: &["rotary_emb.inv_freq"],
};

const TENSORS: &[(Role, &str)] = HF_GATED;

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let shape = fields::Shape::read(c)?;
    let norm = NormSpec::rms(c.positive_or("rms_norm_eps", None)? as f32);
    let attn_bias = c.flag_or("attention_bias", false)?;
    let layer = LayerSpec {
        attn: AttnSpec {
            heads: shape.heads,
            layout: shape.layout(),
            rope: Some(0),
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
            window: None,
            softcap: None,
            qk_norm: None,
            sinks: false,
            qkv_bias: attn_bias,
            out_bias: attn_bias,
        },
        ffn: Ffn::Gated {
            intermediate: c.count("intermediate_size")?,
            glu: Glu::Act(fields::activation(c, "hidden_act", Some("silu"))?),
            bias: c.flag_or("mlp_bias", false)?,
        },
        wiring: Wiring::pre_norm(norm),
    };
    let rope = fields::rope(c, shape.head_dim, shape.context)?;
    Ok(ModelSpec {
        arch: ARCH.name,
        vocab: shape.vocab,
        hidden: shape.hidden,
        context: rope.context(shape.context),
        embed_scale: 1.0,
        position_table: false,
        layers: vec![layer; shape.layers],
        ropes: vec![rope],
        final_norm: norm,
        head: HeadSpec { tied: c.flag_or("tie_word_embeddings", false)?, bias: false, scale: 1.0, softcap: None },
    })
}
