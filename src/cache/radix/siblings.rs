//! The children of one parent in order: a treap threaded through the nodes, ordered by (key, tokens), with a hash of its index
//! for a node's rank, so that the shape follows from who is there and not from the order of arrival.
//!
//! Siblings are prefix-free: none starts with all the tokens of another. So a node that grows keeps its place, and the
//! one that shares most with given tokens is next to the place where these would go, on one side or the other.
//!
//! Every walk is a loop. Depth is O(log siblings) in expectation; whoever knows the indices could choose tokens that make it
//! worse, which costs time, never the stack.
#![forbid(unsafe_code)]

use super::{NIL, RadixTree, RootKey};
use crate::ids::TokenId;
use std::cmp::Ordering;

/// A place that names a node: the top of some parent's treap, or a side of a node in it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Slot {
    /// The children of a node, or for `NIL` the nodes without a parent.
    Under(u32),
    Left(u32),
    Right(u32),
}

/// The rank of a node: higher is nearer to the top. A bijection (the finalizer of MurmurHash3), so no two nodes tie.
pub(super) fn rank(i: u32) -> u32 {
    let mut h = i.wrapping_add(0x9E37_79B9);
    h = (h ^ (h >> 16)).wrapping_mul(0x85EB_CA6B);
    h = (h ^ (h >> 13)).wrapping_mul(0xC2B2_AE35);
    h ^ (h >> 16)
}

impl RadixTree {
    /// How a node stands to (key, tokens), and how many tokens they share: none under another key.
    pub(super) fn compare(&self, i: u32, key: RootKey, tokens: &[TokenId]) -> (Ordering, usize) {
        let by_key = self.nodes[i as usize].key.cmp(&key);
        if by_key.is_ne() {
            return (by_key, 0);
        }
        let own = self.edge(i);
        let shared = own.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        (own[shared..].first().cmp(&tokens[shared..].first()), shared)
    }

    /// The sibling that shares most with `tokens`, and how many that is; of those that share as many, the last before `tokens`
    /// or else the first from there on.
    pub(super) fn nearest(&self, top: Slot, key: RootKey, tokens: &[TokenId]) -> Option<(u32, usize)> {
        let (mut below, mut above) = (None, None);
        let mut at = self.at(top);
        while at != NIL {
            let (order, shared) = self.compare(at, key, tokens);
            if order.is_lt() {
                below = Some((at, shared));
                at = self.nodes[at as usize].right;
            } else {
                above = Some((at, shared));
                at = self.nodes[at as usize].left;
            }
        }
        let better = match (below, above) {
            (Some((_, fewer)), Some((_, more))) if more > fewer => above,
            (None, _) => above,
            _ => below,
        };
        better.filter(|&(_, shared)| shared > 0)
    }

    /// Puts a node, whose key and tokens are set, among its siblings.
    pub(super) fn link(&mut self, top: Slot, new: u32) {
        let mut slot = top;
        let mut rest = self.at(slot);
        while rest != NIL && rank(rest) > rank(new) {
            slot = if self.is_less(rest, new) { Slot::Right(rest) } else { Slot::Left(rest) };
            rest = self.at(slot);
        }
        self.set(slot, new);
        // What was here is cut in two around the new node, along the path to where it would be found.
        let (mut less, mut more) = (Slot::Left(new), Slot::Right(new));
        while rest != NIL {
            if self.is_less(rest, new) {
                self.set(less, rest);
                less = Slot::Right(rest);
                rest = self.at(less);
            } else {
                self.set(more, rest);
                more = Slot::Left(rest);
                rest = self.at(more);
            }
        }
        self.set(less, NIL);
        self.set(more, NIL);
    }

    /// Takes a node from among its siblings.
    ///
    /// # Panics
    /// Where it is not among them.
    pub(super) fn unlink(&mut self, top: Slot, old: u32) {
        let mut slot = top;
        loop {
            let at = self.at(slot);
            assert_ne!(at, NIL, "node {old} is not among its siblings");
            if at == old {
                break;
            }
            slot = if self.is_less(at, old) { Slot::Right(at) } else { Slot::Left(at) };
        }
        // Its two sides become one: the higher of their tops goes up, until one side is used up.
        let (mut less, mut more) = (self.nodes[old as usize].left, self.nodes[old as usize].right);
        while less != NIL && more != NIL {
            if rank(less) > rank(more) {
                self.set(slot, less);
                slot = Slot::Right(less);
                less = self.at(slot);
            } else {
                self.set(slot, more);
                slot = Slot::Left(more);
                more = self.at(slot);
            }
        }
        self.set(slot, if less == NIL { more } else { less });
    }

    fn is_less(&self, a: u32, b: u32) -> bool {
        self.compare(a, self.nodes[b as usize].key, self.edge(b)).0.is_lt()
    }

    pub(super) fn at(&self, slot: Slot) -> u32 {
        match slot {
            Slot::Under(NIL) => self.top,
            Slot::Under(i) => self.nodes[i as usize].child,
            Slot::Left(i) => self.nodes[i as usize].left,
            Slot::Right(i) => self.nodes[i as usize].right,
        }
    }

    fn set(&mut self, slot: Slot, to: u32) {
        match slot {
            Slot::Under(NIL) => self.top = to,
            Slot::Under(i) => self.nodes[i as usize].child = to,
            Slot::Left(i) => self.nodes[i as usize].left = to,
            Slot::Right(i) => self.nodes[i as usize].right = to,
        }
    }
}
