//! Handles on an engine that a thread of the test drives: what each stream is told, in whatever order handles, streams and the
//! driver come and go.
#![allow(clippy::unwrap_used)]

mod common;

use common::fake::{self, FakeSizes, Faults, NAN, continuation};
use common::made::Sizes;
use common::process;
use common::text::Random;
use loquat::engine::{Engine, EngineDriver, EngineHandle, EventStream, HandleOptions, Reply, Stopped};
use loquat::sched::{ContinuousBatching, Counts, Scheduler, StepBuilder};
use loquat::weights::no_progress;
use loquat::{EngineConfig, EventKind, FinishReason, FormatId, HandleError, Request, RunError, Status, SubmitError, TokenId};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

fn engine() -> Engine {
    fake::engine(FakeSizes::default(), &Arc::default())
}

fn start(engine: Engine, options: HandleOptions) -> (EngineHandle, JoinHandle<Result<Engine, Stopped>>) {
    let (handle, driver) = engine.into_handle(options);
    (handle, thread::spawn(move || driver.run()))
}

/// All of a stream: its tokens and its last item, after which there is nothing.
fn all(stream: &mut EventStream) -> (Vec<TokenId>, Result<FinishReason, HandleError>) {
    let mut tokens = Vec::new();
    let last = loop {
        match stream.next().expect("a stream has a last item") {
            Ok(EventKind::Token { token, .. }) => tokens.push(token),
            Ok(EventKind::Finished(reason)) => break Ok(reason),
            Ok(other) => panic!("{other:?}"),
            Err(error) => break Err(error),
        }
    };
    assert!(stream.next().is_none() && stream.try_next() == Poll::Ready(None), "more after {last:?}");
    (tokens, last)
}

/// Nothing is left of the streams.
fn empty(engine: &mut Engine) {
    engine.step().unwrap();
    engine.ledger().check();
    assert_eq!(engine.ledger().counts(), Counts { waiting: 0, running: 0, held: 0 });
    assert_eq!(engine.ledger().available_blocks(), FakeSizes::default().blocks);
    assert_eq!(engine.next_event(), None);
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// As any executor would.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn streams_say_what_the_engine_says() {
    for slice in [None, Some(Duration::ZERO)] {
        let (handle, driver) = start(engine(), HandleOptions { slice, ..HandleOptions::default() });
        let mut blocking = handle.submit(Request::new([1, 2, 3], 9)).unwrap();
        let mut polled = handle.submit(Request::new([4, 5], 7)).unwrap();
        let said = block_on(async {
            let mut said = Vec::new();
            while let Some(event) = polled.recv().await {
                said.push(event.unwrap());
            }
            said
        });
        assert_eq!(said.len(), 8);
        let expected = continuation(&[4, 5], 7);
        assert!(said.iter().zip(&expected).all(|(e, t)| matches!(e, EventKind::Token { token, .. } if token == t)), "{said:?}");
        assert_eq!(said[7], EventKind::Finished(FinishReason::Length));
        assert_eq!(all(&mut blocking), (continuation(&[1, 2, 3], 9), Ok(FinishReason::Length)));
        assert_eq!(block_on(handle.call(|engine| engine.ledger().counts().running).unwrap()), Ok(0));
        drop(handle);
        empty(&mut driver.join().unwrap().unwrap());
    }
}

#[test]
fn a_refusal_is_the_only_item() {
    let (handle, driver) = start(engine(), HandleOptions::default());
    let mut stream = handle.submit(Request::new([], 4)).unwrap();
    assert_eq!(all(&mut stream), (vec![], Err(HandleError::Refused(SubmitError::EmptyPrompt))));
    assert_eq!(stream.seq(), None);
    drop(handle);
    empty(&mut driver.join().unwrap().unwrap());
}

#[test]
fn a_held_sequence_goes_on_in_another_stream() {
    let (handle, driver) = start(engine(), HandleOptions::default());
    let mut first = handle.submit(Request::new([1, 2], 3).hold(true)).unwrap();
    let (mut tokens, last) = all(&mut first);
    assert_eq!(last, Ok(FinishReason::Length));
    let seq = first.seq().unwrap();
    let more = |engine: &mut Engine, seq| engine.resume(seq, Request::new([7], 4).hold(true)).map(|()| seq);
    let mut second = handle.submit_with(move |engine| more(engine, seq)).unwrap();
    drop(first);
    tokens.splice(0..0, [1, 2]);
    tokens.push(7);
    assert_eq!(all(&mut second), (continuation(&tokens, 4), Ok(FinishReason::Length)));
    let held = || handle.call(|engine| engine.ledger().counts().held).unwrap().wait().unwrap();
    assert_eq!(held(), 1);
    // One that neither waits nor runs is no stream's.
    let (_, last) = all(&mut handle.submit_with(move |_| Ok(seq)).unwrap());
    assert!(matches!(last, Err(HandleError::Refused(SubmitError::Sequence { found: "held", .. }))), "{last:?}");
    drop(second);
    assert_eq!(held(), 0);
    drop(handle);
    empty(&mut driver.join().unwrap().unwrap());
}

#[test]
fn cancelled_and_dropped_streams_end_their_sequences() {
    let (handle, driver) = engine().into_handle(HandleOptions::default());
    // What is sent before the driver starts is done in order before its first step.
    let step = || handle.call(|engine| engine.step().unwrap()).unwrap();
    let counts = || handle.call(|engine| engine.ledger().counts()).unwrap();
    let submit = || handle.submit(Request::new([1], 100)).unwrap();
    let mut cancelled = submit();
    let steps = [step(), step()];
    cancelled.cancel();
    cancelled.cancel();
    let dropped = submit();
    let third = step();
    let before = counts();
    let drops = handle.call(move |_| drop(dropped)).unwrap();
    drop(submit());
    let unseen = counts();
    let driver = thread::spawn(move || driver.run());
    assert_eq!(drops.wait(), Ok(()));
    assert_eq!(counts().wait(), Ok(Counts { waiting: 0, running: 0, held: 0 }));
    let only = |engine: &Engine| engine.ledger().all().next().unwrap().id();
    let mut by_call = handle
        .submit_with(move |engine| {
            let seq = engine.submit(Request::new([1], 100))?;
            engine.step().unwrap();
            assert_eq!(only(engine), seq);
            engine.cancel(seq).map(|()| seq)
        })
        .unwrap();
    assert_eq!(all(&mut cancelled), (continuation(&[1], 2), Ok(FinishReason::Cancelled)));
    assert!(steps.into_iter().chain([third]).all(|step| step.wait() == Ok(Status::Stepped)));
    assert_eq!(before.wait(), Ok(Counts { waiting: 0, running: 1, held: 0 }));
    assert_eq!(unseen.wait(), Ok(Counts { waiting: 0, running: 1, held: 0 }), "one that was dropped before its turn");
    assert_eq!(all(&mut by_call), (continuation(&[1], 1), Ok(FinishReason::Cancelled)));
    let mut held = handle.submit(Request::new([1], 2).hold(true)).unwrap();
    assert_eq!(all(&mut held).1, Ok(FinishReason::Length));
    let cancel = || handle.cancel(held.seq().unwrap()).unwrap().wait().unwrap();
    assert_eq!(cancel(), Ok(()));
    assert!(matches!(cancel(), Err(SubmitError::Sequence { .. })));
    handle.shutdown();
    empty(&mut driver.join().unwrap().unwrap());
}

#[test]
fn a_driver_with_nothing_to_do_uses_no_cpu() {
    process::alone("a_driver_with_nothing_to_do_uses_no_cpu", || {
        let (handle, driver) = engine().into_handle(HandleOptions::default());
        let driver = thread::Builder::new().name("driver".into()).spawn(move || driver.run()).unwrap();
        assert_eq!(all(&mut handle.submit(Request::new([1], 2)).unwrap()).1, Ok(FinishReason::Length));
        let ticks = || process::threads().into_iter().find(|(name, _)| name == "driver").map_or(0, |(_, ticks)| ticks);
        let before = ticks();
        thread::sleep(Duration::from_millis(300));
        let used = ticks() - before;
        assert!(used <= 2, "{used} clock ticks of 30");
        assert_eq!(all(&mut handle.submit(Request::new([1], 2)).unwrap()).1, Ok(FinishReason::Length));
        drop(handle);
        empty(&mut driver.join().unwrap().unwrap());
    });
}

/// Plans nothing before its time.
struct Late {
    at: Option<Duration>,
    asked: Arc<AtomicUsize>,
    then: ContinuousBatching,
}

impl Scheduler for Late {
    fn schedule(&mut self, step: &mut StepBuilder<'_>) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match self.at {
            Some(at) if step.now() >= at => self.then.schedule(step),
            Some(at) => step.wake_at(at),
            None => {}
        }
    }
}

fn late(at: Option<Duration>) -> (Engine, Arc<AtomicUsize>) {
    let asked = Arc::<AtomicUsize>::default();
    let policy = Late { at, asked: asked.clone(), then: ContinuousBatching::default() };
    let files = Sizes::TINY.synthetic(FormatId::F32);
    (Engine::load(&files, EngineConfig::default(), Box::new(policy), &mut no_progress).unwrap(), asked)
}

#[test]
fn the_driver_sleeps_until_the_policy_wants_to_be_asked_again() {
    let (engine, asked) = late(Some(Duration::from_millis(100)));
    let (handle, driver) = engine.into_handle(HandleOptions::default());
    let mut stream = handle.submit(Request::new([1], 2)).unwrap();
    // The last handle goes before the time has come; the stream has its answer all the same.
    drop(handle);
    let driver = thread::spawn(move || driver.run());
    let (tokens, last) = all(&mut stream);
    assert_eq!((tokens.len(), last), (2, Ok(FinishReason::Length)));
    driver.join().unwrap().unwrap();
    let asked = asked.load(Ordering::Relaxed);
    assert!(asked < 10, "asked {asked} times");
}

#[test]
fn a_policy_that_plans_nothing_leaves_no_stream_waiting_once_the_handles_are_gone() {
    let (handle, driver) = late(None).0.into_handle(HandleOptions::default());
    let mut stream = handle.submit(Request::new([1], 2)).unwrap();
    let driver = thread::spawn(move || driver.run());
    assert_eq!(stream.next_timeout(Duration::from_millis(20)), Poll::Pending);
    drop(handle);
    let (tokens, last) = all(&mut stream);
    assert!(tokens.is_empty() && matches!(last, Ok(FinishReason::Failed(RunError::Stalled { .. }))), "{last:?}");
    assert_eq!(driver.join().unwrap().unwrap().ledger().counts(), Counts { waiting: 0, running: 0, held: 0 });
}

#[test]
fn a_full_queue_refuses_and_forgets_nothing() {
    let (handle, driver) = engine().into_handle(HandleOptions { commands: 2, ..HandleOptions::default() });
    let mut stream = handle.submit(Request::new([1], 2)).unwrap();
    assert_eq!(stream.next_timeout(Duration::from_millis(1)), Poll::Pending);
    let mut reply = handle.call(|_| 7).unwrap();
    assert_eq!(reply.wait_timeout(Duration::from_millis(1)), Poll::Pending);
    assert!(matches!(handle.submit(Request::new([1], 2)), Err(HandleError::Busy { limit: 2 })));
    // There is always room for this.
    drop(handle.clone());
    let driver = thread::spawn(move || driver.run());
    assert_eq!(all(&mut stream), (continuation(&[1], 2), Ok(FinishReason::Length)));
    assert_eq!(reply.wait(), Ok(7));
    handle.shutdown();
    empty(&mut driver.join().unwrap().unwrap());
    assert!(matches!(handle.submit(Request::new([1], 2)), Err(HandleError::Gone)));
}

#[test]
fn whoever_waits_is_told_that_the_driver_goes() {
    // By a shutdown.
    let (handle, driver) = start(engine(), HandleOptions::default());
    let streams: Vec<_> = (0..3).map(|i| handle.submit(Request::new([i], 120)).unwrap()).collect();
    handle.shutdown();
    for mut stream in streams {
        assert!(matches!(all(&mut stream).1, Err(HandleError::Gone) | Ok(FinishReason::Length)));
    }
    empty(&mut driver.join().unwrap().unwrap());
    // By a panic.
    let (handle, driver) = engine().into_handle(HandleOptions::default());
    let mut stream = handle.submit(Request::new([1], 120)).unwrap();
    let panics = handle.call(|_| std::panic::resume_unwind(Box::new("on purpose"))).unwrap();
    let mut later = handle.submit(Request::new([1], 3)).unwrap();
    let panics: Reply<()> = panics;
    let driver = thread::spawn(move || driver.run());
    assert_eq!(all(&mut stream).1, Err(HandleError::Gone));
    assert_eq!(all(&mut later), (vec![], Err(HandleError::Gone)));
    assert_eq!(panics.wait(), Err(HandleError::Gone));
    assert!(driver.join().is_err());
    // By being dropped before it ran.
    let (handle, driver): (_, EngineDriver) = engine().into_handle(HandleOptions::default());
    let mut stream = handle.submit(Request::new([1], 120)).unwrap();
    drop(driver);
    assert_eq!(all(&mut stream), (vec![], Err(HandleError::Gone)));
}

#[test]
fn a_device_that_fails_is_tried_again_as_often_as_asked() {
    for (failures, retries) in [(2, 2), (2, 1), (1, 0)] {
        let faults = Faults::at(8, failures);
        let engine = fake::engine(FakeSizes::default(), &faults);
        let (handle, driver) = start(engine, HandleOptions { retries, ..HandleOptions::default() });
        let mut stream = handle.submit(Request::new([1, 2], 12)).unwrap();
        let (tokens, last) = all(&mut stream);
        assert!(faults.fired());
        let expected = continuation(&[1, 2], 12);
        if retries as usize >= failures {
            assert_eq!((tokens, last), (expected, Ok(FinishReason::Length)));
            drop(handle);
            empty(&mut driver.join().unwrap().unwrap());
        } else {
            let mut stopped = driver.join().unwrap().err().expect("the device failed");
            assert!(matches!(stopped.error, RunError::Device { .. }));
            assert_eq!(last, Err(HandleError::Run(stopped.error)));
            assert!(tokens.len() < 12 && expected.starts_with(&tokens), "{tokens:?}");
            assert!(matches!(handle.call(|_| ()), Err(HandleError::Gone)));
            empty(&mut stopped.engine);
        }
    }
}

#[test]
fn a_sequence_that_fails_leaves_the_others_alone() {
    let (handle, driver) = start(engine(), HandleOptions::default());
    let mut bad = handle.submit(Request::new([NAN], 5)).unwrap();
    let mut good = handle.submit(Request::new([3], 5)).unwrap();
    assert!(matches!(all(&mut bad).1, Ok(FinishReason::Failed(RunError::NanLogits { .. }))));
    assert_eq!(all(&mut good), (continuation(&[3], 5), Ok(FinishReason::Length)));
    drop(handle);
    empty(&mut driver.join().unwrap().unwrap());
}

/// 10,000 times, in a process of its own: see `come_and_go`.
#[test]
fn no_order_of_coming_and_going_leaves_anything_behind() {
    process::alone("no_order_of_coming_and_going_leaves_anything_behind", come_and_go);
}

fn come_and_go() {
    let rounds = Arc::new(AtomicUsize::new(0));
    let watched = rounds.clone();
    // Ends the process where a round hangs; sleeps in between.
    thread::spawn(move || {
        loop {
            let before = watched.load(Ordering::Relaxed);
            thread::sleep(Duration::from_secs(60));
            if watched.load(Ordering::Relaxed) == before {
                eprintln!("round {before} hangs");
                std::process::abort();
            }
        }
    });
    let before = process::threads().len();
    let mut random = Random(17);
    let mut spare = None;
    let begun = Instant::now();
    for n in 0..10_000 {
        let engine = spare.take().unwrap_or_else(engine);
        spare = round(engine, &mut random);
        rounds.store(n + 1, Ordering::Relaxed);
    }
    // A thread that was joined may be on the list for a moment more.
    while process::threads().len() > before && begun.elapsed() < Duration::from_secs(300) {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(process::threads().len(), before, "threads left");
}

/// A stream, and whether its last item was seen.
type Listened = (EventStream, bool);

/// Exactly one last item in all.
fn hear_out((mut stream, ended): Listened) {
    match ended {
        true => assert!(stream.next().is_none() && stream.try_next() == Poll::Ready(None), "more after the last item"),
        false => _ = all(&mut stream),
    }
}

/// One life of a driver. Its engine, with nothing left in it, unless a closure panicked.
fn round(engine: Engine, random: &mut Random) -> Option<Engine> {
    let slice = (random.below(3) == 0).then_some(Duration::ZERO);
    let (handle, driver) = engine.into_handle(HandleOptions { commands: 1 + random.below(8), slice, retries: 0 });
    let late = random.below(4) == 0;
    let mut driver = Some(driver);
    let start = |driver: EngineDriver| thread::spawn(move || driver.run());
    let mut running = if late { None } else { driver.take().map(start) };
    let panics = random.below(50) == 0;
    let mut clients = Vec::new();
    // Most rounds from this thread alone, some from several.
    let threads = if random.below(8) == 0 { 1 + random.below(3) } else { 0 };
    for _ in 0..threads {
        let (handle, seed) = (handle.clone(), random.below(1 << 30) as u64);
        clients.push(thread::spawn(move || client(&handle, &mut Random(seed), false)));
    }
    let mut left = client(&handle, random, panics);
    if late {
        // What was queued is done, or told that nobody came.
        if random.below(8) == 0 {
            drop(driver.take());
        } else {
            running = driver.take().map(start);
        }
    }
    if random.below(3) == 0 {
        handle.shutdown();
    }
    drop(handle);
    if random.below(2) == 0 {
        left.drain(..).for_each(hear_out);
    }
    for client in clients {
        client.join().unwrap().into_iter().for_each(hear_out);
    }
    let ended = running.map(|driver| driver.join());
    // Those that nobody read have their one end, too.
    left.into_iter().for_each(hear_out);
    match ended {
        Some(Ok(engine)) => {
            let mut engine = engine.unwrap();
            empty(&mut engine);
            Some(engine)
        }
        Some(Err(_)) => {
            assert!(panics, "the driver panicked");
            None
        }
        None => None,
    }
}

/// A few acts of a client; the streams that it leaves to others.
fn client(handle: &EngineHandle, random: &mut Random, panics: bool) -> Vec<Listened> {
    let mut streams: Vec<Listened> = Vec::new();
    for _ in 0..random.below(6) {
        match random.below(8) {
            0..4 => {
                let prompt: Vec<TokenId> = (0..random.below(20)).map(|_| random.below(NAN as usize) as TokenId).collect();
                let request = Request::new(prompt, random.below(12)).hold(random.below(4) == 0);
                match handle.submit(request) {
                    Ok(stream) => streams.push((stream, false)),
                    Err(error) => assert!(matches!(error, HandleError::Busy { .. } | HandleError::Gone), "{error}"),
                }
            }
            4 => streams.iter_mut().for_each(|(stream, _)| stream.cancel()),
            5 if !streams.is_empty() => drop(streams.swap_remove(random.below(streams.len()))),
            6 => drop(handle.clone()),
            _ => drop(handle.call(|engine| engine.ledger().free_blocks())),
        }
        if let Some((stream, ended)) = streams.last_mut() {
            // A look, as a task with nobody to wake.
            let item = stream.poll_next(&mut Context::from_waker(Waker::noop()));
            assert_eq!(item == Poll::Ready(None), *ended, "{item:?}");
            *ended |= matches!(item, Poll::Ready(Some(Ok(EventKind::Finished(_)) | Err(_)) | None));
        }
    }
    if panics {
        drop(handle.call(|_| std::panic::resume_unwind(Box::new("on purpose"))).map(|reply: Reply<()>| reply));
    }
    streams
}
