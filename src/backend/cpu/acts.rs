//! Activations, laid out for the matrix kernels: rows in tiles of at most `rows_max`, interleaved so that one pointer with
//! constant offsets reaches every row of a tile.
//!
//! For quantised weights a tile of R rows is, per block of 32 k, `12 * R` words of 4 bytes:
//!
//! ```text
//! scale: f32[R]   sum: f32[R] (scale * sum of q)   init8: i32[R]   init128: i32[R]   q: [8][R][4] i8 (k = 4 * g + i)
//! ```
//!
//! `init` is what an integer sum starts from: the bits of [`MAGIC`] less zero-point times the sum of q. The sum then reads as
//! the f32 `MAGIC + dot`, exactly (|dot| < 2^22), and a fused multiply-add takes `MAGIC` out again: no conversion from
//! integers. For plain weights a tile is `[k][R]` f32, which for one row is the row itself. A tier's kernels may lay a block's
//! words out otherwise (`simd/linear/avx2.rs`): they alone read what the tier's `quantize` wrote.
#![forbid(unsafe_code)]

/// 1.5 * 2^23: an f32 whose last bit is worth 1, with 22 bits of room on both sides.
pub(super) const MAGIC: f32 = 12_582_912.0;
pub(super) const MAGIC_BITS: i32 = MAGIC.to_bits() as i32;
/// Words of one row in one block of 32 k.
pub(super) const WORDS: usize = 12;
/// Below this a block counts as zero, so that 127 / amax stays finite and no product of scales underflows.
pub(super) const TINY: f32 = f32::from_bits((127 - 100) << 23);

/// Rows ready for a kernel.
#[derive(Clone, Copy)]
pub(super) struct Acts<'a> {
    pub(super) words: &'a [u32],
    /// Words of one row over all of K.
    pub(super) row_words: usize,
    pub(super) tiles: Tiles,
}

/// Rows cut into tiles: as few as possible, and as equal as possible.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    rows: usize,
    /// Tiles.
    pub(super) count: usize,
}

impl Tiles {
    /// `rows` in tiles of at most `rows_max`.
    pub(super) fn new(rows: usize, rows_max: usize) -> Self {
        Tiles { rows, count: rows.div_ceil(rows_max) }
    }

    /// First row and number of rows of tile `i`.
    pub(super) fn tile(self, i: usize) -> (usize, usize) {
        let (a, b) = (i * self.rows / self.count, (i + 1) * self.rows / self.count);
        (a, b - a)
    }
}

/// Words that a row of `k` values takes.
pub(super) fn row_words(quantized: bool, k: usize) -> usize {
    if quantized { k / 32 * WORDS } else { k }
}

/// The scalar truth: symmetric int8, scale = amax / 127, q = round-to-even(x * (127 / amax)). A block with a NaN or an
/// infinity gets scale NaN and q = 0, on every tier.
#[inline(always)]
pub(super) fn quantize_block(x: &[f32; 32]) -> (f32, [i8; 32]) {
    // As integers: exact, and a NaN wins.
    let amax = f32::from_bits(x.iter().fold(0, |top, v| top.max(v.to_bits() & 0x7fff_ffff)));
    let (scale, inv) = scales(amax);
    if inv == 0.0 {
        return (scale, [0; 32]);
    }
    (scale, x.map(|v| (v * inv).round_ties_even() as i8))
}

/// Scale and its inverse for a block's largest magnitude; the inverse is 0 where all quants are to be 0.
#[inline(always)]
pub(super) fn scales(amax: f32) -> (f32, f32) {
    if amax < TINY {
        (0.0, 0.0)
    } else if amax.is_finite() {
        (amax / 127.0, 127.0 / amax)
    } else {
        (f32::NAN, 0.0)
    }
}

/// Writes a block's four leading words for row `r` of `rows`.
#[inline(always)]
pub(super) fn put_head(words: &mut [u32], rows: usize, r: usize, scale: f32, sum: i32) {
    words[r] = scale.to_bits();
    words[rows + r] = (scale * sum as f32).to_bits();
    words[2 * rows + r] = (MAGIC_BITS - 8 * sum) as u32;
    words[3 * rows + r] = (MAGIC_BITS - 128 * sum) as u32;
}

/// Lays `rows` rows `x[r * stride..]` out for plain weights, k from `first` on until `out` is full.
pub(super) fn interleave(x: &[f32], stride: usize, rows: usize, first: usize, out: &mut [u32]) {
    for r in 0..rows {
        for (v, out) in x[r * stride + first..].iter().zip(out.chunks_exact_mut(rows)) {
            out[r] = v.to_bits();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_rows_in_order() {
        for rows in 1..40 {
            for rows_max in 1..13 {
                let tiles = Tiles::new(rows, rows_max);
                let mut next = 0;
                for i in 0..tiles.count {
                    let (first, n) = tiles.tile(i);
                    assert!(first == next && (1..=rows_max).contains(&n), "{rows} in {rows_max}");
                    next += n;
                }
                assert_eq!(next, rows);
            }
        }
    }

    #[test]
    fn a_block_quantises_to_the_nearest_step() {
        let mut x = [0.0f32; 32];
        for (i, v) in x.iter_mut().enumerate() {
            *v = (i as f32 - 16.0) * 0.37;
        }
        let (scale, q) = quantize_block(&x);
        assert_eq!(q[0], -127);
        for (v, q) in x.iter().zip(q) {
            assert!((v - scale * f32::from(q)).abs() <= 0.5001 * scale);
        }
        x[7] = f32::INFINITY;
        assert!(matches!(quantize_block(&x), (s, q) if s.is_nan() && q == [0; 32]));
        assert_eq!(quantize_block(&[1e-31; 32]).0.to_bits(), 0);
    }
}
