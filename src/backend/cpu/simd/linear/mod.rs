//! `y[M, N] = x[M, K] * w[N, K]^T`: which thread runs which panel over which rows and which part of K. The tiers' files
//! hold the inner loops.
//!
//! ```text
//! for runs of panels, from a counter:                     threads; panels write disjoint columns of y
//!   for a slice of rows whose activations stay in L2:
//!     for each panel:  for a slice of K that stays in L1:  kernel(all tiles of the rows); sums go on from y
//! ```
//!
//! Invariant: an output is one lane and K goes through it in order, whatever the slices, so no bit depends on them.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::LINEAR as AVX2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::LINEAR as AVX512;
pub(super) use scalar::LINEAR as SCALAR;
#[cfg(target_arch = "x86_64")]
pub(super) use scalar::LINEAR_FMA as SCALAR_FMA;

use crate::backend::cpu::acts::{Acts, Tiles, WORDS, interleave, row_words};
use crate::backend::cpu::panel::{KERNELS, LANES, Panel};
use crate::backend::cpu::pool::{Disjoint, Pool};
use crate::backend::cpu::weight::{Segment, Store};
use crate::quant::Codec;
use core::ops::Range;

/// A tier's matrix kernels.
pub(in crate::backend::cpu) struct LinearFns {
    /// Most rows in a tile, for quantised and for plain weights.
    pub(in crate::backend::cpu) rows_quant: usize,
    pub(in crate::backend::cpu) rows_plain: usize,
    /// Quantises a range of blocks of a tile's rows.
    ///
    /// # Safety
    /// The tier's CPU features are present.
    quantize: unsafe fn(&Rows<'_>, Range<usize>, &mut [u32]),
    /// One for each of [`Panel::kernel`].
    ///
    /// # Safety
    /// The tier's CPU features are present, and the job's `y` has `lanes` values in each row of its tiles that nobody else
    /// touches.
    panel: [unsafe fn(&Job<'_>); KERNELS],
}

/// The rows of one tile: row r starts at `r * k`.
struct Rows<'a> {
    x: &'a [f32],
    k: usize,
    rows: usize,
}

impl Rows<'_> {
    /// Block `b` of row `r`.
    #[inline(always)]
    fn block(&self, r: usize, b: usize) -> &[f32; 32] {
        self.x[r * self.k + 32 * b..][..32].try_into().expect("32 values")
    }
}

/// Blocks of one panel times some tiles of rows. From block 0 on sums start at zero, else they go on from `y`.
struct Job<'a> {
    /// The blocks.
    w: &'a [u8],
    /// The first one's index in the panel.
    first: usize,
    blocks: usize,
    acts: &'a Acts<'a>,
    tiles: Range<usize>,
    /// The matrix's first row at the panel's first output.
    y: *mut f32,
    y_stride: usize,
    /// Outputs that exist, 1 to 32.
    lanes: usize,
}

/// One tile of a job.
struct Tile<'a> {
    rows: usize,
    /// The tile's words from block 0 on.
    act: &'a [u32],
    /// Its first row at the panel's first output.
    y: *mut f32,
}

impl<'a> Job<'a> {
    fn tile(&self, i: usize) -> Tile<'a> {
        let (first, rows) = self.acts.tiles.tile(i);
        let words = self.acts.row_words;
        Tile { rows, act: &self.acts.words[first * words..][..rows * words], y: self.y.wrapping_add(first * self.y_stride) }
    }
}

/// What a matrix is multiplied with.
pub(in crate::backend::cpu) struct Input<'a> {
    /// `[rows, k]`.
    pub(in crate::backend::cpu) x: &'a [f32],
    pub(in crate::backend::cpu) rows: usize,
    pub(in crate::backend::cpu) k: usize,
    /// `[N]`, added to every row.
    pub(in crate::backend::cpu) bias: Option<&'a [f32]>,
}

impl LinearFns {
    /// `y[rows, n] = x * w^T (+ bias)`. `scratch` has room for `rows * k` words.
    ///
    /// # Panics
    /// Where a slice has not the length that the shapes ask for: a bug in the caller.
    pub(in crate::backend::cpu) fn matmul(
        &self,
        pool: &Pool,
        segments: &[Segment],
        n: usize,
        input: &Input<'_>,
        scratch: &mut [u32],
        y: &mut [f32],
    ) {
        let (rows, k) = (input.rows, input.k);
        assert!(input.x.len() == rows * k && y.len() == rows * n, "[{rows}, {k}] to [{rows}, {n}]");
        assert!(input.bias.is_none_or(|b| b.len() == n), "a bias of {n}");
        assert!(segments.iter().all(|s| s.column + s.rows <= n && s.k == k), "segments inside the matrix");
        if rows == 0 {
            return;
        }
        for quantized in [true, false] {
            let mine = || segments.iter().filter(|s| s.quantized() == quantized);
            let panels: usize = mine().map(Segment::panels).sum();
            if panels == 0 {
                continue;
            }
            let acts = &self.prepare(pool, quantized, input, scratch);
            let out = Out { y: y.as_mut_ptr(), stride: n };
            // Large enough that the counter costs nothing, small enough that the threads end together.
            let grain = (panels / (pool.threads() * 8)).clamp(1, 64);
            pool.for_each_chunk(panels, grain, |_, range| {
                let mut before = 0;
                for segment in mine() {
                    let count = segment.panels();
                    let (a, b) = (range.start.max(before), range.end.min(before + count));
                    if a < b {
                        // SAFETY: `y` is `rows` rows of `n`, the segments' columns lie inside and apart, and each panel is
                        // handed out once.
                        unsafe { self.panels(segment, a - before..b - before, acts, rows, out, input.bias) };
                    }
                    before += count;
                }
            });
        }
    }

    /// Lays the rows out, on all threads.
    fn prepare<'a>(&self, pool: &Pool, quantized: bool, input: &Input<'a>, scratch: &'a mut [u32]) -> Acts<'a> {
        let (rows, k) = (input.rows, input.k);
        let tiles = Tiles::new(rows, if quantized { self.rows_quant } else { self.rows_plain });
        let row_words = row_words(quantized, k);
        if !quantized && rows == 1 {
            return Acts { words: bytemuck::cast_slice(input.x), row_words, tiles };
        }
        let words = &mut scratch[..rows * row_words];
        let to = Disjoint::new(words);
        let (blocks, block_words) = (k.div_ceil(32), if quantized { WORDS } else { 32 });
        // Some microseconds of work, well above the cost of a fork.
        let (_, largest) = tiles.tile(tiles.count - 1);
        pool.for_each_chunk(tiles.count * blocks, 256usize.div_ceil(largest), |_, range| {
            let mut at = range.start;
            while at < range.end {
                let (tile, b) = (at / blocks, at % blocks);
                let end = blocks.min(range.end - tile * blocks);
                let (first, n) = tiles.tile(tile);
                let word = |block: usize| first * row_words + n * row_words.min(block * block_words);
                // SAFETY: a block of a tile is handed out once, and its words are its own.
                let out = unsafe { to.slice(word(b)..word(end)) };
                let x = &input.x[first * k..(first + n) * k];
                if quantized {
                    // SAFETY: the tier was chosen because its features are present.
                    unsafe { (self.quantize)(&Rows { x, k, rows: n }, b..end, out) };
                } else {
                    interleave(x, k, n, 32 * b, out);
                }
                at = tile * blocks + end;
            }
        });
        Acts { words, row_words, tiles }
    }

    /// Runs a segment's panels over all rows.
    ///
    /// # Safety
    /// `out` has `rows` rows that hold the segment's columns, and nobody else touches those of `range`.
    unsafe fn panels(&self, w: &Segment, range: Range<usize>, acts: &Acts<'_>, rows: usize, out: Out, bias: Option<&[f32]>) {
        match w.store {
            // SAFETY: passed on.
            Store::Panels(panel) => unsafe { self.packed(panel, w, range.clone(), acts, rows, out) },
            // SAFETY: passed on.
            Store::Source(codec) => unsafe { self.decoded(codec, w, range.clone(), acts, out) },
        }
        if let Some(bias) = bias {
            let columns = w.column + range.start * LANES..w.column + w.rows.min(range.end * LANES);
            for r in 0..rows {
                // SAFETY: columns of our own panels.
                let y = unsafe { core::slice::from_raw_parts_mut(out.y.add(r * out.stride + columns.start), columns.len()) };
                for (y, b) in y.iter_mut().zip(&bias[columns.clone()]) {
                    *y += b;
                }
            }
        }
    }

    /// # Safety
    /// As [`panels`](Self::panels).
    unsafe fn packed(&self, panel: &Panel, w: &Segment, range: Range<usize>, acts: &Acts<'_>, rows: usize, out: Out) {
        let blocks = w.k / panel.block_len;
        let count = acts.tiles.count;
        let per_slice = (ROWS_BYTES / (4 * acts.row_words * rows.div_ceil(count))).max(1);
        let most = if count > 1 { (PANEL_BYTES / panel.work_bytes).max(1) } else { blocks };
        let step = blocks.div_ceil(blocks.div_ceil(most));
        for tile in (0..count).step_by(per_slice) {
            for p in range.clone() {
                let bytes = w.panel(p);
                for first in (0..blocks).step_by(step) {
                    let here = step.min(blocks - first);
                    let job = Job {
                        w: &bytes[first * panel.bytes..][..here * panel.bytes],
                        first,
                        blocks: here,
                        acts,
                        tiles: tile..count.min(tile + per_slice),
                        y: out.y.wrapping_add(w.column + p * LANES),
                        y_stride: out.stride,
                        lanes: LANES.min(w.rows - p * LANES),
                    };
                    // SAFETY: the tier was chosen because its features are present; the columns are ours.
                    unsafe { (self.panel[panel.kernel])(&job) };
                }
            }
        }
    }

    /// Formats without a panel of their own: slices of K are decoded, exactly, and run as F32.
    ///
    /// # Safety
    /// As [`panels`](Self::panels).
    unsafe fn decoded(&self, codec: &Codec, w: &Segment, range: Range<usize>, acts: &Acts<'_>, out: Out) {
        let mut slice = Slice([0.0; LANES * SLICE]);
        let mut values = [0.0; SLICE];
        let f32_kernel = self.panel[0];
        for p in range {
            let lanes = LANES.min(w.rows - p * LANES);
            for first in (0..w.k).step_by(SLICE) {
                let here = SLICE.min(w.k - first);
                for lane in 0..lanes {
                    (codec.decode)(w.source(codec, p * LANES + lane, first, here), &mut values[..here]);
                    for (v, to) in values[..here].iter().zip(slice.0.chunks_exact_mut(LANES)) {
                        to[lane] = *v;
                    }
                }
                let job = Job {
                    w: bytemuck::cast_slice(&slice.0[..here * LANES]),
                    first,
                    blocks: here,
                    acts,
                    tiles: 0..acts.tiles.count,
                    y: out.y.wrapping_add(w.column + p * LANES),
                    y_stride: out.stride,
                    lanes,
                };
                // SAFETY: as in `packed`.
                unsafe { f32_kernel(&job) };
            }
        }
    }
}

/// k of a decoded slice: whole blocks of every format, 32 KiB.
const SLICE: usize = 256;

#[repr(C, align(64))]
struct Slice([f32; LANES * SLICE]);

const ROWS_BYTES: usize = 1 << 20;
/// Bytes of a K slice of a panel as the kernels go through it.
const PANEL_BYTES: usize = 24 << 10;

/// With few rows memory is the limit, and the hardware prefetcher stops at every 4 KiB: name the lines `AHEAD` bytes on.
/// They may be the next panel's, which is what comes next.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 8192;

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn ahead(w: *const u8, len: usize) {
    for i in (0..len).step_by(64) {
        // SAFETY: a prefetch never faults.
        unsafe { core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(w.wrapping_add(AHEAD + i).cast()) };
    }
}

#[derive(Clone, Copy)]
struct Out {
    y: *mut f32,
    stride: usize,
}
// SAFETY: threads write disjoint columns.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

#[cfg(test)]
mod tests;
