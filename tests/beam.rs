//! Sequences that their caller steers, and beam search on top of them, against a search that runs every hypothesis from scratch.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::engines::{exact, open};
use common::fake::{self, FakeSizes, Faults, NAN, VOCAB, continuation};
use common::golden::fixtures;
use loquat::engine::{Engine, EngineConfig, EventKind, FinishReason, Request, Status};
use loquat::sched::{ContinuousBatching, Counts, DynamicBatching, Scheduler, SeqState, StaticBatching};
use loquat::{BeamOptions, BeamSearch, BeamStop, SamplingParams, SeqId, SubmitError, TokenId};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|i| ((i * i + 7 * seed + 3 * i) % (NAN as usize)) as TokenId).collect()
}

fn engine(sizes: FakeSizes) -> Engine {
    fake::engine(sizes, &Arc::default())
}

/// Steps until the sequence says something.
#[track_caller]
fn next(engine: &mut Engine, seq: SeqId) -> EventKind {
    loop {
        if let Some(event) = engine.next_event_of(seq) {
            return event.kind;
        }
        assert_ne!(engine.step().unwrap(), Status::Idle(None), "idle without a word");
        engine.ledger().check();
    }
}

#[track_caller]
fn top(engine: &mut Engine, seq: SeqId) -> Vec<(TokenId, f32)> {
    match next(engine, seq) {
        EventKind::Choice { top } => top,
        other => panic!("{other:?}"),
    }
}

fn empty(engine: &Engine) {
    engine.ledger().check();
    assert_eq!(engine.ledger().counts(), Counts::default());
    let stats = engine.ledger().stats();
    assert_eq!((stats.active, engine.ledger().available_blocks()), (0, stats.blocks));
}

#[test]
fn steered_along_the_likeliest() {
    let mut engine = engine(FakeSizes::default());
    let p = prompt(1, 20);
    let said = continuation(&p, 40);
    let seq = engine.submit(Request::new(p.as_slice(), 40).steered(5)).unwrap();
    for &token in &said {
        let top = top(&mut engine, seq);
        assert_eq!((top.len(), top[0].0), (5, token));
        assert!(top.windows(2).all(|w| w[0].1 >= w[1].1));
        // Nobody else wants to run: it keeps its place, however long the caller thinks.
        assert_eq!(engine.step().unwrap(), Status::Idle(None));
        assert_eq!(engine.view(seq).unwrap().state(), SeqState::Running);
        engine.choose(seq, token).unwrap();
        engine.ledger().check();
    }
    assert_eq!(next(&mut engine, seq), EventKind::Finished(FinishReason::Length));
    empty(&engine);
}

#[test]
fn steered_where_the_model_would_not_go() {
    let mut engine = engine(FakeSizes::default());
    let seq = engine.submit(Request::new([1, 2], 30).steered(2).stop_tokens([9]).hold(true)).unwrap();
    let mut tokens = vec![1, 2];
    for token in [5, 5, 7, 3, 11, 9] {
        let row = fake::row(&tokens);
        let best = (0..VOCAB).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as TokenId;
        assert_eq!(top(&mut engine, seq)[0].0, best);
        engine.choose(seq, token).unwrap();
        tokens.push(token);
    }
    assert_eq!(next(&mut engine, seq), EventKind::Finished(FinishReason::Stop));
    assert_eq!(engine.view(seq).unwrap().tokens(), tokens);
    // Held, it can go on like any other.
    engine.resume(seq, Request::new([4], 3)).unwrap();
    tokens.push(4);
    for token in continuation(&tokens, 3) {
        assert!(matches!(next(&mut engine, seq), EventKind::Token { token: t, .. } if t == token));
    }
    assert_eq!(next(&mut engine, seq), EventKind::Finished(FinishReason::Length));
    empty(&engine);
}

#[test]
fn refused_choices() {
    let mut engine = engine(FakeSizes::default());
    let parameter = |r: Result<SeqId, SubmitError>, what: &str| match r.unwrap_err() {
        SubmitError::Parameter { name, .. } => assert_eq!(name, what),
        other => panic!("{other}"),
    };
    let sampled = Request::new([1], 3).sampling(SamplingParams::default().temperature(0.5)).steered(1);
    parameter(engine.submit(sampled), "sampling");
    parameter(engine.submit(Request { steered: true, ..Request::prefill([1, 2]) }), "steered");
    let seq = engine.submit(Request::new(prompt(1, 40), 4).steered(1)).unwrap();
    let ordinary = engine.submit(Request::new([3], 20)).unwrap();
    let asks = "waiting for a choice";
    let not = |seq, found| Err(SubmitError::Sequence { seq, expected: asks, found });
    assert_eq!(engine.choose(seq, 1), not(seq, "waiting"));
    engine.step().unwrap();
    assert_eq!(engine.choose(seq, 1), not(seq, "running"));
    assert_eq!(engine.choose(ordinary, 1), not(ordinary, "waiting"));
    top(&mut engine, seq);
    let alien = SubmitError::UnknownToken { token: 64, at: 40, vocab: 64 };
    assert_eq!(engine.choose(seq, 64), Err(alien));
    engine.choose(seq, 1).unwrap();
    assert_eq!(engine.choose(seq, 1), not(seq, "running"));
    top(&mut engine, seq);
    engine.cancel(seq).unwrap();
    assert_eq!(engine.choose(seq, 1), not(seq, "gone"));
    while engine.step().unwrap() != Status::Idle(None) {}
    empty(&engine);
}

#[test]
fn who_waits_for_a_choice_stops_nobody() {
    for policy in 0..3 {
        let scheduler: Box<dyn Scheduler> = match policy {
            0 => Box::new(ContinuousBatching::default()),
            1 => Box::new(StaticBatching::new(2).linger(Duration::ZERO)),
            _ => Box::new(DynamicBatching::new(2, Duration::ZERO)),
        };
        // Two thinkers have all places and most blocks.
        let sizes = FakeSizes { seqs: 2, ..FakeSizes::default() };
        let mut engine = fake::engine_with(sizes, &Arc::default(), scheduler);
        let prompts = [prompt(1, 50), prompt(2, 55)];
        let thinkers = [0, 1].map(|i| engine.submit(Request::new(prompts[i].as_slice(), 3).steered(1)).unwrap());
        for seq in thinkers {
            top(&mut engine, seq);
        }
        let p = prompt(3, 70);
        let other = engine.submit(Request::new(p.as_slice(), 20)).unwrap();
        let mut said = Vec::new();
        while said.len() < 20 {
            if let EventKind::Token { token, .. } = next(&mut engine, other) {
                said.push(token);
            }
        }
        assert_eq!(said, continuation(&p, 20), "policy {policy}");
        for (seq, p) in thinkers.into_iter().zip(&prompts) {
            let view = engine.view(seq).unwrap();
            assert!(view.parked() && view.state() == SeqState::Waiting);
            // It forks without a place, too.
            let fork = engine.fork(seq).unwrap();
            for (seq, first) in [(seq, 4), (fork, 5)] {
                engine.choose(seq, first).unwrap();
                let second = top(&mut engine, seq)[0].0;
                assert_eq!(second, continuation(&[&p[..], &[first]].concat(), 1)[0]);
                engine.cancel(seq).unwrap();
            }
        }
        while engine.step().unwrap() != Status::Idle(None) {}
        empty(&engine);
    }
}

#[test]
fn forks_share_until_they_part() {
    let mut engine = engine(FakeSizes { tokens: 64, seqs: 3, max_seqs: 5, ..FakeSizes::default() });
    let p = prompt(4, 40);
    let seq = engine.submit(Request::new(p.as_slice(), 9).steered(1).priority(3)).unwrap();
    top(&mut engine, seq);
    let forks = [(); 2].map(|()| engine.fork(seq).unwrap());
    assert_eq!(engine.ledger().stats().active, 3, "one prompt's blocks");
    let view = engine.view(forks[0]).unwrap();
    assert_eq!((view.state(), view.priority(), view.remaining()), (SeqState::Running, 3, 9));
    for (seq, token) in [(seq, 1), (forks[0], 2), (forks[1], 3)] {
        engine.choose(seq, token).unwrap();
    }
    for (seq, token) in [(seq, 1), (forks[0], 2), (forks[1], 3)] {
        assert_eq!(top(&mut engine, seq)[0].0, continuation(&[&p[..], &[token]].concat(), 1)[0]);
    }
    assert_eq!(engine.ledger().stats().active, 2 + 3);
    // No place is left among those that run, and then none at all.
    let more = [(); 2].map(|()| engine.fork(seq).unwrap());
    engine.ledger().check();
    assert_eq!(engine.fork(seq), Err(SubmitError::QueueFull { limit: 5 }));
    let hits = engine.ledger().stats().hit_tokens;
    for (i, fork) in more.into_iter().enumerate() {
        engine.choose(fork, i as TokenId).unwrap();
    }
    for (i, fork) in more.into_iter().enumerate() {
        assert_eq!(top(&mut engine, fork)[0].0, continuation(&[&p[..], &[1, i as TokenId]].concat(), 1)[0]);
    }
    assert_eq!(engine.ledger().stats().hit_tokens - hits, 2 * 41, "all but the token that was chosen");
    for seq in [seq, forks[0], forks[1], more[0], more[1]] {
        engine.cancel(seq).unwrap();
    }
    empty(&engine);
}

/// Chosen, forked and cancelled while a step of others is open.
#[test]
fn in_the_middle_of_a_step() {
    for pauses in 1..4 {
        let mut engine = engine(FakeSizes { seqs: 2, ..FakeSizes::default() });
        let p = prompt(5, 20);
        let seq = engine.submit(Request::new(p.as_slice(), 9).steered(1)).unwrap();
        top(&mut engine, seq);
        let other = engine.submit(Request::new([8; 30], 9)).unwrap();
        for _ in 0..pauses {
            assert_eq!(engine.step_within(Duration::ZERO).unwrap(), Status::Paused);
        }
        let forks = [(); 2].map(|()| engine.fork(seq).unwrap());
        engine.ledger().check();
        engine.choose(forks[0], 6).unwrap();
        engine.choose(seq, 7).unwrap();
        engine.cancel(forks[1]).unwrap();
        engine.ledger().check();
        for (seq, token) in [(seq, 7), (forks[0], 6)] {
            assert_eq!(top(&mut engine, seq)[0].0, continuation(&[&p[..], &[token]].concat(), 1)[0]);
            engine.stop(seq).unwrap();
        }
        while engine.step().unwrap() != Status::Idle(None) {}
        let said = std::iter::from_fn(|| engine.next_event_of(other)).filter(|e| matches!(e.kind, EventKind::Token { .. }));
        assert_eq!(said.count(), 9);
        empty(&engine);
    }
}

/// A beam search without an engine: tokens, sum and score of each hypothesis. `row` is the logits after the tokens, from scratch.
fn naive(
    row: &mut dyn FnMut(&[TokenId]) -> Vec<f32>,
    prompt: &[TokenId],
    max_tokens: usize,
    stop: &[TokenId],
    options: BeamOptions,
) -> (Vec<(Vec<TokenId>, f64, f64)>, FinishReason) {
    let w = options.width;
    let mut live = vec![(Vec::new(), 0.0)];
    let mut done: Vec<(Vec<TokenId>, f64, f64)> = Vec::new();
    let score = |sum: f64, len: usize| sum / (len as f64).powf(options.length_penalty);
    let keep = |done: &mut Vec<(Vec<TokenId>, f64, f64)>, (tokens, sum): (Vec<TokenId>, f64)| {
        let score = score(sum, tokens.len());
        done.push((tokens, sum, score));
        done.sort_by(|a, b| b.2.total_cmp(&a.2));
        done.truncate(w);
    };
    for len in 1..=max_tokens {
        let mut all = Vec::new();
        for (tokens, sum) in &live {
            let row = row(&[prompt, tokens].concat());
            let total: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
            for (t, v) in row.iter().enumerate() {
                all.push(([tokens, &[t as TokenId][..]].concat(), sum + f64::from(*v) - total.ln()));
            }
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        live.clear();
        for (rank, (tokens, sum)) in all.into_iter().enumerate() {
            let ends = stop.contains(tokens.last().unwrap());
            match ends {
                true if rank < w => keep(&mut done, (tokens, sum)),
                true => {}
                false => live.push((tokens, sum)),
            }
            if live.len() == w {
                break;
            }
        }
        if done.len() == w {
            let at = match options.stop {
                BeamStop::Sure if options.length_penalty > 0.0 => max_tokens,
                _ => len,
            };
            if options.stop == BeamStop::First || done[w - 1].2 >= score(live[0].1, at) {
                return (done, FinishReason::Stop);
            }
        }
    }
    live.into_iter().for_each(|beam| keep(&mut done, beam));
    (done, FinishReason::Length)
}

#[track_caller]
fn same(search: &BeamSearch, expected: &[(Vec<TokenId>, f64, f64)], what: &str) {
    let found = search.hypotheses();
    assert_eq!(found.iter().map(|h| &h.tokens).collect::<Vec<_>>(), expected.iter().map(|h| &h.0).collect::<Vec<_>>(), "{what}");
    for (h, e) in found.iter().zip(expected) {
        // A log-probability is rounded to f32 for each token.
        let rounding = e.0.len() as f64 * 1e-6;
        assert!((h.logprob - e.1).abs() < rounding, "{what}: {} against {}", h.logprob, e.1);
        assert!((h.score - e.2).abs() < rounding * (e.0.len() as f64).max(1.0), "{what}: {} against {}", h.score, e.2);
    }
}

fn run(engine: &mut Engine, search: &mut BeamSearch) -> FinishReason {
    loop {
        if let Some(end) = search.poll(engine).unwrap() {
            engine.ledger().check();
            return end;
        }
        engine.ledger().check();
        assert_ne!(engine.step().unwrap(), Status::Idle(None), "idle with beams to run");
    }
}

#[test]
fn the_hypotheses_of_a_naive_search() {
    let mut ends = Vec::new();
    for (len, max_tokens) in [(1, 1), (16, 5), (20, 14), (33, 14)] {
        let p = prompt(len, len);
        for width in [1, 2, 4, 7] {
            for stop in [&[][..], &[0, 9, 18, 27, 36], &[1, 2, 3, 5, 8, 13, 21, 34, 55, 60, 40, 44]] {
                for length_penalty in [1.0, 0.0, 2.0, -0.5] {
                    for rule in [BeamStop::First, BeamStop::Likely, BeamStop::Sure] {
                        let options = BeamOptions { length_penalty, stop: rule, ..BeamOptions::new(width) };
                        let mut engine = engine(FakeSizes { blocks: 24, ..FakeSizes::default() });
                        let request = Request::new(p.as_slice(), max_tokens).stop_tokens(stop);
                        let mut search = BeamSearch::start(&mut engine, request, options).unwrap();
                        let end = run(&mut engine, &mut search);
                        let (expected, why) = naive(&mut fake::row, &p, max_tokens, stop, options);
                        let what = format!("{len} tokens, stop {stop:?}, {options:?}");
                        same(&search, &expected, &what);
                        assert_eq!(end, why, "{what}");
                        ends.push(end);
                        empty(&engine);
                    }
                }
            }
        }
    }
    let stopped = ends.iter().filter(|end| **end == FinishReason::Stop).count();
    assert!(stopped > 30 && ends.len() - stopped > 30, "{stopped} of {}", ends.len());
}

#[test]
fn whatever_else_runs() {
    let p = prompt(3, 30);
    let options = BeamOptions::new(5);
    let (expected, _) = naive(&mut fake::row, &p, 25, &[7], options);
    let base = FakeSizes { blocks: 5, ..FakeSizes::default() };
    let mut preemptions = 0;
    for sizes in
        [base, FakeSizes { dynamic_from: Some(40), ..base }, FakeSizes { seqs: 1, ..base }, FakeSizes { swap: &[5], ..base }]
    {
        for policy in 0..3 {
            let scheduler: Box<dyn Scheduler> = match policy {
                0 => Box::new(ContinuousBatching::default()),
                1 => Box::new(StaticBatching::new(2).linger(Duration::ZERO)),
                _ => Box::new(DynamicBatching::new(3, Duration::ZERO)),
            };
            let mut engine = fake::engine_with(sizes, &Arc::default(), scheduler);
            let before = engine.submit(Request::new(prompt(6, 20), 40)).unwrap();
            let request = Request::new(p.as_slice(), 25).stop_tokens([7]);
            let mut search = BeamSearch::start(&mut engine, request, options).unwrap();
            let after = engine.submit(Request::new(prompt(7, 20), 40).priority(1)).unwrap();
            let mut i = 0;
            while search.poll(&mut engine).unwrap().is_none() {
                i += 1;
                // Sometimes several steps between two looks.
                let status = match i % 3 {
                    0 => engine.step_within(Duration::from_micros(300)).unwrap(),
                    1 => engine.step_within(Duration::ZERO).unwrap(),
                    _ => engine.step().unwrap(),
                };
                engine.ledger().check();
                assert!(i < 20_000, "{status:?}: it does not end");
            }
            same(&search, &expected, &format!("policy {policy}"));
            while engine.step().unwrap() != Status::Idle(None) {}
            for (seq, p) in [(before, prompt(6, 20)), (after, prompt(7, 20))] {
                let said: Vec<_> = std::iter::from_fn(|| engine.next_event_of(seq))
                    .filter_map(|e| if let EventKind::Token { token, .. } = e.kind { Some(token) } else { None })
                    .collect();
                assert_eq!(said, continuation(&p, 40));
            }
            preemptions += engine.ledger().stats().preemptions;
            empty(&engine);
        }
    }
    assert!(preemptions > 0, "the pool was to be too small");
}

#[test]
fn where_every_call_may_fail() {
    let p = prompt(2, 20);
    let options = BeamOptions::new(3);
    let (expected, _) = naive(&mut fake::row, &p, 6, &[], options);
    for first in 1.. {
        let faults = Faults::at(first, 3);
        let mut engine = fake::engine(FakeSizes::default(), &faults);
        let mut search = BeamSearch::start(&mut engine, Request::new(p.as_slice(), 6), options).unwrap();
        while search.poll(&mut engine).unwrap().is_none() {
            let _ = engine.step();
            engine.ledger().check();
        }
        same(&search, &expected, &format!("call {first} fails"));
        empty(&engine);
        if faults.calls.load(Ordering::Relaxed) < first {
            assert!(first > 20);
            break;
        }
    }
}

#[test]
fn beams_share_their_blocks_and_give_them_back() {
    let mut engine = engine(FakeSizes { blocks: 40, tokens: 128, seqs: 6, ..FakeSizes::default() });
    let p = prompt(4, 100);
    let mut search = BeamSearch::start(&mut engine, Request::new(p.as_slice(), 40), BeamOptions::new(6)).unwrap();
    let mut most = 0;
    while search.poll(&mut engine).unwrap().is_none() {
        let stats = engine.ledger().stats();
        assert!(engine.ledger().counts().running <= 6);
        most = most.max(stats.active);
        engine.step().unwrap();
    }
    // Six whole blocks of the prompt once; at most three more for each beam.
    assert!(most > 7 && most <= 6 + 6 * 3, "{most} blocks");
    empty(&engine);

    // Given up half way, in each way.
    for how in 0..4 {
        let mut search = BeamSearch::start(&mut engine, Request::new(p.as_slice(), 40), BeamOptions::new(4)).unwrap();
        for _ in 0..5 {
            assert_eq!(search.poll(&mut engine).unwrap(), None);
            engine.step().unwrap();
        }
        match how {
            0 => drop(search),
            1 => search.cancel(&mut engine),
            2 => {
                // One of its sequences is ended by somebody else.
                let seq = engine.ledger().all().map(|v| v.id()).min().unwrap();
                engine.cancel(seq).unwrap();
                assert_eq!(search.poll(&mut engine).unwrap(), Some(FinishReason::Cancelled));
            }
            _ => {
                let mut other = self::engine(FakeSizes::default());
                assert_eq!(search.poll(&mut other).unwrap(), Some(FinishReason::Cancelled));
                drop(search);
            }
        }
        engine.step().unwrap();
        assert_eq!(engine.next_event(), None);
        empty(&engine);
    }
}

#[test]
fn a_full_engine_and_a_small_vocabulary() {
    // All tokens but three end: fewer beams than wanted at first, and no room for more later.
    let mut engine = engine(FakeSizes { max_seqs: 8, ..FakeSizes::default() });
    let stop: Vec<TokenId> = (3..VOCAB as TokenId).collect();
    let p = prompt(1, 10);
    let options = BeamOptions { stop: BeamStop::Sure, length_penalty: 30.0, ..BeamOptions::new(8) };
    let request = Request::new(p.as_slice(), 5).stop_tokens(stop.as_slice());
    let mut search = BeamSearch::start(&mut engine, request, options).unwrap();
    let mut others = Vec::new();
    let mut refused = 0;
    let end = loop {
        match search.poll(&mut engine) {
            Ok(Some(end)) => break end,
            Ok(None) => {}
            Err(error) => {
                assert_eq!(error, SubmitError::QueueFull { limit: 8 });
                refused += 1;
                others.drain(..).for_each(|seq| engine.cancel(seq).unwrap());
                continue;
            }
        }
        if refused == 0 {
            while let Ok(seq) = engine.submit(Request::new([1], 3)) {
                others.push(seq);
            }
        }
        engine.step().unwrap();
        others.retain(|seq| engine.view(*seq).is_some());
    };
    let (expected, why) = naive(&mut fake::row, &p, 5, &stop, options);
    assert_eq!(end, why);
    same(&search, &expected, "a full engine");
    assert_eq!(refused, 1);
}

#[test]
fn refused_searches() {
    let mut engine = engine(FakeSizes { max_seqs: 6, ..FakeSizes::default() });
    let plain = || Request::new([1, 2], 4);
    let penalty = |length_penalty| BeamOptions { length_penalty, ..BeamOptions::new(2) };
    for (request, options, name) in [
        (plain(), BeamOptions::new(0), "width"),
        (plain(), BeamOptions::new(256), "width"),
        (plain().stop_tokens([1, 1, 2]), BeamOptions::new(254), "width"),
        (plain(), penalty(f64::NAN), "length_penalty"),
        (plain(), penalty(f64::INFINITY), "length_penalty"),
        (plain().sampling(SamplingParams::default().temperature(1.0)), BeamOptions::new(2), "sampling"),
        (plain().hold(true), BeamOptions::new(2), "request"),
        (plain().steered(3), BeamOptions::new(2), "sampling"),
        (Request { steered: true, ..plain() }, BeamOptions::new(2), "request"),
    ] {
        match BeamSearch::start(&mut engine, request, options).err() {
            Some(SubmitError::Parameter { name: found, .. }) => assert_eq!(found, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    assert_eq!(BeamSearch::start(&mut engine, plain(), BeamOptions::new(7)).err(), Some(SubmitError::QueueFull { limit: 6 }));
    assert_eq!(BeamSearch::start(&mut engine, Request::new([1], 0), BeamOptions::new(2)).err(), Some(SubmitError::NoTokens));
    empty(&engine);
    // A broken row ends it.
    let mut search = BeamSearch::start(&mut engine, Request::new([3, NAN], 4), BeamOptions::new(2)).unwrap();
    assert!(matches!(run(&mut engine, &mut search), FinishReason::Failed(_)));
    empty(&engine);
}

/// Every hypothesis of the other search has a sequence and a key of its own, and is run from its first token.
#[test]
fn with_real_models() {
    for name in ["llama_mha_f32", "llama_rope_dynamic", "gemma2"] {
        let files = open(&fixtures().join("arch").join(name));
        let vocab = files.spec().vocab as u32;
        let config = EngineConfig { cache_tokens: 1024, max_batch: 4, step_tokens: 16, ..exact() };
        let p: Vec<_> = (0..19).map(|i| (i * i * 7 + i * 3 + 5) % vocab).collect();
        let mut scratch = Engine::new(&files, EngineConfig { step_tokens: 64, ..config.clone() }).unwrap();
        let last = Arc::new(Mutex::new(Vec::new()));
        let seen = last.clone();
        scratch.observe(move |row| *seen.lock().unwrap() = row.logits.to_vec());
        let mut key = 0;
        let mut row = |tokens: &[TokenId]| {
            key += 1;
            let seq = scratch.submit(Request { key, ..Request::new(tokens, 1) }).unwrap();
            while scratch.view(seq).is_some() {
                scratch.step().unwrap();
            }
            std::mem::take(&mut *last.lock().unwrap())
        };
        for width in [3, 6] {
            let stop: Vec<_> = (0..vocab).step_by(17).collect();
            let options = BeamOptions::new(width);
            let mut engine = Engine::new(&files, config.clone()).unwrap();
            let request = Request::new(p.as_slice(), 12).stop_tokens(stop.as_slice());
            let mut search = BeamSearch::start(&mut engine, request, options).unwrap();
            let end = run(&mut engine, &mut search);
            let (expected, why) = naive(&mut row, &p, 12, &stop, options);
            assert_eq!(end, why, "{name}");
            same(&search, &expected, name);
            empty(&engine);
        }
    }
}
