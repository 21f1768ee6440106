//! The tokenizer that callers see: text to ids and back, the marks of beginning and end, and which ids end an answer. What lies
//! beneath (byte pairs, scores, or the `tokenizers` crate) is chosen when it is built.
//!
//! Invariants: every id that [`Tokenizer::encode`] gives is below [`Tokenizer::vocab_len`]; a BOS is never added before another
//! one; plain text never yields a control token.
#![forbid(unsafe_code)]

use super::bpe::{self, Bpe};
use super::detokenizer::Start;
use super::hf::Hf;
use super::spm::{self, Spm};
use super::vocab::{Fragment, Matcher, TokenKind, Vocab};
use crate::error::TextError;
use crate::ids::TokenId;
use std::fmt;
use std::sync::Arc;

/// What the texts of special tokens mean where they occur in the text to encode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Specials {
    /// They are those tokens: for rendered chat templates.
    Parse,
    /// They are text like any other: for what users type. No control token can come out.
    #[default]
    Plain,
}

/// Whether the marks of beginning and end are added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AddSpecial {
    /// As the model's own files say; a BOS that the text already has is not doubled.
    #[default]
    Auto,
    /// Never.
    Never,
}

/// How to encode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EncodeOptions {
    /// What the texts of special tokens mean.
    pub specials: Specials,
    /// Whether BOS and EOS are added.
    pub add: AddSpecial,
    /// Where the text stands. After other text no BOS is put before it, nor the space that a SentencePiece-style tokenizer puts
    /// before the first word; after a special token within the text the space is put as ever.
    pub start: Start,
}

/// Text to tokens and back. Cheap to clone: the tables are shared.
#[derive(Clone)]
pub struct Tokenizer {
    core: Arc<Core>,
    marks: Marks,
    /// Sorted, no two equal.
    ends: Arc<[TokenId]>,
}

impl Tokenizer {
    /// Encodes `text`. Cost: linear in the text up to a logarithm, whatever the text, and what the patterns of a `tokenizer.json`
    /// of its own cost; no thread is started.
    ///
    /// # Errors
    /// [`TextError::Unencodable`] where the vocabulary has no token for a byte and no unknown token; [`TextError::Tokenizer`] where
    /// a pattern of the tokenizer's file gives up on the text, or the file's rules make it many times longer.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<TokenId>, TextError> {
        let mut out = Vec::new();
        self.encode_into(text, options, &mut out)?;
        Ok(out)
    }

    /// [`encode`](Self::encode) that replaces what is in `out`; after an error `out` is empty.
    pub fn encode_into(&self, text: &str, options: EncodeOptions, out: &mut Vec<TokenId>) -> Result<(), TextError> {
        let auto = options.add == AddSpecial::Auto;
        let bos = auto && self.marks.add_bos && options.start == Start::Text;
        self.encode_marked(text, options, bos, auto && self.marks.add_eos, out)
    }

    /// Encodes a rendered chat template: special tokens are parsed, a BOS is put before it where the model wants one and the
    /// template did not write it, and nothing is put after it.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<TokenId>, TextError> {
        let mut out = Vec::new();
        let options = EncodeOptions { specials: Specials::Parse, ..EncodeOptions::default() };
        self.encode_marked(rendered, options, self.marks.add_bos, false, &mut out)?;
        Ok(out)
    }

    fn encode_marked(
        &self,
        text: &str,
        options: EncodeOptions,
        bos: bool,
        eos: bool,
        out: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        out.clear();
        if let Err(error) = self.core.encode(text, options.specials == Specials::Parse, options.start, out) {
            out.clear();
            return Err(error);
        }
        if let Some(id) = self.marks.bos.filter(|&id| bos && out.first() != Some(&id)) {
            out.insert(0, id);
        }
        if let Some(id) = self.marks.eos.filter(|&id| eos && out.last() != Some(&id)) {
            out.push(id);
        }
        Ok(())
    }

    /// The text of `tokens` as a whole. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary add nothing. The space
    /// that a SentencePiece-style tokenizer puts before the first word is taken off again.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(tokens.len() * 4);
        for &token in tokens.iter().filter(|&&token| !(skip_special && self.is_special(token))) {
            bytes.extend_from_slice(self.token_bytes(token).unwrap_or_default());
        }
        let strip = usize::from(self.strips_first_space() && bytes.first() == Some(&b' '));
        String::from_utf8_lossy(&bytes[strip..]).into_owned()
    }

    /// The bytes that a token adds to a text: part of a character, a word with its space, the text of a special token. `None`
    /// outside the vocabulary. Allocates nothing.
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.core.vocab.bytes(token)
    }

    /// The text by which the vocabulary knows a token: with its byte alphabet or U+2581 for a space.
    pub fn token_text(&self, token: TokenId) -> Option<&str> {
        self.core.vocab.text(token).and_then(|text| std::str::from_utf8(text).ok())
    }

    /// The token of that text, as [`token_text`](Self::token_text) spells it; of several, the lowest.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.core.vocab.find(text.as_bytes())
    }

    /// True for control tokens and the unknown token.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.core.vocab.is_special(token)
    }

    /// True for tokens that end an answer.
    pub fn is_end(&self, token: TokenId) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    /// The tokens that end an answer, in ascending order: those that the tokenizer names, control tokens with the text of a known
    /// end mark, and what [`with_end_ids`](Self::with_end_ids) added.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.ends
    }

    /// The same tokenizer with more tokens that end an answer: those of config.json and generation_config.json.
    #[must_use]
    pub fn with_end_ids(mut self, ids: impl IntoIterator<Item = TokenId>) -> Self {
        let mut ends: Vec<TokenId> = self.ends.iter().copied().chain(ids).collect();
        ends.sort_unstable();
        ends.dedup();
        self.ends = ends.into();
        self
    }

    /// The same tokenizer with what tokenizer_config.json says about BOS and EOS: which they are, and whether they are added.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] where it names a token that the vocabulary lacks, or wants one added that it does not name.
    pub fn with_config(mut self, config: &serde_json::Value) -> Result<Self, TextError> {
        for (key, is_eos) in [("bos_token", false), ("eos_token", true)] {
            let text = match config.get(key) {
                None | Some(serde_json::Value::Null) => continue,
                Some(value) => value.as_str().or_else(|| value.get("content")?.as_str()).ok_or_else(|| {
                    TextError::tokenizer(format!("tokenizer_config.json: {key}"), "a string or an object with content", value)
                })?,
            };
            let id = self.token_id(text).ok_or_else(|| {
                TextError::tokenizer(format!("tokenizer_config.json: {key}"), "a token of the vocabulary", format!("{text:?}"))
            })?;
            if is_eos {
                self.marks.eos = Some(id);
                self = self.with_end_ids([id]);
            } else {
                self.marks.bos = Some(id);
            }
        }
        let flag = |key: &str| config.get(key).and_then(serde_json::Value::as_bool);
        self.marks.add_bos = flag("add_bos_token").unwrap_or(self.marks.add_bos);
        self.marks.add_eos = flag("add_eos_token").unwrap_or(self.marks.add_eos);
        self.marks.check("tokenizer_config.json")?;
        Ok(self)
    }

    /// Tokens there are: one more than the largest id.
    pub fn vocab_len(&self) -> usize {
        self.core.vocab.len()
    }

    /// The token that begins a text, where the model has one.
    pub fn bos(&self) -> Option<TokenId> {
        self.marks.bos
    }

    /// The token that ends a text, where the tokenizer names one; [`end_ids`](Self::end_ids) are all that end an answer.
    pub fn eos(&self) -> Option<TokenId> {
        self.marks.eos
    }

    /// True where [`AddSpecial::Auto`] puts a BOS before a text.
    pub fn adds_bos(&self) -> bool {
        self.marks.add_bos
    }

    /// True where a whole decode takes off a first space.
    pub(super) fn strips_first_space(&self) -> bool {
        self.core.strip_first_space
    }

    pub(super) fn assemble(core: Core, marks: Marks, ends: impl IntoIterator<Item = TokenId>) -> Result<Self, TextError> {
        marks.check("tokenizer")?;
        let ends: Vec<TokenId> = ends.into_iter().chain(marked_ends(&core.vocab)).chain(marks.eos).collect();
        Ok(Tokenizer { core: Arc::new(core), marks, ends: Arc::new([]) }.with_end_ids(ends))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_len", &self.vocab_len())
            .field("marks", &self.marks)
            .field("end_ids", &self.ends)
            .finish_non_exhaustive()
    }
}

/// The marks of beginning and end, and whether they are added.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    pub(super) bos: Option<TokenId>,
    pub(super) eos: Option<TokenId>,
    pub(super) add_bos: bool,
    pub(super) add_eos: bool,
}

impl Marks {
    fn check(&self, file: &str) -> Result<(), TextError> {
        for (added, id, name) in [(self.add_bos, self.bos, "bos_token"), (self.add_eos, self.eos, "eos_token")] {
            if added && id.is_none() {
                return Err(TextError::tokenizer(format!("{file}: {name}"), "a token, as it is to be added", "nothing"));
            }
        }
        Ok(())
    }
}

/// How text becomes tokens.
pub(super) enum Kind {
    Bpe(Bpe),
    Spm(Spm),
    Hf(Box<Hf>),
}

/// What clones of a tokenizer share.
pub(super) struct Core {
    vocab: Vocab,
    kind: Kind,
    matcher: Option<Matcher>,
    strip_first_space: bool,
}

impl Core {
    pub(super) fn new(vocab: Vocab, kind: Kind, strip_first_space: bool) -> Result<Self, TextError> {
        let matcher = match &kind {
            Kind::Bpe(_) | Kind::Spm(_) => Some(Matcher::new(&vocab)?),
            // The crate beneath finds its own added tokens.
            Kind::Hf(_) => None,
        };
        Ok(Core { vocab, kind, matcher, strip_first_space })
    }

    fn encode(&self, text: &str, parse: bool, start: Start, out: &mut Vec<TokenId>) -> Result<(), TextError> {
        let matcher = self.matcher.as_ref();
        match &self.kind {
            Kind::Hf(hf) => hf.encode(&self.vocab, text, parse, start, out),
            Kind::Bpe(bpe) => {
                let mut scratch = bpe::Scratch::default();
                matcher.expect("made with the core").split(text, parse, |fragment| match fragment {
                    Fragment::Token(id) => {
                        out.push(id);
                        Ok(())
                    }
                    Fragment::Text { at, text } => bpe.encode(&self.vocab, text, at, &mut scratch, out),
                })
            }
            Kind::Spm(spm) => {
                let mut scratch = spm::Scratch::default();
                let mut first = start == Start::Text;
                matcher.expect("made with the core").split(text, parse, |fragment| match fragment {
                    Fragment::Token(id) => {
                        out.push(id);
                        first = true;
                        Ok(())
                    }
                    Fragment::Text { at, text } => {
                        let begins = std::mem::replace(&mut first, false);
                        spm.encode(&self.vocab, text, at, begins, &mut scratch, out)
                    }
                })
            }
        }
    }
}

/// The control tokens whose texts are known to end an answer.
fn marked_ends(vocab: &Vocab) -> Vec<TokenId> {
    let control = |text: &str| {
        vocab.find(text.as_bytes()).filter(|&id| matches!(vocab.kind(id), Some(TokenKind::Control | TokenKind::UserDefined)))
    };
    // Where both of these exist, <|end|> ends one message of several, not the answer.
    let messages = control("<|return|>").is_some() && control("<|call|>").is_some();
    END_TEXTS.iter().filter(|&&text| !(messages && text == "<|end|>")).filter_map(|text| control(text)).collect()
}

const END_TEXTS: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<end_of_utterance>",
    "<eos>",
    "</s>",
];
