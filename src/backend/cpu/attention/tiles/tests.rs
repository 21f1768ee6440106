use super::*;

/// A batch's arrays: sequences with so many tokens, so much of a cache, and these tables of blocks of 16.
struct Arrays {
    q_indptr: Vec<u32>,
    kv_lens: Vec<u32>,
    block_indptr: Vec<u32>,
    blocks: Vec<BlockId>,
    neighbours: Neighbours,
}

impl Arrays {
    fn new(seqs: &[(u32, u32, Vec<u32>)]) -> Arrays {
        let mut a = Arrays {
            q_indptr: vec![0],
            kv_lens: Vec::new(),
            block_indptr: vec![0],
            blocks: Vec::new(),
            neighbours: Neighbours::new(seqs.len()).unwrap(),
        };
        for (tokens, len, table) in seqs {
            assert!(table.len() * 16 >= *len as usize && tokens <= len);
            a.q_indptr.push(a.q_indptr.last().unwrap() + tokens);
            a.kv_lens.push(*len);
            a.blocks.extend(table.iter().map(|b| BlockId(*b)));
            a.block_indptr.push(a.blocks.len() as u32);
        }
        a.neighbours.fill(&a.block_indptr, &a.blocks);
        a
    }

    fn tiling(&self, window: Option<usize>) -> Tiling<'_> {
        let batch = AttnBatch {
            q_indptr: &self.q_indptr,
            kv_lens: &self.kv_lens,
            block_indptr: &self.block_indptr,
            blocks: &self.blocks,
            order: self.neighbours.order(),
            common: self.neighbours.common(),
        };
        Tiling { batch, group: 3, kv_heads: 2, window, block_size: 16, kernel_rows: 6, most: 48, width: 128 }
    }

    fn tiles(&self, window: Option<usize>, threads: usize) -> (Vec<Tile>, Vec<Tile>) {
        // What the scratch has.
        let tiles = *self.q_indptr.last().unwrap() as usize + 2 * self.kv_lens.len();
        let (mut whole, mut split) = (Vec::with_capacity(tiles), Vec::with_capacity(SHARES * threads));
        self.tiling(window).list(threads, &mut whole, &mut split);
        (whole, split)
    }
}

/// Blocks `0..shared` of a prompt, then some of the sequence's own.
fn table(prompt: u32, shared: u32, own: u32, blocks: u32) -> Vec<u32> {
    (0..shared).map(|b| prompt + b).chain((shared..blocks).map(|b| own + b)).collect()
}

#[test]
fn tables_that_begin_alike_are_neighbours() {
    let a = Arrays::new(&[
        (1, 48, vec![7, 8, 9]),
        (1, 48, vec![1, 2, 3]),
        (1, 32, vec![7, 8]),
        (1, 48, vec![1, 2, 4]),
        (1, 48, vec![7, 5, 9]),
        (1, 16, vec![1]),
    ]);
    assert_eq!(a.neighbours.order(), [5, 1, 3, 4, 2, 0]);
    assert_eq!(a.neighbours.common(), [0, 1, 2, 0, 1, 2]);
    let mut n = Neighbours::new(0).unwrap();
    n.fill(&[0], &[]);
    assert!(n.order().is_empty() && n.common().is_empty());
}

#[test]
fn sequences_of_one_prompt_go_together_as_far_as_it_goes() {
    // 38 blocks are 608 tokens: two pieces and 96 tokens of the third.
    let a = Arrays::new(&(0..8).map(|i| (1, 700 + i, table(100, 38, 1000 * (i + 1), 45))).collect::<Vec<_>>());
    let (whole, _) = a.tiles(None, 1);
    assert_eq!(whole.len(), 2, "one for each kv head");
    let tiling = a.tiling(None);
    for tile in &whole {
        assert_eq!((tile.rows, tile.seqs, tile.first_piece, tile.pieces), (24, 8, 0, 3));
        for (piece, shared) in [(0, 256), (1, 256), (2, 96)] {
            let runs: Vec<_> = tiling.runs(tile, piece).map(|r| (r.at, r.rows, r.spans, r.shared)).collect();
            assert_eq!(runs, [(0, 24, 8, shared)], "piece {piece}");
        }
    }
}

#[test]
fn branches_of_a_tree_part_where_they_do() {
    // Two prompts of 16 blocks under one of 16, and a sequence that has nothing to do with them.
    let twigs = |own| [table(100, 16, 200, 32), table(0, 0, own, 16)].concat();
    let others = |own| [table(100, 16, 300, 32), table(0, 0, own, 16)].concat();
    let a = Arrays::new(&[
        (1, 700, twigs(400)),
        (1, 700, others(500)),
        (1, 700, table(0, 0, 600, 48)),
        (1, 700, twigs(700)),
        (1, 700, others(800)),
    ]);
    let (whole, _) = a.tiles(None, 1);
    let tiling = a.tiling(None);
    let mut seen = Vec::new();
    for tile in whole.iter().filter(|t| t.kv_head == 0) {
        for piece in 0..3 {
            seen.extend(tiling.runs(tile, piece).map(|r| (tile.seqs, piece, r.rows, r.shared)));
        }
    }
    let four = [(4, 0, 12, 256), (4, 1, 6, 256), (4, 1, 6, 256)].into_iter().chain([(4, 2, 3, 256); 4]);
    assert_eq!(seen, four.chain((0..3).map(|piece| (1, piece, 3, 256))).collect::<Vec<_>>());
}

#[test]
fn what_lies_behind_a_window_binds_nobody() {
    // 300 tokens of a window hold nothing of the prompt's first 600.
    let a = Arrays::new(&(0..4).map(|i| (1, 1000, table(100, 38, 1000 * (i + 1), 63))).collect::<Vec<_>>());
    let (whole, _) = a.tiles(Some(300), 1);
    assert_eq!(whole.len(), 8);
    assert!(whole.iter().all(|t| (t.seqs, t.first_piece, t.pieces) == (1, 2, 2)));
    // 500 hold 108 of them.
    let (whole, _) = a.tiles(Some(500), 1);
    assert!(whole.len() == 2 && whole.iter().all(|t| (t.seqs, t.first_piece, t.pieces) == (4, 1, 3)));
}

#[test]
fn every_row_is_in_one_tile() {
    let seqs: Vec<_> = (0..20u32)
        .map(|i| {
            let (tokens, len) = ([1, 5, 16, 17, 200][i as usize % 5], 900 + i);
            (tokens, len, table(100 * (i % 3), 20 + i, 1000 * (i + 1), 60))
        })
        .collect();
    let a = Arrays::new(&seqs);
    for (threads, window) in [(1, None), (2, None), (16, None), (1, Some(100)), (5, Some(100))] {
        let (whole, split) = a.tiles(window, threads);
        let tiling = a.tiling(window);
        let mut found = std::collections::BTreeMap::new();
        for tile in whole.iter().chain(&split) {
            assert!(tile.rows as usize <= 48);
            let mut rows = vec![Row::default(); tile.rows as usize];
            tiling.rows(tile, &mut rows);
            for row in rows {
                assert!(found.insert((row.token, row.head), (row.first, row.end)).is_none(), "{threads} {window:?}");
                assert!(row.first / 256 >= tile.first_piece && row.end.div_ceil(256) <= tile.first_piece + tile.pieces);
            }
        }
        let mut token = 0;
        for (tokens, len, _) in &seqs {
            for end in len - tokens + 1..=*len {
                for head in 0..6 {
                    let first = window.map_or(0, |w| end.saturating_sub(w as u32));
                    assert_eq!(found.remove(&(token, head)), Some((first, end)));
                }
                token += 1;
            }
        }
        assert!(found.is_empty());
        let costs: Vec<_> = whole.iter().map(|t| tiling.cost(t)).collect();
        assert!(threads == 1 || costs.is_sorted_by(|a, b| a >= b), "the longest first");
        assert_eq!(split.iter().map(|t| t.before).collect::<Vec<_>>(), {
            let mut sum = 0;
            split.iter().map(|t| (sum, sum += t.pieces as usize).0).collect::<Vec<_>>()
        });
    }
}
