//! The tree against a list of nodes that is searched from end to end, and the sizes at which something could give way.
#![forbid(unsafe_code)]

use super::*;
use crate::error::ConfigError;
use proptest::prelude::*;
use std::collections::BTreeMap;

const KEY: RootKey = RootKey { key: 7, regime: 0 };
const KEYS: [RootKey; 3] = [KEY, RootKey { key: 8, ..KEY }, RootKey { regime: 1, ..KEY }];
const GROUPS: usize = 2;

/// What the tree should hold, in the plainest form.
struct Model {
    tree: RadixTree,
    block_size: usize,
    nodes: BTreeMap<NodeId, Plain>,
    /// The least recently used first.
    idle: Vec<NodeId>,
    windows: [Vec<NodeId>; GROUPS],
    /// Where users stand: each has retained that node and all above it.
    stands: Vec<NodeId>,
    next_block: u32,
}

struct Plain {
    key: RootKey,
    parent: Option<NodeId>,
    tokens: Vec<TokenId>,
    users: u32,
    blocks: [Option<BlockId>; GROUPS],
}

impl Model {
    fn new(nodes: usize, block_size: usize) -> Self {
        Model {
            tree: RadixTree::new(nodes, block_size, GROUPS).unwrap(),
            block_size,
            nodes: BTreeMap::new(),
            idle: Vec::new(),
            windows: Default::default(),
            stands: Vec::new(),
            next_block: 0,
        }
    }

    fn find(&self, parent: Option<NodeId>, key: RootKey, tokens: &[TokenId]) -> Option<(NodeId, usize)> {
        let siblings = self.nodes.iter().filter(|(_, node)| node.parent == parent && node.key == key);
        let shared = |node: &Plain| node.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let most = siblings.clone().map(|(_, node)| shared(node)).max().filter(|&most| most > 0)?;
        let mut best: Vec<_> = siblings.filter(|(_, node)| shared(node) == most).collect();
        best.sort_by_key(|(_, node)| &node.tokens);
        let before = best.partition_point(|(_, node)| node.tokens.as_slice() < tokens);
        Some((*best[before.saturating_sub(1)].0, most))
    }

    /// Follows a path as far as it goes and adds the rest; returns its end, or none where not a token is in the tree.
    fn insert(&mut self, key: RootKey, path: &[TokenId]) -> Option<NodeId> {
        let mut at = None;
        for chunk in path.chunks(self.block_size) {
            let found = self.tree.find(at, key, chunk);
            assert_eq!(found, self.find(at, key, chunk), "{chunk:?} under {at:?}");
            match found {
                Some((node, shared)) if shared == chunk.len() => at = Some(node),
                Some((node, shared)) if shared == self.tree.len_of(node) => {
                    self.grow(node, chunk);
                    at = Some(node);
                }
                _ => match self.add(at, key, chunk) {
                    Some(node) => at = Some(node),
                    None => break,
                },
            }
            // The end of the path, or a node that holds more: its tokens are not the path's from there on.
            if chunk.len() < self.block_size {
                break;
            }
        }
        at
    }

    fn add(&mut self, parent: Option<NodeId>, key: RootKey, tokens: &[TokenId]) -> Option<NodeId> {
        let Some(new) = self.tree.insert(parent, key, tokens) else {
            assert_eq!(self.nodes.len(), self.tree.capacity(), "refused with nodes left");
            return None;
        };
        let plain = Plain { key, parent, tokens: tokens.to_vec(), users: 0, blocks: [None; GROUPS] };
        assert!(self.nodes.insert(new, plain).is_none(), "{new:?} is given out twice");
        self.touch(new);
        Some(new)
    }

    fn grow(&mut self, node: NodeId, tokens: &[TokenId]) {
        self.tree.grow(node, tokens);
        self.nodes.get_mut(&node).unwrap().tokens = tokens.to_vec();
    }

    /// A node and all above it, children before parents.
    fn path(&self, node: NodeId) -> Vec<NodeId> {
        std::iter::successors(Some(node), |at| self.nodes[at].parent).collect()
    }

    /// A new node is the most recent, and its idle ancestors after it.
    fn touch(&mut self, node: NodeId) {
        for at in self.path(node) {
            if self.nodes[&at].users == 0 {
                self.idle.retain(|&i| i != at);
                self.idle.push(at);
            }
        }
    }

    fn retain(&mut self, node: NodeId) {
        self.tree.retain(node);
        self.nodes.get_mut(&node).unwrap().users += 1;
        self.idle.retain(|&i| i != node);
    }

    fn stand(&mut self, node: NodeId) {
        for at in self.path(node).into_iter().rev() {
            self.retain(at);
        }
        self.stands.push(node);
    }

    fn leave(&mut self, pick: usize) {
        if self.stands.is_empty() {
            return;
        }
        let node = self.stands.swap_remove(pick % self.stands.len());
        for at in self.path(node) {
            self.tree.release(at);
            let users = &mut self.nodes.get_mut(&at).unwrap().users;
            *users -= 1;
            if *users == 0 {
                self.idle.push(at);
            }
        }
    }

    /// One who stands on a full node goes on, as a sequence does whose block has filled up: only the new node is retained.
    fn go_on(&mut self, pick: usize, tokens: &[TokenId]) {
        let full = |&at: &usize| self.nodes[&self.stands[at]].tokens.len() == self.block_size;
        let Some(at) = (0..self.stands.len()).filter(full).nth(pick % self.stands.len().max(1)) else { return };
        let (parent, chunk) = (self.stands[at], &tokens[..tokens.len().min(self.block_size)]);
        let key = self.nodes[&parent].key;
        match self.find(Some(parent), key, chunk) {
            Some((near, shared)) if shared == chunk.len() || shared == self.nodes[&near].tokens.len() => {}
            _ => {
                if let Some(node) = self.add(Some(parent), key, chunk) {
                    self.retain(node);
                    self.stands[at] = node;
                }
            }
        }
    }

    fn evict(&mut self) {
        let Some(oldest) = self.tree.oldest() else { return };
        assert_eq!(oldest, self.idle.remove(0));
        let plain = self.nodes.remove(&oldest).unwrap();
        for (group, &block) in plain.blocks.iter().enumerate() {
            assert_eq!(self.tree.set_block(oldest, group, None), block);
            self.windows[group].retain(|&i| i != oldest);
        }
        self.tree.remove(oldest);
    }

    fn list(&mut self, group: usize, node: NodeId, how: usize) {
        self.windows[group].retain(|&i| i != node);
        match how {
            0 => self.tree.unlist(group, node),
            1 => {
                self.tree.list(group, node, true);
                self.windows[group].push(node);
            }
            _ => {
                self.tree.list(group, node, false);
                self.windows[group].insert(0, node);
            }
        }
    }

    fn set_block(&mut self, group: usize, node: NodeId, some: bool) {
        let block = some.then_some(BlockId(self.next_block));
        self.next_block += 1;
        let old = std::mem::replace(&mut self.nodes.get_mut(&node).unwrap().blocks[group], block);
        assert_eq!(self.tree.set_block(node, group, block), old);
    }

    fn act(&mut self, act: u8, key: RootKey, path: &[TokenId], pick: usize) {
        let node = self.nodes.keys().copied().nth(pick % self.nodes.len().max(1));
        match (act, node) {
            (0..=2, _) => _ = self.insert(key, path),
            (3, _) => {
                if let Some(end) = self.insert(key, path) {
                    self.stand(end);
                }
            }
            (4 | 5, _) => self.leave(pick),
            (6, _) => self.go_on(pick, path),
            (7, _) => self.evict(),
            (8, Some(node)) => self.stand(node),
            (9, Some(node)) => {
                self.stand(node);
                self.leave(self.stands.len() - 1);
            }
            (10, Some(node)) => self.list(pick % GROUPS, node, path.len() % 3),
            (11, Some(node)) => self.set_block(pick % GROUPS, node, !path.len().is_multiple_of(3)),
            (12, Some(node)) if self.nodes[&node].tokens.len() < self.block_size => {
                let mut tokens = self.nodes[&node].tokens.clone();
                tokens.extend_from_slice(path);
                tokens.truncate(self.block_size);
                self.grow(node, &tokens);
            }
            (13, Some(node)) => {
                let key = self.nodes[&node].key;
                assert_eq!(self.tree.find(Some(node), key, path), self.find(Some(node), key, path));
            }
            _ => assert_eq!(self.tree.find(None, key, path), self.find(None, key, path)),
        }
    }

    fn compare(&self) {
        self.tree.check();
        assert_eq!(self.tree.nodes().collect::<Vec<_>>(), self.nodes.keys().copied().collect::<Vec<_>>());
        assert_eq!((self.tree.len(), self.tree.idle()), (self.nodes.len(), self.idle.len()));
        assert_eq!(self.tree.oldest(), self.idle.first().copied());
        for (&id, plain) in &self.nodes {
            assert_eq!(self.tree.tokens(id), plain.tokens);
            assert_eq!((self.tree.parent(id), self.tree.users(id)), (plain.parent, plain.users), "{id:?}");
            assert_eq!(self.tree.is_leaf(id), self.nodes.values().all(|node| node.parent != Some(id)), "{id:?}");
        }
        for (group, window) in self.windows.iter().enumerate() {
            assert_eq!(self.tree.oldest_in(group), window.first().copied());
            for (&id, plain) in &self.nodes {
                assert_eq!(self.tree.block(id, group), plain.blocks[group], "{id:?} in group {group}");
                assert_eq!(self.tree.listed(group, id), window.contains(&id), "{id:?} in group {group}");
            }
        }
    }

    /// Takes everything away from the front, which shows the order of every list.
    fn drain(&mut self) {
        for group in 0..GROUPS {
            while let Some(first) = self.windows[group].first().copied() {
                assert_eq!(self.tree.oldest_in(group), Some(first));
                self.list(group, first, 0);
            }
        }
        while !self.stands.is_empty() {
            self.leave(0);
        }
        while !self.idle.is_empty() {
            self.evict();
            self.compare();
        }
        assert_eq!(self.tree.len(), 0);
    }
}

proptest! {
    /// Few different tokens, so that paths share beginnings of all lengths.
    #[test]
    fn a_tree_does_as_a_list_does(
        size in 0_usize..3, nodes in 0_usize..40,
        acts in prop::collection::vec((0_u8..15, 0_usize..3, prop::collection::vec(0_u32..3, 1..11), 0_usize..64), 0..150),
    ) {
        let mut model = Model::new(nodes, [1, 2, 4][size]);
        for (act, key, path, pick) in acts {
            model.act(act, KEYS[key], &path, pick);
            model.compare();
        }
        model.drain();
    }
}

#[test]
fn two_keys_do_not_see_each_other() {
    let mut tree = RadixTree::new(4, 2, 1).unwrap();
    let mut made = Vec::new();
    for key in KEYS {
        assert_eq!(tree.find(None, key, &[1, 2]), None);
        made.push(tree.insert(None, key, &[1, 2]).unwrap());
        tree.check();
    }
    for (key, node) in KEYS.into_iter().zip(made) {
        assert_eq!(tree.find(None, key, &[1, 2, 3]), Some((node, 2)));
    }
    assert_eq!(tree.find(None, RootKey { key: 6, ..KEY }, &[1, 2]), None);
}

/// Levels of the treap of a node's children: the most nodes that a search looks at.
fn depth(tree: &RadixTree, parent: Option<NodeId>) -> usize {
    let (mut most, mut stack) = (0, vec![(tree.at(Slot::Under(parent.map_or(NIL, |p| p.0))), 1)]);
    while let Some((at, level)) = stack.pop() {
        if at != NIL {
            most = most.max(level);
            stack.extend([(tree.nodes[at as usize].left, level + 1), (tree.nodes[at as usize].right, level + 1)]);
        }
    }
    most
}

#[test]
fn a_hundred_thousand_siblings_stay_near() {
    const MANY: u32 = 100_000;
    let tokens = |i: u32| [i / 1000, i % 1000, 5];
    // Upwards, downwards, and by a stride that is coprime to the number.
    let orders: [fn(u32) -> u32; 3] = [|i| i, |i| MANY - 1 - i, |i| (i as u64 * 61_803 % MANY as u64) as u32];
    for order in orders {
        let mut tree = RadixTree::new(MANY as usize + 1, 3, 0).unwrap();
        let parent = tree.insert(None, KEY, &[1, 2, 3]);
        let made: BTreeMap<u32, NodeId> =
            (0..MANY).map(order).map(|i| (i, tree.insert(parent, KEY, &tokens(i)).unwrap())).collect();
        assert_eq!(made.len(), MANY as usize);
        tree.check();
        assert!(depth(&tree, parent) <= 60, "{} levels", depth(&tree, parent));
        for (&i, &node) in &made {
            assert_eq!(tree.find(parent, KEY, &tokens(i)), Some((node, 3)));
        }
        for node in made.values().step_by(3) {
            tree.remove(*node);
        }
        tree.check();
        assert!(depth(&tree, parent) <= 60, "{} levels after removals", depth(&tree, parent));
    }
}

#[test]
fn a_hundred_thousand_generations_stay_off_the_stack() {
    const MANY: usize = 100_000;
    let mut tree = RadixTree::new(MANY + 1, 1, 1).unwrap();
    let mut chain: Vec<NodeId> = Vec::new();
    for i in 0..MANY {
        assert_eq!(tree.find(chain.last().copied(), KEY, &[i as u32]), None);
        let new = tree.insert(chain.last().copied(), KEY, &[i as u32]).unwrap();
        tree.retain(new);
        tree.list(0, new, true);
        chain.push(new);
    }
    tree.check();
    assert_eq!((tree.idle(), tree.oldest()), (0, None));
    for &node in chain.iter().rev() {
        tree.release(node);
    }
    tree.check();
    assert_eq!(tree.oldest(), chain.last().copied());
    // Under an idle parent: all of its ancestors go behind the new leaf.
    chain.push(tree.insert(chain.last().copied(), KEY, &[9]).unwrap());
    tree.check();
    assert_eq!(tree.clone().len(), MANY + 1);
    for &node in chain.iter().rev() {
        assert_eq!(tree.oldest(), Some(node));
        tree.remove(node);
    }
    tree.check();
    assert_eq!(tree.len(), 0);
}

#[test]
fn a_full_tree_refuses_and_is_as_it_was() {
    let mut tree = RadixTree::new(2, 2, 1).unwrap();
    let root = tree.insert(None, KEY, &[1, 2]).unwrap();
    let leaf = tree.insert(Some(root), KEY, &[3]).unwrap();
    assert_eq!(tree.insert(Some(root), KEY, &[4]), None);
    tree.check();
    assert_eq!((tree.len(), tree.capacity(), tree.oldest()), (2, 2, Some(leaf)));
    assert_eq!(tree.find(Some(root), KEY, &[4]), None);
    tree.remove(leaf);
    assert_eq!(tree.insert(Some(root), KEY, &[4]), Some(leaf));
    tree.check();
}

#[test]
fn sizes_that_cannot_be_are_errors() {
    for (nodes, block_size, groups, field) in
        [(u32::MAX as usize, 1, 1, "nodes of the prefix cache"), (1, 0, 1, "block_size"), (1, 1 << 32, 1, "block_size")]
    {
        match RadixTree::new(nodes, block_size, groups) {
            Err(ConfigError::Invalid { field: found, .. }) => assert_eq!(found, field),
            other => panic!("expected that {field} is refused, found {:?}", other.map(|tree| tree.len())),
        }
    }
    assert!(matches!(RadixTree::new(1 << 31, u32::MAX as usize, 1), Err(ConfigError::Refused { .. })));
    assert_eq!(RadixTree::new(0, 1, 1).unwrap().insert(None, KEY, &[1]), None);
}

#[test]
fn the_bytes_are_those_allocated() {
    for (nodes, block_size, groups) in [(0, 1, 0), (1, 1, 1), (100, 16, 2), (77, 3, 4)] {
        let tree = RadixTree::new(nodes, block_size, groups).unwrap();
        fn held<T>(list: &Vec<T>) -> usize {
            list.capacity() * size_of::<T>()
        }
        let lists: usize = tree.windows.iter().chain([&tree.idle]).map(List::held).sum();
        let all = held(&tree.nodes) + held(&tree.tokens) + held(&tree.blocks) + held(&tree.windows) + lists;
        assert_eq!(RadixTree::bytes(nodes, block_size, groups), all);
    }
}

#[test]
#[should_panic(expected = "is released without users")]
fn a_double_release_is_caught() {
    let mut tree = RadixTree::new(1, 1, 1).unwrap();
    let node = tree.insert(None, KEY, &[1]).unwrap();
    tree.retain(node);
    tree.release(node);
    tree.release(node);
}

#[test]
#[should_panic(expected = "is removed with 1 users")]
fn a_node_does_not_go_under_its_user() {
    let mut tree = RadixTree::new(1, 1, 1).unwrap();
    let node = tree.insert(None, KEY, &[1]).unwrap();
    tree.retain(node);
    tree.remove(node);
}

#[test]
#[should_panic(expected = "is removed with blocks")]
fn a_node_does_not_go_with_a_block() {
    let mut tree = RadixTree::new(1, 1, 2).unwrap();
    let node = tree.insert(None, KEY, &[1]).unwrap();
    tree.set_block(node, 1, Some(BlockId(3)));
    tree.remove(node);
}
