//! Memory of the KV cache as bookkeeping: which block is free and how many hold it. Knows no sequence, no model and no bytes;
//! what a block contains is the backend's affair.
#![forbid(unsafe_code)]

mod pool;

pub(crate) use pool::BlockPool;
