//! `tokenizer.json`: the pieces are built and run by the `tokenizers` crate, one by one. Its own `encode` is left aside: it would
//! truncate and pad as the file says, keep a cache for each thread that outlives the tokenizer, and know no plain text.
//!
//! What the file may hold is checked before the crate sees it: components whose readers are known to panic on odd input, dropout
//! (ids would be random) and ids without bound are refused, each by name.
#![forbid(unsafe_code)]

use super::bpe::byte_of_char;
use super::detokenizer::Start;
use super::steps::{Cut, Normal, Run, cut, cuts, failed, most, normals};
use super::tokenizer::{Core, Kind, Marks, Tokenizer};
use super::vocab::{Packed, TokenKind, Vocab, byte_of_text};
use crate::error::TextError;
use crate::ids::TokenId;
use serde_json::Value;
use tokenizers::{
    AddedToken, AddedVocabulary, Model, ModelWrapper, NormalizedString, Normalizer, OffsetReferential, OffsetType, Token,
};

/// The crate's parts that turn text into tokens.
pub(super) struct Hf {
    model: ModelWrapper,
    normalizer: Vec<Normal>,
    pre_tokenizer: Vec<Cut>,
    /// Finds every added token.
    added: AddedVocabulary,
    /// Leaves special ones in the text.
    plain: AddedVocabulary,
    unknown: Option<TokenId>,
    /// Whether the lengths of a piece's tokens add up to the piece unless something was dropped.
    adds_up: bool,
}

impl Tokenizer {
    /// Reads the text of a Hugging Face `tokenizer.json`. Cost: dominated by the crate's own tables, about a third of a second
    /// for 150,000 tokens.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] names what cannot be read or is not supported.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TextError> {
        let mut file: Value = serde_json::from_slice(bytes).map_err(|e| TextError::tokenizer("tokenizer.json", "JSON", e))?;
        let decoder = Decoder::read(&file["decoder"])?;
        let added_tokens = added_tokens(&file["added_tokens"])?;
        let normalizer = normals(&file["normalizer"])?;
        let pre_tokenizer = cuts(&file["pre_tokenizer"])?;
        check_model(&file["model"], added_tokens.len())?;
        let unknown_id = file["model"]["unk_id"].as_u64();
        let unknown_text = file["model"]["unk_token"].as_str().map(str::to_owned);
        let adds_up = file["model"]["vocab"].is_object();

        let mut model: ModelWrapper = serde_json::from_value(file["model"].take())
            .map_err(|e| TextError::tokenizer("model", "what its type asks for", e))?;
        model.resize_cache(0);
        let mut added = AddedVocabulary::new();
        let len = check_added(&added_tokens, &normalizer)?;
        let run = Run::new(&normalizer, Start::Text, len);
        let done = added.add_tokens(added_tokens.iter().map(|(_, token)| token.clone()), &model, Some(&run));
        run.finish()?;
        done.map_err(|e| TextError::tokenizer("added_tokens", "tokens that can be matched", e))?;
        for (id, token) in &added_tokens {
            let given = added.token_to_id(&token.content, &model);
            if given != Some(*id) {
                let given = given.map_or("none".to_owned(), |id| id.to_string());
                let at = format!("added_tokens: {:?}", token.content);
                return Err(TextError::tokenizer(at, format!("id {given}, which follows from the vocabulary"), id));
            }
        }
        let mut plain = added.clone();
        plain.set_encode_special_tokens(true);

        let unknown = match (unknown_id, &unknown_text) {
            (Some(id), _) => TokenId::try_from(id).ok(),
            (None, Some(text)) => added.token_to_id(text, &model),
            (None, None) => None,
        };
        let vocab = vocab(&model, &added, &decoder)?;
        let marks = marks(&file["post_processor"], vocab.len())?;
        let hf = Hf { model, normalizer, pre_tokenizer, added, plain, unknown, adds_up };
        Tokenizer::assemble(Core::new(vocab, Kind::Hf(Box::new(hf)), decoder.strip_first_space)?, marks, [])
    }
}

impl Hf {
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        parse: bool,
        start: Start,
        out: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let added = if parse { &self.added } else { &self.plain };
        let run = Run::new(&self.normalizer, start, text.len());
        let mut string = added.extract_and_normalize(Some(&run), text);
        run.finish()?;
        cut(&self.pre_tokenizer, &mut string, start, most(text.len()))?;
        string.tokenize(|piece| self.piece(vocab, piece, parse)).map_err(|e| failed("text", e))?;
        for (_, _, tokens) in string.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            out.extend(tokens.iter().flatten().map(|token| token.id));
        }
        Ok(())
    }

    fn piece(&self, vocab: &Vocab, piece: &NormalizedString, parse: bool) -> Result<Vec<Token>, tokenizers::Error> {
        let text = piece.get();
        let tokens = self.model.tokenize(text)?;
        let unencodable = |found: String| {
            let at = piece.offsets_original().0;
            tokenizers::Error::from(TextError::Unencodable { at, found })
        };
        // A model without an unknown token drops what it does not know.
        if self.adds_up && tokens.iter().map(|token| token.offsets.1 - token.offsets.0).sum::<usize>() < text.len() {
            return Err(unencodable(format!("part of {text:?}")));
        }
        if parse || !tokens.iter().any(|token| self.is_injected(vocab, token.id)) {
            return Ok(tokens);
        }
        // Plain text that is the text of a control token, letter for letter: cut it, so that it is spelt.
        let mut spelt = Vec::with_capacity(tokens.len() + 1);
        for token in tokens {
            if !self.is_injected(vocab, token.id) {
                spelt.push(token);
                continue;
            }
            for c in token.value.chars() {
                for token in self.model.tokenize(c.encode_utf8(&mut [0; 4]))? {
                    if self.is_injected(vocab, token.id) {
                        return Err(unencodable(format!("{c:?}, which is a control token")));
                    }
                    spelt.push(token);
                }
            }
        }
        Ok(spelt)
    }

    fn is_injected(&self, vocab: &Vocab, id: TokenId) -> bool {
        vocab.is_special(id) && self.unknown != Some(id)
    }
}

fn check_model(model: &Value, added: usize) -> Result<(), TextError> {
    let wrong = |at: &str, expected: &str, found: &dyn std::fmt::Display| {
        TextError::tokenizer(format!("model.{at}"), expected, found.to_string())
    };
    let kind = model["type"].as_str().or(model["merges"].is_array().then_some("BPE"));
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[key].as_str().is_some_and(|text| !text.is_empty()) {
            return Err(wrong(key, "nothing", &model[key]));
        }
    }
    if model["dropout"].as_f64().is_some_and(|p| p != 0.0) {
        return Err(wrong("dropout", "none: encoding would be random", &model["dropout"]));
    }
    let (len, largest) = match (kind, &model["vocab"]) {
        (Some("BPE"), Value::Object(vocab)) => {
            let mut largest = 0;
            for (text, id) in vocab {
                let id = id.as_u64().ok_or_else(|| wrong("vocab", "an id for each token", &format!("{text:?}: {id}")))?;
                largest = largest.max(id);
            }
            // The crate copies a merge into a buffer of the longest token's length before it looks it up.
            for (i, line) in model["merges"].as_array().into_iter().flatten().enumerate() {
                let parts = match line {
                    Value::String(line) => line.split_once(' '),
                    pair => pair[0].as_str().zip(pair[1].as_str()),
                };
                let merged = parts.map(|(left, right)| [left, right].concat());
                if merged.is_none_or(|merged| !vocab.contains_key(&merged)) {
                    return Err(wrong(&format!("merges[{i}]"), "two tokens and a token for their merge", line));
                }
            }
            (vocab.len(), largest)
        }
        (Some("Unigram"), Value::Array(vocab)) => {
            if let Some(entry) = vocab.iter().find(|entry| entry[0].as_str().is_none_or(str::is_empty)) {
                return Err(wrong("vocab", "a text with each score", entry));
            }
            (vocab.len(), 0)
        }
        (Some("BPE" | "Unigram"), _) => return Err(wrong("vocab", "a vocabulary", &"none")),
        (other, _) => return Err(wrong("type", "BPE or Unigram", &other.unwrap_or("nothing"))),
    };
    // Tables are as long as the largest id; a short file must not ask for a long table.
    let bound = 2 * (len as u64 + added as u64) + 65_536;
    if largest > bound {
        return Err(wrong("vocab", &format!("ids up to {bound} for {len} tokens"), &largest));
    }
    Ok(())
}

fn added_tokens(value: &Value) -> Result<Vec<(TokenId, AddedToken)>, TextError> {
    let mut tokens = Vec::new();
    for (i, entry) in value.as_array().into_iter().flatten().enumerate() {
        let at = || format!("added_tokens[{i}]");
        let id = entry["id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| TextError::tokenizer(at(), "an id", &entry["id"]))?;
        let content = entry["content"].as_str().filter(|text| !text.is_empty());
        let content = content.ok_or_else(|| TextError::tokenizer(at(), "a content", &entry["content"]))?;
        let flag = |key: &str, default| entry[key].as_bool().unwrap_or(default);
        let special = flag("special", false);
        let token = AddedToken::from(content, special)
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .normalized(flag("normalized", !special));
        tokens.push((id, token));
    }
    Ok(tokens)
}

/// Refuses tokens of whose text the normalizer leaves nothing: they would be found between any two characters. Gives the length
/// of all texts.
fn check_added(tokens: &[(TokenId, AddedToken)], normalizer: &[Normal]) -> Result<usize, TextError> {
    let mut len = 0_usize;
    for (i, (_, token)) in tokens.iter().enumerate() {
        len = len.saturating_add(token.content.len());
        let mut string = NormalizedString::from(token.content.as_str());
        if token.normalized {
            let run = Run::new(normalizer, Start::Text, token.content.len());
            let done = run.normalize(&mut string);
            run.finish()?;
            done.map_err(|e| failed("normalizer", e))?;
        }
        if string.is_empty() {
            let expected = "a content of which the normalizer leaves something";
            return Err(TextError::tokenizer(format!("added_tokens[{i}]"), expected, format!("{:?}", token.content)));
        }
        // The crate would look for it within the white space that the token before it took, and fall over what it finds.
        if token.lstrip && string.get().chars().all(char::is_whitespace) {
            let expected = "no lstrip for a token that is white space, as it is matched";
            return Err(TextError::tokenizer(format!("added_tokens[{i}]"), expected, format!("{:?}", token.content)));
        }
    }
    Ok(len)
}

/// How the texts of tokens become bytes.
#[derive(Default)]
struct Decoder {
    byte_level: bool,
    byte_fallback: bool,
    replace: Vec<(String, String)>,
    strip_first_space: bool,
}

impl Decoder {
    fn read(value: &Value) -> Result<Self, TextError> {
        let mut decoder = Decoder::default();
        decoder.add(value)?;
        Ok(decoder)
    }

    fn add(&mut self, value: &Value) -> Result<(), TextError> {
        let unsupported = |expected: &str| Err(TextError::tokenizer("decoder", expected, value));
        match value["type"].as_str() {
            Some("Sequence") => {
                for inner in value["decoders"].as_array().into_iter().flatten() {
                    self.add(inner)?;
                }
            }
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Fuse") => {}
            Some("Replace") => match (value["pattern"]["String"].as_str(), value["content"].as_str()) {
                (Some(pattern), Some(content)) if !pattern.is_empty() => {
                    self.replace.push((pattern.to_owned(), content.to_owned()));
                }
                _ => return unsupported("a Replace of one string by another"),
            },
            Some("Strip") => {
                let (start, stop) = (value["start"].as_u64(), value["stop"].as_u64());
                match (value["content"].as_str(), start, stop) {
                    (_, Some(0), Some(0)) => {}
                    (Some(" "), Some(1), Some(0)) => self.strip_first_space = true,
                    _ => return unsupported("a Strip of one space at the start"),
                }
            }
            Some("Metaspace") => {
                let replacement = value["replacement"].as_str().filter(|text| text.chars().count() == 1);
                let Some(replacement) = replacement else { return unsupported("a Metaspace with its replacement") };
                self.replace.push((replacement.to_owned(), " ".to_owned()));
                let never = value["prepend_scheme"].as_str() == Some("never") || value["add_prefix_space"] == false;
                self.strip_first_space |= !never;
            }
            _ => return unsupported("ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace or a Sequence of them"),
        }
        Ok(())
    }

    fn kind(&self, text: &str, special: bool) -> TokenKind {
        match (special, self.byte_fallback && byte_of_text(text).is_some()) {
            (true, _) => TokenKind::Control,
            (false, true) => TokenKind::Byte,
            (false, false) => TokenKind::Normal,
        }
    }

    fn bytes(&self, text: &str, kind: TokenKind, added: bool, out: &mut Packed) -> Result<(), TextError> {
        if kind == TokenKind::Control {
            return out.push(text.bytes());
        }
        if let Some(byte) = byte_of_text(text).filter(|_| kind == TokenKind::Byte) {
            return out.push([byte]);
        }
        if self.byte_level && !added && text.chars().all(|c| byte_of_char(c).is_some()) {
            return out.push(text.chars().filter_map(byte_of_char));
        }
        let mut text = text.to_owned();
        let most = text.len() * 32 + 64;
        for (pattern, content) in &self.replace {
            let found = text.matches(pattern).count();
            let len = (text.len() - found * pattern.len()).saturating_add(found.saturating_mul(content.len()));
            if len > most {
                return Err(TextError::tokenizer(
                    "decoder",
                    format!("a Replace that makes at most {most} bytes of {text:?}"),
                    len,
                ));
            }
            text = text.replace(pattern, content);
        }
        out.push(text.bytes())
    }
}

fn vocab(model: &ModelWrapper, added: &AddedVocabulary, decoder: &Decoder) -> Result<Vocab, TextError> {
    let of_model = model.get_vocab();
    let of_added = added.get_added_tokens_decoder();
    let len = of_model.values().chain(of_added.keys()).max().map_or(0, |&id| id as usize + 1);
    if len == 0 {
        return Err(TextError::tokenizer("model.vocab", "at least one token", "none"));
    }
    let mut by_id: Vec<&str> = vec![""; len];
    let mut there = vec![false; len];
    for (text, &id) in &of_model {
        if std::mem::replace(&mut there[id as usize], true) {
            let both = format!("{id} for {:?} and {text:?}", by_id[id as usize]);
            return Err(TextError::tokenizer("model.vocab", "one token for each id", both));
        }
        by_id[id as usize] = text;
    }
    for (&id, token) in of_added {
        by_id[id as usize] = &token.content;
        there[id as usize] = true;
    }
    let (mut texts, mut bytes) = (Packed::default(), Packed::default());
    let mut kinds = Vec::with_capacity(len);
    for (id, (text, there)) in by_id.iter().zip(there).enumerate() {
        let token = of_added.get(&(id as TokenId));
        let kind = match (there, token) {
            (false, _) => TokenKind::Unused,
            (true, token) => decoder.kind(text, token.is_some_and(|token| token.special)),
        };
        texts.push(text.bytes())?;
        decoder.bytes(text, kind, token.is_some(), &mut bytes)?;
        kinds.push(kind);
    }
    Ok(Vocab::new(texts, bytes, kinds))
}

/// BOS and EOS as the post-processor adds them: at most one token before the text and one after it.
fn marks(value: &Value, vocab_len: usize) -> Result<Marks, TextError> {
    let mut marks = Marks { bos: None, eos: None, add_bos: false, add_eos: false };
    read_marks(value, vocab_len, &mut marks)?;
    marks.add_bos = marks.bos.is_some();
    marks.add_eos = marks.eos.is_some();
    Ok(marks)
}

fn read_marks(value: &Value, vocab_len: usize, marks: &mut Marks) -> Result<(), TextError> {
    let wrong = |expected: &str, found: &Value| TextError::tokenizer("post_processor", expected, found);
    let id = |value: &Value| {
        let id = value.as_u64().filter(|&id| (id as usize) < vocab_len);
        id.map(|id| id as TokenId).ok_or_else(|| wrong("an id of the vocabulary", value))
    };
    match value["type"].as_str() {
        None if value.is_null() => {}
        Some("ByteLevel") => {}
        Some("Sequence") => {
            for inner in value["processors"].as_array().into_iter().flatten() {
                read_marks(inner, vocab_len, marks)?;
            }
        }
        Some("BertProcessing" | "RobertaProcessing") => {
            marks.bos = Some(id(&value["cls"][1])?);
            marks.eos = Some(id(&value["sep"][1])?);
        }
        Some("TemplateProcessing") => {
            let mut after = false;
            for step in value["single"].as_array().into_iter().flatten() {
                if step.get("Sequence").is_some() {
                    after = true;
                    continue;
                }
                let name = step["SpecialToken"]["id"].as_str().ok_or_else(|| wrong("special tokens and one text", step))?;
                let ids = value["special_tokens"][name]["ids"].as_array();
                let slot = if after { &mut marks.eos } else { &mut marks.bos };
                match ids.map(Vec::as_slice) {
                    Some([only]) if slot.is_none() => *slot = Some(id(only)?),
                    _ => return Err(wrong("at most one token before the text and one after it", value)),
                }
            }
        }
        _ => return Err(wrong("ByteLevel, TemplateProcessing, RobertaProcessing or a Sequence of them", value)),
    }
    Ok(())
}
