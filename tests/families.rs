//! Model families against logits and greedy tokens of another implementation, from every file format.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::engines::{alone, exact, finish, open, record};
use common::gguf_twin::twin;
use common::golden::{Golden, close, fixtures, json, same_greedy};
use loquat::engine::{Engine, EngineConfig, Request};
use loquat::model::{ModelFiles, OpenOptions, SideTexts};
use loquat::text::{AddSpecial, EncodeOptions};
use std::path::Path;

/// Logits at every stored position, and 32 greedy tokens, with all prompts in the engine at once. The largest error.
fn check(what: &str, files: &ModelFiles, golden: &Golden) -> f32 {
    let config = EngineConfig { prompt_logits: true, hidden: true, step_tokens: 48, ..exact() };
    let mut engine = Engine::new(files, config).unwrap();
    let rows = record(&mut engine);
    let seqs: Vec<_> = golden
        .prompts
        .iter()
        .map(|p| engine.submit(Request { prompt_logits: true, ..Request::new(p.as_slice(), 32) }).unwrap())
        .collect();
    let tokens = finish(&mut engine, &seqs);
    let rows = rows.lock().unwrap();
    let mut worst = 0.0f32;
    for (i, (prompt, seq)) in golden.prompts.iter().zip(&seqs).enumerate() {
        let at = |p: usize| &rows[&(*seq, p)];
        let (_, last) = golden.arrays.get(&format!("p{i}.last_logits")).unwrap();
        worst = worst.max(close(&format!("{what} p{i} last"), &at(prompt.len() - 1).0, &last, golden.atol));
        for (name, hidden) in [("logits", false), ("final_hidden", true)] {
            let Some((shape, want)) = golden.arrays.get(&format!("p{i}.{name}")) else { continue };
            for (p, want) in want.chunks_exact(shape[1]).enumerate() {
                let got = if hidden { &at(p).1 } else { &at(p).0 };
                worst = worst.max(close(&format!("{what} p{i} {name} at {p}"), got, want, golden.atol));
            }
        }
        let g = &golden.greedy[i];
        same_greedy(&format!("{what} p{i}"), &tokens[i], &g.tokens, &g.margins, golden.atol);
    }
    worst
}

fn folders(of: &str) -> Vec<std::path::PathBuf> {
    let mut list: Vec<_> = std::fs::read_dir(fixtures().join(of)).unwrap().map(|e| e.unwrap().path()).collect();
    list.sort();
    list
}

#[test]
fn safetensors_in_both_spellings_of_the_config() {
    let list: Vec<_> = folders("arch");
    assert!(list.len() >= 27, "{list:?}");
    let mut failed = Vec::new();
    for folder in list {
        let golden = Golden::open(&folder);
        for config in ["config.json", "config_v4.json"] {
            let what = format!("{} {config}", folder.file_name().unwrap().display());
            let options = OpenOptions { config: Some(folder.join(config)), ..OpenOptions::default() };
            let result = std::panic::catch_unwind(|| {
                let files = ModelFiles::open(&folder, &options, &mut loquat::weights::no_progress)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
                check(&what, &files, &golden)
            });
            match result {
                Ok(worst) => println!("{what}: off by {worst:.1e}, {:.1e} allowed", golden.atol),
                Err(_) => failed.push(what),
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// The same model, as a converter writes it.
#[test]
fn gguf_twins_give_the_same_bits() {
    let (mut failed, mut twins) = (Vec::new(), 0);
    for folder in folders("arch") {
        let what = folder.file_name().unwrap().display().to_string();
        // Half precision is not what a twin is for.
        let Some(bytes) = (what != "llama_mha_f16").then(|| twin(&folder)).flatten() else { continue };
        twins += 1;
        let result = std::panic::catch_unwind(|| {
            let files = ModelFiles::from_memory(&what, bytes, &SideTexts::default()).unwrap_or_else(|e| panic!("{what}: {e}"));
            let golden = Golden::open(&folder);
            let original = open(&folder);
            for prompt in &golden.prompts {
                let [got, want] = [&files, &original].map(|f| alone(f, exact(), prompt, 8));
                assert_eq!(got.0, want.0, "{what}");
                for (p, (got, want)) in got.1.iter().zip(&want.1).enumerate() {
                    let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(same, "{what} at {p}: off by {off}");
                }
            }
        });
        if result.is_err() {
            failed.push(what);
        }
    }
    assert!(twins >= 25, "{twins}");
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn every_gguf_format() {
    let list: Vec<_> = folders("gguf").into_iter().filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    assert!(list.len() >= 15, "{list:?}");
    for file in list {
        check(&file.display().to_string(), &open(&file), &Golden::open(&file.with_extension("")));
    }
}

#[test]
fn tokenizers_of_gguf_files() {
    let golden = json(&fixtures().join("gguf/tokenizers.json"));
    for (file, kind) in [("llama_q4_0", "bpe"), ("llama_mixed", "spm")] {
        let files = open(&fixtures().join(format!("gguf/{file}.gguf")));
        let tokenizer = files.tokenizer().unwrap();
        for case in golden[kind].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let options = EncodeOptions { add: AddSpecial::Never, ..EncodeOptions::default() };
            let got = tokenizer.encode(text, options).unwrap();
            assert_eq!(got, common::golden::ids(&case["ids"]), "{kind} {text:?}");
        }
    }
}

#[test]
fn a_golden_that_does_not_fit_fails() {
    let folder = fixtures().join("arch/llama_mha_f32");
    let mut golden = Golden::open(&folder);
    golden.atol = 1e-7;
    let files = open(Path::new(&folder));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check("too tight", &files, &golden))).is_err());
}
