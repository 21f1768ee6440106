//! The activations of a step: how wide each is, over all layers of a model, and how many bytes they have.
#![forbid(unsafe_code)]

use super::plan::ModelLimits;
use crate::arch::{Ffn, KvLayout, ModelSpec};
use crate::backend::{Backend, MoeShape};
use crate::error::{Error, reserved};

/// Activations, sized for the largest batch. What a model does not need has no length.
pub(super) struct Bufs<B: Backend> {
    /// Residual stream, `[T, hidden]`.
    pub(super) x: B::Buf,
    /// After a norm, `[T, hidden]`.
    pub(super) normed: B::Buf,
    /// What is next added to the residual stream, `[T, hidden]`.
    pub(super) delta: B::Buf,
    /// What attention reads: queries, and keys and values where the layout has heads of them.
    pub(super) qkv: B::Buf,
    /// Latents: of queries, `[T, q_rank]`.
    pub(super) q_latent: B::Buf,
    /// The heads' queries, then their results, outside the latent space.
    pub(super) outside: B::Buf,
    /// The latent and the rotated key, `[T, rank + rope_dim]`.
    pub(super) latent: B::Buf,
    /// Attention's result, `[T, heads * v_dim]`.
    pub(super) attn: B::Buf,
    /// `[T, 2 * intermediate]`.
    pub(super) gate_up: B::Buf,
    /// `[T, intermediate]`.
    pub(super) inner: B::Buf,
    /// Router logits, `[T, experts]`.
    pub(super) scores: B::Buf,
    /// The shared expert's result, `[T, hidden]`.
    pub(super) shared: B::Buf,
    /// Wanted rows of the final norm, `[R, hidden]`.
    pub(super) rows: B::Buf,
    /// `[R, vocab]`.
    pub(super) logits: B::Buf,
    /// Cosines and sines for each rotary table, `[T, rotary]`.
    pub(super) angles: Vec<B::Buf>,
    /// The same on the host, before they are sent.
    pub(super) host_angles: Vec<f32>,
    pub(super) frequencies: Vec<f32>,
}

impl<B: Backend> Bufs<B> {
    pub(super) fn new(be: &mut B, spec: &ModelSpec, limits: &ModelLimits) -> Result<Self, Error> {
        let w = Widths::of(spec);
        let (t, r) = (limits.batch.tokens, limits.batch.rows);
        let host = |len: usize| {
            let mut list = reserved("rotary angles", len)?;
            list.resize(len, 0.0);
            Ok::<_, Error>(list)
        };
        let mut buf = |rows: usize, width: usize| be.buf(rows.saturating_mul(width));
        Ok(Bufs {
            x: buf(t, spec.hidden)?,
            normed: buf(t, spec.hidden)?,
            delta: buf(t, spec.hidden)?,
            qkv: buf(t, w.qkv)?,
            q_latent: buf(t, w.q_latent)?,
            outside: buf(t, w.outside)?,
            latent: buf(t, w.latent)?,
            attn: buf(t, w.attn)?,
            gate_up: buf(t, w.gate_up)?,
            inner: buf(t, w.inner)?,
            scores: buf(t, w.moe.experts)?,
            shared: buf(t, w.shared)?,
            rows: buf(r, spec.hidden)?,
            logits: buf(r, spec.vocab)?,
            angles: spec.ropes.iter().map(|rope| buf(t, rope.rotary)).collect::<Result<_, _>>()?,
            host_angles: host(t.saturating_mul(w.rotary))?,
            frequencies: host(w.rotary / 2)?,
        })
    }
}

/// The widest of each kind of row over all layers.
#[derive(Clone, Copy, Default)]
pub(super) struct Widths {
    qkv: usize,
    q_latent: usize,
    outside: usize,
    latent: usize,
    attn: usize,
    gate_up: usize,
    inner: usize,
    shared: usize,
    rotary: usize,
    /// The largest K of any matrix.
    pub(super) max_columns: usize,
    /// The largest mixture of experts.
    pub(super) moe: MoeShape,
}

impl Widths {
    pub(super) fn of(spec: &ModelSpec) -> Self {
        let mut w = Widths { max_columns: spec.hidden, ..Widths::default() };
        let most = |to: &mut usize, n: usize| *to = n.max(*to);
        for rope in &spec.ropes {
            most(&mut w.rotary, rope.rotary);
        }
        for layer in &spec.layers {
            let d = layer.attn.dims();
            most(&mut w.attn, d.heads * d.v_dim);
            match layer.attn.layout {
                KvLayout::Heads { .. } => {
                    most(&mut w.qkv, d.heads * d.qk_dim + d.kv_heads * (d.qk_dim + d.v_dim));
                    most(&mut w.max_columns, d.heads * d.v_dim);
                }
                KvLayout::Latent { rank, rope_dim, nope_dim, value_dim, q_rank } => {
                    most(&mut w.qkv, d.heads * d.qk_dim);
                    most(&mut w.q_latent, q_rank.unwrap_or(0));
                    most(&mut w.outside, d.heads * (nope_dim + rope_dim).max(value_dim));
                    most(&mut w.latent, rank + rope_dim);
                    for columns in [rank, nope_dim + rope_dim, d.heads * value_dim, q_rank.unwrap_or(0)] {
                        most(&mut w.max_columns, columns);
                    }
                }
            }
            match &layer.ffn {
                Ffn::Gated { intermediate, .. } => w.gated(*intermediate),
                Ffn::Plain { intermediate, .. } => {
                    most(&mut w.inner, *intermediate);
                    most(&mut w.max_columns, *intermediate);
                }
                Ffn::Moe { route, intermediate, shared, .. } => {
                    most(&mut w.moe.experts, route.experts);
                    most(&mut w.moe.top_k, route.top_k);
                    most(&mut w.moe.intermediate, *intermediate);
                    most(&mut w.moe.hidden, spec.hidden);
                    most(&mut w.max_columns, *intermediate);
                    if *shared > 0 {
                        w.gated(*shared);
                        most(&mut w.shared, spec.hidden);
                    }
                }
            }
        }
        w
    }

    fn gated(&mut self, intermediate: usize) {
        self.gate_up = self.gate_up.max(2 * intermediate);
        self.inner = self.inner.max(intermediate);
        self.max_columns = self.max_columns.max(intermediate);
    }
}

/// Bytes of the activations, as [`Bufs`] allocates them.
pub(super) fn activation_bytes(spec: &ModelSpec, limits: &ModelLimits) -> u64 {
    let (w, t, r) = (Widths::of(spec), limits.batch.tokens as u64, limits.batch.rows as u64);
    let angles: usize = spec.ropes.iter().map(|r| r.rotary).sum::<usize>() + w.rotary;
    let attention = w.qkv + w.q_latent + w.outside + w.latent + w.attn + angles;
    let feed_forward = w.gate_up + w.inner + w.moe.experts + w.shared;
    let per_token = 3 * spec.hidden + attention + feed_forward;
    4 * (t * per_token as u64 + r * (spec.hidden + spec.vocab) as u64 + w.rotary as u64 / 2)
}
