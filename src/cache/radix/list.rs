//! A doubly linked list of small numbers below a bound, each at most once in it. Everything is O(1) but a walk, and nothing is
//! allocated after construction. Knows not what the numbers name.
//!
//! Invariant: a number is linked where [`List::contains`] says so, and is then met exactly once on the way from head to tail.
#![forbid(unsafe_code)]

use super::NIL;
use crate::error::{ConfigError, reserved};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct List {
    links: Vec<Link>,
    head: u32,
    tail: u32,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

impl List {
    /// An empty list for the numbers below `bound`.
    ///
    /// # Errors
    /// [`ConfigError`] where the system has not the memory.
    pub(super) fn new(bound: usize) -> Result<Self, ConfigError> {
        let mut links = reserved("the prefix cache's lists", bound)?;
        links.resize(bound, OUT);
        Ok(List { links, head: NIL, tail: NIL, len: 0 })
    }

    /// Bytes that `new` allocates.
    pub(super) fn bytes(bound: usize) -> usize {
        bound.saturating_mul(size_of::<Link>())
    }

    /// Bytes that it holds.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }

    pub(super) fn contains(&self, i: u32) -> bool {
        self.links[i as usize].prev != OUT.prev
    }

    /// The first number; `None` where the list is empty.
    pub(super) fn head(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Puts `i` at the end, wherever it was.
    pub(super) fn append(&mut self, i: u32) {
        self.remove(i);
        self.links[i as usize] = Link { prev: self.tail, next: NIL };
        match self.tail {
            NIL => self.head = i,
            tail => self.links[tail as usize].next = i,
        }
        self.tail = i;
        self.len += 1;
    }

    /// Puts `i` at the start, wherever it was.
    pub(super) fn prepend(&mut self, i: u32) {
        self.remove(i);
        self.links[i as usize] = Link { prev: NIL, next: self.head };
        match self.head {
            NIL => self.tail = i,
            head => self.links[head as usize].prev = i,
        }
        self.head = i;
        self.len += 1;
    }

    /// Takes `i` out where it is in.
    pub(super) fn remove(&mut self, i: u32) {
        if !self.contains(i) {
            return;
        }
        let Link { prev, next } = std::mem::replace(&mut self.links[i as usize], OUT);
        match prev {
            NIL => self.head = next,
            prev => self.links[prev as usize].next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => self.links[next as usize].prev = prev,
        }
        self.len -= 1;
    }

    /// From head to tail.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        let follow = |i: u32| (i != NIL).then_some(i);
        std::iter::successors(follow(self.head), move |&i| follow(self.links[i as usize].next))
    }

    /// Recounts everything, for tests.
    ///
    /// # Panics
    /// Where the invariant is broken.
    pub(super) fn check(&self) {
        let (mut before, mut met) = (NIL, 0);
        for i in self.iter() {
            assert!(self.contains(i), "{i} is met in a list that it is not in");
            assert_eq!(self.links[i as usize].prev, before, "{i} does not point back at the one before it");
            met += 1;
            // A list that has come round would never end.
            assert!(met <= self.len, "a list of {} holds more", self.len);
            before = i;
        }
        assert_eq!(self.tail, before, "the tail is not the last one");
        assert_eq!(self.len, met, "the length of a list against a walk");
        assert_eq!(self.links.iter().filter(|link| link.prev != OUT.prev).count(), met, "linked, but not met on a walk");
    }
}

/// Stands for a number that is not in the list: neither `NIL` nor a number below any bound.
const OUT: Link = Link { prev: NIL - 1, next: NIL - 1 };
