//! Command R: attention and feed-forward side by side behind one layer norm without bias, a factor on the logits, neighbours that
//! turn together.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::rope::RopeStyle;
use crate::arch::spec::{AttnSpec, LayerSpec, ModelSpec, NormSpan, NormSpec, QkNorm, Wiring};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "cohere",
    model_types: &["cohere"],
    gguf: Some(GgufHabits::named("command-r")),
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.or(&[("tie_word_embeddings", Plain::Flag(true)), ("rope_theta", Plain::Number(500_000.0))]);
    let shape = fields::Shape::read(c)?;
    let norm = NormSpec { bias: false, ..fields::layer_norm(c, 1e-5)? };
    let bias = c.flag_or("attention_bias", false)?;
    let qk_norm = c.flag_or("use_qk_norm", false)?.then_some(QkNorm { norm, span: NormSpan::OwnHead });
    let attn = AttnSpec { qk_norm, qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let wiring = Wiring { ffn_in: None, parallel: true, ..Wiring::pre_norm(norm) };
    let mut spec = shape.model(ARCH.name, LayerSpec { attn, ffn: fields::gated(c)?, wiring }, norm, c)?;
    spec.ropes[0].style = RopeStyle::Interleaved;
    spec.head.scale = fields::factor(c, "logit_scale", Some(0.0625))?;
    Ok(spec)
}
