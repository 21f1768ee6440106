//! What the examples share: reading the command line, and finding a model.

pub(crate) mod args;
pub(crate) mod fetch;
