//! LLM inference to embed in a game, a desktop program or a server of your own: it maps the weights, brings its own kernels,
//! and leaves the host in charge. No framework under it, no runtime forced on its host.
//!
//! A conversation is a [`Session`], which runs in an [`Engine`] that the caller steps:
//!
//! ```no_run
//! use loquat::{Engine, EngineConfig, GenerateOptions, ModelFiles, Session};
//!
//! let files = ModelFiles::load("model.gguf")?;
//! let mut engine = Engine::new(&files, EngineConfig::default())?;
//! let mut session = Session::new(&files)?;
//! session.say("user", "Why is the sky blue?");
//! for piece in session.generate(&mut engine, &GenerateOptions::default())? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), loquat::Error>(())
//! ```
//!
//! Inside a frame loop nothing blocks: [`Session::start`] once, then each frame [`Engine::step_within`] a few milliseconds and
//! [`Session::poll`]. Without text, requests of token ids go to [`Engine::submit`]; here with a model of random weights:
//!
//! ```
//! use loquat::weights::{Fill, Synthetic, SyntheticTensor};
//! use loquat::{Engine, EngineConfig, EventKind, FormatId, ModelFiles, Request, SideTexts, Status};
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! let tensor = |name: &str, shape: &[usize]| SyntheticTensor {
//!     name: name.into(),
//!     shape: shape.into(),
//!     format: FormatId::F32,
//!     fill: if shape.len() == 1 { Fill::Constant(1.0) } else { Fill::Normal(0.2) },
//! };
//! let layer = "model.layers.0";
//! let weights = Synthetic::new(7, vec![
//!     tensor("model.embed_tokens.weight", &[96, 32]),
//!     tensor(&format!("{layer}.input_layernorm.weight"), &[32]),
//!     tensor(&format!("{layer}.self_attn.q_proj.weight"), &[32, 32]),
//!     tensor(&format!("{layer}.self_attn.k_proj.weight"), &[16, 32]),
//!     tensor(&format!("{layer}.self_attn.v_proj.weight"), &[16, 32]),
//!     tensor(&format!("{layer}.self_attn.o_proj.weight"), &[32, 32]),
//!     tensor(&format!("{layer}.post_attention_layernorm.weight"), &[32]),
//!     tensor(&format!("{layer}.mlp.gate_proj.weight"), &[64, 32]),
//!     tensor(&format!("{layer}.mlp.up_proj.weight"), &[64, 32]),
//!     tensor(&format!("{layer}.mlp.down_proj.weight"), &[32, 64]),
//!     tensor("model.norm.weight", &[32]),
//! ])?;
//! let config = r#"{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1,
//!     "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
//!     "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;
//! let texts = SideTexts { config: Some(config.into()), ..SideTexts::default() };
//! let files = ModelFiles::from_texts(Arc::new(weights), &texts, false)?;
//!
//! let mut engine = Engine::new(&files, EngineConfig { cache_tokens: 256, ..EngineConfig::default() })?;
//! engine.submit(Request::new([1, 2, 3], 8))?;
//! engine.submit(Request::new([60; 20], 8))?;
//! let mut tokens = 0;
//! loop {
//!     let status = engine.step_within(Duration::from_millis(2))?;
//!     while let Some(event) = engine.next_event() {
//!         if let EventKind::Token { .. } = event.kind {
//!             tokens += 1;
//!         }
//!     }
//!     if status == Status::Idle(None) {
//!         break;
//!     }
//! }
//! assert_eq!(tokens, 16);
//! # Ok::<(), loquat::Error>(())
//! ```
//!
//! # What it promises
//!
//! * **Same input, same bits.** Logits do not depend on batch mates, chunking, preemption, threads or kernel tier. A seeded
//!   request gives the same tokens alone, in a crowd, on another PC, and tomorrow.
//! * **The host stays in charge.** No thread unless asked for, no global, no output, no exit, no panic on anything that a file
//!   or a caller can get wrong.
//! * **Memory is a contract.** [`Engine::plan`] says how much before anything is allocated; a step allocates nothing.
//! * **Every file is hostile.** Everything is checked before it is used; errors name the thing and both values.

mod cache;
mod ids;
mod session;
mod sync;

pub mod arch;
pub mod backend;
pub mod batch;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod model;
pub mod quant;
pub mod sample;
pub mod sched;
pub mod text;
pub mod weights;

pub use backend::cpu::Compute;
pub use dtype::{FormatId, KvDType};
pub use engine::{BeamOptions, BeamSearch, BeamStop, BestOf, Hypothesis, Ranking, Sample};
pub use engine::{EmbedOptions, Engine, EngineConfig, Event, EventKind, FinishReason, Pooling, Request, Status};
pub use engine::{EngineDriver, EngineHandle, EventStream, HandleOptions, Reply};
pub use engine::{Imported, KvSave};
pub use error::{ConfigError, Error, HandleError, LoadError, QuantError, RunError, SnapshotError, SubmitError, TextError};
pub use ids::{BlockCopy, BlockGroup, BlockId, MAX_GROUPS, SeqId, TokenId};
pub use model::{Fingerprint, MemoryPlan, ModelFiles, OpenOptions, SideTexts};
pub use sample::SamplingParams;
pub use sched::{PinId, Scheduler, StepBuilder};
pub use session::{Generate, GenerateOptions, Polled, SaveOptions, Session};
pub use text::{Message, RenderOptions};
pub use weights::LoadMode;

/// The README's code compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
