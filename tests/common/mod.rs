//! What several test files share.

#![allow(dead_code, unreachable_pub, unused_imports, clippy::unwrap_used, reason = "each test file uses its own part")]

pub mod engines;
pub mod fake;
pub mod gguf_twin;
pub mod gguf_writer;
pub mod golden;
pub mod lane;
pub mod made;
pub mod process;
pub mod text;
