//! SentencePiece-style encoding: characters are merged into the neighbouring pair with the best score, of equal scores the
//! leftmost, until no pair is a token; what is left without a token becomes bytes.
//!
//! ```text
//! symbols = characters
//! while some neighbours make a token: merge the best-scored (then leftmost)
//! symbol -> its token, else its parts where it is a token out of use, else its bytes, else the unknown token
//! ```
//!
//! Spaces are kept as spaces: the token table holds them in place of U+2581, and a U+2581 in a text means a space, as it does
//! to SentencePiece. Only normal, user-defined and unused tokens are ever made by merging, so no text becomes a control token.
#![forbid(unsafe_code)]

use super::vocab::{Index, TokenKind, Vocab};
use crate::error::TextError;
use crate::ids::TokenId;
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};

/// Scores and bytes of one vocabulary.
pub(super) struct Spm {
    pub(super) space_prefix: bool,
    pub(super) squeeze_spaces: bool,
    scores: Vec<f32>,
    pieces: Index,
    longest: usize,
    bytes: Option<Box<[TokenId; 256]>>,
    unknown: Option<TokenId>,
}

impl Spm {
    /// `bytes` holds the token of each byte, where the vocabulary has them.
    pub(super) fn new(
        vocab: &Vocab,
        scores: &[f32],
        bytes: Option<Box<[TokenId; 256]>>,
        unknown: Option<TokenId>,
    ) -> Result<Self, TextError> {
        if let Some(id) = scores.iter().position(|score| score.is_nan()) {
            return Err(TextError::tokenizer(format!("tokenizer.ggml.scores[{id}]"), "a number", "NaN"));
        }
        if bytes.is_none() && unknown.is_none() {
            return Err(TextError::tokenizer("tokenizer.ggml.tokens", "256 byte tokens or an unknown token", "neither"));
        }
        let made = |id: usize| {
            matches!(vocab.kinds()[id], TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused)
                && vocab.byte_table().item(id).is_some_and(|bytes| !bytes.is_empty())
        };
        let longest = (0..vocab.len()).filter(|&id| made(id)).filter_map(|id| vocab.byte_table().item(id)).map(<[u8]>::len);
        Ok(Spm {
            space_prefix: true,
            squeeze_spaces: false,
            // Adding zero makes -0.0 equal to 0.0 in the total order that the heap uses.
            scores: scores.iter().map(|score| score + 0.0).collect(),
            longest: longest.max().unwrap_or(0),
            pieces: Index::new(vocab.byte_table(), made),
            bytes,
            unknown,
        })
    }

    /// Appends the tokens of `text`, which starts `at` bytes into the caller's text; `first` says that it stands at the beginning
    /// or after a special token.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        at: usize,
        first: bool,
        scratch: &mut Scratch,
        out: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let mut line = std::mem::take(&mut scratch.line);
        line.clear();
        if self.space_prefix && first {
            line.push(' ');
        }
        let prefix = line.len();
        for c in text.chars() {
            let c = if c == '\u{2581}' { ' ' } else { c };
            if c == ' ' && self.squeeze_spaces && ((first && line.len() == prefix) || line.ends_with(' ')) {
                continue;
            }
            line.push(c);
        }
        if self.squeeze_spaces && line.len() > prefix && line.ends_with(' ') {
            line.pop();
        }
        if self.squeeze_spaces && line.len() == prefix {
            line.clear();
        }
        self.merge(vocab, &line, scratch);
        let done = self.emit(vocab, &line, at, scratch, out);
        scratch.line = line;
        done
    }

    fn merge(&self, vocab: &Vocab, line: &str, scratch: &mut Scratch) {
        let Scratch { symbols, heap, parts, .. } = scratch;
        symbols.clear();
        heap.clear();
        parts.clear();
        for (start, c) in line.char_indices() {
            let index = symbols.len();
            symbols.push(Symbol { start, len: c.len_utf8(), prev: index.wrapping_sub(1), next: index + 1 });
        }
        for left in 0..symbols.len().saturating_sub(1) {
            self.candidate(vocab, line, symbols, left, left + 1, heap);
        }
        while let Some(Candidate { left, len, unused, .. }) = heap.pop() {
            let right = symbols[left].next;
            // A symbol that was merged away has length 0; one that grew makes the pair longer than it was.
            if symbols[left].len == 0 || right >= symbols.len() || symbols[left].len + symbols[right].len != len {
                continue;
            }
            if unused {
                parts.insert((symbols[left].start, len), symbols[left].len);
            }
            symbols[left].len = len;
            symbols[left].next = symbols[right].next;
            symbols[right].len = 0;
            let (before, after) = (symbols[left].prev, symbols[left].next);
            if after < symbols.len() {
                symbols[after].prev = left;
                self.candidate(vocab, line, symbols, left, after, heap);
            }
            if before < symbols.len() {
                self.candidate(vocab, line, symbols, before, left, heap);
            }
        }
    }

    fn candidate(
        &self,
        vocab: &Vocab,
        line: &str,
        symbols: &[Symbol],
        left: usize,
        right: usize,
        heap: &mut BinaryHeap<Candidate>,
    ) {
        let len = symbols[left].len + symbols[right].len;
        if len > self.longest {
            return;
        }
        let start = symbols[left].start;
        if let Some(id) = self.find(vocab, &line.as_bytes()[start..start + len]) {
            let unused = vocab.kind(id) == Some(TokenKind::Unused);
            heap.push(Candidate { score: self.scores[id as usize], left, len, unused });
        }
    }

    fn emit(&self, vocab: &Vocab, line: &str, at: usize, scratch: &mut Scratch, out: &mut Vec<TokenId>) -> Result<(), TextError> {
        let Scratch { symbols, parts, stack, .. } = scratch;
        let mut after_unknown = false;
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            stack.clear();
            stack.push((symbol.start, symbol.len));
            while let Some((start, len)) = stack.pop() {
                let bytes = &line.as_bytes()[start..start + len];
                let found = self.find(vocab, bytes);
                let used = found.is_some_and(|id| vocab.kind(id) != Some(TokenKind::Unused));
                if let Some(&left) = parts.get(&(start, len)).filter(|_| !used) {
                    stack.push((start + left, len - left));
                    stack.push((start, left));
                    continue;
                }
                match (found, &self.bytes, self.unknown) {
                    (Some(id), ..) => out.push(id),
                    (None, Some(table), _) => out.extend(bytes.iter().map(|&byte| table[byte as usize])),
                    (None, None, Some(unknown)) => {
                        // A run of unknown characters is one unknown token.
                        if !after_unknown {
                            out.push(unknown);
                        }
                        after_unknown = true;
                        continue;
                    }
                    (None, None, None) => {
                        let found = String::from_utf8_lossy(bytes).into_owned();
                        return Err(TextError::Unencodable { at: at + start, found });
                    }
                }
                after_unknown = false;
            }
        }
        Ok(())
    }

    fn find(&self, vocab: &Vocab, piece: &[u8]) -> Option<TokenId> {
        self.pieces.find(vocab.byte_table(), piece)
    }
}

/// A stretch of the line, in a list without the merged ones.
struct Symbol {
    start: usize,
    len: usize,
    prev: usize,
    next: usize,
}

/// Two neighbours that make a token: where they stand, how long they were together, and how good the token is.
struct Candidate {
    score: f32,
    left: usize,
    len: usize,
    unused: bool,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(Reverse(self.left).cmp(&Reverse(other.left)))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

/// Room to work in, kept from text to text.
#[derive(Default)]
pub(super) struct Scratch {
    line: String,
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Candidate>,
    /// For a merge that made a token out of use: how long its left part was.
    parts: HashMap<(usize, usize), usize>,
    stack: Vec<(usize, usize)>,
}
