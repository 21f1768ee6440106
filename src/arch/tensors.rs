//! What a tensor is for, and what files call it. `{l}` in a template stands for the layer, `{n}` for an expert or a head; a
//! tensor of all experts or heads together has its name without.
#![forbid(unsafe_code)]

use std::fmt;

/// What a tensor is for. Linear weights are `[outputs, inputs]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Role {
    /// Token embedding, `[vocab, hidden]`.
    Embed,
    /// Learned positions, `[context, hidden]`.
    Positions,
    /// Weight of the norm before the head.
    FinalNorm,
    /// Its bias.
    FinalNormBias,
    /// Output matrix, `[vocab, hidden]`.
    Head,
    /// Its bias.
    HeadBias,
    /// Weight of the norm before attention.
    AttnNorm,
    /// Its bias.
    AttnNormBias,
    /// Weight of the norm on attention's result.
    AttnResultNorm,
    /// Weight of the norm before the feed-forward.
    FfnNorm,
    /// Its bias.
    FfnNormBias,
    /// Weight of the norm on the feed-forward's result.
    FfnResultNorm,
    /// Query projection.
    Query,
    /// Key projection.
    Key,
    /// Value projection.
    Value,
    /// All three in one.
    Qkv,
    /// Bias of the query projection.
    QueryBias,
    /// Bias of the key projection.
    KeyBias,
    /// Bias of the value projection.
    ValueBias,
    /// All three in one.
    QkvBias,
    /// Weight of the norm on queries.
    QueryNorm,
    /// Weight of the norm on keys.
    KeyNorm,
    /// One more score for each head.
    Sinks,
    /// Output projection of attention.
    AttnOut,
    /// Its bias.
    AttnOutBias,
    /// From hidden states to the queries' latent.
    QueryDown,
    /// Weight of the norm on it.
    QueryDownNorm,
    /// From there to the queries.
    QueryUp,
    /// From hidden states to the latent and the rotated part of the key.
    LatentDown,
    /// Weight of the norm on the latent.
    LatentNorm,
    /// From the latent to each head's key and value.
    LatentUp,
    /// From a head's query to the latent, the first half of it transposed.
    LatentKey,
    /// From the latent to a head's value, the second half of it.
    LatentValue,
    /// Gate projection.
    Gate,
    /// Up projection.
    Up,
    /// Both in one.
    GateUp,
    /// Down projection.
    Down,
    /// Bias of the gate projection.
    GateBias,
    /// Bias of the up projection.
    UpBias,
    /// Both in one.
    GateUpBias,
    /// Bias of the down projection.
    DownBias,
    /// From hidden states to a score for each expert.
    Router,
    /// Its bias.
    RouterBias,
    /// Added to the scores for choosing alone.
    RouterCorrection,
    /// Gate projection of an expert.
    ExpertGate,
    /// Up projection of an expert.
    ExpertUp,
    /// Both in one.
    ExpertGateUp,
    /// Down projection of an expert.
    ExpertDown,
    /// Bias of an expert's gate projection.
    ExpertGateBias,
    /// Bias of an expert's up projection.
    ExpertUpBias,
    /// Both in one.
    ExpertGateUpBias,
    /// Bias of an expert's down projection.
    ExpertDownBias,
    /// Gate projection of the shared expert.
    SharedGate,
    /// Up projection of the shared expert.
    SharedUp,
    /// Both in one.
    SharedGateUp,
    /// Down projection of the shared expert.
    SharedDown,
    /// Divisors of the rotary frequencies.
    RopeFactors,
    /// The same, for short sequences.
    RopeShort,
    /// The same, for long sequences.
    RopeLong,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// A table from roles to templates.
pub(super) type Names = &'static [(Role, &'static str)];

/// Names in published safetensors of gated, pre-norm models.
pub(super) const HF_GATED: Names = &[
    (Role::Embed, "model.embed_tokens.weight"),
    (Role::FinalNorm, "model.norm.weight"),
    (Role::Head, "lm_head.weight"),
    (Role::AttnNorm, "model.layers.{l}.input_layernorm.weight"),
    (Role::Query, "model.layers.{l}.self_attn.q_proj.weight"),
    (Role::Key, "model.layers.{l}.self_attn.k_proj.weight"),
    (Role::Value, "model.layers.{l}.self_attn.v_proj.weight"),
    (Role::QueryBias, "model.layers.{l}.self_attn.q_proj.bias"),
    (Role::KeyBias, "model.layers.{l}.self_attn.k_proj.bias"),
    (Role::ValueBias, "model.layers.{l}.self_attn.v_proj.bias"),
    (Role::QueryNorm, "model.layers.{l}.self_attn.q_norm.weight"),
    (Role::KeyNorm, "model.layers.{l}.self_attn.k_norm.weight"),
    (Role::AttnOut, "model.layers.{l}.self_attn.o_proj.weight"),
    (Role::AttnOutBias, "model.layers.{l}.self_attn.o_proj.bias"),
    (Role::FfnNorm, "model.layers.{l}.post_attention_layernorm.weight"),
    (Role::Gate, "model.layers.{l}.mlp.gate_proj.weight"),
    (Role::Up, "model.layers.{l}.mlp.up_proj.weight"),
    (Role::Down, "model.layers.{l}.mlp.down_proj.weight"),
    (Role::GateBias, "model.layers.{l}.mlp.gate_proj.bias"),
    (Role::UpBias, "model.layers.{l}.mlp.up_proj.bias"),
    (Role::DownBias, "model.layers.{l}.mlp.down_proj.bias"),
];

/// Biases of the norms of [`HF_GATED`].
pub(super) const HF_NORM_BIASES: Names = &[
    (Role::FinalNormBias, "model.norm.bias"),
    (Role::AttnNormBias, "model.layers.{l}.input_layernorm.bias"),
    (Role::FfnNormBias, "model.layers.{l}.post_attention_layernorm.bias"),
];

/// Norms on results; what other families call the norm after attention stands before the feed-forward.
pub(super) const HF_RESULT_NORMS: Names = &[
    (Role::AttnResultNorm, "model.layers.{l}.post_attention_layernorm.weight"),
    (Role::FfnResultNorm, "model.layers.{l}.post_feedforward_layernorm.weight"),
    (Role::FfnNorm, "model.layers.{l}.pre_feedforward_layernorm.weight"),
];

/// Projections that are stored as one.
pub(super) const HF_FUSED: Names =
    &[(Role::Qkv, "model.layers.{l}.self_attn.qkv_proj.weight"), (Role::GateUp, "model.layers.{l}.mlp.gate_up_proj.weight")];

/// Experts, tensor by tensor.
pub(super) const HF_EXPERTS: Names = &[
    (Role::Router, "model.layers.{l}.mlp.gate.weight"),
    (Role::ExpertGate, "model.layers.{l}.mlp.experts.{n}.gate_proj.weight"),
    (Role::ExpertUp, "model.layers.{l}.mlp.experts.{n}.up_proj.weight"),
    (Role::ExpertDown, "model.layers.{l}.mlp.experts.{n}.down_proj.weight"),
];

/// Names in GGUF files; a family may have its own for some.
pub(super) const GGUF: Names = &[
    (Role::Embed, "token_embd.weight"),
    (Role::Positions, "position_embd.weight"),
    (Role::FinalNorm, "output_norm.weight"),
    (Role::FinalNormBias, "output_norm.bias"),
    (Role::Head, "output.weight"),
    (Role::HeadBias, "output.bias"),
    (Role::AttnNorm, "blk.{l}.attn_norm.weight"),
    (Role::AttnNormBias, "blk.{l}.attn_norm.bias"),
    (Role::AttnResultNorm, "blk.{l}.post_attention_norm.weight"),
    (Role::FfnNorm, "blk.{l}.ffn_norm.weight"),
    (Role::FfnNormBias, "blk.{l}.ffn_norm.bias"),
    (Role::FfnResultNorm, "blk.{l}.post_ffw_norm.weight"),
    (Role::Query, "blk.{l}.attn_q.weight"),
    (Role::QueryBias, "blk.{l}.attn_q.bias"),
    (Role::Key, "blk.{l}.attn_k.weight"),
    (Role::KeyBias, "blk.{l}.attn_k.bias"),
    (Role::Value, "blk.{l}.attn_v.weight"),
    (Role::ValueBias, "blk.{l}.attn_v.bias"),
    (Role::Qkv, "blk.{l}.attn_qkv.weight"),
    (Role::QkvBias, "blk.{l}.attn_qkv.bias"),
    (Role::AttnOut, "blk.{l}.attn_output.weight"),
    (Role::AttnOutBias, "blk.{l}.attn_output.bias"),
    (Role::Gate, "blk.{l}.ffn_gate.weight"),
    (Role::GateBias, "blk.{l}.ffn_gate.bias"),
    (Role::Up, "blk.{l}.ffn_up.weight"),
    (Role::UpBias, "blk.{l}.ffn_up.bias"),
    (Role::Down, "blk.{l}.ffn_down.weight"),
    (Role::DownBias, "blk.{l}.ffn_down.bias"),
    (Role::Router, "blk.{l}.ffn_gate_inp.weight"),
    (Role::RouterBias, "blk.{l}.ffn_gate_inp.bias"),
    (Role::ExpertGate, "blk.{l}.ffn_gate_exps.weight"),
    (Role::ExpertGateBias, "blk.{l}.ffn_gate_exps.bias"),
    (Role::ExpertUp, "blk.{l}.ffn_up_exps.weight"),
    (Role::ExpertUpBias, "blk.{l}.ffn_up_exps.bias"),
    (Role::ExpertDown, "blk.{l}.ffn_down_exps.weight"),
    (Role::ExpertDownBias, "blk.{l}.ffn_down_exps.bias"),
    (Role::QueryNorm, "blk.{l}.attn_q_norm.weight"),
    (Role::KeyNorm, "blk.{l}.attn_k_norm.weight"),
    (Role::Sinks, "blk.{l}.attn_sinks.weight"),
    (Role::QueryDown, "blk.{l}.attn_q_a.weight"),
    (Role::QueryDownNorm, "blk.{l}.attn_q_a_norm.weight"),
    (Role::QueryUp, "blk.{l}.attn_q_b.weight"),
    (Role::LatentDown, "blk.{l}.attn_kv_a_mqa.weight"),
    (Role::LatentNorm, "blk.{l}.attn_kv_a_norm.weight"),
    (Role::LatentUp, "blk.{l}.attn_kv_b.weight"),
    (Role::LatentKey, "blk.{l}.attn_k_b.weight"),
    (Role::LatentValue, "blk.{l}.attn_v_b.weight"),
    (Role::RouterCorrection, "blk.{l}.exp_probs_b.bias"),
    (Role::SharedGate, "blk.{l}.ffn_gate_shexp.weight"),
    (Role::SharedUp, "blk.{l}.ffn_up_shexp.weight"),
    (Role::SharedDown, "blk.{l}.ffn_down_shexp.weight"),
    // Before experts were put together.
    (Role::ExpertGate, "blk.{l}.ffn_gate.{n}.weight"),
    (Role::ExpertUp, "blk.{l}.ffn_up.{n}.weight"),
    (Role::ExpertDown, "blk.{l}.ffn_down.{n}.weight"),
    (Role::RopeFactors, "rope_freqs.weight"),
    (Role::RopeShort, "rope_factors_short.weight"),
    (Role::RopeLong, "rope_factors_long.weight"),
];
