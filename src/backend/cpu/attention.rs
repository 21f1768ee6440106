//! Attention of a whole batch over the paged cache. A tile is a few dozen query rows of one kv head: tokens times the heads of
//! a group, of one sequence or of several that share a prefix. It goes over the context in pieces of 256 tokens at fixed
//! positions, and the pieces are joined in order, a sink at the end. Tokens that several sequences of a tile share are read
//! once for all of them.
//!
//! ```text
//! whole tiles: one thread runs all pieces, joining as it goes
//! split tiles: those with more work than a fair share; threads run their pieces, then join them tile by tile
//! ```
//!
//! Invariants: a row's bits depend on its position, its query and the tokens it sees: not on the tile, on what is split, on
//! who shares what, or on how much of the prompt came in the same step. Entries of a block table wholly before the first token
//! that any of the sequence's rows sees are never looked up: behind a window they may be anything.
#![allow(unsafe_code)]

use super::arena::Aligned;
use super::kv::CpuKv;
use super::pool::{Disjoint, Pool};
use super::simd::{LANES, MAX_ROWS, PART_TAIL, PIECE, Stored, Tier, VECTORS};
use crate::arch::AttnDims;
use crate::backend::{AttnArgs, Heads, KvShape};
use crate::batch::BatchLimits;
use crate::error::RunError;
use crate::ids::BlockId;
use parking_lot::Mutex;
use std::f32::consts::LOG2_E;
use tiles::{Row, Run, Tile, Tiling};

pub(super) use tiles::Neighbours;

mod tiles;

/// The arrays of a [`Batch`](crate::batch::Batch) that attention reads, of the layer's group.
#[derive(Clone, Copy)]
pub(super) struct AttnBatch<'a> {
    /// See [`q_indptr`](crate::batch::Batch::q_indptr).
    pub(super) q_indptr: &'a [u32],
    /// See [`kv_lens`](crate::batch::Batch::kv_lens).
    pub(super) kv_lens: &'a [u32],
    /// See [`block_indptr`](crate::batch::Batch::block_indptr).
    pub(super) block_indptr: &'a [u32],
    /// See [`blocks`](crate::batch::Batch::blocks). Not read for blocks wholly behind a window.
    pub(super) blocks: &'a [BlockId],
    /// See [`Neighbours::order`].
    pub(super) order: &'a [u32],
    /// See [`Neighbours::common`].
    pub(super) common: &'a [u32],
}

/// Memory for the largest batch: a call allocates nothing.
pub(super) struct AttnScratch {
    /// Tokens of the largest batch.
    tokens: usize,
    workers: Vec<Mutex<Worker>>,
    /// Rows of the pieces of split tiles that are worked on, `[wave][part]`.
    parts: Vec<f32>,
    /// `[split tiles][tile rows][part]`.
    states: Vec<f32>,
    whole: Vec<Tile>,
    split: Vec<Tile>,
}

/// What one thread writes.
struct Worker {
    desk: Desk,
    parts: Vec<f32>,
    state: Vec<f32>,
}

/// What a piece is worked on with.
struct Desk {
    /// Queries in the kernel tiles of each sequence.
    own: Vec<f32>,
    /// Queries in the kernel tiles of each run of sequences.
    run: Vec<f32>,
    /// Which runs those are: see [`Call::piece`].
    runs: u64,
    /// `[tile rows][PIECE]`, and room.
    scores: Vec<f32>,
    /// See [`AttnKernels::panel`](super::simd::AttnKernels::panel).
    panel: Aligned<f32>,
}

/// How much memory [`AttnScratch`] takes.
struct Sizes {
    threads: usize,
    q: usize,
    scores: usize,
    panel: usize,
    slot: usize,
    wave: usize,
    split: usize,
    tiles: usize,
}

impl Sizes {
    fn new(limits: &BatchLimits, kv: &KvShape, threads: usize, tier: &Tier) -> Self {
        let widest = |f: &dyn Fn(&AttnDims) -> usize| kv.layers.iter().map(f).max().unwrap_or(0);
        let heads = widest(&|d| d.heads);
        let rows = |d: &AttnDims| tile_rows(d, limits.tokens, tier);
        // A sequence's tiles of a kv head: tokens * group / rows, rounded up.
        let tiles = (limits.tokens * heads).div_ceil(tier.attention.tile_rows()) + limits.seqs * widest(&|d| d.kv_heads);
        let several = threads > 1;
        Sizes {
            threads,
            q: widest(&|d| d.qk_dim * padded(rows(d))),
            scores: (widest(&rows) + MAX_ROWS) * PIECE,
            panel: widest(&|d| tier.attention.panel(d.qk_dim)),
            slot: widest(&|d| rows(d) * (d.v_dim.next_multiple_of(LANES) + PART_TAIL)),
            wave: if several { WAVE * threads * widest(&|d| d.v_dim.next_multiple_of(LANES) + PART_TAIL) } else { 0 },
            split: if several { SHARES * threads } else { 0 },
            tiles,
        }
    }

    fn bytes(&self) -> usize {
        let worker = 2 * self.q + self.scores + self.panel + 2 * self.slot;
        let floats = self.threads * worker + self.wave + self.split * self.slot;
        floats * size_of::<f32>() + self.threads * size_of::<Mutex<Worker>>() + (self.tiles + self.split) * size_of::<Tile>()
    }
}

impl AttnScratch {
    /// Bytes that [`new`](Self::new) allocates.
    pub(super) fn bytes(limits: &BatchLimits, kv: &KvShape, threads: usize, tier: &Tier) -> usize {
        Sizes::new(limits, kv, threads, tier).bytes()
    }

    /// Scratch for batches up to `limits`.
    ///
    /// # Errors
    /// Where the memory is not to be had.
    pub(super) fn new(limits: &BatchLimits, kv: &KvShape, threads: usize, tier: &Tier) -> Result<Self, RunError> {
        let s = Sizes::new(limits, kv, threads, tier);
        let mut workers = reserved(s.threads)?;
        for _ in 0..s.threads {
            let (own, run, scores, panel) = (zeros(s.q)?, zeros(s.q)?, zeros(s.scores)?, Aligned::zeroed(s.panel)?);
            let desk = Desk { own, run, runs: 0, scores, panel };
            workers.push(Mutex::new(Worker { desk, parts: zeros(s.slot)?, state: zeros(s.slot)? }));
        }
        Ok(AttnScratch {
            tokens: limits.tokens,
            workers,
            parts: zeros(s.wave)?,
            states: zeros(s.split * s.slot)?,
            whole: reserved(s.tiles)?,
            split: reserved(s.split)?,
        })
    }
}

fn reserved<T>(n: usize) -> Result<Vec<T>, RunError> {
    let mut v = Vec::new();
    v.try_reserve_exact(n).map_err(|_| RunError::Device {
        device: "CPU".into(),
        message: format!("no memory for attention: {} bytes of scratch", n.saturating_mul(size_of::<T>())),
    })?;
    Ok(v)
}

fn zeros(n: usize) -> Result<Vec<f32>, RunError> {
    let mut v = reserved(n)?;
    v.resize(n, 0.0);
    Ok(v)
}

/// The most rows in a tile of such a layer.
fn tile_rows(dims: &AttnDims, tokens: usize, tier: &Tier) -> usize {
    let (kernel, all) = (tier.attention.tile_rows(), tokens * (dims.heads / dims.kv_heads));
    all.clamp(1, MOST / kernel * kernel).next_multiple_of(kernel)
}

/// Room for the queries of so many rows in their kernel tiles: see [`AttnKernels::tiles`](super::simd::AttnKernels::tiles).
fn padded(rows: usize) -> usize {
    rows + rows / 2
}

/// Causal attention of the batch's queries over the cache; `out` is `[T, heads * v_dim]`. `sinks` has one more score for
/// each head, neither scaled nor capped, that takes part in the softmax and has no value.
///
/// # Panics
/// Where the batch exceeds the scratch's limits or shapes do not agree.
#[allow(clippy::too_many_arguments)]
pub(super) fn attention(
    pool: &Pool,
    tier: &Tier,
    scratch: &mut AttnScratch,
    batch: AttnBatch<'_>,
    args: &AttnArgs,
    sinks: Option<&[f32]>,
    q_src: &[f32],
    q: Heads,
    kv: &CpuKv,
    layer: usize,
    out: &mut [f32],
) {
    let dims = args.dims;
    let tokens = *batch.q_indptr.last().expect("indptr starts with 0") as usize;
    assert_eq!((q.heads, q.dim), (dims.heads, dims.qk_dim), "query heads");
    assert!(dims.heads.is_multiple_of(dims.kv_heads), "{} heads share {} kv heads", dims.heads, dims.kv_heads);
    assert_eq!(dims.v_in_k, kv.v_in_k(layer), "values in the keys of layer {layer}");
    assert!(sinks.is_none_or(|s| s.len() >= dims.heads), "a sink for each of {} heads", dims.heads);
    assert!(tokens == 0 || q_src.len() >= (tokens - 1) * q.stride + q.offset + q.heads * q.dim, "queries of {tokens} tokens");
    let AttnScratch { tokens: most_tokens, workers, parts, states, whole, split } = scratch;
    let (group, v_width) = (dims.heads / dims.kv_heads, kv.v_width(layer));
    let tiling = Tiling {
        batch,
        group,
        kv_heads: dims.kv_heads,
        window: args.window,
        block_size: kv.block_size(),
        kernel_rows: tier.attention.tile_rows(),
        most: tile_rows(&dims, *most_tokens, tier),
        width: dims.qk_dim + dims.v_dim,
    };
    let call = Call { tier, tiling, args, sinks, q_src, q, kv, layer, part: v_width + PART_TAIL };
    let values = tiling.list(pool.threads(), whole, split);

    let slot = tiling.most * call.part;
    let out = Disjoint::new(&mut out[..tokens * dims.heads * dims.v_dim]);
    let items = split.iter().map(|t| t.pieces as usize).sum::<usize>();
    let mut done = 0;
    let mut wholes = whole.as_slice();
    while done < items || !wholes.is_empty() {
        // As many pieces as there is room for: that of a tile, at least.
        let start = if done < items { item(split, done).2 } else { 0 };
        let room = |i: &usize| {
            let (index, _, row) = item(split, *i);
            (row + split[index].rows as usize - start) * call.part <= parts.len()
        };
        let now = (done..items).take_while(room).count();
        {
            let parts = Disjoint::new(parts);
            let grain = if values < PAYS { usize::MAX } else { 1 };
            pool.for_each_chunk(now + wholes.len(), grain, |thread, tasks| {
                let worker = &mut *workers[thread].lock();
                for task in tasks {
                    if task < now {
                        let (index, piece, row) = item(split, done + task);
                        let (tile, row) = (&split[index], row - start);
                        // SAFETY: a task is handed out once, and these are its own rows.
                        let part = unsafe { parts.slice(row * call.part..(row + tile.rows as usize) * call.part) };
                        let rows = &mut [Row::default(); MOST];
                        let rows = call.start(tile, rows, &mut worker.desk);
                        call.piece(tile, rows, piece, &mut worker.desk, part);
                    } else {
                        call.whole(&wholes[task - now], worker, &out);
                    }
                }
            });
        }
        if now > 0 {
            let (wave, states) = (done..done + now, Disjoint::new(states));
            let ((first, _, _), (last, _, row)) = (item(split, wave.start), item(split, wave.end - 1));
            let grain = if (row - start) * call.part < PAYS { usize::MAX } else { 1 };
            pool.for_each_chunk(last + 1 - first, grain, |_, tiles| {
                for index in first + tiles.start..first + tiles.end {
                    // SAFETY: a tile is handed out once, and this is its own state.
                    let state = unsafe { states.slice(index * slot..(index + 1) * slot) };
                    let (tile, rows) = (&split[index], &mut [Row::default(); MOST]);
                    let rows = &mut rows[..tile.rows as usize];
                    tiling.rows(tile, rows);
                    let end = tile.before + tile.pieces as usize;
                    for i in wave.start.max(tile.before)..wave.end.min(end) {
                        let (_, piece, row) = item(split, i);
                        call.join(rows, piece, state, &parts[(row - start) * call.part..]);
                    }
                    if end <= wave.end {
                        call.finish(rows, state, &out);
                    }
                }
            });
        }
        done += now;
        wholes = &[];
    }
}

/// The split tile that the `i`-th piece of all belongs to, the piece, and the rows of all those before it.
fn item(split: &[Tile], i: usize) -> (usize, usize, usize) {
    let index = split.partition_point(|t| t.before <= i) - 1;
    let (tile, nth) = (&split[index], i - split[index].before);
    (index, tile.first_piece as usize + nth, tile.rows_before + nth * tile.rows as usize)
}

/// One call's inputs.
struct Call<'a> {
    tier: &'a Tier,
    tiling: Tiling<'a>,
    args: &'a AttnArgs,
    sinks: Option<&'a [f32]>,
    q_src: &'a [f32],
    q: Heads,
    kv: &'a CpuKv,
    layer: usize,
    /// Values of a row's part.
    part: usize,
}

impl Call<'_> {
    /// Lists the rows of a tile and loads their queries, sequence by sequence.
    fn start<'r>(&self, tile: &Tile, rows: &'r mut [Row; MOST], desk: &mut Desk) -> &'r [Row] {
        let rows = &mut rows[..tile.rows as usize];
        self.tiling.rows(tile, rows);
        for span in self.tiling.spans(tile) {
            self.load_queries(&rows[span.at..][..span.rows], &mut desk.own[padded(span.at) * self.q.dim..]);
        }
        desk.runs = 0;
        rows
    }

    /// Queries of rows that go together as `[qk_dim][height]` for each kernel tile, times the factor on the scores.
    fn load_queries(&self, rows: &[Row], to: &mut [f32]) {
        let factor = match self.args.softcap {
            None => self.args.scale * LOG2_E,
            Some(cap) => self.args.scale / cap,
        };
        let dim = self.q.dim;
        for tile in self.tier.attention.tiles(rows.len()) {
            let mut from: [&[f32]; MAX_ROWS] = [&[]; MAX_ROWS];
            for (from, row) in from.iter_mut().zip(&rows[tile.first..][..tile.rows]) {
                *from = &self.q_src[row.token as usize * self.q.stride + self.q.offset + row.head as usize * dim..][..dim];
            }
            self.tier.attention.queries(&from[..tile.rows], factor, &mut to[tile.before * dim..][..tile.height * dim]);
        }
    }

    /// Runs a tile over a piece: what the sequences of a run share for all their rows at once, and the rest for each. Bit i of
    /// `desk.runs` says that the row is the first of a run of several sequences, or its last: whose queries are loaded.
    fn piece(&self, tile: &Tile, rows: &[Row], piece: usize, desk: &mut Desk, parts: &mut [f32]) {
        let bounds = |run: Run| 1u64 << run.at | 1u64 << (run.at + run.rows - 1);
        let runs = || self.tiling.runs(tile, piece).filter(|run| run.spans > 1);
        let loaded = runs().fold(0, |all, run| all | bounds(run));
        if loaded != desk.runs {
            for run in runs() {
                self.load_queries(&rows[run.at..][..run.rows], &mut desk.run[padded(run.at) * self.q.dim..]);
            }
            desk.runs = loaded;
        }
        let mut ranges = [(0, 0); MOST];
        for (range, row) in ranges.iter_mut().zip(rows) {
            *range = row.range(piece);
        }
        for run in self.tiling.runs(tile, piece) {
            self.run(tile, piece, run, &ranges[run.at..][..run.rows], desk, &mut parts[run.at * self.part..]);
        }
    }

    /// What neighbouring sequences share of a piece, then what each has for itself; `ranges` are those of the run's rows.
    fn run(&self, tile: &Tile, piece: usize, run: Run, ranges: &[(usize, usize)], desk: &mut Desk, parts: &mut [f32]) {
        let kernels = self.tier.attention;
        let Desk { own, run: queries, scores, panel, .. } = desk;
        let together = Stretch { seq: run.seq, at: 0, rows: run.rows, tokens: (0, run.shared) };
        let apart = self.tiling.spans(tile).filter(|span| run.shared < PIECE && run.holds(span));
        let apart = apart.map(|s| Stretch { seq: s.seq, at: s.at - run.at, rows: s.rows, tokens: (run.shared, PIECE) });
        let (mut seen, mut others) = ([(0, 0); MOST], [(0, 0); MOST]);
        let scores = &mut scores[run.at * PIECE..];
        let q = if run.spans == 1 { &own[..] } else { &queries[..] };
        let (some, stored) = self.seen(tile, &together, piece, ranges, &mut seen);
        // SAFETY: every vector that a row sees points into its head of its block, at the row that `CpuKv` documents; the cache
        // is borrowed for the whole call, so nobody writes it.
        unsafe { kernels.scores(&q[padded(run.at) * self.q.dim..], some, &stored, panel, scores) };
        for stretch in apart.clone() {
            let (some, stored) = self.seen(tile, &stretch, piece, ranges, &mut others);
            let q = &own[padded(run.at + stretch.at) * self.q.dim..];
            // SAFETY: as above.
            unsafe { kernels.scores(q, some, &stored, panel, &mut scores[stretch.at * PIECE..]) };
        }
        let cap = self.args.softcap.map(|cap| cap * LOG2_E);
        kernels.softmax(ranges, cap, scores, parts, self.part - PART_TAIL);
        // SAFETY: as above.
        unsafe { kernels.weigh(scores, some, &stored, panel, parts) };
        for stretch in apart {
            let (some, stored) = self.seen(tile, &stretch, piece, ranges, &mut others);
            let (weights, parts) = (&scores[stretch.at * PIECE..], &mut parts[stretch.at * self.part..]);
            // SAFETY: as above.
            unsafe { kernels.weigh(weights, some, &stored, panel, parts) };
        }
    }

    /// Which tokens of a stretch each of its rows sees, and where those lie. Of vectors that no row sees none is looked up.
    fn seen<'r>(
        &self,
        tile: &Tile,
        stretch: &Stretch,
        piece: usize,
        ranges: &[(usize, usize)],
        seen: &'r mut [(usize, usize); MOST],
    ) -> (&'r [(usize, usize)], Stored) {
        let (kv, v_in_k, (start, stop)) = (self.kv, self.args.dims.v_in_k, stretch.tokens);
        let seen = &mut seen[..stretch.rows];
        let (mut first, mut end) = (VECTORS, 0);
        for (seen, range) in seen.iter_mut().zip(&ranges[stretch.at..]) {
            *seen = (range.0.clamp(start, stop), range.1.clamp(start, stop));
            if seen.0 < seen.1 {
                (first, end) = (first.min(seen.0 / LANES), end.max(seen.1.div_ceil(LANES)));
            }
        }
        let (dtype, block_size, v_width) = (kv.dtype(), kv.block_size(), self.part - PART_TAIL);
        let blocks = &self.tiling.batch.blocks[self.tiling.batch.block_indptr[stretch.seq] as usize..];
        let mut stored = Stored {
            keys: [std::ptr::null(); VECTORS],
            values: [std::ptr::null(); VECTORS],
            dtype,
            qk_dim: self.q.dim,
            v_width,
            v_in_k,
            block_size,
        };
        for i in first..end {
            // A vector of tokens is in one block.
            let token = piece * PIECE + i * LANES;
            let (k, v) = kv.head(self.layer, blocks[token / block_size], tile.kv_head as usize);
            stored.keys[i] = k[token % block_size * dtype.bytes()..].as_ptr();
            if !v_in_k {
                stored.values[i] = v[token % block_size * v_width * dtype.bytes()..].as_ptr();
            }
        }
        (seen, stored)
    }

    /// Adds the parts of a piece to the rows' states.
    fn join(&self, rows: &[Row], piece: usize, state: &mut [f32], parts: &[f32]) {
        for ((row, state), part) in rows.iter().zip(state.chunks_exact_mut(self.part)).zip(parts.chunks_exact(self.part)) {
            let (first, end) = row.range(piece);
            if first >= end {
                continue;
            }
            // The first piece that a row sees is the state; adding it to an empty one would round.
            if row.first as usize / PIECE == piece {
                state.copy_from_slice(part);
            } else {
                self.tier.attention.join(state, part);
            }
        }
    }

    /// Writes the rows' means out.
    fn finish(&self, rows: &[Row], state: &[f32], out: &Disjoint<'_, f32>) {
        let AttnDims { heads, v_dim, .. } = self.args.dims;
        for (row, state) in rows.iter().zip(state.chunks_exact(self.part)) {
            let head = row.head as usize;
            let at = (row.token as usize * heads + head) * v_dim;
            // SAFETY: a row is in one tile, a tile is finished once, and this is the row's own place.
            let out = unsafe { out.slice(at..at + v_dim) };
            // As a power of two, as the scores; held to what f32 has, so that no difference is a NaN.
            let sink = self.sinks.map(|s| (s[head] * LOG2_E).clamp(f32::MIN, f32::MAX));
            self.tier.attention.finish(state, sink, out);
        }
    }

    /// All pieces of a tile, one after the other.
    fn whole(&self, tile: &Tile, worker: &mut Worker, out: &Disjoint<'_, f32>) {
        let (rows, Worker { desk, parts, state }) = (&mut [Row::default(); MOST], worker);
        let rows = self.start(tile, rows, desk);
        for piece in tile.first_piece as usize..(tile.first_piece + tile.pieces) as usize {
            self.piece(tile, rows, piece, desk, parts);
            // The first piece that a row sees is its state: in most tiles all rows see the same one first.
            if piece == tile.first_piece as usize && rows.iter().all(|row| row.first as usize / PIECE == piece) {
                std::mem::swap(state, parts);
            } else {
                self.join(rows, piece, state, parts);
            }
        }
        self.finish(rows, state, out);
    }
}

/// Rows of a run and tokens of a piece that are the same for all of them.
#[derive(Clone, Copy)]
struct Stretch {
    /// Whose block table says where.
    seq: usize,
    /// First row in the run.
    at: usize,
    rows: usize,
    /// First and end.
    tokens: (usize, usize),
}

/// A tile with more than the work of all by this many a thread is split.
const SHARES: usize = 4;
/// The most rows in a tile: what is read and widened for all of them costs each little, and their scores stay in a second
/// cache. A bit of a `u64` each.
const MOST: usize = 48;
/// Rows of parts a thread that are held before they are joined: those of several of the largest tiles.
const WAVE: usize = 8 * MOST;
/// Values of the cache whose reading takes about as long as waking a thread.
const PAYS: usize = 65_536;

#[cfg(test)]
mod tests;
