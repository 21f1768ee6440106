//! The streaming way back: tokens in, text out as soon as it can no longer change. Holds back a character that is not whole yet
//! and whatever may still become a stop string; at a stop string it cuts and stays silent.
//!
//! Each stop string is followed by an automaton (Knuth, Morris, Pratt): its state is how many bytes of the stop the text ends
//! with, so the largest state is how much to hold back, and a token costs its bytes times the stops.
//!
//! Invariants: the chunks put together are [`Tokenizer::decode`] of all tokens, cut where the stop string that is complete first
//! begins (of several complete at one byte, the longest), however the tokens fall; a chunk never ends inside a character; after
//! warm-up nothing is allocated.
#![forbid(unsafe_code)]

use super::tokenizer::Tokenizer;
use crate::error::TextError;
use crate::ids::TokenId;

/// Where the tokens that are to come stand in the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Start {
    /// At its beginning: the space that a SentencePiece-style tokenizer puts before the first word is taken off.
    #[default]
    Text,
    /// After other text, to which the first space belongs.
    Continuation,
}

/// How to stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DetokenizerOptions {
    /// Special tokens add nothing. On unless switched off.
    pub skip_special: bool,
    /// Where the first token stands.
    pub start: Start,
    /// Strings that end the text; they and what follows are not given out.
    pub stop: Vec<String>,
}

impl Default for DetokenizerOptions {
    fn default() -> Self {
        DetokenizerOptions { skip_special: true, start: Start::Text, stop: Vec::new() }
    }
}

/// Turns tokens into text as they come.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    strip_space: bool,
    stops: Vec<Stop>,
    /// The stop string that was found.
    stopped: Option<usize>,
    finished: bool,
    /// Bytes at the end that may be the beginning of a character.
    partial: Vec<u8>,
    /// Text that is whole but not given out.
    pending: String,
    /// Bytes of `pending` that the stops have seen.
    seen: usize,
    /// What the last call gave out; the front of `pending`, moved here.
    chunk: String,
}

impl Detokenizer {
    /// A stream for one text.
    ///
    /// # Errors
    /// [`TextError::Parameter`] for an empty stop string.
    pub fn new(tokenizer: &Tokenizer, options: DetokenizerOptions) -> Result<Self, TextError> {
        if options.stop.iter().any(String::is_empty) {
            return Err(TextError::Parameter { name: "stop", expected: "strings that are not empty", found: "\"\"".into() });
        }
        Ok(Detokenizer {
            strip_space: tokenizer.strips_first_space() && options.start == Start::Text,
            tokenizer: tokenizer.clone(),
            skip_special: options.skip_special,
            stops: options.stop.into_iter().map(Stop::new).collect(),
            stopped: None,
            finished: false,
            partial: Vec::new(),
            pending: String::new(),
            seen: 0,
            chunk: String::new(),
        })
    }

    /// Takes the next token and gives the text that is certain now, often none. A token outside the vocabulary adds nothing; so
    /// does every token after a stop string or after [`finish`](Self::finish).
    pub fn push(&mut self, token: TokenId) -> &str {
        self.chunk.clear();
        if self.stopped.is_some() || self.finished || (self.skip_special && self.tokenizer.is_special(token)) {
            return &self.chunk;
        }
        let mut bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
        if self.strip_space
            && let Some(&first) = bytes.first()
        {
            self.strip_space = false;
            if first == b' ' {
                bytes = &bytes[1..];
            }
        }
        decode(&mut self.partial, bytes, false, &mut self.pending);
        self.release(false);
        &self.chunk
    }

    /// Ends the text and gives what was held back: half a character as one U+FFFD, and text that did not become a stop string.
    /// After a stop string, and at a second call, nothing.
    pub fn finish(&mut self) -> &str {
        self.chunk.clear();
        if self.stopped.is_none() && !self.finished {
            decode(&mut self.partial, &[], true, &mut self.pending);
            self.release(true);
        }
        self.finished = true;
        &self.chunk
    }

    /// The stop string that ended the text, by its place in the options.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Looks for stops in what is new of `pending` and moves what is certain to `chunk`.
    fn release(&mut self, last: bool) {
        let mut cut = None;
        let new = &self.pending.as_bytes()[self.seen..];
        for (at, &byte) in new.iter().enumerate() {
            for (index, stop) in self.stops.iter_mut().enumerate() {
                let longest = cut.map_or(0, |(_, len)| len);
                if stop.step(byte) && stop.text.len() > longest {
                    cut = Some((index, stop.text.len()));
                }
            }
            if let Some((index, len)) = cut {
                self.stopped = Some(index);
                self.chunk.push_str(&self.pending[..self.seen + at + 1 - len]);
                self.pending.clear();
                self.partial.clear();
                self.seen = 0;
                return;
            }
        }
        let held = if last { 0 } else { self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0) };
        let certain = self.pending.len() - held;
        self.chunk.push_str(&self.pending[..certain]);
        self.pending.drain(..certain);
        self.seen = held;
    }
}

/// A stop string and how much of it the text ends with.
#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// For each length of a match, the longest shorter one that it ends with.
    fallback: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut fallback = vec![0; bytes.len()];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = fallback[matched - 1];
            }
            matched += usize::from(bytes[at] == bytes[matched]);
            fallback[at] = matched;
        }
        Stop { text, fallback, matched: 0 }
    }

    /// True where the byte completes the stop string. Not to be called after that.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

/// Appends `partial` and `bytes` to `text` as a whole decode would, and leaves in `partial` what may still become a character.
fn decode(partial: &mut Vec<u8>, bytes: &[u8], last: bool, text: &mut String) {
    partial.extend_from_slice(bytes);
    let mut rest = partial.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).expect("valid up to there"));
                rest = after;
                match error.error_len() {
                    Some(len) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &rest[len..];
                    }
                    None => break,
                }
            }
        }
    }
    if last && !rest.is_empty() {
        text.push(char::REPLACEMENT_CHARACTER);
        rest = &[];
    }
    let done = partial.len() - rest.len();
    partial.drain(..done);
}
