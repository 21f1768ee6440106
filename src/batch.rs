//! What one step runs: flat index arrays, complete on construction. A decode row is a sequence with one token; a prefill
//! chunk or a draft check is one with more. The scheduler never sees a model and the model never sees a sequence: they meet
//! here.
//!
//! Invariants: `q_indptr` and `block_indptr` start at 0 and never fall; a sequence's tokens have consecutive positions that
//! its listed blocks cover; slots are distinct; `rows` are token indices in rising order.
#![forbid(unsafe_code)]

use crate::error::RunError;
use crate::ids::{BlockId, TokenId};

/// The most a [`Batch`] may hold. Model buffers are sized by it, so that a step allocates nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchLimits {
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Sequences.
    pub seqs: usize,
    /// Entries of all block tables.
    pub blocks: usize,
    /// Tokens whose logits are wanted.
    pub rows: usize,
}

/// Which of an item's tokens the caller wants logits of, or hidden states.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowsWanted {
    /// None: a prefill chunk that is not the last.
    None,
    /// The last token's.
    Last,
    /// All of them: a draft check, or scoring.
    All,
    /// None, but the hidden state of each token after the final norm: an embedding.
    States,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug)]
pub struct BatchItem<'a> {
    /// Tokens to run, at least one.
    pub tokens: &'a [TokenId],
    /// Position of the first of them: tokens before it are in the cache.
    pub start: usize,
    /// Tokens of the sequence known by now, those not yet run included. Rotary scalings that depend on the length take it
    /// from here, so that a prefill gives the same bits in chunks as in one piece.
    pub total: usize,
    /// The sequence's block table, which covers `start + tokens.len()` positions.
    pub blocks: &'a [BlockId],
    /// Logits wanted.
    pub rows: RowsWanted,
}

/// See the module's documentation. T tokens, S sequences, R rows.
#[derive(Clone, Debug)]
pub struct Batch {
    block_size: usize,
    limits: BatchLimits,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    q_indptr: Vec<u32>,
    kv_lens: Vec<u32>,
    totals: Vec<u32>,
    block_indptr: Vec<u32>,
    blocks: Vec<BlockId>,
    rows: Vec<u32>,
    states: bool,
}

impl Batch {
    /// An empty batch for blocks of `block_size` tokens. Allocates everything it will ever need.
    pub fn new(block_size: usize, limits: BatchLimits) -> Self {
        let indptr = |n: usize| {
            let mut v = Vec::with_capacity(n + 1);
            v.push(0);
            v
        };
        Batch {
            block_size,
            limits,
            tokens: Vec::with_capacity(limits.tokens),
            positions: Vec::with_capacity(limits.tokens),
            slots: Vec::with_capacity(limits.tokens),
            q_indptr: indptr(limits.seqs),
            kv_lens: Vec::with_capacity(limits.seqs),
            totals: Vec::with_capacity(limits.seqs),
            block_indptr: indptr(limits.seqs),
            blocks: Vec::with_capacity(limits.blocks),
            rows: Vec::with_capacity(limits.rows),
            states: false,
        }
    }

    /// Bytes that [`new`](Self::new) allocates.
    pub fn bytes(limits: &BatchLimits) -> usize {
        // Four bytes in every array.
        4 * (3 * limits.tokens + 4 * limits.seqs + 2 + limits.blocks + limits.rows)
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        for v in [&mut self.tokens, &mut self.positions, &mut self.slots, &mut self.kv_lens, &mut self.totals, &mut self.rows] {
            v.clear();
        }
        self.blocks.clear();
        self.q_indptr.truncate(1);
        self.block_indptr.truncate(1);
        self.states = false;
    }

    /// Adds a sequence. On an error the batch is as it was.
    ///
    /// # Errors
    /// [`RunError::BatchTooLarge`] where a limit would be passed.
    ///
    /// # Panics
    /// Where the item's blocks do not cover its tokens: a bug in the ledger.
    pub fn push(&mut self, item: BatchItem<'_>) -> Result<(), RunError> {
        let end = item.start + item.tokens.len();
        let used = end.div_ceil(self.block_size);
        assert!(!item.tokens.is_empty() && used <= item.blocks.len() && end <= item.total, "an item that its blocks cover");
        let rows = match item.rows {
            RowsWanted::None | RowsWanted::States => 0,
            RowsWanted::Last => 1,
            RowsWanted::All => item.tokens.len(),
        };
        let fits = |what, found: usize, limit: usize| match found <= limit {
            true => Ok(()),
            false => Err(RunError::BatchTooLarge { what, found, limit }),
        };
        fits("tokens", self.tokens.len() + item.tokens.len(), self.limits.tokens)?;
        fits("sequences", self.seqs() + 1, self.limits.seqs)?;
        fits("block table entries", self.blocks.len() + used, self.limits.blocks)?;
        fits("rows", self.rows.len() + rows, self.limits.rows)?;

        let first = self.tokens.len() as u32;
        let last = first + item.tokens.len() as u32;
        self.tokens.extend_from_slice(item.tokens);
        self.positions.extend((item.start..end).map(|p| p as u32));
        let bs = self.block_size;
        self.slots.extend((item.start..end).map(|p| item.blocks[p / bs].0 * bs as u32 + (p % bs) as u32));
        self.q_indptr.push(last);
        self.kv_lens.push(end as u32);
        self.totals.push(item.total as u32);
        self.blocks.extend_from_slice(&item.blocks[..used]);
        self.block_indptr.push(self.blocks.len() as u32);
        self.rows.extend(last - rows as u32..last);
        self.states |= item.rows == RowsWanted::States;
        Ok(())
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Sequences, S.
    pub fn seqs(&self) -> usize {
        self.kv_lens.len()
    }

    /// Token ids, `[T]`.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Each token's position in its sequence, `[T]`.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Where each token's key and value go, `[T]`: block times block size plus offset.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Sequence s has the tokens `q_indptr[s]..q_indptr[s + 1]`, `[S + 1]`.
    pub fn q_indptr(&self) -> &[u32] {
        &self.q_indptr
    }

    /// Cached tokens of each sequence once this step's are written, `[S]`.
    pub fn kv_lens(&self) -> &[u32] {
        &self.kv_lens
    }

    /// Known tokens of each sequence, `[S]`: see [`BatchItem::total`].
    pub fn totals(&self) -> &[u32] {
        &self.totals
    }

    /// Sequence s has the blocks `block_indptr[s]..block_indptr[s + 1]`, `[S + 1]`.
    pub fn block_indptr(&self) -> &[u32] {
        &self.block_indptr
    }

    /// All block tables, one after the other.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Token indices whose logits are wanted, `[R]`, rising.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// True where an item wants [`RowsWanted::States`].
    pub fn wants_states(&self) -> bool {
        self.states
    }

    /// True with no sequence in it.
    pub fn is_empty(&self) -> bool {
        self.kv_lens.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: BatchLimits = BatchLimits { tokens: 8, seqs: 2, blocks: 4, rows: 3 };

    fn item<'a>(tokens: &'a [TokenId], start: usize, blocks: &'a [BlockId], rows: RowsWanted) -> BatchItem<'a> {
        BatchItem { tokens, start, total: start + tokens.len(), blocks, rows }
    }

    #[test]
    fn arrays_of_a_chunk_and_a_decode_row() {
        let mut b = Batch::new(4, LIMITS);
        let (x, y) = ([BlockId(7), BlockId(2)], [BlockId(5)]);
        b.push(item(&[10, 11, 12], 2, &x, RowsWanted::Last)).unwrap();
        b.push(item(&[20], 3, &y, RowsWanted::All)).unwrap();
        assert_eq!(b.positions(), [2, 3, 4, 3]);
        assert_eq!(b.slots(), [30, 31, 8, 23]);
        assert_eq!(b.q_indptr(), [0, 3, 4]);
        assert_eq!(b.kv_lens(), [5, 4]);
        assert_eq!(b.block_indptr(), [0, 2, 3]);
        assert_eq!(b.rows(), [2, 3]);
        b.clear();
        assert!(b.is_empty() && b.tokens().is_empty() && b.q_indptr() == [0]);
    }

    #[test]
    fn limits_hold_and_a_refused_item_leaves_no_trace() {
        let mut b = Batch::new(4, LIMITS);
        let x = [BlockId(0), BlockId(1), BlockId(2)];
        b.push(item(&[1; 5], 0, &x, RowsWanted::Last)).unwrap();
        let before = format!("{b:?}");
        for refused in
            [item(&[1; 4], 0, &x, RowsWanted::None), item(&[1], 11, &x, RowsWanted::None), item(&[1; 3], 0, &x, RowsWanted::All)]
        {
            assert!(matches!(b.push(refused), Err(RunError::BatchTooLarge { .. })), "{refused:?}");
            assert_eq!(format!("{b:?}"), before);
        }
    }
}
