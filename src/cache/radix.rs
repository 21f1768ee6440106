//! The tree of a prefix cache: which block of KV belongs to which tokens after which others. One node a block: it holds the
//! block's tokens and, for each group of blocks, the id of one block or none. It knows no sequence, no pool and no bytes: it
//! counts users and keeps the ids for its owner, who takes them back before a node goes. Nothing is allocated after
//! construction, and finding changes nothing.
//!
//! Invariants, recounted by [`RadixTree::check`]:
//! - only leaves hold fewer tokens than a block; siblings are ordered and prefix-free (see [`siblings`]);
//! - a node with users has only ancestors with users;
//! - a node without users is idle: in the idle list, and its parent has users or is later in that list. So the list's
//!   head is always a leaf, and taking heads away empties a branch from its tips.
#![forbid(unsafe_code)]

mod check;
mod list;
mod siblings;
#[cfg(test)]
mod tests;

use crate::error::{ConfigError, reserved};
use crate::ids::{BlockId, TokenId};
use list::List;
use siblings::Slot;

/// A node: its index in the tree. It is given out again once the node is removed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct NodeId(u32);

/// What must agree besides the tokens for a block of KV to be of use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct RootKey {
    /// The caller's: an adapter, a tenant.
    pub(crate) key: u64,
    /// The rotary regime under which the block was computed.
    pub(crate) regime: u32,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct RadixTree {
    nodes: Vec<Node>,
    /// `block_size` for each node, of which the first `len` count.
    tokens: Vec<TokenId>,
    /// One for each group, node by node; `BlockId::NONE` for none.
    blocks: Vec<BlockId>,
    block_size: usize,
    /// Top of the treap of nodes without a parent.
    top: u32,
    /// First of the unused nodes, which go on through `right`.
    unused: u32,
    len: usize,
    /// Nodes without users, the least recently used first.
    idle: List,
    /// One for each group.
    windows: Vec<List>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    key: RootKey,
    parent: u32,
    /// Top of the treap of its children.
    child: u32,
    left: u32,
    right: u32,
    /// Tokens; 0 where the node is not in use.
    len: u32,
    users: u32,
}

impl RadixTree {
    /// An empty tree for up to `nodes` nodes of `block_size` tokens and `groups` blocks.
    ///
    /// # Errors
    /// [`ConfigError`] where a size is out of range, or the system has not the memory.
    pub(crate) fn new(nodes: usize, block_size: usize, groups: usize) -> Result<Self, ConfigError> {
        // NIL and the lists' mark are no nodes.
        let most = NIL as usize - 1;
        if nodes > most {
            return Err(ConfigError::invalid("nodes of the prefix cache", format!("at most {most}"), nodes));
        }
        if block_size == 0 || block_size > u32::MAX as usize {
            return Err(ConfigError::invalid("block_size", format!("1 to {}", u32::MAX), block_size));
        }
        // A product that saturates is refused as too large for the system.
        let (all_tokens, all_blocks) = (nodes.saturating_mul(block_size), nodes.saturating_mul(groups));
        let mut tree = RadixTree {
            nodes: reserved("the prefix cache's tree", nodes)?,
            tokens: reserved("the prefix cache's tree", all_tokens)?,
            blocks: reserved("the prefix cache's tree", all_blocks)?,
            block_size,
            top: NIL,
            unused: if nodes == 0 { NIL } else { 0 },
            len: 0,
            idle: List::new(nodes)?,
            windows: reserved("the prefix cache's tree", groups)?,
        };
        // Low nodes go out first: a small load stays in a small part of the arrays.
        tree.nodes.extend((0..nodes).map(|i| if i + 1 == nodes { Node::unused(NIL) } else { Node::unused(i as u32 + 1) }));
        tree.tokens.resize(all_tokens, 0);
        tree.blocks.resize(all_blocks, BlockId::NONE);
        for _ in 0..groups {
            tree.windows.push(List::new(nodes)?);
        }
        Ok(tree)
    }

    /// Bytes that `new` allocates.
    pub(crate) fn bytes(nodes: usize, block_size: usize, groups: usize) -> usize {
        let list = List::bytes(nodes);
        nodes
            .saturating_mul(size_of::<Node>())
            .saturating_add(nodes.saturating_mul(block_size).saturating_mul(size_of::<TokenId>()))
            .saturating_add(nodes.saturating_mul(groups).saturating_mul(size_of::<BlockId>()))
            .saturating_add(list)
            .saturating_add(groups.saturating_mul(size_of::<List>().saturating_add(list)))
    }

    /// The child of `parent` (`None`: the top level, under `key`) that shares the longest non-empty prefix with `tokens`, and
    /// how many tokens that is. A child that matches in its whole length is always the one; of others that share as many, it is
    /// the last before `tokens` in lexicographic order, or else the first from there on. O(log siblings * block_size), expected.
    pub(crate) fn find(&self, parent: Option<NodeId>, key: RootKey, tokens: &[TokenId]) -> Option<(NodeId, usize)> {
        debug_assert!(parent.is_none_or(|p| self.node(p).key == key), "{parent:?} is not under {key:?}");
        self.nearest(Slot::Under(parent.map_or(NIL, |p| p.0)), key, tokens).map(|(i, shared)| (NodeId(i), shared))
    }

    /// Adds a leaf of 1 to `block_size` tokens, without users and blocks, in no window's list, idle and the most recently
    /// used; `None` where all nodes are in use. The parent is full, no sibling starts with these tokens, and none is a
    /// prefix of them.
    ///
    /// O(log siblings * block_size), expected. Under an idle parent also O(depth): all idle ancestors move behind the new node,
    /// so that the head of the idle list stays a leaf. Under a parent with users there is none to move.
    pub(crate) fn insert(&mut self, parent: Option<NodeId>, key: RootKey, tokens: &[TokenId]) -> Option<NodeId> {
        debug_assert!((1..=self.block_size).contains(&tokens.len()), "{} tokens in {}", tokens.len(), self.block_size);
        debug_assert!(parent.is_none_or(|p| self.len_of(p) == self.block_size), "{parent:?} is not full: it is a leaf");
        debug_assert!(
            self.find(parent, key, tokens).is_none_or(|(near, shared)| shared < tokens.len().min(self.len_of(near))),
            "a sibling starts with the new node's tokens, or is a prefix of them"
        );
        let new = self.unused;
        let node = self.nodes.get_mut(new as usize)?;
        self.unused = node.right;
        let parent = parent.map_or(NIL, |p| p.0);
        *node = Node { key, parent, len: tokens.len() as u32, ..Node::unused(NIL) };
        let from = new as usize * self.block_size;
        self.tokens[from..from + tokens.len()].copy_from_slice(tokens);
        self.link(Slot::Under(parent), new);
        self.len += 1;
        self.idle.append(new);
        let mut above = parent;
        while above != NIL && self.nodes[above as usize].users == 0 {
            self.idle.append(above);
            above = self.nodes[above as usize].parent;
        }
        Some(NodeId(new))
    }

    /// Gives a partial leaf more tokens: `tokens` starts with those it has and is longer, up to `block_size`. O(block_size).
    pub(crate) fn grow(&mut self, node: NodeId, tokens: &[TokenId]) {
        debug_assert!(
            tokens.len() > self.len_of(node),
            "{node:?} has {} tokens, not fewer than {}",
            self.len_of(node),
            tokens.len()
        );
        debug_assert!(tokens.len() <= self.block_size, "{} tokens in a block of {}", tokens.len(), self.block_size);
        debug_assert!(tokens.starts_with(self.tokens(node)), "{node:?} would have other tokens, not more");
        debug_assert!(self.is_leaf(node), "{node:?} has children");
        // Its place among its siblings stays right: they are prefix-free, so each differs from it within the tokens it has.
        let from = node.0 as usize * self.block_size;
        self.tokens[from..from + tokens.len()].copy_from_slice(tokens);
        self.nodes[node.0 as usize].len = tokens.len() as u32;
    }

    /// Removes a leaf without users from the tree and from all lists. The caller has taken its blocks.
    ///
    /// # Panics
    /// Where it has users, children or blocks: somebody would go on with a node that is another by then.
    pub(crate) fn remove(&mut self, node: NodeId) {
        let Node { parent, users, .. } = *self.node(node);
        assert!(users == 0 && self.is_leaf(node), "{node:?} is removed with {users} users, leaf: {}", self.is_leaf(node));
        let i = node.0;
        assert!(self.blocks_of(i).iter().all(|&block| block == BlockId::NONE), "{node:?} is removed with blocks");
        self.idle.remove(i);
        for list in &mut self.windows {
            list.remove(i);
        }
        self.unlink(Slot::Under(parent), i);
        self.nodes[i as usize] = Node::unused(self.unused);
        self.unused = i;
        self.len -= 1;
    }

    /// Tokens in a node: 1 to `block_size`.
    pub(crate) fn len_of(&self, node: NodeId) -> usize {
        self.node(node).len as usize
    }

    /// The tokens of a node.
    pub(crate) fn tokens(&self, node: NodeId) -> &[TokenId] {
        debug_assert!(self.node(node).len > 0);
        self.edge(node.0)
    }

    /// The node before it; `None` at the top level.
    pub(crate) fn parent(&self, node: NodeId) -> Option<NodeId> {
        let parent = self.node(node).parent;
        (parent != NIL).then_some(NodeId(parent))
    }

    /// Whether a node has no children.
    pub(crate) fn is_leaf(&self, node: NodeId) -> bool {
        self.node(node).child == NIL
    }

    /// A node's block in a group.
    pub(crate) fn block(&self, node: NodeId, group: usize) -> Option<BlockId> {
        debug_assert!(self.node(node).len > 0);
        Some(self.blocks_of(node.0)[group]).filter(|&block| block != BlockId::NONE)
    }

    /// Puts a block, or none, into a node and returns the one that was there.
    pub(crate) fn set_block(&mut self, node: NodeId, group: usize, block: Option<BlockId>) -> Option<BlockId> {
        debug_assert_ne!(block, Some(BlockId::NONE), "no block is called so");
        let old = self.block(node, group);
        let at = node.0 as usize * self.windows.len() + group;
        self.blocks[at] = block.unwrap_or(BlockId::NONE);
        old
    }

    /// Adds a user: somebody stands on the node, or below it. A node with users is not idle. Callers retain whole paths, parents
    /// before children, so that the invariant holds all the way.
    pub(crate) fn retain(&mut self, node: NodeId) {
        debug_assert!(self.node(node).len > 0);
        let users = &mut self.nodes[node.0 as usize].users;
        *users = users.checked_add(1).expect("fewer users than numbers to count them");
        self.idle.remove(node.0);
    }

    /// Takes a user away. A node that loses its last one is idle and the most recently used. Callers release whole paths,
    /// children before parents.
    ///
    /// # Panics
    /// Where it has no users: the caller lost count. Checked in every build, because the alternative is a node
    /// that is removed under a sequence.
    pub(crate) fn release(&mut self, node: NodeId) {
        let users = &mut self.nodes[node.0 as usize].users;
        assert!(*users > 0, "{node:?} is released without users");
        *users -= 1;
        if *users == 0 {
            self.idle.append(node.0);
        }
    }

    /// Those who stand on a node or below it.
    pub(crate) fn users(&self, node: NodeId) -> u32 {
        self.node(node).users
    }

    /// The least recently used node without users: always a leaf, by the module's invariant.
    pub(crate) fn oldest(&self) -> Option<NodeId> {
        self.idle.head().map(NodeId)
    }

    /// Nodes in use by the tree.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Nodes without users: those that [`RadixTree::oldest`] would come to, one after the other.
    #[cfg(test)]
    pub(crate) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// The most nodes there can be.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.nodes.len()
    }

    /// Lists a node among those whose block of this group could be taken without the node: at the end, or with `most_recent`
    /// false at the start, to be taken first. A node that is listed already is moved. Who belongs there is the caller's choice.
    pub(crate) fn list(&mut self, group: usize, node: NodeId, most_recent: bool) {
        debug_assert!(self.node(node).len > 0);
        if most_recent { self.windows[group].append(node.0) } else { self.windows[group].prepend(node.0) }
    }

    /// Takes a node off a group's list; changes nothing where it is not listed.
    pub(crate) fn unlist(&mut self, group: usize, node: NodeId) {
        self.windows[group].remove(node.0);
    }

    /// Whether a group's list has the node.
    pub(crate) fn listed(&self, group: usize, node: NodeId) -> bool {
        self.windows[group].contains(node.0)
    }

    /// The first node of a group's list.
    pub(crate) fn oldest_in(&self, group: usize) -> Option<NodeId> {
        self.windows[group].head().map(NodeId)
    }

    /// All nodes in use, in no meaningful order. O(capacity): for recounts.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        (0_u32..).zip(&self.nodes).filter(|(_, node)| node.len > 0).map(|(i, _)| NodeId(i))
    }

    fn node(&self, node: NodeId) -> &Node {
        let found = &self.nodes[node.0 as usize];
        debug_assert!(found.len > 0, "{node:?} is not in use");
        found
    }

    fn edge(&self, i: u32) -> &[TokenId] {
        let from = i as usize * self.block_size;
        &self.tokens[from..from + self.nodes[i as usize].len as usize]
    }

    fn blocks_of(&self, i: u32) -> &[BlockId] {
        let groups = self.windows.len();
        &self.blocks[i as usize * groups..][..groups]
    }
}

impl Node {
    fn unused(next: u32) -> Self {
        Node { key: RootKey { key: 0, regime: 0 }, parent: NIL, child: NIL, left: NIL, right: next, len: 0, users: 0 }
    }
}

/// No node. Past the end of every array.
const NIL: u32 = u32::MAX;
