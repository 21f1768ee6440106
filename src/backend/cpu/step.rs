//! A batch's index arrays and a step's scratch, allocated once for the largest batch.
//!
//! Invariant: no array ever holds more than was reserved for it, so that a step allocates nothing.
#![forbid(unsafe_code)]

use super::arena::Aligned;
use super::attention::{AttnBatch, AttnScratch, Neighbours};
use super::moe::MoeScratch;
use super::simd::Tier;
use crate::backend::{KvShape, MoeShape};
use crate::batch::{Batch, BatchLimits};
use crate::error::RunError;
use crate::ids::{BlockId, TokenId};

/// See the module's documentation.
pub struct CpuStep {
    limits: BatchLimits,
    pub(super) tokens: Vec<TokenId>,
    pub(super) positions: Vec<u32>,
    pub(super) rows: Vec<u32>,
    q_indptr: Vec<u32>,
    kv_lens: Vec<u32>,
    /// One for each group of layers.
    tables: Vec<Tables>,
    /// Activations in a kernel's layout, a word a value at most.
    pub(super) words: Aligned<u32>,
    pub(super) attention: AttnScratch,
    pub(super) moe: MoeScratch,
}

/// Where a group's layers find a batch's tokens.
struct Tables {
    slots: Vec<u32>,
    indptr: Vec<u32>,
    blocks: Vec<BlockId>,
    neighbours: Neighbours,
}

impl CpuStep {
    /// Bytes that [`new`](Self::new) allocates.
    pub(super) fn bytes(
        limits: &BatchLimits,
        max_columns: usize,
        kv: &KvShape,
        moe: &MoeShape,
        threads: usize,
        tier: &Tier,
    ) -> u64 {
        // Four bytes in every array.
        let group = limits.tokens + limits.seqs + 1 + limits.blocks;
        let index = 2 * limits.tokens + limits.rows + 2 * limits.seqs + 1 + kv.blocks.len() * group;
        let words = (MoeScratch::pairs(limits.tokens, moe) as u64).saturating_mul(max_columns as u64);
        let neighbours = kv.blocks.len() * Neighbours::bytes(limits.seqs);
        let bytes = words.saturating_add(index as u64).saturating_mul(4).saturating_add(neighbours as u64);
        let attention = AttnScratch::bytes(limits, kv, threads, tier) as u64;
        bytes.saturating_add(attention).saturating_add(MoeScratch::bytes(limits.tokens, moe))
    }

    pub(super) fn new(
        limits: &BatchLimits,
        max_columns: usize,
        kv: &KvShape,
        moe: &MoeShape,
        threads: usize,
        tier: &Tier,
    ) -> Result<Self, RunError> {
        let tables = || -> Result<Tables, RunError> {
            let (slots, indptr) = (reserved(limits.tokens)?, reserved(limits.seqs + 1)?);
            Ok(Tables { slots, indptr, blocks: reserved(limits.blocks)?, neighbours: Neighbours::new(limits.seqs)? })
        };
        Ok(CpuStep {
            limits: *limits,
            tokens: reserved(limits.tokens)?,
            positions: reserved(limits.tokens)?,
            rows: reserved(limits.rows)?,
            q_indptr: reserved(limits.seqs + 1)?,
            kv_lens: reserved(limits.seqs)?,
            tables: kv.blocks.iter().map(|_| tables()).collect::<Result<_, _>>()?,
            words: Aligned::zeroed(MoeScratch::pairs(limits.tokens, moe).saturating_mul(max_columns))?,
            attention: AttnScratch::new(limits, kv, threads, tier)?,
            moe: MoeScratch::new(limits.tokens, moe)?,
        })
    }

    /// Takes a batch over. On an error the arrays are as they were.
    pub(super) fn begin(&mut self, batch: &Batch) -> Result<(), RunError> {
        let fits = |what, found: usize, limit: usize| match found <= limit {
            true => Ok(()),
            false => Err(RunError::BatchTooLarge { what, found, limit }),
        };
        fits("tokens", batch.tokens().len(), self.limits.tokens)?;
        fits("sequences", batch.seqs(), self.limits.seqs)?;
        fits("block table entries", batch.blocks(0).len(), self.limits.blocks)?;
        fits("rows", batch.rows().len(), self.limits.rows)?;
        if batch.groups().len() != self.tables.len() {
            return Err(RunError::bad_batch("groups", self.tables.len(), batch.groups().len()));
        }
        refill(&mut self.tokens, batch.tokens());
        refill(&mut self.positions, batch.positions());
        refill(&mut self.rows, batch.rows());
        refill(&mut self.q_indptr, batch.q_indptr());
        refill(&mut self.kv_lens, batch.kv_lens());
        for (g, group) in self.tables.iter_mut().enumerate() {
            refill(&mut group.slots, batch.slots(g));
            refill(&mut group.indptr, batch.block_indptr(g));
            refill(&mut group.blocks, batch.blocks(g));
            group.neighbours.fill(&group.indptr, &group.blocks);
        }
        Ok(())
    }

    /// Where the step's keys and values go in a group's layers.
    pub(super) fn slots(&self, group: usize) -> &[u32] {
        &self.tables[group].slots
    }

    /// What attention of a group's layers reads, and what it writes to.
    pub(super) fn attention(&mut self, group: usize) -> (AttnBatch<'_>, &mut AttnScratch) {
        let Tables { indptr, blocks, neighbours, .. } = &self.tables[group];
        let (order, common) = (neighbours.order(), neighbours.common());
        let (q_indptr, kv_lens) = (&self.q_indptr[..], &self.kv_lens[..]);
        (AttnBatch { q_indptr, kv_lens, block_indptr: indptr, blocks, order, common }, &mut self.attention)
    }
}

fn refill<T: Copy>(to: &mut Vec<T>, from: &[T]) {
    to.clear();
    to.extend_from_slice(from);
}

fn reserved<T>(n: usize) -> Result<Vec<T>, RunError> {
    let mut v = Vec::new();
    v.try_reserve_exact(n).map_err(|e| RunError::Device { device: "cpu".into(), message: e.to_string() })?;
    Ok(v)
}
