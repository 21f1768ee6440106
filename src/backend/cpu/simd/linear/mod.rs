//! `y[M, N] = x[M, K] * w[N, K]^T`, one product or many of the same K at once: which thread runs which panel over which rows
//! and which part of K. The tiers' files hold the inner loops.
//!
//! ```text
//! for runs of all products' panels, from a counter:       threads; panels write values of y of their own
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
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod four;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod sse41;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::{LINEAR as AVX2, LINEAR_VNNI as AVXVNNI};
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::LINEAR as AVX512;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::{DOTPROD, I8MM, NEON};
pub(super) use scalar::LINEAR as SCALAR;
#[cfg(target_arch = "x86_64")]
pub(super) use scalar::LINEAR_FMA as SCALAR_FMA;
#[cfg(target_arch = "x86_64")]
pub(super) use sse41::LINEAR as SSE41;

use crate::backend::cpu::acts::{Acts, Tiles, WORDS, interleave, row_words};
use crate::backend::cpu::panel::{KERNELS, LANES, Panel};
use crate::backend::cpu::pool::{Disjoint, Pool};
use crate::backend::cpu::weight::{CpuWeight, Segment, Store};
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

/// The rows of one tile: row r starts at `r * stride`.
struct Rows<'a> {
    x: &'a [f32],
    stride: usize,
    rows: usize,
}

impl Rows<'_> {
    /// Block `b` of row `r`.
    #[inline(always)]
    fn block(&self, r: usize, b: usize) -> &[f32; 32] {
        self.x[r * self.stride + 32 * b..][..32].try_into().expect("32 values")
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
    /// `[N]`, added to every row.
    pub(in crate::backend::cpu) bias: Option<&'a [f32]>,
}

/// A matrix and the part of x and y that it works on.
pub(in crate::backend::cpu) struct Product<'a> {
    pub(in crate::backend::cpu) w: &'a CpuWeight,
    /// `[N]`, added to every row.
    pub(in crate::backend::cpu) bias: Option<&'a [f32]>,
    /// Rows, of x and of y.
    pub(in crate::backend::cpu) rows: Range<usize>,
    /// Where its K values start in a row of x.
    pub(in crate::backend::cpu) x: usize,
    /// Where its N results start in a row of y.
    pub(in crate::backend::cpu) y: usize,
    /// Rows of all products before this one.
    pub(in crate::backend::cpu) before: usize,
}

/// Products of matrices of the same K that write apart from each other: in ascending order of rows, those of the same rows
/// in ascending order of columns.
pub(in crate::backend::cpu) struct Products<'a> {
    pub(in crate::backend::cpu) count: usize,
    pub(in crate::backend::cpu) of: &'a (dyn Fn(usize) -> Product<'a> + Sync),
    pub(in crate::backend::cpu) x: &'a [f32],
    /// Values from one row of x to the next.
    pub(in crate::backend::cpu) x_stride: usize,
    pub(in crate::backend::cpu) y_stride: usize,
}

impl LinearFns {
    /// `y[rows, n] = x * w^T (+ bias)`. `scratch` has room for `rows * k` words.
    ///
    /// # Panics
    /// Where a slice has not the length that the shapes ask for: a bug in the caller.
    pub(in crate::backend::cpu) fn matmul(
        &self,
        pool: &Pool,
        w: &CpuWeight,
        input: &Input<'_>,
        scratch: &mut [u32],
        y: &mut [f32],
    ) {
        let (rows, n, k) = (input.rows, w.rows(), w.columns());
        assert!(input.x.len() == rows * k && y.len() == rows * n, "[{rows}, {k}] to [{rows}, {n}]");
        let of = |_| Product { w, bias: input.bias, rows: 0..rows, x: 0, y: 0, before: 0 };
        self.products(pool, &Products { count: 1, of: &of, x: input.x, x_stride: k, y_stride: n }, scratch, y);
    }

    /// Many products at once. `scratch` has room for a word for each value of x that they read.
    ///
    /// # Panics
    /// Where products reach out of x or y, or into each other's results: a bug in the caller.
    pub(in crate::backend::cpu) fn products(&self, pool: &Pool, all: &Products<'_>, scratch: &mut [u32], y: &mut [f32]) {
        all.check(y.len());
        for quantized in [true, false] {
            let panels: usize = (0..all.count).flat_map(|i| (all.of)(i).segments(quantized)).map(Segment::panels).sum();
            if panels == 0 {
                continue;
            }
            let words = self.prepare(pool, quantized, all, scratch);
            let out = Out { y: y.as_mut_ptr(), stride: all.y_stride };
            // Large enough that the counter costs nothing, small enough that the threads end together.
            let grain = (panels / (pool.threads() * 8)).clamp(1, 64);
            pool.for_each_chunk(panels, grain, |_, range| {
                let mut before = 0;
                for p in (0..all.count).map(all.of) {
                    for segment in p.segments(quantized) {
                        let count = segment.panels();
                        let (a, b) = (range.start.max(before), range.end.min(before + count));
                        if a < b {
                            let acts = &self.acts(quantized, &p, all, words);
                            let out = out.at(p.rows.start, p.y);
                            // SAFETY: `check` found the product's results inside `y` and apart from the others', the
                            // segments' columns lie inside and apart, and each panel is handed out once.
                            unsafe { self.panels(segment, a - before..b - before, acts, p.rows.len(), out, p.bias) };
                        }
                        before += count;
                    }
                    if before >= range.end {
                        break;
                    }
                }
            });
        }
    }

    /// Lays all rows out, on all threads.
    fn prepare<'a>(&self, pool: &Pool, quantized: bool, all: &Products<'_>, scratch: &'a mut [u32]) -> &'a [u32] {
        let words = &mut scratch[..];
        let to = Disjoint::new(words);
        // Blocks of 32 k of tiles, of the products whose rows are not read as they are.
        let tiles = |p: &Product<'_>| match p.segments(quantized).next() {
            Some(_) if !all.in_place(quantized, p) => Some((self.tiles(quantized, p), p.w.columns().div_ceil(32))),
            _ => None,
        };
        let (mut units, mut largest) = (0, 1);
        for (tiles, blocks) in (0..all.count).filter_map(|i| tiles(&(all.of)(i))) {
            units += tiles.count * blocks;
            largest = largest.max(tiles.tile(tiles.count - 1).1);
        }
        // Some microseconds of work, well above the cost of a fork.
        pool.for_each_chunk(units, 256usize.div_ceil(largest), |_, range| {
            let mut before = 0;
            for p in (0..all.count).map(all.of) {
                let Some((tiles, blocks)) = tiles(&p) else { continue };
                let mut at = range.start.max(before);
                let stop = range.end.min(before + tiles.count * blocks);
                while at < stop {
                    let (tile, b) = ((at - before) / blocks, (at - before) % blocks);
                    let end = blocks.min(stop - before - tile * blocks);
                    self.lay_out(quantized, &p, all, tiles.tile(tile), b..end, to);
                    at = before + tile * blocks + end;
                }
                before += tiles.count * blocks;
                if before >= range.end {
                    break;
                }
            }
        });
        words
    }

    /// Some blocks of one tile, given by its first row and their number.
    fn lay_out(
        &self,
        quantized: bool,
        p: &Product<'_>,
        all: &Products<'_>,
        (first, rows): (usize, usize),
        blocks: Range<usize>,
        to: Disjoint<'_, u32>,
    ) {
        let (k, stride) = (p.w.columns(), all.x_stride);
        let (row_words, block_words) = (row_words(quantized, k), if quantized { WORDS } else { 32 });
        let word = |block: usize| (p.before + first) * row_words + rows * row_words.min(block * block_words);
        // SAFETY: a block of a tile is handed out once, and its words are its own.
        let out = unsafe { to.slice(word(blocks.start)..word(blocks.end)) };
        let x = &all.x[(p.rows.start + first) * stride + p.x..][..(rows - 1) * stride + k];
        if quantized {
            // SAFETY: the tier was chosen because its features are present.
            unsafe { (self.quantize)(&Rows { x, stride, rows }, blocks, out) };
        } else {
            interleave(x, stride, rows, 32 * blocks.start, out);
        }
    }

    fn tiles(&self, quantized: bool, p: &Product<'_>) -> Tiles {
        Tiles::new(p.rows.len(), if quantized { self.rows_quant } else { self.rows_plain })
    }

    /// The rows of a product, laid out.
    fn acts<'a>(&self, quantized: bool, p: &Product<'_>, all: &'a Products<'_>, words: &'a [u32]) -> Acts<'a> {
        let (k, rows, tiles) = (p.w.columns(), p.rows.len(), self.tiles(quantized, p));
        let row_words = row_words(quantized, k);
        let words = match all.in_place(quantized, p) {
            true => bytemuck::cast_slice(&all.x[p.rows.start * all.x_stride + p.x..][..k]),
            false => &words[p.before * row_words..][..rows * row_words],
        };
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
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const AHEAD: usize = 8192;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
fn ahead(w: *const u8, len: usize) {
    for i in (0..len).step_by(64) {
        let p = w.wrapping_add(AHEAD + i);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults.
        unsafe {
            core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(p.cast());
        }
        #[cfg(target_arch = "aarch64")]
        super::lanes::neon::prefetch(p);
    }
}

impl<'a> Product<'a> {
    /// What there is to multiply of one kind.
    fn segments(&self, quantized: bool) -> impl Iterator<Item = &'a Segment> + use<'a> {
        let all = if self.rows.is_empty() { &[][..] } else { &self.w.segments[..] };
        all.iter().filter(move |s| s.quantized() == quantized)
    }
}

impl Products<'_> {
    /// True where a product's row is its own layout.
    fn in_place(&self, quantized: bool, p: &Product<'_>) -> bool {
        !quantized && p.rows.len() == 1
    }

    fn check(&self, y_len: usize) {
        let (mut before, mut last, mut last_end, mut k) = (0, 0..0, 0, None);
        for (i, p) in (0..self.count).map(|i| (i, (self.of)(i))) {
            let n = p.w.rows();
            assert_eq!(*k.get_or_insert(p.w.columns()), p.w.columns(), "product {i}: columns of all products");
            let k = p.w.columns();
            assert!(p.w.segments.iter().all(|s| s.column + s.rows <= n && s.k == k), "product {i}: segments inside the matrix");
            assert!(p.bias.is_none_or(|b| b.len() == n), "product {i}: a bias of {n}");
            assert!(p.x + k <= self.x_stride && p.y + n <= self.y_stride, "product {i}: [{n}, {k}] inside the rows");
            assert!(p.rows.start <= p.rows.end && p.rows.end * self.x_stride <= self.x.len(), "product {i}: rows of x");
            assert!(p.rows.end * self.y_stride <= y_len && p.before == before, "product {i}: rows of y");
            let apart = p.rows.start >= last.end || p.rows == last && p.y >= last_end;
            assert!(apart, "product {i}: rows {:?} from {} after {last:?} to {last_end}", p.rows, p.y);
            before += p.rows.len();
            (last, last_end) = (p.rows, p.y + n);
        }
    }
}

/// The first result of a product.
#[derive(Clone, Copy)]
struct Out {
    y: *mut f32,
    stride: usize,
}

impl Out {
    fn at(self, row: usize, column: usize) -> Self {
        Out { y: self.y.wrapping_add(row * self.stride + column), ..self }
    }
}

// SAFETY: threads write values of their own.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

#[cfg(test)]
mod tests;
