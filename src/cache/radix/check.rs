//! Recounts a tree, for tests: walks it from the top and compares with what is stored. Changes nothing, and stays on a stack of
//! its own, however deep the tree.
#![forbid(unsafe_code)]

use super::siblings::{Slot, rank};
use super::{NIL, RadixTree};
use crate::ids::BlockId;

impl RadixTree {
    /// Recounts everything. O(capacity * (block_size + groups)).
    ///
    /// # Panics
    /// Where an invariant of the module is broken.
    pub(crate) fn check(&self) {
        let reached = self.check_shape();
        self.check_unused(&reached);
        self.idle.check();
        let mut place = vec![None; self.nodes.len()];
        for (at, i) in self.idle.iter().enumerate() {
            place[i as usize] = Some(at);
        }
        for (i, node) in self.nodes.iter().enumerate().filter(|&(i, _)| reached[i]) {
            assert_eq!(place[i].is_some(), node.users == 0, "node {i}: idle, against {} users", node.users);
            if let Some(parent) = self.nodes.get(node.parent as usize).filter(|parent| parent.users == 0) {
                assert_eq!(node.users, 0, "node {i} has users, its parent {} has none: {parent:?}", node.parent);
                assert!(place[i] < place[node.parent as usize], "node {i} is idle for less long than its parent {}", node.parent);
            }
        }
        if let Some(oldest) = self.oldest() {
            assert!(self.is_leaf(oldest), "the oldest, {oldest:?}, has children");
        }
        for (group, list) in self.windows.iter().enumerate() {
            list.check();
            assert!(list.iter().all(|i| reached[i as usize]), "group {group} lists a node that is not in use");
        }
    }

    /// Walks the tree and says for each node whether it was met.
    fn check_shape(&self) -> Vec<bool> {
        let mut reached = vec![false; self.nodes.len()];
        let (mut parents, mut path) = (vec![NIL], Vec::new());
        while let Some(parent) = parents.pop() {
            // In order, left to right, with the nodes whose right side is still to come on `path`.
            let (mut at, mut before) = (self.at(Slot::Under(parent)), None);
            while at != NIL || !path.is_empty() {
                while at != NIL {
                    assert!(!std::mem::replace(&mut reached[at as usize], true), "node {at} is met twice");
                    path.push(at);
                    at = self.nodes[at as usize].left;
                }
                let i = path.pop().expect("filled just above, or not empty");
                self.check_node(i, parent);
                if let Some(before) = before {
                    let (order, shared) = self.compare(before, self.nodes[i as usize].key, self.edge(i));
                    assert!(order.is_lt(), "siblings {before} and {i} are out of order");
                    let same_key = self.nodes[before as usize].key == self.nodes[i as usize].key;
                    assert!(!same_key || shared < self.edge(before).len(), "{i} starts with its sibling {before}");
                }
                before = Some(i);
                if self.nodes[i as usize].child != NIL {
                    parents.push(i);
                }
                at = self.nodes[i as usize].right;
            }
        }
        assert_eq!(reached.iter().filter(|&&met| met).count(), self.len, "nodes met, against nodes counted");
        reached
    }

    fn check_node(&self, i: u32, parent: u32) {
        let node = &self.nodes[i as usize];
        assert!((1..=self.block_size).contains(&(node.len as usize)), "node {i} has {} tokens", node.len);
        assert!(node.child == NIL || node.len as usize == self.block_size, "node {i} has children after {} tokens", node.len);
        assert_eq!(node.parent, parent, "the parent of node {i}");
        if let Some(parent) = self.nodes.get(parent as usize) {
            assert_eq!(node.key, parent.key, "the key of node {i} against its parent's");
        }
        for side in [node.left, node.right] {
            assert!(side == NIL || rank(side) < rank(i), "node {side} stands under {i}, which has the lower rank");
        }
    }

    fn check_unused(&self, reached: &[bool]) {
        let (mut at, mut met) = (self.unused, 0);
        while at != NIL {
            assert!(!reached[at as usize], "node {at} is in the tree and unused");
            met += 1;
            assert!(met + self.len <= self.nodes.len(), "the unused nodes come round");
            at = self.nodes[at as usize].right;
        }
        assert_eq!(met + self.len, self.nodes.len(), "unused nodes and nodes in use");
        for (i, node) in self.nodes.iter().enumerate().filter(|&(i, _)| !reached[i]) {
            assert_eq!((node.len, node.users), (0, 0), "unused node {i}: tokens, users");
            assert!(self.blocks_of(i as u32).iter().all(|&block| block == BlockId::NONE), "unused node {i} has blocks");
            assert!(!self.idle.contains(i as u32), "unused node {i} is idle");
        }
    }
}
