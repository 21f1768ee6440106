//! Conversations: several in an engine, moved between engines, stopped anywhere, cut and mixed. On a tiny GGUF with a tokenizer of
//! its own; what it says is nonsense, and has to be the same nonsense.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::engines::open;
use common::golden::fixtures;
use loquat::sched::{Scheduler, StepBuilder};
use loquat::{
    Engine, EngineConfig, Error, FinishReason, GenerateOptions, ModelFiles, Polled, RunError, Session, Status, SubmitError,
    TextError, TokenId,
};
use std::time::Duration;

fn files() -> ModelFiles {
    open(&fixtures().join("gguf/llama_f16.gguf"))
}

fn engine(files: &ModelFiles) -> Engine {
    Engine::new(files, EngineConfig { cache_tokens: 1024, ..EngineConfig::default() }).unwrap()
}

fn options(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, ignore_end: true, ..GenerateOptions::default() }
}

/// Steps and polls until the answer is done; its text.
fn answer(session: &mut Session, engine: &mut Engine) -> (String, FinishReason) {
    let mut text = String::new();
    for _ in 0..10_000 {
        match session.poll(engine).unwrap() {
            Polled::Text(more) => text.push_str(&more),
            Polled::Pending => _ = engine.step().unwrap(),
            Polled::Done(reason) => return (text, reason),
        }
    }
    panic!("an answer without end");
}

fn tokens_of(files: &ModelFiles, prompt: &str, n: usize) -> Vec<TokenId> {
    let (mut e, mut s) = (engine(files), Session::new(files).unwrap());
    s.push(prompt).unwrap();
    s.start(&mut e, &options(n)).unwrap();
    answer(&mut s, &mut e);
    s.tokens().to_vec()
}

#[test]
fn sessions_share_an_engine() {
    let files = files();
    let (a, b) = (tokens_of(&files, "the cat", 12), tokens_of(&files, "a dog and", 20));
    let mut e = engine(&files);
    let mut sessions = [Session::new(&files).unwrap(), Session::new(&files).unwrap()];
    sessions[0].push("the cat").unwrap();
    sessions[1].push("a dog and").unwrap();
    sessions[0].start(&mut e, &options(12)).unwrap();
    sessions[1].start(&mut e, &options(20)).unwrap();
    while e.step_within(Duration::from_micros(50)).unwrap() != Status::Idle(None) {
        // A listener for other sequences takes nothing away from sessions.
        assert_eq!(e.next_event(), None);
        for s in &mut sessions {
            while let Polled::Text(_) = s.poll(&mut e).unwrap() {}
        }
    }
    for (s, want) in sessions.iter_mut().zip([a, b]) {
        answer(s, &mut e);
        assert_eq!(s.tokens(), want);
    }
}

#[test]
fn a_session_in_another_engine_takes_its_conversation_along() {
    let files = files();
    let whole = tokens_of(&files, "the cat", 12);
    let (mut one, mut two) = (engine(&files), engine(&files));
    let (mut a, mut b) = (Session::new(&files).unwrap(), Session::new(&files).unwrap());
    a.push("the cat").unwrap();
    b.push("something else altogether").unwrap();
    a.start(&mut one, &options(4)).unwrap();
    answer(&mut a, &mut one);
    b.start(&mut two, &options(4)).unwrap();
    answer(&mut b, &mut two);
    let other = b.tokens().to_vec();
    // Both have the same name in their engines.
    assert_eq!(a.seq(), b.seq());
    a.start(&mut two, &options(8)).unwrap();
    assert_eq!(a.reused(), 0);
    answer(&mut a, &mut two);
    assert_eq!(a.tokens(), whole);
    assert_eq!(two.view(b.seq().unwrap()).unwrap().tokens(), other);
}

#[test]
fn an_engine_that_is_gone_ends_the_answer() {
    let files = files();
    let whole = tokens_of(&files, "the cat", 12);
    for poll_first in [false, true] {
        let (mut one, mut s) = (engine(&files), Session::new(&files).unwrap());
        s.push("the cat").unwrap();
        s.start(&mut one, &options(12)).unwrap();
        one.step().unwrap();
        drop(one);
        let mut two = engine(&files);
        if poll_first {
            assert_eq!(s.poll(&mut two).unwrap(), Polled::Done(FinishReason::Cancelled));
            let len = s.tokens().len();
            s.truncate(&mut two, len).unwrap();
        }
        s.start(&mut two, &options(12)).unwrap();
        answer(&mut s, &mut two);
        assert_eq!(s.tokens(), whole);
    }
}

#[test]
fn stop_never_waits() {
    let files = files();
    let mut e = engine(&files);
    let (mut s, mut other) = (Session::new(&files).unwrap(), Session::new(&files).unwrap());
    let long = "the cat sat on a mat and ".repeat(4);
    for company in [false, true] {
        s = s.fork(&mut e).unwrap();
        if company {
            other.push("a dog").unwrap();
            other.start(&mut e, &options(30)).unwrap();
        }
        s.push(&long).unwrap();
        s.start(&mut e, &options(5)).unwrap();
        assert_eq!(e.step_within(Duration::ZERO).unwrap(), Status::Paused);
        s.stop(&mut e);
        // Alone its step is given up; in company it ends with the step.
        let polled = s.poll(&mut e).unwrap();
        assert_eq!(polled, if company { Polled::Pending } else { Polled::Done(FinishReason::Cancelled) });
        let (_, reason) = answer(&mut s, &mut e);
        assert_eq!(reason, FinishReason::Cancelled);
        e.ledger().check();
    }
    answer(&mut other, &mut e);
}

#[test]
fn a_new_answer_in_the_middle_of_a_step_with_others_starts_over() {
    let files = files();
    let whole = tokens_of(&files, "the cat", 6);
    let mut e = engine(&files);
    let (mut s, mut other) = (Session::new(&files).unwrap(), Session::new(&files).unwrap());
    other.push("a dog").unwrap();
    other.start(&mut e, &options(30)).unwrap();
    s.push("the cat").unwrap();
    s.start(&mut e, &options(6)).unwrap();
    assert_eq!(e.step_within(Duration::ZERO).unwrap(), Status::Paused);
    s.start(&mut e, &options(6)).unwrap();
    answer(&mut s, &mut e);
    assert_eq!(s.tokens(), whole);
    answer(&mut other, &mut e);
    drop((s, other));
    e.step().unwrap();
    assert_eq!(e.ledger().available_blocks(), e.ledger().config().groups[0].blocks);
}

#[test]
fn text_pushed_during_an_answer_comes_after_it() {
    let files = files();
    let (mut e, mut s) = (engine(&files), Session::new(&files).unwrap());
    s.push("the cat").unwrap();
    s.start(&mut e, &options(6)).unwrap();
    e.step().unwrap();
    s.push(" and a dog").unwrap();
    answer(&mut s, &mut e);
    let pushed = files.tokenizer().unwrap().encode(" and a dog", Default::default()).unwrap();
    assert!(s.tokens().ends_with(&pushed));
    let before = s.tokens().to_vec();
    s.start(&mut e, &options(3)).unwrap();
    answer(&mut s, &mut e);
    assert_eq!(s.tokens()[..before.len()], before);
    assert_eq!(e.view(s.seq().unwrap()).unwrap().tokens(), s.tokens());
}

#[test]
fn raw_text_and_messages_do_not_mix() {
    let files = files();
    let (mut e, mut s) = (engine(&files), Session::new(&files).unwrap());
    s.push("the cat").unwrap();
    s.say("user", "hi");
    let before = s.tokens().to_vec();
    assert!(matches!(s.start(&mut e, &options(3)), Err(Error::Text(TextError::Mixed))));
    assert_eq!(s.tokens(), before);
    s.unsay().unwrap();
    s.start(&mut e, &options(3)).unwrap();
    answer(&mut s, &mut e);
    assert_eq!(Session::new(&files).unwrap().unsay(), None);
}

#[test]
fn an_answer_gets_the_room_there_is() {
    let files = files();
    let mut e = Engine::new(&files, EngineConfig { cache_tokens: 32, max_batch: 1, ..EngineConfig::default() }).unwrap();
    let mut s = Session::new(&files).unwrap();
    s.push_tokens(&[5; 20]);
    s.start(&mut e, &options(1 << 30)).unwrap();
    assert_eq!(answer(&mut s, &mut e).1, FinishReason::Length);
    assert_eq!(s.tokens().len(), 32);
    let refused = s.start(&mut e, &options(1));
    assert!(matches!(refused, Err(Error::Submit(SubmitError::TooLong { tokens: 33, limit: 32, .. }))), "{refused:?}");
    assert!(matches!(Session::new(&files).unwrap().start(&mut e, &options(1)), Err(Error::Submit(SubmitError::EmptyPrompt))));
}

/// Plans nothing, and asks to be called again where it is told to.
struct Idle(Option<Duration>);

impl Scheduler for Idle {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        if let Some(wait) = self.0.take() {
            step.wake_at(step.now() + wait);
        }
    }
}

#[test]
fn generate_ends_where_nothing_can_come() {
    let files = files();
    for wait in [None, Some(Duration::from_millis(3))] {
        let config = EngineConfig { cache_tokens: 64, max_batch: 1, ..EngineConfig::default() };
        let mut e = Engine::load(&files, config, Box::new(Idle(wait)), &mut loquat::weights::no_progress).unwrap();
        let mut s = Session::new(&files).unwrap();
        s.push("the cat").unwrap();
        let mut generate = s.generate(&mut e, &options(3)).unwrap();
        let ended = generate.next();
        assert!(matches!(ended, Some(Err(Error::Run(RunError::Stalled { .. })))), "{ended:?}");
        assert!(generate.next().is_none());
    }
}
