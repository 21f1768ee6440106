//! StableLM 1 and 2: layer norms, a quarter of each head turns; in the larger ones norms on q and k, and both halves side by side.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, LayerSpec, ModelSpec, NormSpan, NormSpec, QkNorm, Wiring};
use crate::arch::tensors::{HF_GATED, HF_NORM_BIASES, Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "stablelm",
    model_types: &["stablelm"],
    gguf: Some(GgufHabits::named("stablelm")),
    spec,
    tensors: &[NAMES, HF_GATED, HF_NORM_BIASES],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};
const NAMES: Names = &[
    (Role::QueryNorm, "model.layers.{l}.self_attn.q_layernorm.norms.{n}.weight"),
    (Role::KeyNorm, "model.layers.{l}.self_attn.k_layernorm.norms.{n}.weight"),
];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.or(&[("partial_rotary_factor", Plain::Number(0.25))]).renamed(&[("attention_bias", "use_qkv_bias")]);
    let shape = fields::Shape::read(c)?;
    let norm = fields::layer_norm(c, 1e-5)?;
    let qk = QkNorm { norm: NormSpec { bias: false, ..norm }, span: NormSpan::OwnHead };
    let attn = AttnSpec {
        qk_norm: c.flag_or("qk_layernorm", false)?.then_some(qk),
        qkv_bias: c.flag_or("use_qkv_bias", false)?,
        ..shape.attn()
    };
    let parallel = c.flag_or("use_parallel_residual", false)?;
    let wiring = Wiring { ffn_in: (!parallel).then_some(norm), parallel, ..Wiring::pre_norm(norm) };
    shape.model(ARCH.name, LayerSpec { attn, ffn: fields::gated(c)?, wiring }, norm, c)
}
