//! One device and its kernels: about sixteen fused operations over buffers that the caller owns, so that a step allocates
//! nothing. A backend knows tensors, batches and attention dimensions; it knows no model family, sequence or scheduler.
//!
//! Invariant: a row's result depends on that row, its position and the cache alone: not on other rows, on how many there
//! are, on threads, nor on how the device splits the work.
#![deny(unsafe_code)]

pub mod cpu;

use crate::arch::{Activation, AttnDims, Glu, NormSpec, RopeStyle, RouteSpec};
use crate::batch::{Batch, BatchLimits};
use crate::dtype::{FormatId, KvDType};
use crate::error::{LoadError, RunError};
use crate::ids::{BlockCopy, BlockId};
use crate::weights::{Panels, Release, TensorView};

/// A tensor that becomes part of a weight matrix.
#[derive(Clone, Copy, Debug)]
pub struct WeightPart<'a> {
    /// For messages.
    pub name: &'a str,
    /// `[rows, columns]`.
    pub view: TensorView<'a>,
    /// How its rows are to be read.
    pub order: RowOrder,
    /// The matrix as the kernels read it, its rows in their order: only such as [`Backend::panels_bytes`] accepts, and then `view`
    /// has no bytes.
    pub panels: Option<&'a Panels>,
    /// Is told of bytes of `view` that nothing reads any more.
    pub release: Option<Release<'a>>,
}

impl<'a> WeightPart<'a> {
    /// Rows as they lie, which someone may read again.
    pub fn new(name: &'a str, view: TensorView<'a>) -> Self {
        WeightPart { name, view, order: RowOrder::Natural, panels: None, release: None }
    }
}

/// The order in which a tensor's rows lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RowOrder {
    /// As they are.
    #[default]
    Natural,
    /// GGUF's Llama files interleave the two halves of each of `heads` heads' rows: row `2i + j` of a head in the file is
    /// row `j * head_dim / 2 + i`.
    Interleaved {
        /// Heads in the tensor.
        heads: usize,
    },
    /// Fused q, k and v, group by group: the `queries` query heads of a group, then its key head, then its value head. Read as
    /// all queries, all keys, all values.
    Grouped {
        /// Groups, as many as key heads.
        groups: usize,
        /// Query heads in a group.
        queries: usize,
    },
    /// Each of `heads` heads' rows start in its middle: row `r` is row `r + by` of the head in the file, round the end.
    Rolled {
        /// Heads in the tensor.
        heads: usize,
        /// Rows of a head that come last and lie first in the file.
        by: usize,
    },
}

impl RowOrder {
    /// The row of the file that is row `row` of the matrix of `rows` rows.
    pub fn source_row(self, row: usize, rows: usize) -> usize {
        match self {
            RowOrder::Natural => row,
            RowOrder::Interleaved { heads } => {
                let dim = rows / heads;
                let (head, r) = (row / dim, row % dim);
                head * dim + 2 * (r % (dim / 2)) + r / (dim / 2)
            }
            RowOrder::Rolled { heads, by } => {
                let dim = rows / heads;
                row / dim * dim + (row % dim + by) % dim
            }
            RowOrder::Grouped { groups, queries } => {
                let dim = rows / (groups * (queries + 2));
                let (head, r) = (row / dim, row % dim);
                let all = groups * queries;
                let (group, at) = match head {
                    h if h < all => (h / queries, h % queries),
                    h if h < all + groups => (h - all, queries),
                    h => (h - all - groups, queries + 1),
                };
                (group * (queries + 2) + at) * dim + r
            }
        }
    }
}

/// Where heads lie in the rows of a buffer: head h of row t starts at `t * stride + offset + h * dim`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heads {
    /// Values from one row to the next.
    pub stride: usize,
    /// Values before the first head.
    pub offset: usize,
    /// Heads.
    pub heads: usize,
    /// Values in a head.
    pub dim: usize,
}

/// The KV cache of a model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvShape {
    /// One entry a layer.
    pub layers: Vec<AttnDims>,
    /// The group of each layer.
    pub group_of: Vec<usize>,
    /// Blocks in the pool of each group, shared by its layers: block b of a sequence is block b in each of them.
    pub blocks: Vec<usize>,
    /// Blocks of each group that the host store holds beside the pool: slots 0 to `swap - 1`.
    pub swap: Vec<usize>,
    /// Tokens in a block: a power of two from 16 on.
    pub block_size: usize,
    /// Type of the stored values.
    pub dtype: KvDType,
}

impl KvShape {
    /// All layers in one group, without a host store.
    pub fn one_group(layers: Vec<AttnDims>, blocks: usize, block_size: usize, dtype: KvDType) -> Self {
        KvShape { group_of: vec![0; layers.len()], layers, blocks: vec![blocks], swap: vec![0], block_size, dtype }
    }

    /// The layers of a group, in order.
    pub fn layers_of(&self, group: usize) -> impl Iterator<Item = &AttnDims> {
        self.layers.iter().zip(&self.group_of).filter(move |(_, g)| **g == group).map(|(dims, _)| dims)
    }

    /// Bytes of a token in a group as [`Backend::read_block`] gives them: those of its keys and values, without padding.
    pub fn token_bytes(&self, group: usize) -> usize {
        let values = |d: &AttnDims| d.kv_heads * (d.qk_dim + if d.v_in_k { 0 } else { d.v_dim });
        self.layers_of(group).map(values).sum::<usize>() * self.dtype.bytes()
    }
}

/// What one call of [`Backend::attention`] computes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttnArgs {
    /// Shapes.
    pub dims: AttnDims,
    /// Factor on q times k.
    pub scale: f32,
    /// A token sees itself and the `window - 1` before it.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` on the scaled scores.
    pub softcap: Option<f32>,
}

/// One expert's matrices.
pub struct Expert<B: Backend> {
    /// Gate and up, `[2 * intermediate, hidden]`.
    pub gate_up: B::Weight,
    /// Its bias.
    pub gate_up_bias: Option<B::Buf>,
    /// `[hidden, intermediate]`.
    pub down: B::Weight,
    /// Its bias.
    pub down_bias: Option<B::Buf>,
}

/// What one call of [`Backend::moe`] computes.
pub struct MoeArgs<'a, B: Backend> {
    /// How experts are chosen and weighed.
    pub route: &'a RouteSpec,
    /// Router logits, `[rows, experts]`.
    pub scores: &'a B::Buf,
    /// Added to the scores for choosing, not for weighing, `[experts]`.
    pub correction: Option<&'a B::Buf>,
    /// The experts.
    pub experts: &'a [Expert<B>],
    /// Width inside an expert.
    pub intermediate: usize,
    /// Width of a row.
    pub hidden: usize,
    /// How gate and up meet.
    pub glu: Glu,
}

/// The largest mixture of experts of a model, for sizing scratch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MoeShape {
    /// Experts.
    pub experts: usize,
    /// Experts a row.
    pub top_k: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// Width of a row.
    pub hidden: usize,
}

/// A device. Buffers hold f32; `rows` counts rows in use, from the first on. Work may be queued: only
/// [`download`](Backend::download) waits.
///
/// Contract of every operation: buffers are at least `rows` times the width long (a shorter one is a bug and may panic), and
/// shapes agree with what was given at construction.
pub trait Backend: Send + Sized + 'static {
    /// Activations.
    type Buf: Send;
    /// A weight matrix `[N, K]`, laid out for the kernels.
    type Weight: Send + Sync;
    /// The paged KV cache of all layers.
    type Kv: Send;
    /// A batch's index arrays on the device, and scratch sized for the largest batch.
    type Step: Send;

    /// Device, kernel tier and threads in one line, for people.
    fn describe(&self) -> String;

    /// The kernel tier's name: `scalar`, `avx2`, ...
    fn tier(&self) -> &'static str;

    // Memory. The `*_bytes` functions say beforehand what the others allocate, to the byte but for the allocator's rounding.

    /// Bytes of a matrix part of `rows` by `columns` stored as `format`.
    fn weight_bytes(&self, format: FormatId, rows: usize, columns: usize) -> u64;

    /// Bytes that a matrix part of such values takes where its source holds it as `panels`: none where they are used as they
    /// lie. `None` where this backend does not know their layout, or `panels` are not of that many values: it then wants rows.
    fn panels_bytes(&self, _format: FormatId, _rows: usize, _columns: usize, _panels: &Panels) -> Option<u64> {
        None
    }

    /// Bytes of a cache and its host store.
    fn kv_bytes(&self, shape: &KvShape) -> u64;

    /// Bytes of the scratch for a step: `max_columns` is the largest K of any matrix.
    fn step_bytes(&self, limits: &BatchLimits, max_columns: usize, kv: &KvShape, moe: &MoeShape) -> u64;

    /// A buffer of `len` zeros.
    fn buf(&mut self, len: usize) -> Result<Self::Buf, RunError>;

    /// A vector (norm weights, a bias) as f32, the parts one after the other, with `plus` added to each value.
    fn vector(&mut self, parts: &[WeightPart<'_>], plus: f32) -> Result<Self::Buf, LoadError>;

    /// A matrix: the parts' rows one after the other. Parts may differ in format, not in columns.
    fn weight(&mut self, parts: &[WeightPart<'_>]) -> Result<Self::Weight, LoadError>;

    /// The cache and its host store, zeroed. A device may let the system provide the memory as it is first used.
    fn kv(&mut self, shape: &KvShape) -> Result<Self::Kv, RunError>;

    /// Index arrays and scratch for batches up to `limits` with matrices of up to `max_columns` columns.
    fn step(&mut self, limits: &BatchLimits, max_columns: usize, kv: &KvShape, moe: &MoeShape) -> Result<Self::Step, RunError>;

    // A step. T tokens in the batch, R rows wanted.

    /// Takes the batch's arrays over.
    fn begin(&mut self, batch: &Batch, step: &mut Self::Step) -> Result<(), RunError>;

    /// Copies host values to the start of `buf`.
    fn upload(&mut self, values: &[f32], buf: &mut Self::Buf) -> Result<(), RunError>;

    /// `out[t] = table[token t] * scale`, `[T, K]`.
    fn embed(&mut self, step: &Self::Step, table: &Self::Weight, scale: f32, out: &mut Self::Buf) -> Result<(), RunError>;

    /// `x[t] += table[position t]`, `[T, K]`: learned absolute positions.
    fn embed_positions(&mut self, step: &Self::Step, table: &Self::Weight, x: &mut Self::Buf) -> Result<(), RunError>;

    /// `x += delta * scale` over `len` values, one rounding each.
    fn add(&mut self, len: usize, x: &mut Self::Buf, delta: &Self::Buf, scale: f32) -> Result<(), RunError>;

    /// `x += delta * scale` where there is a delta, then `out = norm(x) * weight (+ bias)`, each `[rows, width]`.
    #[allow(clippy::too_many_arguments)]
    fn add_norm(
        &mut self,
        rows: usize,
        width: usize,
        x: &mut Self::Buf,
        delta: Option<(&Self::Buf, f32)>,
        norm: &NormSpec,
        weight: &Self::Buf,
        bias: Option<&Self::Buf>,
        out: &mut Self::Buf,
    ) -> Result<(), RunError>;

    /// `out[rows, N] = x[rows, K] * w^T (+ bias)`.
    fn linear(
        &mut self,
        rows: usize,
        x: &Self::Buf,
        w: &Self::Weight,
        bias: Option<&Self::Buf>,
        step: &mut Self::Step,
        out: &mut Self::Buf,
    ) -> Result<(), RunError>;

    /// A matrix for each head: `out head = w[head] * x head`, for every row. `from` and `to` say where the heads lie; `w` has one
    /// matrix `[to.dim, from.dim]` a head.
    #[allow(clippy::too_many_arguments)]
    fn linear_heads(
        &mut self,
        rows: usize,
        x: &Self::Buf,
        from: Heads,
        w: &[Self::Weight],
        step: &mut Self::Step,
        out: &mut Self::Buf,
        to: Heads,
    ) -> Result<(), RunError>;

    /// Normalises each head in place: `head = norm(head) * weight`, the weight being as long as a head.
    fn norm_heads(
        &mut self,
        rows: usize,
        x: &mut Self::Buf,
        heads: Heads,
        norm: &NormSpec,
        weight: &Self::Buf,
    ) -> Result<(), RunError>;

    /// Rotates the first `rotary` values of each head in place. `angles` is `[T, rotary]`: per row `rotary / 2` cosines,
    /// then as many sines.
    fn rope(
        &mut self,
        rows: usize,
        x: &mut Self::Buf,
        heads: Heads,
        angles: &Self::Buf,
        rotary: usize,
        style: RopeStyle,
    ) -> Result<(), RunError>;

    /// Writes the step's keys and values to their slots in the layer's group; both lie in `kv_src`. Where the layer's values are part of its keys, `v`
    /// is not read.
    fn kv_write(
        &mut self,
        step: &Self::Step,
        kv_src: &Self::Buf,
        k: Heads,
        v: Heads,
        kv: &mut Self::Kv,
        layer: usize,
    ) -> Result<(), RunError>;

    /// Causal attention of the step's queries over the cache, `out` is `[T, heads * v_dim]`. The step's own keys and values
    /// were written before. `sinks` is one more score for each head that takes part in the softmax and has no value.
    #[allow(clippy::too_many_arguments)]
    fn attention(
        &mut self,
        step: &mut Self::Step,
        args: &AttnArgs,
        q_src: &Self::Buf,
        q: Heads,
        kv: &Self::Kv,
        layer: usize,
        sinks: Option<&Self::Buf>,
        out: &mut Self::Buf,
    ) -> Result<(), RunError>;

    /// `out[rows, width] = glu(x[.., ..width], x[.., width..])`, `x` being `[rows, 2 * width]`.
    fn gate(&mut self, rows: usize, width: usize, glu: Glu, x: &Self::Buf, out: &mut Self::Buf) -> Result<(), RunError>;

    /// `x = act(x)` over `len` values.
    fn activate(&mut self, len: usize, act: Activation, x: &mut Self::Buf) -> Result<(), RunError>;

    /// A mixture of experts: chooses experts for each row by `args.scores` and adds up their results, `[rows, hidden]`. Rows are
    /// grouped by expert, so that an expert's weights are read once; a row's sum runs in the order of its experts' numbers,
    /// whatever the other rows choose.
    fn moe(
        &mut self,
        rows: usize,
        x: &Self::Buf,
        args: &MoeArgs<'_, Self>,
        step: &mut Self::Step,
        out: &mut Self::Buf,
    ) -> Result<(), RunError>;

    /// `out[r] = x[rows wanted[r]]`, `[R, width]`.
    fn gather(&mut self, step: &Self::Step, width: usize, x: &Self::Buf, out: &mut Self::Buf) -> Result<(), RunError>;

    /// `x = softcap(x * scale)` over `len` values; no cap: the factor alone.
    fn scale_cap(&mut self, len: usize, scale: f32, softcap: Option<f32>, x: &mut Self::Buf) -> Result<(), RunError>;

    /// Copies whole blocks, each in all layers of its group, in order.
    fn copy_blocks(&mut self, kv: &mut Self::Kv, copies: &[BlockCopy]) -> Result<(), RunError>;

    /// Copies whole blocks to the host store, in order: `from` is a block of the pool, `to` a slot of the store.
    fn swap_out(&mut self, kv: &mut Self::Kv, copies: &[BlockCopy]) -> Result<(), RunError>;

    /// Copies whole blocks back, in order: `from` is a slot of the store, `to` a block of the pool.
    fn swap_in(&mut self, kv: &mut Self::Kv, copies: &[BlockCopy]) -> Result<(), RunError>;

    /// The first `tokens` tokens of a block, in a layout that is every device's: for each layer of the group, in order, the keys
    /// as `[tokens, kv_heads, qk_dim]`, then the values as `[tokens, kv_heads, v_dim]` where they are not part of the keys;
    /// values of the cache's type in little-endian order, without padding. `out` is `tokens` times
    /// [`KvShape::token_bytes`] long.
    fn read_block(&mut self, kv: &Self::Kv, group: usize, block: BlockId, tokens: usize, out: &mut [u8]) -> Result<(), RunError>;

    /// Writes what [`read_block`](Self::read_block) gave: the first `tokens` tokens of a block are then, bit by bit, as
    /// [`kv_write`](Self::kv_write) left them. Nothing else is touched.
    fn write_block(
        &mut self,
        kv: &mut Self::Kv,
        group: usize,
        block: BlockId,
        tokens: usize,
        bytes: &[u8],
    ) -> Result<(), RunError>;

    /// Waits for everything queued and copies the first `out.len()` values.
    fn download(&mut self, buf: &Self::Buf, out: &mut [f32]) -> Result<(), RunError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_are_found() {
        // Two heads of four rows: the file holds 0 2 1 3 of each head.
        let order = RowOrder::Interleaved { heads: 2 };
        let rows: Vec<_> = (0..8).map(|r| order.source_row(r, 8)).collect();
        assert_eq!(rows, [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn rolled_rows_start_in_the_middle() {
        let order = RowOrder::Rolled { heads: 2, by: 3 };
        let rows: Vec<_> = (0..8).map(|r| order.source_row(r, 8)).collect();
        assert_eq!(rows, [3, 0, 1, 2, 7, 4, 5, 6]);
    }

    #[test]
    fn grouped_rows_are_found() {
        // Two groups of two queries, a key and a value, of two rows each.
        let order = RowOrder::Grouped { groups: 2, queries: 2 };
        let rows: Vec<_> = (0..16).map(|r| order.source_row(r, 16)).collect();
        assert_eq!(rows, [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
    }
}
