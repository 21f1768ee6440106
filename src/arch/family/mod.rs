//! One file a model family: a function from fields to numbers and a table from roles to tensor names. No code runs a layer.
#![forbid(unsafe_code)]

pub(super) mod cohere;
pub(super) mod deepseek;
pub(super) mod exaone4;
pub(super) mod falcon;
pub(super) mod gemma;
pub(super) mod gemma2;
pub(super) mod gemma3;
pub(super) mod glm4;
pub(super) mod gpt2;
pub(super) mod gpt_bigcode;
pub(super) mod gpt_neox;
pub(super) mod gpt_oss;
pub(super) mod granite;
pub(super) mod llama;
pub(super) mod mistral;
pub(super) mod mixtral;
pub(super) mod olmo;
pub(super) mod olmo2;
pub(super) mod phi3;
pub(super) mod qwen2;
pub(super) mod qwen3;
pub(super) mod qwen3_moe;
pub(super) mod smollm3;
pub(super) mod stablelm;
pub(super) mod starcoder2;
