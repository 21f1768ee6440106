//! EXAONE 4: norms on results and on each head of q and k; where some layers have windows, the others do not rotate.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, LayerSpec, ModelSpec, Wiring};
use crate::arch::tensors::{HF_GATED, HF_RESULT_NORMS};
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "exaone4",
    model_types: &["exaone4"],
    gguf: Some(GgufHabits::named("exaone4")),
    spec,
    tensors: &[HF_RESULT_NORMS, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let attn = AttnSpec { qk_norm: fields::head_norms(norm), ..shape.attn() };
    let layer = LayerSpec { attn, ffn: fields::gated(c)?, wiring: Wiring::post_norm(norm) };
    let mut spec = shape.model(ARCH.name, layer, norm, c)?;
    if !c.has("sliding_window") {
        return Ok(spec);
    }
    let windowed = pattern(c, shape.layers)?;
    let sliding = fields::sliding(c, shape.layers, |l| windowed[l])?;
    fields::set_windows(c, &mut spec, &sliding)?;
    for (layer, slides) in spec.layers.iter_mut().zip(sliding) {
        layer.attn.rope = slides.then_some(0);
    }
    Ok(spec)
}

/// Every so many layers see everything; "LLLG" spells the same out, and there the last layer always does.
fn pattern(c: &Config, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let field = "sliding_window_pattern";
    match c.str(field) {
        Ok(text) if !text.is_empty() && text.chars().all(|k| matches!(k, 'L' | 'G')) => {
            Ok((0..layers).map(|l| l + 1 < layers && text.as_bytes()[l % text.len()] == b'L').collect())
        }
        Ok(text) => Err(c.invalid(field, "a count, or L and G", text)),
        Err(_) => {
            let every = c.count_or(field, Some(4))?;
            Ok((1..=layers).map(|l| !l.is_multiple_of(every)).collect())
        }
    }
}
