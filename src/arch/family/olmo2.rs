//! OLMo 2: norms on results in place of norms before, and norms over all of q and k.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, LayerSpec, ModelSpec, NormSpan, QkNorm, Wiring};
use crate::arch::tensors::{HF_GATED, HF_RESULT_NORMS};
use crate::arch::{Arch, Config, GgufHabits, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "olmo2",
    model_types: &["olmo2"],
    gguf: Some(GgufHabits::named("olmo2")),
    spec,
    tensors: &[HF_RESULT_NORMS, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let bias = c.flag_or("attention_bias", false)?;
    let qk_norm = Some(QkNorm { norm, span: NormSpan::All });
    let attn = AttnSpec { qk_norm, qkv_bias: bias, out_bias: bias, ..shape.attn() };
    shape.model(ARCH.name, LayerSpec { attn, ffn: fields::gated(c)?, wiring: Wiring::post_norm(norm) }, norm, c)
}
