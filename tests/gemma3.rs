//! Gemma 3 270M, a base model in a GGUF file of 4 to 6 bits a weight: its tokenizer, what it says, and the same bits past
//! two of its windows. The file is large: tests skip, and say so, unless it is cached, or `LOQUAT_LONG=1` and it can be fetched.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../examples/support/fetch.rs"]
mod fetch;

use common::engines::{exact, finish, open, record};
use common::golden::{close, fixtures, json};
use loquat::backend::cpu::Compute;
use loquat::engine::{Engine, EngineConfig, Request};
use loquat::text::{AddSpecial, EncodeOptions};
use loquat::{EmbedOptions, KvDType, ModelFiles, Pooling, TokenId};
use std::sync::{Arc, LazyLock, Mutex};

/// The model, opened once; `None` skips the test.
fn model() -> Option<&'static ModelFiles> {
    static FILES: LazyLock<Option<ModelFiles>> = LazyLock::new(|| {
        let long = std::env::var_os("LOQUAT_LONG").is_some_and(|value| !value.is_empty() && value != "0");
        let path = if long { fetch::for_test(&fetch::GEMMA3) } else { fetch::for_test_if_cached(&fetch::GEMMA3) };
        path.map(|path| open(&path))
    });
    if FILES.is_none() {
        eprintln!("skipped: no {}", fetch::GEMMA3.file_name);
    }
    FILES.as_ref()
}

fn tokens(files: &ModelFiles, text: &str, add: AddSpecial) -> Vec<TokenId> {
    files.tokenizer().unwrap().encode(text, EncodeOptions { add, ..EncodeOptions::default() }).unwrap()
}

/// Greedily it circles around its subject, as a base model of this size does: up to here llama.cpp says the same. Its own
/// logits are these, computed with 8-bit activations, which is why they are off by up to 0.1 here.
#[test]
fn a_sentence_and_how_it_goes_on() {
    let Some(files) = model() else { return };
    let text = "The capital of France is";
    let bare = tokens(files, text, AddSpecial::Never);
    assert_eq!(bare, [818, 5279, 529, 7001, 563]);
    let prompt = tokens(files, text, AddSpecial::Auto);
    assert_eq!((prompt[0], &prompt[1..]), (2, &bare[..]), "the model wants its first token");

    let mut engine = Engine::new(files, EngineConfig { threads: 2, ..exact() }).unwrap();
    let rows = record(&mut engine);
    let seq = engine.submit(Request::new(prompt.as_slice(), 24)).unwrap();
    let answer = finish(&mut engine, &[seq]).remove(0);
    let tokenizer = files.tokenizer().unwrap();
    let answer = tokenizer.decode(&answer, true);
    eprintln!("{text}{answer}");
    assert!(answer.starts_with(" the capital of the country of France. It is the largest city in France"), "{answer:?}");

    let logits = &rows.lock().unwrap()[&(seq, prompt.len() - 1)].0;
    let mut order: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    let likeliest: Vec<_> = order[..5].iter().map(|&t| tokenizer.decode(&[t], true)).collect();
    assert_eq!(likeliest, [" the", " a", " Paris", " one", " known"]);
    let got: Vec<f32> = order[..5].iter().map(|&t| logits[t as usize]).collect();
    close("likeliest", &got, &[18.999, 18.492, 18.324, 18.103, 17.701], 0.15);
}

/// 1100 tokens, windows of 512. All states through the mean of them, logits of a few tokens past the prompt.
#[test]
fn same_bits_in_company_past_two_windows() {
    let Some(files) = model() else { return };
    assert_eq!(files.spec().layers.iter().filter_map(|l| l.attn.window).max(), Some(512));
    let text = json(&fixtures().join("smollm2/text.json"));
    let all = tokens(files, text["text"].as_str().unwrap(), AddSpecial::Auto);
    let (prompt, others) = (&all[..1100], [&all[1100..1210], &all[1300..1317]]);
    let run = |step_tokens: usize, others: &[&[TokenId]]| {
        let config = EngineConfig { compute: Compute::Fast, kv_dtype: KvDType::F16, cache_tokens: 4096, ..exact() };
        let config = EngineConfig { threads: 2, hidden: true, max_batch: 4, step_tokens, ..config };
        let mut engine = Engine::new(files, config).unwrap();
        let mut seqs: Vec<_> = others.iter().map(|o| engine.submit(Request::new(*o, 6)).unwrap()).collect();
        let seq = engine.submit(Request::new(prompt, 4)).unwrap();
        seqs.push(seq);
        let rows = Arc::new(Mutex::new(Vec::new()));
        let seen = rows.clone();
        engine.observe(move |row| {
            if row.seq == seq {
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                seen.lock().unwrap().push((row.position, bits(row.logits)));
            }
        });
        let embed = |engine: &mut Engine| {
            let options = EmbedOptions { pooling: Pooling::Mean, normalize: false };
            engine.embed(&[prompt], &options).unwrap().remove(0)
        };
        // Beside all the others, or after the answer.
        let company = !others.is_empty();
        let early = company.then(|| embed(&mut engine));
        let answer = finish(&mut engine, &seqs).pop().unwrap();
        let embedded = early.unwrap_or_else(|| embed(&mut engine));
        let rows = std::mem::take(&mut *rows.lock().unwrap());
        (embedded.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), rows, answer)
    };
    let (want, got) = (run(256, &[]), run(48, &others));
    assert_eq!(want.1.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [1099, 1100, 1101, 1102]);
    assert_eq!((&got.0, &got.2), (&want.0, &want.2));
    for ((position, got), (_, want)) in got.1.iter().zip(&want.1) {
        assert!(got == want, "logits at {position}");
    }
}
