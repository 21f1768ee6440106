//! SmolLM 3: llama with layers that do not rotate, every fourth one, say.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, ModelSpec};
use crate::arch::tensors::HF_GATED;
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "smollm3",
    model_types: &["smollm3"],
    gguf: Some(GgufHabits { interleaved_qk: true, ..GgufHabits::named("smollm3") }),
    spec,
    tensors: &[HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.or(&[("no_rope_layer_interval", Plain::Count(4))]);
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let bias = c.flag_or("attention_bias", false)?;
    let attn = AttnSpec { qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let mut spec = shape.model(ARCH.name, fields::layer(attn, fields::gated(c)?, norm), norm, c)?;
    let interval = c.count("no_rope_layer_interval")?;
    let every = (1..=shape.layers).map(|l| u64::from(!l.is_multiple_of(interval))).collect();
    let rotates = c.wholes("no_rope_layers")?.unwrap_or(every);
    if rotates.len() != shape.layers {
        return Err(c.invalid("no_rope_layers", format!("one for each of num_hidden_layers = {}", shape.layers), rotates.len()));
    }
    for (layer, rotates) in spec.layers.iter_mut().zip(&rotates) {
        layer.attn.rope = (*rotates != 0).then_some(0);
    }
    if c.flag_or("use_sliding_window", false)? && c.has("sliding_window") {
        let sliding = fields::sliding(c, shape.layers, |l| rotates[l] == 0)?;
        fields::set_windows(c, &mut spec, &sliding)?;
    }
    Ok(spec)
}
