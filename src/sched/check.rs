//! The ledger's invariants, recounted from nothing. For tests: the cost is the size of everything.
#![forbid(unsafe_code)]

use super::ledger::Ledger;
use super::seq::State;
use super::step::Phase;
use std::collections::{HashMap, HashSet};

impl Ledger {
    /// Recounts everything.
    ///
    /// # Panics
    /// Where an invariant is broken: a bug of this crate.
    pub fn check(&self) {
        self.check_blocks();
        self.check_lists();
        self.check_step();
    }

    fn check_blocks(&self) {
        let bs = self.cfg.block_size;
        let [mut refs, mut active] = [(); 2].map(|()| vec![0; self.cfg.blocks]);
        // Block, index in the table and the block before: sharers of one share all before.
        let mut before = HashMap::new();
        for s in self.seqs.all() {
            let valid = s.computed.div_ceil(bs);
            assert!(s.computed <= s.tokens.len() && s.tokens.len() <= s.limit.max(s.turn), "{}: lengths", s.id);
            assert!(s.blocks.len() >= valid, "{}: {} blocks for {} cached tokens", s.id, s.blocks.len(), s.computed);
            assert!(s.active() || s.blocks.len() == valid, "{}: idle, with room to spare", s.id);
            if s.computed > 0 {
                assert_eq!(s.regime, (self.cfg.regime)(s.tokens.len()), "{}: regime", s.id);
            }
            if s.planned.is_none() && s.state != State::Held {
                assert!(s.left() > 0 || s.state == State::Running, "{}: waits for nothing", s.id);
            }
            let mut previous = None;
            for (k, &b) in s.blocks.iter().enumerate() {
                refs[b.index()] += 1;
                active[b.index()] += u32::from(s.active());
                assert!(k < valid || !self.kv.shared(b), "{}: {b:?} holds nothing and is shared", s.id);
                if k < valid && s.planned.is_none() {
                    assert_eq!(*before.entry(b).or_insert((k, previous)), (k, previous), "{}: before {b:?}", s.id);
                }
                previous = Some(b);
            }
        }
        // A copy's source is held until the step is over.
        for (from, _) in &self.step.copies {
            refs[from.index()] += 1;
            active[from.index()] += 1;
        }
        self.kv.check(&refs, &active);
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
        let listed: HashSet<_> = self.seqs.iter(&self.seqs.idle).map(|s| s.id).collect();
        assert_eq!(listed.len(), self.seqs.idle.len());
        for s in self.seqs.all() {
            let idle = !s.active() && !s.blocks.is_empty();
            assert_eq!(listed.contains(&s.id), idle, "{}: idle", s.id);
            assert_eq!(s.idle_listed(), idle, "{}: idle", s.id);
        }
        assert_eq!(self.seqs.live(), self.seqs.all().count());
        assert!(self.seqs.live() <= self.cfg.max_seqs);
    }

    fn check_step(&self) {
        let (step, bs) = (&self.step, self.cfg.block_size);
        assert!(step.plan.len() <= self.cfg.step_seqs, "sequences in the step");
        assert!(step.plan.iter().map(|p| p.len + p.draft).sum::<usize>() <= self.cfg.step_tokens, "tokens in the step");
        if step.phase == Phase::Closed {
            assert!(step.plan.is_empty() && step.copies.is_empty(), "a closed step with a plan");
        }
        let mut planned = 0;
        for (k, item) in step.plan.iter().enumerate() {
            let Some(s) = self.seqs.find(item.seq).map(|i| &self.seqs[i]).filter(|s| s.planned == Some(k as u32)) else {
                continue;
            };
            planned += 1;
            let end = item.start + item.len + item.draft;
            assert!(item.len > 0 && item.draft <= self.cfg.max_draft && item.start == s.computed, "{item:?}");
            assert!(item.start + item.len <= s.tokens.len() && s.blocks.len() * bs >= end, "{item:?}");
            assert_eq!(item.last, item.start + item.len == s.tokens.len(), "{item:?}");
            assert!(item.draft == 0 || s.tokens.len() + item.draft < s.limit, "{item:?}");
            for b in &s.blocks[item.start / bs..end.div_ceil(bs)] {
                assert!(!self.kv.shared(*b), "{item:?} writes {b:?}, which is shared or copied from");
            }
        }
        assert_eq!(planned, self.seqs.all().filter(|s| s.planned.is_some()).count(), "sequences that say they are planned");
        let (mut from, mut to) = (HashSet::new(), HashSet::new());
        for &(f, t) in &step.copies {
            from.insert(f);
            assert!(to.insert(t), "{t:?} is written by two copies");
        }
        assert!(from.is_disjoint(&to), "a block is both copied and written");
    }
}
