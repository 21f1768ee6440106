//! The forward pass: a direct walk over the layers of a [`ModelSpec`], on any backend. What differs from model to model is
//! looked up in the spec, never by family.
//!
//! ```text
//! x = embed(tokens) (+ positions)
//! for each layer:   d = attention(norm(x)), in heads or through a latent; d = norm(d)
//!                   x += d;  d = feed-forward(norm(x)), or of what attention read;  d = norm(d)
//!                   x += d at the next norm
//! logits = norm(x)[rows wanted] * Whead
//! ```
//!
//! Invariant: between two stages everything lives in the buffers, so a step can pause there and go on later.
#![forbid(unsafe_code)]

use super::buffers::{Bufs, Widths};
use super::plan::ModelLimits;
use super::tensors::{Attn, FeedForward, Loaded, Norm, Weights};
use super::{Logits, Model, Progress, Want};
use crate::arch::{AttnDims, Ffn, KvLayout, LayerSpec, ModelSpec, NormSpan, NormSpec, QkNorm, angles};
use crate::backend::{AttnArgs, Backend, Heads, MoeArgs};
use crate::batch::{Batch, BatchLimits};
use crate::dtype::KvDType;
use crate::error::{Error, RunError};
use crate::ids::{BlockCopy, BlockGroup, BlockId};

/// A decoder-only transformer on backend `B`, with its weights and its KV cache.
pub struct Transformer<B: Backend> {
    backend: B,
    spec: ModelSpec,
    weights: Weights<B>,
    limits: ModelLimits,
    /// Bytes of a token in each group.
    token_bytes: Vec<usize>,
    kv: B::Kv,
    step: B::Step,
    bufs: Bufs<B>,
    run: Option<Running>,
}

#[derive(Clone, Copy)]
struct Running {
    stage: Stage,
    tokens: usize,
    rows: usize,
    want: Want,
    /// Hidden states of all tokens are wanted too.
    states: bool,
    /// A delta waits to be added, with this factor.
    pending: Option<f32>,
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
        let token_bytes = (0..limits.groups.len()).map(|g| shape.token_bytes(g)).collect();
        let widths = Widths::of(&spec);
        let step = backend.step(&limits.batch, widths.max_columns, &shape, &widths.moe)?;
        let bufs = Bufs::new(&mut backend, &spec, &limits)?;
        Ok(Transformer { backend, spec, weights, limits, token_bytes, kv, step, bufs, run: None })
    }

    /// What the buffers, the cache and the embedding hold is all that a batch may name. That its blocks are its groups' is the
    /// batch's own promise.
    fn check(&self, batch: &Batch) -> Result<(), RunError> {
        let most = &self.limits.batch;
        for (what, found, limit) in [
            ("tokens", batch.tokens().len(), most.tokens),
            ("sequences", batch.seqs(), most.seqs),
            ("block table entries", batch.blocks(0).len(), most.blocks),
            ("rows", batch.rows().len(), most.rows),
        ] {
            if found > limit {
                return Err(RunError::BatchTooLarge { what, found, limit });
            }
        }
        if batch.block_size() != self.limits.block_size {
            return Err(RunError::bad_batch("block size", self.limits.block_size, batch.block_size()));
        }
        if batch.groups() != self.limits.groups {
            let (expected, found) = (format!("{:?}", self.limits.groups), format!("{:?}", batch.groups()));
            return Err(RunError::bad_batch("groups", expected, found));
        }
        let vocab = self.spec.vocab;
        if let Some(token) = batch.tokens().iter().find(|token| **token as usize >= vocab) {
            return Err(RunError::bad_batch("token", format_args!("below {vocab}"), token));
        }
        Ok(())
    }

    fn group(&self, group: usize) -> Result<&BlockGroup, RunError> {
        let groups = &self.limits.groups;
        groups.get(group).ok_or_else(|| RunError::bad_batch("group", format_args!("below {}", groups.len()), group))
    }

    /// What is read and what is written lie in the host store, or in the cache.
    fn check_copies(&self, copies: &[BlockCopy], from_store: bool, to_store: bool) -> Result<(), RunError> {
        for copy in copies {
            let blocks = self.group(copy.group)?.blocks;
            for (block, store) in [(copy.from, from_store), (copy.to, to_store)] {
                let (what, most) = if store { ("slot", self.limits.swap[copy.group]) } else { ("block", blocks) };
                if block.index() >= most {
                    let expected = format_args!("below {most} in group {}", copy.group);
                    return Err(RunError::bad_batch(what, expected, block.0));
                }
            }
        }
        Ok(())
    }

    /// The first `tokens` tokens of a block, in `len` bytes.
    fn check_part(&self, group: usize, block: BlockId, tokens: usize, len: usize) -> Result<(), RunError> {
        let blocks = self.group(group)?.blocks;
        if block.index() >= blocks {
            return Err(RunError::bad_batch("block", format_args!("below {blocks} in group {group}"), block.0));
        }
        if tokens > self.limits.block_size {
            return Err(RunError::bad_batch("tokens of a block", format_args!("at most {}", self.limits.block_size), tokens));
        }
        let bytes = tokens * self.token_bytes[group];
        match len == bytes {
            true => Ok(()),
            false => Err(RunError::bad_batch("bytes", format_args!("{bytes} for {tokens} tokens of group {group}"), len)),
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
        let Self { backend: be, spec, weights, step, bufs, .. } = self;
        be.embed(step, &weights.embed, spec.embed_scale, &mut bufs.x)?;
        match &weights.positions {
            Some(table) => be.embed_positions(step, table, &mut bufs.x),
            None => Ok(()),
        }
    }

    /// Attention's result goes to `delta`.
    fn attention(&mut self, l: usize, run: &mut Running) -> Result<(), RunError> {
        let Self { backend: be, spec, weights, kv, step, bufs, .. } = self;
        let (LayerSpec { attn: a, wiring, .. }, w) = (&spec.layers[l], &weights.layers[l]);
        let (t, hidden, dims) = (run.tokens, spec.hidden, a.dims());
        join(be, t, hidden, bufs, run, wiring.attn_in.as_ref().zip(w.attn_in.as_ref()))?;
        let input = if wiring.attn_in.is_some() { &bufs.normed } else { &bufs.x };
        let rope = a.rope.map(|r| (&bufs.angles[r], spec.ropes[r].rotary, spec.ropes[r].style));
        let args = AttnArgs { dims, scale: a.scale, window: a.window, softcap: a.softcap };
        let result = match (&w.attn, a.layout) {
            (Attn::Heads { qkv, qkv_bias, q_norm, k_norm }, _) => {
                be.linear(t, input, qkv, qkv_bias.as_ref(), step, &mut bufs.qkv)?;
                let [q, k, v] = split_qkv(&dims);
                if let Some(norm) = &a.qk_norm {
                    for (heads, weights) in [(q, q_norm), (k, k_norm)] {
                        norm_qk(be, t, &mut bufs.qkv, heads, norm, weights)?;
                    }
                }
                if let Some((angles, rotary, style)) = rope {
                    // q and k lie side by side: one call turns both.
                    be.rope(t, &mut bufs.qkv, Heads { heads: q.heads + k.heads, ..q }, angles, rotary, style)?;
                }
                be.kv_write(step, &bufs.qkv, k, v, kv, l)?;
                be.attention(step, &args, &bufs.qkv, q, kv, l, w.sinks.as_ref(), &mut bufs.attn)?;
                &bufs.attn
            }
            (
                Attn::Latent { q_down, q, kv: down, kv_norm, into, out_of },
                KvLayout::Latent { rank, rope_dim, nope_dim, value_dim, .. },
            ) => {
                let norm = a.latent_norm.as_ref().expect("a layout of latents has a norm on them");
                // Queries, of each head the rotated part first.
                let heads = rows_of(dims.heads, rope_dim + nope_dim);
                match q_down {
                    Some((matrix, weight)) => {
                        be.linear(t, input, matrix, None, step, &mut bufs.q_latent)?;
                        let KvLayout::Latent { q_rank: Some(width), .. } = a.layout else { unreachable!("matched above") };
                        be.norm_heads(t, &mut bufs.q_latent, rows_of(1, width), norm, weight)?;
                        be.linear(t, &bufs.q_latent, q, None, step, &mut bufs.outside)?;
                    }
                    None => be.linear(t, input, q, None, step, &mut bufs.outside)?,
                }
                // Keys: the latent is normalised, the rest is rotated.
                let key = rows_of(1, rank + rope_dim);
                be.linear(t, input, down, None, step, &mut bufs.latent)?;
                be.norm_heads(t, &mut bufs.latent, Heads { dim: rank, ..key }, norm, kv_norm)?;
                if let Some((angles, rotary, style)) = rope {
                    be.rope(t, &mut bufs.outside, heads, angles, rotary, style)?;
                    be.rope(t, &mut bufs.latent, Heads { offset: rank, dim: rope_dim, ..key }, angles, rotary, style)?;
                }
                be.kv_write(step, &bufs.latent, key, key, kv, l)?;
                let inside = rows_of(dims.heads, dims.qk_dim);
                be.linear_heads(t, &bufs.outside, heads, into, step, &mut bufs.qkv, inside)?;
                be.attention(step, &args, &bufs.qkv, inside, kv, l, w.sinks.as_ref(), &mut bufs.attn)?;
                let (from, to) = (rows_of(dims.heads, rank), rows_of(dims.heads, value_dim));
                be.linear_heads(t, &bufs.attn, from, out_of, step, &mut bufs.outside, to)?;
                &bufs.outside
            }
            (Attn::Latent { .. }, _) => unreachable!("weights are loaded as the layout says"),
        };
        be.linear(t, result, &w.out, w.out_bias.as_ref(), step, &mut bufs.delta)?;
        if let Some((norm, w)) = wiring.attn_out.as_ref().zip(w.attn_out.as_ref()) {
            be.norm_heads(t, &mut bufs.delta, rows_of(1, hidden), norm, &w.weight)?;
        }
        run.pending = Some(wiring.residual_scale);
        Ok(())
    }

    /// The feed-forward's result goes to `delta`, after attention's was added from there.
    fn feed_forward(&mut self, l: usize, run: &mut Running) -> Result<(), RunError> {
        let Self { backend: be, spec, weights, step, bufs, .. } = self;
        let (LayerSpec { ffn, wiring, .. }, w) = (&spec.layers[l], &weights.layers[l]);
        let (t, hidden) = (run.tokens, spec.hidden);
        let norm = wiring.ffn_in.as_ref().zip(w.ffn_in.as_ref());
        if wiring.parallel {
            // The stream as it was before attention, behind this norm or attention's.
            if let Some((norm, w)) = norm {
                be.add_norm(t, hidden, &mut bufs.x, None, norm, &w.weight, w.bias.as_ref(), &mut bufs.normed)?;
            }
            join(be, t, hidden, bufs, run, None)?;
        } else {
            join(be, t, hidden, bufs, run, norm)?;
        }
        let normed = wiring.ffn_in.is_some() || (wiring.parallel && wiring.attn_in.is_some());
        let input = if normed { &bufs.normed } else { &bufs.x };
        match (ffn, &w.ffn) {
            (Ffn::Gated { intermediate, glu, .. }, FeedForward::Gated(g)) => {
                be.linear(t, input, &g.gate_up, g.gate_up_bias.as_ref(), step, &mut bufs.gate_up)?;
                be.gate(t, *intermediate, *glu, &bufs.gate_up, &mut bufs.inner)?;
                be.linear(t, &bufs.inner, &g.down, g.down_bias.as_ref(), step, &mut bufs.delta)?;
            }
            (Ffn::Plain { intermediate, act, .. }, FeedForward::Plain { up, up_bias, down, down_bias }) => {
                be.linear(t, input, up, up_bias.as_ref(), step, &mut bufs.inner)?;
                be.activate(t * intermediate, *act, &mut bufs.inner)?;
                be.linear(t, &bufs.inner, down, down_bias.as_ref(), step, &mut bufs.delta)?;
            }
            (
                Ffn::Moe { route, intermediate, glu, shared: width, .. },
                FeedForward::Moe { router, router_bias, correction, experts, shared },
            ) => {
                be.linear(t, input, router, router_bias.as_ref(), step, &mut bufs.scores)?;
                let (scores, correction) = (&bufs.scores, correction.as_ref());
                let args = MoeArgs { route, scores, correction, experts, intermediate: *intermediate, hidden, glu: *glu };
                be.moe(t, input, &args, step, &mut bufs.delta)?;
                if let Some(g) = shared {
                    be.linear(t, input, &g.gate_up, None, step, &mut bufs.gate_up)?;
                    be.gate(t, *width, *glu, &bufs.gate_up, &mut bufs.inner)?;
                    be.linear(t, &bufs.inner, &g.down, None, step, &mut bufs.shared)?;
                    be.add(t * hidden, &mut bufs.delta, &bufs.shared, 1.0)?;
                }
            }
            _ => unreachable!("weights are loaded as the spec says"),
        }
        if let Some((norm, w)) = wiring.ffn_out.as_ref().zip(w.ffn_out.as_ref()) {
            be.norm_heads(t, &mut bufs.delta, rows_of(1, hidden), norm, &w.weight)?;
        }
        run.pending = Some(wiring.residual_scale);
        Ok(())
    }

    fn head(&mut self, run: &mut Running, out: &mut Logits) -> Result<(), RunError> {
        let Self { backend: be, spec, weights, step, bufs, .. } = self;
        out.reset(run.rows, spec.vocab, spec.hidden, run.want);
        if run.rows == 0 && !run.states {
            return Ok(());
        }
        join(be, run.tokens, spec.hidden, bufs, run, Some((&spec.final_norm, &weights.final_norm)))?;
        if run.states {
            be.download(&bufs.normed, out.reset_states(run.tokens))?;
        }
        if run.rows == 0 {
            return Ok(());
        }
        be.gather(step, spec.hidden, &bufs.normed, &mut bufs.rows)?;
        let (logits, hidden) = out.all_mut();
        if run.want.hidden {
            be.download(&bufs.rows, hidden)?;
        }
        if run.want.logits {
            let head = weights.head.as_ref().unwrap_or(&weights.embed);
            be.linear(run.rows, &bufs.rows, head, weights.head_bias.as_ref(), step, &mut bufs.logits)?;
            if spec.head.scale != 1.0 || spec.head.softcap.is_some() {
                be.scale_cap(run.rows * spec.vocab, spec.head.scale, spec.head.softcap, &mut bufs.logits)?;
            }
            be.download(&bufs.logits, logits)?;
        }
        Ok(())
    }
}

/// Adds what is pending to the stream; with a norm, its result lies in `normed`.
fn join<B: Backend>(
    be: &mut B,
    t: usize,
    hidden: usize,
    bufs: &mut Bufs<B>,
    run: &mut Running,
    norm: Option<(&NormSpec, &Norm<Loaded<B>>)>,
) -> Result<(), RunError> {
    match (norm, run.pending.take()) {
        (Some((norm, w)), pending) => {
            let delta = pending.map(|scale| (&bufs.delta, scale));
            be.add_norm(t, hidden, &mut bufs.x, delta, norm, &w.weight, w.bias.as_ref(), &mut bufs.normed)
        }
        (None, Some(scale)) => be.add(t * hidden, &mut bufs.x, &bufs.delta, scale),
        (None, None) => Ok(()),
    }
}

/// Norms on queries or keys.
fn norm_qk<B: Backend>(
    be: &mut B,
    t: usize,
    x: &mut B::Buf,
    heads: Heads,
    norm: &QkNorm,
    weights: &[B::Buf],
) -> Result<(), RunError> {
    let whole = Heads { heads: 1, dim: heads.heads * heads.dim, ..heads };
    match (norm.span, weights) {
        (NormSpan::Head, [weight]) => be.norm_heads(t, x, heads, &norm.norm, weight),
        (NormSpan::All, [weight]) => be.norm_heads(t, x, whole, &norm.norm, weight),
        _ => weights.iter().enumerate().try_for_each(|(h, weight)| {
            let head = Heads { heads: 1, offset: heads.offset + h * heads.dim, ..heads };
            be.norm_heads(t, x, head, &norm.norm, weight)
        }),
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

    fn groups(&self) -> &[BlockGroup] {
        &self.limits.groups
    }

    fn swap_blocks(&self) -> &[usize] {
        &self.limits.swap
    }

    fn token_bytes(&self, group: usize) -> usize {
        self.token_bytes.get(group).copied().unwrap_or(0)
    }

    fn kv_dtype(&self) -> Option<KvDType> {
        Some(self.limits.kv_dtype)
    }

    fn begin(&mut self, batch: &Batch, want: Want) -> Result<(), RunError> {
        self.run = None;
        self.check(batch)?;
        if batch.is_empty() {
            return Ok(());
        }
        self.lay_out_angles(batch)?;
        self.backend.begin(batch, &mut self.step)?;
        let (tokens, rows, states) = (batch.tokens().len(), batch.rows().len(), batch.wants_states());
        self.run = Some(Running { stage: Stage::Embed, tokens, rows, want, states, pending: None });
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
                    self.feed_forward(l, &mut run)?;
                    if l + 1 < self.spec.layers.len() { Stage::Attention(l + 1) } else { Stage::Head }
                }
                Stage::Head => {
                    self.head(&mut run, logits)?;
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

    fn copy_blocks(&mut self, copies: &[BlockCopy]) -> Result<(), RunError> {
        self.check_copies(copies, false, false)?;
        self.backend.copy_blocks(&mut self.kv, copies)
    }

    fn swap_out(&mut self, copies: &[BlockCopy]) -> Result<(), RunError> {
        self.check_copies(copies, false, true)?;
        self.backend.swap_out(&mut self.kv, copies)
    }

    fn swap_in(&mut self, copies: &[BlockCopy]) -> Result<(), RunError> {
        self.check_copies(copies, true, false)?;
        self.backend.swap_in(&mut self.kv, copies)
    }

    fn read_block(&mut self, group: usize, block: BlockId, tokens: usize, out: &mut [u8]) -> Result<(), RunError> {
        self.check_part(group, block, tokens, out.len())?;
        self.backend.read_block(&self.kv, group, block, tokens, out)
    }

    fn write_block(&mut self, group: usize, block: BlockId, tokens: usize, bytes: &[u8]) -> Result<(), RunError> {
        self.check_part(group, block, tokens, bytes.len())?;
        self.backend.write_block(&mut self.kv, group, block, tokens, bytes)
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

/// `heads` heads of `dim` values that fill their rows.
fn rows_of(heads: usize, dim: usize) -> Heads {
    Heads { stride: heads * dim, offset: 0, heads, dim }
}
