//! What was saved goes on as if it had never been away: in engines of other threads and other blocks, with the same bits. What
//! is damaged, foreign or made up is refused, and the engine is as it was.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
#[path = "common/counting.rs"]
mod counting;
#[path = "../fuzz/bodies/digest.rs"]
mod digest;
#[path = "../fuzz/bodies/snapshot.rs"]
mod snapshot;

use common::engines::{Rows, finish, open, record};
use common::fake::{self, FakeSizes, Faults};
use common::golden::fixtures;
use common::text::Random;
use loquat::sched::{CacheStats, Counts};
use loquat::{
    Engine, EngineConfig, Error, FinishReason, GenerateOptions, KvDType, KvSave, ModelFiles, Polled, Request, SaveOptions,
    Session, SnapshotError, Status, SubmitError, TokenId,
};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

const FAMILIES: [&str; 5] = ["llama_gqa_tied_llama3", "mistral_swa", "gemma3_text", "deepseek_v2_lite", "gpt_oss"];

fn family(name: &str) -> ModelFiles {
    open(&fixtures().join("arch").join(name))
}

fn llama() -> ModelFiles {
    open(&fixtures().join("gguf/llama_f16.gguf"))
}

fn config(threads: usize, block_size: usize, kv_dtype: KvDType) -> EngineConfig {
    EngineConfig { threads, block_size, kv_dtype, cache_tokens: 1024, max_batch: 2, ..EngineConfig::default() }
}

fn prompt(seed: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|i| ((i * i + 31 * seed + 3 * i) % 251) as TokenId).collect()
}

/// Runs `tokens` and 20 more, in an engine that keeps what is cached; all of them.
fn run(engine: &mut Engine, tokens: &[TokenId]) -> Vec<TokenId> {
    let seq = engine.submit(Request::new(tokens, 20)).unwrap();
    let more = finish(engine, &[seq]).remove(0);
    [tokens, &more].concat()
}

/// Rows of logits of the answer to `tokens`, as bits, and how many tokens were found cached.
fn follow(engine: &mut Engine, key: u64, tokens: &[TokenId]) -> (usize, Vec<TokenId>, Vec<Vec<u32>>) {
    let rows = record(engine);
    let seq = engine.submit(Request { key, hold: true, ..Request::new(tokens, 8) }).unwrap();
    let said = finish(engine, &[seq]).remove(0);
    let hit = engine.view(seq).unwrap().hit();
    engine.cancel(seq).unwrap();
    engine.stop_observing();
    let rows: Rows = std::mem::take(&mut *rows.lock().unwrap());
    let bits = rows.into_values().map(|(logits, _)| logits.into_iter().map(f32::to_bits).collect()).collect();
    (hit, said, bits)
}

fn state(engine: &Engine) -> (Counts, CacheStats) {
    engine.ledger().check();
    (engine.ledger().counts(), engine.ledger().stats())
}

fn refused(result: Result<impl Sized, Error>) -> SnapshotError {
    match result.map(|_| ()) {
        Err(Error::Snapshot(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_prefix_goes_on_in_other_engines_with_the_same_bits() {
    for name in FAMILIES {
        let files = family(name);
        for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
            for (threads, from, to) in [(1, 16, 16), (2, 16, 128), (2, 64, 16), (1, 32, 256)] {
                let what = format!("{name}, {dtype}, blocks of {from} and {to}");
                let mut saver = Engine::new(&files, config(threads, from, dtype)).unwrap();
                let all = run(&mut saver, &prompt(threads, 150));
                let bytes = saver.export(0, &all, KvSave::Exact).unwrap();
                // Never saved: goes on where it is.
                let longer = [&all[..], &prompt(9, 7)].concat();
                let (cached, tokens, want) = follow(&mut saver, 0, &longer);
                assert_eq!(cached, all.len() - 1, "{what}");

                let mut other = Engine::new(&files, config(3 - threads, to, dtype)).unwrap();
                let imported = other.import(&bytes).unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!((imported.key, imported.cached), (0, all.len() - 1), "{what}");
                assert_eq!(imported.tokens, all, "{what}");
                // A second time it is all there.
                let before = state(&other);
                assert_eq!(other.import(&bytes).unwrap(), imported);
                assert_eq!(state(&other), before);
                // As bytes they are the same again, where nothing lies before a window.
                if name == "llama_gqa_tied_llama3" || name == "deepseek_v2_lite" {
                    assert_eq!(other.export(0, &all, KvSave::Exact).unwrap(), bytes, "{what}");
                }
                let got = follow(&mut other, 0, &longer);
                assert!(got == (all.len() - 1, tokens, want), "{what}: {} cached, {:?}", got.0, got.1);
                state(&other);
                // Parting from it earlier, within the window or behind it, meets nothing but what was computed.
                for cut in [all.len() - 3, all.len() - 12, 140, 130, 100, 5] {
                    let other_way = [&all[..cut], &[255], &prompt(77, 5)[..]].concat();
                    let (hit, tokens, bits) = follow(&mut other, 0, &other_way);
                    assert_eq!(hit, cut, "{what}");
                    let mut fresh = Engine::new(&files, config(1, 16, dtype)).unwrap();
                    let want = follow(&mut fresh, 0, &other_way);
                    assert!((tokens, bits) == (want.1, want.2), "{what}: cut at {cut}");
                }
            }
        }
    }
}

#[test]
fn a_window_whose_past_is_gone_fits_blocks_of_the_same_size_or_less() {
    let files = family("mistral_swa");
    let small = EngineConfig { cache_tokens: 64, max_batch: 1, step_tokens: 16, ..config(1, 16, KvDType::F16) };
    let mut saver = Engine::new(&files, small).unwrap();
    let all = run(&mut saver, &prompt(3, 200));
    let bytes = saver.export(0, &all, KvSave::Exact).unwrap();
    let (_, tokens, want) = follow(&mut saver, 0, &all);
    for (block_size, cached) in [(16, all.len() - 1), (256, 0)] {
        let mut other = Engine::new(&files, config(1, block_size, KvDType::F16)).unwrap();
        assert_eq!(other.import(&bytes).unwrap().cached, cached);
        let got = follow(&mut other, 0, &all);
        assert!(got == (cached, tokens.clone(), want.clone()), "blocks of {block_size}: {}", got.0);
    }
}

#[test]
fn a_full_engine_takes_nothing_in() {
    let files = family("llama_gqa_tied_llama3");
    let mut saver = Engine::new(&files, config(1, 16, KvDType::F16)).unwrap();
    let all = run(&mut saver, &prompt(1, 130));
    let bytes = saver.export(0, &all, KvSave::Exact).unwrap();
    let mut full = Engine::new(&files, EngineConfig { cache_tokens: 256, ..config(1, 16, KvDType::F16) }).unwrap();
    let seq = full.submit(Request::new(prompt(2, 200), 20)).unwrap();
    full.step().unwrap();
    full.step().unwrap();
    let before = state(&full);
    let error = full.import(&bytes).unwrap_err();
    assert!(matches!(error, Error::Submit(SubmitError::TooLong { tokens: 149, .. })), "{error:?}");
    assert_eq!(state(&full), before);
    finish(&mut full, &[seq]);
    assert_eq!(full.import(&bytes).unwrap().cached, 149);
    state(&full);
}

#[test]
fn the_middle_of_a_step_is_no_obstacle() {
    let files = family("llama_gqa_tied_llama3");
    let mut saver = Engine::new(&files, config(1, 16, KvDType::F32)).unwrap();
    let all = run(&mut saver, &prompt(1, 100));
    let bytes = saver.export(0, &all, KvSave::Exact).unwrap();
    let (_, tokens, want) = follow(&mut saver, 0, &all);
    let (_, other_tokens, _) = follow(&mut saver, 0, &prompt(5, 90));

    let mut engine = Engine::new(&files, EngineConfig { cache_tokens: 256, ..config(1, 16, KvDType::F32) }).unwrap();
    let stays = engine.submit(Request::new(prompt(5, 90), 8)).unwrap();
    let goes = engine.submit(Request::new(prompt(6, 60), 8)).unwrap();
    assert_eq!(engine.step_within(Duration::ZERO).unwrap(), Status::Paused);
    // Its blocks are free at once, and the step that is open would still write into them.
    engine.cancel(goes).unwrap();
    assert_eq!(engine.import(&bytes).unwrap().cached, all.len() - 1);
    let got = follow_beside(&mut engine, stays, &all);
    assert!(got == (all.len() - 1, tokens, want), "{} cached", got.0);
    let mut said = Vec::new();
    while let Some(event) = engine.next_event() {
        if let (true, loquat::EventKind::Token { token, .. }) = (event.seq == stays, event.kind) {
            said.push(token);
        }
    }
    assert_eq!(said, other_tokens);
}

/// As [`follow`], with another sequence under way.
fn follow_beside(engine: &mut Engine, other: loquat::SeqId, tokens: &[TokenId]) -> (usize, Vec<TokenId>, Vec<Vec<u32>>) {
    let rows = record(engine);
    let seq = engine.submit(Request { hold: true, ..Request::new(tokens, 8) }).unwrap();
    let mine = engine.own(seq);
    while engine.step().unwrap() != Status::Idle(None) {}
    let hit = engine.view(seq).unwrap().hit();
    let said = engine.view(seq).unwrap().tokens()[tokens.len()..].to_vec();
    drop(mine);
    let rows: Rows = std::mem::take(&mut *rows.lock().unwrap());
    let of_mine = rows.into_iter().filter(|((s, _), _)| *s != other);
    let bits = of_mine.map(|(_, (logits, _))| logits.into_iter().map(f32::to_bits).collect()).collect();
    (hit, said, bits)
}

fn options(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, ignore_end: true, ..GenerateOptions::default() }
}

fn answer(session: &mut Session, engine: &mut Engine, n: usize) -> String {
    session.start(engine, &options(n)).unwrap();
    let mut text = String::new();
    loop {
        match session.poll(engine).unwrap() {
            Polled::Text(more) => text.push_str(&more),
            Polled::Pending => _ = engine.step().unwrap(),
            Polled::Done(FinishReason::Length) => return text,
            Polled::Done(other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_conversation_comes_back_and_goes_on() {
    let files = llama();
    for kv in [KvSave::None, KvSave::Exact, KvSave::Int8] {
        let mut one = Engine::new(&files, config(1, 16, KvDType::F16)).unwrap();
        let mut s = Session::new(&files).unwrap();
        s.push("the cat sat on a mat and the dog").unwrap();
        answer(&mut s, &mut one, 20);
        let bytes = s.save(&mut one, SaveOptions { kv }).unwrap();
        let len = s.tokens().len();
        // Into another, and into the same.
        let mut two = Engine::new(&files, config(2, 64, KvDType::F16)).unwrap();
        let mut there = Session::restore(&files, &mut two, &bytes).unwrap();
        let mut here = Session::restore(&files, &mut one, &bytes).unwrap();
        let mut fork = there.fork(&mut two).unwrap();
        assert_eq!((there.tokens(), there.generated(), there.reused()), (s.tokens(), s.generated(), s.reused()));
        assert_eq!(there.poll(&mut two).unwrap(), Polled::Done(FinishReason::Length));
        // Saved again before anything was run.
        let again = there.save(&mut two, SaveOptions { kv: KvSave::Exact }).unwrap();
        if kv == KvSave::Exact {
            assert_eq!(again, bytes);
        }
        for session in [&mut s, &mut there, &mut here, &mut fork] {
            session.push(" went home").unwrap();
        }
        let want = answer(&mut s, &mut one, 12);
        let got = [answer(&mut there, &mut two, 12), answer(&mut fork, &mut two, 12), answer(&mut here, &mut one, 12)];
        if kv == KvSave::Int8 {
            // Close, not the same; and nobody else's business: what was computed in the same engine is still what it was.
            assert_eq!([there.reused(), here.reused()], [len - 1; 2]);
            let mut plain = Session::new(&files).unwrap();
            plain.push_tokens(&s.tokens()[..s.tokens().len() - 12]);
            assert_eq!(answer(&mut plain, &mut two, 12), want);
            assert_eq!(plain.reused(), 0);
        } else {
            assert_eq!(got, [&want, &want, &want].map(String::clone));
            assert_eq!(there.tokens(), s.tokens());
            assert_eq!(there.reused(), if kv == KvSave::None { 0 } else { len - 1 });
        }
        drop((s, here));
        assert_eq!(one.step().unwrap(), Status::Idle(None));
        assert_eq!(state(&one).0, Counts::default());
    }
}

#[test]
fn messages_and_variables_survive() {
    // The tokenizer and template of the fuzz target's model: messages add to each other.
    let files = snapshot::model();
    let mut one = snapshot::engine(&files);
    let mut s = Session::new(&files).unwrap();
    let variables = serde_json::json!({ "x": [0.1, 1e300, -7, u64::MAX, null, true, { "deep": "\u{1f980}" }] });
    s.render_options().extra = variables.as_object().unwrap().clone();
    s.render_options().now = Some((1_700_000_000, -3600));
    s.render_options().tools = Some(serde_json::json!([{ "name": "roll", "sides": 6.5 }]));
    s.say("user", "ab".repeat(30));
    answer(&mut s, &mut one, 20);
    s.say("user", "not answered");
    let bytes = s.save(&mut one, SaveOptions::default()).unwrap();
    let mut two = snapshot::engine(&files);
    let mut t = Session::restore(&files, &mut two, &bytes).unwrap();
    assert_eq!(t.messages(), s.messages());
    assert_eq!(t.messages().len(), 3);
    assert_eq!(t.render_options().clone(), s.render_options().clone());
    assert_eq!(t.unsay(), s.unsay());
    // An answer was started to the others.
    assert_eq!(t.unsay(), None);
    for session in [&mut s, &mut t] {
        session.say("user", "bab");
    }
    assert_eq!(answer(&mut t, &mut two, 10), answer(&mut s, &mut one, 10));
    assert_eq!(t.tokens(), s.tokens());
    assert!(s.messages().len() == 4 && t.messages() == s.messages());
    // What the template renders as before is not run again.
    let files = llama();
    let mut one = Engine::new(&files, config(1, 16, KvDType::F16)).unwrap();
    let mut two = Engine::new(&files, config(1, 64, KvDType::F16)).unwrap();
    let mut s = Session::new(&files).unwrap();
    s.say("user", "the cat sat on a mat");
    answer(&mut s, &mut one, 20);
    let bytes = s.save(&mut one, SaveOptions::default()).unwrap();
    let mut t = Session::restore(&files, &mut two, &bytes).unwrap();
    for session in [&mut s, &mut t] {
        session.say("user", "and the dog");
    }
    assert_eq!(answer(&mut t, &mut two, 10), answer(&mut s, &mut one, 10));
    assert!(s.reused() > 20 && t.reused() == s.reused(), "{} and {}", s.reused(), t.reused());
    // Raw text stays raw.
    let mut raw = Session::new(&files).unwrap();
    raw.push("ab").unwrap();
    let bytes = raw.save(&mut one, SaveOptions::default()).unwrap();
    let mut raw = Session::restore(&files, &mut two, &bytes).unwrap();
    raw.say("user", "ab");
    assert!(matches!(raw.start(&mut two, &options(1)), Err(Error::Text(loquat::TextError::Mixed))));
}

#[test]
fn an_answer_under_way_is_saved_as_far_as_it_came() {
    let files = llama();
    for company in [false, true] {
        let mut e = Engine::new(&files, config(1, 16, KvDType::F16)).unwrap();
        let (mut s, mut other) = (Session::new(&files).unwrap(), Session::new(&files).unwrap());
        s.push_tokens(&prompt(1, 40));
        s.start(&mut e, &options(30)).unwrap();
        (0..8).for_each(|_| _ = e.step().unwrap());
        if company {
            other.push("a dog").unwrap();
            other.start(&mut e, &options(30)).unwrap();
            assert_eq!(e.step_within(Duration::ZERO).unwrap(), Status::Paused);
        }
        let bytes = s.save(&mut e, SaveOptions::default()).unwrap();
        s.push("and").unwrap();
        // What was pushed since is not in it.
        let mut two = Engine::new(&files, config(1, 32, KvDType::F16)).unwrap();
        let mut t = Session::restore(&files, &mut two, &bytes).unwrap();
        assert!(t.tokens().len() > 40 && s.tokens().starts_with(t.tokens()));
        let tokens = t.tokens().to_vec();
        answer(&mut t, &mut two, 5);
        let least = if company { tokens.len() / 16 * 16 - 16 } else { tokens.len() - 1 };
        assert!(t.reused() >= least, "{} of {}", t.reused(), tokens.len());
        let mut fresh = Engine::new(&files, config(1, 16, KvDType::F16)).unwrap();
        let seq = fresh.submit(Request::new(tokens, 5)).unwrap();
        assert_eq!(t.tokens()[t.tokens().len() - 5..], finish(&mut fresh, &[seq])[0]);
        state(&e);
    }
}

#[test]
fn eight_bits_are_small_and_close() {
    for (name, bound) in [("llama_gqa_tied_llama3", 5e-3), ("gemma3_text", 5e-3), ("deepseek_v2_lite", 5e-3)] {
        let files = family(name);
        for (dtype, share) in [(KvDType::F32, 0.25), (KvDType::F16, 0.5)] {
            let mut one = Engine::new(&files, config(1, 16, dtype)).unwrap();
            let mut two = Engine::new(&files, config(2, 16, dtype)).unwrap();
            let mut worst = 0.0f64;
            for seed in 0..8 {
                let all = run(&mut one, &prompt(seed, 120));
                let [none, exact, small] =
                    [KvSave::None, KvSave::Exact, KvSave::Int8].map(|kv| one.export(0, &all, kv).unwrap().len() as f64);
                let ratio = (small - none) / (exact - none);
                // Two bytes for each of 16 values, or for 24 and 8.
                assert!((share..share * 1.15).contains(&ratio), "{name}, {dtype}: {ratio}");
                let bytes = one.export(0, &all, KvSave::Int8).unwrap();
                let imported = two.import(&bytes).unwrap();
                assert_ne!(imported.key, 0);
                let (want, got) = (follow(&mut one, 0, &all), follow(&mut two, imported.key, &all));
                assert_eq!((got.0, want.0), (all.len() - 1, all.len() - 1));
                worst = worst.max(divergence(&want.2[0], &got.2[0]));
            }
            println!("{name}, {dtype}: {worst:e} nats");
            assert!(worst > 0.0 && worst < bound, "{name}, {dtype}: {worst:e} nats");
        }
    }
}

/// Kullback and Leibler's, of the distribution that logits stand for, in nats.
fn divergence(p: &[u32], q: &[u32]) -> f64 {
    let logs = |bits: &[u32]| -> Vec<f64> {
        let x: Vec<f64> = bits.iter().map(|b| f64::from(f32::from_bits(*b))).collect();
        let most = x.iter().copied().fold(f64::MIN, f64::max);
        let sum = x.iter().map(|v| (v - most).exp()).sum::<f64>().ln() + most;
        x.iter().map(|v| v - sum).collect()
    };
    logs(p).iter().zip(logs(q)).map(|(p, q)| p.exp() * (p - q)).sum()
}

#[test]
fn eight_bits_fit_a_cache_of_another_type() {
    let files = llama();
    let mut one = Engine::new(&files, config(1, 16, KvDType::F32)).unwrap();
    let mut two = Engine::new(&files, config(1, 16, KvDType::F16)).unwrap();
    let all = run(&mut one, &prompt(1, 60));
    let error = refused(two.import(&one.export(0, &all, KvSave::Exact).unwrap()));
    let SnapshotError::Cache { expected, found, .. } = &error else { panic!("{error:?}") };
    assert_eq!([&expected[..], found], ["F16", "F32"]);
    assert_eq!(two.import(&one.export(0, &all, KvSave::Int8).unwrap()).unwrap().cached, all.len() - 1);
    assert_eq!(two.import(&one.export(0, &all, KvSave::None).unwrap()).unwrap().cached, 0);
}

#[test]
fn foreign_models_are_refused() {
    let (files, foreign) = (llama(), open(&fixtures().join("gguf/llama_q8_0.gguf")));
    assert_eq!(files.fingerprint(), llama().fingerprint());
    assert_eq!(files.fingerprint(), files.clone().fingerprint());
    let mut one = Engine::new(&files, config(1, 16, KvDType::F16)).unwrap();
    let mut two = Engine::new(&foreign, config(1, 16, KvDType::F16)).unwrap();
    let mut s = Session::new(&files).unwrap();
    s.push("the cat").unwrap();
    answer(&mut s, &mut one, 4);
    for kv in [KvSave::None, KvSave::Exact] {
        let bytes = s.save(&mut one, SaveOptions { kv }).unwrap();
        let before = state(&two);
        let error = refused(Session::restore(&foreign, &mut two, &bytes));
        let SnapshotError::Model { expected, found } = &error else { panic!("{error:?}") };
        assert!(expected.contains(&foreign.fingerprint().to_string()), "{error}");
        assert!(found.contains(&files.fingerprint().to_string()), "{error}");
        assert_eq!(state(&two), before);
        // The files and the engine have to be of one model, too.
        assert!(matches!(refused(Session::restore(&foreign, &mut one, &bytes)), SnapshotError::Model { .. }));
        // A prefix is no session.
        let prefix = one.export(0, s.tokens(), kv).unwrap();
        assert!(matches!(refused(Session::restore(&files, &mut one, &prefix)), SnapshotError::Malformed { at: "kind", .. }));
        assert!(matches!(refused(one.import(&bytes)), SnapshotError::Malformed { at: "kind", .. }));
    }
    // Where the bytes come from makes no difference, and what they are does.
    let bytes = std::fs::read(fixtures().join("gguf/llama_f16.gguf")).unwrap();
    let in_memory = ModelFiles::from_memory("memory", bytes, &Default::default()).unwrap();
    assert_eq!(in_memory.fingerprint(), files.fingerprint());
    assert_eq!(snapshot::seeded(7).fingerprint(), snapshot::model().fingerprint());
    assert_ne!(snapshot::seeded(8).fingerprint(), snapshot::model().fingerprint());
    // All fixtures differ, though some in the format of their weights alone.
    let mut all: Vec<_> = FAMILIES.iter().map(|name| family(name).fingerprint()).collect();
    all.extend(
        ["llama_f16", "llama_f32", "llama_bf16", "llama_q8_0"]
            .map(|n| open(&fixtures().join(format!("gguf/{n}.gguf"))).fingerprint()),
    );
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
}

#[test]
fn a_model_that_nobody_named_has_no_snapshots() {
    let mut engine = fake::engine(FakeSizes::default(), &Faults::at(0, 0));
    assert_eq!(engine.fingerprint(), None);
    assert_eq!(refused(engine.export(0, &[1, 2, 3], KvSave::None)), SnapshotError::Unidentified);
    assert_eq!(refused(engine.import(b"")), SnapshotError::Unidentified);
    engine.identify(snapshot::model().fingerprint());
    let bytes = engine.export(7, &[1, 2, 3], KvSave::Exact).unwrap();
    let imported = engine.import(&bytes).unwrap();
    assert_eq!((imported.key, &imported.tokens[..], imported.cached), (7, &[1, 2, 3][..], 0));
    let alien = engine.export(0, &[1, 1 << 20], KvSave::None);
    assert!(matches!(alien, Err(Error::Submit(SubmitError::UnknownToken { at: 1, .. }))), "{:?}", alien.map(|_| ()));
    // Its cache holds nothing that a snapshot knows.
    let seq = engine.submit(Request::prefill([1, 2, 3])).unwrap();
    finish(&mut engine, &[seq]);
    assert!(matches!(refused(engine.export(0, &[1, 2, 3], KvSave::Exact)), SnapshotError::Cache { .. }));
}

#[test]
fn every_cut_and_every_flip_is_seen() {
    let files = snapshot::model();
    let mut engine = snapshot::engine(&files);
    let before = state(&engine);
    for seed in snapshot::seeds() {
        let whole = &seed[1..];
        for len in 0..whole.len() {
            assert!(Session::restore(&files, &mut engine, &whole[..len]).is_err(), "cut to {len}");
        }
        assert!(Session::restore(&files, &mut engine, &[whole, &[0]].concat()).is_err());
        let mut flipped = whole.to_vec();
        for bit in 0..8 * whole.len() {
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Session::restore(&files, &mut engine, &flipped).is_err(), "bit {bit}");
            flipped[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(state(&engine), before);
    }
}

#[test]
fn a_version_from_elsewhere_says_so() {
    let files = snapshot::model();
    let mut engine = snapshot::engine(&files);
    let mut bytes = snapshot::seeds()[0][1..].to_vec();
    bytes[8] = 2;
    snapshot::seal(&mut bytes);
    let error = refused(Session::restore(&files, &mut engine, &bytes));
    assert_eq!(error, SnapshotError::Version { expected: 1, found: 2 });
    bytes[8] = 1;
    snapshot::seal(&mut bytes);
    Session::restore(&files, &mut engine, &bytes).unwrap();
}

/// Of what is sealed again, most fields are still checked by nobody but the reader.
#[test]
fn made_up_snapshots_do_no_harm() {
    let seeds = snapshot::seeds();
    let mut random = Random(1);
    for seed in &seeds {
        for seals in [0, 1] {
            snapshot::run(&[&[seals], &seed[1..]].concat());
            for len in (0..seed.len()).step_by(7) {
                snapshot::run(&[&[seals], &seed[1..][..len.min(seed.len() - 1)]].concat());
            }
        }
    }
    for round in 0..12_000 {
        let mut data = seeds[random.below(seeds.len())].clone();
        data[0] = u8::from(round % 4 > 0);
        for _ in 0..1 + random.below(3) {
            // Half of the time among the fields before the records, or behind them.
            let len = data.len();
            let at = match random.below(4) {
                0 | 1 => 1 + random.below(len - 1),
                2 => 33 + random.below((len - 33).min(220)),
                _ => len - 1 - random.below((len - 1).min(260)),
            };
            match random.below(6) {
                0 => data[at] = random.next() as u8,
                1 => data[at] ^= 1 << random.below(8),
                2 => data[at..(at + 8).min(len)].fill([0, 0x7f, 0x80, 0xff][random.below(4)]),
                3 => data.insert(at, random.next() as u8),
                4 => _ = data.drain(at..(at + 1 + random.below(16)).min(len)),
                _ => {
                    let other = &seeds[random.below(seeds.len())];
                    let from = random.below(other.len());
                    let end = (from + random.below(40)).min(other.len());
                    data.splice(at..at, other[from..end].iter().copied());
                }
            }
        }
        let ((), peak) = counting::peak_of(|| snapshot::run(&data));
        // What it takes to answer, and a multiple of what was read.
        assert!(peak < 64 * data.len() + (1 << 20), "{peak} bytes for {} in round {round}", data.len());
    }
}
