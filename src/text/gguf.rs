//! Tokenizers as GGUF metadata describes them: a list of tokens with their types, merges or scores, and a few numbers. Checks all
//! of it once and guesses nothing: a name that the tables do not know is an error that lists those they do. Reads no file.
#![forbid(unsafe_code)]

use super::bpe::{self, Bpe};
use super::pre;
use super::spm::Spm;
use super::tokenizer::{Core, Kind, Marks, Tokenizer};
use super::vocab::{Packed, TokenKind, Vocab, byte_of_text};
use crate::error::TextError;
use crate::ids::TokenId;

/// What a GGUF file says about its tokenizer, key by key; what the file lacks stays `None`.
#[derive(Clone, Copy, Debug, Default)]
pub struct GgufVocab<'a> {
    /// `tokenizer.ggml.model`: `gpt2` or `llama`.
    pub model: &'a str,
    /// `tokenizer.ggml.pre`: how text is cut into words, for `gpt2`.
    pub pre: Option<&'a str>,
    /// `tokenizer.ggml.tokens`, by id.
    pub tokens: &'a [&'a str],
    /// `tokenizer.ggml.scores`, by id; `llama` needs them.
    pub scores: Option<&'a [f32]>,
    /// `tokenizer.ggml.token_type`, by id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Option<&'a [i32]>,
    /// `tokenizer.ggml.merges`, the best first; `gpt2` needs them.
    pub merges: Option<&'a [&'a str]>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<TokenId>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<TokenId>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<TokenId>,
    /// `tokenizer.ggml.eom_token_id`.
    pub eom: Option<TokenId>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<TokenId>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<TokenId>,
    /// `tokenizer.ggml.seperator_token_id`, spelt as in the files.
    pub sep: Option<TokenId>,
    /// `tokenizer.ggml.mask_token_id`.
    pub mask: Option<TokenId>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`, for `llama`.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`, for `llama`.
    pub remove_extra_whitespaces: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`: a normalisation table that neither model reads; anything in it is an error.
    pub precompiled_charsmap: Option<&'a [u8]>,
}

impl Tokenizer {
    /// Builds the tokenizer that GGUF metadata describes. Cost: one pass over tokens and merges, about 0.15 µs each.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] names the key, what it should hold and what it holds: an unknown model or pre-tokenizer, lists of
    /// unequal length, ids outside the vocabulary, merges that name absent tokens, missing byte tokens.
    pub fn from_vocab(source: &GgufVocab<'_>) -> Result<Self, TextError> {
        check(source)?;
        let kinds = kinds(source)?;
        let bpe = match source.model {
            "gpt2" => true,
            "llama" => false,
            other => return Err(TextError::tokenizer("tokenizer.ggml.model", "gpt2 or llama", format!("{other:?}"))),
        };
        let vocab = vocab(source, kinds, bpe)?;
        let unknown = source.unk.filter(|&id| vocab.kind(id) == Some(TokenKind::Unknown));
        let (kind, add_bos) = if bpe {
            let name =
                source.pre.ok_or_else(|| TextError::tokenizer("tokenizer.ggml.pre", "the name of a pre-tokenizer", "nothing"))?;
            let merges =
                source.merges.ok_or_else(|| TextError::tokenizer("tokenizer.ggml.merges", "a list of merges", "nothing"))?;
            let pre = pre::find(name)?;
            (Kind::Bpe(Bpe::new(&vocab, merges, pre, unknown)?), pre.add_bos)
        } else {
            let scores = source
                .scores
                .ok_or_else(|| TextError::tokenizer("tokenizer.ggml.scores", "a score for each token", "nothing"))?;
            let mut spm = Spm::new(&vocab, scores, byte_tokens(source, &vocab)?, unknown)?;
            spm.space_prefix = source.add_space_prefix.unwrap_or(true);
            spm.squeeze_spaces = source.remove_extra_whitespaces.unwrap_or(false);
            (Kind::Spm(spm), true)
        };
        let marks = Marks {
            bos: source.bos,
            eos: source.eos,
            // The default of the model's kind asks for a BOS only where there is one; the file's own word is checked.
            add_bos: source.add_bos.unwrap_or(add_bos && source.bos.is_some()),
            add_eos: source.add_eos.unwrap_or(false),
        };
        let ends = [source.eos, source.eot, source.eom].into_iter().flatten();
        let strip = matches!(&kind, Kind::Spm(spm) if spm.space_prefix);
        Tokenizer::assemble(Core::new(vocab, kind, strip)?, marks, ends)
    }
}

/// Lengths, ids and settings that no kind of model can use.
fn check(source: &GgufVocab<'_>) -> Result<(), TextError> {
    let len = source.tokens.len();
    if len == 0 {
        return Err(TextError::tokenizer("tokenizer.ggml.tokens", "at least one token", "none"));
    }
    // The largest id stands for "no token" inside.
    if u32::try_from(len).is_err() || len >= u32::MAX as usize {
        return Err(TextError::tokenizer("tokenizer.ggml.tokens", "fewer than 2^32 - 1 tokens", len));
    }
    let lens = [
        ("tokenizer.ggml.scores", source.scores.map(<[f32]>::len)),
        ("tokenizer.ggml.token_type", source.token_types.map(<[i32]>::len)),
    ];
    for (key, found) in lens {
        if found.is_some_and(|found| found != len) {
            let found = found.unwrap_or_default();
            return Err(TextError::tokenizer(key, format!("one entry for each of {len} tokens"), found));
        }
    }
    let ids = [
        ("bos", source.bos),
        ("eos", source.eos),
        ("eot", source.eot),
        ("eom", source.eom),
        ("unknown", source.unk),
        ("padding", source.pad),
        ("seperator", source.sep),
        ("mask", source.mask),
    ];
    for (name, id) in ids {
        if let Some(id) = id.filter(|&id| id as usize >= len) {
            return Err(TextError::tokenizer(format!("tokenizer.ggml.{name}_token_id"), format!("an id below {len}"), id));
        }
    }
    if let Some(map) = source.precompiled_charsmap.filter(|map| !map.is_empty()) {
        let found = format!("{} bytes", map.len());
        return Err(TextError::tokenizer("tokenizer.ggml.precompiled_charsmap", "none for this model", found));
    }
    for (wanted, id, key) in
        [(source.add_bos, source.bos, "tokenizer.ggml.bos_token_id"), (source.add_eos, source.eos, "tokenizer.ggml.eos_token_id")]
    {
        if wanted == Some(true) && id.is_none() {
            return Err(TextError::tokenizer(key, "an id, as the file asks for the token to be added", "nothing"));
        }
    }
    Ok(())
}

fn kinds(source: &GgufVocab<'_>) -> Result<Vec<TokenKind>, TextError> {
    let mut kinds = match source.token_types {
        None if source.model == "llama" => {
            return Err(TextError::tokenizer("tokenizer.ggml.token_type", "a type for each token", "nothing"));
        }
        None => vec![TokenKind::Normal; source.tokens.len()],
        Some(types) => types
            .iter()
            .enumerate()
            .map(|(id, kind)| {
                Ok(match kind {
                    0 | 1 => TokenKind::Normal,
                    2 => TokenKind::Unknown,
                    3 => TokenKind::Control,
                    4 => TokenKind::UserDefined,
                    5 => TokenKind::Unused,
                    6 => TokenKind::Byte,
                    other => {
                        let at = format!("tokenizer.ggml.token_type[{id}]");
                        return Err(TextError::tokenizer(at, "0 to 6", other));
                    }
                })
            })
            .collect::<Result<Vec<_>, _>>()?,
    };
    // Some converters leave the marks of beginning and end as normal tokens; they are control tokens all the same.
    for id in [source.bos, source.eos, source.eot, source.eom].into_iter().flatten() {
        if kinds[id as usize] == TokenKind::Normal {
            kinds[id as usize] = TokenKind::Control;
        }
    }
    Ok(kinds)
}

/// What each token is called and which bytes it stands for.
fn vocab(source: &GgufVocab<'_>, kinds: Vec<TokenKind>, bpe: bool) -> Result<Vocab, TextError> {
    let total = source.tokens.iter().map(|text| text.len()).sum();
    let mut texts = Packed::with_capacity(kinds.len(), total);
    let mut bytes = Packed::with_capacity(kinds.len(), total);
    for (id, (text, kind)) in source.tokens.iter().zip(&kinds).enumerate() {
        texts.push(text.bytes())?;
        match kind {
            TokenKind::Control | TokenKind::Unknown => bytes.push(text.bytes())?,
            TokenKind::UserDefined if bpe => bytes.push(text.bytes())?,
            TokenKind::Byte => match byte_of_text(text) {
                Some(byte) => bytes.push([byte])?,
                None => {
                    let at = format!("tokenizer.ggml.tokens[{id}]");
                    return Err(TextError::tokenizer(at, "<0xNN>, as its type is byte", format!("{text:?}")));
                }
            },
            // A text that is not all in the byte alphabet stands for itself: that is how the reference decodes it.
            _ if bpe => bytes.push_mapped(text, bpe::byte_of_char)?,
            _ => bytes.push(text.replace('\u{2581}', " ").bytes())?,
        }
    }
    Ok(Vocab::new(texts, bytes, kinds))
}

/// The token of each byte; all of them or none.
fn byte_tokens(source: &GgufVocab<'_>, vocab: &Vocab) -> Result<Option<Box<[TokenId; 256]>>, TextError> {
    let mut table = Box::new([None; 256]);
    let mut any = false;
    for id in (0..vocab.len()).filter(|&id| vocab.kinds()[id] == TokenKind::Byte) {
        let byte = byte_of_text(source.tokens[id]).expect("the texts of byte tokens were checked");
        any = true;
        table[byte as usize].get_or_insert(id as TokenId);
    }
    if !any {
        return Ok(None);
    }
    let mut ids = Box::new([0; 256]);
    for (byte, (id, found)) in ids.iter_mut().zip(table.iter()).enumerate() {
        *id = found.ok_or_else(|| {
            TextError::tokenizer("tokenizer.ggml.tokens", "a token for every byte or for none", format!("no <0x{byte:02X}>"))
        })?;
    }
    Ok(Some(ids))
}
