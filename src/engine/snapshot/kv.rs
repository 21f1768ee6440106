//! Cached keys and values as a snapshot holds them: token after token, whatever blocks they lay in, as they are or in 8 bits.
//! Knows no block table and no device.
//!
//! ```text
//! a block, of n tokens:  for each part (the keys of a layer, or its values) the part of token 0, 1, .. n - 1
//! a record:              one token's parts, one after the other
//! in 8 bits:             for each row (one head's key or value): its scale as bf16, and an i8 for each value
//! ```
//!
//! A latent (MLA) is two rows: what is also the value, and the rotated part of the key, which is of another magnitude.
//!
//! Invariant: the lengths of records follow from the model alone.
#![forbid(unsafe_code)]

use crate::arch::{AttnDims, ModelSpec};
use crate::dtype::KvDType;
use half::{bf16, f16};

/// One token's keys, or its values, in one layer.
struct Part {
    /// In the record.
    offset: usize,
    bytes: usize,
}

/// What a token has in the layers of one group.
pub(super) struct Layout {
    dtype: KvDType,
    parts: Vec<Part>,
    /// Values of each row, in the order of the record.
    rows: Vec<usize>,
    record: usize,
}

impl Layout {
    /// Of the layers of `group`.
    pub(super) fn of(spec: &ModelSpec, group: usize, dtype: KvDType) -> Self {
        let groups = spec.groups();
        let mut layout = Layout { dtype, parts: Vec::new(), rows: Vec::new(), record: 0 };
        for (layer, _) in spec.layers.iter().zip(groups.layers()).filter(|(_, g)| **g == group) {
            let AttnDims { kv_heads, qk_dim, v_dim, v_in_k, .. } = layer.attn.dims();
            if v_in_k {
                layout.part(kv_heads, &[v_dim, qk_dim - v_dim]);
            } else {
                layout.part(kv_heads, &[qk_dim]);
                layout.part(kv_heads, &[v_dim]);
            }
        }
        layout
    }

    fn part(&mut self, heads: usize, rows: &[usize]) {
        let bytes = heads * rows.iter().sum::<usize>() * self.dtype.bytes();
        self.parts.push(Part { offset: self.record, bytes });
        self.record += bytes;
        (0..heads).for_each(|_| self.rows.extend_from_slice(rows));
    }

    /// Bytes of a record.
    pub(super) fn record_bytes(&self) -> usize {
        self.record
    }

    /// Bytes of a record in 8 bits.
    pub(super) fn small_bytes(&self) -> usize {
        self.rows.iter().map(|n| SCALE_BYTES + n).sum()
    }

    /// Token `t` of a block of `tokens` tokens.
    pub(super) fn take(&self, block: &[u8], tokens: usize, t: usize, record: &mut [u8]) {
        for Part { offset, bytes } in &self.parts {
            let at = offset * tokens + t * bytes;
            record[*offset..offset + bytes].copy_from_slice(&block[at..at + bytes]);
        }
    }

    /// The reverse of [`take`](Self::take).
    pub(super) fn put(&self, record: &[u8], tokens: usize, t: usize, block: &mut [u8]) {
        for Part { offset, bytes } in &self.parts {
            let at = offset * tokens + t * bytes;
            block[at..at + bytes].copy_from_slice(&record[*offset..offset + bytes]);
        }
    }

    /// A record in 8 bits: a value is off by at most half a step, which is 0.4% of the largest in its row.
    ///
    /// # Errors
    /// A value that is not finite.
    pub(super) fn shrink(&self, record: &[u8], out: &mut [u8]) -> Result<(), f32> {
        let (size, mut from, mut to) = (self.dtype.bytes(), 0, 0);
        for &n in &self.rows {
            let values = record[from..from + n * size].chunks_exact(size).map(|b| self.load(b));
            if let Some(value) = values.clone().find(|v| !v.is_finite()) {
                return Err(value);
            }
            let most = values.clone().fold(0.0f32, |most, v| most.max(v.abs()));
            // Rounded up, so that no value is more than 127 steps.
            let step = (most / 127.0).to_bits();
            let bits = ((step >> 16) + u32::from(step & 0xffff != 0)) as u16;
            let scale = scale_of(bits);
            out[to..to + SCALE_BYTES].copy_from_slice(&bits.to_le_bytes());
            for (out, v) in out[to + SCALE_BYTES..].iter_mut().zip(values) {
                *out = if scale > 0.0 { (v / scale).round() as i8 as u8 } else { 0 };
            }
            (from, to) = (from + n * size, to + SCALE_BYTES + n);
        }
        Ok(())
    }

    /// The reverse of [`shrink`](Self::shrink).
    ///
    /// # Errors
    /// A scale that no `shrink` has given: negative, or such that its steps do not fit the cache's type.
    pub(super) fn grow(&self, small: &[u8], record: &mut [u8]) -> Result<(), f32> {
        let (size, mut from, mut to) = (self.dtype.bytes(), 0, 0);
        let most = match self.dtype {
            KvDType::F32 => f32::MAX,
            KvDType::F16 => f32::from(f16::MAX),
            KvDType::BF16 => f32::from(bf16::MAX),
        };
        for &n in &self.rows {
            let scale = scale_of(u16::from_le_bytes([small[from], small[from + 1]]));
            let steps = &small[from + SCALE_BYTES..from + SCALE_BYTES + n];
            let far = steps.iter().map(|&s| (s as i8).unsigned_abs()).max().unwrap_or(0);
            // It was rounded up: the largest value may come out by a 128th too large, and is cut to what fits.
            let fits = scale.is_finite() && scale * f32::from(far) <= most * (1.0 + 1.0 / 64.0);
            if scale.is_sign_negative() || !fits {
                return Err(scale);
            }
            for (out, &step) in record[to..].chunks_exact_mut(size).zip(steps) {
                self.store((f32::from(step as i8) * scale).clamp(-most, most), out);
            }
            (from, to) = (from + SCALE_BYTES + n, to + n * size);
        }
        Ok(())
    }

    fn load(&self, bytes: &[u8]) -> f32 {
        match self.dtype {
            KvDType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            KvDType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            KvDType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        }
    }

    fn store(&self, value: f32, out: &mut [u8]) {
        match self.dtype {
            KvDType::F32 => out.copy_from_slice(&value.to_le_bytes()),
            KvDType::F16 => out.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            KvDType::BF16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        }
    }
}

fn scale_of(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

const SCALE_BYTES: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dtype: KvDType) -> Layout {
        let mut layout = Layout { dtype, parts: Vec::new(), rows: Vec::new(), record: 0 };
        layout.part(2, &[3]);
        layout.part(2, &[4]);
        layout.part(1, &[5, 2]);
        layout
    }

    #[test]
    fn records_are_taken_out_of_blocks_and_put_into_others() {
        let layout = layout(KvDType::F16);
        let size = layout.record_bytes();
        let block: Vec<u8> = (0..5 * size).map(|i| i as u8).collect();
        let mut record = vec![0; size];
        let mut rest = vec![0; 3 * size];
        for t in 0..5 {
            layout.take(&block, 5, t, &mut record);
            // Two heads' keys of two bytes.
            assert_eq!(record[..12], block[12 * t..12 * (t + 1)]);
            if t >= 2 {
                layout.put(&record, 3, t - 2, &mut rest);
            }
        }
        let mut again = vec![0; size];
        for t in 0..3 {
            layout.take(&rest, 3, t, &mut again);
            layout.take(&block, 5, t + 2, &mut record);
            assert_eq!(again, record);
        }
    }

    #[test]
    fn eight_bits_are_as_close_as_they_say() {
        for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
            let layout = layout(dtype);
            let (values, size) = (21, dtype.bytes());
            for magnitude in [0.0, 1e-6, 1.0, 300.0, 65504.0] {
                let mut record = vec![0; layout.record_bytes()];
                for i in 0..values {
                    let v = magnitude * ((i * i * 7 % 19) as f32 / 9.0 - 1.0);
                    layout.store(v, &mut record[i * size..(i + 1) * size]);
                }
                let mut small = vec![0; layout.small_bytes()];
                let mut back = vec![0; record.len()];
                layout.shrink(&record, &mut small).unwrap();
                layout.grow(&small, &mut back).unwrap();
                let at = |record: &[u8], i: usize| layout.load(&record[i * size..(i + 1) * size]);
                let mut first = 0;
                for &n in &layout.rows {
                    let most = (first..first + n).map(|i| at(&record, i).abs()).fold(0.0, f32::max);
                    // Half a step, the scale's own rounding, and that of the smallest halves.
                    let bound = most / 127.0 / 2.0 * (1.0 + 1.0 / 128.0) + most / 2048.0 + 6e-8;
                    for i in first..first + n {
                        let off = (at(&back, i) - at(&record, i)).abs();
                        assert!(off <= bound, "{dtype} {magnitude}: {off} > {bound}");
                    }
                    first += n;
                }
            }
        }
    }

    #[test]
    fn what_eight_bits_cannot_say_is_refused() {
        let layout = layout(KvDType::F16);
        let mut small = vec![0; layout.small_bytes()];
        let mut record = vec![0; layout.record_bytes()];
        record[1] = 0x7c;
        assert_eq!(layout.shrink(&record, &mut small), Err(f32::INFINITY));
        for scale in [0xbf80u16, 0x7f80, 0x7fc0, 0x4480] {
            small.fill(127);
            small[..2].copy_from_slice(&scale.to_le_bytes());
            assert!(layout.grow(&small, &mut record).is_err(), "{scale:x}");
        }
    }
}
