//! A model as it lies on disk or in memory: weights, configuration, tokenizer, chat template. Opening reads headers and text;
//! no weight is touched.
//!
//! Invariant: what opened has a known architecture and a configuration that makes sense; whether the tensors fit it, loading
//! finds out.
#![forbid(unsafe_code)]

use super::packed::Packed;
use super::{Fingerprint, gguf};
use crate::arch::{Arch, Config, ModelSpec, Naming};
use crate::error::{ConfigError, LoadError, TextError};
use crate::ids::TokenId;
use crate::text::{ChatTemplate, Tokenizer};
use crate::weights::{self, Bytes, Gguf, LoadMode, OnProgress, Opened, WeightSource, read_text_file};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// How to open a model's files.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Map or read the weights.
    pub mode: LoadMode,
    /// Build the tokenizer and the chat template as well. Without, a model of unknown text handling can still run on token
    /// ids.
    pub text: bool,
    /// Configuration to use in place of the folder's config.json; safetensors only.
    pub config: Option<PathBuf>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { mode: LoadMode::default(), text: true, config: None }
    }
}

/// The texts that lie beside safetensors. What is not there is `None`.
#[derive(Clone, Debug, Default)]
pub struct SideTexts {
    /// config.json.
    pub config: Option<String>,
    /// generation_config.json.
    pub generation_config: Option<String>,
    /// tokenizer.json.
    pub tokenizer: Option<String>,
    /// tokenizer_config.json.
    pub tokenizer_config: Option<String>,
    /// chat_template.jinja.
    pub chat_template: Option<String>,
}

/// See the module's documentation. Cheap to clone.
#[derive(Clone)]
pub struct ModelFiles {
    weights: Arc<dyn WeightSource>,
    naming: Naming,
    arch: &'static Arch,
    spec: ModelSpec,
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    end_ids: Vec<TokenId>,
    pub(super) packed: Option<Arc<Packed>>,
    /// Of the weights before they were packed.
    pub(super) weights_digest: Option<u128>,
    /// Shared by clones: taken once.
    pub(super) fingerprint: Arc<OnceLock<Fingerprint>>,
}

impl ModelFiles {
    /// [`open`](Self::open) with the default options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn load(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        Self::open(path, &OpenOptions::default(), &mut weights::no_progress)
    }

    /// Opens a GGUF file, a safetensors file with its config.json beside it, a folder that holds either, or what [`pack`](super::pack)
    /// made of them.
    ///
    /// # Errors
    /// [`LoadError`] names the file and the field.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions, progress: &mut OnProgress<'_>) -> Result<Self, LoadError> {
        Self::from_head(Head::open(path.as_ref(), options, progress)?, options.text)
    }

    /// A model from bytes in memory, of a program that ships its weights in an archive of its own: a GGUF file, or a
    /// safetensors file with the texts that belong to it. `label` stands for it in messages.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_memory(label: &str, weights: impl Into<Bytes>, texts: &SideTexts) -> Result<Self, LoadError> {
        match weights::open_bytes(label, weights)? {
            Opened::Gguf(gguf) => Self::from_head(Head::of_gguf(gguf)?, true),
            Opened::Safetensors(source) => Self::from_texts(source, texts, true),
        }
    }

    pub(super) fn from_head(head: Head, text: bool) -> Result<Self, LoadError> {
        let Head { weights, gguf, packed, texts } = head;
        let mut files = match gguf {
            Some(gguf) => Self::from_gguf(&gguf, weights, text)?,
            None => Self::from_texts(weights, &texts, text)?,
        };
        files.weights_digest = packed.as_ref().map(|p| p.weights_digest());
        files.packed = packed;
        Ok(files)
    }

    /// A model from any source of weights with the tensor names of published safetensors: synthetic ones, for benches.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_texts(weights: Arc<dyn WeightSource>, texts: &SideTexts, text: bool) -> Result<Self, LoadError> {
        let config = texts.config.as_deref().ok_or_else(|| ConfigError::Missing { field: "config.json".into() })?;
        let config = Config::from_json(config)?;
        let mut files = Self::assemble(weights, &config.text_part()?, Naming::HuggingFace)?;
        let generation = texts.generation_config.as_deref().map(Config::from_json).transpose()?;
        for source in [Some(&config), generation.as_ref()].into_iter().flatten() {
            files.end_ids.extend(source.token_ids("eos_token_id")?);
        }
        if text {
            files.add_texts(texts)?;
        }
        files.settle_end_ids();
        Ok(files)
    }

    fn from_gguf(gguf: &Gguf, weights: Arc<dyn WeightSource>, text: bool) -> Result<Self, LoadError> {
        let config = gguf::config(gguf, &*weights)?;
        let mut files = Self::assemble(weights, &config, Naming::Gguf)?;
        gguf::take_rope_factors(&*files.weights, &mut files.spec)?;
        if text {
            files.tokenizer = gguf::tokenizer(gguf)?;
            files.template = gguf::template(gguf)?;
        }
        files.settle_end_ids();
        Ok(files)
    }

    fn assemble(weights: Arc<dyn WeightSource>, config: &Config, naming: Naming) -> Result<Self, LoadError> {
        let arch = Arch::find(config, naming)?;
        let spec = arch.read(config, naming)?;
        Ok(ModelFiles {
            weights,
            naming,
            arch,
            spec,
            tokenizer: None,
            template: None,
            end_ids: Vec::new(),
            packed: None,
            weights_digest: None,
            fingerprint: Arc::default(),
        })
    }

    fn add_texts(&mut self, texts: &SideTexts) -> Result<(), LoadError> {
        let parsed = |text: &Option<String>, name: &str| -> Result<Option<Value>, TextError> {
            let parse = |t: &String| {
                serde_json::from_str(t).map_err(|e| TextError::Tokenizer {
                    at: name.to_owned(),
                    expected: "JSON".to_owned(),
                    found: e.to_string(),
                })
            };
            text.as_ref().map(parse).transpose()
        };
        let config = parsed(&texts.tokenizer_config, "tokenizer_config.json")?;
        if let Some(json) = &texts.tokenizer {
            let tokenizer = Tokenizer::from_json(json.as_bytes())?;
            self.tokenizer = Some(match &config {
                Some(config) => tokenizer.with_config(config)?,
                None => tokenizer,
            });
        }
        self.template = match (&texts.chat_template, &config) {
            (Some(source), _) => Some(ChatTemplate::new(source)?),
            (None, Some(config)) => ChatTemplate::from_config(config)?,
            (None, None) => None,
        };
        Ok(())
    }

    /// The end ids of all files count together.
    fn settle_end_ids(&mut self) {
        if let Some(tokenizer) = self.tokenizer.take() {
            let tokenizer = tokenizer.with_end_ids(self.end_ids.iter().copied());
            self.end_ids = tokenizer.end_ids().to_vec();
            self.tokenizer = Some(tokenizer);
        }
        self.end_ids.sort_unstable();
        self.end_ids.dedup();
    }

    /// The tensors.
    pub fn weights(&self) -> &dyn WeightSource {
        &*self.weights
    }

    /// The family.
    pub fn arch(&self) -> &'static Arch {
        self.arch
    }

    /// How the tensors are named.
    pub fn naming(&self) -> Naming {
        self.naming
    }

    /// The model's numbers.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`TextError::Absent`] where the files have none.
    pub fn tokenizer(&self) -> Result<&Tokenizer, TextError> {
        self.tokenizer.as_ref().ok_or(TextError::Absent { what: "tokenizer" })
    }

    /// The chat template.
    ///
    /// # Errors
    /// [`TextError::Absent`] where the files have none.
    pub fn template(&self) -> Result<&ChatTemplate, TextError> {
        self.template.as_ref().ok_or(TextError::Absent { what: "chat template" })
    }

    /// Tokens that end an answer, from all files together, in rising order.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }
}

/// What opening found, before anything is made of it.
pub(super) struct Head {
    pub(super) weights: Arc<dyn WeightSource>,
    /// Whose metadata the model is described by; without it the texts do.
    pub(super) gguf: Option<Arc<Gguf>>,
    pub(super) packed: Option<Arc<Packed>>,
    pub(super) texts: SideTexts,
}

impl Head {
    pub(super) fn open(path: &Path, options: &OpenOptions, progress: &mut OnProgress<'_>) -> Result<Self, LoadError> {
        match weights::open(path, options.mode, progress)? {
            Opened::Gguf(gguf) => Self::of_gguf(gguf),
            Opened::Safetensors(weights) => {
                let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new(".")) };
                Ok(Head { weights, gguf: None, packed: None, texts: SideTexts::read(folder, options)? })
            }
        }
    }

    fn of_gguf(gguf: Arc<Gguf>) -> Result<Self, LoadError> {
        if !Packed::is(&gguf) {
            return Ok(Head { weights: gguf.clone(), gguf: Some(gguf), packed: None, texts: SideTexts::default() });
        }
        let packed = Arc::new(Packed::open(gguf.clone())?);
        let texts = packed.texts();
        Ok(Head {
            weights: packed.clone(),
            gguf: texts.is_none().then_some(gguf),
            packed: Some(packed),
            texts: texts.unwrap_or_default(),
        })
    }
}

impl SideTexts {
    fn read(folder: &Path, options: &OpenOptions) -> Result<Self, LoadError> {
        let there = |name: &str, most: u64| -> Result<Option<String>, LoadError> {
            let path = folder.join(name);
            if path.is_file() { read_text_file(path, most).map(Some) } else { Ok(None) }
        };
        let config = options.config.clone().unwrap_or_else(|| folder.join("config.json"));
        let mut texts = SideTexts {
            config: Some(read_text_file(config, MOST_CONFIG_BYTES)?),
            generation_config: there("generation_config.json", MOST_CONFIG_BYTES)?,
            ..SideTexts::default()
        };
        if options.text {
            texts.tokenizer = there("tokenizer.json", MOST_TOKENIZER_BYTES)?;
            texts.tokenizer_config = there("tokenizer_config.json", MOST_CONFIG_BYTES)?;
            texts.chat_template = there("chat_template.jinja", MOST_CONFIG_BYTES)?;
        }
        Ok(texts)
    }
}

const MOST_CONFIG_BYTES: u64 = 16 << 20;
const MOST_TOKENIZER_BYTES: u64 = 512 << 20;
