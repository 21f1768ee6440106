//! DeepSeek V2 and V3 (and R1): attention over latents (MLA), many small experts and shared ones, chosen within groups. V3 scores by
//! sigmoid and corrects the choice by a bias.
#![forbid(unsafe_code)]

use crate::arch::rope::RopeStyle;
use crate::arch::spec::{AttnSpec, Ffn, Groups, KvLayout, ModelSpec, NormSpec, Score};
use crate::arch::tensors::{HF_EXPERTS, HF_GATED, Names, Role};
use crate::arch::{Arch, Config, GgufHabits, Plain, Stored};
use crate::arch::{fields, rotary};
use crate::error::ConfigError;

pub(in crate::arch) const ARCH: Arch = Arch {
    name: "deepseek",
    model_types: &["deepseek_v2", "deepseek_v3"],
    gguf: Some(GgufHabits { experts: true, defaults: GGUF_DEFAULTS, ..GgufHabits::named("deepseek2") }),
    spec,
    tensors: &[NAMES, HF_EXPERTS, HF_GATED],
    stored: Stored::USUAL,
    prefixes: &[],
    ignored: &["rotary_emb.inv_freq", "model.layers.{l}.*"],
};
const NAMES: Names = &[
    (Role::QueryDown, "model.layers.{l}.self_attn.q_a_proj.weight"),
    (Role::QueryDownNorm, "model.layers.{l}.self_attn.q_a_layernorm.weight"),
    (Role::QueryUp, "model.layers.{l}.self_attn.q_b_proj.weight"),
    (Role::LatentDown, "model.layers.{l}.self_attn.kv_a_proj_with_mqa.weight"),
    (Role::LatentNorm, "model.layers.{l}.self_attn.kv_a_layernorm.weight"),
    (Role::LatentUp, "model.layers.{l}.self_attn.kv_b_proj.weight"),
    (Role::RouterCorrection, "model.layers.{l}.mlp.gate.e_score_correction_bias"),
    (Role::SharedGate, "model.layers.{l}.mlp.shared_experts.gate_proj.weight"),
    (Role::SharedUp, "model.layers.{l}.mlp.shared_experts.up_proj.weight"),
    (Role::SharedDown, "model.layers.{l}.mlp.shared_experts.down_proj.weight"),
];

/// Scores: 1 is softmax, which old files leave out, 2 sigmoid.
const GGUF_DEFAULTS: &[(&str, Plain)] = &[("expert_gating_func", Plain::Count(1)), ("rope_interleave", Plain::Flag(true))];

fn spec(c: &Config) -> Result<ModelSpec, ConfigError> {
    let c = &c.renamed(&[("n_routed_experts", "num_experts"), ("rotary_dim", "qk_rope_head_dim")]);
    let sigmoid = sigmoid(c)?;
    c.refuse("attention_bias", &false.into())?;
    c.refuse("mlp_bias", &false.into())?;
    let rope_dim = fields::bounded(c, "qk_rope_head_dim", None, 1 << 12)?;
    let c = &c.renamed(&[("head_dim", "qk_head_dim"), ("value_head_dim", "v_head_dim")]);
    let nope_dim = match c.has("qk_nope_head_dim") {
        true => fields::bounded(c, "qk_nope_head_dim", None, 1 << 12)?,
        false => fields::bounded(c, "qk_head_dim", None, 1 << 13)?.saturating_sub(rope_dim),
    };
    if nope_dim == 0 {
        return Err(c.invalid("qk_head_dim", format!("above qk_rope_head_dim = {rope_dim}"), c.count("qk_head_dim")?));
    }
    // GGUF counts the one key head that the latent makes.
    let mut c = c.clone();
    c.set("num_key_value_heads", c.count("num_attention_heads")?);
    c.set("head_dim", rope_dim);
    let c = &c;
    let (shape, norm) = (fields::Shape::read(c)?, fields::rms(c)?);
    let scale = rotary::yarn_score_factor(c)? / ((nope_dim + rope_dim) as f64).sqrt();
    let layout = KvLayout::Latent {
        rank: fields::bounded(c, "kv_lora_rank", None, 1 << 14)?,
        rope_dim,
        nope_dim,
        value_dim: fields::bounded(c, "v_head_dim", None, 1 << 12)?,
        q_rank: if c.has("q_lora_rank") { Some(fields::bounded(c, "q_lora_rank", None, 1 << 16)?) } else { None },
    };
    // The norms on latents have an epsilon of their own, which no configuration names.
    let attn = AttnSpec { layout, scale: scale as f32, latent_norm: Some(NormSpec::rms(1e-6)), ..shape.attn() };
    let mut spec = shape.model(ARCH.name, fields::layer(attn, fields::gated(c)?, norm), norm, c)?;
    if c.flag_or("rope_interleave", true)? {
        spec.ropes[0].style = RopeStyle::Interleaved;
    }
    let dense = if c.has("first_k_dense_replace") { c.whole("first_k_dense_replace")? } else { 0 };
    let every = c.count_or("moe_layer_freq", Some(1))?;
    for (l, layer) in spec.layers.iter_mut().enumerate() {
        if l as u64 >= dense && l.is_multiple_of(every) && c.has("num_experts") {
            layer.ffn = experts(c, sigmoid)?;
        }
    }
    Ok(spec)
}

fn sigmoid(c: &Config) -> Result<bool, ConfigError> {
    if c.has("expert_gating_func") {
        return match c.whole("expert_gating_func")? {
            0 | 1 => Ok(false),
            2 => Ok(true),
            other => Err(c.invalid("expert_gating_func", "1 (softmax) or 2 (sigmoid)", other)),
        };
    }
    let v3 = c.model_type()? == "deepseek_v3";
    match c.str_or("scoring_func", if v3 { "sigmoid" } else { "softmax" })? {
        "softmax" if !v3 => Ok(false),
        "sigmoid" if v3 => Ok(true),
        other => Err(c.invalid("scoring_func", if v3 { "sigmoid" } else { "softmax" }, other)),
    }
}

fn experts(c: &Config, sigmoid: bool) -> Result<Ffn, ConfigError> {
    let count = c.count_or("n_group", Some(1))?;
    let groups = Groups { count, top: c.count_or("topk_group", Some(count))?, best: if sigmoid { 2 } else { 1 } };
    let method = c.str_or(
        "topk_method",
        if sigmoid {
            "noaux_tc"
        } else if count > 1 {
            "group_limited_greedy"
        } else {
            "greedy"
        },
    )?;
    let grouped = match (method, sigmoid) {
        ("greedy", false) => false,
        ("group_limited_greedy", false) | ("noaux_tc", true) => true,
        (other, _) => return Err(c.invalid("topk_method", "greedy or group_limited_greedy (V2), noaux_tc (V3)", other)),
    };
    // V2's reference never normalises, whatever its configuration says; it is published as false.
    let normalize = c.flag_or("norm_topk_prob", sigmoid)?;
    if normalize && !sigmoid {
        return Err(c.invalid("norm_topk_prob", "false, with softmax scores", normalize));
    }
    let mut ffn = fields::experts(c, "moe_intermediate_size", normalize)?;
    if let Ffn::Moe { route, intermediate, shared, .. } = &mut ffn {
        if !route.experts.is_multiple_of(groups.count) || groups.top > groups.count {
            return Err(c.invalid(
                "n_group",
                format!("a divisor of {} experts, at least topk_group", route.experts),
                groups.count,
            ));
        }
        if grouped && route.top_k > route.experts / groups.count * groups.top {
            let most = route.experts / groups.count * groups.top;
            return Err(c.invalid("num_experts_per_tok", format!("at most the {most} of topk_group groups"), route.top_k));
        }
        route.groups = (grouped && groups.count > 1).then_some(groups);
        route.correction = sigmoid;
        route.score = if sigmoid { Score::Sigmoid } else { Score::Softmax };
        route.scale = fields::factor(c, "routed_scaling_factor", Some(1.0))?;
        *shared = *intermediate * if c.has("n_shared_experts") { c.whole("n_shared_experts")? as usize } else { 0 };
    }
    Ok(ffn)
}
