//! Model families against logits and greedy tokens of another implementation, from every file format.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::engines::{Rows, alone, exact, finish, open, record};
use common::gguf_twin::twin;
use common::golden::{Golden, close, fixtures, same_greedy};
use loquat::arch::KvLayout;
use loquat::engine::{Engine, EngineConfig, Request};
use loquat::model::{ModelFiles, OpenOptions, SideTexts};
use loquat::text::{AddSpecial, EncodeOptions};
use loquat::{SeqId, TokenId};
use serde_json::json;
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

/// Alone, and in a crowd that is cut into small chunks: the prompts go past several windows.
#[test]
fn company_and_chunks_change_no_bit() {
    for folder in folders("arch") {
        let (files, prompts) = (open(&folder), Golden::open(&folder).prompts);
        let mut engine = Engine::new(&files, EngineConfig { prompt_logits: true, step_tokens: 24, ..exact() }).unwrap();
        let rows = record(&mut engine);
        let seqs: Vec<_> = prompts
            .iter()
            .map(|p| engine.submit(Request { prompt_logits: true, ..Request::new(p.as_slice(), 8) }).unwrap())
            .collect();
        let tokens = finish(&mut engine, &seqs);
        let rows = rows.lock().unwrap();
        for ((prompt, seq), tokens) in prompts.iter().zip(&seqs).zip(tokens) {
            let (want_tokens, want) = alone(&files, exact(), prompt, 8);
            assert_eq!(tokens, want_tokens, "{}", folder.display());
            same_rows(&format!("{} prompt of {}", folder.display(), prompt.len()), &rows, *seq, &want, 0);
        }
    }
}

/// The rows of `seq` from position `from` on have the bits of `want`, which starts at position 0.
fn same_rows(what: &str, rows: &Rows, seq: SeqId, want: &[Vec<f32>], from: usize) {
    for (p, want) in want.iter().enumerate().skip(from) {
        let got = &rows[&(seq, p)].0;
        let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{what} at {p}");
    }
}

/// Held past two windows, forked twice, and continued in three ways at once: two alike, one with tokens of its own.
#[test]
fn forks_change_no_bit() {
    let mut windowed = 0;
    for folder in folders("arch") {
        let (files, prompts) = (open(&folder), Golden::open(&folder).prompts);
        let what = folder.file_name().unwrap().display().to_string();
        let window = files.spec().layers.iter().filter_map(|l| l.attn.window).max();
        let mut prompt = prompts.iter().max_by_key(|p| p.len()).unwrap().clone();
        while window.is_some_and(|w| prompt.len() <= 2 * w) {
            prompt.extend_from_within(..);
        }
        windowed += usize::from(window.is_some());

        let mut engine = Engine::new(&files, EngineConfig { step_tokens: 24, ..exact() }).unwrap();
        let seq = engine.submit(Request::new(prompt.as_slice(), 8).hold(true)).unwrap();
        let first = finish(&mut engine, &[seq]).remove(0);
        let known = [&prompt[..], &first].concat();
        let seqs = [seq, engine.fork(seq).unwrap(), engine.fork(seq).unwrap()];
        let more: [&[TokenId]; 3] = [&[], &[], &prompt[..2]];
        let rows = record(&mut engine);
        for (seq, more) in seqs.iter().zip(more) {
            engine.resume(*seq, Request::new(more, 8)).unwrap();
        }
        let tokens = finish(&mut engine, &seqs);
        let rows = rows.lock().unwrap();
        let solo = alone(&files, exact(), &prompt, 16);
        let other = alone(&files, exact(), &[&known[..], more[2]].concat(), 8);
        assert_eq!(first, solo.0[..8], "{what}");
        for (i, (want, all)) in [(&solo.0[8..], &solo.1), (&solo.0[8..], &solo.1), (&other.0, &other.1)].iter().enumerate() {
            assert_eq!(tokens[i], **want, "{what} fork {i}");
            same_rows(&format!("{what} fork {i}"), &rows, seqs[i], all, known.len() - 1 + more[i].len());
        }
    }
    assert!(windowed >= 5, "{windowed}");
}

/// The same model, as a converter writes it.
#[test]
fn gguf_twins_give_the_same_bits() {
    let (mut failed, mut twins) = (Vec::new(), 0);
    for folder in folders("arch") {
        let what = folder.file_name().unwrap().display().to_string();
        // The twin is in f32; and the converter computes Llama 3's frequencies, which rounds them once more.
        let skipped = ["llama_mha_f16", "llama_gqa_tied_llama3"].contains(&&*what);
        let Some(bytes) = (!skipped).then(|| twin(&folder)).flatten() else { continue };
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
    assert!(twins >= 24, "{twins}");
    assert!(failed.is_empty(), "{failed:?}");
}

/// A setting that changes the mathematics and is not carried out is an error with the field's name and its value.
#[test]
fn what_is_not_carried_out_is_refused_by_name() {
    let cases = [
        ("falcon_mqa", "alibi", json!(true)),
        ("llama_mha_f32", "hidden_act", json!("quick_gelu")),
        ("llama_mha_f32", "rope_scaling", json!({"rope_type": "mrope"})),
        ("llama_mha_f32", "quantization_config", json!({"quant_method": "awq"})),
        ("llama_mha_f32", "model_type", json!("rwkv")),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true)),
        ("gemma3_text", "layer_types", json!(["sliding_attention", "linear_attention", "full_attention"])),
        ("gemma3_text", "use_bidirectional_attention", json!(true)),
        ("deepseek_v2_group", "topk_method", json!("best_of_both")),
        ("deepseek_v2_group", "norm_topk_prob", json!(true)),
        ("deepseek_v3", "scoring_func", json!("softmax")),
        ("deepseek_v3", "n_group", json!(3)),
        ("qwen3_moe", "num_experts_per_tok", json!(9)),
        ("smollm3", "no_rope_layers", json!([1, 0])),
        ("phi3", "partial_rotary_factor", json!(1.5)),
    ];
    for (folder, field, value) in cases {
        let folder = fixtures().join("arch").join(folder);
        let mut config = common::golden::json(&folder.join("config_v4.json"));
        config[field] = value.clone();
        let texts = SideTexts { config: Some(config.to_string()), ..SideTexts::default() };
        let weights = std::fs::read(folder.join("model.safetensors")).unwrap();
        let error = ModelFiles::from_memory("changed", weights, &texts).err().unwrap_or_else(|| panic!("{field} passed"));
        let (text, inner) = (error.to_string(), value.as_object().and_then(|o| o.values().next()).unwrap_or(&value));
        let shown = match inner {
            serde_json::Value::String(s) => s.clone(),
            serde_json::Value::Array(list) if list[0].is_string() => "linear_attention".into(),
            serde_json::Value::Array(list) => list.len().to_string(),
            other => other.to_string(),
        };
        let named = text.contains(field) || value.is_object() && text.contains(value.as_object().unwrap().keys().next().unwrap());
        assert!((named || field == "model_type") && text.contains(&shown), "{field} = {value}: {text}");
    }
}

/// The cache of a model with latents holds `rank + rope_dim` values a token and layer, whatever its heads are.
#[test]
fn a_latent_is_all_that_is_cached() {
    let bytes = |name: &str| {
        let files = open(&fixtures().join("arch").join(name));
        let plan = Engine::plan(&files, &exact()).unwrap();
        (plan.kv_bytes / (files.spec().layers.len() * exact().cache_tokens) as u64, files)
    };
    for name in ["deepseek_v2_lite", "deepseek_v2_group", "deepseek_v3"] {
        let (found, files) = bytes(name);
        let KvLayout::Latent { rank, rope_dim, nope_dim, value_dim, .. } = files.spec().layers[0].attn.layout else {
            panic!("{name} has no latents");
        };
        let heads = files.spec().layers[0].attn.heads;
        // What the same heads would take with keys and values of their own.
        let expanded = 4 * heads * (nope_dim + rope_dim + value_dim);
        assert_eq!((found, expanded), (4 * (rank + rope_dim) as u64, 576), "{name}");
    }
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
    let golden = common::golden::json(&fixtures().join("gguf/tokenizers.json"));
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
