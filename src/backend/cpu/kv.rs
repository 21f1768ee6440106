//! The paged cache in memory: for each group, block, layer and kv head the keys as `[qk_dim][block_size]`, then the values as
//! `[block_size][v_dim]`, v_dim padded to whole vectors. So a lane is a token in the scores and a dimension in the sums; and a
//! block is one stretch of memory, so that what no sequence ever used is never touched, huge pages or not.
//! A layer whose values are part of its keys has keys alone. Slots of the host store are blocks like the others, behind those of
//! the pool: on this device both are the host's memory.
//! Knows no sequence: which block is whose is the batch's business.
//!
//! Invariant: a write touches its own tokens only; padding stays zero.
#![allow(unsafe_code)]

use super::arena::Aligned;
use super::pool::{Disjoint, Pool};
use super::simd::{Bf16, LANES, Tier};
use crate::arch::AttnDims;
use crate::backend::{Heads, KvShape};
use crate::dtype::KvDType;
use crate::error::RunError;
use crate::ids::{BlockCopy, BlockId};
use bytemuck::{Pod, Zeroable};

/// The cache of all layers: see [`KvShape`].
pub struct CpuKv {
    layers: Vec<Layer>,
    /// Blocks and host-store slots of each group.
    groups: Vec<Pools>,
    block_size: usize,
    dtype: KvDType,
    data: Aligned<Line>,
}

#[derive(Clone, Copy)]
struct Pools {
    blocks: usize,
    swap: usize,
    /// Where the first block lies, and from one to the next, in values.
    offset: usize,
    stride: usize,
}

/// Where a layer lies, in values.
#[derive(Clone, Copy)]
struct Layer {
    group: usize,
    /// Blocks in its group's pool.
    blocks: usize,
    /// Its part of block 0, and from one block to the next.
    offset: usize,
    stride: usize,
    kv_heads: usize,
    qk_dim: usize,
    v_dim: usize,
    v_width: usize,
    v_in_k: bool,
    /// Values of one head's keys in a block.
    keys: usize,
    /// Values of one head in a block.
    head: usize,
}

/// A cache line, for the alignment.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u64; 8]);

impl CpuKv {
    /// Bytes of a cache; `None` where they do not fit a `usize`.
    pub(super) fn bytes(shape: &KvShape) -> Option<usize> {
        let (_, _, values) = layout(shape)?;
        values.checked_mul(shape.dtype.bytes())?.checked_next_multiple_of(size_of::<Line>())
    }

    /// A cache of zeros.
    ///
    /// # Errors
    /// Where the memory is not to be had, a block is no power of two of whole vectors, or layers and groups do not agree.
    pub(super) fn new(shape: &KvShape) -> Result<Self, RunError> {
        let refuse = |message| Err(RunError::Device { device: "CPU".into(), message });
        if !shape.block_size.is_power_of_two() || shape.block_size < LANES {
            let found = shape.block_size;
            return refuse(format!("cache blocks: expected a power of two of at least {LANES} tokens, found {found}"));
        }
        if let Some((i, d)) = shape.layers.iter().enumerate().find(|(_, d)| d.v_in_k && d.v_dim > d.qk_dim) {
            return refuse(format!("layer {i}: values of {} in keys of {}", d.v_dim, d.qk_dim));
        }
        let (groups, of) = (shape.blocks.len(), &shape.group_of);
        if shape.swap.len() != groups || of.len() != shape.layers.len() || of.iter().any(|g| *g >= groups) {
            let (stores, layers) = (shape.swap.len(), shape.layers.len());
            return refuse(format!(
                "{groups} groups of blocks: found {stores} host stores, and {layers} layers in groups {of:?}"
            ));
        }
        let refused = || RunError::Device {
            device: "CPU".into(),
            message: format!(
                "no memory for a cache of {:?} blocks of {} tokens and {:?} in its host store",
                shape.blocks, shape.block_size, shape.swap
            ),
        };
        let bytes = Self::bytes(shape).ok_or_else(refused)?;
        let (layers, groups, _) = layout(shape).ok_or_else(refused)?;
        let data = Aligned::zeroed(bytes / size_of::<Line>()).map_err(|_| refused())?;
        Ok(CpuKv { layers, groups, block_size: shape.block_size, dtype: shape.dtype, data })
    }

    /// The group of a layer.
    pub(super) fn group_of(&self, layer: usize) -> usize {
        self.layers[layer].group
    }

    /// Type of the values.
    pub(super) fn dtype(&self) -> KvDType {
        self.dtype
    }

    /// Tokens in a block.
    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// A layer's values are the first part of its keys.
    pub(super) fn v_in_k(&self, layer: usize) -> bool {
        self.layers[layer].v_in_k
    }

    /// Values in a row of a layer's values, stored or made of keys.
    pub(super) fn v_width(&self, layer: usize) -> usize {
        self.layers[layer].v_width
    }

    /// Bytes of a head's keys and of its values in a block; no values where they are part of the keys.
    ///
    /// # Panics
    /// Where there is no such block, head or layer.
    pub(super) fn head(&self, layer: usize, block: BlockId, head: usize) -> (&[u8], &[u8]) {
        let l = &self.layers[layer];
        let at = self.head_at(l, block.index(), head) * self.dtype.bytes();
        let bytes = &bytemuck::cast_slice::<Line, u8>(&self.data)[at..][..l.head * self.dtype.bytes()];
        bytes.split_at(l.keys * self.dtype.bytes())
    }

    /// Writes token t of `src` to slot `slots[t]`, for all t; keys alone where values are part of them.
    ///
    /// # Panics
    /// Where a slot lies beyond the cache or the shapes do not agree with the layer's.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn write(&mut self, pool: &Pool, tier: &Tier, layer: usize, slots: &[u32], src: &[f32], k: Heads, v: Heads) {
        let l = self.layers[layer];
        assert_eq!((k.heads, k.dim), (l.kv_heads, l.qk_dim), "key heads of layer {layer}");
        assert!(l.v_in_k || (v.heads, v.dim) == (l.kv_heads, l.v_dim), "value heads of layer {layer}: {v:?}");
        let block_size = self.block_size;
        match self.dtype {
            KvDType::F32 => {
                let data = Disjoint::new(bytemuck::cast_slice_mut::<Line, f32>(&mut self.data));
                write(pool, block_size, &l, data, slots, src, k, v, |from, to| to.copy_from_slice(from));
            }
            KvDType::F16 => {
                let data = Disjoint::new(bytemuck::cast_slice_mut::<Line, u16>(&mut self.data));
                write(pool, block_size, &l, data, slots, src, k, v, |from, to| tier.attention.narrow(from, to));
            }
            KvDType::BF16 => {
                let data = Disjoint::new(bytemuck::cast_slice_mut::<Line, Bf16>(&mut self.data));
                let narrow = |from: &[f32], to: &mut [Bf16]| to.iter_mut().zip(from).for_each(|(to, v)| *to = Bf16::from_f32(*v));
                write(pool, block_size, &l, data, slots, src, k, v, narrow);
            }
        }
    }

    /// Copies whole blocks in all layers of their groups, in order.
    ///
    /// # Panics
    /// Where a block lies beyond the pool, as the two below do.
    pub(super) fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        self.copy(copies, false, false);
    }

    /// The same to slots of the host store.
    pub(super) fn swap_out(&mut self, copies: &[BlockCopy]) {
        self.copy(copies, false, true);
    }

    /// The same from slots of the host store.
    pub(super) fn swap_in(&mut self, copies: &[BlockCopy]) {
        self.copy(copies, true, false);
    }

    /// What is read or written lies in the host store, or in the pool.
    fn copy(&mut self, copies: &[BlockCopy], from_store: bool, to_store: bool) {
        let size = self.dtype.bytes();
        let data = bytemuck::cast_slice_mut::<Line, u8>(&mut self.data);
        for c in copies {
            let pools = self.groups[c.group];
            let place = |block: BlockId, store: bool| {
                let (base, most) = if store { (pools.blocks, pools.swap) } else { (0, pools.blocks) };
                assert!(block.index() < most, "copy of {c:?}: {block:?} of {most}, host store: {store}");
                (pools.offset + (base + block.index()) * pools.stride) * size
            };
            let (from, to) = (place(c.from, from_store), place(c.to, to_store));
            data.copy_within(from..from + pools.stride * size, to);
        }
    }

    /// The first `tokens` tokens of a block as [`Backend::read_block`](crate::backend::Backend::read_block) lays them out.
    ///
    /// # Panics
    /// Where there is no such group, block or token, or `out` has another length; as the next one does.
    pub(super) fn read_block(&self, group: usize, block: BlockId, tokens: usize, out: &mut [u8]) {
        self.check_part(group, block, tokens);
        let rows = rows(&self.layers, group, block.index(), self.block_size, tokens);
        match self.dtype {
            KvDType::F32 => read_rows::<4>(&self.data, rows, out),
            KvDType::F16 | KvDType::BF16 => read_rows::<2>(&self.data, rows, out),
        }
    }

    /// Writes them.
    pub(super) fn write_block(&mut self, group: usize, block: BlockId, tokens: usize, bytes: &[u8]) {
        self.check_part(group, block, tokens);
        let rows = rows(&self.layers, group, block.index(), self.block_size, tokens);
        match self.dtype {
            KvDType::F32 => write_rows::<4>(&mut self.data, rows, bytes),
            KvDType::F16 | KvDType::BF16 => write_rows::<2>(&mut self.data, rows, bytes),
        }
    }

    fn check_part(&self, group: usize, block: BlockId, tokens: usize) {
        let (blocks, most) = (self.groups[group].blocks, self.block_size);
        assert!(block.index() < blocks && tokens <= most, "{tokens} tokens of {most} of {block:?} of {blocks} in group {group}");
    }

    /// Makes every value a NaN, as if an earlier owner had left it.
    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        self.data.fill(Line([u64::MAX; 8]));
    }

    /// Value index of a head in a block.
    fn head_at(&self, l: &Layer, block: usize, head: usize) -> usize {
        assert!(block < l.blocks && head < l.kv_heads, "block {block} of {}, head {head} of {}", l.blocks, l.kv_heads);
        l.offset + block * l.stride + head * l.head
    }
}

/// Writes rows of heads; a thread has the heads it is handed to itself.
#[allow(clippy::too_many_arguments)]
fn write<E: Copy + Default + Send>(
    pool: &Pool,
    block_size: usize,
    l: &Layer,
    data: Disjoint<'_, E>,
    slots: &[u32],
    src: &[f32],
    k: Heads,
    v: Heads,
    convert: impl Fn(&[f32], &mut [E]) + Sync,
) {
    let grain = if slots.len() * l.head / block_size < PARALLEL_FROM { l.kv_heads } else { 1 };
    pool.for_each_chunk(l.kv_heads, grain, |_, heads| {
        for (token, &slot) in slots.iter().enumerate() {
            let (block, offset) = (slot as usize / block_size, slot as usize % block_size);
            assert!(block < l.blocks, "slot {slot} of {}", l.blocks * block_size);
            for head in heads.clone() {
                let at = l.offset + block * l.stride + head * l.head;
                // SAFETY: a head is handed out once, and this is its part of a block.
                let to = unsafe { data.slice(at..at + l.head) };
                let (keys, values) = to.split_at_mut(l.keys);
                let mut piece = [E::default(); 64];
                let from = &src[token * k.stride + k.offset + head * k.dim..][..k.dim];
                for (i, from) in from.chunks(64).enumerate() {
                    let piece = &mut piece[..from.len()];
                    convert(from, piece);
                    for (d, value) in piece.iter().enumerate() {
                        keys[(64 * i + d) * block_size + offset] = *value;
                    }
                }
                if l.v_in_k {
                    continue;
                }
                let from = &src[token * v.stride + v.offset + head * v.dim..][..v.dim];
                convert(from, &mut values[offset * l.v_width..][..v.dim]);
            }
        }
    });
}

/// Where the heads of a block's first tokens lie, in the order of [`CpuKv::read_block`]: first value, step to the next, values.
fn rows(
    layers: &[Layer],
    group: usize,
    block: usize,
    block_size: usize,
    tokens: usize,
) -> impl Iterator<Item = (usize, usize, usize)> {
    layers.iter().filter(move |l| l.group == group).flat_map(move |l| {
        let first = l.offset + block * l.stride;
        let heads = move |of: usize| (0..of).flat_map(move |t| (0..l.kv_heads).map(move |h| (t, first + h * l.head)));
        let keys = heads(tokens).map(move |(t, head)| (head + t, block_size, l.qk_dim));
        let values = heads(if l.v_in_k { 0 } else { tokens });
        keys.chain(values.map(move |(t, head)| (head + l.keys + t * l.v_width, 1, l.v_dim)))
    })
}

fn read_rows<const N: usize>(data: &[Line], rows: impl Iterator<Item = (usize, usize, usize)>, mut out: &mut [u8]) {
    let data = bytemuck::cast_slice::<Line, u8>(data).as_chunks::<N>().0;
    for (at, step, len) in rows {
        let (row, rest) = out.split_at_mut(len * N);
        out = rest;
        for (value, stored) in row.as_chunks_mut::<N>().0.iter_mut().zip(data[at..].iter().step_by(step)) {
            *value = little_endian(*stored);
        }
    }
    assert!(out.is_empty(), "room for {} bytes more than there are", out.len());
}

fn write_rows<const N: usize>(data: &mut [Line], rows: impl Iterator<Item = (usize, usize, usize)>, mut bytes: &[u8]) {
    let data = bytemuck::cast_slice_mut::<Line, u8>(data).as_chunks_mut::<N>().0;
    for (at, step, len) in rows {
        let (row, rest) = bytes.split_at(len * N);
        bytes = rest;
        for (value, stored) in row.as_chunks::<N>().0.iter().zip(data[at..].iter_mut().step_by(step)) {
            *stored = little_endian(*value);
        }
    }
    assert!(bytes.is_empty(), "{} bytes more than there is room for", bytes.len());
}

/// From the machine's byte order, or back to it.
fn little_endian<const N: usize>(mut value: [u8; N]) -> [u8; N] {
    if cfg!(target_endian = "big") {
        value.reverse();
    }
    value
}

/// The layers, the groups, and the values in all.
fn layout(shape: &KvShape) -> Option<(Vec<Layer>, Vec<Pools>, usize)> {
    let line = size_of::<Line>() / shape.dtype.bytes();
    let pools = |(&blocks, &swap)| Pools { blocks, swap, offset: 0, stride: 0 };
    let mut groups: Vec<_> = shape.blocks.iter().zip(&shape.swap).map(pools).collect();
    let mut layers = Vec::with_capacity(shape.layers.len());
    for (dims, &group) in shape.layers.iter().zip(&shape.group_of) {
        let Pools { blocks, stride: offset, .. } = *groups.get(group)?;
        let v_width = dims.v_dim.checked_next_multiple_of(LANES)?;
        let keys = dims.qk_dim.checked_mul(shape.block_size)?.checked_next_multiple_of(line)?;
        let values = if dims.v_in_k { 0 } else { v_width.checked_mul(shape.block_size)? };
        let head = values.checked_add(keys)?.checked_next_multiple_of(line)?;
        let AttnDims { kv_heads, qk_dim, v_dim, v_in_k, .. } = *dims;
        layers.push(Layer { group, blocks, offset, stride: 0, kv_heads, qk_dim, v_dim, v_width, v_in_k, keys, head });
        groups[group].stride = head.checked_mul(kv_heads)?.checked_add(offset)?;
    }
    let mut values = 0usize;
    for g in &mut groups {
        g.offset = values;
        values = g.blocks.checked_add(g.swap)?.checked_mul(g.stride)?.checked_add(values)?;
    }
    for l in &mut layers {
        l.offset = l.offset.checked_add(groups[l.group].offset)?;
        l.stride = groups[l.group].stride;
    }
    Some((layers, groups, values))
}

/// Values to write from which on threads share the work: some 20 us.
const PARALLEL_FROM: usize = 16_384;

#[cfg(test)]
mod tests;
