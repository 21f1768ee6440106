//! Attention of query rows over one piece of a paged cache, written once over [`Lanes`].
//!
//! ```text
//! s[r][t] = sum over d of q[r][d] * k[t][d]     lane = token, d ascending, one fused chain
//! s = cap * tanh(s)                             where there is a cap
//! m[r] = max s, p[r][t] = 2^(s - m)             over the row's own tokens of the piece
//! l[r] = sum of p                               in 16 lanes by t % 16, then by halves
//! o[r][d] = sum over t of p[r][t] * v[t][d]     lane = dimension, t ascending, one fused chain
//! ```
//!
//! Rows go through in kernel tiles that keep their sums in registers. One kernel tile reads the cache itself; of several, as
//! in a prompt, some vectors of keys and then a column of values are widened once into a panel that stays in the first cache,
//! and every kernel tile passes over it. Where values are part of the keys the column is turned on its way there.
//!
//! Neither product needs a sum across lanes. A row's bits depend on its own tokens alone: those beyond its range are never
//! added, not even with the weight 0, so that garbage in them stays there. How many rows go together changes no bit, nor
//! whether tokens go in one call or in several.
#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
use super::lanes::Neon;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512, ScalarFma, Sse41};
use super::lanes::{Base, Bf16, Elem, LANES};
use crate::dtype::KvDType;
use loops::{Keys, Values};
use std::ops::Range;

mod loops;

/// Tokens between two joins. Pieces start at multiples of it.
pub(in super::super) const PIECE: usize = 256;
/// Vectors of tokens in a piece.
pub(in super::super) const VECTORS: usize = PIECE / LANES;
/// The most rows in a kernel tile, whatever the tier.
pub(in super::super) const MAX_ROWS: usize = 12;
/// Values after the sums of a part: largest score, sum of the weights, and room up to a whole line.
pub(in super::super) const PART_TAIL: usize = LANES;

/// Where some tokens of a piece lie in the cache.
#[derive(Clone, Copy)]
pub(in super::super) struct Stored {
    /// For each 16 tokens: their keys, `[qk_dim]` rows of 16 values, `block_size` values apart.
    pub(in super::super) keys: [*const u8; VECTORS],
    /// For each 16 tokens: their values, 16 rows of `v_width`, one after the other. Not read where values are part of keys.
    pub(in super::super) values: [*const u8; VECTORS],
    /// Type of both.
    pub(in super::super) dtype: KvDType,
    /// Width of a key.
    pub(in super::super) qk_dim: usize,
    /// Width of a value, a multiple of 16: where it is part of its key, less than 16 wider than that.
    pub(in super::super) v_width: usize,
    /// A value is the first part of its key.
    pub(in super::super) v_in_k: bool,
    /// Tokens in a block of the cache.
    pub(in super::super) block_size: usize,
}

/// The attention kernels of a tier.
pub(in super::super) struct AttnKernels {
    /// Rows that the tier's kernel tiles have, rising.
    heights: &'static [usize],
    /// Vectors of tokens at a time in the scores of the higher half of them.
    step: usize,
    /// Vectors of a value at a time in the sums of the highest.
    columns: usize,
    f32: Loops,
    f16: Loops,
    bf16: Loops,
    queries: fn(usize) -> QueriesFn,
    softmax: SoftmaxFn,
    join: unsafe fn(&mut [f32], &[f32]),
    finish: unsafe fn(&[f32], Option<f32>, &mut [f32]),
    narrow: unsafe fn(&[f32], &mut [u16]),
}

/// The loops for a type of the cache: by their number of rows those of a kernel tile, and what fills panels.
struct Loops {
    scores: fn(usize) -> ScoresFn,
    weigh: fn(usize) -> WeighFn,
    weigh_some: fn(usize) -> WeighSomeFn,
    widen_keys: unsafe fn(&Keys<'_>, &mut [f32]),
    widen_values: unsafe fn(&Values<'_>, Range<usize>, &mut [f32]),
    turn_values: unsafe fn(&Keys<'_>, &Values<'_>, &mut [f32]),
}

type QueriesFn = unsafe fn(&[&[f32]], f32, &mut [f32]);
type ScoresFn = unsafe fn(&[f32], &Keys<'_>, &mut [f32]);
type SoftmaxFn = unsafe fn(&[(usize, usize)], Option<f32>, &mut [f32], &mut [f32], usize);
type WeighFn = unsafe fn(&[f32], &Values<'_>, Range<usize>, usize, &mut [f32]);
type WeighSomeFn = unsafe fn(&[f32], &Values<'_>, Range<usize>, &[(usize, usize)], &mut [f32]);

/// Some of the rows that go through together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) struct KernelTile {
    /// The first of them.
    pub(in super::super) first: usize,
    /// How many.
    pub(in super::super) rows: usize,
    /// Rows that the kernel has.
    pub(in super::super) height: usize,
    /// Heights of the kernel tiles before it.
    pub(in super::super) before: usize,
}

impl AttnKernels {
    /// The most rows in a kernel tile.
    pub(in super::super) fn tile_rows(&self) -> usize {
        self.heights[self.heights.len() - 1]
    }

    /// Rows of the kernel tile that `rows` rows go into.
    fn height(&self, rows: usize) -> usize {
        *self.heights.iter().find(|&&h| h >= rows).expect("no more rows than a tile has")
    }

    /// The kernel tiles of so many rows: as few as can be, and much alike. Their heights are at most half as much again.
    pub(in super::super) fn tiles(&self, rows: usize) -> impl Iterator<Item = KernelTile> + use<'_> {
        let tiles = rows.div_ceil(self.tile_rows()).max(1);
        let (each, more) = (rows / tiles, rows % tiles);
        let (high, low) = (self.height(each + usize::from(more > 0)), self.height(each));
        (0..tiles).filter(move |_| rows > 0).map(move |i| KernelTile {
            first: i * each + i.min(more),
            rows: each + usize::from(i < more),
            height: if i < more { high } else { low },
            before: i.min(more) * high + i.saturating_sub(more) * low,
        })
    }

    /// Values of the panel that layers of these widths need.
    pub(in super::super) fn panel(&self, qk_dim: usize) -> usize {
        (self.group(qk_dim) * qk_dim * LANES).max(PIECE * self.columns * LANES)
    }

    /// Vectors of keys in a panel.
    fn group(&self, qk_dim: usize) -> usize {
        (KEYS_PANEL / (qk_dim * LANES)).max(1).next_multiple_of(self.step).min(VECTORS)
    }

    fn loops(&self, dtype: KvDType) -> &Loops {
        match dtype {
            KvDType::F32 => &self.f32,
            KvDType::F16 => &self.f16,
            KvDType::BF16 => &self.bf16,
        }
    }

    /// A kernel tile's queries as `[qk_dim][height]`, times a factor.
    pub(in super::super) fn queries(&self, rows: &[&[f32]], factor: f32, to: &mut [f32]) {
        let height = self.height(rows.len());
        assert!(rows.iter().all(|row| row.len() * height == to.len()), "{} values for {} rows", to.len(), rows.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.queries)(height)(rows, factor, to) };
    }

    /// Scores of rows for all vectors of the tokens in `ranges`, one for each row: `[rows][PIECE]` with room for [`MAX_ROWS`] more.
    /// `q` holds `[qk_dim][height]` for each of their kernel tiles, one after the other.
    ///
    /// # Safety
    /// Where a row has tokens, their keys are what [`Stored`] says.
    pub(in super::super) unsafe fn scores(
        &self,
        q: &[f32],
        ranges: &[(usize, usize)],
        stored: &Stored,
        panel: &mut [f32],
        scores: &mut [f32],
    ) {
        let (rows, &Stored { qk_dim, block_size, .. }) = (ranges.len(), stored);
        let (first, end) = vectors(ranges);
        if first >= end {
            return;
        }
        assert!(end <= VECTORS && scores.len() >= (rows + MAX_ROWS) * PIECE && panel.len() >= self.panel(qk_dim));
        let height = self.tiles(rows).map(|t| t.height).sum::<usize>();
        assert!(q.len() >= height * qk_dim, "queries of {rows} rows");
        let keys =
            |first, end| Keys { at: &stored.keys, vectors: (first, end), stride: block_size, qk_dim, after: &stored.values };
        if rows <= self.tile_rows() {
            let run = (self.loops(stored.dtype).scores)(height);
            // SAFETY: lengths are as asserted, keys as the caller promises; the tier's instructions are there.
            return unsafe { run(q, &keys(first, end), scores) };
        }
        let group = self.group(qk_dim);
        for start in (first..end).step_by(group) {
            let stop = end.min(start + group);
            let (mut after, mut at) = ([std::ptr::null(); VECTORS], [std::ptr::null(); VECTORS]);
            for (i, after) in after.iter_mut().enumerate().take(stop).skip(start) {
                *after = stored.keys[(i + group).min(end - 1)];
            }
            // SAFETY: as above.
            unsafe { (self.loops(stored.dtype).widen_keys)(&Keys { after: &after, ..keys(start, stop) }, panel) };
            for (at, panel) in at[start..stop].iter_mut().zip(panel.chunks_exact(qk_dim * LANES)) {
                *at = panel.as_ptr().cast();
            }
            for tile in self.tiles(rows) {
                let (first, end) = vectors(&ranges[tile.first..][..tile.rows]);
                let (first, end) = (first.max(start), end.min(stop));
                if first < end {
                    let keys = Keys { at: &at, vectors: (first, end), stride: LANES, qk_dim, after: &at };
                    let run = (self.f32.scores)(tile.height);
                    // SAFETY: as above; the panel holds the keys of start..stop.
                    unsafe { run(&q[tile.before * qk_dim..], &keys, &mut scores[tile.first * PIECE..]) };
                }
            }
        }
    }

    /// Scores to weights, over the tokens that each row sees. Parts are `[rows][v_width + PART_TAIL]`: no sums yet, then the
    /// largest score and the sum of weights. Rows without tokens are left.
    pub(in super::super) fn softmax(
        &self,
        ranges: &[(usize, usize)],
        cap: Option<f32>,
        scores: &mut [f32],
        parts: &mut [f32],
        v_width: usize,
    ) {
        assert!(ranges.iter().all(|r| r.1 <= PIECE));
        // SAFETY: the tier's instructions are there.
        unsafe { (self.softmax)(ranges, cap, scores, parts, v_width) };
    }

    /// Adds the weighted values of the tokens in `ranges`, one for each row, to the rows' parts. Weights are as scores.
    ///
    /// # Safety
    /// Where a row has tokens, their values, or keys, are what [`Stored`] says.
    pub(in super::super) unsafe fn weigh(
        &self,
        weights: &[f32],
        ranges: &[(usize, usize)],
        stored: &Stored,
        panel: &mut [f32],
        parts: &mut [f32],
    ) {
        let (rows, &Stored { qk_dim, v_width, v_in_k, block_size, .. }) = (ranges.len(), stored);
        let (first, end) = union(ranges);
        if first >= end {
            return;
        }
        assert!(end <= PIECE && weights.len() >= (rows + MAX_ROWS) * PIECE && panel.len() >= self.panel(qk_dim));
        assert!(v_width.is_multiple_of(LANES) && (!v_in_k || v_width < qk_dim + LANES), "{v_width} of {qk_dim}");
        let (loops, vectors) = (self.loops(stored.dtype), vectors(ranges));
        if rows <= self.tile_rows() && !v_in_k {
            let values = Values { at: &stored.values, stride: v_width, columns: v_width, column: 0, v_width };
            // SAFETY: lengths are as asserted, values as the caller promises.
            return unsafe { self.weigh_tile(loops, weights, &values, ranges, parts) };
        }
        for column in (0..v_width).step_by(self.columns * LANES) {
            let columns = (self.columns * LANES).min(v_width - column);
            let from = Values { at: &stored.values, stride: v_width, columns, column, v_width };
            if v_in_k {
                let keys = Keys { at: &stored.keys, vectors, stride: block_size, qk_dim, after: &stored.keys };
                // SAFETY: as above; the tier's instructions are there.
                unsafe { (loops.turn_values)(&keys, &from, panel) };
            } else {
                // SAFETY: as above.
                unsafe { (loops.widen_values)(&from, vectors.0..vectors.1, panel) };
            }
            let mut at = [std::ptr::null(); VECTORS];
            for (at, panel) in at.iter_mut().zip(panel.chunks_exact(LANES * columns)) {
                *at = panel.as_ptr().cast();
            }
            let values = Values { at: &at, stride: columns, columns, column, v_width };
            for tile in self.tiles(rows) {
                let ranges = &ranges[tile.first..][..tile.rows];
                let (weights, parts) = (&weights[tile.first * PIECE..], &mut parts[tile.first * (v_width + PART_TAIL)..]);
                // SAFETY: as above; the panel holds the values.
                unsafe { self.weigh_tile(&self.f32, weights, &values, ranges, parts) };
            }
        }
    }

    /// Tokens that all rows see go through without asking; those of some rows only, before and after.
    ///
    /// # Safety
    /// As [`weigh`](Self::weigh).
    unsafe fn weigh_tile(
        &self,
        loops: &Loops,
        weights: &[f32],
        values: &Values<'_>,
        ranges: &[(usize, usize)],
        parts: &mut [f32],
    ) {
        let (rows, (first, end)) = (ranges.len(), union(ranges));
        let (mut from, mut to) = ranges.iter().fold((first, end), |(f, e), r| (f.max(r.0), e.min(r.1)));
        if from >= to {
            (from, to) = (end, end);
        }
        let (all, some) = ((loops.weigh)(self.height(rows)), (loops.weigh_some)(self.height(rows)));
        // SAFETY: every token has values that some row sees; the tier's instructions are there.
        unsafe {
            if first < from {
                some(weights, values, first..from, ranges, parts);
            }
            if from < to {
                all(weights, values, from..to, rows, parts);
            }
            if to < end {
                some(weights, values, to..end, ranges, parts);
            }
        }
    }

    /// Adds a part to what the pieces before it gave; both are `[v_width + PART_TAIL]`.
    pub(in super::super) fn join(&self, state: &mut [f32], part: &[f32]) {
        assert!(state.len() == part.len() && part.len().is_multiple_of(LANES) && part.len() > LANES);
        // SAFETY: the tier's instructions are there.
        unsafe { (self.join)(state, part) }
    }

    /// The weighted mean: sums over the sum of weights. A sink is one more score, a power of two, whose value is 0.
    pub(in super::super) fn finish(&self, state: &[f32], sink: Option<f32>, out: &mut [f32]) {
        assert!(out.len() + PART_TAIL <= state.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.finish)(state, sink, out) }
    }

    /// To half precision.
    pub(in super::super) fn narrow(&self, from: &[f32], to: &mut [u16]) {
        assert_eq!(from.len(), to.len());
        // SAFETY: the tier's instructions are there.
        unsafe { (self.narrow)(from, to) }
    }
}

/// From the first to the end of all that some row sees.
fn union(ranges: &[(usize, usize)]) -> (usize, usize) {
    let seen = ranges.iter().filter(|r| r.0 < r.1);
    seen.fold((PIECE, 0), |(first, end), r| (first.min(r.0), end.max(r.1)))
}

/// The vectors of those.
fn vectors(ranges: &[(usize, usize)]) -> (usize, usize) {
    let (first, end) = union(ranges);
    (first / LANES, end.div_ceil(LANES))
}

/// Heights that [`AttnKernels::tiles`] can promise its room for.
const fn checked(heights: &'static [usize]) -> &'static [usize] {
    assert!(heights[0] == 1 && heights[heights.len() - 1] <= MAX_ROWS, "from one row to the most");
    let mut i = 1;
    while i < heights.len() {
        let least = heights[i - 1] + 1;
        assert!(least <= heights[i] && heights[i] <= least + least / 2, "rising by no more than half");
        i += 1;
    }
    heights
}

/// The most vectors at a time among the heights from half the highest on.
const fn most(heights: &[usize], vectors: &[usize]) -> usize {
    let (mut most, mut i) = (1, 0);
    while i < heights.len() {
        if 2 * heights[i] >= heights[heights.len() - 1] && vectors[i] > most {
            most = vectors[i];
        }
        i += 1;
    }
    most
}

/// The tile shapes of a tier: `rows: token vectors at a time in the scores, value vectors at a time in the sums`.
macro_rules! tier {
    ($table:ident, $module:ident, $lanes:ident, $features:tt, $($rows:literal: $b:literal, $n:literal;)*) => {
        pub(in super::super) static $table: AttnKernels = AttnKernels {
            heights: checked(&[$($rows),*]),
            step: most(&[$($rows),*], &[$($b),*]),
            columns: *[$($n),*].last().expect("a shape"),
            f32: $module::loops::<f32>(),
            f16: $module::loops::<u16>(),
            bf16: $module::loops::<Bf16>(),
            queries: |height| match height {
                $($rows => $module::queries::<$rows>,)*
                _ => unreachable!("{height} is a height of the tier"),
            },
            softmax: $module::softmax,
            join: $module::join,
            finish: $module::finish,
            narrow: $module::narrow,
        };

        mod $module {
            use super::*;

            pub(super) const fn loops<E: Elem>() -> Loops {
                Loops {
                    scores: |height| match height {
                        $($rows => scores::<E, $rows, $b>,)*
                        _ => unreachable!("{height} is a height of the tier"),
                    },
                    weigh: |height| match height {
                        $($rows => weigh::<E, $rows, $n>,)*
                        _ => unreachable!("{height} is a height of the tier"),
                    },
                    weigh_some: |height| match height {
                        $($rows => weigh_some::<E, $rows>,)*
                        _ => unreachable!("{height} is a height of the tier"),
                    },
                    widen_keys: widen_keys::<E>,
                    widen_values: widen_values::<E>,
                    turn_values: turn_values::<E>,
                }
            }

            enable!($features, unsafe fn scores<E: Elem, const R: usize, const B: usize>(q: &[f32], keys: &Keys<'_>, to: &mut [f32]) {
                // SAFETY: the caller's.
                unsafe { super::loops::scores::<$lanes, E, R, B>(q, keys, to) }
            });
            enable!($features, pub(super) unsafe fn queries<const R: usize>(rows: &[&[f32]], factor: f32, to: &mut [f32]) {
                super::loops::queries::<R>(rows, factor, to)
            });
            enable!($features, pub(super) unsafe fn softmax(
                ranges: &[(usize, usize)],
                cap: Option<f32>,
                scores: &mut [f32],
                parts: &mut [f32],
                v_width: usize,
            ) {
                super::loops::softmax::<$lanes>(ranges, cap, scores, parts, v_width)
            });
            enable!($features, unsafe fn weigh<E: Elem, const R: usize, const N: usize>(
                weights: &[f32],
                values: &Values<'_>,
                tokens: Range<usize>,
                rows: usize,
                parts: &mut [f32],
            ) {
                // SAFETY: the caller's.
                unsafe { super::loops::weigh::<$lanes, E, R, N>(weights, values, tokens, rows, parts) }
            });
            enable!($features, unsafe fn weigh_some<E: Elem, const R: usize>(
                weights: &[f32],
                values: &Values<'_>,
                tokens: Range<usize>,
                ranges: &[(usize, usize)],
                parts: &mut [f32],
            ) {
                // SAFETY: the caller's.
                unsafe { super::loops::weigh_some::<$lanes, E, R>(weights, values, tokens, ranges, parts) }
            });
            enable!($features, unsafe fn widen_keys<E: Elem>(keys: &Keys<'_>, to: &mut [f32]) {
                // SAFETY: the caller's.
                unsafe { super::loops::widen_keys::<$lanes, E>(keys, to) }
            });
            enable!($features, unsafe fn widen_values<E: Elem>(values: &Values<'_>, vectors: Range<usize>, to: &mut [f32]) {
                // SAFETY: the caller's.
                unsafe { super::loops::widen_values::<$lanes, E>(values, vectors, to) }
            });
            enable!($features, unsafe fn turn_values<E: Elem>(keys: &Keys<'_>, values: &Values<'_>, to: &mut [f32]) {
                // SAFETY: the caller's.
                unsafe { super::loops::turn_values::<$lanes, E>(keys, values, to) }
            });
            enable!($features, pub(super) unsafe fn join(state: &mut [f32], part: &[f32]) {
                super::loops::join::<$lanes>(state, part)
            });
            enable!($features, pub(super) unsafe fn finish(state: &[f32], sink: Option<f32>, out: &mut [f32]) {
                super::loops::finish::<$lanes>(state, sink, out)
            });
            enable!($features, pub(super) unsafe fn narrow(from: &[f32], to: &mut [u16]) {
                super::loops::narrow::<$lanes>(from, to)
            });
        }
    };
}

tier!(SCALAR, scalar, Base, "", 1: 1, 1; 2: 1, 1; 4: 1, 1;);
#[cfg(target_arch = "x86_64")]
tier!(SCALAR_FMA, scalar_fma, ScalarFma, "fma", 1: 1, 1; 2: 1, 1; 4: 1, 1;);
// Four registers a vector, and a multiply-add needs several more: one row at a time loses nothing.
#[cfg(target_arch = "x86_64")]
tier!(SSE41, sse41, Sse41, "ssse3,sse4.1", 1: 1, 1; 2: 1, 1; 4: 1, 1;);
// 32 registers, four a vector: at most 24 hold sums.
#[cfg(target_arch = "aarch64")]
tier!(NEON, neon, Neon, "neon", 1: 4, 4; 2: 2, 2; 3: 2, 2; 4: 1, 1; 6: 1, 1;);
// 16 registers, two a vector: at most 12 hold sums.
#[cfg(target_arch = "x86_64")]
tier!(AVX2, avx2, Avx2, "avx2,fma,f16c", 1: 4, 4; 2: 2, 2; 3: 1, 1; 4: 1, 1; 5: 1, 1; 6: 1, 1;);
// 32 registers: at most 24 hold sums.
#[cfg(target_arch = "x86_64")]
macro_rules! tier_of_32_registers {
    ($table:ident, $module:ident, $lanes:ident, $features:tt) => {
        tier!($table, $module, $lanes, $features,
            1: 8, 4; 2: 4, 4; 3: 4, 4; 4: 4, 4; 6: 4, 4; 8: 2, 2; 12: 2, 2;);
    };
}
#[cfg(target_arch = "x86_64")]
tier_of_32_registers!(AVX512, avx512, Avx512, "avx512f,avx512bw,avx512vl,avx2,fma,f16c");
// The same shapes for machines without AVX-512: their tiles, panels and padding are tested where its instructions are not.
#[cfg(all(test, target_arch = "x86_64"))]
tier_of_32_registers!(AVX512_TWIN, avx512_twin, ScalarFma, "fma");

/// Values of a panel of keys: half of a first cache.
const KEYS_PANEL: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_tiles_hold_all_rows_in_the_room_there_is() {
        #[cfg(target_arch = "x86_64")]
        let tiers = [&SCALAR, &SSE41, &AVX2, &AVX512];
        #[cfg(target_arch = "aarch64")]
        let tiers = [&SCALAR, &NEON];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let tiers = [&SCALAR];
        for (i, tier) in tiers.into_iter().enumerate() {
            for rows in 1..=100 {
                let (mut first, mut before) = (0, 0);
                for tile in tier.tiles(rows) {
                    assert_eq!((tile.first, tile.before), (first, before), "{i} {rows}");
                    assert!((1..=tile.height).contains(&tile.rows) && tile.height <= tier.tile_rows());
                    (first, before) = (first + tile.rows, before + tile.height);
                }
                assert_eq!(first, rows, "{i}");
                assert!(before <= rows + rows / 2, "{i}: {before} for {rows}");
                assert_eq!(tier.tiles(rows).count(), rows.div_ceil(tier.tile_rows()));
            }
            assert_eq!(tier.tiles(0).count(), 0);
        }
    }
}
