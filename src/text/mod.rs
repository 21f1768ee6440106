//! Text on its way in and out: tokenizers from `tokenizer.json` and from GGUF metadata, chat templates, and the streaming way
//! back from tokens to text. Knows nothing of models, files or clocks: bytes, neutral structs and the time come in as
//! arguments.
//!
//! Invariants: a vocabulary that was accepted encodes every text or says which byte it cannot, never panics and never guesses;
//! text given as [`Specials::Plain`] never yields a control token; the chunks of a [`Detokenizer`] put together are the whole
//! decode, cut at the first stop string.
#![forbid(unsafe_code)]

mod bpe;
mod clock;
mod detokenizer;
mod gguf;
mod hf;
mod pre;
mod spm;
mod steps;
mod tags;
mod template;
mod tojson;
mod tokenizer;
mod vocab;

pub use detokenizer::{Detokenizer, DetokenizerOptions, Start};
pub use gguf::GgufVocab;
pub use template::{ChatTemplate, Message, RenderOptions};
pub use tokenizer::{AddSpecial, EncodeOptions, Specials, Tokenizer};
