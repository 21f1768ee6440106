//! Memory of the KV cache as bookkeeping: which block is free and how many hold it, and which tokens the blocks of the prefix
//! cache stand for. Knows no sequence, no model and no bytes; what a block contains is the backend's affair.
#![forbid(unsafe_code)]

mod pool;
mod radix;

pub(crate) use pool::BlockPool;
pub(crate) use radix::{NodeId, RadixTree, RootKey};
