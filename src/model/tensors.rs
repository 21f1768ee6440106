//! A model's tensors, whatever they are made of: first lists of parts of files, then what a backend made of these. The tree is
//! walked by one function, so that planning and loading meet the same tensors in the same order.
#![forbid(unsafe_code)]

use super::parts::Part;
use crate::backend::{Backend, Expert};
use crate::error::LoadError;

/// What a model is made of.
pub(super) trait Kind {
    type Matrix;
    type Vector;
    type Expert;
}

/// See the module's documentation.
pub(super) struct Tensors<K: Kind> {
    pub(super) embed: K::Matrix,
    pub(super) positions: Option<K::Matrix>,
    pub(super) layers: Vec<Layer<K>>,
    pub(super) final_norm: Norm<K>,
    /// None where the embedding serves.
    pub(super) head: Option<K::Matrix>,
    pub(super) head_bias: Option<K::Vector>,
}

/// A layer's tensors. Which norms there are, the layer's wiring says.
pub(super) struct Layer<K: Kind> {
    pub(super) attn_in: Option<Norm<K>>,
    pub(super) attn: Attn<K>,
    pub(super) out: K::Matrix,
    pub(super) out_bias: Option<K::Vector>,
    pub(super) sinks: Option<K::Vector>,
    pub(super) attn_out: Option<Norm<K>>,
    pub(super) ffn_in: Option<Norm<K>>,
    pub(super) ffn: FeedForward<K>,
    pub(super) ffn_out: Option<Norm<K>>,
}

/// A norm.
pub(super) struct Norm<K: Kind> {
    pub(super) weight: K::Vector,
    pub(super) bias: Option<K::Vector>,
}

/// How queries, keys and values come about.
pub(super) enum Attn<K: Kind> {
    Heads {
        /// Queries, keys, values, one after the other.
        qkv: K::Matrix,
        qkv_bias: Option<K::Vector>,
        /// One for all heads, or one for each.
        q_norm: Vec<K::Vector>,
        k_norm: Vec<K::Vector>,
    },
    Latent {
        /// From hidden states to the queries' latent, and its norm.
        q_down: Option<(K::Matrix, K::Vector)>,
        /// To the queries; of each head, the rotated part comes first.
        q: K::Matrix,
        /// To the latent and the rotated part of the key.
        kv: K::Matrix,
        kv_norm: K::Vector,
        /// For each head, from its query to one in the space of the cached keys.
        into: Vec<K::Matrix>,
        /// For each head, from the latent to its value.
        out_of: Vec<K::Matrix>,
    },
}

/// The feed-forward part.
pub(super) enum FeedForward<K: Kind> {
    Gated(Gated<K>),
    Plain {
        up: K::Matrix,
        up_bias: Option<K::Vector>,
        down: K::Matrix,
        down_bias: Option<K::Vector>,
    },
    Moe {
        router: K::Matrix,
        router_bias: Option<K::Vector>,
        correction: Option<K::Vector>,
        experts: Vec<K::Expert>,
        shared: Option<Gated<K>>,
    },
}

/// A gated feed-forward, or an expert.
pub(super) struct Gated<K: Kind> {
    /// Gate, then up.
    pub(super) gate_up: K::Matrix,
    pub(super) gate_up_bias: Option<K::Vector>,
    pub(super) down: K::Matrix,
    pub(super) down_bias: Option<K::Vector>,
}

/// Tensors as lists of parts.
pub(super) struct Listed;

impl Kind for Listed {
    type Matrix = Vec<Part>;
    type Vector = Vector;
    type Expert = Gated<Listed>;
}

/// A vector as a list of parts, or `len` ones where there are none.
pub(super) struct Vector {
    pub(super) parts: Vec<Part>,
    pub(super) len: usize,
    /// Added to each value.
    pub(super) plus: f32,
}

/// Tensors on a backend.
pub(super) struct Loaded<B>(std::marker::PhantomData<B>);

impl<B: Backend> Kind for Loaded<B> {
    type Matrix = B::Weight;
    type Vector = B::Buf;
    type Expert = Expert<B>;
}

/// A model's weights on a backend.
pub(super) type Weights<B> = Tensors<Loaded<B>>;

/// What becomes of a matrix, a vector and an expert.
pub(super) trait Visit {
    type To: Kind;
    fn matrix(&mut self, parts: &[Part]) -> Result<<Self::To as Kind>::Matrix, LoadError>;
    fn vector(&mut self, vector: &Vector) -> Result<<Self::To as Kind>::Vector, LoadError>;
    fn expert(&mut self, expert: &Gated<Listed>) -> Result<<Self::To as Kind>::Expert, LoadError>;
}

impl Tensors<Listed> {
    /// Meets every tensor in the order in which the forward pass does.
    pub(super) fn visit<X: Visit>(&self, x: &mut X) -> Result<Tensors<X::To>, LoadError> {
        Ok(Tensors {
            embed: x.matrix(&self.embed)?,
            positions: self.positions.as_ref().map(|p| x.matrix(p)).transpose()?,
            layers: self.layers.iter().map(|l| l.visit(x)).collect::<Result<_, _>>()?,
            final_norm: self.final_norm.visit(x)?,
            head: self.head.as_ref().map(|h| x.matrix(h)).transpose()?,
            head_bias: optional(x, self.head_bias.as_ref())?,
        })
    }
}

impl Layer<Listed> {
    fn visit<X: Visit>(&self, x: &mut X) -> Result<Layer<X::To>, LoadError> {
        let norm = |x: &mut X, norm: &Option<Norm<Listed>>| norm.as_ref().map(|n| n.visit(x)).transpose();
        Ok(Layer {
            attn_in: norm(x, &self.attn_in)?,
            attn: self.attn.visit(x)?,
            out: x.matrix(&self.out)?,
            out_bias: optional(x, self.out_bias.as_ref())?,
            sinks: optional(x, self.sinks.as_ref())?,
            attn_out: norm(x, &self.attn_out)?,
            ffn_in: norm(x, &self.ffn_in)?,
            ffn: self.ffn.visit(x)?,
            ffn_out: norm(x, &self.ffn_out)?,
        })
    }
}

impl Norm<Listed> {
    fn visit<X: Visit>(&self, x: &mut X) -> Result<Norm<X::To>, LoadError> {
        Ok(Norm { weight: x.vector(&self.weight)?, bias: optional(x, self.bias.as_ref())? })
    }
}

impl Attn<Listed> {
    fn visit<X: Visit>(&self, x: &mut X) -> Result<Attn<X::To>, LoadError> {
        let vectors = |x: &mut X, list: &[Vector]| list.iter().map(|v| x.vector(v)).collect::<Result<Vec<_>, _>>();
        let matrices = |x: &mut X, list: &[Vec<Part>]| list.iter().map(|m| x.matrix(m)).collect::<Result<Vec<_>, _>>();
        Ok(match self {
            Attn::Heads { qkv, qkv_bias, q_norm, k_norm } => Attn::Heads {
                qkv: x.matrix(qkv)?,
                qkv_bias: optional(x, qkv_bias.as_ref())?,
                q_norm: vectors(x, q_norm)?,
                k_norm: vectors(x, k_norm)?,
            },
            Attn::Latent { q_down, q, kv, kv_norm, into, out_of } => Attn::Latent {
                q_down: match q_down {
                    Some((matrix, norm)) => Some((x.matrix(matrix)?, x.vector(norm)?)),
                    None => None,
                },
                q: x.matrix(q)?,
                kv: x.matrix(kv)?,
                kv_norm: x.vector(kv_norm)?,
                into: matrices(x, into)?,
                out_of: matrices(x, out_of)?,
            },
        })
    }
}

impl FeedForward<Listed> {
    fn visit<X: Visit>(&self, x: &mut X) -> Result<FeedForward<X::To>, LoadError> {
        Ok(match self {
            FeedForward::Gated(gated) => FeedForward::Gated(gated.visit(x)?),
            FeedForward::Plain { up, up_bias, down, down_bias } => FeedForward::Plain {
                up: x.matrix(up)?,
                up_bias: optional(x, up_bias.as_ref())?,
                down: x.matrix(down)?,
                down_bias: optional(x, down_bias.as_ref())?,
            },
            FeedForward::Moe { router, router_bias, correction, experts, shared } => FeedForward::Moe {
                router: x.matrix(router)?,
                router_bias: optional(x, router_bias.as_ref())?,
                correction: optional(x, correction.as_ref())?,
                experts: experts.iter().map(|e| x.expert(e)).collect::<Result<_, _>>()?,
                shared: shared.as_ref().map(|s| s.visit(x)).transpose()?,
            },
        })
    }
}

impl Gated<Listed> {
    pub(super) fn visit<X: Visit>(&self, x: &mut X) -> Result<Gated<X::To>, LoadError> {
        Ok(Gated {
            gate_up: x.matrix(&self.gate_up)?,
            gate_up_bias: optional(x, self.gate_up_bias.as_ref())?,
            down: x.matrix(&self.down)?,
            down_bias: optional(x, self.down_bias.as_ref())?,
        })
    }
}

fn optional<X: Visit>(x: &mut X, vector: Option<&Vector>) -> Result<Option<<X::To as Kind>::Vector>, LoadError> {
    vector.map(|v| x.vector(v)).transpose()
}
