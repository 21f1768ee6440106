//! Mistral and Ministral: llama with a window in every layer. Of Mistral 3, the language model.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "mistral",
    model_types: &["mistral", "ministral3"],
    // Its GGUF files say llama.
    gguf: None,
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[("", "language_model."), ("model.", "model.language_model.")],
    ignored: &[
        "rotary_emb.inv_freq",
        "vision_tower.*",
        "multi_modal_projector.*",
        "model.vision_tower.*",
        "model.multi_modal_projector.*",
    ],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let attn = AttnSpec { window: fields::window(c)?, ..shape.attn() };
    let mut spec = shape.model(ARCH.name, fields::layer(attn, fields::gated(c)?, norm), norm, c)?;
    // Ministral 3 sharpens its attention past the original context, by a factor that is 1 up to there.
    if let Some(rope) = c.section("rope_parameters")?.filter(|r| r.number_or("llama_4_scaling_beta", Some(0.0)) != Ok(0.0)) {
        spec.context = spec.context.min(rope.count("original_max_position_embeddings")?);
    }
    Ok(spec)
}
