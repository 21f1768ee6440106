//! Attention of a whole batch over the paged cache. A tile is up to a dozen query rows (tokens times the heads of a group) of
//! one sequence and kv head; it goes over the context in pieces of 256 tokens at fixed positions, and the pieces are joined
//! in order, a sink at the end. Where values are part of the keys, as in absorbed MLA, all heads share one key: a tile has
//! several times the rows, and a piece's keys are read from the cache and laid out as values once for all of them.
//!
//! ```text
//! whole tiles: one thread runs all pieces, joining as it goes
//! split tiles: those with more pieces than a fair share; threads run their pieces, the caller joins
//! ```
//!
//! Invariants: a row's bits depend on its position, its query and the tokens it sees: not on the tile, on what is split, or
//! on how much of the prompt came in the same step. Entries of a block table wholly before the first token that any of the
//! sequence's rows sees are never read: behind a window they may be anything.
#![allow(unsafe_code)]

use super::arena::Aligned;
use super::kv::CpuKv;
use super::pool::{Disjoint, Pool};
use super::simd::{LANES, MAX_ROWS, PART_TAIL, PIECE, PieceJob, Tier, TurnJob, VECTORS};
use crate::arch::AttnDims;
use crate::backend::{AttnArgs, Heads, KvShape};
use crate::batch::BatchLimits;
use crate::error::RunError;
use crate::ids::BlockId;
use parking_lot::Mutex;
use std::f32::consts::LOG2_E;

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
}

/// Memory for the largest batch: a call allocates nothing.
pub(super) struct AttnScratch {
    workers: Vec<Mutex<Worker>>,
    /// `[wave][tile_rows][part]`.
    parts: Vec<f32>,
    /// `[split tiles][tile_rows][part]`.
    states: Vec<f32>,
    whole: Vec<Tile>,
    split: Vec<Tile>,
}

/// What one thread writes.
struct Worker {
    q: Vec<f32>,
    scores: Vec<f32>,
    /// A piece's values where the cache has keys alone, in the cache's type.
    values: Aligned<f32>,
    parts: Vec<f32>,
    state: Vec<f32>,
}

/// Query rows of one sequence and kv head.
#[derive(Clone, Copy)]
struct Tile {
    seq: u32,
    kv_head: u32,
    /// First row: token times group plus head in the group.
    row: u32,
    rows: u32,
    /// Pieces that any of the rows sees.
    first_piece: u32,
    pieces: u32,
    /// Pieces of the split tiles before this one.
    before: usize,
}

/// How much memory [`AttnScratch`] takes.
struct Sizes {
    threads: usize,
    q: usize,
    scores: usize,
    values: usize,
    slot: usize,
    wave: usize,
    split: usize,
    tiles: usize,
}

impl Sizes {
    fn new(limits: &BatchLimits, kv: &KvShape, threads: usize, tier: &Tier) -> Self {
        let rows = tier.attention.tile_rows();
        let widest = |f: &dyn Fn(&AttnDims) -> usize| kv.layers.iter().map(f).max().unwrap_or(0);
        let heads = widest(&|d| d.heads);
        // A sequence's tiles of a kv head: tokens * group / rows, rounded up.
        let tiles = (limits.tokens * heads).div_ceil(rows) + limits.seqs * widest(&|d| d.kv_heads);
        let several = threads > 1;
        Sizes {
            threads,
            q: widest(&|d| d.qk_dim * tile_rows(d, tier)),
            scores: rows * PIECE,
            values: widest(&|d| if d.v_in_k { d.v_dim.next_multiple_of(LANES) } else { 0 }) * PIECE * kv.dtype.bytes()
                / size_of::<f32>(),
            slot: widest(&|d| tile_rows(d, tier) * (d.v_dim.next_multiple_of(LANES) + PART_TAIL)),
            wave: if several { WAVE * threads } else { 0 },
            split: if several { SHARES * threads } else { 0 },
            tiles,
        }
    }

    fn bytes(&self) -> usize {
        let worker = self.q + self.scores + self.values + 2 * self.slot;
        let floats = self.threads * worker + (self.wave + self.split) * self.slot;
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
            workers.push(Mutex::new(Worker {
                q: zeros(s.q)?,
                scores: zeros(s.scores)?,
                values: Aligned::zeroed(s.values)?,
                parts: zeros(s.slot)?,
                state: zeros(s.slot)?,
            }));
        }
        Ok(AttnScratch {
            workers,
            parts: zeros(s.wave * s.slot)?,
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
fn tile_rows(dims: &AttnDims, tier: &Tier) -> usize {
    tier.attention.tile_rows() * if dims.v_in_k { SHARED_TILES } else { 1 }
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
    let call = Call { tier, batch, args, sinks, q_src, q, kv, layer, group: dims.heads / dims.kv_heads };
    let AttnScratch { workers, parts, states, whole, split } = scratch;
    let values = call.tile(pool.threads(), whole, split);

    let slot = tile_rows(&dims, tier) * call.part();
    let wave = parts.len() / slot;
    let out = Disjoint::new(&mut out[..tokens * dims.heads * dims.v_dim]);
    let items = split.iter().map(|t| t.pieces as usize).sum::<usize>();
    let mut done = 0;
    let mut wholes = whole.as_slice();
    while done < items || !wholes.is_empty() {
        let now = wave.min(items - done);
        {
            let parts = Disjoint::new(parts);
            let grain = if values < PAYS { usize::MAX } else { 1 };
            pool.for_each_chunk(now + wholes.len(), grain, |thread, tasks| {
                let worker = &mut *workers[thread].lock();
                for task in tasks {
                    if task < now {
                        let (tile, piece) = item(split, done + task);
                        // SAFETY: a task is handed out once, and this is its own part.
                        let part = unsafe { parts.slice(task * slot..(task + 1) * slot) };
                        call.load_queries(tile, &mut worker.q);
                        call.piece(tile, piece, &worker.q, &mut worker.scores, &mut worker.values, part);
                    } else {
                        call.whole(&wholes[task - now], worker, &out);
                    }
                }
            });
        }
        for task in 0..now {
            let (tile, piece) = item(split, done + task);
            let index = split.iter().position(|t| t.before == tile.before).expect("a tile of the list");
            let state = &mut states[index * slot..][..slot];
            call.join(tile, piece, state, &parts[task * slot..][..slot]);
            if piece + 1 == (tile.first_piece + tile.pieces) as usize {
                call.finish(tile, state, &out);
            }
        }
        done += now;
        wholes = &[];
    }
}

/// The split tile that the `i`-th piece of all belongs to, and the piece.
fn item(split: &[Tile], i: usize) -> (&Tile, usize) {
    let tile = &split[split.partition_point(|t| t.before <= i) - 1];
    (tile, tile.first_piece as usize + i - tile.before)
}

/// One call's inputs.
struct Call<'a> {
    tier: &'a Tier,
    batch: AttnBatch<'a>,
    args: &'a AttnArgs,
    sinks: Option<&'a [f32]>,
    q_src: &'a [f32],
    q: Heads,
    kv: &'a CpuKv,
    layer: usize,
    /// Query heads of a kv head.
    group: usize,
}

impl Call<'_> {
    /// Lists the tiles, those apart that are more than a fair share of the work. Says how many values of the cache they read.
    fn tile(&self, threads: usize, whole: &mut Vec<Tile>, split: &mut Vec<Tile>) -> usize {
        whole.clear();
        split.clear();
        let most = tile_rows(&self.args.dims, self.tier);
        let (mut total, mut seen) = (0, 0);
        for seq in 0..self.batch.kv_lens.len() {
            let rows = (self.batch.q_indptr[seq + 1] - self.batch.q_indptr[seq]) as usize * self.group;
            for kv_head in 0..self.args.dims.kv_heads {
                for row in (0..rows).step_by(most) {
                    let mut tile = Tile {
                        seq: seq as u32,
                        kv_head: kv_head as u32,
                        row: row as u32,
                        rows: most.min(rows - row) as u32,
                        first_piece: 0,
                        pieces: 0,
                        before: 0,
                    };
                    let (first, _) = self.sees(&tile, 0);
                    let (_, end) = self.sees(&tile, tile.rows as usize - 1);
                    tile.first_piece = (first / PIECE) as u32;
                    tile.pieces = (end.div_ceil(PIECE) - first / PIECE) as u32;
                    total += tile.pieces as usize;
                    seen += end - first;
                    assert!(whole.len() < whole.capacity(), "a batch within the limits");
                    whole.push(tile);
                }
            }
        }
        let values = seen * (self.args.dims.qk_dim + self.args.dims.v_dim);
        if threads == 1 || values < PAYS {
            return values;
        }
        // Fewer than SHARES * threads tiles can have more than this.
        let share = (total / (SHARES * threads)).max(1);
        let mut before = 0;
        whole.retain(|tile| {
            let keep = tile.pieces as usize <= share;
            if !keep {
                split.push(Tile { before, ..*tile });
                before += tile.pieces as usize;
            }
            keep
        });
        values
    }

    /// Values of a row's part.
    fn part(&self) -> usize {
        self.kv.v_width(self.layer) + PART_TAIL
    }

    /// The positions that row `r` of a tile sees, first and end.
    fn sees(&self, tile: &Tile, r: usize) -> (usize, usize) {
        let seq = tile.seq as usize;
        let tokens = (self.batch.q_indptr[seq + 1] - self.batch.q_indptr[seq]) as usize;
        let end = self.batch.kv_lens[seq] as usize - tokens + (tile.row as usize + r) / self.group + 1;
        (self.args.window.map_or(0, |w| end.saturating_sub(w)), end)
    }

    /// The tokens of a piece that row `r` of a tile sees; first = end where it sees none.
    fn range(&self, tile: &Tile, r: usize, piece: usize) -> (usize, usize) {
        let (first, end) = self.sees(tile, r);
        let (first, end) = (first.saturating_sub(piece * PIECE), end.saturating_sub(piece * PIECE).min(PIECE));
        if first < end { (first, end) } else { (0, 0) }
    }

    /// The parts of a tile that the kernels take at once: first row and rows of each.
    fn kernel_tiles(&self, tile: &Tile) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (most, rows) = (self.tier.attention.tile_rows(), tile.rows as usize);
        (0..rows).step_by(most).map(move |first| (first, most.min(rows - first)))
    }

    /// A row's token in the batch and its head.
    fn place(&self, tile: &Tile, r: usize) -> (usize, usize) {
        let row = tile.row as usize + r;
        let token = self.batch.q_indptr[tile.seq as usize] as usize + row / self.group;
        (token, tile.kv_head as usize * self.group + row % self.group)
    }

    /// The tile's queries as `[qk_dim][height]` for each kernel tile, times the factor on the scores.
    fn load_queries(&self, tile: &Tile, to: &mut [f32]) {
        let factor = match self.args.softcap {
            None => self.args.scale * LOG2_E,
            Some(cap) => self.args.scale / cap,
        };
        for (first, rows) in self.kernel_tiles(tile) {
            let height = self.tier.attention.height(rows);
            let to = &mut to[first * self.q.dim..][..height * self.q.dim];
            for r in 0..height {
                if r < rows {
                    let (token, head) = self.place(tile, first + r);
                    let from = &self.q_src[token * self.q.stride + self.q.offset + head * self.q.dim..][..self.q.dim];
                    for (d, v) in from.iter().enumerate() {
                        to[d * height + r] = v * factor;
                    }
                } else {
                    for d in 0..self.q.dim {
                        to[d * height + r] = 0.0;
                    }
                }
            }
        }
    }

    /// Runs a tile over a piece.
    fn piece(&self, tile: &Tile, piece: usize, q: &[f32], scores: &mut [f32], turned: &mut [f32], parts: &mut [f32]) {
        let seen = (0..tile.rows as usize).map(|r| self.range(tile, r, piece)).filter(|r| r.0 < r.1);
        let (first, end) = seen.fold((VECTORS, 0), |(first, end), r| (first.min(r.0 / LANES), end.max(r.1.div_ceil(LANES))));
        if first >= end {
            return;
        }
        // A vector of tokens is in one block: of those before the first that is seen none is looked up.
        let blocks = &self.batch.blocks[self.batch.block_indptr[tile.seq as usize] as usize..];
        let (size, block_size, v_width) = (self.kv.dtype().bytes(), self.kv.block_size(), self.kv.v_width(self.layer));
        let v_in_k = self.args.dims.v_in_k;
        let (mut keys, mut values) = ([std::ptr::null(); VECTORS], [std::ptr::null(); VECTORS]);
        for i in first..end {
            let token = piece * PIECE + i * LANES;
            let (k, v) = self.kv.head(self.layer, blocks[token / block_size], tile.kv_head as usize);
            keys[i] = k[token % block_size * size..].as_ptr();
            if !v_in_k {
                values[i] = v[token % block_size * v_width * size..].as_ptr();
            }
        }
        let (qk_dim, dtype) = (self.args.dims.qk_dim, self.kv.dtype());
        if v_in_k {
            let to = bytemuck::cast_slice_mut::<f32, u8>(turned);
            let mut job = TurnJob { keys: &keys, vectors: first..end, qk_dim, v_width, block_size, to };
            // SAFETY: as below.
            unsafe { self.tier.attention.turn(dtype, &mut job) };
            let turned = bytemuck::cast_slice::<f32, u8>(turned);
            for i in first..end {
                values[i] = turned[i * LANES * v_width * size..].as_ptr();
            }
        }
        for (row, rows) in self.kernel_tiles(tile) {
            let mut ranges = [(0, 0); MAX_ROWS];
            for (r, range) in ranges[..rows].iter_mut().enumerate() {
                *range = self.range(tile, row + r, piece);
            }
            let mut job = PieceJob {
                q: &q[row * qk_dim..],
                ranges: &ranges[..rows],
                keys,
                values,
                qk_dim,
                v_width,
                block_size,
                cap: self.args.softcap.map(|cap| cap * LOG2_E),
                scores: &mut *scores,
                parts: &mut parts[row * self.part()..],
            };
            // SAFETY: every vector that a row sees points into its head of its block, at the row that `CpuKv` documents, or
            // to the turned values; the cache is borrowed for the whole call, so nobody writes it.
            unsafe { self.tier.attention.piece(dtype, &mut job) };
        }
    }

    /// Adds the parts of a piece to the rows' states.
    fn join(&self, tile: &Tile, piece: usize, state: &mut [f32], parts: &[f32]) {
        let part = self.part();
        for r in 0..tile.rows as usize {
            let (state, parts) = (&mut state[r * part..][..part], &parts[r * part..][..part]);
            let (first, end) = self.range(tile, r, piece);
            if first >= end {
                continue;
            }
            // The first piece that a row sees is the state; adding it to an empty one would round.
            if self.sees(tile, r).0 / PIECE == piece {
                state.copy_from_slice(parts);
            } else {
                self.tier.attention.join(state, parts);
            }
        }
    }

    /// Writes the rows' means out.
    fn finish(&self, tile: &Tile, state: &[f32], out: &Disjoint<'_, f32>) {
        let (part, dims) = (self.part(), self.args.dims);
        for r in 0..tile.rows as usize {
            let (token, head) = self.place(tile, r);
            let at = (token * dims.heads + head) * dims.v_dim;
            // SAFETY: a row is in one tile, a tile is finished once, and this is the row's own place.
            let out = unsafe { out.slice(at..at + dims.v_dim) };
            // As a power of two, as the scores; held to what f32 has, so that no difference is a NaN.
            let sink = self.sinks.map(|s| (s[head] * LOG2_E).clamp(f32::MIN, f32::MAX));
            self.tier.attention.finish(&state[r * part..][..part], sink, out);
        }
    }

    /// All pieces of a tile, one after the other.
    fn whole(&self, tile: &Tile, worker: &mut Worker, out: &Disjoint<'_, f32>) {
        self.load_queries(tile, &mut worker.q);
        for piece in tile.first_piece as usize..(tile.first_piece + tile.pieces) as usize {
            self.piece(tile, piece, &worker.q, &mut worker.scores, &mut worker.values, &mut worker.parts);
            self.join(tile, piece, &mut worker.state, &worker.parts);
        }
        self.finish(tile, &worker.state, out);
    }
}

/// A tile with more than the work of all by this many a thread is split.
const SHARES: usize = 4;
/// Kernel tiles that share a piece's turned values; to turn them takes as long as two to four rows' work.
const SHARED_TILES: usize = 4;
/// Parts a thread that are held before they are joined.
const WAVE: usize = 32;
/// Values of the cache whose reading takes about as long as waking a thread.
const PAYS: usize = 65_536;

#[cfg(test)]
mod tests;
