//! The forward pass: a direct walk over the layers of a [`ModelSpec`], on any backend.
//!
//! ```text
//! x = embed(tokens)
//! for each layer:   n = norm(x); q k v = n * Wqkv; rope; write k, v; d = attention * Wo
//!                   n = norm(x += d); d = (act(n * Wgate) * (n * Wup)) * Wdown; x += d at the next norm
//! logits = norm(x)[rows wanted] * Whead
//! ```
//!
//! Invariant: between two stages everything lives in the buffers, so a step can pause there and go on later.
#![forbid(unsafe_code)]

use super::load::Weights;
use super::plan::ModelLimits;
use super::{Logits, Model, Progress, Want};
use crate::arch::{AttnDims, Ffn, ModelSpec, NormSpec, Wiring, angles};
use crate::backend::{AttnArgs, Backend, Heads};
use crate::batch::{Batch, BatchLimits};
use crate::error::{Error, RunError, reserved};
use crate::ids::BlockId;

/// A decoder-only transformer on backend `B`, with its weights and its KV cache.
pub struct Transformer<B: Backend> {
    backend: B,
    spec: ModelSpec,
    weights: Weights<B>,
    limits: ModelLimits,
    kv: B::Kv,
    step: B::Step,
    bufs: Bufs<B>,
    run: Option<Running>,
}

/// Activations, sized for the largest batch.
struct Bufs<B: Backend> {
    /// Residual stream, `[T, hidden]`.
    x: B::Buf,
    /// After a norm, `[T, hidden]`.
    normed: B::Buf,
    /// What the next norm adds to the residual stream, `[T, hidden]`.
    delta: B::Buf,
    /// `[T, (heads + 2 kv_heads) * dim]`.
    qkv: B::Buf,
    /// `[T, heads * dim]`.
    attn: B::Buf,
    /// `[T, 2 * intermediate]`.
    gate_up: B::Buf,
    /// `[T, intermediate]`.
    inner: B::Buf,
    /// Wanted rows of the final norm, `[R, hidden]`.
    rows: B::Buf,
    /// `[R, vocab]`.
    logits: B::Buf,
    /// Cosines and sines for each rotary table, `[T, rotary]`.
    angles: Vec<B::Buf>,
    /// The same on the host, before they are sent.
    host_angles: Vec<f32>,
    frequencies: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Running {
    stage: Stage,
    tokens: usize,
    rows: usize,
    want: Want,
    /// A delta waits to be added by the next norm.
    pending: bool,
}

#[derive(Clone, Copy)]
enum Stage {
    Embed,
    Attention(usize),
    FeedForward(usize),
    Head,
}

impl<B: Backend> Transformer<B> {
    pub(super) fn new(mut backend: B, spec: ModelSpec, weights: Weights<B>, limits: ModelLimits) -> Result<Self, Error> {
        let shape = limits.kv_shape(&spec);
        let kv = backend.kv(&shape)?;
        let step = backend.step(&limits.batch, Widths::max_columns(&spec), &shape)?;
        let bufs = Bufs::new(&mut backend, &spec, &limits)?;
        Ok(Transformer { backend, spec, weights, limits, kv, step, bufs, run: None })
    }

    /// What the buffers, the cache and the embedding hold is all that a batch may name. Slots lie in blocks, so blocks will do.
    fn check(&self, batch: &Batch) -> Result<(), RunError> {
        let most = self.limits.batch;
        for (what, found, limit) in [
            ("tokens", batch.tokens().len(), most.tokens),
            ("sequences", batch.seqs(), most.seqs),
            ("block table entries", batch.blocks().len(), most.blocks),
            ("rows", batch.rows().len(), most.rows),
        ] {
            if found > limit {
                return Err(RunError::BatchTooLarge { what, found, limit });
            }
        }
        if batch.block_size() != self.limits.block_size {
            return Err(RunError::bad_batch("block size", self.limits.block_size, batch.block_size()));
        }
        let vocab = self.spec.vocab;
        if let Some(token) = batch.tokens().iter().find(|token| **token as usize >= vocab) {
            return Err(RunError::bad_batch("token", format_args!("below {vocab}"), token));
        }
        self.check_blocks(batch.blocks().iter())
    }

    fn check_blocks<'a>(&self, mut blocks: impl Iterator<Item = &'a BlockId>) -> Result<(), RunError> {
        match blocks.find(|block| block.index() >= self.limits.blocks) {
            Some(block) => Err(RunError::bad_batch("block", format_args!("below {}", self.limits.blocks), block.0)),
            None => Ok(()),
        }
    }

    /// Cosines and sines of the batch's positions, for each rotary table.
    fn lay_out_angles(&mut self, batch: &Batch) -> Result<(), RunError> {
        for (rope, buf) in self.spec.ropes.iter().zip(&mut self.bufs.angles) {
            let frequencies = &mut self.bufs.frequencies[..rope.rotary / 2];
            let mut known = None;
            for s in 0..batch.seqs() {
                let total = batch.totals()[s] as usize;
                if known != Some(rope.regime(total)) {
                    known = Some(rope.regime(total));
                    rope.frequencies(total, frequencies);
                }
                for t in batch.q_indptr()[s] as usize..batch.q_indptr()[s + 1] as usize {
                    let out = &mut self.bufs.host_angles[t * rope.rotary..][..rope.rotary];
                    angles(frequencies, batch.positions()[t], rope.attention_factor(), out);
                }
            }
            self.backend.upload(&self.bufs.host_angles[..batch.tokens().len() * rope.rotary], buf)?;
        }
        Ok(())
    }

    fn embed(&mut self) -> Result<(), RunError> {
        self.backend.embed(&self.step, &self.weights.embed, self.spec.embed_scale, &mut self.bufs.x)
    }

    fn attention(&mut self, l: usize, run: &mut Running) -> Result<(), RunError> {
        let Self { backend: be, spec, weights, kv, step, bufs, .. } = self;
        let (layer, w) = (&spec.layers[l], &weights.layers[l]);
        let Wiring::PreNorm { attn: norm, .. } = &layer.wiring;
        let t = run.tokens;
        let delta = run.pending.then_some(&bufs.delta);
        be.add_norm(t, spec.hidden, &mut bufs.x, delta, norm, &w.attn_norm, None, &mut bufs.normed)?;
        be.linear(t, &bufs.normed, &w.qkv, w.qkv_bias.as_ref(), step, &mut bufs.qkv)?;
        let dims = layer.attn.dims();
        let [q, k, v] = split_qkv(&dims);
        if let Some(r) = layer.attn.rope {
            let rope = &spec.ropes[r];
            // q and k lie side by side: one call turns both.
            let both = Heads { heads: q.heads + k.heads, ..q };
            be.rope(t, &mut bufs.qkv, both, &bufs.angles[r], rope.rotary, rope.style)?;
        }
        be.kv_write(step, &bufs.qkv, k, v, kv, l)?;
        let args = AttnArgs { dims, scale: layer.attn.scale, window: layer.attn.window, softcap: layer.attn.softcap };
        be.attention(step, &args, &bufs.qkv, q, kv, l, &mut bufs.attn)?;
        be.linear(t, &bufs.attn, &w.out, w.out_bias.as_ref(), step, &mut bufs.delta)?;
        run.pending = true;
        Ok(())
    }

    fn feed_forward(&mut self, l: usize, run: &Running) -> Result<(), RunError> {
        let Self { backend: be, spec, weights, step, bufs, .. } = self;
        let (layer, w) = (&spec.layers[l], &weights.layers[l]);
        let Wiring::PreNorm { ffn: norm, .. } = &layer.wiring;
        let Ffn::Gated { intermediate, act, .. } = &layer.ffn;
        let t = run.tokens;
        be.add_norm(t, spec.hidden, &mut bufs.x, Some(&bufs.delta), norm, &w.ffn_norm, None, &mut bufs.normed)?;
        be.linear(t, &bufs.normed, &w.gate_up, w.gate_up_bias.as_ref(), step, &mut bufs.gate_up)?;
        be.gate(t, *intermediate, *act, &bufs.gate_up, &mut bufs.inner)?;
        be.linear(t, &bufs.inner, &w.down, w.down_bias.as_ref(), step, &mut bufs.delta)
    }

    fn head(&mut self, run: &Running, out: &mut Logits) -> Result<(), RunError> {
        let Self { backend: be, spec, weights, step, bufs, .. } = self;
        out.reset(run.rows, spec.vocab, spec.hidden, run.want);
        if run.rows == 0 {
            return Ok(());
        }
        let norm: &NormSpec = &spec.final_norm;
        let delta = run.pending.then_some(&bufs.delta);
        be.add_norm(run.tokens, spec.hidden, &mut bufs.x, delta, norm, &weights.final_norm, None, &mut bufs.normed)?;
        be.gather(step, spec.hidden, &bufs.normed, &mut bufs.rows)?;
        let (logits, hidden) = out.all_mut();
        if run.want.hidden {
            be.download(&bufs.rows, hidden)?;
        }
        if run.want.logits {
            let head = weights.head.as_ref().unwrap_or(&weights.embed);
            be.linear(run.rows, &bufs.rows, head, None, step, &mut bufs.logits)?;
            if spec.head.scale != 1.0 || spec.head.softcap.is_some() {
                be.scale_cap(run.rows * spec.vocab, spec.head.scale, spec.head.softcap, &mut bufs.logits)?;
            }
            be.download(&bufs.logits, logits)?;
        }
        Ok(())
    }
}

impl<B: Backend> Model for Transformer<B> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn limits(&self) -> BatchLimits {
        self.limits.batch
    }

    fn block_size(&self) -> usize {
        self.limits.block_size
    }

    fn blocks(&self) -> usize {
        self.limits.blocks
    }

    fn begin(&mut self, batch: &Batch, want: Want) -> Result<(), RunError> {
        self.run = None;
        self.check(batch)?;
        if batch.is_empty() {
            return Ok(());
        }
        self.lay_out_angles(batch)?;
        self.backend.begin(batch, &mut self.step)?;
        let (tokens, rows) = (batch.tokens().len(), batch.rows().len());
        self.run = Some(Running { stage: Stage::Embed, tokens, rows, want, pending: false });
        Ok(())
    }

    fn advance(&mut self, pause: &mut dyn FnMut() -> bool, logits: &mut Logits) -> Result<Progress, RunError> {
        // An error leaves no step behind.
        while let Some(mut run) = self.run.take() {
            run.stage = match run.stage {
                Stage::Embed => {
                    self.embed()?;
                    Stage::Attention(0)
                }
                Stage::Attention(l) => {
                    self.attention(l, &mut run)?;
                    Stage::FeedForward(l)
                }
                Stage::FeedForward(l) => {
                    self.feed_forward(l, &run)?;
                    if l + 1 < self.spec.layers.len() { Stage::Attention(l + 1) } else { Stage::Head }
                }
                Stage::Head => {
                    self.head(&run, logits)?;
                    return Ok(Progress::Done);
                }
            };
            self.run = Some(run);
            if pause() {
                return Ok(Progress::Paused);
            }
        }
        Ok(Progress::Done)
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), RunError> {
        self.check_blocks(pairs.iter().flat_map(|(from, to)| [from, to]))?;
        self.backend.copy_blocks(&mut self.kv, pairs)
    }

    fn describe(&self) -> String {
        self.backend.describe()
    }

    fn tier(&self) -> &'static str {
        self.backend.tier()
    }
}

/// Where q, k and v lie in a row of the fused projection.
fn split_qkv(dims: &AttnDims) -> [Heads; 3] {
    let (q, k, v) = (dims.heads * dims.qk_dim, dims.kv_heads * dims.qk_dim, dims.kv_heads * dims.v_dim);
    let at = |offset, heads, dim| Heads { stride: q + k + v, offset, heads, dim };
    [at(0, dims.heads, dims.qk_dim), at(q, dims.kv_heads, dims.qk_dim), at(q + k, dims.kv_heads, dims.v_dim)]
}

impl<B: Backend> Bufs<B> {
    fn new(be: &mut B, spec: &ModelSpec, limits: &ModelLimits) -> Result<Self, Error> {
        let widths = Widths::of(spec);
        let (t, r) = (limits.batch.tokens, limits.batch.rows);
        let widest = spec.ropes.iter().map(|r| r.rotary).max().unwrap_or(0);
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
            qkv: buf(t, widths.qkv)?,
            attn: buf(t, widths.attn)?,
            gate_up: buf(t, 2 * widths.inner)?,
            inner: buf(t, widths.inner)?,
            rows: buf(r, spec.hidden)?,
            logits: buf(r, spec.vocab)?,
            angles: spec.ropes.iter().map(|rope| buf(t, rope.rotary)).collect::<Result<_, _>>()?,
            host_angles: host(t.saturating_mul(widest))?,
            frequencies: host(widest / 2)?,
        })
    }
}

/// The widest of each kind of row over all layers.
pub(super) struct Widths {
    pub(super) qkv: usize,
    pub(super) attn: usize,
    pub(super) inner: usize,
}

impl Widths {
    pub(super) fn of(spec: &ModelSpec) -> Self {
        let mut w = Widths { qkv: 0, attn: 0, inner: 0 };
        for layer in &spec.layers {
            let d = layer.attn.dims();
            let Ffn::Gated { intermediate, .. } = layer.ffn;
            w.qkv = w.qkv.max(d.heads * d.qk_dim + d.kv_heads * (d.qk_dim + d.v_dim));
            w.attn = w.attn.max(d.heads * d.v_dim);
            w.inner = w.inner.max(intermediate);
        }
        w
    }

    /// The largest K of any matrix.
    pub(super) fn max_columns(spec: &ModelSpec) -> usize {
        let w = Widths::of(spec);
        spec.hidden.max(w.attn).max(w.inner)
    }
}

/// Bytes of the activations, as [`Transformer`] allocates them.
pub(super) fn activation_bytes(spec: &ModelSpec, limits: &ModelLimits) -> u64 {
    let (w, t, r) = (Widths::of(spec), limits.batch.tokens as u64, limits.batch.rows as u64);
    let widest = spec.ropes.iter().map(|r| r.rotary).max().unwrap_or(0);
    let angles: usize = spec.ropes.iter().map(|r| r.rotary).sum::<usize>() + widest;
    let per_token = 3 * spec.hidden + w.qkv + w.attn + 3 * w.inner + angles;
    4 * (t * per_token as u64 + r * (spec.hidden + spec.vocab) as u64 + widest as u64 / 2)
}
