//! Several samples of one prompt: the prompt is run once, its blocks are shared, and each sample says what it says alone, bit for
//! bit, whatever becomes of the others.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::engines::open;
use common::fake::{self, FakeSizes, Faults, INFINITE, NAN, NOTHING};
use common::golden::fixtures;
use common::lane::{Lane, Rows};
use loquat::engine::{Engine, EngineConfig, FinishReason, Request, Status};
use loquat::sched::{ContinuousBatching, Counts, DynamicBatching, Scheduler, SeqState, StaticBatching};
use loquat::{BestOf, BlockGroup, Event, EventKind, Ranking, SamplingParams, SeqId, SubmitError, TokenId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|i| ((i * i + 7 * seed + 3 * i) % (NAN as usize)) as TokenId).collect()
}

fn sampling() -> SamplingParams {
    SamplingParams::default().temperature(1.0).seed(11).banned(vec![NAN, INFINITE, NOTHING])
}

fn request(p: &[TokenId], more: usize) -> Request {
    Request::new(p, more).sampling(sampling())
}

/// Tokens and rows of the `i`-th sample, as a request of its own.
fn alone(mut lane: Lane, request: &Request, i: usize) -> (Vec<TokenId>, Rows) {
    let mut request = request.clone();
    request.sampling.seed = request.sampling.sample_seed(i as u64);
    let seq = lane.submit(request);
    lane.finish(&[seq]);
    (lane.tokens_of(seq).to_vec(), lane.rows_of(seq))
}

fn fake_alone(request: &Request, i: usize) -> (Vec<TokenId>, Rows) {
    alone(Lane::around(fake::engine(FakeSizes { blocks: 13, ..FakeSizes::default() }, &Arc::default())), request, i)
}

#[track_caller]
fn same(lane: &Lane, seq: SeqId, expected: &(Vec<TokenId>, Rows), prompt: usize, what: &str) {
    assert_eq!(lane.tokens_of(seq), expected.0, "{what}");
    let rows = lane.rows_of(seq);
    let generated = expected.1.range(prompt - 1..);
    assert_eq!(rows.range(prompt - 1..).collect::<Vec<_>>(), generated.collect::<Vec<_>>(), "{what}: rows");
}

fn empty(lane: &Lane) {
    assert_eq!(lane.engine.ledger().counts(), Counts::default());
    let stats = lane.engine.ledger().stats();
    assert_eq!((stats.active, lane.engine.ledger().available_blocks()), (0, stats.blocks));
}

/// Runs to the end, pausing after each layer, and counts the tokens that were run.
fn tokens_run(lane: &mut Lane, seqs: &[SeqId]) -> usize {
    let mut run = 0;
    let mut fresh = true;
    while !seqs.iter().all(|s| lane.ended.contains_key(s)) {
        let status = lane.engine.step_within(Duration::ZERO).unwrap();
        if status == Status::Paused && fresh {
            run += lane.engine.ledger().plan_items().iter().map(|item| item.len).sum::<usize>();
        }
        fresh = status != Status::Paused;
        assert_ne!(status, Status::Idle(None), "idle with work left");
        lane.listen();
    }
    run
}

#[test]
fn the_prompt_is_run_once() {
    for len in [1, 15, 16, 17, 33, 40] {
        for n in [1, 2, 4, 7, 12] {
            let mut lane = Lane::around(fake::engine(FakeSizes { blocks: 40, ..FakeSizes::default() }, &Arc::default()));
            let (p, more) = (prompt(len, len), 6);
            let request = request(&p, more);
            let group = lane.engine.submit_group(request.clone(), n).unwrap();
            assert_eq!(group.len(), n);
            assert_eq!(lane.engine.ledger().counts(), Counts { waiting: n, ..Counts::default() });
            // All but the first token of each are run, and of those that wait for a place nothing twice.
            assert_eq!(tokens_run(&mut lane, &group), len + n * (more - 1), "{n} samples of {len} tokens");
            for (i, seq) in group.iter().enumerate() {
                same(&lane, *seq, &fake_alone(&request, i), len, &format!("sample {i} of {n}, {len} tokens"));
            }
            let stats = lane.engine.ledger().stats();
            assert!(stats.hit_tokens >= ((n - 1) * len) as u64, "{stats:?}");
            empty(&lane);
        }
    }
}

#[test]
fn blocks_are_shared() {
    let mut lane = Lane::around(fake::engine(FakeSizes { blocks: 40, tokens: 64, ..FakeSizes::default() }, &Arc::default()));
    let group = lane.engine.submit_group(request(&prompt(3, 40), 6), 4).unwrap();
    lane.step();
    assert_eq!(lane.engine.ledger().counts().running, 4);
    assert!(group.iter().all(|seq| lane.tokens_of(*seq).len() == 1));
    assert_eq!(lane.engine.ledger().stats().active, 3, "one prompt's blocks");
    let hit = |seq: &SeqId| lane.engine.view(*seq).unwrap().hit();
    assert_eq!(group.iter().map(hit).collect::<Vec<_>>(), [0, 40, 40, 40]);
    lane.step();
    assert_eq!(lane.engine.ledger().stats().active, 2 + 4, "the last block of each is its own");
    lane.finish(&group);
    // Again: the prompt is cached but for its last token, which is run for its row.
    let again = lane.engine.submit_group(request(&prompt(3, 40), 2), 3).unwrap();
    assert_eq!(tokens_run(&mut lane, &again), 1 + 3);
    empty(&lane);
}

#[test]
fn in_a_crowd_with_pauses_preemptions_and_other_regimes() {
    const WINDOWS: &[BlockGroup] = &[BlockGroup { blocks: 9, window: None }, BlockGroup { blocks: 32, window: Some(20) }];
    let base = FakeSizes { blocks: 9, ..FakeSizes::default() };
    let variants = [
        ("plain", base),
        ("swap", FakeSizes { swap: &[6], ..base }),
        ("dynamic", FakeSizes { dynamic_from: Some(24), ..base }),
        ("dynamic from the prompt on", FakeSizes { dynamic_from: Some(40), ..base }),
        ("windows", FakeSizes { groups: WINDOWS, ..base }),
        ("one at a time", FakeSizes { seqs: 1, ..base }),
    ];
    let mut preempted = 0;
    for (name, sizes) in variants {
        for policy in 0..3 {
            let scheduler: Box<dyn Scheduler> = match policy {
                0 => Box::new(ContinuousBatching::default()),
                1 => Box::new(StaticBatching::new(3).linger(Duration::ZERO)),
                _ => Box::new(DynamicBatching::new(2, Duration::ZERO)),
            };
            let mut lane = Lane::around(fake::engine_with(sizes, &Arc::default(), scheduler));
            let p = prompt(5, 40);
            let request = request(&p, 30);
            let before = lane.submit(Request::new(prompt(6, 20), 30));
            let group = lane.engine.submit_group(request.clone(), 6).unwrap();
            let after = lane.submit(Request::new(prompt(7, 20), 30).priority(1));
            let all: Vec<_> = group.iter().copied().chain([before, after]).collect();
            let mut i = 0;
            while !all.iter().all(|s| lane.ended.contains_key(s)) {
                i += 1;
                let budget = if i % 3 == 0 { Duration::MAX } else { Duration::ZERO };
                if budget == Duration::ZERO {
                    assert_ne!(lane.engine.step_within(budget).unwrap(), Status::Idle(None), "{name}: idle with work left");
                    lane.listen();
                } else {
                    assert_ne!(lane.step(), Status::Idle(None), "{name}: idle with work left");
                }
            }
            for (i, seq) in group.iter().enumerate() {
                same(&lane, *seq, &fake_alone(&request, i), p.len(), &format!("{name}, policy {policy}, sample {i}"));
            }
            preempted += lane.engine.ledger().stats().preemptions;
            empty(&lane);
        }
    }
    assert!(preempted > 10, "the pool was to be too small: {preempted}");
}

#[test]
fn every_call_may_fail() {
    let p = prompt(2, 20);
    let request = request(&p, 5);
    let expected: Vec<_> = (0..6).map(|i| fake_alone(&request, i)).collect();
    for first in 1.. {
        let faults = Faults::at(first, 2);
        let mut lane = Lane::around(fake::engine(FakeSizes::default(), &faults));
        let group = lane.engine.submit_group(request.clone(), 6).unwrap();
        while !group.iter().all(|s| lane.ended.contains_key(s)) {
            let _ = lane.engine.step();
            lane.listen();
        }
        for (seq, expected) in group.iter().zip(&expected) {
            same(&lane, *seq, expected, p.len(), &format!("call {first} fails"));
        }
        empty(&lane);
        if faults.calls.load(Ordering::Relaxed) < first {
            assert!(first > 20);
            break;
        }
    }
}

#[test]
fn any_of_them_may_end_at_any_time() {
    // A prompt of three chunks, and more samples than places.
    let p = prompt(9, 60);
    let (n, sizes) = (6, FakeSizes { blocks: 12, ..FakeSizes::default() });
    let expected: Vec<_> = (0..n).map(|i| fake_alone(&request(&p, 4), i)).collect();
    for hold in [false, true] {
        for victims in [&[0][..], &[3], &[5], &[0, 1], &[1, 0], &[0, 2, 1, 3, 4]] {
            for calls in 0..24 {
                for how in 0..3 {
                    let mut lane = Lane::around(fake::engine(sizes, &Arc::default()));
                    let group = lane.engine.submit_group(request(&p, 4).hold(hold), n).unwrap();
                    for _ in 0..calls {
                        lane.engine.step_within(Duration::ZERO).unwrap();
                    }
                    lane.listen();
                    for &v in victims {
                        match how {
                            0 => _ = lane.engine.cancel(group[v]),
                            1 => _ = lane.engine.stop(group[v]),
                            _ => drop(lane.engine.own(group[v])),
                        }
                        lane.listen();
                    }
                    let rest: Vec<_> = (0..n).filter(|i| !victims.contains(i)).collect();
                    let seqs: Vec<_> = rest.iter().map(|i| group[*i]).collect();
                    lane.finish(&seqs);
                    let what = format!("{victims:?} after {calls}, {how}");
                    for (&i, &seq) in rest.iter().zip(&seqs) {
                        assert_eq!(lane.ended[&seq], FinishReason::Length, "{what}");
                        same(&lane, seq, &expected[i], p.len(), &what);
                    }
                    for v in group {
                        let _ = lane.engine.cancel(v);
                    }
                    lane.listen();
                    empty(&lane);
                }
            }
        }
    }
}

/// One that was stopped before its prompt was run, and goes on, is not of the group any more.
#[test]
fn resumed_while_the_others_run() {
    let p = prompt(4, 60);
    let mut lane = Lane::around(fake::engine(FakeSizes { blocks: 20, ..FakeSizes::default() }, &Arc::default()));
    let group = lane.engine.submit_group(Request::new(p.as_slice(), 5).hold(true), 3).unwrap();
    lane.step();
    lane.engine.stop(group[1]).unwrap();
    lane.listen();
    assert_eq!(lane.engine.view(group[1]).unwrap().state(), SeqState::Held);
    lane.resume(group[1], Request::new([7, 8], 5));
    lane.finish(&group);
    assert_eq!(lane.tokens_of(group[0]), fake::continuation(&p, 5));
    assert_eq!(lane.tokens_of(group[1]), fake::continuation(&[&p[..], &[7, 8]].concat(), 5));
    assert_eq!(lane.tokens_of(group[2]), fake::continuation(&p, 5));
}

#[test]
fn all_or_none_at_the_door() {
    let mut lane = Lane::around(fake::engine(FakeSizes { max_seqs: 5, ..FakeSizes::default() }, &Arc::default()));
    let p = prompt(1, 9);
    let first = lane.submit(request(&p, 3));
    let before = lane.engine.ledger().counts();
    type Kind = fn(&SubmitError) -> bool;
    let refused: [(Request, usize, Kind); 7] = [
        (request(&p, 3), 5, |e| *e == SubmitError::QueueFull { limit: 5 }),
        (request(&p, 3), usize::MAX, |e| *e == SubmitError::QueueFull { limit: 5 }),
        (request(&p, 3), 0, |e| matches!(e, SubmitError::Parameter { name: "samples", .. })),
        (Request::prefill(p.as_slice()), 2, |e| matches!(e, SubmitError::Parameter { name: "samples", .. })),
        (Request::embed(p.as_slice(), loquat::Pooling::Mean), 2, |e| matches!(e, SubmitError::Parameter { name: "samples", .. })),
        (request(&p, 300), 2, |e| matches!(e, SubmitError::TooLong { .. })),
        (request(&[], 3), 2, |e| *e == SubmitError::EmptyPrompt),
    ];
    for (request, n, kind) in refused {
        let error = lane.engine.submit_group(request, n).unwrap_err();
        assert!(kind(&error), "{error}");
        assert_eq!(lane.engine.ledger().counts(), before, "{error}");
    }
    let group = lane.engine.submit_group(request(&p, 3), 4).unwrap();
    lane.finish(&group);
    lane.finish(&[first]);
    empty(&lane);
}

#[test]
fn broken_logits_end_each_of_them() {
    let mut lane = Lane::around(fake::engine(FakeSizes::default(), &Arc::default()));
    let group = lane.engine.submit_group(Request::new([3, NAN], 5), 6).unwrap();
    lane.finish(&group);
    assert!(group.iter().all(|seq| matches!(lane.ended[seq], FinishReason::Failed(_))));
    empty(&lane);
}

#[test]
fn the_same_bits_with_a_real_model() {
    for name in ["llama_mha_f32", "mistral_swa", "llama_rope_dynamic", "qwen3_moe"] {
        let files = open(&fixtures().join("arch").join(name));
        let vocab = files.spec().vocab as u32;
        let config = EngineConfig { cache_tokens: 512, max_batch: 4, step_tokens: 16, ..EngineConfig::default() };
        for (len, prompt_logits) in [(1, false), (16, false), (37, false), (37, true)] {
            let config = EngineConfig { prompt_logits, ..config.clone() };
            let p: Vec<_> = (0..len as u32).map(|i| (i * i * 7 + i * 3 + 5) % vocab).collect();
            let sampling = SamplingParams::default().temperature(0.9).top_p(0.95).repetition_penalty(1.1).seed(5);
            let request = Request { prompt_logits, ..Request::new(p.as_slice(), 12).sampling(sampling) };
            let mut lane = Lane::new(&files, config.clone());
            let group = lane.engine.submit_group(request.clone(), 6).unwrap();
            lane.finish(&group);
            for (i, seq) in group.iter().enumerate() {
                let expected = alone(Lane::new(&files, config.clone()), &request, i);
                same(&lane, *seq, &expected, len, &format!("{name}, sample {i} of {len} tokens"));
            }
            let shown = |seq: &SeqId| lane.rows_of(*seq).len();
            let first = if prompt_logits { len + 11 } else { 12 };
            assert_eq!(group.iter().map(shown).collect::<Vec<_>>(), [first, 12, 12, 12, 12, 12], "{name}: rows shown");
            let said: std::collections::BTreeSet<_> = group.iter().map(|seq| lane.tokens_of(*seq)).collect();
            assert!(said.len() > 3, "{name}: samples are to differ");
        }
    }
}

#[test]
fn seeds_of_samples() {
    let of = |seed: u64| SamplingParams::default().seed(seed);
    for seed in [0, 1, 7, u64::MAX] {
        assert_eq!(of(seed).sample_seed(0), seed);
        let all: std::collections::BTreeSet<_> = (0..1000).map(|i| of(seed).sample_seed(i)).collect();
        assert_eq!(all.len(), 1000);
    }
    // For ever: what a seed says must not change.
    assert_eq!([1, 2, 3].map(|i| of(0).sample_seed(i)), KNOWN_SEEDS);
    assert_eq!(of(42).sample_seed(1), 42 ^ KNOWN_SEEDS[0]);
}

/// MurmurHash3's `fmix64` of 1, 2 and 3.
const KNOWN_SEEDS: [u64; 3] = [0xB456_BCFC_34C2_CB2C, 0x3ABF_2A20_6506_83E7, 0x0B51_81C5_09F8_D8CE];

fn best_of(engine: &mut Engine, request: Request, n: usize) -> BestOf {
    let mut best = BestOf::submit(engine, request, n).unwrap();
    while !best.done() {
        engine.step().unwrap();
        while let Some(event) = engine.next_event() {
            assert!(best.take(&event));
        }
    }
    best
}

#[test]
fn the_best_of_several() {
    let mut engine = fake::engine(FakeSizes { blocks: 40, ..FakeSizes::default() }, &Arc::default());
    let p = prompt(8, 20);
    let stop: Vec<_> = (0..60).step_by(6).collect();
    let best = best_of(&mut engine, request(&p, 12).stop_tokens(stop), 9);
    let lens: std::collections::BTreeSet<_> = best.samples().iter().map(|s| s.tokens.len()).collect();
    assert!(lens.len() > 2, "lengths are to differ");
    for (i, s) in best.samples().iter().enumerate() {
        // Against a sum over the rows.
        let mut tokens = p.clone();
        let mut sum = 0.0;
        for &t in &s.tokens {
            let row = fake::row(&tokens);
            let total: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
            sum += f64::from(row[t as usize]) - total.ln();
            tokens.push(t);
        }
        assert!((sum - s.logprob).abs() < 1e-6 * s.tokens.len() as f64, "sample {i}: {sum}, {}", s.logprob);
        assert!(s.complete());
    }
    let order = |ranking| best.best(9, ranking).iter().map(|s| s.seq).collect::<Vec<_>>();
    assert_ne!(order(Ranking::Sum), order(Ranking::Mean));
    for (ranking, score) in
        [(Ranking::Sum, (|s| s.logprob) as fn(&loquat::Sample) -> f64), (Ranking::Mean, |s| s.logprob / s.tokens.len() as f64)]
    {
        assert!(best.best(9, ranking).windows(2).all(|w| score(w[0]) >= score(w[1])));
        assert_eq!(best.best(3, ranking), best.best(9, ranking)[..3]);
        assert!(best.best(0, ranking).is_empty());
    }
    // Greedy ones are equal: the first comes first.
    let best = best_of(&mut engine, Request::new(p.as_slice(), 5), 4);
    let seqs = |list: Vec<&loquat::Sample>| list.iter().map(|s| s.seq).collect::<Vec<_>>();
    let in_order: Vec<_> = best.samples().iter().map(|s| s.seq).collect();
    assert_eq!(seqs(best.best(9, Ranking::Mean)), in_order);
    assert_eq!(best.samples()[3].tokens, fake::continuation(&p, 5));
}

#[test]
fn only_complete_answers_can_be_best() {
    let mut engine = fake::engine(FakeSizes::default(), &Arc::default());
    let mut best = BestOf::submit(&mut engine, request(&prompt(1, 5), 9), 3).unwrap();
    let seqs: Vec<_> = best.samples().iter().map(|s| s.seq).collect();
    engine.step().unwrap();
    engine.cancel(seqs[1]).unwrap();
    let other = engine.submit(Request::new([1], 2)).unwrap();
    let mut others = 0;
    while engine.step().unwrap() != Status::Idle(None) {
        while let Some(event) = engine.next_event() {
            others += usize::from(!best.take(&event));
        }
    }
    assert_eq!(others, 3, "{other}");
    assert!(best.done());
    let found = best.best(3, Ranking::Sum);
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|s| s.seq != seqs[1]));
    let late = Event { seq: seqs[0], kind: EventKind::Finished(FinishReason::Stop) };
    assert!(!best.take(&late), "it has ended already");
    let error = BestOf::submit(&mut engine, Request::new([1], 2).steered(3), 2).unwrap_err();
    assert!(matches!(error, SubmitError::Parameter { name: "steered", .. }), "{error}");
}
