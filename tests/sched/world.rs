//! One seeded world: the ledger, a fake cache that holds for each slot what was written there, and what the test knows of every
//! sequence. All of it is compared after every act.

use crate::{Nonsense, Policy, Random};
use loquat::sched::*;
use loquat::{BlockCopy, BlockGroup, SeqId, SubmitError, TokenId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

/// SplitMix64.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub(crate) fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub(crate) fn percent(&mut self, p: usize) -> bool {
        self.below(100) < p
    }
}

pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// What a slot must hold: the tokens up to it, and the key and the regime they ran in.
fn contents(tokens: impl Iterator<Item = TokenId>, key: u64, regime: u32) -> impl Iterator<Item = u64> {
    tokens.scan(u64::from(regime) ^ (key << 40), |h, t| {
        *h = mix(*h ^ (u64::from(t) << 32) ^ 0x5EED);
        Some(*h)
    })
}

#[derive(Clone, Copy, Debug)]
enum Rope {
    Plain,
    /// A regime a token past so many.
    Dynamic(usize),
    /// A second one past so many.
    Long(usize),
}

impl Rope {
    fn regime(self, total: usize) -> u32 {
        match self {
            Rope::Dynamic(n) if total > n => total as u32,
            Rope::Long(n) if total > n => 1,
            _ => 0,
        }
    }
}

pub(crate) struct World {
    seed: u64,
    rng: Rng,
    pub(crate) ledger: Ledger,
    rope: Rope,
    policy: Policy,
    good: ContinuousBatching,
    /// What each slot of the cache holds, by group.
    slots: Vec<Vec<u64>>,
    /// The same of the host store.
    store: Vec<Vec<u64>>,
    /// What the test knows of each living sequence.
    live: BTreeMap<SeqId, Vec<TokenId>>,
    keys: HashMap<SeqId, u64>,
    /// Pinned prefixes, and the lengths they were pinned for.
    pins: Vec<(PinId, u64, Vec<TokenId>, usize)>,
    pub(crate) ended: HashMap<SeqId, &'static str>,
    ids: Vec<SeqId>,
    now: Duration,
    /// Times that a sequence came to need one more block or passed into another regime, and forks.
    growth: usize,
    /// Preemptions of a sequence so far, and the growth there was at the last.
    pub(crate) preempted: HashMap<SeqId, (u32, usize)>,
    steps: usize,
}

impl World {
    pub(crate) fn new(seed: u64, policy: Policy) -> Self {
        let mut rng = Rng(mix(seed ^ policy as u64));
        let (blocks, block_size) = (rng.within(1, 20), rng.within(1, 5));
        let pool = blocks * block_size;
        let rope = match rng.below(4) {
            0 => Rope::Dynamic(rng.within(1, pool)),
            1 => Rope::Long(rng.within(1, pool)),
            _ => Rope::Plain,
        };
        // Usually one group that sees everything, sometimes windows alone, sometimes both.
        let mut groups = vec![BlockGroup { blocks, window: rng.percent(15).then(|| rng.within(1, pool + 2)) }];
        while groups.len() < 4 && rng.percent(40) {
            let most = groups[groups.len() - 1].window.unwrap_or(pool + 2) - 1;
            if most == 0 {
                break;
            }
            groups.push(BlockGroup { blocks, window: Some(rng.within(1, most)) });
        }
        let mut cfg = LedgerConfig::new(blocks, block_size, rng.within(2, pool + 8));
        if rng.percent(50) {
            cfg.swap = groups.iter().map(|_| rng.below(12)).collect();
        }
        let store = groups.iter().enumerate().map(|(g, _)| vec![0; cfg.swap.get(g).unwrap_or(&0) * block_size]).collect();
        let slots = vec![vec![0; pool]; groups.len()];
        cfg.groups = groups;
        cfg.max_seqs = rng.within(1, 20);
        cfg.step_seqs = rng.within(1, 9);
        cfg.step_tokens = rng.within(1, 24);
        cfg.max_draft = rng.below(4);
        cfg.regime = Box::new(move |total| rope.regime(total));
        let mut good = ContinuousBatching::default();
        good.max_chunk = rng.within(1, 12);
        good.draft = rng.below(5);
        good.ageing = Duration::from_millis(rng.below(50) as u64);
        World {
            seed,
            slots,
            store,
            keys: HashMap::new(),
            pins: Vec::new(),
            ledger: Ledger::new(cfg).unwrap(),
            rope,
            policy,
            good,
            rng,
            live: BTreeMap::new(),
            ended: HashMap::new(),
            ids: Vec::new(),
            now: Duration::ZERO,
            growth: 0,
            preempted: HashMap::new(),
            steps: 0,
        }
    }

    fn tokens(&mut self, n: usize) -> Vec<TokenId> {
        // Few different ones, so that prefixes coincide.
        (0..n).map(|_| self.rng.below(3) as TokenId).collect()
    }

    fn check(&self) {
        self.ledger.check();
        let there: BTreeMap<_, _> = self.ledger.all().map(|s| (s.id(), s.tokens().to_vec())).collect();
        assert_eq!(there, self.live);
        assert!(self.ended.keys().all(|id| self.ledger.view(*id).is_none()));
    }

    fn born(&mut self, id: SeqId, key: u64, tokens: Vec<TokenId>) {
        assert!(!self.ids.contains(&id), "{id} is given out twice");
        self.ids.push(id);
        self.keys.insert(id, key);
        self.live.insert(id, tokens);
    }

    fn grew(&mut self, id: SeqId, by: usize) {
        let (now, bs) = (self.live[&id].len(), self.ledger.config().block_size);
        let before = now - by;
        let blocks = (now + 1).div_ceil(bs) > (before + 1).div_ceil(bs);
        self.growth += usize::from(blocks || self.rope.regime(now) != self.rope.regime(before));
    }

    fn end(&mut self, id: SeqId, how: &'static str) {
        self.live.remove(&id).expect("it lived");
        assert_eq!(self.ended.insert(id, how), None, "{id} ends twice");
    }

    fn some_id(&mut self) -> Option<SeqId> {
        (!self.ids.is_empty()).then(|| self.ids[self.rng.below(self.ids.len())])
    }

    fn submit(&mut self) {
        let (n, max_tokens) = (self.rng.below(24), self.rng.below(16));
        let tokens = self.tokens(n);
        let (priority, hold) = (self.rng.within(0, 4) as i32 - 2, self.rng.percent(40));
        let key = u64::from(self.rng.percent(10));
        let new = NewSeq { tokens: tokens.clone(), max_tokens, priority, hold, deadline: None, key, reuse: None };
        let fits = n + max_tokens <= self.ledger.max_len();
        match self.ledger.submit(new, self.now) {
            Ok(id) => {
                assert!(fits && n > 0 && max_tokens > 0);
                self.born(id, key, tokens);
            }
            Err(SubmitError::EmptyPrompt) => assert_eq!(n, 0),
            Err(SubmitError::NoTokens) => assert_eq!(max_tokens, 0),
            Err(SubmitError::TooLong { tokens, limit, .. }) => assert!(!fits && tokens > limit),
            Err(SubmitError::QueueFull { limit }) => assert_eq!(self.live.len(), limit),
            Err(e) => panic!("{e}"),
        }
    }

    /// One random call of the host. Those in the wrong state must be refused and change nothing: `check` compares.
    fn act(&mut self) {
        let kind = self.rng.below(17);
        match kind {
            0..6 => return self.submit(),
            14 => return self.pin(),
            15 => return self.import(),
            _ => {}
        }
        let Some(id) = self.some_id() else { return };
        let (now, len) = (self.now, self.rng.below(20));
        let state = self.ledger.view(id).map(|s| s.state());
        let planned = self.ledger.plan_items().iter().any(|p| p.seq == id);
        match kind {
            6 | 7 => {
                let more = self.tokens(len / 3);
                if self.ledger.resume(id, &more, len, now).is_ok() {
                    assert_eq!(state, Some(SeqState::Held));
                    self.live.get_mut(&id).unwrap().extend(more);
                }
            }
            8 => {
                if self.ledger.truncate(id, len).is_ok() {
                    assert_eq!(state, Some(SeqState::Held));
                    self.live.get_mut(&id).unwrap().truncate(len);
                }
            }
            9..12 => {
                if let Ok(child) = self.ledger.fork(id, now) {
                    assert!(matches!(state, Some(SeqState::Held | SeqState::Running)));
                    assert_eq!(self.ledger.view(child).map(|s| s.state()), state);
                    let tokens = self.live[&id].clone();
                    self.born(child, self.keys[&id], tokens);
                    self.growth += 1;
                }
            }
            16 => self.export(id),
            12 => {
                if self.ledger.release(id).is_ok() {
                    assert_eq!(state, Some(SeqState::Held));
                    self.end(id, "released");
                }
            }
            _ => match self.ledger.cancel(id) {
                Ok(()) => self.end(id, "cancelled"),
                Err(_) => assert_eq!(state, None),
            },
        }
        // Whatever runs, or has ended, takes no token out of turn.
        if planned || state.is_none() {
            assert!(self.ledger.append(id, 0).is_err() && self.ledger.finish(id).is_err());
        }
    }

    /// Lets the policy fill a step; false where the builder was dropped.
    fn plan(&mut self, policy: Policy, keep: bool) -> StepInfo {
        let mut step = self.ledger.begin_step(self.now).unwrap();
        let seed = Rng(mix(self.seed ^ self.steps as u64));
        match policy {
            Policy::Continuous => self.good.schedule(&mut step),
            Policy::Random => Random(seed).schedule(&mut step),
            Policy::Nonsense if self.ids.is_empty() => {}
            Policy::Nonsense => Nonsense(seed, self.ids.clone()).schedule(&mut step),
        }
        let info = if keep {
            step.finish()
        } else {
            drop(step);
            StepInfo::default()
        };
        // Preemptions stand, whatever becomes of the plan.
        if !self.swap_out(policy) {
            return StepInfo::default();
        }
        assert_eq!(self.ledger.step_is_open(), info.items > 0);
        info
    }

    /// Pins what is cached of some sequence's tokens, or lets a pin go.
    fn pin(&mut self) {
        if self.rng.percent(50) {
            if self.pins.is_empty() {
                return;
            }
            let at = self.rng.below(self.pins.len());
            let (pin, ..) = self.pins.swap_remove(at);
            self.ledger.unpin(pin).unwrap();
            assert!(self.ledger.unpin(pin).is_err(), "a second time");
            return;
        }
        let Some(id) = self.some_id() else { return };
        let Some(tokens) = self.live.get(&id).cloned() else { return };
        let key = self.keys[&id];
        if let Ok((pin, len)) = self.ledger.pin(key, &tokens, tokens.len()) {
            assert!(len > 0 && len <= tokens.len() && len % self.ledger.config().block_size == 0);
            self.growth += 1;
            self.pins.push((pin, key, tokens[..len].to_vec(), tokens.len()));
        }
    }

    /// What is pinned is found, whatever has happened.
    fn check_pins(&self) {
        for (_, key, tokens, total) in &self.pins {
            // A prefix is looked up in the regime of its own length.
            if self.rope.regime(*total) == self.rope.regime(tokens.len()) {
                let (found, _) = self.ledger.cached_blocks(*key, tokens, 0);
                assert_eq!(found, tokens.len(), "pinned tokens that are left");
            }
        }
    }

    /// Reads what is cached of a sequence.
    fn export(&mut self, id: SeqId) {
        let Some(known) = self.live.get(&id) else { return };
        let (key, bs, group) = (self.keys[&id], self.ledger.config().block_size, self.ledger.config().groups[0]);
        let all: Vec<_> = contents(known.iter().copied(), key, self.rope.regime(known.len())).collect();
        let back = self.rng.below(40);
        for back in [0, back] {
            let (tokens, blocks) = self.ledger.cached_blocks(key, known, back);
            for b in &blocks {
                let from = b.index * bs;
                assert_eq!(self.slots[b.group][b.block.index() * bs..][..b.tokens], all[from..from + b.tokens], "{b:?} of {id}");
            }
            let seen = blocks.iter().filter(|b| b.group == 0).count();
            let needed = tokens.div_ceil(bs) - group.first_block(tokens, bs);
            assert!(seen >= needed && (back > 0 || seen == needed), "{seen} blocks of {needed}, {back} tokens back");
            if self.ledger.view(id).is_some_and(|v| v.state() == SeqState::Held && !v.swapped()) {
                assert_eq!(tokens, self.ledger.cached_prefix(id), "{id}");
            }
        }
    }

    /// Brings a prefix in from elsewhere, and sometimes breaks off.
    fn import(&mut self) {
        let (n, total, key) = (self.rng.below(30), self.rng.below(6), u64::from(self.rng.percent(10)));
        let tokens = self.tokens(n + total);
        let regime = self.rope.regime(tokens.len());
        let all: Vec<_> = contents(tokens.iter().copied(), key, regime).collect();
        let (bs, fails) = (self.ledger.config().block_size, self.rng.percent(20));
        // What lies before the windows may come along.
        let from: Vec<_> = self.groups().map(|_| self.rng.below(n + 1)).collect();
        let (slots, rng) = (&mut self.slots, &mut self.rng);
        let open = self.ledger.step_is_open();
        let done = self.ledger.import(key, &tokens, n, &from, |blocks| {
            for b in blocks {
                let slots = &mut slots[b.group][b.block.index() * bs..(b.block.index() + 1) * bs];
                slots.iter_mut().for_each(|s| *s = rng.next());
                slots[..b.tokens].copy_from_slice(&all[b.index * bs..][..b.tokens]);
            }
            if fails { Err(SubmitError::NoTokens) } else { Ok(()) }
        });
        assert!(!matches!(done, Err(SubmitError::NoTokens)) || fails);
        assert_eq!(open, matches!(done, Err(SubmitError::Parameter { name: "import", .. })), "{done:?}");
        self.growth += 1;
    }

    fn swap_out(&mut self, policy: Policy) -> bool {
        if policy != Policy::Continuous && self.rng.percent(5) {
            self.ledger.swap_failed();
            return false;
        }
        let bs = self.ledger.config().block_size;
        for &BlockCopy { group, from, to } in self.ledger.swap_outs() {
            let values = self.slots[group][from.index() * bs..][..bs].to_vec();
            self.store[group][to.index() * bs..][..bs].copy_from_slice(&values);
        }
        true
    }

    fn copy_blocks(&mut self) {
        // All reads before all writes, as a device might.
        let bs = self.ledger.config().block_size;
        let read = |slots: &[Vec<u64>], c: &BlockCopy| (*c, slots[c.group][c.from.index() * bs..][..bs].to_vec());
        let copies = self.ledger.copies().iter().map(|c| read(&self.slots, c));
        let all: Vec<_> = copies.chain(self.ledger.swap_ins().iter().map(|c| read(&self.store, c))).collect();
        for (copy, values) in all {
            self.slots[copy.group][copy.to.index() * bs..][..bs].copy_from_slice(&values);
        }
    }

    fn groups(&self) -> std::ops::Range<usize> {
        0..self.ledger.config().groups.len()
    }

    /// The slot of a sequence's position.
    fn slot(&self, seq: SeqId, group: usize, position: usize) -> usize {
        let bs = self.ledger.config().block_size;
        self.ledger.view(seq).unwrap().block_table(group)[position / bs].index() * bs + position % bs
    }

    /// A forward pass that fails in the middle, and leaves rubbish.
    fn broken_forward(&mut self) {
        if self.rng.percent(70) {
            self.copy_blocks();
        }
        for item in self.ledger.plan_items().to_vec() {
            for g in self.groups() {
                for p in item.start..item.start + item.len + item.draft {
                    if self.rng.percent(60) {
                        let slot = self.slot(item.seq, g, p);
                        self.slots[g][slot] = self.rng.next();
                    }
                }
            }
        }
    }

    /// Writes what each item runs, then reads back everything that attention would read.
    fn forward(&mut self, guesses: &HashMap<SeqId, Vec<TokenId>>) {
        self.copy_blocks();
        let mut written = HashSet::new();
        for read in [false, true] {
            for item in self.ledger.plan_items() {
                let seq = self.ledger.view(item.seq).expect("nobody cancelled it yet");
                let (total, guesses) = (seq.total(), &guesses[&item.seq]);
                let regime = self.rope.regime(total);
                assert_eq!(regime, self.rope.regime(total + item.draft), "a guess in another regime");
                let all = seq.tokens()[..item.start + item.len].iter().chain(guesses).copied();
                for (p, value) in contents(all, self.keys[&item.seq], regime).enumerate() {
                    for (g, group) in self.ledger.config().groups.iter().enumerate() {
                        let seen = group.window.is_none_or(|w| p + w > item.start);
                        if read && seen {
                            let slot = self.slot(item.seq, g, p);
                            assert_eq!(self.slots[g][slot], value, "{} at {p} of {item:?}, group {g}", item.seq);
                        } else if !read && p >= item.start {
                            let slot = self.slot(item.seq, g, p);
                            assert!(written.insert((g, slot)), "slot {slot} of group {g} is written twice");
                            self.slots[g][slot] = value;
                        }
                    }
                }
            }
        }
    }

    fn commit(&mut self, items: &[PlanItem], guesses: &HashMap<SeqId, Vec<TokenId>>, all: bool) {
        for item in items {
            if !self.live.contains_key(&item.seq) {
                assert!(self.ledger.commit(item.seq, &[]).is_err(), "cancelled");
                continue;
            }
            if !all && self.rng.percent(5) {
                continue;
            }
            assert!(self.ledger.commit(item.seq, &vec![0; item.draft + 1]).is_err(), "more than planned");
            let accepted = &guesses[&item.seq][..self.rng.within(0, item.draft)];
            self.ledger.commit(item.seq, accepted).unwrap();
            self.live.get_mut(&item.seq).unwrap().extend(accepted);
            self.grew(item.seq, accepted.len());
            assert!(self.ledger.commit(item.seq, &[]).is_err(), "a second time");
            if self.rng.percent(3) {
                let _ = self.ledger.fork(item.seq, self.now).map(|child| {
                    let tokens = self.live[&item.seq].clone();
                    self.born(child, self.keys[&item.seq], tokens);
                    self.growth += 1;
                    self.sampled(child);
                });
            }
            if item.last {
                self.sampled(item.seq);
            } else {
                assert!(self.ledger.append(item.seq, 0).is_err(), "tokens are left to run");
            }
        }
    }

    /// A token is sampled from a sequence whose tokens have all run; sometimes that ends it.
    fn sampled(&mut self, id: SeqId) {
        let seq = self.ledger.view(id).unwrap();
        if seq.left() == 0 && seq.remaining() > 0 {
            let token = self.rng.below(3) as TokenId;
            self.ledger.append(id, token).unwrap();
            self.live.get_mut(&id).unwrap().push(token);
            self.grew(id, 1);
        }
        if self.ledger.view(id).unwrap().remaining() == 0 || self.rng.percent(4) {
            assert!(self.ledger.append(id, 0).is_err(), "it is full, or has a token to run");
            if !self.ledger.finish(id).unwrap() {
                self.end(id, "finished");
            }
        }
    }

    fn step(&mut self, policy: Policy, calm: bool) {
        self.steps += 1;
        self.now += Duration::from_millis(self.rng.below(5) as u64);
        let work = self.ledger.counts().waiting + self.ledger.counts().running > 0;
        let dropped = !calm && self.rng.percent(5);
        let mut info = self.plan(policy, !dropped);
        self.check();
        if policy == Policy::Continuous {
            assert!(dropped || !work || info.items > 0, "work waits and nothing runs");
            self.count_preemptions();
            self.check_admissions();
        }
        if info.items > 0 {
            assert!(self.ledger.begin_step(self.now).is_err(), "a second step");
        }
        while info.items > 0 && !calm && self.rng.percent(10) {
            let plan = self.ledger.plan_items().to_vec();
            self.broken_forward();
            if self.rng.percent(50) {
                continue; // The same step once more.
            }
            self.ledger.abort_step();
            self.check();
            let preempted = info.preempted;
            info = self.plan(policy, true);
            self.check();
            if policy == Policy::Continuous && preempted == 0 {
                let first = |plan: &[PlanItem]| plan.first().map(|p| p.seq);
                assert_eq!(first(self.ledger.plan_items()), first(&plan), "the plan after a failed step");
            }
        }
        let items = self.ledger.plan_items().to_vec();
        let guesses: HashMap<_, _> = items.iter().map(|p| (p.seq, self.tokens(p.draft))).collect();
        self.forward(&guesses);
        while !calm && self.rng.percent(15) {
            self.act();
            self.check();
        }
        self.commit(&items, &guesses, calm);
        self.check();
        self.ledger.end_step();
        self.check();
    }

    /// Nobody is admitted beside others unless all of them have room for what is known of them and one token more.
    fn check_admissions(&self) {
        let plan = self.ledger.plan_items();
        let planned: HashSet<_> = plan.iter().map(|p| p.seq).collect();
        let state = |id| self.ledger.view(id).unwrap().state();
        let admitted = planned.iter().any(|id| state(*id) == SeqState::Waiting);
        let active = self.ledger.all().filter(|s| s.state() == SeqState::Running || planned.contains(&s.id()));
        let bs = self.ledger.config().block_size;
        if self.ledger.config().groups[0].window.is_some() {
            return;
        }
        let needs = active.map(|s| (s.total() + 1).div_ceil(bs).saturating_sub(s.block_table(0).len()));
        let (count, needed) = needs.fold((0, 0), |(n, sum), need| (n + 1, sum + need));
        assert!(!admitted || count == 1 || needed <= self.ledger.available_blocks(), "admitted without room: {plan:?}");
    }

    /// Between two preemptions of one sequence something has grown.
    fn count_preemptions(&mut self) {
        for seq in self.ledger.all().filter(|s| s.preemptions() > 0) {
            let last = self.preempted.entry(seq.id()).or_insert((0, usize::MAX));
            if last.0 != seq.preemptions() {
                assert_eq!(last.0 + 1, seq.preemptions(), "{} is preempted twice in a step", seq.id());
                assert_ne!(last.1, self.growth, "{} is preempted again, and nothing has grown", seq.id());
                *last = (seq.preemptions(), self.growth);
            }
        }
    }

    pub(crate) fn live_through(mut self, steps: usize) -> World {
        for _ in 0..steps {
            for _ in 0..self.rng.below(4) {
                self.act();
                self.check();
            }
            self.step(self.policy, false);
            if self.rng.percent(10) {
                self.check_pins();
            }
        }
        // Whatever the policy left behind, a good one brings to its end.
        self.preempted = self.ledger.all().map(|s| (s.id(), (s.preemptions(), usize::MAX))).collect();
        for k in 0.. {
            let Counts { waiting, running, held } = self.ledger.counts();
            if waiting + running == 0 {
                assert_eq!(held, self.live.len());
                break;
            }
            // Past the threshold of a dynamic regime each of 20 * 15 tokens takes up to 100 steps of one token.
            assert!(k < 50_000, "it does not end");
            self.step(Policy::Continuous, true);
        }
        for id in self.live.keys().copied().collect::<Vec<_>>() {
            self.ledger.release(id).unwrap();
            self.end(id, "released");
        }
        for (pin, ..) in std::mem::take(&mut self.pins) {
            self.ledger.unpin(pin).unwrap();
        }
        self.check();
        assert_eq!(self.ledger.available_blocks(), self.ledger.config().groups[0].blocks, "a block leaked");
        assert_eq!(self.ended.len(), self.ids.len(), "each ends once");
        self
    }
}
