//! What one step runs: flat index arrays, complete on construction. A decode row is a sequence with one token; a prefill
//! chunk or a draft check is one with more. The scheduler never sees a model and the model never sees a sequence: they meet
//! here.
//!
//! Invariants: `q_indptr` and each `block_indptr` start at 0 and never fall; a sequence's tokens have consecutive positions that
//! its listed blocks cover, in each group; every block that its group's layers read or write is one of the group's pool; slots
//! are distinct where the block tables are; `rows` are token indices in rising order.
#![forbid(unsafe_code)]

use crate::error::{ConfigError, RunError, reserved};
use crate::ids::{BlockGroup, BlockId, MAX_GROUPS, TokenId};

/// The most a [`Batch`] may hold. Model buffers are sized by it, so that a step allocates nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchLimits {
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Sequences.
    pub seqs: usize,
    /// Entries of the block tables of one group, those behind its window included.
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
    /// The sequence's block tables, one for each group, each covering `start + tokens.len()` positions. Entries before
    /// [`BlockGroup::first_block`] of `start` are not looked at.
    pub tables: &'a [&'a [BlockId]],
    /// Logits wanted.
    pub rows: RowsWanted,
}

/// See the module's documentation. T tokens, S sequences, R rows.
#[derive(Clone, Debug)]
pub struct Batch {
    block_size: usize,
    groups: Vec<BlockGroup>,
    limits: BatchLimits,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    q_indptr: Vec<u32>,
    kv_lens: Vec<u32>,
    totals: Vec<u32>,
    /// One for each group.
    tables: Vec<Tables>,
    rows: Vec<u32>,
    states: bool,
}

/// The arrays of one group.
#[derive(Clone, Debug)]
struct Tables {
    slots: Vec<u32>,
    indptr: Vec<u32>,
    blocks: Vec<BlockId>,
}

impl Batch {
    /// An empty batch for blocks of `block_size` tokens in these groups' pools. Allocates everything it will ever need.
    ///
    /// # Errors
    /// [`ConfigError`] for a block size that is no power of two from 1 to 4096, for groups that are none or more than
    /// [`MAX_GROUPS`], have a window of 0 or slots that 32 bits do not hold, for limits that 32-bit indices do not reach, and
    /// where the system refuses the memory.
    pub fn new(block_size: usize, groups: &[BlockGroup], limits: BatchLimits) -> Result<Self, ConfigError> {
        if !block_size.is_power_of_two() || block_size > MOST_BLOCK_SIZE {
            let expected = format!("a power of two from 1 to {MOST_BLOCK_SIZE}");
            return Err(ConfigError::invalid("block_size", expected, block_size));
        }
        limits.check(0)?;
        if !(1..=MAX_GROUPS).contains(&groups.len()) {
            return Err(ConfigError::invalid("groups", format!("1 to {MAX_GROUPS}"), groups.len()));
        }
        let most = u32::MAX as usize / block_size;
        for (i, group) in groups.iter().enumerate() {
            if group.window == Some(0) {
                return Err(ConfigError::invalid(format!("groups[{i}].window"), "at least 1", 0));
            }
            if group.blocks > most {
                let expected = format!("at most {most} of {block_size} tokens");
                return Err(ConfigError::invalid(format!("groups[{i}].blocks"), expected, group.blocks));
            }
        }
        let indptr = || -> Result<Vec<u32>, ConfigError> {
            let mut v = reserved("a batch's sequences", limits.seqs.saturating_add(1))?;
            v.push(0);
            Ok(v)
        };
        let tables = || -> Result<Tables, ConfigError> {
            let slots = reserved("a batch's tokens", limits.tokens)?;
            Ok(Tables { slots, indptr: indptr()?, blocks: reserved("a batch's block tables", limits.blocks)? })
        };
        Ok(Batch {
            block_size,
            groups: groups.to_vec(),
            limits,
            tokens: reserved("a batch's tokens", limits.tokens)?,
            positions: reserved("a batch's tokens", limits.tokens)?,
            q_indptr: indptr()?,
            kv_lens: reserved("a batch's sequences", limits.seqs)?,
            totals: reserved("a batch's sequences", limits.seqs)?,
            tables: groups.iter().map(|_| tables()).collect::<Result<_, _>>()?,
            rows: reserved("a batch's rows", limits.rows)?,
            states: false,
        })
    }

    /// Bytes that [`new`](Self::new) allocates with so many groups.
    pub fn bytes(limits: &BatchLimits, groups: usize) -> usize {
        let entries =
            [(2 + groups, limits.tokens), (3 + groups, limits.seqs), (1 + groups, 1), (groups, limits.blocks), (1, limits.rows)];
        // Four bytes in every array.
        entries.iter().fold(0, |sum: usize, (arrays, len)| sum.saturating_add(len.saturating_mul(4 * arrays)))
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        for v in [&mut self.tokens, &mut self.positions, &mut self.kv_lens, &mut self.totals, &mut self.rows] {
            v.clear();
        }
        self.q_indptr.truncate(1);
        for group in &mut self.tables {
            group.slots.clear();
            group.indptr.truncate(1);
            group.blocks.clear();
        }
        self.states = false;
    }

    /// Adds a sequence. On an error the batch is as it was.
    ///
    /// # Errors
    /// [`RunError::BatchTooLarge`] where a limit would be passed, [`RunError::BadBatch`] for an item without tokens, with more
    /// of them than `total` or its blocks cover, with positions that 32 bits do not hold, without a table for each group, or
    /// with blocks that would be read or written and are not in the group's pool, [`BlockId::NONE`] among them.
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
        if item.tables.len() != self.groups.len() {
            let expected = format_args!("{}, one for each group", self.groups.len());
            return Err(RunError::bad_batch("block tables", expected, item.tables.len()));
        }
        for (g, (group, table)) in self.groups.iter().zip(item.tables).enumerate() {
            if used > table.len() {
                let expected = format_args!("at least {used} for {end} positions in group {g}");
                return Err(RunError::bad_batch("blocks", expected, table.len()));
            }
            let first = group.first_block(item.start, bs);
            if let Some(i) = (first..used).find(|&i| table[i].index() >= group.blocks) {
                let expected = format_args!("below {} at index {i} of the table of group {g}", group.blocks);
                return Err(match table[i] {
                    BlockId::NONE => RunError::bad_batch("block", expected, "none"),
                    block => RunError::bad_batch("block", expected, block.0),
                });
            }
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
        fits("block table entries", self.tables[0].blocks.len() + used, self.limits.blocks)?;
        fits("rows", self.rows.len() + rows, self.limits.rows)?;

        let first = self.tokens.len() as u32;
        let last = first + len as u32;
        self.tokens.extend_from_slice(item.tokens);
        self.positions.extend((item.start..end).map(|p| p as u32));
        self.q_indptr.push(last);
        self.kv_lens.push(end as u32);
        self.totals.push(item.total as u32);
        for (to, table) in self.tables.iter_mut().zip(item.tables) {
            to.slots.extend((item.start..end).map(|p| table[p / bs].0 * bs as u32 + (p % bs) as u32));
            to.blocks.extend_from_slice(&table[..used]);
            to.indptr.push(to.blocks.len() as u32);
        }
        self.rows.extend(last - rows as u32..last);
        self.states |= item.rows == RowsWanted::States;
        Ok(())
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The groups that it was made for.
    pub fn groups(&self) -> &[BlockGroup] {
        &self.groups
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

    /// Where each token's keys and values go in a group's layers, `[T]`: block times block size plus offset.
    ///
    /// # Panics
    /// Where there is no such group, as the two below.
    pub fn slots(&self, group: usize) -> &[u32] {
        &self.tables[group].slots
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

    /// Sequence s has the blocks `block_indptr[s]..block_indptr[s + 1]` of a group, `[S + 1]`.
    pub fn block_indptr(&self, group: usize) -> &[u32] {
        &self.tables[group].indptr
    }

    /// All block tables of a group, one after the other. Entries of a sequence's table that lie before
    /// [`BlockGroup::first_block`] of its first position may be anything.
    pub fn blocks(&self, group: usize) -> &[BlockId] {
        &self.tables[group].blocks
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
    const GROUP: BlockGroup = BlockGroup { blocks: 8, window: None };

    fn item<'a>(tokens: &'a [TokenId], start: usize, tables: &'a [&'a [BlockId]], rows: RowsWanted) -> BatchItem<'a> {
        BatchItem { tokens, start, total: start + tokens.len(), tables, rows }
    }

    #[test]
    fn arrays_of_a_chunk_and_a_decode_row() {
        let mut b = Batch::new(4, &[GROUP], LIMITS).unwrap();
        let (x, y) = ([BlockId(7), BlockId(2)], [BlockId(5)]);
        b.push(item(&[10, 11, 12], 2, &[&x], RowsWanted::Last)).unwrap();
        b.push(item(&[20], 3, &[&y], RowsWanted::All)).unwrap();
        assert_eq!(b.positions(), [2, 3, 4, 3]);
        assert_eq!(b.slots(0), [30, 31, 8, 23]);
        assert_eq!(b.q_indptr(), [0, 3, 4]);
        assert_eq!(b.kv_lens(), [5, 4]);
        assert_eq!(b.block_indptr(0), [0, 2, 3]);
        assert_eq!(b.rows(), [2, 3]);
        b.clear();
        assert!(b.is_empty() && b.tokens().is_empty() && b.q_indptr() == [0] && b.slots(0).is_empty() && b.blocks(0).is_empty());
    }

    #[test]
    fn each_group_has_tables_of_its_own() {
        let limits = BatchLimits { blocks: 6, ..LIMITS };
        let groups = [GROUP, BlockGroup { blocks: 3, window: Some(5) }];
        let mut b = Batch::new(4, &groups, limits).unwrap();
        // The token at 9 sees 5 to 9: nothing of the block before.
        let (x, y) = ([BlockId(7), BlockId(2), BlockId(0)], [BlockId::NONE, BlockId(2), BlockId(1)]);
        b.push(item(&[10, 11], 9, &[&x, &y], RowsWanted::Last)).unwrap();
        b.push(item(&[12], 2, &[&[BlockId(6)], &[BlockId(0)]], RowsWanted::Last)).unwrap();
        assert_eq!((b.slots(0), b.slots(1)), (&[1, 2, 26][..], &[5, 6, 2][..]));
        assert_eq!((b.block_indptr(0), b.block_indptr(1)), (&[0, 3, 4][..], &[0, 3, 4][..]));
        assert_eq!(b.blocks(1)[1..], [BlockId(2), BlockId(1), BlockId(0)]);
        assert_eq!(b.groups(), groups);
        b.clear();
        assert!((0..2).all(|g| b.slots(g).is_empty() && b.block_indptr(g) == [0] && b.blocks(g).is_empty()));
    }

    #[test]
    fn only_what_lies_behind_a_window_may_be_missing() {
        let groups = [GROUP, BlockGroup { blocks: 4, window: Some(6) }];
        let mut b = Batch::new(4, &groups, BatchLimits { tokens: 64, seqs: 64, blocks: 640, rows: 64 }).unwrap();
        let full: Vec<_> = (0..6).map(BlockId).collect();
        for start in 0..20 {
            for len in 1..=24 - start {
                let (tokens, used) = (vec![1; len], (start + len).div_ceil(4));
                let first = (start + 1usize).saturating_sub(6) / 4;
                for missing in 0..used {
                    for (what, block) in [("none", BlockId::NONE), ("4", BlockId(4))] {
                        let mut table = vec![BlockId(3); used];
                        table[..first].fill(BlockId::NONE);
                        table[missing] = block;
                        b.clear();
                        match b.push(item(&tokens, start, &[&full, &table], RowsWanted::None)) {
                            Ok(()) => assert!(missing < first, "{start} {len} {missing}"),
                            Err(RunError::BadBatch { what: "block", expected, found }) => {
                                assert!(missing >= first, "{start} {len} {missing}");
                                assert_eq!(expected, format!("below 4 at index {missing} of the table of group 1"));
                                assert_eq!(found, what);
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn limits_hold_and_a_refused_item_leaves_no_trace() {
        let mut b = Batch::new(4, &[GROUP], LIMITS).unwrap();
        let x: &[_] = &[BlockId(0), BlockId(1), BlockId(2)];
        b.push(item(&[1; 5], 0, &[x], RowsWanted::Last)).unwrap();
        let before = format!("{b:?}");
        for refused in [
            item(&[1; 4], 0, &[x], RowsWanted::None),
            item(&[1], 11, &[x], RowsWanted::None),
            item(&[1; 3], 0, &[x], RowsWanted::All),
        ] {
            assert!(matches!(b.push(refused), Err(RunError::BatchTooLarge { .. })), "{refused:?}");
            assert_eq!(format!("{b:?}"), before);
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        for block_size in [0, 3, 17, 8192, usize::MAX] {
            let error = Batch::new(block_size, &[GROUP], LIMITS).unwrap_err().to_string();
            assert!(error.contains("block_size") && error.contains(&block_size.to_string()), "{error}");
        }
        let max = usize::MAX;
        for (name, limits) in [
            ("tokens", BatchLimits { tokens: max, ..LIMITS }),
            ("seqs", BatchLimits { seqs: max, ..LIMITS }),
            ("blocks", BatchLimits { blocks: max, ..LIMITS }),
            ("rows", BatchLimits { rows: max, ..LIMITS }),
        ] {
            let error = Batch::new(16, &[GROUP], limits).unwrap_err().to_string();
            assert!(error.contains(&format!("limit {name}")) && error.contains(&max.to_string()), "{error}");
            assert_eq!(Batch::bytes(&limits, 1), max);
        }
        for (groups, expected) in [
            (vec![], "groups: expected 1 to 4, found 0"),
            (vec![GROUP; 5], "groups: expected 1 to 4, found 5"),
            (vec![GROUP, BlockGroup { window: Some(0), ..GROUP }], "groups[1].window: expected at least 1, found 0"),
            (vec![BlockGroup { blocks: 1 << 28, ..GROUP }], "groups[0].blocks: expected at most 268435455 of 16 tokens"),
        ] {
            let error = Batch::new(16, &groups, LIMITS).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(matches!(reserved::<u64>("a list", max), Err(ConfigError::Refused { what: "a list", needed_bytes: u64::MAX })));
    }

    #[test]
    fn it_takes_the_bytes_it_says() {
        for groups in 1..=MAX_GROUPS {
            let b = Batch::new(4, &vec![GROUP; groups], LIMITS).unwrap();
            let common = [&b.tokens, &b.positions, &b.q_indptr, &b.kv_lens, &b.totals, &b.rows].map(|v| v.capacity());
            let own = b.tables.iter().map(|t| t.slots.capacity() + t.indptr.capacity() + t.blocks.capacity()).sum::<usize>();
            assert_eq!(Batch::bytes(&LIMITS, groups), 4 * (common.iter().sum::<usize>() + own));
        }
    }

    #[test]
    fn bad_items_are_refused_and_leave_no_trace() {
        let mut b = Batch::new(4, &[GROUP], LIMITS).unwrap();
        b.push(item(&[1], 0, &[&[BlockId(3)]], RowsWanted::Last)).unwrap();
        let before = format!("{b:?}");
        let x: &[_] = &[BlockId(0), BlockId(8)];
        let good = BatchItem { tokens: &[1], start: 0, total: 1, tables: &[x], rows: RowsWanted::None };
        for (what, bad) in [
            ("tokens", BatchItem { tokens: &[], ..good }),
            ("start", BatchItem { start: usize::MAX, ..good }),
            ("start", BatchItem { start: usize::MAX - 1, ..good }),
            ("start", BatchItem { start: 1, ..good }),
            ("total", BatchItem { total: usize::MAX, ..good }),
            ("block tables", BatchItem { tables: &[], ..good }),
            ("block tables", BatchItem { tables: &[x, x], ..good }),
            ("blocks", BatchItem { start: 8, total: 9, ..good }),
            ("blocks", BatchItem { tables: &[&[]], ..good }),
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
