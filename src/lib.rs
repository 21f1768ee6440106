//! LLM inference to embed in a game, a desktop program or a server of your own.

mod ids;

pub mod arch;
pub mod backend;
pub mod batch;
pub mod cache;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod model;
pub mod quant;
pub mod sample;
pub mod sched;
pub mod text;
pub mod weights;

mod session;

pub use backend::cpu::Compute;
pub use dtype::{FormatId, KvDType};
pub use engine::{Engine, EngineConfig, Event, EventKind, FinishReason, Request, Status};
pub use error::{ConfigError, Error, LoadError, RunError, SubmitError, TextError};
pub use ids::{BlockId, SeqId, TokenId};
pub use model::{ModelFiles, OpenOptions};
pub use sample::SamplingParams;
pub use sched::{Scheduler, StepBuilder};
pub use session::{Generate, GenerateOptions, Polled, Session};
