//! One file a model family: a function from fields to numbers and a table from roles to tensor names. No code runs a layer.
#![forbid(unsafe_code)]

pub(super) mod llama;
