//! Packed files: the model that was packed, bit by bit, in every way of opening; nothing of them lies in memory twice; and what is
//! damaged or made up is refused, or runs to some numbers and no further.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../fuzz/bodies/digest.rs"]
mod digest;
#[path = "../fuzz/bodies/packed.rs"]
mod packed_body;
#[path = "common/scratch.rs"]
mod scratch;

use common::engines::open;
use common::golden::fixtures;
use common::lane::{Lane, Rows};
use common::text::{Random, random_tokens};
use loquat::backend::cpu::Cpu;
use loquat::model::{PackOptions, pack};
use loquat::weights::{Gguf, LoadMode, LoadProgress, WeightSource, no_progress};
use loquat::{
    Compute, Engine, EngineConfig, Error, FinishReason, LoadError, ModelFiles, OpenOptions, Request, SideTexts, TokenId,
};
use scratch::Scratch;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

/// Of every way in which a tensor becomes a matrix: as it is, turned, cut out of a larger one, built into another, several
/// side by side; of every format with panels, and of some without; of tied and untied heads, and of GGUF and safetensors.
const MODELS: [&str; 19] = [
    "arch/deepseek_v2_group",
    "arch/deepseek_v3",
    "arch/falcon_mqa",
    "arch/gpt2",
    "arch/gpt_oss",
    "arch/llama_gqa_tied_llama3",
    "arch/llama_mha_bf16",
    "arch/llama_mha_f16",
    "arch/llama_sharded",
    "arch/mixtral",
    "arch/phi3_longrope",
    "gguf/llama_f32.gguf",
    "gguf/llama_iq4_nl.gguf",
    "gguf/llama_mixed.gguf",
    "gguf/llama_q4_1.gguf",
    "gguf/llama_q4_k_m.gguf",
    "gguf/llama_q5_0.gguf",
    "gguf/llama_q5_k.gguf",
    "gguf/llama_q8_0.gguf",
];

fn packed(path: &Path) -> Vec<u8> {
    let mut out = Vec::new();
    pack(path, &PackOptions::default(), &mut out, &mut no_progress).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    out
}

/// What a prompt and some tokens after it come to.
fn rows(files: &ModelFiles, compute: Compute, threads: usize) -> (Vec<TokenId>, Rows) {
    let config = EngineConfig { compute, threads, prompt_logits: true, ..EngineConfig::default() };
    let mut lane = Lane::new(files, config);
    let prompt = random_tokens(3, 20, files.spec().vocab);
    let seq = lane.submit(Request { prompt_logits: true, ..Request::new(prompt, 5) });
    lane.finish(&[seq]);
    assert_eq!(lane.ended[&seq], FinishReason::Length);
    (lane.tokens_of(seq).to_vec(), lane.rows_of(seq))
}

#[test]
fn a_packed_model_is_the_model() {
    let scratch = Scratch::new("packed");
    for model in MODELS {
        let original = open(&fixtures().join(model));
        let bytes = packed(&fixtures().join(model));
        let path = scratch.write("model.any", &bytes);
        let opened = |mode| ModelFiles::open(&path, &OpenOptions { mode, ..OpenOptions::default() }, &mut no_progress).unwrap();
        let (mapped, read) = (opened(LoadMode::Map), opened(LoadMode::Read));
        // Off any alignment.
        let odd: &'static [u8] = [&[0; 7][..], &bytes].concat().leak();
        let held = ModelFiles::from_memory("held", &odd[7..], &SideTexts::default()).unwrap();
        mapped.verify().unwrap();
        for files in [&mapped, &read, &held] {
            assert_eq!(files.spec(), original.spec(), "{model}");
            assert_eq!(files.fingerprint(), original.fingerprint(), "{model}");
            assert_eq!(files.end_ids(), original.end_ids(), "{model}");
            assert_eq!(files.arch().name, original.arch().name);
            match (files.tokenizer(), original.tokenizer()) {
                (Ok(a), Ok(b)) => {
                    let text = "Hello, World! 123 \u{e9}\n";
                    let both = [a, b].map(|t| t.encode(text, Default::default()).map_err(|e| e.to_string()));
                    assert_eq!(both[0], both[1], "{model}");
                }
                (a, b) => assert_eq!(a.is_err(), b.is_err(), "{model}"),
            }
            assert_eq!(files.template().is_ok(), original.template().is_ok(), "{model}");
        }
        for compute in [Compute::Fast, Compute::Exact] {
            let expected = rows(&original, compute, 1);
            for (way, files) in [("mapped", &mapped), ("read", &read), ("held", &held)] {
                assert!(rows(files, compute, 1) == expected, "{model} {compute:?}, {way}");
            }
            assert!(rows(&mapped, compute, 3) == expected, "{model} {compute:?} on 3 threads");
        }
        // Again and again it is the same file.
        assert!(packed(&path) == bytes, "{model}: packed twice");
    }
}

/// What is used as it lies takes no memory of the engine's.
#[test]
fn the_plan_counts_what_is_copied() {
    let scratch = Scratch::new("packed-plan");
    for (model, compute, copied) in [
        ("gguf/llama_q4_1.gguf", Compute::Fast, false),
        ("gguf/llama_f16.gguf", Compute::Exact, false),
        ("gguf/llama_q4_1.gguf", Compute::Exact, true),
    ] {
        let original = open(&fixtures().join(model));
        let bytes = packed(&fixtures().join(model));
        let files = open(&scratch.write("model", &bytes));
        let config = EngineConfig { compute, ..EngineConfig::default() };
        let [whole, plan] = [&original, &files].map(|f| Engine::plan(f, &config).unwrap());
        match copied {
            true => assert_eq!(plan, whole, "{model}"),
            // Norms alone.
            false => assert!(plan.weight_bytes < whole.weight_bytes / 20, "{model}: {plan:?} of {whole:?}"),
        }
        let held = ModelFiles::from_memory("held", [&[0; 1][..], &bytes].concat().leak()[1..].as_ref(), &SideTexts::default());
        assert_eq!(Engine::plan(&held.unwrap(), &config).unwrap(), whole, "{model}: bytes off their lines are copied");
    }
}

#[test]
fn progress_counts_every_byte_and_can_break_off() {
    let path = fixtures().join("gguf/llama_q4_1.gguf");
    let (mut last, mut out) = (0, Vec::new());
    let mut watch = |p: LoadProgress| {
        assert!(p.done_bytes >= last && p.done_bytes <= p.total_bytes);
        last = p.done_bytes;
        ControlFlow::Continue(())
    };
    pack(&path, &PackOptions::default(), &mut out, &mut watch).unwrap();
    assert_eq!(last, out.len() as u64);
    let stop = pack(&path, &PackOptions::default(), &mut io::sink(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stop, Err(Error::Load(LoadError::Cancelled { .. }))));
}

#[test]
fn a_writer_that_fails_is_an_error() {
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let path = fixtures().join("gguf/llama_q4_1.gguf");
    let len = packed(&path).len();
    for room in [0, 100, len / 2, len - 1] {
        let error = pack(&path, &PackOptions::default(), &mut Full(room), &mut no_progress).unwrap_err();
        assert!(
            matches!(&error, Error::Load(LoadError::Io { source, .. }) if source.kind() == io::ErrorKind::StorageFull),
            "{error}"
        );
    }
    let error = pack("no/such/model", &PackOptions::default(), &mut io::sink(), &mut no_progress).unwrap_err();
    assert!(error.to_string().contains("no/such/model"), "{error}");
}

fn from_memory(bytes: &[u8]) -> Result<ModelFiles, LoadError> {
    ModelFiles::from_memory("damaged", bytes.to_vec(), &SideTexts::default())
}

#[test]
fn damage_of_the_head_is_found_at_once_and_of_tensors_when_asked() {
    for model in ["gguf/llama_q4_1.gguf", "arch/llama_gqa_tied_llama3"] {
        let bytes = packed(&fixtures().join(model));
        let gguf = Gguf::from_bytes("packed", bytes.clone()).unwrap();
        let tensors: usize = gguf.names().map(|n| gguf.tensor(n).unwrap().bytes.len().next_multiple_of(64)).sum();
        let head = bytes.len() - tensors;
        let mut random = Random(5);
        for cut in (0..head).step_by(head / 50 + 1).chain((0..50).map(|_| head + random.below(bytes.len() - 64 - head))) {
            assert!(from_memory(&bytes[..cut]).is_err(), "{model}: {cut} of {} bytes", bytes.len());
        }
        for _ in 0..300 {
            let mut other = bytes.clone();
            other[random.below(head)] ^= 1 << random.below(8);
            assert!(from_memory(&other).is_err(), "{model}");
        }
        for _ in 0..50 {
            let mut other = bytes.clone();
            let at = head + random.below(bytes.len() - head - 1024);
            other[at] ^= 1 << random.below(8);
            let files = from_memory(&other).unwrap();
            // Between tensors nothing is.
            match files.verify() {
                Err(error) => assert!(error.to_string().contains("tensor "), "{error}"),
                Ok(()) => {
                    let start = bytes.as_ptr().addr() + at;
                    let used = |n: &str| gguf.tensor(n).unwrap().bytes.as_ptr_range();
                    assert!(!gguf.names().any(|n| (used(n).start.addr()..used(n).end.addr()).contains(&start)));
                }
            }
        }
    }
}

/// Panels that no packing makes: an infinite scale, one that is no number, quants out of their range. They are named when asked
/// for; unasked they come to some numbers on every tier, and nothing panics.
#[test]
fn panels_that_lie_are_found_or_harmless() {
    for model in ["gguf/llama_q4_1.gguf", "gguf/llama_q5_k.gguf", "gguf/llama_q4_k_m.gguf", "gguf/llama_q8_0.gguf"] {
        let bytes = packed(&fixtures().join(model));
        let gguf = Gguf::from_bytes("packed", bytes.clone()).unwrap();
        let starts: Vec<(usize, usize)> = {
            let mut at =
                bytes.len() - gguf.names().map(|n| gguf.tensor(n).unwrap().bytes.len().next_multiple_of(64)).sum::<usize>();
            let place = |name: &str| {
                let len = gguf.tensor(name).unwrap().bytes.len();
                let found = (at, len);
                at += len.next_multiple_of(64);
                name.contains('@').then_some(found)
            };
            gguf.names().filter_map(place).collect()
        };
        for fill in [&[0x00, 0x7c][..], &[0x00, 0xfe], &[0xff], &[0x80]] {
            let mut other = bytes.clone();
            for &(at, len) in &starts {
                other[at..at + len].iter_mut().zip(fill.iter().cycle()).for_each(|(b, f)| *b = *f);
            }
            let files = from_memory(&other).unwrap();
            assert!(files.verify().unwrap_err().to_string().contains("tensor "), "{model}");
            for tier in Cpu::tiers() {
                for compute in [Compute::Fast, Compute::Exact] {
                    let config = EngineConfig { tier: Some(tier.into()), compute, ..EngineConfig::default() };
                    // Exact arithmetic reads rows, which are packed anew and may be refused for what they are.
                    let Ok(mut engine) = Engine::new(&files, config) else { continue };
                    engine.submit(Request::new(vec![5; 20], 3)).unwrap();
                    for _ in 0..20 {
                        if let Err(error) = engine.step() {
                            assert!(!error.to_string().is_empty());
                            break;
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn mutations_are_refused_or_run() {
    for (model, times) in [("gguf/llama_q4_1.gguf", 300), ("gguf/llama_q5_k.gguf", 150), ("arch/deepseek_v2_group", 300)] {
        let bytes = packed(&fixtures().join(model));
        let gguf = Gguf::from_bytes("packed", bytes.clone()).unwrap();
        let tensors: usize = gguf.names().map(|n| gguf.tensor(n).unwrap().bytes.len().next_multiple_of(64)).sum();
        let head = bytes.len() - tensors;
        let mut random = Random(11);
        packed_body::run(&[&[0], &bytes[..]].concat());
        packed_body::run(&[&[7], &bytes[..]].concat());
        for _ in 0..times {
            // Most of them keep the sum of the head.
            let how = if random.below(8) == 0 { 0 } else { 1 } | (random.below(4) << 1) as u8;
            let mut other = [&[how], &bytes[..]].concat();
            for _ in 0..=random.below(3) {
                // The keys of packed files are the last of the head, and the table of tensors follows.
                let at = 1 + match random.below(4) {
                    0 => random.below(head),
                    1 => random.below(bytes.len()),
                    _ => head - 1 - random.below(head.min(6000)),
                };
                match random.below(3) {
                    0 => other[at] ^= 1 << random.below(8),
                    1 => other[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
                    _ => {
                        let to = 1 + random.below(head);
                        other[to] = other[at];
                    }
                }
            }
            packed_body::run(&other);
        }
    }
}

#[test]
fn keys_that_make_no_sense_are_named() {
    let bytes = packed(&fixtures().join("gguf/llama_q4_1.gguf"));
    // Numbers behind a key and its type.
    let number = |key: &str| {
        let at = bytes.windows(key.len()).position(|w| w == key.as_bytes()).unwrap();
        at + key.len() + 4
    };
    for (key, value, expected) in
        [("loquat.packed.version", 2u32, "expected 1"), ("loquat.packed.version", 9, "version of packed files")]
    {
        let mut other = bytes.clone();
        other[number(key)..][..4].copy_from_slice(&value.to_le_bytes());
        packed_body::seal(&mut other);
        let error = from_memory(&other).map(drop).unwrap_err().to_string();
        assert!(error.contains(expected) || error.contains("supported"), "{error}");
    }
    // A layout that this version does not know is refused by name when the model is loaded.
    let mut other = bytes.clone();
    other[number("loquat.packed.layout")..][..4].copy_from_slice(&77u32.to_le_bytes());
    packed_body::seal(&mut other);
    let error = Engine::new(&from_memory(&other).unwrap(), EngineConfig::default()).err().unwrap().to_string();
    assert!(error.contains("layout") && error.contains("77"), "{error}");
    // Names, formats and dimensions.
    for (from, to) in [("loquat.packed.dims", "loquat.packed.dimz"), ("Q4_1", "Q9_9"), ("token_embd.weight", "blk.0.attn_q.weig")]
    {
        let mut other = bytes.clone();
        let at = other.windows(from.len()).rposition(|w| w == from.as_bytes()).unwrap();
        let to = &to.as_bytes()[..from.len().min(to.len())];
        other[at..at + to.len()].copy_from_slice(to);
        packed_body::seal(&mut other);
        let result = from_memory(&other).map_err(Error::from).and_then(|f| Engine::new(&f, EngineConfig::default()).map(drop));
        assert!(!result.unwrap_err().to_string().is_empty(), "{from}");
    }
}
