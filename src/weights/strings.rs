//! Many short strings in two allocations: a vocabulary of 150,000 tokens loads at the speed of a copy. The text is a copy
//! and not a view of the file, because a mapped file may change under us and would no longer be the UTF-8 that was checked.
//!
//! Invariant: `ends` never falls, its last element is the length of `text`, and each lies between two characters.
#![forbid(unsafe_code)]

use std::fmt;

/// An immutable list of strings.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct StrArray {
    text: String,
    ends: Vec<usize>,
}

impl StrArray {
    /// Strings in the list.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True where there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.text[start..end])
    }

    /// The strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |&end| &self.text[std::mem::replace(&mut start, end)..end])
    }

    /// Room for `strings` strings of `text_bytes` together; the caller has checked both against its file.
    pub(super) fn with_capacity(strings: usize, text_bytes: usize) -> Self {
        StrArray { text: String::with_capacity(text_bytes), ends: Vec::with_capacity(strings) }
    }

    /// `None` where `text` is no UTF-8, or an end lies within a character or out of order.
    pub(super) fn of_parts(text: Vec<u8>, ends: Vec<usize>) -> Option<Self> {
        let text = String::from_utf8(text).ok()?;
        let sound = ends.is_sorted() && ends.last().copied().unwrap_or(0) == text.len();
        (sound && ends.iter().all(|&end| text.is_char_boundary(end))).then_some(StrArray { text, ends })
    }

    pub(super) fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len());
    }
}

impl<'a> FromIterator<&'a str> for StrArray {
    fn from_iter<I: IntoIterator<Item = &'a str>>(strings: I) -> Self {
        let mut list = StrArray::default();
        for string in strings {
            list.push(string);
        }
        list
    }
}

impl fmt::Debug for StrArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_was_put_in() {
        let strings = ["", "a", "", "é漢", "tail", ""];
        let list: StrArray = strings.into_iter().collect();
        assert_eq!(list.len(), strings.len());
        assert_eq!(list.iter().collect::<Vec<_>>(), strings);
        for (index, string) in strings.iter().enumerate() {
            assert_eq!(list.get(index), Some(*string));
        }
        assert_eq!(list.get(strings.len()), None);
        let parts = |text: &str, ends: &[usize]| StrArray::of_parts(text.into(), ends.into());
        assert_eq!(parts("aé漢", &[0, 1, 3, 6]), Some(["", "a", "é", "漢"].into_iter().collect()));
        assert_eq!(parts("", &[]), Some(StrArray::default()));
        assert!(parts("é", &[1, 2]).is_none() && parts("ab", &[2, 1]).is_none() && parts("ab", &[1]).is_none());
        assert!(StrArray::of_parts(vec![0xff], vec![1]).is_none());
        assert!(StrArray::default().is_empty());
        assert_eq!(format!("{:?}", StrArray::from_iter(["x", "y"])), r#"["x", "y"]"#);
    }
}
