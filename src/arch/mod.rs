//! What a model family is: configuration to plain numbers, and a table from roles to tensor names. Pure.
#![forbid(unsafe_code)]

mod rope;
mod spec;

pub use rope::{RopeScaling, RopeSpec, RopeStyle};
pub use spec::{Activation, AttnDims, AttnSpec, Ffn, HeadSpec, KvLayout, LayerSpec, ModelSpec, NormKind, NormSpec, Wiring};
