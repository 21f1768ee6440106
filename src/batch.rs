//! What one step runs: flat index arrays, complete on construction. A decode row is a sequence with one token; a prefill
//! chunk or a draft check is one with more. The scheduler never sees a model and the model never sees a sequence: they meet
//! here.
//!
//! Invariants: `q_indptr` and `block_indptr` start at 0 and never fall; a sequence's tokens have consecutive positions that
//! its listed blocks cover; slots are distinct where the block tables are; `rows` are token indices in rising order.
#![forbid(unsafe_code)]

use crate::error::{ConfigError, RunError, reserved};
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

impl BatchLimits {
    /// # Errors
    /// [`ConfigError::Invalid`] for a limit below `least`, or that 32-bit indices do not reach.
    pub(crate) fn check(&self, least: usize) -> Result<(), ConfigError> {
        for (name, limit) in [("tokens", self.tokens), ("seqs", self.seqs), ("blocks", self.blocks), ("rows", self.rows)] {
            if limit < least || u32::try_from(limit).is_err() {
                return Err(ConfigError::invalid(format!("batch limit {name}"), format!("{least} to {}", u32::MAX), limit));
            }
        }
        Ok(())
    }
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
    ///
    /// # Errors
    /// [`ConfigError`] for a block size that is no power of two from 1 to 4096, for limits that 32-bit indices do not reach,
    /// and where the system refuses the memory.
    pub fn new(block_size: usize, limits: BatchLimits) -> Result<Self, ConfigError> {
        if !block_size.is_power_of_two() || block_size > MOST_BLOCK_SIZE {
            let expected = format!("a power of two from 1 to {MOST_BLOCK_SIZE}");
            return Err(ConfigError::invalid("block_size", expected, block_size));
        }
        limits.check(0)?;
        let indptr = || -> Result<Vec<u32>, ConfigError> {
            let mut v = reserved("a batch's sequences", limits.seqs.saturating_add(1))?;
            v.push(0);
            Ok(v)
        };
        Ok(Batch {
            block_size,
            limits,
            tokens: reserved("a batch's tokens", limits.tokens)?,
            positions: reserved("a batch's tokens", limits.tokens)?,
            slots: reserved("a batch's tokens", limits.tokens)?,
            q_indptr: indptr()?,
            kv_lens: reserved("a batch's sequences", limits.seqs)?,
            totals: reserved("a batch's sequences", limits.seqs)?,
            block_indptr: indptr()?,
            blocks: reserved("a batch's block tables", limits.blocks)?,
            rows: reserved("a batch's rows", limits.rows)?,
            states: false,
        })
    }

    /// Bytes that [`new`](Self::new) allocates.
    pub fn bytes(limits: &BatchLimits) -> usize {
        let entries = [(3, limits.tokens), (4, limits.seqs), (2, 1), (1, limits.blocks), (1, limits.rows)];
        // Four bytes in every array.
        entries.iter().fold(0, |sum: usize, (arrays, len)| sum.saturating_add(len.saturating_mul(4 * arrays)))
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
    /// [`RunError::BatchTooLarge`] where a limit would be passed, [`RunError::BadBatch`] for an item without tokens, with more
    /// of them than `total` or its blocks cover, or with positions or slots that 32 bits do not hold.
    pub fn push(&mut self, item: BatchItem<'_>) -> Result<(), RunError> {
        let (bs, len) = (self.block_size, item.tokens.len());
        if len == 0 {
            return Err(RunError::bad_batch("tokens", "at least 1", 0));
        }
        if u32::try_from(item.total).is_err() {
            return Err(RunError::bad_batch("total", format_args!("at most {}", u32::MAX), item.total));
        }
        let end =
            item.start.checked_add(len).filter(|end| *end <= item.total).ok_or_else(|| {
                RunError::bad_batch("start", format_args!("at most {} less {len} tokens", item.total), item.start)
            })?;
        let used = end.div_ceil(bs);
        if used > item.blocks.len() {
            let expected = format_args!("at least {used} for {end} positions");
            return Err(RunError::bad_batch("blocks", expected, item.blocks.len()));
        }
        // Both are powers of two less one, so that a block's last slot fits 32 bits where its first does.
        let most = u32::MAX / bs as u32;
        if let Some(block) = item.blocks[item.start / bs..used].iter().find(|block| block.0 > most) {
            return Err(RunError::bad_batch("block", format_args!("at most {most}"), block.0));
        }
        let rows = match item.rows {
            RowsWanted::None | RowsWanted::States => 0,
            RowsWanted::Last => 1,
            RowsWanted::All => len,
        };
        let fits = |what, found: usize, limit: usize| match found <= limit {
            true => Ok(()),
            false => Err(RunError::BatchTooLarge { what, found, limit }),
        };
        fits("tokens", self.tokens.len() + len, self.limits.tokens)?;
        fits("sequences", self.seqs() + 1, self.limits.seqs)?;
        fits("block table entries", self.blocks.len() + used, self.limits.blocks)?;
        fits("rows", self.rows.len() + rows, self.limits.rows)?;

        let first = self.tokens.len() as u32;
        let last = first + len as u32;
        self.tokens.extend_from_slice(item.tokens);
        self.positions.extend((item.start..end).map(|p| p as u32));
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

const MOST_BLOCK_SIZE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: BatchLimits = BatchLimits { tokens: 8, seqs: 2, blocks: 4, rows: 3 };

    fn item<'a>(tokens: &'a [TokenId], start: usize, blocks: &'a [BlockId], rows: RowsWanted) -> BatchItem<'a> {
        BatchItem { tokens, start, total: start + tokens.len(), blocks, rows }
    }

    #[test]
    fn arrays_of_a_chunk_and_a_decode_row() {
        let mut b = Batch::new(4, LIMITS).unwrap();
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
        let mut b = Batch::new(4, LIMITS).unwrap();
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

    #[test]
    fn sizes_out_of_range_are_refused() {
        for block_size in [0, 3, 17, 8192, usize::MAX] {
            let error = Batch::new(block_size, LIMITS).unwrap_err().to_string();
            assert!(error.contains("block_size") && error.contains(&block_size.to_string()), "{error}");
        }
        let max = usize::MAX;
        for (name, limits) in [
            ("tokens", BatchLimits { tokens: max, ..LIMITS }),
            ("seqs", BatchLimits { seqs: max, ..LIMITS }),
            ("blocks", BatchLimits { blocks: max, ..LIMITS }),
            ("rows", BatchLimits { rows: max, ..LIMITS }),
        ] {
            let error = Batch::new(16, limits).unwrap_err().to_string();
            assert!(error.contains(&format!("limit {name}")) && error.contains(&max.to_string()), "{error}");
            assert_eq!(Batch::bytes(&limits), max);
        }
        assert!(matches!(reserved::<u64>("a list", max), Err(ConfigError::Refused { what: "a list", needed_bytes: u64::MAX })));
    }

    #[test]
    fn bad_items_are_refused_and_leave_no_trace() {
        let mut b = Batch::new(4, LIMITS).unwrap();
        b.push(item(&[1], 0, &[BlockId(3)], RowsWanted::Last)).unwrap();
        let before = format!("{b:?}");
        let x = [BlockId(0), BlockId(u32::MAX / 4 + 1)];
        let good = BatchItem { tokens: &[1], start: 0, total: 1, blocks: &x, rows: RowsWanted::None };
        for (what, bad) in [
            ("tokens", BatchItem { tokens: &[], ..good }),
            ("start", BatchItem { start: usize::MAX, ..good }),
            ("start", BatchItem { start: usize::MAX - 1, ..good }),
            ("start", BatchItem { start: 1, ..good }),
            ("total", BatchItem { total: usize::MAX, ..good }),
            ("blocks", BatchItem { start: 8, total: 9, ..good }),
            ("blocks", BatchItem { blocks: &[], ..good }),
            ("blocks", BatchItem { start: u32::MAX as usize - 1, total: u32::MAX as usize, ..good }),
            ("block", BatchItem { start: 4, total: 5, ..good }),
        ] {
            match b.push(bad) {
                Err(RunError::BadBatch { what: found, .. }) => assert_eq!(found, what, "{bad:?}"),
                other => panic!("{bad:?}: {other:?}"),
            }
            assert_eq!(format!("{b:?}"), before);
        }
        b.push(good).unwrap();
    }
}
