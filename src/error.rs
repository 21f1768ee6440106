//! One error type for each moment at which something can go wrong: loading, configuring, text, submitting, running,
//! saving.
//! Every message names the thing, what was expected and what was found.
#![forbid(unsafe_code)]

mod snapshot;

pub use snapshot::SnapshotError;

use crate::dtype::FormatId;
use crate::ids::{SeqId, TokenId};
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// What can be wrong with a model's files.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bytes are not what their format says.
    #[error("{file}: {at}: expected {expected}, found {found}")]
    Malformed {
        /// The file, or what stands for it when the bytes came from memory.
        file: String,
        /// The field, tensor or offset.
        at: String,
        /// What the format demands there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A valid file that this crate does not read.
    #[error("{file}: {what} is not supported: found {found}, supported: {supported}")]
    Unsupported {
        /// The file.
        file: String,
        /// The feature.
        what: String,
        /// The file's choice.
        found: String,
        /// The choices that would do.
        supported: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error("tensor {name} is missing ({role})")]
    MissingTensor {
        /// The name looked for.
        name: String,
        /// What it would have been used for.
        role: String,
    },
    /// A tensor that nothing asked for.
    #[error("tensor {name} does not belong to a {arch} model of this configuration")]
    ExtraTensor {
        /// The tensor.
        name: String,
        /// The architecture.
        arch: String,
    },
    /// A tensor's shape disagrees with the configuration.
    #[error("tensor {tensor}: expected shape {expected:?}, found {found:?}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Rows first.
        expected: Vec<usize>,
        /// Rows first.
        found: Vec<usize>,
    },
    /// A tensor is stored in a way that its use does not allow.
    #[error("tensor {tensor}: stored as {found}, {expected} needed")]
    TensorFormat {
        /// The tensor.
        tensor: String,
        /// What would do.
        expected: &'static str,
        /// What it is.
        found: FormatId,
    },
    /// A row is not a whole number of the format's blocks.
    #[error("tensor {tensor}: rows of {row_len} values are not whole blocks of {block_len} ({format})")]
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// Values in a row.
        row_len: usize,
        /// Values in a block.
        block_len: usize,
        /// The format.
        format: FormatId,
    },
    /// A tensor's bytes do not decode.
    #[error("tensor {tensor}: {source}")]
    Quant {
        /// The tensor.
        tensor: String,
        /// Why.
        source: QuantError,
    },
    /// The caller's progress callback said stop.
    #[error("loading was cancelled at {done_bytes} of {total_bytes} bytes")]
    Cancelled {
        /// Bytes done.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tokenizer or the chat template is wrong.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The device refused, for want of memory for example.
    #[error(transparent)]
    Device(#[from] RunError),
}

impl LoadError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        LoadError::Io { path: path.to_owned(), source }
    }

    pub(crate) fn malformed(
        file: impl Into<String>,
        at: impl Into<String>,
        expected: impl Into<String>,
        found: impl ToString,
    ) -> Self {
        LoadError::Malformed { file: file.into(), at: at.into(), expected: expected.into(), found: found.to_string() }
    }
}

/// What can be wrong with values or bytes that are to be decoded or encoded.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum QuantError {
    /// A format whose numbers are no weights.
    #[error("{format} holds no weights: it cannot be decoded")]
    NotReadable {
        /// The format.
        format: FormatId,
    },
    /// A format that this crate only reads, if at all.
    #[error("{format} cannot be written by this crate")]
    NotWritable {
        /// The format.
        format: FormatId,
    },
    /// A row is not a whole number of the format's blocks.
    #[error("rows of {row_len} values are not whole blocks of {block_len} ({format})")]
    PartialBlock {
        /// The format.
        format: FormatId,
        /// Values in a row.
        row_len: usize,
        /// Values in a block.
        block_len: usize,
    },
    /// The bytes are not a whole number of the format's blocks.
    #[error("{bytes} bytes are not whole blocks of {block_bytes} bytes ({format})")]
    PartialBytes {
        /// The format.
        format: FormatId,
        /// Bytes there are.
        bytes: usize,
        /// Bytes of a block.
        block_bytes: usize,
    },
    /// The values are not a whole number of rows.
    #[error("{values} values are not whole rows of {row_len}")]
    PartialRow {
        /// Values there are.
        values: usize,
        /// Values in a row.
        row_len: usize,
    },
    /// The output has not the size of the input.
    #[error("{bytes} bytes of {format} do not decode to {values} values")]
    Length {
        /// The format.
        format: FormatId,
        /// Bytes there are.
        bytes: usize,
        /// Values there is room for.
        values: usize,
    },
    /// A NaN or an infinity.
    #[error("value {at}: expected a finite number, found {value}")]
    NotFinite {
        /// Its index.
        at: usize,
        /// What it is.
        value: f32,
    },
    /// A number beyond the format.
    #[error("value {at}: {format} holds magnitudes up to {limit}, found {value}")]
    TooLarge {
        /// The format.
        format: FormatId,
        /// Its index.
        at: usize,
        /// What it is.
        value: f32,
        /// The largest that fits.
        limit: f32,
    },
}

/// What can be wrong with a model's configuration or with the caller's settings for an engine.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A field without which the model has no meaning.
    #[error("config: {field} is missing")]
    Missing {
        /// The field, as the file would spell it.
        field: String,
    },
    /// A field has a value that makes no sense.
    #[error("config: {field}: expected {expected}, found {found}")]
    Invalid {
        /// The field.
        field: String,
        /// What would do.
        expected: String,
        /// What is there.
        found: String,
    },
    /// No architecture of that name.
    #[error("architecture {found} is not known; known: {known}")]
    UnknownArch {
        /// The name in the file.
        found: String,
        /// The names in the table.
        known: String,
    },
    /// More memory than the caller allowed.
    #[error("{what} needs {needed_bytes} bytes, {limit_bytes} allowed")]
    Memory {
        /// What was about to be allocated.
        what: &'static str,
        /// Bytes it takes.
        needed_bytes: u64,
        /// Bytes there are.
        limit_bytes: u64,
    },
    /// More memory than the system gives.
    #[error("{what}: the system refused {needed_bytes} bytes")]
    Refused {
        /// What was about to be allocated.
        what: &'static str,
        /// Bytes it takes.
        needed_bytes: u64,
    },
}

/// An empty list with room for `len` values, or an error that names `what` it was for.
pub(crate) fn reserved<T>(what: &'static str, len: usize) -> Result<Vec<T>, ConfigError> {
    let mut list = Vec::new();
    match list.try_reserve_exact(len) {
        Ok(()) => Ok(list),
        Err(_) => Err(ConfigError::Refused { what, needed_bytes: (len as u64).saturating_mul(size_of::<T>() as u64) }),
    }
}

impl ConfigError {
    pub(crate) fn invalid(field: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> Self {
        ConfigError::Invalid { field: field.into(), expected: expected.into(), found: found.to_string() }
    }
}

/// What can be wrong with text: the tokenizer's tables, a chat template, a conversation.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TextError {
    /// The tokenizer's tables contradict each other or cannot be read.
    #[error("tokenizer: {at}: expected {expected}, found {found}")]
    Tokenizer {
        /// The table or file.
        at: String,
        /// What it should hold.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// The chat template does not compile, or failed on these messages.
    #[error("chat template: {message}")]
    Template {
        /// The template engine's own words, with the line.
        message: String,
    },
    /// A piece of text for which the vocabulary has no token and no way around.
    #[error("byte {at} of the text: the vocabulary has no token for {found}")]
    Unencodable {
        /// Where, in bytes from the start.
        at: usize,
        /// The byte or character.
        found: String,
    },
    /// A setting of the detokenizer or the template out of its range.
    #[error("{name}: expected {expected}, found {found}")]
    Parameter {
        /// The setting.
        name: &'static str,
        /// What would do.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// Raw text and messages in one conversation: the template would have to leave the raw text out.
    #[error("the conversation holds raw text: messages need a session of their own")]
    Mixed,
    /// The model came without what was asked for.
    #[error("the model has no {what}")]
    Absent {
        /// A tokenizer, or a chat template.
        what: &'static str,
    },
}

impl TextError {
    pub(crate) fn tokenizer(at: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> Self {
        TextError::Tokenizer { at: at.into(), expected: expected.into(), found: found.to_string() }
    }

    pub(crate) fn template(message: impl Into<String>) -> Self {
        TextError::Template { message: message.into() }
    }
}

/// Why a request was refused at the door. The engine is as it was.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum SubmitError {
    /// Nothing to run.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Nothing to generate.
    #[error("max_tokens is 0")]
    NoTokens,
    /// A token outside the vocabulary.
    #[error("token {token} at {at} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The token.
        token: TokenId,
        /// Its index in the prompt.
        at: usize,
        /// Tokens there are.
        vocab: usize,
    },
    /// Longer than the model or the engine can ever hold.
    #[error("{tokens} tokens (prompt and what may be generated) do not fit {what} of {limit}")]
    TooLong {
        /// Prompt plus `max_tokens`.
        tokens: usize,
        /// What they exceed: the context, or the cache.
        what: &'static str,
        /// Tokens that would fit.
        limit: usize,
    },
    /// A sampling parameter out of its range.
    #[error("{name}: expected {expected}, found {found}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Its range.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// As many sequences as the engine was built for.
    #[error("{limit} sequences are in the engine already")]
    QueueFull {
        /// The bound.
        limit: usize,
    },
    /// More memory than the system gives.
    #[error("the system refused {needed_bytes} bytes for a sequence of up to {tokens} tokens")]
    Refused {
        /// Prompt plus `max_tokens`.
        tokens: usize,
        /// Bytes they take.
        needed_bytes: u64,
    },
    /// No such sequence, or it is not in a state that allows the call.
    #[error("sequence {seq}: expected {expected}, found {found}")]
    Sequence {
        /// The sequence.
        seq: SeqId,
        /// States that would do.
        expected: &'static str,
        /// Its state.
        found: &'static str,
    },
}

/// What can go wrong while the model runs.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum RunError {
    /// The logits of a row hold a NaN: the weights or the arithmetic are broken, and any token would be a lie.
    #[error("logits of sequence {seq} hold a NaN at token {token}")]
    NanLogits {
        /// The sequence.
        seq: SeqId,
        /// The first such token.
        token: TokenId,
    },
    /// The logits of a row hold +inf: an overflow, from which no distribution follows.
    #[error("logits of sequence {seq} hold +inf at token {token}")]
    InfiniteLogits {
        /// The sequence.
        seq: SeqId,
        /// The first such token.
        token: TokenId,
    },
    /// A hidden state of a sequence that is to be embedded holds a NaN or an infinity.
    #[error("hidden state {at} of sequence {seq} at position {position}: expected a finite number, found {value}")]
    BrokenState {
        /// The sequence.
        seq: SeqId,
        /// The position of its token.
        position: usize,
        /// Index in the state.
        at: usize,
        /// What it is.
        value: f32,
    },
    /// The model left fewer hidden states than the step has tokens.
    #[error("sequence {seq}: {found} values of hidden states for a step that has {expected}")]
    NoStates {
        /// The sequence.
        seq: SeqId,
        /// Values there should be.
        expected: usize,
        /// Values there are.
        found: usize,
    },
    /// A row of logits that is not as long as the vocabulary.
    #[error("sequence {seq}: a row of {found} logits for a vocabulary of {expected}")]
    RowLength {
        /// The sequence.
        seq: SeqId,
        /// The vocabulary.
        expected: usize,
        /// The row.
        found: usize,
    },
    /// Every token is ruled out.
    #[error("no token is left for sequence {seq}: every logit is -inf")]
    NoToken {
        /// The sequence.
        seq: SeqId,
    },
    /// A step was begun while the last one is open.
    #[error("a step is open: commit or abort it before the next")]
    StepOpen,
    /// A batch larger than the model's buffers.
    #[error("batch: {what}: {found} exceeds {limit}")]
    BatchTooLarge {
        /// Tokens, rows, sequences or blocks.
        what: &'static str,
        /// In the batch.
        found: usize,
        /// In the buffers.
        limit: usize,
    },
    /// A batch, or what was to be added to one, that the model or its cache cannot run.
    #[error("batch: {what}: expected {expected}, found {found}")]
    BadBatch {
        /// The field.
        what: &'static str,
        /// What would do.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The policy plans nothing and asks for no later call, though the sequence has not ended.
    #[error("sequence {seq} has not ended, and the scheduler plans nothing for it")]
    Stalled {
        /// The sequence.
        seq: SeqId,
    },
    /// The device failed.
    #[error("{device}: {message}")]
    Device {
        /// Which.
        device: String,
        /// What it said.
        message: String,
    },
}

impl RunError {
    pub(crate) fn bad_batch(what: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        RunError::BadBatch { what, expected: expected.to_string(), found: found.to_string() }
    }
}

/// What can go wrong between a handle and the engine behind it.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum HandleError {
    /// As many commands wait as may; nothing was sent.
    #[error("{limit} commands wait for the engine already")]
    Busy {
        /// The bound.
        limit: usize,
    },
    /// The driver is gone: shut down, dropped, or by a panic on its thread.
    #[error("nobody runs the engine any more")]
    Gone,
    /// The engine refused the request.
    #[error(transparent)]
    Refused(#[from] SubmitError),
    /// The device failed, and the driver with it.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// Any of them.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// See [`LoadError`].
    #[error(transparent)]
    Load(#[from] LoadError),
    /// See [`ConfigError`].
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// See [`QuantError`].
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// See [`TextError`].
    #[error(transparent)]
    Text(#[from] TextError),
    /// See [`SubmitError`].
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// See [`RunError`].
    #[error(transparent)]
    Run(#[from] RunError),
    /// See [`HandleError`].
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// See [`SnapshotError`].
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
}
