//! Layers with windows give blocks back: what lies behind a window is handed on, overwritten, and missing in the table, and no
//! logit changes a bit. Neither does one where blocks go to the host store and come back elsewhere, or move to another model.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::engines::open;
use common::golden::fixtures;
use loquat::backend::cpu::{Compute, Cpu, CpuOptions};
use loquat::batch::{Batch, BatchItem, BatchLimits, RowsWanted};
use loquat::model::{Logits, Model, ModelFiles, ModelLimits, Progress, Transformer, Want};
use loquat::weights::no_progress;
use loquat::{BlockCopy, BlockId, KvDType};

const BLOCK: usize = 16;
/// Of the sequences; all fixtures have a context of 256.
const LEN: usize = 250;
const BATCH: BatchLimits = BatchLimits { tokens: 2 * LEN, seqs: 2, blocks: 2 * LEN.div_ceil(BLOCK), rows: 2 * LEN };
const WAYS: [(Compute, KvDType); 3] =
    [(Compute::Exact, KvDType::F32), (Compute::Fast, KvDType::F16), (Compute::Fast, KvDType::BF16)];

struct Lane {
    model: Transformer<Cpu>,
    batch: Batch,
    logits: Logits,
    /// Blocks of each group that no sequence has: the one given back last is the next to be handed out.
    free: Vec<Vec<BlockId>>,
}

struct Seq {
    tokens: Vec<u32>,
    at: usize,
    tables: Vec<Vec<BlockId>>,
    /// Bits of the logits of each position.
    rows: Vec<Vec<u32>>,
}

impl Lane {
    fn new(files: &ModelFiles, way: (Compute, KvDType), blocks: impl Fn(Option<usize>) -> usize, swap: usize) -> Lane {
        let mut limits = ModelLimits::even(files.spec(), BATCH, 1, BLOCK, way.1);
        for (group, slots) in limits.groups.iter_mut().zip(&mut limits.swap) {
            (group.blocks, *slots) = (blocks(group.window), swap);
        }
        let cpu = Cpu::new(&CpuOptions { compute: way.0, ..CpuOptions::default() }).unwrap();
        let free = limits.groups.iter().map(|g| (0..g.blocks as u32).map(BlockId).collect()).collect();
        let batch = Batch::new(BLOCK, &limits.groups, BATCH).unwrap();
        let model = Transformer::load(cpu, files, limits, &mut no_progress).unwrap();
        let logits = Logits::with_capacity(BATCH.rows, files.spec(), WANT).unwrap();
        let mut lane = Lane { model, batch, logits, free };
        for group in 0..lane.free.len() {
            lane.free[group].clone().into_iter().for_each(|block| lane.poison(group, block));
        }
        lane
    }

    fn seq(&self, tokens: &[u32]) -> Seq {
        Seq { tokens: tokens.to_vec(), at: 0, tables: vec![Vec::new(); self.free.len()], rows: Vec::new() }
    }

    /// Every value of a block becomes a NaN.
    fn poison(&mut self, group: usize, block: BlockId) {
        let bytes = vec![0xff; BLOCK * self.model.token_bytes(group)];
        self.model.write_block(group, block, BLOCK, &bytes).unwrap();
    }

    /// Takes the blocks that lie wholly behind the windows; says how many.
    fn give_back(&mut self, seq: &mut Seq) -> usize {
        let mut given = 0;
        for (g, table) in seq.tables.iter_mut().enumerate() {
            let first = self.model.groups()[g].first_block(seq.at, BLOCK);
            for entry in table.iter_mut().take(first).filter(|b| **b != BlockId::NONE) {
                let block = std::mem::replace(entry, BlockId::NONE);
                let bytes = vec![0xff; BLOCK * self.model.token_bytes(g)];
                self.model.write_block(g, block, BLOCK, &bytes).unwrap();
                self.free[g].push(block);
                given += 1;
            }
        }
        given
    }

    /// Runs up to `len` tokens of each.
    fn step(&mut self, seqs: &mut [&mut Seq], len: usize) {
        self.batch.clear();
        for seq in seqs.iter_mut() {
            let end = seq.tokens.len().min(seq.at + len);
            for (table, free) in seq.tables.iter_mut().zip(&mut self.free) {
                while table.len() * BLOCK < end {
                    table.push(free.pop().expect("a pool as large as the windows need"));
                }
            }
            let tables: Vec<_> = seq.tables.iter().map(|t| &t[..]).collect();
            let (tokens, total) = (&seq.tokens[seq.at..end], seq.tokens.len());
            self.batch.push(BatchItem { tokens, start: seq.at, total, tables: &tables, rows: RowsWanted::All }).unwrap();
        }
        self.model.begin(&self.batch, WANT).unwrap();
        assert_eq!(self.model.advance(&mut || false, &mut self.logits), Ok(Progress::Done));
        let mut row = 0;
        for (seq, range) in seqs.iter_mut().zip(self.batch.q_indptr().windows(2)) {
            seq.at += (range[1] - range[0]) as usize;
            while seq.rows.len() < seq.at {
                seq.rows.push(self.logits.row(row).iter().map(|v| v.to_bits()).collect());
                row += 1;
            }
        }
        assert_eq!(row, self.logits.rows());
    }
}

const WANT: Want = Want { logits: true, hidden: false };

/// The models among the fixtures that have windows.
fn windowed() -> Vec<(String, ModelFiles)> {
    let mut list: Vec<_> = std::fs::read_dir(fixtures().join("arch")).unwrap().map(|e| e.unwrap().path()).collect();
    list.sort();
    let named = list.iter().map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), open(path)));
    let models: Vec<_> = named.filter(|(_, f)| f.spec().layers.iter().any(|l| l.attn.window.is_some())).collect();
    for name in ["gemma2", "gemma3_text", "gpt_oss", "mistral_swa"] {
        assert!(models.iter().any(|(n, _)| n == name), "{name} among the windowed");
    }
    models
}

fn prompt(files: &ModelFiles, seed: usize) -> Vec<u32> {
    (0..LEN).map(|i| ((i * 37 + i * i * 11 + seed * 101) % files.spec().vocab) as u32).collect()
}

/// With blocks for everything, in one step.
fn whole(files: &ModelFiles, way: (Compute, KvDType), tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut lane = Lane::new(files, way, |_| LEN.div_ceil(BLOCK), 0);
    let mut seq = lane.seq(tokens);
    lane.step(&mut [&mut seq], LEN);
    assert!(seq.rows.iter().flatten().all(|v| f32::from_bits(*v).is_finite()));
    seq.rows
}

/// The most blocks that one sequence holds of a group in steps of `len` tokens.
fn held(window: Option<usize>, len: usize) -> usize {
    window.map_or(LEN.div_ceil(BLOCK), |w| (w + len - 2).div_ceil(BLOCK) + 1).min(LEN.div_ceil(BLOCK))
}

#[test]
fn blocks_behind_a_window_are_handed_on() {
    for (name, files) in windowed() {
        for way in WAYS {
            let prompts = [prompt(&files, 1), prompt(&files, 2)];
            let want = prompts.each_ref().map(|p| whole(&files, way, p));
            for len in [1, 7, 48] {
                let mut lane = Lane::new(&files, way, |window| 2 * held(window, len), 0);
                let small = lane.model.groups().iter().filter(|g| g.window.is_some()).all(|g| g.blocks <= LEN.div_ceil(BLOCK));
                assert!(small, "{name}: {:?}", lane.model.groups());
                let [mut a, mut b] = prompts.each_ref().map(|p| lane.seq(p));
                let mut given = 0;
                // The second comes later, and takes over what the first no longer needs.
                while b.at < LEN {
                    given += lane.give_back(&mut a) + lane.give_back(&mut b);
                    match (a.at < LEN, a.at >= 30) {
                        (true, true) => lane.step(&mut [&mut a, &mut b], len),
                        (true, false) => lane.step(&mut [&mut a], len),
                        (false, _) => lane.step(&mut [&mut b], len),
                    }
                }
                let windows = lane.model.groups().iter().filter(|g| g.window.is_some()).count();
                assert!(given >= 18 * windows, "{name}, steps of {len}: {given} blocks given back");
                for (i, seq) in [a, b].iter().enumerate() {
                    for (p, (got, want)) in seq.rows.iter().zip(&want[i]).enumerate() {
                        assert!(got == want, "{name} {way:?}, steps of {len}: position {p} of sequence {i}");
                    }
                    assert_eq!(seq.rows.len(), LEN);
                }
            }
        }
    }
}

/// What the test above would see if a block were given back too early.
#[test]
fn a_block_within_the_window_counts() {
    for (name, files) in windowed() {
        let want = whole(&files, WAYS[0], &prompt(&files, 1));
        let mut lane = Lane::new(&files, WAYS[0], |_| LEN.div_ceil(BLOCK), 0);
        for g in 0..lane.free.len() {
            let mut seq = lane.seq(&prompt(&files, 1));
            lane.step(&mut [&mut seq], 200);
            let first = lane.model.groups()[g].first_block(200, BLOCK);
            lane.poison(g, seq.tables[g][first]);
            lane.step(&mut [&mut seq], 1);
            assert!(seq.rows[..200] == want[..200] && seq.rows[200] != want[200], "{name}, group {g}");
            for (free, table) in lane.free.iter_mut().zip(seq.tables) {
                free.extend(table);
            }
        }
    }
}

#[test]
fn what_was_in_the_host_store_goes_on_elsewhere() {
    for (name, files) in windowed() {
        for way in WAYS {
            let tokens = prompt(&files, 3);
            let want = whole(&files, way, &tokens);
            let mut lane = Lane::new(&files, way, |_| 2 * LEN.div_ceil(BLOCK), LEN.div_ceil(BLOCK));
            let mut seq = lane.seq(&tokens);
            let mut swapped = 0;
            while seq.at < LEN {
                lane.step(&mut [&mut seq], 23);
                lane.give_back(&mut seq);
                // Out, in an order of its own; poisoned; into blocks from the other end of the pool.
                let (mut out, mut back) = (Vec::new(), Vec::new());
                for (group, (table, free)) in seq.tables.iter_mut().zip(&mut lane.free).enumerate() {
                    for (i, entry) in table.iter_mut().enumerate().filter(|(_, b)| **b != BlockId::NONE) {
                        let (slot, to) = (BlockId((i * 7 % LEN.div_ceil(BLOCK)) as u32), free.remove(0));
                        out.push(BlockCopy { group, from: *entry, to: slot });
                        back.push(BlockCopy { group, from: slot, to });
                        free.push(*entry);
                        *entry = to;
                    }
                }
                lane.model.swap_out(&out).unwrap();
                out.iter().for_each(|copy| lane.poison(copy.group, copy.from));
                lane.model.swap_in(&back).unwrap();
                swapped += back.len();
            }
            assert!(swapped > 20 && seq.rows == want, "{name} {way:?}: {swapped} blocks swapped");
        }
    }
}

#[test]
fn blocks_move_to_another_model() {
    for (name, files) in windowed() {
        for way in WAYS {
            let tokens = prompt(&files, 4);
            let want = whole(&files, way, &tokens);
            let pool = |window| held(window, 39);
            let mut lane = Lane::new(&files, way, pool, 0);
            let mut seq = lane.seq(&tokens);
            while seq.at < LEN {
                lane.step(&mut [&mut seq], 39);
                lane.give_back(&mut seq);
                let mut other = Lane::new(&files, way, pool, 0);
                for (group, table) in seq.tables.iter_mut().enumerate() {
                    for (i, entry) in table.iter_mut().enumerate().filter(|(_, b)| **b != BlockId::NONE) {
                        // The last block is not full.
                        let n = BLOCK.min(seq.at - i * BLOCK);
                        let mut bytes = vec![0; n * lane.model.token_bytes(group)];
                        lane.model.read_block(group, *entry, n, &mut bytes).unwrap();
                        *entry = other.free[group].pop().unwrap();
                        other.model.write_block(group, *entry, n, &bytes).unwrap();
                    }
                }
                lane = other;
            }
            assert!(seq.rows == want, "{name} {way:?}");
        }
    }
}
