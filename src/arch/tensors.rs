//! What a tensor is for, and what files call it. `{l}` in a template stands for the layer.
#![forbid(unsafe_code)]

use std::fmt;

/// What a tensor is for. Linear weights are `[outputs, inputs]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Role {
    /// Token embedding, `[vocab, hidden]`.
    Embed,
    /// Weight of the norm before the head.
    FinalNorm,
    /// Output matrix, `[vocab, hidden]`.
    Head,
    /// Weight of the norm before attention.
    AttnNorm,
    /// Query projection.
    Query,
    /// Key projection.
    Key,
    /// Value projection.
    Value,
    /// Bias of the query projection.
    QueryBias,
    /// Bias of the key projection.
    KeyBias,
    /// Bias of the value projection.
    ValueBias,
    /// Output projection of attention.
    AttnOut,
    /// Its bias.
    AttnOutBias,
    /// Weight of the norm before the feed-forward.
    FfnNorm,
    /// Gate projection.
    Gate,
    /// Up projection.
    Up,
    /// Down projection.
    Down,
    /// Bias of the gate projection.
    GateBias,
    /// Bias of the up projection.
    UpBias,
    /// Bias of the down projection.
    DownBias,
    /// Divisors of the rotary frequencies.
    RopeFactors,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// Names in published safetensors of gated, pre-norm models.
pub(super) const HF_GATED: &[(Role, &str)] = &[
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

/// Names in GGUF files, the same for all families.
pub(super) const GGUF: &[(Role, &str)] = &[
    (Role::Embed, "token_embd.weight"),
    (Role::FinalNorm, "output_norm.weight"),
    (Role::Head, "output.weight"),
    (Role::AttnNorm, "blk.{l}.attn_norm.weight"),
    (Role::Query, "blk.{l}.attn_q.weight"),
    (Role::Key, "blk.{l}.attn_k.weight"),
    (Role::Value, "blk.{l}.attn_v.weight"),
    (Role::QueryBias, "blk.{l}.attn_q.bias"),
    (Role::KeyBias, "blk.{l}.attn_k.bias"),
    (Role::ValueBias, "blk.{l}.attn_v.bias"),
    (Role::AttnOut, "blk.{l}.attn_output.weight"),
    (Role::AttnOutBias, "blk.{l}.attn_output.bias"),
    (Role::FfnNorm, "blk.{l}.ffn_norm.weight"),
    (Role::Gate, "blk.{l}.ffn_gate.weight"),
    (Role::Up, "blk.{l}.ffn_up.weight"),
    (Role::Down, "blk.{l}.ffn_down.weight"),
    (Role::GateBias, "blk.{l}.ffn_gate.bias"),
    (Role::UpBias, "blk.{l}.ffn_up.bias"),
    (Role::DownBias, "blk.{l}.ffn_down.bias"),
    (Role::RopeFactors, "rope_freqs.weight"),
];
