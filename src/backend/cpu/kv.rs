//! The paged cache in memory: for each layer, block and kv head the keys as `[qk_dim][block_size]`, then the values as
//! `[block_size][v_dim]`, v_dim padded to whole vectors. So a lane is a token in the scores and a dimension in the sums.
//! A layer whose values are part of its keys has keys alone.
//! Knows no sequence: which block is whose is the batch's business.
//!
//! Invariant: a write touches its own tokens only; padding stays zero.
#![allow(unsafe_code)]

use super::arena::Aligned;
use super::pool::{Disjoint, Pool};
use super::simd::{LANES, Tier};
use crate::arch::AttnDims;
use crate::backend::{Heads, KvShape};
use crate::dtype::KvDType;
use crate::error::RunError;
use crate::ids::BlockId;
use bytemuck::{Pod, Zeroable};

/// The cache of all layers: see [`KvShape`].
pub struct CpuKv {
    layers: Vec<Layer>,
    blocks: usize,
    block_size: usize,
    dtype: KvDType,
    data: Aligned<Line>,
}

/// Where a layer lies, in values.
#[derive(Clone, Copy)]
struct Layer {
    offset: usize,
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
        let (_, values) = layout(shape)?;
        values.checked_mul(shape.dtype.bytes())?.checked_next_multiple_of(size_of::<Line>())
    }

    /// A cache of zeros.
    ///
    /// # Errors
    /// Where the memory is not to be had, or a block is no power of two of whole vectors.
    pub(super) fn new(shape: &KvShape) -> Result<Self, RunError> {
        let refuse = |message| Err(RunError::Device { device: "CPU".into(), message });
        if !shape.block_size.is_power_of_two() || shape.block_size < LANES {
            let found = shape.block_size;
            return refuse(format!("cache blocks: expected a power of two of at least {LANES} tokens, found {found}"));
        }
        if let Some((i, d)) = shape.layers.iter().enumerate().find(|(_, d)| d.v_in_k && d.v_dim > d.qk_dim) {
            return refuse(format!("layer {i}: values of {} in keys of {}", d.v_dim, d.qk_dim));
        }
        let refused = || RunError::Device {
            device: "CPU".into(),
            message: format!("no memory for a cache of {} blocks of {} tokens", shape.blocks, shape.block_size),
        };
        let bytes = Self::bytes(shape).ok_or_else(refused)?;
        let (layers, _) = layout(shape).ok_or_else(refused)?;
        let data = Aligned::zeroed(bytes / size_of::<Line>()).map_err(|_| refused())?;
        Ok(CpuKv { layers, blocks: shape.blocks, block_size: shape.block_size, dtype: shape.dtype, data })
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
        let this = (self.blocks, self.block_size);
        match self.dtype {
            KvDType::F32 => {
                let data = Disjoint::new(bytemuck::cast_slice_mut::<Line, f32>(&mut self.data));
                write(pool, this, &l, data, slots, src, k, v, |from, to| to.copy_from_slice(from));
            }
            KvDType::F16 => {
                let data = Disjoint::new(bytemuck::cast_slice_mut::<Line, u16>(&mut self.data));
                write(pool, this, &l, data, slots, src, k, v, |from, to| tier.attention.narrow(from, to));
            }
        }
    }

    /// Copies whole blocks in all layers, in order.
    ///
    /// # Panics
    /// Where a block lies beyond the cache.
    pub(super) fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) {
        let size = self.dtype.bytes();
        let data = bytemuck::cast_slice_mut::<Line, u8>(&mut self.data);
        for l in &self.layers {
            let bytes = l.kv_heads * l.head * size;
            for (from, to) in pairs {
                assert!(from.index().max(to.index()) < self.blocks, "copy of block {} to {} of {}", from.0, to.0, self.blocks);
                let at = |block: &BlockId| l.offset * size + block.index() * bytes;
                data.copy_within(at(from)..at(from) + bytes, at(to));
            }
        }
    }

    /// Makes every value a NaN, as if an earlier owner had left it.
    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        self.data.fill(Line([u64::MAX; 8]));
    }

    /// Value index of a head in a block.
    fn head_at(&self, l: &Layer, block: usize, head: usize) -> usize {
        assert!(block < self.blocks && head < l.kv_heads, "block {block} of {}, head {head} of {}", self.blocks, l.kv_heads);
        l.offset + (block * l.kv_heads + head) * l.head
    }
}

/// Writes rows of heads; a thread has the heads it is handed to itself.
#[allow(clippy::too_many_arguments)]
fn write<E: Copy + Default + Send>(
    pool: &Pool,
    (blocks, block_size): (usize, usize),
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
            assert!(block < blocks, "slot {slot} of {}", blocks * block_size);
            for head in heads.clone() {
                let at = l.offset + (block * l.kv_heads + head) * l.head;
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

/// The layers and the values in all.
fn layout(shape: &KvShape) -> Option<(Vec<Layer>, usize)> {
    let line = size_of::<Line>() / shape.dtype.bytes();
    let mut offset = 0usize;
    let mut layers = Vec::with_capacity(shape.layers.len());
    for dims in &shape.layers {
        let v_width = dims.v_dim.checked_next_multiple_of(LANES)?;
        let keys = dims.qk_dim.checked_mul(shape.block_size)?.checked_next_multiple_of(line)?;
        let values = if dims.v_in_k { 0 } else { v_width.checked_mul(shape.block_size)? };
        let head = values.checked_add(keys)?.checked_next_multiple_of(line)?;
        let AttnDims { kv_heads, qk_dim, v_dim, v_in_k, .. } = *dims;
        layers.push(Layer { offset, kv_heads, qk_dim, v_dim, v_width, v_in_k, keys, head });
        offset = head.checked_mul(dims.kv_heads)?.checked_mul(shape.blocks)?.checked_add(offset)?;
    }
    Some((layers, offset))
}

/// Values to write from which on threads share the work: some 20 us.
const PARALLEL_FROM: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    /// Heads of a token as they lie in the cache, keys then values, widened.
    fn token(kv: &CpuKv, layer: usize, slot: usize, head: usize) -> (Vec<f32>, Vec<f32>) {
        let l = kv.layers[layer];
        let (k, v) = kv.head(layer, BlockId((slot / kv.block_size) as u32), head);
        let value = |bytes: &[u8], i: usize| match kv.dtype {
            KvDType::F32 => bytemuck::cast_slice::<u8, f32>(bytes)[i],
            KvDType::F16 => half::f16::from_bits(bytemuck::cast_slice::<u8, u16>(bytes)[i]).to_f32(),
        };
        let offset = slot % kv.block_size;
        let keys = (0..l.qk_dim).map(|d| value(k, d * kv.block_size + offset)).collect();
        let stored = if l.v_in_k { 0 } else { l.v_width };
        let values = (0..stored).map(|d| value(v, offset * l.v_width + d)).collect();
        (keys, values)
    }

    #[test]
    fn tokens_are_found_where_they_were_written_and_blocks_copied_in_order() {
        let dims = |kv_heads, qk_dim, v_dim| AttnDims { heads: kv_heads, kv_heads, qk_dim, v_dim, v_in_k: false };
        for dtype in [KvDType::F32, KvDType::F16] {
            for (tokens, threads) in [(3, 1), (90, 3)] {
                let layers = vec![dims(3, 70, 17), dims(1, 16, 96)];
                let shape = KvShape { layers, blocks: 7, block_size: 32, dtype };
                let mut kv = CpuKv::new(&shape).unwrap();
                // Keys 70 x 32 and values 32 x 32 of 3 heads; 16 x 32 and 32 x 96 of one.
                assert_eq!(CpuKv::bytes(&shape), Some(7 * 32 * (3 * (70 + 32) + 16 + 96) * dtype.bytes()));
                assert_eq!(CpuKv::bytes(&shape).unwrap(), kv.data.len() * size_of::<Line>());

                let slots: Vec<u32> = (0..tokens).map(|t| t * 67 % (6 * 32)).collect();
                let (pool, tier) = (Pool::new(threads).unwrap(), Tier::best());
                for (layer, d) in shape.layers.iter().enumerate() {
                    let stride = d.kv_heads * (d.qk_dim + d.v_dim);
                    let k = Heads { stride, offset: 0, heads: d.kv_heads, dim: d.qk_dim };
                    let v = Heads { stride, offset: d.kv_heads * d.qk_dim, heads: d.kv_heads, dim: d.v_dim };
                    // Up to 2048 a half holds whole numbers.
                    let src: Vec<_> = (0..tokens as usize * stride).map(|i| (i % 2039) as f32 + 1.0).collect();
                    kv.write(&pool, tier, layer, &slots, &src, k, v);
                    for (t, &slot) in slots.iter().enumerate() {
                        for head in 0..d.kv_heads {
                            let (keys, values) = token(&kv, layer, slot as usize, head);
                            assert_eq!(keys, src[t * stride + head * d.qk_dim..][..d.qk_dim]);
                            assert_eq!(values[..d.v_dim], src[t * stride + v.offset + head * d.v_dim..][..d.v_dim]);
                            assert!(values[d.v_dim..].iter().all(|v| *v == 0.0), "padding stays zero");
                        }
                    }
                }

                // 0 goes to 6, and from there to 1: in order.
                let before: Vec<_> = (0..2).map(|layer| token(&kv, layer, 0, 0)).collect();
                kv.copy_blocks(&[(BlockId(0), BlockId(6)), (BlockId(6), BlockId(1))]);
                for (layer, before) in before.iter().enumerate() {
                    assert!(*before == token(&kv, layer, 6 * 32, 0) && *before == token(&kv, layer, 32, 0), "layer {layer}");
                }
            }
        }
    }

    #[test]
    fn values_in_keys_take_no_memory() {
        // DeepSeek-V3: a latent of 512 and 64 rotated values for all of 128 heads.
        let latent = AttnDims { heads: 128, kv_heads: 1, qk_dim: 512 + 64, v_dim: 512, v_in_k: true };
        let expanded = AttnDims { heads: 128, kv_heads: 128, qk_dim: 128 + 64, v_dim: 128, v_in_k: false };
        for block_size in [16, 64] {
            let bytes = |dims, dtype| CpuKv::bytes(&KvShape { layers: vec![dims], blocks: 10, block_size, dtype }).unwrap();
            let token = |dims, dtype| bytes(dims, dtype) / (10 * block_size);
            assert_eq!(bytes(latent, KvDType::F16), 10 * block_size * 1152);
            assert_eq!((token(latent, KvDType::F16), token(latent, KvDType::F32)), (1152, 2304));
            // 71 times.
            assert_eq!(token(expanded, KvDType::F16), 81_920);
        }
    }

    #[test]
    fn values_in_keys_are_not_written() {
        let plain = AttnDims { heads: 1, kv_heads: 1, qk_dim: 16, v_dim: 16, v_in_k: false };
        for dtype in [KvDType::F32, KvDType::F16] {
            let latent = AttnDims { heads: 4, kv_heads: 2, qk_dim: 20, v_dim: 12, v_in_k: true };
            let shape = KvShape { layers: vec![plain, latent, plain], blocks: 3, block_size: 16, dtype };
            let mut kv = CpuKv::new(&shape).unwrap();
            let src: Vec<_> = (1..=3 * 42).map(|i| i as f32).collect();
            let heads = Heads { stride: 42, offset: 2, heads: 2, dim: 20 };
            // Where values would lie is of no concern.
            let nowhere = Heads { stride: 0, offset: usize::MAX, heads: 0, dim: 0 };
            kv.write(&Pool::new(1).unwrap(), Tier::best(), 1, &[47, 3, 16], &src, heads, nowhere);
            kv.copy_blocks(&[(BlockId(2), BlockId(1)), (BlockId(0), BlockId(2))]);
            for (t, slot) in [(0, 47 - 16), (1, 3), (1, 3 + 32)] {
                for head in 0..2 {
                    let (keys, values) = token(&kv, 1, slot, head);
                    assert_eq!(keys, src[t * 42 + 2 + head * 20..][..20]);
                    assert!(values.is_empty());
                }
            }
            let size = dtype.bytes();
            let other = |layer| (0..3).all(|b| kv.head(layer, BlockId(b), 0).0.iter().all(|v| *v == 0));
            assert!(other(0) && other(2), "no other layer is touched");
            // 20 x 16 values of two heads, between 32 x 16 of one.
            assert_eq!(CpuKv::bytes(&shape), Some(3 * 16 * (2 * 20 + 2 * 32) * size));
        }
    }

    #[test]
    fn a_size_beyond_memory_is_an_error() {
        let layers = vec![AttnDims { heads: 1, kv_heads: 1, qk_dim: 64, v_dim: 64, v_in_k: false }];
        let shape = KvShape { layers, blocks: usize::MAX / 64, block_size: 16, dtype: KvDType::F16 };
        assert_eq!(CpuKv::bytes(&shape), None);
        assert!(matches!(CpuKv::new(&shape), Err(RunError::Device { .. })));
        for block_size in [0, 8, 17] {
            let shape = KvShape { block_size, blocks: 2, ..shape.clone() };
            assert!(matches!(CpuKv::new(&shape), Err(RunError::Device { message, .. }) if message.contains("blocks: expected")));
        }
    }
}
