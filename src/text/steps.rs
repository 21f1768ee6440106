//! What a `tokenizer.json` does to a text before its model sees it: the normalizer's steps and the pre-tokenizer's, in a row. The
//! `tokenizers` crate keeps the text and runs most of them; patterns are run here, because the crate takes a pattern that gives up
//! for one that found nothing, and its text falls apart where nothing is replaced by something.
//!
//! Invariants: no step makes more of a text than [`most`] allows; a pattern that gives up, or matches nothing where that is no
//! match, is an error that names it; at a [`Start::Continuation`] nothing is put before the first word.
#![forbid(unsafe_code)]

use super::detokenizer::Start;
use super::pre::{self, Splitter};
use crate::error::TextError;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::normalizer::SplitDelimiterBehavior;
use tokenizers::pattern::{Invert, Pattern};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{
    NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper,
};

/// Bytes that a text of `len` bytes may become. Compatibility forms make eleven of one, a byte alphabet two.
pub(super) fn most(len: usize) -> usize {
    len.saturating_mul(32).saturating_add(1024)
}

fn within(at: &str, len: usize, most: usize) -> Result<(), TextError> {
    if len > most {
        return Err(TextError::tokenizer(at, format!("no more than {most} bytes left of the bound for this text"), len));
    }
    Ok(())
}

/// One step of the normalizer.
pub(super) enum Normal {
    Replace { find: Finder, content: String },
    Prepend(String),
    Other(NormalizerWrapper),
}

/// One step of the pre-tokenizer.
pub(super) enum Cut {
    Split {
        find: Finder,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    /// The byte alphabet, after a space before each piece and a cut into words where the file wants them.
    Bytes {
        prefix: bool,
        words: Option<Finder>,
        alphabet: ByteLevel,
    },
    Metaspace(Metaspace),
    Other(PreTokenizerWrapper),
}

const NORMALIZERS: &[&str] =
    &["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Replace", "Prepend", "Strip", "StripAccents", "Lowercase", "ByteLevel"];
const PRE_TOKENIZERS: &[&str] =
    &["Sequence", "ByteLevel", "Split", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "UnicodeScripts"];

/// The steps of a normalizer; none for `null`.
pub(super) fn normals(value: &Value) -> Result<Vec<Normal>, TextError> {
    let mut steps = Vec::new();
    flatten(value, "normalizer", "normalizers", NORMALIZERS, &mut |kind, value| {
        steps.push(match kind {
            "Replace" => {
                let find = Finder::read(value, "normalizer")?;
                if find.can_be_empty() {
                    return Err(TextError::tokenizer("normalizer", "a Replace that never matches nothing", find.name()));
                }
                Normal::Replace { find, content: text(value, "content", "normalizer")? }
            }
            "Prepend" => Normal::Prepend(text(value, "prepend", "normalizer")?),
            "Strip" if !(value["strip_left"].is_boolean() && value["strip_right"].is_boolean()) => {
                return Err(TextError::tokenizer("normalizer", "a Strip with both its sides", value));
            }
            _ => Normal::Other(read(value, "normalizer")?),
        });
        Ok(())
    })?;
    Ok(steps)
}

/// The steps of a pre-tokenizer; none for `null`.
pub(super) fn cuts(value: &Value) -> Result<Vec<Cut>, TextError> {
    let mut steps = Vec::new();
    flatten(value, "pre_tokenizer", "pretokenizers", PRE_TOKENIZERS, &mut |kind, value| {
        if kind == "Split" {
            let invert = value["invert"].as_bool();
            steps.push(Cut::Split {
                find: Finder::read(value, "pre_tokenizer")?,
                behavior: read(&value["behavior"], "pre_tokenizer.behavior")?,
                invert: invert.ok_or_else(|| TextError::tokenizer("pre_tokenizer.invert", "true or false", &value["invert"]))?,
            });
            return Ok(());
        }
        steps.push(match read(value, "pre_tokenizer")? {
            PreTokenizerWrapper::ByteLevel(bytes) => Cut::Bytes {
                prefix: bytes.add_prefix_space,
                words: bytes.use_regex.then(|| Ok(Finder::Words(Splitter::new(pre::find("gpt-2")?)?))).transpose()?,
                alphabet: bytes.add_prefix_space(false).use_regex(false),
            },
            PreTokenizerWrapper::Metaspace(metaspace) => Cut::Metaspace(metaspace),
            other => Cut::Other(other),
        });
        Ok(())
    })?;
    Ok(steps)
}

/// Gives the components of a tree of sequences in order, each of a type in the list.
fn flatten(
    value: &Value,
    at: &str,
    inner: &str,
    known: &[&str],
    add: &mut dyn FnMut(&str, &Value) -> Result<(), TextError>,
) -> Result<(), TextError> {
    if value.is_null() {
        return Ok(());
    }
    let kind = value["type"]
        .as_str()
        .filter(|kind| known.contains(kind))
        .ok_or_else(|| TextError::tokenizer(format!("{at}.type"), format!("one of {}", known.join(", ")), &value["type"]))?;
    if kind != "Sequence" {
        return add(kind, value);
    }
    let list = value[inner].as_array().ok_or_else(|| TextError::tokenizer(at, format!("a Sequence with {inner}"), value))?;
    list.iter().try_for_each(|value| flatten(value, at, inner, known, add))
}

fn read<T: DeserializeOwned>(value: &Value, at: &str) -> Result<T, TextError> {
    serde_json::from_value(value.clone()).map_err(|e| TextError::tokenizer(at, "what its type asks for", e))
}

fn text(value: &Value, key: &str, at: &str) -> Result<String, TextError> {
    let text = value[key].as_str();
    text.map(str::to_owned).ok_or_else(|| TextError::tokenizer(format!("{at}.{key}"), "a string", &value[key]))
}

/// A normalizer at work on one text.
pub(super) struct Run<'a> {
    steps: &'a [Normal],
    start: Start,
    /// Bytes that may still be made, and what went wrong: the crate drops a normalizer's errors.
    state: Mutex<(usize, Option<TextError>)>,
}

impl<'a> Run<'a> {
    /// For a text of `len` bytes.
    pub(super) fn new(steps: &'a [Normal], start: Start, len: usize) -> Self {
        Run { steps, start, state: Mutex::new((most(len), None)) }
    }

    /// What went wrong.
    pub(super) fn finish(self) -> Result<(), TextError> {
        self.state.into_inner().1.map_or(Ok(()), Err)
    }
}

impl Normalizer for Run<'_> {
    fn normalize(&self, string: &mut NormalizedString) -> tokenizers::Result<()> {
        let (left, fault) = &mut *self.state.lock();
        if fault.is_some() {
            return Err("an earlier piece failed".into());
        }
        let begins = self.start == Start::Continuation && string.offsets_original().0 == 0;
        if let Err(error) = self.steps.iter().try_for_each(|step| step.apply(string, begins, *left)) {
            *fault = Some(error);
            return Err("see what the run says when it finishes".into());
        }
        *left = left.saturating_sub(string.get().len());
        Ok(())
    }
}

impl Normal {
    /// `bare` keeps a prefix away.
    fn apply(&self, string: &mut NormalizedString, bare: bool, left: usize) -> Result<(), TextError> {
        let len = string.get().len();
        match self {
            Normal::Replace { find, content } => {
                let spans = find.spans(string.get())?;
                let (mut matches, mut matched) = (0_usize, 0);
                for ((start, end), _) in spans.iter().filter(|(_, is_match)| *is_match) {
                    if start == end {
                        return Err(TextError::tokenizer("normalizer", "a Replace that never matches nothing", find.name()));
                    }
                    matches += 1;
                    matched += end - start;
                }
                within("normalizer: Replace", (len - matched).saturating_add(matches.saturating_mul(content.len())), left)?;
                if matches > 0 {
                    string.replace(Spans(spans), content).map_err(|e| failed("normalizer", e))?;
                }
            }
            Normal::Prepend(prefix) if !bare && !prefix.is_empty() && len > 0 => {
                within("normalizer: Prepend", len.saturating_add(prefix.len()), left)?;
                string.prepend(prefix);
            }
            Normal::Prepend(_) => {}
            Normal::Other(normalizer) => {
                normalizer.normalize(string).map_err(|e| failed("normalizer", e))?;
                within("normalizer", string.get().len(), left)?;
            }
        }
        Ok(())
    }
}

/// Runs the steps of a pre-tokenizer over the pieces of a text that may become `most` bytes.
pub(super) fn cut(steps: &[Cut], string: &mut PreTokenizedString, start: Start, most: usize) -> Result<(), TextError> {
    for step in steps {
        step.apply(string, start).map_err(|e| failed("pre_tokenizer", e))?;
        let pieces = string.get_splits(OffsetReferential::Normalized, OffsetType::None);
        within("pre_tokenizer", pieces.iter().map(|(piece, ..)| piece.len()).sum(), most)?;
    }
    Ok(())
}

impl Cut {
    fn apply(&self, string: &mut PreTokenizedString, start: Start) -> tokenizers::Result<()> {
        let bare = |piece: &NormalizedString| start == Start::Continuation && piece.offsets_original().0 == 0;
        match self {
            Cut::Split { find, behavior, invert: false } => string.split(|_, piece| piece.split(find, *behavior)),
            Cut::Split { find, behavior, invert: true } => string.split(|_, piece| piece.split(Invert(find), *behavior)),
            Cut::Bytes { prefix, words, alphabet } => {
                string.split(|_, mut piece| {
                    if *prefix && !piece.get().starts_with(' ') && !bare(&piece) {
                        piece.prepend(" ");
                    }
                    match words {
                        Some(words) => piece.split(words, SplitDelimiterBehavior::Isolated),
                        None => Ok(vec![piece]),
                    }
                })?;
                alphabet.pre_tokenize(string)
            }
            Cut::Metaspace(metaspace) => {
                let mark = metaspace.get_replacement();
                string.split(|_, mut piece| {
                    piece.replace(' ', mark.encode_utf8(&mut [0; 4]))?;
                    let wanted = match metaspace.get_prepend_scheme() {
                        PrependScheme::Always => true,
                        PrependScheme::First => piece.offsets_original().0 == 0,
                        PrependScheme::Never => false,
                    };
                    if wanted && !bare(&piece) && !piece.get().starts_with(mark) {
                        piece.prepend(mark.encode_utf8(&mut [0; 4]));
                    }
                    match metaspace.get_split() {
                        true => piece.split(mark, SplitDelimiterBehavior::MergedWithNext),
                        false => Ok(vec![piece]),
                    }
                })
            }
            Cut::Other(pre_tokenizer) => pre_tokenizer.pre_tokenize(string),
        }
    }
}

/// The error itself where it came through the crate.
pub(super) fn failed(at: &str, error: tokenizers::Error) -> TextError {
    match error.downcast::<TextError>() {
        Ok(error) => *error,
        Err(e) => TextError::tokenizer(at, "text that the tokenizer can cut", e),
    }
}

/// What finds the places in a text.
pub(super) enum Finder {
    Text(String),
    Regex { pattern: String, regex: Box<fancy_regex::Regex> },
    Words(Splitter),
}

/// Ranges that cover a text in order, and whether each is a match.
type Ranges = Vec<((usize, usize), bool)>;

impl Finder {
    fn read(value: &Value, at: &str) -> Result<Self, TextError> {
        let value = &value["pattern"];
        let pattern = match (value["String"].as_str(), value["Regex"].as_str()) {
            (Some(text), None) if !text.is_empty() => return Ok(Finder::Text(text.to_owned())),
            (Some(pattern), None) | (None, Some(pattern)) => pattern,
            _ => return Err(TextError::tokenizer(format!("{at}.pattern"), "a String or a Regex", value)),
        };
        let regex = fancy_regex::Regex::new(pattern)
            .map_err(|e| TextError::tokenizer(format!("{at}.pattern"), "a Regex that compiles", format!("{pattern:?}: {e}")))?;
        Ok(Finder::Regex { pattern: pattern.to_owned(), regex: Box::new(regex) })
    }

    fn name(&self) -> String {
        match self {
            Finder::Text(text) => format!("the string {text:?}"),
            Finder::Regex { pattern, .. } => format!("the pattern {pattern:?}"),
            Finder::Words(_) => "the words of ByteLevel".to_owned(),
        }
    }

    /// True unless it is certain that every match has a length. What looks around or back is read with caution.
    fn can_be_empty(&self) -> bool {
        let Finder::Regex { pattern, .. } = self else { return false };
        match regex_automata::util::syntax::parse(pattern) {
            Ok(hir) => hir.properties().minimum_len() == Some(0),
            Err(_) => !fancy_regex::Expr::parse_tree(pattern).is_ok_and(|tree| has_length(&tree.expr)),
        }
    }

    fn spans(&self, text: &str) -> Result<Ranges, TextError> {
        let mut spans = Vec::new();
        let mut done = 0;
        let mut push = |start: usize, end: usize| {
            if done < start {
                spans.push(((done, start), false));
            }
            spans.push(((start, end), true));
            done = end;
        };
        match self {
            _ if text.is_empty() => return Ok(vec![((0, 0), false)]),
            Finder::Text(pattern) => text.match_indices(pattern.as_str()).for_each(|(at, found)| push(at, at + found.len())),
            Finder::Regex { regex, .. } => {
                for found in regex.find_iter(text) {
                    let found = found.map_err(|e| {
                        TextError::tokenizer(format!("{} on this text", self.name()), "an end within its engine's limits", e)
                    })?;
                    push(found.start(), found.end());
                }
            }
            Finder::Words(splitter) => {
                let mut pieces = Vec::new();
                splitter.split(text, &mut pieces, &mut Vec::new());
                pieces.iter().for_each(|piece| push(piece.start, piece.end));
            }
        }
        if done < text.len() {
            spans.push(((done, text.len()), false));
        }
        Ok(spans)
    }
}

impl Pattern for &Finder {
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Ranges> {
        Ok(self.spans(inside)?)
    }
}

/// Places that were found already.
struct Spans(Ranges);

impl Pattern for Spans {
    fn find_matches(&self, _: &str) -> tokenizers::Result<Ranges> {
        Ok(self.0.clone())
    }
}

/// True where every match takes at least one character for certain.
fn has_length(expr: &fancy_regex::Expr) -> bool {
    use fancy_regex::Expr;
    match expr {
        Expr::Any { .. } => true,
        Expr::Literal { val, .. } => !val.is_empty(),
        Expr::Delegate { size, .. } => *size > 0,
        Expr::Concat(parts) => !parts.contains(&Expr::KeepOut) && parts.iter().any(has_length),
        Expr::Alt(parts) => parts.iter().all(has_length),
        Expr::Group(inner) | Expr::AtomicGroup(inner) => has_length(inner),
        Expr::Repeat { child, lo, .. } => *lo > 0 && has_length(child),
        Expr::Conditional { true_branch, false_branch, .. } => has_length(true_branch) && has_length(false_branch),
        _ => false,
    }
}
