//! Gemma 2: gemma with norms on results too, windows in every other layer, and caps on scores and logits.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, LayerSpec, ModelSpec, NormSpec, Wiring};
use crate::arch::tensors::{HF_GATED, HF_RESULT_NORMS};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "gemma2",
    model_types: &["gemma2"],
    gguf: Some(GgufHabits { defaults: GGUF_DEFAULTS, ..GgufHabits::named("gemma2") }),
    spec,
    tensors: &[HF_RESULT_NORMS, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

/// GGUF's norm weights have the 1 in them.
pub(super) const GGUF_DEFAULTS: &[(&str, Plain)] = &[("norm_plus", Plain::Number(0.0))];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.or(&[("hidden_activation", Plain::Text("gelu_pytorch_tanh")), ("tie_word_embeddings", Plain::Flag(true))]);
    c.refuse("use_bidirectional_attention", &false.into())?;
    let shape = fields::Shape::read(c)?;
    let norm = fields::gemma_norm(c)?;
    let bias = c.flag_or("attention_bias", false)?;
    let attn = AttnSpec {
        scale: fields::gemma_scale(c, &shape, 46)?,
        softcap: fields::softcap(c, "attn_logit_softcapping")?,
        qkv_bias: bias,
        out_bias: bias,
        ..shape.attn()
    };
    let layer = LayerSpec { attn, ffn: fields::gemma_gated(c)?, wiring: around(norm) };
    let mut spec = shape.model(ARCH.name, layer, norm, c)?;
    let sliding = fields::sliding(c, shape.layers, |l| l % 2 == 0)?;
    fields::set_windows(c, &mut spec, &sliding)?;
    spec.embed_scale = (shape.hidden as f32).sqrt();
    spec.head.softcap = fields::softcap(c, "final_logit_softcapping")?;
    Ok(spec)
}

/// Norms before and after both halves of a layer.
pub(super) fn around(norm: NormSpec) -> Wiring {
    Wiring { attn_out: Some(norm), ffn_out: Some(norm), ..Wiring::pre_norm(norm) }
}
