//! An engine around a model that fails when it is told to: nothing half done, nothing lost, nothing leaked, in whatever state.
#![allow(clippy::unwrap_used)]

mod common;

use common::engines::open;
use common::fake::{self, BLOCK, FakeSizes, Faults, INFINITE, NAN, NOTHING, VOCAB, continuation};
use common::golden::fixtures;
use common::lane::Lane;
use loquat::engine::{Engine, EngineConfig, EventKind, FinishReason, Request, Status};
use loquat::sched::{Counts, SeqState};
use loquat::{BlockGroup, GenerateOptions, RunError, SamplingParams, SeqId, Session, SubmitError, TokenId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|i| ((i * i + 7 * seed + 3 * i) % (NAN as usize)) as TokenId).collect()
}

/// A lane that tries failed steps again.
struct Stubborn {
    lane: Lane,
    failures: usize,
}

impl Stubborn {
    fn new(sizes: FakeSizes, faults: &Arc<Faults>) -> Self {
        Stubborn { lane: Lane::around(fake::engine(sizes, faults)), failures: 0 }
    }

    fn step(&mut self, budget: Option<Duration>) -> Option<Status> {
        let engine = &mut self.lane.engine;
        let known = |e: &Engine| -> Vec<_> {
            let mut all: Vec<_> = e.ledger().all().map(|v| (v.id(), v.tokens().to_vec())).collect();
            all.sort();
            all
        };
        let before = known(engine);
        let result = match budget {
            None => engine.step(),
            Some(budget) => engine.step_within(budget),
        };
        match result {
            Ok(status) => {
                self.lane.listen();
                Some(status)
            }
            Err(RunError::Device { device, .. }) => {
                assert_eq!(device, "fake");
                self.failures += 1;
                engine.ledger().check();
                assert!(!engine.ledger().step_is_open());
                assert_eq!(known(engine), before, "tokens of a step that failed");
                assert_eq!(engine.next_event(), None, "an event of a step that failed");
                None
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn finish(&mut self, seqs: &[SeqId], budget: Option<Duration>) {
        while !seqs.iter().all(|s| self.lane.ended.contains_key(s)) {
            assert_ne!(self.step(budget), Some(Status::Idle(None)), "idle with work left");
        }
    }

    #[track_caller]
    fn said(&self, seq: SeqId, prompt: &[TokenId], n: usize) {
        assert_eq!(self.lane.ended[&seq], FinishReason::Length);
        assert_eq!(self.lane.tokens_of(seq), continuation(prompt, n), "{seq}");
    }
}

/// Conversations, forks and newcomers in a pool that is too small for all, with a budget of 0 every other step: preemptions,
/// copies and pauses. Says how often a step failed.
fn busy_day(sizes: FakeSizes, faults: &Arc<Faults>) -> usize {
    let mut s = Stubborn::new(sizes, faults);
    let pause = |i: usize| (i % 2 == 1).then_some(Duration::ZERO);
    let a = prompt(1, 20);
    let first = s.lane.submit(Request::new(a.as_slice(), 7).hold(true));
    s.finish(&[first], pause(0));
    s.said(first, &a, 7);
    let a = [a.as_slice(), s.lane.tokens_of(first)].concat();

    let fork = s.lane.engine.fork(first).unwrap();
    let (x, y) = ([&a[..], &prompt(2, 3)].concat(), [&a[..], &prompt(3, 9)].concat());
    s.lane.resume(first, Request::new(&x[a.len()..], 18).hold(true));
    s.lane.resume(fork, Request::new(&y[a.len()..], 18).hold(true));
    for i in 0..3 {
        s.step(pause(i));
    }
    let others: Vec<_> = [(4, 30, 25), (5, 10, 40), (6, 1, 3)]
        .map(|(seed, len, more)| (prompt(seed, len), more))
        .into_iter()
        .map(|(p, more)| (s.lane.submit(Request::new(p.as_slice(), more).priority(more as i32 % 2)), p, more))
        .collect();
    let mut preemptions = 0;
    let mut i = 0;
    while !others.iter().map(|o| o.0).chain([first, fork]).all(|seq| s.lane.ended.contains_key(&seq)) {
        i += 1;
        assert_ne!(s.step(pause(i)), Some(Status::Idle(None)));
        preemptions = preemptions.max(s.lane.engine.ledger().all().map(|v| v.preemptions()).max().unwrap_or(0));
    }
    assert!(preemptions > 0 || faults.fired(), "the pool was to be too small: {sizes:?}");
    s.said(first, &x, 18);
    s.said(fork, &y, 18);
    for (seq, p, more) in &others {
        s.said(*seq, p, *more);
    }
    assert_eq!(s.lane.engine.ledger().counts(), Counts { held: 2, ..Counts::default() });
    for held in [first, fork] {
        s.lane.engine.cancel(held).unwrap();
    }
    s.lane.listen();
    assert_eq!(s.lane.engine.ledger().available_blocks(), sizes.blocks);
    s.failures
}

#[test]
fn every_call_may_fail_and_nothing_is_lost() {
    const WINDOWED: [BlockGroup; 2] = [BlockGroup { blocks: 7, window: None }, BlockGroup { blocks: 6, window: Some(20) }];
    let plain = FakeSizes::default;
    for sizes in [
        plain(),
        FakeSizes { dynamic_from: Some(40), ..plain() },
        FakeSizes { blocks: 7, groups: &WINDOWED, swap: &[6, 4], ..plain() },
    ] {
        let dynamic_from = sizes.dynamic_from;
        let faults = Faults::at(1, 0);
        assert_eq!(busy_day(sizes, &faults), 0);
        assert!(dynamic_from.is_some() || faults.copied.load(Ordering::Relaxed) > 0, "a fork was to write");
        let calls = faults.calls.load(Ordering::Relaxed);
        assert!(calls > 200, "{calls}");
        for count in [1, 4] {
            for first in 1.. {
                let faults = Faults::at(first, count);
                let failures = busy_day(sizes, &faults);
                if !faults.fired() {
                    break;
                }
                assert!(failures > 0 && failures <= count, "{failures} of {count}");
            }
        }
    }
}

#[test]
fn broken_logits_end_their_sequence_alone() {
    let faults = Arc::default();
    let mut lane = Lane::around(fake::engine(FakeSizes::default(), &faults));
    let good = [prompt(1, 9), prompt(2, 20)];
    let submit = |lane: &mut Lane, p: &[TokenId], hold| lane.submit(Request::new(p, 9).hold(hold));
    let first = submit(&mut lane, &good[0], false);
    let bad: Vec<_> = [NAN, INFINITE, NOTHING].map(|t| submit(&mut lane, &[3, t], t == NAN)).into();
    let last = submit(&mut lane, &good[1], false);
    lane.finish(&[first, last, bad[0], bad[1], bad[2]]);
    for (seq, p) in [first, last].iter().zip(&good) {
        assert_eq!(lane.tokens_of(*seq), continuation(p, 9));
    }
    for seq in &bad {
        assert!(lane.tokens_of(*seq).is_empty(), "a token out of nothing");
    }
    assert_eq!(lane.ended[&bad[0]], FinishReason::Failed(RunError::NanLogits { seq: bad[0], token: 5 }));
    assert_eq!(lane.ended[&bad[1]], FinishReason::Failed(RunError::InfiniteLogits { seq: bad[1], token: 6 }));
    assert_eq!(lane.ended[&bad[2]], FinishReason::Failed(RunError::NoToken { seq: bad[2] }));
    // What was asked to be held is held, without the token that broke it.
    lane.engine.truncate(bad[0], 1).unwrap();
    lane.resume(bad[0], Request::new([4], 3));
    lane.finish(&[bad[0]]);
    assert_eq!(lane.tokens_of(bad[0]), continuation(&[3, 4], 3));
    assert_eq!(lane.engine.ledger().counts(), Counts::default());
    assert_eq!(lane.engine.ledger().available_blocks(), FakeSizes::default().blocks);
}

/// Brings a sequence into a state, and says which.
type Bring = fn(&mut Lane, &[TokenId]) -> SeqId;

fn waiting(lane: &mut Lane, p: &[TokenId]) -> SeqId {
    lane.submit(Request::new(p, 20))
}

fn mid_prefill(lane: &mut Lane, p: &[TokenId]) -> SeqId {
    let seq = waiting(lane, p);
    lane.step();
    let v = lane.engine.view(seq).unwrap();
    assert!(v.cached() > 0 && v.left() > 1, "{} cached, {} left", v.cached(), v.left());
    seq
}

fn in_a_paused_step(lane: &mut Lane, p: &[TokenId]) -> SeqId {
    let seq = waiting(lane, p);
    for _ in 0..2 {
        assert_eq!(lane.engine.step_within(Duration::ZERO).unwrap(), Status::Paused);
    }
    assert!(lane.engine.ledger().plan_items().iter().any(|i| i.seq == seq));
    seq
}

fn running(lane: &mut Lane, p: &[TokenId]) -> SeqId {
    let seq = waiting(lane, p);
    while lane.tokens_of(seq).len() < 3 {
        lane.step();
    }
    assert_eq!(lane.engine.view(seq).unwrap().state(), SeqState::Running);
    seq
}

fn held(lane: &mut Lane, p: &[TokenId]) -> SeqId {
    let seq = lane.submit(Request::new(p, 2).hold(true));
    lane.finish(&[seq]);
    seq
}

/// The other one of the fork runs.
fn forked(lane: &mut Lane, p: &[TokenId]) -> SeqId {
    let seq = held(lane, p);
    let child = lane.engine.fork(seq).unwrap();
    lane.resume(child, Request::new([1, 2], 20));
    lane.step();
    seq
}

/// The one that is cancelled runs, and so does its twin.
fn forked_and_running(lane: &mut Lane, p: &[TokenId]) -> SeqId {
    let seq = forked(lane, p);
    lane.resume(seq, Request::new([5], 20));
    lane.step();
    seq
}

/// Others, more urgent, have outgrown the room beside it.
fn swapped(lane: &mut Lane, p: &[TokenId]) -> SeqId {
    let seq = lane.submit(Request::new(p, 100));
    let urgent: Vec<_> = (20..23).map(|i| lane.submit(Request::new(prompt(i, 5), 150).priority(9))).collect();
    while !lane.engine.view(seq).unwrap().swapped() {
        assert!(!lane.ended.contains_key(&seq), "it was to lose its place");
        lane.step();
    }
    for other in urgent {
        lane.engine.cancel(other).unwrap();
        lane.listen();
    }
    assert!(!lane.tokens_of(seq).is_empty() && lane.engine.view(seq).unwrap().state() == SeqState::Waiting);
    seq
}

const STATES: [(&str, Bring); 8] = [
    ("swapped", swapped),
    ("waiting", waiting),
    ("mid-prefill", mid_prefill),
    ("in a paused step", in_a_paused_step),
    ("running", running),
    ("held", held),
    ("forked", forked),
    ("forked and running", forked_and_running),
];

/// An engine with two neighbours at work, and what they will have said.
fn with_neighbours(hold: bool) -> (Lane, Vec<(SeqId, Vec<TokenId>)>) {
    let sizes = FakeSizes { blocks: 24, swap: &[24], seqs: 6, ..FakeSizes::default() };
    let mut lane = Lane::around(fake::engine(sizes, &Arc::default()));
    let others = [prompt(8, 5), prompt(9, 21)].map(|p| (lane.submit(Request::new(p.as_slice(), 40).hold(hold)), p));
    lane.step();
    (lane, others.into())
}

#[test]
fn cancelled_in_every_state() {
    for (state, bring) in STATES {
        let (mut lane, others) = with_neighbours(false);
        let p = prompt(10, 60);
        let seq = bring(&mut lane, &p);
        let was_held = lane.engine.view(seq).unwrap().state() == SeqState::Held;
        let said = lane.tokens_of(seq).len();
        if was_held {
            lane.ended.remove(&seq);
        }
        lane.engine.cancel(seq).unwrap();
        assert!(lane.engine.view(seq).is_none(), "{state}");
        let gone = SubmitError::Sequence { seq, expected: "any state", found: "gone" };
        assert_eq!(lane.engine.cancel(seq), Err(gone), "{state}");
        lane.listen();
        // Whoever takes its place in the middle of a step is somebody else.
        let heir = lane.submit(Request::new([1, 2, 3], 4));
        let twins: Vec<_> = lane.engine.ledger().all().map(|v| v.id()).filter(|id| *id != heir).collect();
        lane.finish(&twins);
        lane.finish(&[heir]);
        assert_eq!(lane.tokens_of(heir), continuation(&[1, 2, 3], 4), "{state}");
        for (other, p) in &others {
            assert_eq!(lane.tokens_of(*other), continuation(p, 40), "{state}");
        }
        for twin in twins.into_iter().filter(|t| others.iter().all(|o| o.0 != *t)) {
            let p = [&p[..], &continuation(&p, 2), &[1, 2]].concat();
            assert_eq!(lane.tokens_of(twin), continuation(&p, 20), "{state}: the other one of the fork");
        }
        let end = (!was_held).then_some(&FinishReason::Cancelled);
        assert_eq!(lane.ended.get(&seq), end, "{state}");
        assert_eq!(lane.tokens_of(seq).len(), said, "{state}: it went on");
        assert_eq!(lane.engine.ledger().counts(), Counts::default(), "{state}");
        assert_eq!(lane.engine.ledger().available_blocks(), 24, "{state}");
    }
}

#[test]
fn stopped_in_every_state_and_held() {
    for hold in [false, true] {
        for paused in 0..5 {
            let (mut lane, others) = with_neighbours(false);
            let p = prompt(10, 12);
            let seq = lane.submit(Request::new(p.as_slice(), 20).hold(hold));
            lane.finish_prefill(seq);
            for _ in 0..paused {
                lane.engine.step_within(Duration::ZERO).unwrap();
            }
            lane.listen();
            let open = lane.engine.ledger().step_is_open();
            let said = lane.tokens_of(seq).len();
            lane.engine.stop(seq).unwrap();
            if open {
                // Asked twice it stops once.
                lane.engine.stop(seq).unwrap();
            }
            lane.listen();
            assert_eq!(lane.ended.contains_key(&seq), !open, "paused {paused} times");
            lane.finish(&[seq]);
            assert_eq!(lane.ended[&seq], FinishReason::Cancelled);
            // The step under way may bring its token, and no more.
            let now = lane.tokens_of(seq).to_vec();
            assert!(now.len() <= said + usize::from(open), "{said} tokens, then {}", now.len());
            assert_eq!(now, continuation(&p, now.len()));
            assert!(lane.engine.stop(seq).is_err());
            if hold {
                let p = [&p[..], &now].concat();
                lane.resume(seq, Request::new([9], 8));
                lane.finish(&[seq]);
                assert_eq!(lane.tokens_of(seq), continuation(&[&p[..], &[9]].concat(), 8));
            }
            for (other, p) in &others {
                lane.finish(&[*other]);
                assert_eq!(lane.tokens_of(*other), continuation(p, 40));
            }
            assert_eq!(lane.engine.ledger().counts(), Counts::default());
            assert_eq!(lane.engine.ledger().available_blocks(), 24);
        }
    }
}

/// A step that fails takes what was to stop in it along: it does not run again first.
#[test]
fn stopped_in_a_step_that_fails() {
    for hold in [false, true] {
        let faults = Faults::at(0, 0);
        let mut s = Stubborn::new(FakeSizes::default(), &faults);
        let p = prompt(3, 5);
        let seq = s.lane.submit(Request::new(p.as_slice(), 20).hold(hold));
        // In a step of its own it would end at once.
        let other = s.lane.submit(Request::new(p.as_slice(), 2));
        s.lane.step();
        assert_eq!(s.lane.engine.step_within(Duration::ZERO).unwrap(), Status::Paused);
        s.lane.engine.stop(seq).unwrap();
        faults.first.store(faults.calls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        faults.count.store(1, Ordering::Relaxed);
        assert!(s.lane.engine.step().is_err());
        s.lane.listen();
        assert_eq!(s.lane.ended.get(&seq), Some(&FinishReason::Cancelled));
        assert_eq!(s.lane.tokens_of(seq), continuation(&p, 1));
        assert_eq!(s.lane.engine.view(seq).map(|v| v.state()), hold.then_some(SeqState::Held));
        s.lane.finish(&[other]);
        assert_eq!(s.step(None), Some(Status::Idle(None)));
    }
}

impl Lane {
    /// Steps until the sequence's prompt has been run.
    fn finish_prefill(&mut self, seq: SeqId) {
        while self.tokens_of(seq).is_empty() {
            self.step();
        }
    }
}

#[test]
fn refused_at_the_door_with_nothing_changed() {
    let sizes = FakeSizes { max_seqs: 3, ..FakeSizes::default() };
    let mut lane = Lane::around(fake::engine(sizes, &Arc::default()));
    let p = prompt(1, 9);
    let busy = lane.submit(Request::new(p.as_slice(), 30));
    let kept = lane.submit(Request::new([1, 2, 3], 2).hold(true));
    lane.finish(&[kept]);
    let state = |lane: &Lane| {
        let ledger = lane.engine.ledger();
        let v = ledger.view(kept).unwrap();
        (ledger.counts(), ledger.available_blocks(), v.tokens().to_vec(), ledger.cached_prefix(kept), ledger.stats().nodes)
    };
    let before = state(&lane);
    let gone = lane.submit(Request::new([1], 1));
    lane.engine.cancel(gone).unwrap();
    let sampling = |s: SamplingParams| Request::new([1], 1).sampling(s);
    let base = SamplingParams::default;
    let cache = sizes.blocks * BLOCK;
    type Kind = fn(&SubmitError) -> bool;
    let refused: Vec<(Request, Kind, &str)> = vec![
        (Request::new([], 5), |e| matches!(e, SubmitError::EmptyPrompt), "empty"),
        (Request::new([1], 0), |e| matches!(e, SubmitError::NoTokens), "max_tokens is 0"),
        (
            Request::new([1, VOCAB as TokenId], 5),
            |e| matches!(e, SubmitError::UnknownToken { token: 64, at: 1, vocab: 64 }),
            "token 64 at 1",
        ),
        (Request::new([u32::MAX], 5), |e| matches!(e, SubmitError::UnknownToken { .. }), "4294967295"),
        (Request::new([1], 200), |e| matches!(e, SubmitError::TooLong { tokens: 201, limit: 200, .. }), "the context of 200"),
        (Request::new([1], usize::MAX), |e| matches!(e, SubmitError::TooLong { .. }), "the context"),
        (Request::new([1; 100], cache - 99), |e| matches!(e, SubmitError::TooLong { .. }), "the cache of 128"),
        (sampling(base().temperature(f32::NAN)), |e| matches!(e, SubmitError::Parameter { .. }), "temperature"),
        (sampling(base().top_p(1.5)), |e| matches!(e, SubmitError::Parameter { .. }), "1.5"),
        (sampling(base().repetition_penalty(0.0)), |e| matches!(e, SubmitError::Parameter { .. }), "repetition_penalty"),
        (sampling(base().banned(vec![64])), |e| matches!(e, SubmitError::Parameter { .. }), "token 64 of 64"),
    ];
    for (request, kind, says) in refused {
        let new = lane.engine.submit(request.clone()).unwrap_err();
        assert!(kind(&new) && new.to_string().contains(says), "{new}");
        // A follow-up may be empty, for it has tokens before it; everything else holds there too.
        if says != "empty" {
            let error = lane.engine.resume(kept, request).unwrap_err();
            let same = std::mem::discriminant(&error) == std::mem::discriminant(&new);
            assert!(same, "{error} against {new}");
        }
        assert!(state(&lane) == before, "{says}: something changed");
    }
    let misuse = |expected, found| Err(SubmitError::Sequence { seq: busy, expected, found });
    assert_eq!(lane.engine.resume(busy, Request::new([1], 1)), misuse("held", "running"));
    assert_eq!(lane.engine.fork(busy).map(drop), misuse("held, or waiting for a choice", "running"));
    assert_eq!(lane.engine.truncate(busy, 1), misuse("held", "running"));
    for error in [
        lane.engine.resume(gone, Request::new([1], 1)),
        lane.engine.fork(gone).map(drop),
        lane.engine.truncate(gone, 0),
        lane.engine.stop(gone),
        lane.engine.stop(kept),
        lane.engine.cancel(gone),
    ] {
        assert!(matches!(error, Err(SubmitError::Sequence { found: "gone" | "held", .. })), "{error:?}");
    }
    assert!(matches!(lane.engine.truncate(kept, 6), Err(SubmitError::Parameter { name: "len", .. })));
    assert!(state(&lane) == before);
    let third = lane.submit(Request::new([5], 1));
    assert_eq!(lane.engine.submit(Request::new([1], 1)), Err(SubmitError::QueueFull { limit: 3 }));
    assert_eq!(lane.engine.fork(kept), Err(SubmitError::QueueFull { limit: 3 }));
    lane.finish(&[busy, third]);
    assert_eq!(lane.tokens_of(busy), continuation(&p, 30), "what was refused did harm");
    // As long as it may be.
    let longest = lane.submit(Request::new([1; 100], cache - 100));
    lane.finish(&[longest]);
    assert_eq!(lane.tokens_of(longest), continuation(&[1; 100], cache - 100));
}

#[test]
fn prompt_logits_only_where_the_engine_has_room_for_them() {
    let files = open(&fixtures().join("arch/llama_mha_f32"));
    let mut engine = Engine::new(&files, EngineConfig::default()).unwrap();
    let error = engine.submit(Request { prompt_logits: true, ..Request::new([1], 1) }).unwrap_err();
    assert!(matches!(error, SubmitError::Parameter { name: "prompt_logits", .. }), "{error}");
    assert_eq!(engine.ledger().counts(), Counts::default());
}

#[test]
fn stop_tokens_end_and_are_reported() {
    let mut lane = Lane::around(fake::engine(FakeSizes::default(), &Arc::default()));
    let p = prompt(1, 4);
    let all = continuation(&p, 12);
    let stop = all[5];
    let first = all.iter().position(|t| *t == stop).unwrap();
    let seq = lane.submit(Request::new(p, 12).stop_tokens([NAN, stop]));
    lane.finish(&[seq]);
    assert_eq!(lane.ended[&seq], FinishReason::Stop);
    assert_eq!(lane.tokens_of(seq), &all[..=first]);
}

#[test]
fn dropped_with_its_owner() {
    let files = open(&fixtures().join("gguf/llama_q4_0.gguf"));
    let mut engine = Engine::new(&files, EngineConfig { cache_tokens: 256, ..EngineConfig::default() }).unwrap();
    let blocks = engine.ledger().available_blocks();
    let other = engine.submit(Request::new([1, 2, 3], 30)).unwrap();
    for steps in 0..4 {
        let mut session = Session::new(&files).unwrap();
        session.push("some text to answer").unwrap();
        session.start(&mut engine, &GenerateOptions { max_tokens: 40, ignore_end: true, ..GenerateOptions::default() }).unwrap();
        let seq = session.seq().unwrap();
        for _ in 0..steps {
            engine.step().unwrap();
        }
        if steps == 3 {
            engine.step_within(Duration::ZERO).unwrap();
        }
        drop(session);
        while engine.view(seq).is_some() {
            engine.step().unwrap();
        }
        engine.ledger().check();
        assert_eq!(engine.next_event_of(seq), None, "an event for nobody");
        assert_eq!(engine.ledger().counts().held, 0);
    }
    while engine.step().unwrap() != Status::Idle(None) {}
    let mut tokens = 0;
    while let Some(event) = engine.next_event() {
        assert_eq!(event.seq, other);
        match event.kind {
            EventKind::Token { .. } => tokens += 1,
            end => assert_eq!(end, EventKind::Finished(FinishReason::Length)),
        }
    }
    assert_eq!(tokens, 30);
    assert_eq!(engine.ledger().available_blocks(), blocks);
    // An answer that nobody reads to its end.
    let mut session = Session::new(&files).unwrap();
    session.push("text").unwrap();
    let options = GenerateOptions { max_tokens: 40, ignore_end: true, ..GenerateOptions::default() };
    let mut answer = session.generate(&mut engine, &options).unwrap();
    answer.next().unwrap().unwrap();
    drop(answer);
    assert_eq!(engine.ledger().counts(), Counts { held: 1, ..Counts::default() });
    drop(session);
    assert_eq!(engine.step().unwrap(), Status::Idle(None));
    assert_eq!(engine.ledger().available_blocks(), blocks);
}
