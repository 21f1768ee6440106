//! Which query rows go over the cache together, and who does what: tiles of rows, the pieces of each, and which of their
//! sequences read the same blocks. Reads block tables, but no key and no value.
//!
//! ```text
//! order          sequences by their block tables: those that begin alike are neighbours, as in a tree of prefixes
//! tile           rows of a sequence, or all rows of several neighbours that share a prefix; one kv head
//! run            neighbours within a tile whose tokens of a piece are the same up to some point: read once for all of them
//! ```
//!
//! Invariant: every row is in one tile. Which, and with whom, is nothing but speed; of entries that may be anything it is
//! asked at most whether they are equal.
#![forbid(unsafe_code)]

use super::{AttnBatch, PAYS, SHARES, reserved};
use crate::backend::cpu::simd::PIECE;
use crate::error::RunError;
use crate::ids::BlockId;
use std::cmp::Reverse;

/// The sequences of a batch in the order of their block tables.
pub(in super::super) struct Neighbours {
    order: Vec<u32>,
    /// Entries that a table has in common with the one before it in that order, from the first on.
    common: Vec<u32>,
}

impl Neighbours {
    /// Bytes that [`new`](Self::new) allocates.
    pub(in super::super) fn bytes(seqs: usize) -> usize {
        2 * seqs * size_of::<u32>()
    }

    /// Room for so many sequences.
    ///
    /// # Errors
    /// Where the memory is not to be had.
    pub(in super::super) fn new(seqs: usize) -> Result<Self, RunError> {
        Ok(Neighbours { order: reserved(seqs)?, common: reserved(seqs)? })
    }

    /// Of these tables: see [`Batch`](crate::batch::Batch). Allocates nothing.
    pub(in super::super) fn fill(&mut self, indptr: &[u32], blocks: &[BlockId]) {
        let table = |seq: u32| &blocks[indptr[seq as usize] as usize..indptr[seq as usize + 1] as usize];
        self.order.clear();
        self.order.extend(0..indptr.len() as u32 - 1);
        self.order.sort_unstable_by(|a, b| table(*a).cmp(table(*b)));
        self.common.clear();
        let alike = |a: u32, b: u32| table(a).iter().zip(table(b)).take_while(|(a, b)| a == b).count() as u32;
        let pairs = self.order.windows(2).map(|pair| alike(pair[0], pair[1]));
        self.common.extend([0].into_iter().chain(pairs).take(self.order.len()));
    }

    /// The sequences.
    pub(in super::super) fn order(&self) -> &[u32] {
        &self.order
    }

    /// What each has in common with the one before it.
    pub(in super::super) fn common(&self) -> &[u32] {
        &self.common
    }
}

/// Rows of a kv head that go over the cache together.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Where its sequences begin in the order, and how many they are.
    first: u32,
    seqs: u32,
    pub(super) kv_head: u32,
    /// First row in the first sequence, token times group plus head in the group: 0 where there are several.
    row: u32,
    pub(super) rows: u32,
    /// Pieces that any of the rows sees.
    pub(super) first_piece: u32,
    pub(super) pieces: u32,
    /// Pieces of the split tiles before this one.
    pub(super) before: usize,
    /// Their rows, counted in each piece.
    pub(super) rows_before: usize,
}

/// A row of a tile: its token in the batch, its query head, and the positions that it sees, first and end.
#[derive(Clone, Copy, Default)]
pub(super) struct Row {
    pub(super) token: u32,
    pub(super) head: u32,
    pub(super) first: u32,
    pub(super) end: u32,
}

impl Row {
    /// The tokens of a piece that it sees; first = end where it sees none.
    pub(super) fn range(&self, piece: usize) -> (usize, usize) {
        let within = |position: u32| (position as usize).saturating_sub(piece * PIECE).min(PIECE);
        let (first, end) = (within(self.first), within(self.end));
        if first < end { (first, end) } else { (0, 0) }
    }
}

/// Rows of a tile that are one sequence's.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) seq: usize,
    /// First row in the tile.
    pub(super) at: usize,
    pub(super) rows: usize,
    /// Positions that its sequence has in common with that of the span before.
    common: usize,
}

/// Neighbouring spans.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// Of the first span.
    pub(super) seq: usize,
    /// First row in the tile.
    pub(super) at: usize,
    pub(super) rows: usize,
    pub(super) spans: usize,
    /// Tokens of the piece, from its first on, that are the same for all of them; the whole piece where there is one span.
    pub(super) shared: usize,
}

impl Run {
    /// The span is one of its.
    pub(super) fn holds(&self, span: &Span) -> bool {
        (self.at..self.at + self.rows).contains(&span.at)
    }
}

/// What tiling asks of a call.
#[derive(Clone, Copy)]
pub(super) struct Tiling<'a> {
    pub(super) batch: AttnBatch<'a>,
    /// Query heads of a kv head.
    pub(super) group: usize,
    pub(super) kv_heads: usize,
    pub(super) window: Option<usize>,
    pub(super) block_size: usize,
    /// The most rows in a kernel tile.
    pub(super) kernel_rows: usize,
    /// The most rows in a tile.
    pub(super) most: usize,
    /// Values of a token in the cache, of a head.
    pub(super) width: usize,
}

impl Tiling<'_> {
    /// Lists the tiles, those apart that are more than a fair share of the work, the others from the longest on. Says about how
    /// many values they read.
    pub(super) fn list(&self, threads: usize, whole: &mut Vec<Tile>, split: &mut Vec<Tile>) -> usize {
        whole.clear();
        split.clear();
        let most = self.tile_rows(threads);
        let mut i = 0;
        while i < self.batch.order.len() {
            let seq = self.batch.order[i] as usize;
            let mut rows = self.tokens(seq) * self.group;
            let (mut first, mut end) = self.reach(seq);
            let mut next = i + 1;
            while let Some(&seq) = self.batch.order.get(next) {
                let (from, to) = self.reach(seq as usize);
                let more = self.tokens(seq as usize) * self.group;
                if rows + more > most || (self.batch.common[next] as usize * self.block_size) < from + WORTH {
                    break;
                }
                (first, end) = (first.min(from), end.max(to));
                (rows, next) = (rows + more, next + 1);
            }
            // As few as can be, and much alike. Heads of a block lie side by side: one after the other.
            let each = rows.div_ceil(rows.div_ceil(most)).next_multiple_of(self.kernel_rows);
            for kv_head in 0..self.kv_heads as u32 {
                for row in (0..rows).step_by(each) {
                    let last = rows.min(row + each) - 1;
                    if rows > each {
                        (first, end) = (self.sees(seq, row / self.group).0, self.sees(seq, last / self.group).1);
                    }
                    assert!(whole.len() < whole.capacity(), "a batch within the limits");
                    whole.push(Tile {
                        first: i as u32,
                        seqs: (next - i) as u32,
                        kv_head,
                        row: row as u32,
                        rows: (last + 1 - row) as u32,
                        first_piece: (first / PIECE) as u32,
                        pieces: (end.div_ceil(PIECE) - first / PIECE) as u32,
                        before: 0,
                        rows_before: 0,
                    });
                }
            }
            i = next;
        }
        let values = whole.iter().map(|t| self.kernel_tiles(t) * t.pieces as usize).sum::<usize>() * PIECE * self.width;
        if threads == 1 || values < PAYS {
            return values;
        }
        // Fewer than SHARES * threads tiles can have more than this.
        let share = whole.iter().map(|t| self.cost(t)).sum::<usize>() / (SHARES * threads);
        let (mut before, mut rows_before) = (0, 0);
        whole.retain(|tile| {
            let keep = tile.pieces == 1 || self.cost(tile) <= share;
            if !keep {
                split.push(Tile { before, rows_before, ..*tile });
                before += tile.pieces as usize;
                rows_before += (tile.pieces * tile.rows) as usize;
            }
            keep
        });
        // Those that are alike stay in their order.
        whole.sort_unstable_by_key(|tile| (Reverse(self.cost(tile)), tile.first, tile.kv_head, tile.row));
        values
    }

    /// The rows of a tile.
    pub(super) fn rows(&self, tile: &Tile, rows: &mut [Row]) {
        for span in self.spans(tile) {
            let first = tile.row as usize;
            let (mut token, mut head) = (first / self.group, first % self.group);
            for row in &mut rows[span.at..][..span.rows] {
                let (first, end) = self.sees(span.seq, token);
                *row = Row {
                    token: self.batch.q_indptr[span.seq] + token as u32,
                    head: tile.kv_head * self.group as u32 + head as u32,
                    first: first as u32,
                    end: end as u32,
                };
                head += 1;
                if head == self.group {
                    (token, head) = (token + 1, 0);
                }
            }
        }
    }

    /// The sequences of a tile.
    pub(super) fn spans(&self, tile: &Tile) -> impl Iterator<Item = Span> + Clone {
        let (alone, mut at) = (tile.seqs == 1, 0);
        (tile.first as usize..(tile.first + tile.seqs) as usize).map(move |i| {
            let seq = self.batch.order[i] as usize;
            let rows = if alone { tile.rows as usize } else { self.tokens(seq) * self.group };
            at += rows;
            Span { seq, at: at - rows, rows, common: self.batch.common[i] as usize * self.block_size }
        })
    }

    /// The spans of a tile, those together that share tokens of the piece. A span joins the ones before it where it shares as
    /// much as they do.
    pub(super) fn runs(&self, tile: &Tile, piece: usize) -> impl Iterator<Item = Run> {
        let mut spans = self.spans(tile).peekable();
        std::iter::from_fn(move || {
            let Span { seq, at, rows, .. } = spans.next()?;
            let mut run = Run { seq, at, rows, spans: 1, shared: PIECE };
            let shares = |span: &Span| span.common.saturating_sub(piece * PIECE).min(PIECE);
            let least = spans.peek().map_or(0, shares);
            while least >= WORTH
                && let Some(span) = spans.next_if(|span| shares(span) >= least)
            {
                run.rows += span.rows;
                run.spans += 1;
                run.shared = least;
            }
            Some(run)
        })
    }

    /// The most rows in a tile, so that there is enough for all threads.
    fn tile_rows(&self, threads: usize) -> usize {
        if threads == 1 {
            return self.most;
        }
        let work = |seq: &u32| {
            let (first, end) = self.reach(*seq as usize);
            self.tokens(*seq as usize) * (end.div_ceil(PIECE) - first / PIECE)
        };
        let work = self.batch.order.iter().map(work).sum::<usize>() * self.group * self.kv_heads;
        (work / (SHARES * threads)).max(1).next_multiple_of(self.kernel_rows).min(self.most)
    }

    /// About how long a tile takes: memory is as slow as the rows of half a kernel tile.
    fn cost(&self, tile: &Tile) -> usize {
        tile.pieces as usize * (2 * tile.rows as usize + tile.seqs as usize * self.kernel_rows)
    }

    fn kernel_tiles(&self, tile: &Tile) -> usize {
        (tile.rows as usize).div_ceil(self.kernel_rows)
    }

    /// Tokens of a sequence in the batch.
    fn tokens(&self, seq: usize) -> usize {
        (self.batch.q_indptr[seq + 1] - self.batch.q_indptr[seq]) as usize
    }

    /// The positions that any of a sequence's tokens sees, first and end.
    fn reach(&self, seq: usize) -> (usize, usize) {
        (self.sees(seq, 0).0, self.sees(seq, self.tokens(seq) - 1).1)
    }

    /// The positions that a sequence's i-th token of the batch sees, first and end.
    fn sees(&self, seq: usize, token: usize) -> (usize, usize) {
        let end = self.batch.kv_lens[seq] as usize - self.tokens(seq) + token + 1;
        (self.window.map_or(0, |w| end.saturating_sub(w)), end)
    }
}

/// Tokens of a piece that sequences must share to be worth reading once.
const WORTH: usize = 32;

#[cfg(test)]
mod tests;
