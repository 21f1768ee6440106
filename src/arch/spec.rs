//! A model as plain numbers: what the forward pass reads, whatever family or file the numbers came from.
#![forbid(unsafe_code)]

use super::rope::RopeSpec;

/// Everything the forward pass needs to know about a model, layer by layer.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct ModelSpec {
    /// The family's name.
    pub arch: &'static str,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Tokens the model was made for, positions 0 to `context - 1`.
    pub context: usize,
    /// Factor on the embeddings.
    pub embed_scale: f32,
    /// Learned absolute positions are added to them.
    pub position_table: bool,
    /// The layers, in order.
    pub layers: Vec<LayerSpec>,
    /// Rotary tables; [`AttnSpec::rope`] is an index into them.
    pub ropes: Vec<RopeSpec>,
    /// Norm before the head.
    pub final_norm: NormSpec,
    /// From hidden states to logits.
    pub head: HeadSpec,
}

/// One layer.
#[derive(Clone, PartialEq, Debug)]
pub struct LayerSpec {
    /// Attention.
    pub attn: AttnSpec,
    /// Feed-forward.
    pub ffn: Ffn,
    /// How both join the residual stream.
    pub wiring: Wiring,
}

/// Attention of one layer.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct AttnSpec {
    /// Query heads.
    pub heads: usize,
    /// What the cache holds for a token.
    pub layout: KvLayout,
    /// Rotary table, or none.
    pub rope: Option<usize>,
    /// Factor on q times k, before the softmax.
    pub scale: f32,
    /// A token sees itself and the `window - 1` tokens before it.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` on the scores.
    pub softcap: Option<f32>,
    /// Norm on latents, where the layout has them.
    pub latent_norm: Option<NormSpec>,
    /// Norms on q and k before the rotation.
    pub qk_norm: Option<QkNorm>,
    /// One more score for each head in the softmax.
    pub sinks: bool,
    /// Bias on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub out_bias: bool,
}

/// Norms on queries and keys.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct QkNorm {
    /// Which.
    pub norm: NormSpec,
    /// Over what.
    pub span: NormSpan,
}

/// What one norm of queries or keys runs over, and whose weights it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NormSpan {
    /// Each head, with the same weights.
    Head,
    /// Each head, with weights of its own.
    OwnHead,
    /// All heads together.
    All,
}

/// What the cache holds for a token and layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KvLayout {
    /// Keys and values of each head: MHA, GQA and MQA by `kv_heads` alone.
    Heads {
        /// Key and value heads; divides the query heads.
        kv_heads: usize,
        /// Width of a head.
        head_dim: usize,
    },
    /// One latent vector for all heads and a rotated part of the key: MLA (DeepSeek-AI, 2024). Keys and values are never
    /// expanded: queries are carried into the latent space, results out of it.
    Latent {
        /// Width of the latent.
        rank: usize,
        /// Width of the rotated part.
        rope_dim: usize,
        /// Width of a head's part of the query that is not rotated.
        nope_dim: usize,
        /// Width of a head's value.
        value_dim: usize,
        /// Width of the query's latent, or none.
        q_rank: Option<usize>,
    },
}

/// What the attention kernels see instead of [`KvLayout`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttnDims {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a query or key head.
    pub qk_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// A value is the first `v_dim` of its key, and the cache holds keys alone.
    pub v_in_k: bool,
}

impl AttnSpec {
    /// The kernels' view.
    pub fn dims(&self) -> AttnDims {
        match self.layout {
            KvLayout::Heads { kv_heads, head_dim } => {
                AttnDims { heads: self.heads, kv_heads, qk_dim: head_dim, v_dim: head_dim, v_in_k: false }
            }
            KvLayout::Latent { rank, rope_dim, .. } => {
                AttnDims { heads: self.heads, kv_heads: 1, qk_dim: rank + rope_dim, v_dim: rank, v_in_k: true }
            }
        }
    }
}

/// Feed-forward part of a layer.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Ffn {
    /// `down(glu(gate(x), up(x)))`.
    Gated {
        /// Width inside.
        intermediate: usize,
        /// How gate and up meet.
        glu: Glu,
        /// Biases on all three.
        bias: bool,
    },
    /// `down(act(up(x)))`.
    Plain {
        /// Width inside.
        intermediate: usize,
        /// In the middle.
        act: Activation,
        /// Biases on both.
        bias: bool,
    },
    /// Some of many gated experts for each token, and perhaps one that all tokens share.
    Moe {
        /// How experts are chosen.
        route: RouteSpec,
        /// Width inside an expert.
        intermediate: usize,
        /// How gate and up meet.
        glu: Glu,
        /// Biases on the router and the experts' matrices.
        bias: bool,
        /// Width of the shared expert, 0 for none.
        shared: usize,
    },
}

/// How the two halves of a gated feed-forward meet.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Glu {
    /// `act(gate) * up`.
    Act(Activation),
    /// `(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)` with `g = min(gate, limit)` (gpt-oss).
    Clamped {
        /// In the sigmoid.
        alpha: f32,
        /// Of both halves.
        limit: f32,
    },
}

/// How a token's experts are chosen and weighed.
#[derive(Clone, PartialEq, Debug)]
pub struct RouteSpec {
    /// Experts there are.
    pub experts: usize,
    /// Experts a token.
    pub top_k: usize,
    /// From logits to scores.
    pub score: Score,
    /// Experts in as many groups, of which only some may be chosen from.
    pub groups: Option<Groups>,
    /// A bias of each expert's is added to the scores for choosing alone.
    pub correction: bool,
    /// The chosen weights are made to add up to 1.
    pub normalize: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// From router logits to scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Score {
    /// Softmax over all experts, then the choice.
    Softmax,
    /// The choice by logits, then softmax over the chosen.
    SoftmaxOfChosen,
    /// Sigmoid of each.
    Sigmoid,
}

/// Groups of experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Groups {
    /// Groups; divides the experts.
    pub count: usize,
    /// Groups that a token may choose from.
    pub top: usize,
    /// A group counts as the sum of its best so many scores.
    pub best: usize,
}

/// How attention and feed-forward join the residual stream x. Where a norm is absent, its input passes as it is.
///
/// ```text
/// one after the other:  x += scale * attn_out(attention(attn_in(x)));  x += scale * ffn_out(ffn(ffn_in(x)))
/// side by side:         x += attention(attn_in(x)) + ffn(ffn_in(x)), or ffn(attn_in(x)) where ffn_in is absent
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct Wiring {
    /// Before attention.
    pub attn_in: Option<NormSpec>,
    /// On attention's result.
    pub attn_out: Option<NormSpec>,
    /// Before the feed-forward.
    pub ffn_in: Option<NormSpec>,
    /// On the feed-forward's result.
    pub ffn_out: Option<NormSpec>,
    /// Attention and feed-forward read the same x.
    pub parallel: bool,
    /// On both results.
    pub residual_scale: f32,
}

impl Wiring {
    /// `x += norm(attention(x)); x += norm(ffn(x))`.
    pub fn post_norm(norm: NormSpec) -> Self {
        Wiring { attn_in: None, attn_out: Some(norm), ffn_in: None, ffn_out: Some(norm), parallel: false, residual_scale: 1.0 }
    }

    /// `x += attention(norm(x)); x += ffn(norm(x))`.
    pub fn pre_norm(norm: NormSpec) -> Self {
        Wiring { attn_in: Some(norm), attn_out: None, ffn_in: Some(norm), ffn_out: None, parallel: false, residual_scale: 1.0 }
    }
}

/// A normalisation over the last dimension.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct NormSpec {
    /// Which.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
    /// Added to the weight as it is stored (1 for Gemma).
    pub plus: f32,
    /// There is a weight; 1 otherwise.
    pub weight: bool,
    /// There is a bias.
    pub bias: bool,
}

/// Kinds of normalisation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * w` (Zhang and Sennrich, 2019).
    Rms,
    /// `(x - mean) / sqrt(var + eps) * w + b` (Ba et al., 2016).
    Layer,
}

impl NormSpec {
    /// RMS norm.
    pub fn rms(eps: f32) -> Self {
        NormSpec { kind: NormKind::Rms, eps, plus: 0.0, weight: true, bias: false }
    }

    /// Layer norm with a bias.
    pub fn layer(eps: f32) -> Self {
        NormSpec { kind: NormKind::Layer, eps, plus: 0.0, weight: true, bias: true }
    }
}

/// Activation functions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)` by the error function.
    Gelu,
    /// The tanh form of gelu.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

/// From hidden states to logits.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct HeadSpec {
    /// The embedding matrix serves as head.
    pub tied: bool,
    /// There is a bias.
    pub bias: bool,
    /// Factor on the logits.
    pub scale: f32,
    /// `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
}
