//! Bytes as a saved session, as they are or with a checksum that fits them: refused with a word and nothing changed, or a session
//! that an engine can go on with.
#![allow(unreachable_pub)] // Included by binaries, which export nothing.

use super::digest::digest;
use loquat::weights::{Fill, Synthetic, SyntheticTensor};
use loquat::{
    Engine, EngineConfig, FormatId, GenerateOptions, KvSave, ModelFiles, Polled, SaveOptions, Session, SideTexts, TokenId,
};
use std::cell::RefCell;
use std::sync::Arc;

pub const VOCAB: usize = 96;

thread_local! {
    static WORLD: RefCell<(ModelFiles, Engine)> = RefCell::new({
        let files = model();
        let engine = engine(&files);
        (files, engine)
    });
}

/// The first byte says whether the checksum is to be made to fit.
pub fn run(data: &[u8]) {
    let Some((&seals, bytes)) = data.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if seals & 1 == 1 {
        seal(&mut bytes);
    }
    WORLD.with_borrow_mut(|(files, engine)| restore(files, engine, &bytes));
}

fn restore(files: &ModelFiles, engine: &mut Engine, bytes: &[u8]) {
    let before = (engine.ledger().counts(), engine.ledger().stats());
    match Session::restore(files, engine, bytes) {
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!((engine.ledger().counts(), engine.ledger().stats()), before, "{error}");
        }
        Ok(mut session) => {
            assert!(session.tokens().iter().all(|t| (*t as usize) < VOCAB));
            go_on(&mut session, engine);
            // What was read can be written, and is then read again.
            let again = session.save(engine, SaveOptions { kv: KvSave::None }).unwrap_or_else(|e| panic!("{e}"));
            let same = Session::restore(files, engine, &again).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!((same.tokens(), same.messages()), (session.tokens(), session.messages()));
        }
    }
    engine.ledger().check();
}

/// A short answer, or an error: numbers that were never computed can come to anything.
fn go_on(session: &mut Session, engine: &mut Engine) {
    let options = GenerateOptions { max_tokens: 2, ..GenerateOptions::default() };
    if let Err(error) = session.start(engine, &options) {
        return assert!(!error.to_string().is_empty());
    }
    for _ in 0..1000 {
        match session.poll(engine).unwrap_or_else(|e| panic!("{e}")) {
            Polled::Done(_) => return,
            Polled::Text(_) => {}
            Polled::Pending => _ = engine.step().unwrap_or_else(|e| panic!("{e}")),
        }
    }
    panic!("an answer without end");
}

/// Saved sessions to start from: raw text and messages, each with all kinds of cached values. The first byte is [`run`]'s.
pub fn seeds() -> Vec<Vec<u8>> {
    let files = model();
    let mut seeds = Vec::new();
    for chat in [false, true] {
        let mut engine = engine(&files);
        let mut session = Session::new(&files).unwrap_or_else(|e| panic!("{e}"));
        if chat {
            session.render_options().extra.insert("mood".into(), serde_json::json!([1, -2, 0.1, "x", null, { "y": true }]));
            session.say("user", "abba");
        } else {
            session.push_tokens(&(0..20).map(|i| i % 7).collect::<Vec<TokenId>>());
        }
        go_on(&mut session, &mut engine);
        for kv in [KvSave::None, KvSave::Exact, KvSave::Int8] {
            let saved = session.save(&mut engine, SaveOptions { kv }).unwrap_or_else(|e| panic!("{e}"));
            seeds.push([&[0], &saved[..]].concat());
        }
    }
    seeds
}

/// Makes the checksum fit the bytes.
pub fn seal(bytes: &mut [u8]) {
    if bytes.len() < 32 {
        return;
    }
    let rest = [&bytes[..16], &bytes[32..]].concat();
    bytes[16..32].copy_from_slice(&digest(&rest));
}

/// One layer with a window, random weights, and a tokenizer of three letters.
pub fn model() -> ModelFiles {
    seeded(7)
}

/// As [`model`], with other weights for each seed.
pub fn seeded(seed: u64) -> ModelFiles {
    let tensor = |name: &str, shape: &[usize]| SyntheticTensor {
        name: name.into(),
        shape: shape.into(),
        format: FormatId::F32,
        fill: if shape.len() == 1 { Fill::Constant(1.0) } else { Fill::Normal(0.2) },
    };
    let layer = "model.layers.0";
    let weights = Synthetic::new(
        seed,
        vec![
            tensor("model.embed_tokens.weight", &[VOCAB, 32]),
            tensor(&format!("{layer}.input_layernorm.weight"), &[32]),
            tensor(&format!("{layer}.self_attn.q_proj.weight"), &[32, 32]),
            tensor(&format!("{layer}.self_attn.k_proj.weight"), &[16, 32]),
            tensor(&format!("{layer}.self_attn.v_proj.weight"), &[16, 32]),
            tensor(&format!("{layer}.self_attn.o_proj.weight"), &[32, 32]),
            tensor(&format!("{layer}.post_attention_layernorm.weight"), &[32]),
            tensor(&format!("{layer}.mlp.gate_proj.weight"), &[64, 32]),
            tensor(&format!("{layer}.mlp.up_proj.weight"), &[64, 32]),
            tensor(&format!("{layer}.mlp.down_proj.weight"), &[32, 64]),
            tensor("model.norm.weight", &[32]),
        ],
    );
    let config = r#"{"model_type": "mistral", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "sliding_window": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;
    let tokenizer = r#"{"added_tokens":[],"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
        "decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}"#;
    let texts = SideTexts {
        config: Some(config.into()),
        tokenizer: Some(tokenizer.into()),
        chat_template: Some("{% for m in messages %}{{ m.content }}ab{% endfor %}".into()),
        ..SideTexts::default()
    };
    let weights = weights.unwrap_or_else(|e| panic!("{e}"));
    ModelFiles::from_texts(Arc::new(weights), &texts, true).unwrap_or_else(|e| panic!("{e}"))
}

pub fn engine(files: &ModelFiles) -> Engine {
    let config = EngineConfig { cache_tokens: 256, max_batch: 2, ..EngineConfig::default() };
    Engine::new(files, config).unwrap_or_else(|e| panic!("{e}"))
}
