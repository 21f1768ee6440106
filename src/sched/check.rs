//! The ledger's invariants, recounted from nothing. For tests: the cost is the size of everything.
#![forbid(unsafe_code)]

use super::blocks::Hold;
use super::ledger::Ledger;
use super::seq::State;
use super::step::Phase;
use crate::cache::NodeId;
use crate::ids::BlockId;
use std::collections::{HashMap, HashSet};

impl Ledger {
    /// Recounts everything.
    ///
    /// # Panics
    /// Where an invariant is broken: a bug of this crate.
    pub fn check(&self) {
        self.check_seqs();
        self.check_blocks();
        self.check_lists();
        self.check_step();
        self.store.check(self.seqs.all(), &self.blocks);
    }

    fn check_seqs(&self) {
        let bs = self.cfg.block_size;
        for s in self.seqs.all() {
            assert!(s.computed <= s.tokens.len() && s.tokens.len() <= s.limit.max(s.turn), "{}: lengths", s.id);
            assert!(s.held.len() >= s.computed.div_ceil(bs), "{}: {} blocks, {} computed", s.id, s.held.len(), s.computed);
            assert!(s.active() || s.held.is_empty() && s.computed == 0, "{}: holds blocks and does not run", s.id);
            assert!(s.swap.tokens == 0 || s.state == State::Waiting, "{}: swapped out and does not wait", s.id);
            assert!(s.swap.tokens == 0 || s.swap.tokens < s.tokens.len(), "{}: swapped out with nothing to run", s.id);
            let parked = s.state == State::Waiting && s.planned.is_none() && s.swap.tokens == 0;
            assert!(!s.parked || parked, "{}: parked and does not wait", s.id);
            if s.computed > 0 && s.planned.is_none() {
                assert_eq!(s.regime, (self.cfg.regime)(s.tokens.len()), "{}: regime", s.id);
            }
            if s.planned.is_none() && s.state != State::Held {
                assert!(s.left() > 0 || s.state == State::Running, "{}: waits for nothing", s.id);
            }
            for (g, group) in self.cfg.groups.iter().enumerate() {
                let table = &s.held.tables[g];
                assert_eq!(table.len(), s.held.len(), "{}: tables differ in length", s.id);
                for (k, block) in table.iter().enumerate().skip(group.first_block(s.computed, bs)) {
                    assert_ne!(*block, BlockId::NONE, "{}: block {k} of group {g} is missing", s.id);
                }
            }
        }
    }

    fn check_blocks(&self) {
        let tree = &self.blocks.tree;
        tree.check();
        let groups = self.cfg.groups.len();
        let holds = || self.seqs.all().map(|s| &s.held).chain(self.pins.holds());
        let mut users: HashMap<NodeId, u32> = HashMap::new();
        for hold in holds() {
            self.check_path(hold);
            hold.nodes.iter().for_each(|&n| *users.entry(n).or_default() += 1);
        }
        for node in tree.nodes() {
            assert_eq!(tree.users(node), users.get(&node).copied().unwrap_or(0), "holders on {node:?}");
        }
        for g in 0..groups {
            let pool = &self.blocks.pools[g];
            let [mut refs, mut active] = [(); 2].map(|()| vec![0; pool.len()]);
            let mut hold_on = |block: BlockId, is_active: bool| {
                refs[block.index()] += 1;
                active[block.index()] += u32::from(is_active);
            };
            for hold in holds() {
                hold.tables[g].iter().filter(|b| **b != BlockId::NONE).for_each(|b| hold_on(*b, true));
            }
            // A copy's source is held until the step is over.
            let sources: HashSet<_> = self.step.copies.iter().filter(|c| c.group == g).map(|c| c.from).collect();
            self.step.copies.iter().filter(|c| c.group == g).for_each(|c| hold_on(c.from, true));
            let windowed = self.cfg.groups[g].window.is_some();
            for node in tree.nodes() {
                let block = tree.block(node, g);
                assert!(windowed || block.is_some(), "{node:?} has no block of group {g}");
                assert!(block.is_some() || !tree.listed(g, node), "{node:?}: listed in {g} without a block");
                if let Some(block) = block {
                    hold_on(block, false);
                    assert_eq!(pool.node(block), Some(node), "{block:?} of group {g}");
                    let listed = tree.listed(g, node) == (windowed && pool.idle(block));
                    assert!(listed || sources.contains(&block), "{node:?}: listed in group {g} or not");
                }
            }
            pool.check(&refs, &active);
            let pinned = self.pins.holds().map(|hold| hold.blocks(g)).sum::<usize>();
            assert_eq!(self.pins.blocks[g], pinned, "pinned blocks of group {g}");
        }
        let longest = self.blocks.longest(&self.pins.blocks);
        assert!(self.seqs.all().all(|s| s.limit <= longest), "a sequence could not run beside what is pinned");
    }

    /// A hold's nodes are a path, and where both have a block of it, it is the same.
    fn check_path(&self, hold: &Hold) {
        let tree = &self.blocks.tree;
        let mut parent = None;
        for (k, &node) in hold.nodes.iter().enumerate() {
            assert_eq!(tree.parent(node), parent, "{node:?} is not the next of its path");
            parent = Some(node);
            for g in 0..self.cfg.groups.len() {
                let block = hold.tables[g][k];
                assert!(block == BlockId::NONE || tree.block(node, g) == Some(block), "{node:?} has another block");
            }
        }
    }

    fn check_lists(&self) {
        for (list, state, name) in
            [(&self.seqs.waiting, State::Waiting, "waiting"), (&self.seqs.running, State::Running, "running")]
        {
            let listed: HashSet<_> = self.seqs.iter(list).map(|s| s.id).collect();
            let there: HashSet<_> = self.seqs.all().filter(|s| s.state == state).map(|s| s.id).collect();
            assert_eq!(listed, there, "{name}");
            assert_eq!(list.len(), there.len(), "{name}");
        }
        assert_eq!(self.seqs.live(), self.seqs.all().count());
        assert!(self.seqs.live() <= self.cfg.max_seqs);
    }

    fn check_step(&self) {
        let (step, bs) = (&self.step, self.cfg.block_size);
        assert!(step.plan.len() <= self.cfg.step_seqs, "sequences in the step");
        assert!(step.plan.iter().map(|p| p.len + p.draft).sum::<usize>() <= self.cfg.step_tokens, "tokens in the step");
        if step.phase == Phase::Closed {
            assert!(step.plan.is_empty() && step.copies.is_empty() && self.store.ins.is_empty(), "a closed step with a plan");
        }
        let mut planned = 0;
        for (k, item) in step.plan.iter().enumerate() {
            let Some(s) = self.seqs.find(item.seq).map(|i| &self.seqs[i]).filter(|s| s.planned == Some(k as u32)) else {
                continue;
            };
            planned += 1;
            let end = item.start + item.len + item.draft;
            assert!(item.len > 0 && item.draft <= self.cfg.max_draft && item.start == s.computed, "{item:?}");
            assert!(item.start + item.len <= s.tokens.len() && s.held.len() * bs >= end, "{item:?}");
            assert_eq!(item.last, item.start + item.len == s.tokens.len(), "{item:?}");
            assert!(item.draft == 0 || s.tokens.len() + item.draft < s.limit, "{item:?}");
            for g in 0..self.cfg.groups.len() {
                for b in &s.held.tables[g][item.start / bs..end.div_ceil(bs)] {
                    assert!(!self.blocks.pools[g].shared(*b), "{item:?} writes {b:?}, which is shared or copied from");
                }
            }
        }
        assert_eq!(planned, self.seqs.all().filter(|s| s.planned.is_some()).count(), "sequences that say they are planned");
        let (mut from, mut to) = (HashSet::new(), HashSet::new());
        for copy in step.copies.iter().chain(self.store.ins.iter()) {
            assert!(to.insert((copy.group, copy.to)), "{copy:?}: its block is written by two copies");
        }
        from.extend(step.copies.iter().map(|copy| (copy.group, copy.from)));
        assert!(from.is_disjoint(&to), "a block is both copied and written");
    }
}
