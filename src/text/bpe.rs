//! Byte-level byte-pair encoding: text is cut into words, a word into bytes, and the pair with the lowest rank is merged until
//! no pair is left.
//!
//! ```text
//! ids = [token of b for b in word]
//! while some neighbours (l, r) have a rank: replace the lowest-ranked (then leftmost) by their merge
//! ```
//!
//! A heap of candidate pairs over a linked list makes a word of n bytes O(n log n); a candidate whose ids have changed since is
//! dropped when it surfaces.
//!
//! Invariant: a merge is longer than either part, so merging ends; no merge makes a control token.
#![forbid(unsafe_code)]

use super::pre::{Pre, Splitter};
use super::vocab::{Index, TokenKind, Vocab};
use crate::error::TextError;
use crate::ids::TokenId;
use foldhash::quality::RandomState;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;
use tokenizers::Normalizer;
use tokenizers::normalizers::unicode::NFC;

/// Merges and words of one vocabulary.
pub(super) struct Bpe {
    splitter: Splitter,
    nfc: bool,
    /// `NONE` where the vocabulary lacks the byte.
    byte_ids: Box<[TokenId; 256]>,
    unknown: Option<TokenId>,
    merges: HashMap<u64, Merge, RandomState>,
    /// Where whole words are taken without merging: the words.
    words: Option<Index>,
}

#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    id: TokenId,
}

const NONE: TokenId = TokenId::MAX;

/// Two ids as one key.
fn pair(left: TokenId, right: TokenId) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Bpe {
    /// `merges` are lines of two token texts with a space between, the best first.
    pub(super) fn new(vocab: &Vocab, merges: &[&str], pre: &Pre, unknown: Option<TokenId>) -> Result<Self, TextError> {
        let mut byte_ids = Box::new([NONE; 256]);
        let mut utf8 = [0; 4];
        for (byte, id) in byte_ids.iter_mut().enumerate() {
            let text = char_of_byte(byte as u8).encode_utf8(&mut utf8);
            *id = vocab.find(text.as_bytes()).filter(|&id| !vocab.is_special(id)).unwrap_or(NONE);
        }
        if byte_ids.iter().all(|&id| id == NONE) {
            return Err(TextError::tokenizer("tokenizer.ggml.tokens", "tokens for single bytes", "none"));
        }
        let mut table = HashMap::with_capacity_and_hasher(merges.len(), RandomState::default());
        let mut text = String::new();
        let mut next = 0;
        for (rank, line) in merges.iter().enumerate() {
            let wrong =
                |expected: &str| TextError::tokenizer(format!("tokenizer.ggml.merges[{rank}]"), expected, format!("{line:?}"));
            let (left, right) = match line.split_once(' ') {
                Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => (left, right),
                _ => return Err(wrong("two tokens with one space between")),
            };
            text.clear();
            text.push_str(left);
            text.push_str(right);
            let find = |text: &str| vocab.find(text.as_bytes());
            // Merges make tokens in the order of their ids, mostly.
            let made = if vocab.is_only(next, text.as_bytes()) { Some(next) } else { find(&text) };
            let (Some(left), Some(right), Some(id)) = (find(left), find(right), made) else {
                return Err(wrong("tokens of the vocabulary, and a token for their merge"));
            };
            next = id.saturating_add(1);
            if vocab.is_special(id) {
                return Err(wrong("a merge that makes no control token"));
            }
            let rank = u32::try_from(rank).map_err(|_| wrong("fewer than 2^32 merges"))?;
            table.entry(pair(left, right)).or_insert(Merge { rank, id });
        }
        let words = pre.ignore_merges.then(|| Index::new(vocab.byte_table(), |id| vocab.kinds()[id] == TokenKind::Normal));
        Ok(Bpe { splitter: Splitter::new(pre)?, nfc: pre.nfc, byte_ids, unknown, merges: table, words })
    }

    /// Appends the tokens of `text`, which starts `at` bytes into the caller's text.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        at: usize,
        scratch: &mut Scratch,
        out: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let normal;
        let text = if self.nfc && !text.is_ascii() {
            let mut string = tokenizers::NormalizedString::from(text);
            NFC.normalize(&mut string).map_err(|e| TextError::tokenizer("text", "normal form C", e))?;
            normal = string.get().to_owned();
            &normal
        } else {
            text
        };
        let mut pieces = std::mem::take(&mut scratch.pieces);
        self.splitter.split(text, &mut pieces, &mut scratch.spare);
        let done = pieces.iter().try_for_each(|piece| self.word(vocab, text, piece.clone(), at, scratch, out));
        scratch.pieces = pieces;
        done
    }

    fn word(
        &self,
        vocab: &Vocab,
        text: &str,
        piece: Range<usize>,
        at: usize,
        scratch: &mut Scratch,
        out: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let bytes = &text.as_bytes()[piece.clone()];
        if let Some(id) = self.words.as_ref().and_then(|words| words.find(vocab.byte_table(), bytes)) {
            out.push(id);
            return Ok(());
        }
        let Scratch { ids, next, prev, heap, .. } = scratch;
        ids.clear();
        for (i, &byte) in bytes.iter().enumerate() {
            match (self.byte_ids[byte as usize], self.unknown) {
                (NONE, None) => {
                    return Err(TextError::Unencodable { at: at + piece.start + i, found: format!("byte {byte:#04x}") });
                }
                (NONE, Some(unknown)) => ids.push(unknown),
                (id, _) => ids.push(id),
            }
        }
        let len = ids.len();
        next.clear();
        next.extend(1..=len);
        prev.clear();
        prev.extend((0..len).map(|i| i.wrapping_sub(1)));
        heap.clear();
        for left in 0..len.saturating_sub(1) {
            self.candidate(ids, left, left + 1, heap);
        }
        while let Some(Reverse((_, left, left_id, right_id))) = heap.pop() {
            let right = next[left];
            if ids[left] != left_id || right >= len || ids[right] != right_id {
                continue;
            }
            let merge = self.merges[&pair(left_id, right_id)];
            ids[left] = merge.id;
            ids[right] = NONE;
            next[left] = next[right];
            if next[left] < len {
                prev[next[left]] = left;
                self.candidate(ids, left, next[left], heap);
            }
            if prev[left] < len {
                self.candidate(ids, prev[left], left, heap);
            }
        }
        out.extend(ids.iter().copied().filter(|&id| id != NONE));
        Ok(())
    }

    fn candidate(&self, ids: &[TokenId], left: usize, right: usize, heap: &mut BinaryHeap<Reverse<Candidate>>) {
        if let Some(merge) = self.merges.get(&pair(ids[left], ids[right])) {
            heap.push(Reverse((merge.rank, left, ids[left], ids[right])));
        }
    }
}

/// Rank, index of the left symbol, and the two ids it stood for.
type Candidate = (u32, usize, TokenId, TokenId);

/// Room to work in, kept from word to word.
#[derive(Default)]
pub(super) struct Scratch {
    pieces: Vec<Range<usize>>,
    spare: Vec<Range<usize>>,
    ids: Vec<TokenId>,
    next: Vec<usize>,
    prev: Vec<usize>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

/// The character that stands for a byte in token texts: itself where it prints, else one of the 68 from U+0100 on.
pub(super) fn char_of_byte(byte: u8) -> char {
    let code = match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
        0..=0x20 => 0x100 + u32::from(byte),
        0x7f..=0xa0 => 0x121 + u32::from(byte - 0x7f),
        0xad => 0x143,
    };
    char::from_u32(code).expect("every code below U+0144 is a character")
}

/// The byte that a character of a token text stands for.
pub(super) fn byte_of_char(c: char) -> Option<u8> {
    Some(match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code as u8,
        code @ 0x100..=0x120 => (code - 0x100) as u8,
        code @ 0x121..=0x142 => (code - 0x121) as u8 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_one_to_one() {
        let mut seen = std::collections::HashSet::new();
        for byte in 0..=255 {
            let c = char_of_byte(byte);
            assert!(seen.insert(c));
            assert_eq!(byte_of_char(c), Some(byte));
        }
        assert_eq!(char_of_byte(b' '), '\u{120}');
        assert_eq!(char_of_byte(b'\n'), '\u{10a}');
        assert_eq!(byte_of_char(' '), None);
        assert_eq!(byte_of_char('\u{144}'), None);
    }
}
