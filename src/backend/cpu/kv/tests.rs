//! The cache against what was written to it, over groups, dtypes and odd widths.

use super::*;

/// Heads of a token as they lie in the cache, keys then values, widened.
fn token(kv: &CpuKv, layer: usize, slot: usize, head: usize) -> (Vec<f32>, Vec<f32>) {
    let l = kv.layers[layer];
    let (k, v) = kv.head(layer, BlockId((slot / kv.block_size) as u32), head);
    let value = |bytes: &[u8], i: usize| match kv.dtype {
        KvDType::F32 => bytemuck::cast_slice::<u8, f32>(bytes)[i],
        KvDType::F16 => half::f16::from_bits(bytemuck::cast_slice::<u8, u16>(bytes)[i]).to_f32(),
        KvDType::BF16 => half::bf16::from_bits(bytemuck::cast_slice::<u8, u16>(bytes)[i]).to_f32(),
    };
    let offset = slot % kv.block_size;
    let keys = (0..l.qk_dim).map(|d| value(k, d * kv.block_size + offset)).collect();
    let stored = if l.v_in_k { 0 } else { l.v_width };
    let values = (0..stored).map(|d| value(v, offset * l.v_width + d)).collect();
    (keys, values)
}

fn copy(group: usize, from: u32, to: u32) -> BlockCopy {
    BlockCopy { group, from: BlockId(from), to: BlockId(to) }
}

#[test]
fn tokens_are_found_where_they_were_written_and_blocks_copied_in_order() {
    let dims = |kv_heads, qk_dim, v_dim| AttnDims { heads: kv_heads, kv_heads, qk_dim, v_dim, v_in_k: false };
    for dtype in [KvDType::F32, KvDType::F16] {
        for (tokens, threads) in [(3, 1), (90, 3)] {
            let layers = vec![dims(3, 70, 17), dims(1, 16, 96)];
            let shape = KvShape::one_group(layers, 7, 32, dtype);
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
            kv.copy_blocks(&[copy(0, 0, 6), copy(0, 6, 1)]);
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
        let bytes = |dims, dtype| CpuKv::bytes(&KvShape::one_group(vec![dims], 10, block_size, dtype)).unwrap();
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
    for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
        let latent = AttnDims { heads: 4, kv_heads: 2, qk_dim: 20, v_dim: 12, v_in_k: true };
        let shape = KvShape::one_group(vec![plain, latent, plain], 3, 16, dtype);
        let mut kv = CpuKv::new(&shape).unwrap();
        let src: Vec<_> = (1..=3 * 42).map(|i| i as f32).collect();
        let heads = Heads { stride: 42, offset: 2, heads: 2, dim: 20 };
        // Where values would lie is of no concern.
        let nowhere = Heads { stride: 0, offset: usize::MAX, heads: 0, dim: 0 };
        kv.write(&Pool::new(1).unwrap(), Tier::best(), 1, &[47, 3, 16], &src, heads, nowhere);
        kv.copy_blocks(&[copy(0, 2, 1), copy(0, 0, 2)]);
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
    let shape = KvShape::one_group(layers, usize::MAX / 64, 16, KvDType::F16);
    assert_eq!(CpuKv::bytes(&shape), None);
    let swapped = KvShape { blocks: vec![1], swap: vec![usize::MAX], ..shape.clone() };
    assert_eq!(CpuKv::bytes(&swapped), None);
    assert!(matches!(CpuKv::new(&shape), Err(RunError::Device { .. })));
    for block_size in [0, 8, 17] {
        let shape = KvShape { block_size, blocks: vec![2], ..shape.clone() };
        assert!(matches!(CpuKv::new(&shape), Err(RunError::Device { message, .. }) if message.contains("blocks: expected")));
    }
}

/// Layers of odd widths in two groups, one with a host store larger than its pool, the other without; every value of every
/// block of the pools written, and numbered.
fn written(dtype: KvDType) -> (KvShape, CpuKv) {
    let dims = |kv_heads, qk_dim, v_dim, v_in_k| AttnDims { heads: kv_heads, kv_heads, qk_dim, v_dim, v_in_k };
    let layers =
        vec![dims(3, 70, 17, false), dims(1, 16, 96, false), dims(2, 33, 20, true), dims(1, 24, 5, false), dims(2, 8, 8, false)];
    let group_of = vec![0, 1, 1, 0, 1];
    let shape = KvShape { layers, group_of, blocks: vec![6, 3], swap: vec![0, 5], block_size: 16, dtype };
    let mut kv = CpuKv::new(&shape).unwrap();
    for (layer, &group) in shape.group_of.iter().enumerate() {
        write_all(&shape, &mut kv, layer, &(0..shape.blocks[group] as u32 * 16).collect::<Vec<_>>());
    }
    (shape, kv)
}

/// Numbers in whatever a layer holds for these slots: no two alike within a slot, and up to 2039 exact in a half.
fn write_all(shape: &KvShape, kv: &mut CpuKv, layer: usize, slots: &[u32]) {
    let d = shape.layers[layer];
    let stride = d.kv_heads * (d.qk_dim + d.v_dim);
    let k = Heads { stride, offset: 0, heads: d.kv_heads, dim: d.qk_dim };
    let v = Heads { stride, offset: d.kv_heads * d.qk_dim, heads: d.kv_heads, dim: d.v_dim };
    let src: Vec<_> =
        slots.iter().flat_map(|s| (0..stride).map(move |i| ((i + *s as usize * 211 + layer * 17) % 2039) as f32 + 1.0)).collect();
    kv.write(&Pool::new(1).unwrap(), Tier::best(), layer, slots, &src, k, v);
}

/// All that a layer holds for a block of its group.
fn block_of(kv: &CpuKv, layer: usize, block: u32) -> Vec<(Vec<f32>, Vec<f32>)> {
    let (size, heads) = (kv.block_size, kv.layers[layer].kv_heads);
    (0..size).flat_map(|t| (0..heads).map(move |h| token(kv, layer, block as usize * size + t, h))).collect()
}

fn bytes_of(kv: &CpuKv) -> Vec<u8> {
    bytemuck::cast_slice::<Line, u8>(&kv.data).to_vec()
}

#[test]
fn groups_have_pools_of_their_own() {
    for dtype in [KvDType::F32, KvDType::F16] {
        let (shape, mut kv) = written(dtype);
        // Group 0: keys of 3 x 70 and 24, values of 3 x 32 and 16. Group 1: 16, 2 x 33, 2 x 8; 96 and 2 x 16. A head fills whole
        // lines, which 33 x 16 halves do not.
        let odd = if dtype == KvDType::F16 { 34 } else { 33 };
        let values = 6 * (3 * (70 + 32) + 24 + 16) + (3 + 5) * (16 + 96 + 2 * odd + 2 * (8 + 16));
        assert_eq!(CpuKv::bytes(&shape), Some(16 * values * dtype.bytes()));
        assert_eq!(bytes_of(&kv).len(), 16 * values * dtype.bytes());
        // Every block holds what was written to it: no layer's area reaches into another's.
        let whole: Vec<Vec<_>> = shape
            .group_of
            .iter()
            .enumerate()
            .map(|(l, &g)| (0..shape.blocks[g] as u32).map(|b| block_of(&kv, l, b)).collect())
            .collect();
        for (l, d) in shape.layers.iter().enumerate() {
            for (slot, head, i) in [(0, 0, 0), (47, d.kv_heads - 1, d.qk_dim - 1), (21, d.kv_heads / 2, 5)] {
                let number = |at: usize| ((at + slot * 211 + l * 17) % 2039) as f32 + 1.0;
                assert_eq!(token(&kv, l, slot, head).0[i], number(head * d.qk_dim + i), "layer {l}, slot {slot}");
            }
        }
        // A copy is its group's alone.
        kv.copy_blocks(&[copy(1, 2, 0), copy(0, 5, 1), copy(0, 1, 4)]);
        for (l, before) in whole.iter().enumerate() {
            let from: &[u32] = if shape.group_of[l] == 0 { &[0, 5, 2, 3, 5, 5] } else { &[2, 1, 2] };
            for (b, from) in from.iter().enumerate() {
                assert!(block_of(&kv, l, b as u32) == before[*from as usize], "layer {l}, block {b}");
            }
        }
    }
}

#[test]
fn what_is_swapped_out_comes_back() {
    for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
        let (shape, mut kv) = written(dtype);
        let before: Vec<Vec<_>> = (0..5).map(|l| (0..3).map(|b| block_of(&kv, l, b)).collect()).collect();
        let all = bytes_of(&kv);
        // A slot written twice holds the later block.
        kv.swap_out(&[copy(1, 0, 4), copy(1, 1, 0), copy(1, 1, 4), copy(1, 2, 2)]);
        assert!((0..5).all(|l| (0..3).all(|b| block_of(&kv, l, b) == before[l][b as usize])), "the pool is as it was");
        for l in (0..5).filter(|l| shape.group_of[*l] == 1) {
            write_all(&shape, &mut kv, l, &(0..48).rev().collect::<Vec<_>>());
        }
        kv.swap_in(&[copy(1, 4, 2), copy(1, 2, 0), copy(1, 0, 1)]);
        for (l, before) in before.iter().enumerate() {
            let from = if shape.group_of[l] == 0 { [0, 1, 2] } else { [2, 1, 1] };
            for (b, from) in from.into_iter().enumerate() {
                assert!(block_of(&kv, l, b as u32) == before[from], "layer {l}, block {b}");
            }
        }
        // Back where it was: only the store differs from what there was at first.
        kv.swap_in(&[copy(1, 2, 2), copy(1, 0, 1)]);
        for l in (0..5).filter(|l| shape.group_of[*l] == 1) {
            write_all(&shape, &mut kv, l, &(0..16).collect::<Vec<_>>());
        }
        let fresh = written(dtype).1;
        assert!((0..5).all(|l| (0..3).all(|b| block_of(&kv, l, b) == block_of(&fresh, l, b))));
        assert_eq!(bytes_of(&fresh), all);
    }
}

#[test]
fn parts_of_blocks_are_read_and_written_as_they_were() {
    for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
        let (shape, mut kv) = written(dtype);
        let size = dtype.bytes();
        // 3 x (70 + 17) and 24 + 5; 16 + 96, the keys alone of 2 x 33, 2 x 16.
        assert_eq!([0, 1].map(|g| shape.token_bytes(g)), [(3 * 87 + 29) * size, (112 + 66 + 32) * size]);
        for (group, block) in [(0, 5), (0, 0), (1, 2)] {
            for tokens in [0, 1, 7, 16] {
                let mut bytes = vec![0xaa; tokens * shape.token_bytes(group)];
                kv.read_block(group, BlockId(block), tokens, &mut bytes);
                // In the documented order.
                let mut values = bytes.chunks_exact(size).map(|b| match dtype {
                    KvDType::F32 => f32::from_le_bytes(b.try_into().unwrap()),
                    KvDType::F16 => half::f16::from_le_bytes(b.try_into().unwrap()).to_f32(),
                    KvDType::BF16 => half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32(),
                });
                for (l, d) in shape.layers.iter().enumerate().filter(|(l, _)| shape.group_of[*l] == group) {
                    let slot = |t| block as usize * 16 + t;
                    for (t, h) in (0..tokens).flat_map(|t| (0..d.kv_heads).map(move |h| (t, h))) {
                        let keys: Vec<_> = values.by_ref().take(d.qk_dim).collect();
                        assert_eq!(keys, token(&kv, l, slot(t), h).0, "layer {l}, token {t}, head {h}");
                    }
                    for (t, h) in (0..tokens).flat_map(|t| (0..d.kv_heads).map(move |h| (t, h))).filter(|_| !d.v_in_k) {
                        let row: Vec<_> = values.by_ref().take(d.v_dim).collect();
                        assert_eq!(row, token(&kv, l, slot(t), h).1[..d.v_dim], "layer {l}, token {t}, head {h}");
                    }
                }
                assert_eq!(values.next(), None);

                // Other values over these tokens, and what was read back over them: not a bit differs, padding included.
                let before = bytes_of(&kv);
                for l in (0..5).filter(|l| shape.group_of[*l] == group) {
                    let slots: Vec<_> = (0..tokens as u32).map(|t| block * 16 + t).collect();
                    let d = shape.layers[l];
                    let heads = Heads { stride: 0, offset: 0, heads: d.kv_heads, dim: d.qk_dim };
                    let src = vec![f32::NAN; d.kv_heads * d.qk_dim.max(d.v_dim)];
                    kv.write(&Pool::new(1).unwrap(), Tier::best(), l, &slots, &src, heads, Heads { dim: d.v_dim, ..heads });
                }
                assert_eq!(bytes_of(&kv) == before, tokens == 0);
                kv.write_block(group, BlockId(block), tokens, &bytes);
                assert!(bytes_of(&kv) == before, "{dtype:?}, {tokens} tokens of block {block} of group {group}");
                // And into a cache of nothing, from another block: what kv_write would have left there.
                let mut other = CpuKv::new(&shape).unwrap();
                other.write_block(group, BlockId(1), tokens, &bytes);
                let mut again = vec![0; bytes.len()];
                other.read_block(group, BlockId(1), tokens, &mut again);
                assert_eq!(again, bytes);
                other.copy_blocks(&[copy(group, 1, 0)]);
                other.read_block(group, BlockId(0), tokens, &mut again);
                assert_eq!(again, bytes);
            }
        }
    }
}

#[test]
fn layers_and_groups_that_do_not_agree_are_refused() {
    let (shape, _) = written(KvDType::F16);
    for wrong in [
        KvShape { group_of: vec![0, 1, 1, 0], ..shape.clone() },
        KvShape { group_of: vec![0, 1, 2, 0, 1], ..shape.clone() },
        KvShape { swap: vec![0], ..shape.clone() },
    ] {
        assert!(matches!(CpuKv::new(&wrong), Err(RunError::Device { message, .. }) if message.contains("2 groups of blocks")));
    }
}
