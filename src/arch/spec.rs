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
    /// Bias on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub out_bias: bool,
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
}

impl AttnSpec {
    /// The kernels' view.
    pub fn dims(&self) -> AttnDims {
        match self.layout {
            KvLayout::Heads { kv_heads, head_dim } => AttnDims { heads: self.heads, kv_heads, qk_dim: head_dim, v_dim: head_dim },
        }
    }
}

/// Feed-forward part of a layer.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Ffn {
    /// `down(act(gate(x)) * up(x))`.
    Gated {
        /// Width inside.
        intermediate: usize,
        /// On the gate.
        act: Activation,
        /// Biases on all three.
        bias: bool,
    },
}

/// How attention and feed-forward join the residual stream.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Wiring {
    /// `x += attn(norm(x)); x += ffn(norm(x))`.
    PreNorm {
        /// Before attention.
        attn: NormSpec,
        /// Before the feed-forward.
        ffn: NormSpec,
    },
}

/// A normalisation over the last dimension.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct NormSpec {
    /// Which.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
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
        NormSpec { kind: NormKind::Rms, eps }
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
    /// Factor on the logits.
    pub scale: f32,
    /// `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
}
