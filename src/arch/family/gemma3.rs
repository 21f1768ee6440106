//! Gemma 3, alone or inside the multimodal one: gemma2 without caps, with norms on q and k, and a rotary table of its own for
//! windowed layers.
#![forbid(unsafe_code)]

use crate::arch::spec::{AttnSpec, LayerSpec, ModelSpec};
use crate::arch::tensors::{HF_GATED, HF_RESULT_NORMS};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::arch::{fields, rotary};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "gemma3_text",
    model_types: &["gemma3_text", "gemma3"],
    gguf: Some(GgufHabits { defaults: super::gemma2::GGUF_DEFAULTS, ..GgufHabits::named("gemma3") }),
    spec,
    tensors: &[HF_RESULT_NORMS, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[("", "language_model."), ("model.", "model.language_model.")],
    ignored: &["vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*"],
};

/// What published multimodal configurations leave out.
const DEFAULTS: &[(&str, Plain)] = &[
    ("vocab_size", Plain::Count(262_208)),
    ("num_attention_heads", Plain::Count(8)),
    ("num_key_value_heads", Plain::Count(4)),
    ("head_dim", Plain::Count(256)),
    ("max_position_embeddings", Plain::Count(131_072)),
    ("rms_norm_eps", Plain::Number(1e-6)),
    ("hidden_activation", Plain::Text("gelu_pytorch_tanh")),
    ("tie_word_embeddings", Plain::Flag(true)),
    ("sliding_window_pattern", Plain::Count(6)),
];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("_sliding_window_pattern", "sliding_window_pattern")]).or(DEFAULTS);
    c.refuse("use_bidirectional_attention", &false.into())?;
    let shape = fields::Shape::read(c)?;
    let norm = fields::gemma_norm(c)?;
    let bias = c.flag_or("attention_bias", false)?;
    let attn = AttnSpec {
        scale: fields::gemma_scale(c, &shape, 62)?,
        softcap: fields::softcap(c, "attn_logit_softcapping")?,
        qk_norm: fields::head_norms(norm),
        qkv_bias: bias,
        out_bias: bias,
        ..shape.attn()
    };
    let layer = LayerSpec { attn, ffn: fields::gemma_gated(c)?, wiring: super::gemma2::around(norm) };
    let ropes = rotary::ropes_by_layer_type(c, 1e6, 1e4, shape.head_dim, shape.context)?;
    let mut spec = shape.model_with(ARCH.name, layer, norm, ropes, c)?;
    let pattern = c.count("sliding_window_pattern")?;
    let sliding = fields::sliding(c, shape.layers, |l| !(l + 1).is_multiple_of(pattern))?;
    fields::set_windows(c, &mut spec, &sliding)?;
    for (layer, slides) in spec.layers.iter_mut().zip(sliding) {
        layer.attn.rope = Some(usize::from(slides));
    }
    spec.embed_scale = (shape.hidden as f32).sqrt();
    spec.head.softcap = fields::softcap(c, "final_logit_softcapping")?;
    Ok(spec)
}
