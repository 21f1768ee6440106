//! Vocabularies that own their strings, fixture files, a seeded generator, and the check of a tokenizer and a template against a
//! golden file.

use loquat::TokenId;
use loquat::text::{AddSpecial, ChatTemplate, EncodeOptions, GgufVocab, Message, RenderOptions, Specials, Start, Tokenizer};
use serde_json::Value;

/// A JSON file of tests/fixtures.
pub fn fixture(name: &str) -> Value {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// A list of token ids.
pub fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as TokenId).collect()
}

/// A [`GgufVocab`] that owns what that one borrows.
#[derive(Clone, Debug, Default)]
pub struct OwnedVocab {
    pub model: String,
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    pub scores: Option<Vec<f32>>,
    pub token_types: Option<Vec<i32>>,
    pub merges: Option<Vec<String>>,
    pub bos: Option<TokenId>,
    pub eos: Option<TokenId>,
    pub eot: Option<TokenId>,
    pub unk: Option<TokenId>,
    pub pad: Option<TokenId>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
    pub charsmap: Option<Vec<u8>>,
}

impl OwnedVocab {
    /// From the metadata of a GGUF file written as JSON.
    pub fn from_json(value: &Value) -> Self {
        let texts = |key: &str| {
            let list = value[key].as_array()?;
            Some(list.iter().map(|text| text.as_str().unwrap().to_owned()).collect())
        };
        let id = |key: &str| value[key].as_u64().map(|id| id as TokenId);
        OwnedVocab {
            model: value["model"].as_str().unwrap().to_owned(),
            pre: value["pre"].as_str().map(str::to_owned),
            tokens: texts("tokens").unwrap(),
            scores: value["scores"].as_array().map(|list| list.iter().map(|v| v.as_f64().unwrap() as f32).collect()),
            token_types: value["token_types"].as_array().map(|list| list.iter().map(|v| v.as_i64().unwrap() as i32).collect()),
            merges: texts("merges"),
            bos: id("bos"),
            eos: id("eos"),
            eot: id("eot"),
            unk: id("unk"),
            pad: id("pad"),
            add_bos: value["add_bos"].as_bool(),
            add_eos: value["add_eos"].as_bool(),
            add_space_prefix: value["add_space_prefix"].as_bool(),
            charsmap: None,
        }
    }

    /// Lends the borrowed form.
    pub fn with<T>(&self, use_it: impl FnOnce(GgufVocab<'_>) -> T) -> T {
        let tokens: Vec<&str> = self.tokens.iter().map(String::as_str).collect();
        let merges: Option<Vec<&str>> = self.merges.as_ref().map(|list| list.iter().map(String::as_str).collect());
        use_it(GgufVocab {
            model: &self.model,
            pre: self.pre.as_deref(),
            tokens: &tokens,
            scores: self.scores.as_deref(),
            token_types: self.token_types.as_deref(),
            merges: merges.as_deref(),
            bos: self.bos,
            eos: self.eos,
            eot: self.eot,
            unk: self.unk,
            pad: self.pad,
            add_bos: self.add_bos,
            add_eos: self.add_eos,
            add_space_prefix: self.add_space_prefix,
            precompiled_charsmap: self.charsmap.as_deref(),
            ..GgufVocab::default()
        })
    }
}

/// Checks a tokenizer and a template against a golden file: `strings` with ids and decoded texts, special tokens parsed and no
/// BOS added; `chat` with messages, rendered texts and ids.
pub fn check_golden_text(tokenizer: &Tokenizer, template: &ChatTemplate, golden: &Value) {
    let options = EncodeOptions { specials: Specials::Parse, add: AddSpecial::Never, ..EncodeOptions::default() };
    for case in golden["strings"].as_array().unwrap() {
        let (text, expected) = (case["text"].as_str().unwrap(), ids(&case["ids"]));
        assert_eq!(tokenizer.encode(text, options).unwrap(), expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected, false), case["decoded"].as_str().unwrap(), "{text:?}");
        assert_eq!(tokenizer.decode(&expected, true), case["decoded_skip_special"].as_str().unwrap(), "{text:?}");
    }
    check_golden_chat(template, golden);
    for case in golden["chat"].as_array().unwrap() {
        let rendered = case["rendered"].as_str().unwrap();
        assert_eq!(tokenizer.encode_chat(rendered).unwrap(), ids(&case["ids"]), "{rendered:?}");
    }
}

/// Checks the rendered texts alone.
pub fn check_golden_chat(template: &ChatTemplate, golden: &Value) {
    for case in golden["chat"].as_array().unwrap() {
        let text = |message: &Value, key: &str| message[key].as_str().unwrap().to_owned();
        let messages: Vec<Message> = case["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|message| Message::new(text(message, "role"), text(message, "content")))
            .collect();
        let options =
            RenderOptions { add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(), ..RenderOptions::default() };
        assert_eq!(template.render(&messages, &options).unwrap(), case["rendered"].as_str().unwrap());
    }
}

/// A small seeded generator (xorshift); not for anything but tests.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x2545_f491_4f6c_dd1d);
        self.0 ^= self.0 >> 29;
        self.0
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound
    }
}

/// Any tokens, the same for the same seed.
pub fn random_tokens(seed: u64, len: usize, vocab: usize) -> Vec<TokenId> {
    let mut random = Random(seed);
    (0..len).map(|_| random.below(vocab) as TokenId).collect()
}

pub const PARSE: EncodeOptions = EncodeOptions { specials: Specials::Parse, add: AddSpecial::Never, start: Start::Text };
pub const PLAIN: EncodeOptions = EncodeOptions { specials: Specials::Plain, add: AddSpecial::Never, start: Start::Text };

pub fn spm() -> OwnedVocab {
    OwnedVocab::from_json(&fixture("text/vocabularies.json")["spm"]["vocab"])
}

pub fn bpe() -> OwnedVocab {
    OwnedVocab::from_json(&fixture("text/vocabularies.json")["bpe"]["vocab"])
}

pub fn build(vocab: &OwnedVocab) -> Tokenizer {
    vocab.with(|view| Tokenizer::from_vocab(&view)).unwrap()
}

pub fn json_tokenizer() -> Tokenizer {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gguf/bpe_tokenizer.json");
    Tokenizer::from_json(&std::fs::read(path).unwrap()).unwrap()
}
