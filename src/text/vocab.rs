//! The table of tokens that every kind of tokenizer shares: the text by which a token is known, the bytes that it stands for,
//! its kind, and the way back from text to id. Two blobs and their ends instead of a `String` a token: a vocabulary of 150,000
//! tokens is six allocations. Knows nothing of merging or splitting.
//!
//! Invariant: all three lists have one entry an id; the index finds the lowest id of a text.
#![forbid(unsafe_code)]

use crate::error::TextError;
use crate::ids::TokenId;
use aho_corasick::{AhoCorasick, MatchKind};
use foldhash::quality::RandomState;
use std::hash::BuildHasher;

/// What a token is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    /// True for tokens that plain text must never produce.
    pub(super) fn is_special(self) -> bool {
        matches!(self, TokenKind::Control | TokenKind::Unknown)
    }
}

/// Byte strings, one after the other.
#[derive(Default)]
pub(super) struct Packed {
    data: Vec<u8>,
    ends: Vec<u32>,
}

impl Packed {
    pub(super) fn with_capacity(items: usize, bytes: usize) -> Self {
        Packed { data: Vec::with_capacity(bytes), ends: Vec::with_capacity(items) }
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn push(&mut self, item: impl IntoIterator<Item = u8>) -> Result<(), TextError> {
        self.data.extend(item);
        self.close()
    }

    /// The bytes that `byte` makes of the text's characters; of a text with characters that stand for none, its own.
    pub(super) fn push_mapped(&mut self, text: &str, byte: impl Fn(char) -> Option<u8>) -> Result<(), TextError> {
        let start = self.data.len();
        for c in text.chars() {
            let Some(byte) = byte(c) else {
                self.data.truncate(start);
                self.data.extend_from_slice(text.as_bytes());
                break;
            };
            self.data.push(byte);
        }
        self.close()
    }

    fn close(&mut self) -> Result<(), TextError> {
        let end = u32::try_from(self.data.len())
            .map_err(|_| TextError::tokenizer("tokens", "at most 4 GiB of text", self.data.len()))?;
        self.ends.push(end);
        Ok(())
    }

    pub(super) fn item(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.data[start..end])
    }
}

/// An index from byte strings to ids: open addressing over the ids alone, keyed hashing so that no vocabulary can make it slow.
pub(super) struct Index {
    slots: Vec<Slot>,
    hasher: RandomState,
    /// No two items are equal.
    unique: bool,
}

/// An id, and bits of its item's hash that say most often where a walk goes on.
#[derive(Clone, Copy)]
struct Slot {
    tag: u32,
    id: u32,
}

const EMPTY: u32 = u32::MAX;

impl Index {
    /// Indexes the items of `table` that `wanted` names; of equal items the first stays.
    pub(super) fn new(table: &Packed, wanted: impl Fn(usize) -> bool) -> Self {
        let slots = (table.len() * 2).next_power_of_two().max(2);
        let empty = Slot { tag: 0, id: EMPTY };
        let mut index = Index { slots: vec![empty; slots], hasher: RandomState::default(), unique: true };
        for id in (0..table.len()).filter(|&id| wanted(id)) {
            let key = table.item(id).expect("id is below len");
            let (slot, tag) = index.slot(table, key);
            match &mut index.slots[slot] {
                free if free.id == EMPTY => *free = Slot { tag, id: id as u32 },
                _ => index.unique = false,
            }
        }
        index
    }

    pub(super) fn find(&self, table: &Packed, key: &[u8]) -> Option<TokenId> {
        let id = self.slots[self.slot(table, key).0].id;
        (id != EMPTY).then_some(id)
    }

    /// Where `key` is, or the free slot where it would go, and its tag. Half of the slots stay free, so the walk ends.
    fn slot(&self, table: &Packed, key: &[u8]) -> (usize, u32) {
        let mask = self.slots.len() - 1;
        let hash = self.hasher.hash_one(key);
        let (mut slot, tag) = (hash as usize & mask, (hash >> 32) as u32);
        loop {
            let Slot { tag: there, id } = self.slots[slot];
            if id == EMPTY || there == tag && table.item(id as usize) == Some(key) {
                return (slot, tag);
            }
            slot = (slot + 1) & mask;
        }
    }
}

/// The tokens of one tokenizer.
pub(super) struct Vocab {
    texts: Packed,
    bytes: Packed,
    kinds: Vec<TokenKind>,
    index: Index,
}

impl Vocab {
    /// `texts[id]` names the token, `bytes[id]` is what it adds to decoded text.
    pub(super) fn new(texts: Packed, bytes: Packed, kinds: Vec<TokenKind>) -> Self {
        assert!(texts.len() == kinds.len() && bytes.len() == kinds.len(), "one text, one byte string and one kind a token");
        // A control token that shares its text with a word must be found by that text, so it goes first.
        let index = Index::new(&texts, |_| true);
        Vocab { texts, bytes, kinds, index }
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(super) fn kind(&self, id: TokenId) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub(super) fn kinds(&self) -> &[TokenKind] {
        &self.kinds
    }

    pub(super) fn is_special(&self, id: TokenId) -> bool {
        self.kind(id).is_some_and(TokenKind::is_special)
    }

    pub(super) fn find(&self, text: &[u8]) -> Option<TokenId> {
        self.index.find(&self.texts, text)
    }

    /// True where `text` is known to be that token's and no other's.
    pub(super) fn is_only(&self, id: TokenId, text: &[u8]) -> bool {
        self.index.unique && self.text(id) == Some(text)
    }

    pub(super) fn text(&self, id: TokenId) -> Option<&[u8]> {
        self.texts.item(id as usize)
    }

    pub(super) fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.bytes.item(id as usize)
    }

    pub(super) fn byte_table(&self) -> &Packed {
        &self.bytes
    }
}

/// Tokens that are found in the text before anything else looks at it: the leftmost first, at one place the longest.
pub(super) struct Matcher {
    all: Option<Patterns>,
    plain: Option<Patterns>,
}

struct Patterns {
    search: AhoCorasick,
    ids: Vec<TokenId>,
}

impl Matcher {
    /// Control and unknown tokens match only where the caller asks for them, user-defined ones always.
    pub(super) fn new(vocab: &Vocab) -> Result<Self, TextError> {
        let of = |with_special: bool| -> Result<Option<Patterns>, TextError> {
            let ids: Vec<TokenId> = (0..vocab.len() as u32)
                .filter(|&id| match vocab.kinds[id as usize] {
                    TokenKind::UserDefined => true,
                    kind => with_special && kind.is_special(),
                })
                .filter(|&id| vocab.bytes(id).is_some_and(|bytes| !bytes.is_empty()))
                .collect();
            if ids.is_empty() {
                return Ok(None);
            }
            let search = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(ids.iter().map(|&id| vocab.bytes(id).expect("id is in range")))
                .map_err(|e| TextError::tokenizer("special tokens", "texts that fit one automaton", e))?;
            Ok(Some(Patterns { search, ids }))
        };
        Ok(Matcher { all: of(true)?, plain: of(false)? })
    }

    /// Calls `piece` for every stretch between tokens and every token, from left to right.
    pub(super) fn split<E>(
        &self,
        text: &str,
        parse_special: bool,
        mut piece: impl FnMut(Fragment<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        if let Some(patterns) = if parse_special { &self.all } else { &self.plain } {
            for found in patterns.search.find_iter(text) {
                if found.start() > done {
                    piece(Fragment::Text { at: done, text: &text[done..found.start()] })?;
                }
                piece(Fragment::Token(patterns.ids[found.pattern().as_usize()]))?;
                done = found.end();
            }
        }
        if done < text.len() {
            piece(Fragment::Text { at: done, text: &text[done..] })?;
        }
        Ok(())
    }
}

/// A part of a text: a token found in it, or what lies between.
pub(super) enum Fragment<'a> {
    Token(TokenId),
    Text { at: usize, text: &'a str },
}

/// The byte of a `<0xNN>` token.
pub(super) fn byte_of_text(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit())).then(|| u8::from_str_radix(hex, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_finds_the_first_of_equal_texts() {
        let mut table = Packed::default();
        for text in ["a", "b", "a", "", "ab"] {
            table.push(text.bytes()).unwrap();
        }
        let index = Index::new(&table, |_| true);
        assert_eq!(index.find(&table, b"a"), Some(0));
        assert_eq!(index.find(&table, b""), Some(3));
        assert_eq!(index.find(&table, b"ab"), Some(4));
        assert_eq!(index.find(&table, b"abc"), None);
        assert!(!index.unique && Index::new(&table, |id| id != 2).unique);
        assert_eq!(Index::new(&Packed::default(), |_| true).find(&Packed::default(), b"a"), None);
    }

    #[test]
    fn byte_tokens_are_exactly_two_digits() {
        assert_eq!(byte_of_text("<0x0A>"), Some(10));
        assert_eq!(byte_of_text("<0xff>"), Some(255));
        for wrong in ["<0x>", "<0xA>", "<0x0AB>", "<0x+A>", "0x0A", "<0x0A"] {
            assert_eq!(byte_of_text(wrong), None, "{wrong}");
        }
    }
}
