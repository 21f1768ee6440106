//! What a host can count on: a step that comes back in time, no thread, sound or CPU time that it did not ask for, and values
//! that may move between its threads.
#![allow(clippy::unwrap_used)]

mod common;

use common::engines::open;
use common::golden::fixtures;
use common::lane::{Lane, Rows};
use common::made::Sizes;
use common::process::{alone, threads};
use loquat::engine::{Engine, EngineConfig, EngineParts, Held, Request, RowView, Status};
use loquat::engine::{EngineDriver, EngineHandle, EventStream, Reply};
use loquat::model::{Logits, MemoryPlan, Model, ModelFiles, ModelLimits, OpenOptions, SideTexts, Transformer};
use loquat::weights::{Bytes, Gguf, Opened, Safetensors, Synthetic, no_progress};
use loquat::{FormatId, GenerateOptions, SamplingParams, Session, TokenId, arch, backend, batch, quant, sample, sched, text};
use std::time::{Duration, Instant};

const LONG: Sizes = Sizes { vocab: 1024, hidden: 256, layers: 8, heads: 4, intermediate: 512, context: 2048 };
const BUDGET: Duration = Duration::from_millis(2);

/// Runs a prompt of 1,000 tokens and an answer, and says how long each call took.
fn long_prompt(files: &ModelFiles, call: fn(&mut Engine) -> Status) -> (Vec<Duration>, Vec<TokenId>, Rows) {
    let mut lane = Lane::new(files, EngineConfig { step_tokens: 64, ..EngineConfig::default() });
    let prompt: Vec<TokenId> = (0..1000).map(|t| (t * t + 17 * t) % 1021).collect();
    let seq = lane.submit(Request::new(prompt, 3));
    let mut times = Vec::new();
    while !lane.ended.contains_key(&seq) {
        let start = Instant::now();
        let status = call(&mut lane.engine);
        times.push(start.elapsed());
        assert!(!matches!(status, Status::Idle(_)) || !lane.engine.ledger().step_is_open());
        lane.listen();
    }
    times.sort_unstable();
    (times, lane.tokens_of(seq).to_vec(), lane.rows_of(seq))
}

/// A call may overrun its budget by the stage it is in when the budget ends, and by what other programs take from this one: hence
/// ranks instead of the longest call.
#[test]
fn a_step_comes_back_within_its_budget() {
    let files = LONG.synthetic(FormatId::F16);
    let (_, tokens, rows) = long_prompt(&files, |engine| engine.step().unwrap());
    let (stages, one_by_one, rows_1) = long_prompt(&files, |engine| engine.step_within(Duration::ZERO).unwrap());
    let (calls, within, rows_2) = long_prompt(&files, |engine| engine.step_within(BUDGET).unwrap());
    assert!(one_by_one == tokens && within == tokens && rows_1 == rows && rows_2 == rows, "pauses changed the answer");
    // 16 chunks and two tokens more, each with a pause before, after the embedding and after each half of a layer.
    let stages_in_all = 18 * (3 + 2 * LONG.layers);
    assert!((stages_in_all - 18..=stages_in_all).contains(&stages.len()), "{} stages", stages.len());
    let rank = |times: &[Duration], percent: usize| times[(times.len() - 1) * percent / 100];
    let longest = rank(&stages, 99);
    for (percent, noise) in [(50, 3), (90, 15)] {
        let call = rank(&calls, percent);
        let most = BUDGET + longest + Duration::from_millis(noise);
        assert!(call <= most, "{percent} % of the calls take {call:?}, a stage {longest:?}");
    }
    // The budget is used, too: only the call after which nothing is left to do comes back early.
    assert!(calls.iter().filter(|time| **time < BUDGET).count() <= 1, "{calls:?}");
    let mut engine = Engine::new(&files, EngineConfig::default()).unwrap();
    assert_eq!(engine.step_within(Duration::from_secs(3600)).unwrap(), Status::Idle(None), "waits for nothing");
}

#[test]
fn a_large_budget_does_many_steps() {
    let files = open(&fixtures().join("arch/llama_mha_f32"));
    let mut lane = Lane::new(&files, EngineConfig::default());
    let seq = lane.submit(Request::new([1, 2, 3], 50));
    assert_eq!(lane.engine.step_within(Duration::from_secs(3600)).unwrap(), Status::Idle(None));
    lane.listen();
    assert_eq!(lane.tokens_of(seq).len(), 50);
}

#[test]
fn what_is_public_may_move_between_threads() {
    fn send<T: Send>() {}
    fn send_and_sync<T: Send + Sync>() {}
    send::<Engine>();
    send::<EngineParts>();
    send::<Session>();
    send::<loquat::Generate<'static>>();
    send::<Held>();
    send::<EngineDriver>();
    send_and_sync::<EngineHandle>();
    send_and_sync::<EventStream>();
    send_and_sync::<Reply<TokenId>>();
    send_and_sync::<loquat::BeamSearch>();
    send_and_sync::<loquat::BestOf>();
    send::<RowView<'static>>();
    send::<Box<dyn Model>>();
    send::<Box<dyn sched::Scheduler>>();
    send::<Transformer<backend::cpu::Cpu>>();
    send::<backend::cpu::Cpu>();
    send::<backend::cpu::CpuBuf>();
    send::<backend::cpu::CpuKv>();
    send::<backend::cpu::CpuStep>();
    send::<sched::Ledger>();
    send::<sched::ContinuousBatching>();
    send::<sched::DynamicBatching>();
    send::<sched::StaticBatching>();
    send_and_sync::<sched::sim::Log>();
    send_and_sync::<sched::sim::Report>();
    send::<sample::Sampler>();
    send::<sample::SamplerState>();
    send::<text::Detokenizer>();
    send_and_sync::<backend::cpu::CpuWeight>();
    send_and_sync::<EngineConfig>();
    send_and_sync::<Request>();
    send_and_sync::<loquat::Event>();
    send_and_sync::<Status>();
    send_and_sync::<GenerateOptions>();
    send_and_sync::<loquat::Polled>();
    send_and_sync::<ModelFiles>();
    send_and_sync::<OpenOptions>();
    send_and_sync::<SideTexts>();
    send_and_sync::<MemoryPlan>();
    send_and_sync::<ModelLimits>();
    send_and_sync::<Logits>();
    send_and_sync::<batch::Batch>();
    send_and_sync::<arch::ModelSpec>();
    send_and_sync::<arch::Config>();
    send_and_sync::<quant::Codec>();
    send_and_sync::<SamplingParams>();
    send_and_sync::<text::Tokenizer>();
    send_and_sync::<text::ChatTemplate>();
    send_and_sync::<text::RenderOptions>();
    send_and_sync::<Bytes>();
    send_and_sync::<Gguf>();
    send_and_sync::<Safetensors>();
    send_and_sync::<Synthetic>();
    send_and_sync::<Opened>();
    send_and_sync::<loquat::Error>();
}

/// An engine may be built on one thread, driven on a second and dropped on a third.
#[test]
fn moved_while_it_runs() {
    let files = open(&fixtures().join("arch/llama_gqa_tied_llama3"));
    let config = EngineConfig { threads: 2, ..EngineConfig::default() };
    let run = |moved: bool| {
        let mut lane = Lane::new(&files, config.clone());
        let seq = lane.submit(Request::new([1, 2, 3], 12));
        while !lane.ended.contains_key(&seq) {
            let step = move |mut lane: Lane| {
                lane.engine.step_within(Duration::ZERO).unwrap();
                lane.listen();
                lane
            };
            lane = if moved { std::thread::spawn(move || step(lane)).join().unwrap() } else { step(lane) };
        }
        lane.tokens_of(seq).to_vec()
    };
    assert_eq!(run(true), run(false));
}

fn a_day(threads: usize) {
    for model in ["arch/llama_mha_f32", "gguf/llama_q4_0.gguf"] {
        let files = ModelFiles::open(fixtures().join(model), &OpenOptions::default(), &mut no_progress).unwrap();
        let mut engine = Engine::new(&files, EngineConfig { threads, cache_tokens: 256, ..EngineConfig::default() }).unwrap();
        // Refused, run, failed for want of room, held, dropped in the middle.
        engine.submit(Request::new([], 1)).unwrap_err();
        engine.submit(Request::new([9_999_999], 1)).unwrap_err();
        for i in 0..8 {
            engine.submit(Request::new(vec![i; 30], 60).hold(i % 2 == 0)).unwrap();
        }
        while engine.step().unwrap() != Status::Idle(None) {}
        engine.submit(Request::new([1; 200], 20)).unwrap();
        engine.step_within(Duration::ZERO).unwrap();
        if let Ok(mut session) = Session::new(&files) {
            session.push("a text").unwrap();
            session.say("user", "no template");
            let options = GenerateOptions { max_tokens: 9, ..GenerateOptions::default() };
            assert!(session.start(&mut engine, &options).is_err() || session.poll(&mut engine).is_ok());
        }
    }
    ModelFiles::open("/nowhere/at/all", &OpenOptions::default(), &mut no_progress).map(drop).unwrap_err();
}

#[test]
fn one_thread_means_the_callers() {
    alone("one_thread_means_the_callers", || {
        let before = threads().len();
        let files = open(&fixtures().join("gguf/llama_q4_0.gguf"));
        let mut engine = Engine::new(&files, EngineConfig::default()).unwrap();
        engine.submit(Request::new([1, 2, 3], 9)).unwrap();
        while engine.step().unwrap() != Status::Idle(None) {
            assert_eq!(threads().len(), before);
        }
        drop(engine);
        let engine = Engine::new(&files, EngineConfig { threads: 4, ..EngineConfig::default() }).unwrap();
        if before > 0 {
            let names: Vec<_> = threads().into_iter().map(|(name, _)| name).filter(|name| name.starts_with("loquat-")).collect();
            assert_eq!(names.len(), 3, "{names:?}");
        }
        drop(engine);
    });
}

#[test]
fn nothing_is_printed() {
    let said = alone("nothing_is_printed", || [1, 3].into_iter().for_each(a_day));
    assert!(said.is_none_or(|said| said.is_empty()), "the library speaks");
}

/// Workers spin for a moment after a step and then sleep. A clock tick is 10 ms on most systems.
#[test]
fn idle_workers_burn_nothing() {
    alone("idle_workers_burn_nothing", || {
        let files = open(&fixtures().join("arch/llama_mha_f32"));
        let mut engine = Engine::new(&files, EngineConfig { threads: 4, ..EngineConfig::default() }).unwrap();
        engine.submit(Request::new([1, 2, 3], 40)).unwrap();
        while engine.step().unwrap() != Status::Idle(None) {}
        let burnt = || threads().iter().filter(|(name, _)| name.starts_with("loquat-")).map(|(_, ticks)| ticks).sum::<u64>();
        std::thread::sleep(Duration::from_millis(100));
        let before = burnt();
        std::thread::sleep(Duration::from_millis(400));
        let ticks = burnt() - before;
        // 120 if all three were awake.
        assert!(ticks <= 6, "{ticks} ticks in 400 ms");
        engine.submit(Request::new([1, 2, 3], 4)).unwrap();
        assert_eq!(engine.step().unwrap(), Status::Stepped, "they wake up again");
    });
}
