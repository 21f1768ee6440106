//! gpt-oss: experts behind a softmax of the chosen, attention with sinks, windows in every other layer. Its experts are stored all
//! together, the other way round, with the rows of gate and up taking turns.
#![forbid(unsafe_code)]

use crate::arch::fields;
use crate::arch::spec::{AttnSpec, Ffn, Glu, ModelSpec, Score};
use crate::arch::tensors::{HF_GATED, Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "gpt_oss",
    model_types: &["gpt_oss"],
    gguf: Some(GgufHabits {
        tensors: GGUF_NAMES,
        experts: true,
        // The ramp of its frequencies does not start and end at whole ones.
        defaults: &[("rope_truncate", Plain::Flag(false))],
        ..GgufHabits::named("gpt-oss")
    }),
    spec,
    tensors: &[NAMES, HF_GATED],
    stored: Stored { transposed: &[Role::ExpertGateUp, Role::ExpertDown], alternating_gate_up: true, ..Stored::USUAL },
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq"],
};
const NAMES: Names = &[
    (Role::Sinks, "model.layers.{l}.self_attn.sinks"),
    (Role::Router, "model.layers.{l}.mlp.router.weight"),
    (Role::RouterBias, "model.layers.{l}.mlp.router.bias"),
    (Role::ExpertGateUp, "model.layers.{l}.mlp.experts.gate_up_proj"),
    (Role::ExpertGateUpBias, "model.layers.{l}.mlp.experts.gate_up_proj_bias"),
    (Role::ExpertDown, "model.layers.{l}.mlp.experts.down_proj"),
    (Role::ExpertDownBias, "model.layers.{l}.mlp.experts.down_proj_bias"),
];

const GGUF_NAMES: Names = &[(Role::FfnNorm, "blk.{l}.post_attention_norm.weight")];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("num_local_experts", "num_experts"), ("moe_intermediate_size", "intermediate_size")]);
    let c = &c.or(&[("swiglu_alpha", Plain::Number(1.702)), ("swiglu_limit", Plain::Number(7.0))]);
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let bias = c.flag_or("attention_bias", true)?;
    let attn = AttnSpec { sinks: true, qkv_bias: bias, out_bias: bias, ..shape.attn() };
    let mut ffn = fields::experts(c, "intermediate_size", false)?;
    if let Ffn::Moe { route, glu, bias, .. } = &mut ffn {
        route.score = Score::SoftmaxOfChosen;
        *glu =
            Glu::Clamped { alpha: fields::factor(c, "swiglu_alpha", None)?, limit: c.positive_or("swiglu_limit", None)? as f32 };
        *bias = true;
    }
    let mut spec = shape.model(ARCH.name, fields::layer(attn, ffn, norm), norm, c)?;
    let sliding = fields::sliding(c, shape.layers, |l| l % 2 == 0)?;
    fields::set_windows(c, &mut spec, &sliding)?;
    Ok(spec)
}
