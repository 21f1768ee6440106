//! A model as it lies on disk or in memory: weights, configuration, tokenizer, chat template. Opening reads headers and text;
//! no weight is touched.
//!
//! Invariant: what opened has a known architecture and a configuration that makes sense; whether the tensors fit it, loading
//! finds out.
#![forbid(unsafe_code)]

use crate::arch::{Arch, Config, ModelSpec, Naming, RopeScaling};
use crate::dtype::FormatId;
use crate::error::{ConfigError, LoadError, TextError};
use crate::ids::TokenId;
use crate::text::{ChatTemplate, GgufVocab, Tokenizer};
use crate::weights::{self, Bytes, Gguf, LoadMode, MetaArray, MetaValue, OnProgress, Opened, WeightSource, read_text_file};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
}

impl ModelFiles {
    /// Opens a GGUF file, a safetensors file with its config.json beside it, or a folder that holds either.
    ///
    /// # Errors
    /// [`LoadError`] names the file and the field.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions, progress: &mut OnProgress<'_>) -> Result<Self, LoadError> {
        let path = path.as_ref();
        match weights::open(path, options.mode, progress)? {
            Opened::Gguf(gguf) => Self::from_gguf(gguf, options.text),
            Opened::Safetensors(source) => {
                let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new(".")) };
                let texts = SideTexts::read(folder, options)?;
                Self::from_texts(source, &texts, options.text)
            }
        }
    }

    /// A model from bytes in memory, of a program that ships its weights in an archive of its own: a GGUF file, or a
    /// safetensors file with the texts that belong to it. `label` stands for it in messages.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_memory(label: &str, weights: impl Into<Bytes>, texts: &SideTexts) -> Result<Self, LoadError> {
        match weights::open_bytes(label, weights)? {
            Opened::Gguf(gguf) => Self::from_gguf(gguf, true),
            Opened::Safetensors(source) => Self::from_texts(source, texts, true),
        }
    }

    /// A model from any source of weights with the tensor names of published safetensors: synthetic ones, for benches.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_texts(weights: Arc<dyn WeightSource>, texts: &SideTexts, text: bool) -> Result<Self, LoadError> {
        let config = texts.config.as_deref().ok_or_else(|| ConfigError::Missing { field: "config.json".into() })?;
        let config = Config::from_json(config)?;
        let mut files = Self::assemble(weights, &config, Naming::HuggingFace)?;
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

    fn from_gguf(gguf: Arc<Gguf>, text: bool) -> Result<Self, LoadError> {
        let config = gguf_config(&gguf)?;
        let mut files = Self::assemble(gguf.clone(), &config, Naming::Gguf)?;
        files.take_rope_factors()?;
        if text {
            files.tokenizer = gguf_tokenizer(&gguf)?;
            files.template = gguf_template(&gguf)?;
        }
        files.settle_end_ids();
        Ok(files)
    }

    fn assemble(weights: Arc<dyn WeightSource>, config: &Config, naming: Naming) -> Result<Self, LoadError> {
        let arch = Arch::find(config, naming)?;
        let spec = (arch.spec)(config)?;
        Ok(ModelFiles { weights, naming, arch, spec, tokenizer: None, template: None, end_ids: Vec::new() })
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

    /// GGUF gives Llama 3's frequencies as divisors in a tensor.
    fn take_rope_factors(&mut self) -> Result<(), LoadError> {
        let name = "rope_freqs.weight";
        let (Some(t), Some(rope)) = (self.weights.tensor(name), self.spec.ropes.first_mut()) else { return Ok(()) };
        if t.format != FormatId::F32 {
            return Err(LoadError::TensorFormat { tensor: name.into(), expected: "F32", found: t.format });
        }
        if t.shape != [rope.rotary / 2] {
            return Err(LoadError::Shape { tensor: name.into(), expected: vec![rope.rotary / 2], found: t.shape.to_vec() });
        }
        let divisors: Vec<f64> = t.bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
        if let Some(bad) = divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
            return Err(LoadError::malformed(self.weights.label(), name, "finite divisors above 0", bad));
        }
        rope.scaling = RopeScaling::Factors(divisors);
        match rope.is_sound() {
            true => Ok(()),
            false => {
                Err(LoadError::malformed(self.weights.label(), name, "divisors that leave finite frequencies", "too small ones"))
            }
        }
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

fn gguf_config(gguf: &Gguf) -> Result<Config, LoadError> {
    let key = "general.architecture";
    let arch = gguf.metadata(key).and_then(MetaValue::as_str);
    let arch = arch.ok_or_else(|| LoadError::malformed(gguf.label(), key, "a string", "nothing of the kind"))?;
    let prefix = format!("{arch}.");
    let entries = gguf.entries().filter(|(key, _)| key.starts_with(&prefix));
    let mut config = Config::from_gguf(arch, entries.filter_map(|(key, v)| Some((key.to_owned(), to_json(v)?))));
    let has = |name: &str| gguf.tensor(name).is_some();
    if !config.has("vocab_size")
        && let Some(rows) = gguf.tensor("token_embd.weight").and_then(|t| t.shape.first().copied())
    {
        config.set("vocab_size", rows);
    }
    config.set("tie_word_embeddings", !has("output.weight"));
    config.set("attention_bias", has("blk.0.attn_q.bias"));
    config.set("mlp_bias", has("blk.0.ffn_gate.bias"));
    Ok(config)
}

/// Numbers, truth values, strings and lists of numbers; configurations hold nothing else.
fn to_json(value: &MetaValue) -> Option<Value> {
    Some(match value {
        MetaValue::Bool(b) => (*b).into(),
        MetaValue::Array(list) => list.to_i64s().map(Value::from).or_else(|| list.to_f64s().map(Value::from))?,
        other => match (other.as_str(), other.as_u64(), other.as_i64(), other.as_f64()) {
            (Some(s), ..) => s.into(),
            (_, Some(n), ..) => n.into(),
            (_, _, Some(n), _) => n.into(),
            (.., n) => n?.into(),
        },
    })
}

fn gguf_tokenizer(gguf: &Gguf) -> Result<Option<Tokenizer>, LoadError> {
    let get = |key: &str| gguf.metadata(&format!("tokenizer.ggml.{key}"));
    let wrong = |key: &str, expected: &str, found: &MetaValue| TextError::Tokenizer {
        at: format!("tokenizer.ggml.{key}"),
        expected: expected.to_owned(),
        found: found.type_name().to_owned(),
    };
    let Some(model) = get("model") else { return Ok(None) };
    let strings = |key: &str| -> Result<Option<Vec<&str>>, TextError> {
        get(key).map(|v| Ok(v.as_strs().ok_or_else(|| wrong(key, "a list of strings", v))?.iter().collect())).transpose()
    };
    let id = |key: &str| -> Result<Option<TokenId>, TextError> {
        let one = |v: &MetaValue| v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| wrong(key, "a token id", v));
        get(key).map(one).transpose()
    };
    let flag = |key: &str| -> Result<Option<bool>, TextError> {
        get(key).map(|v| v.as_bool().ok_or_else(|| wrong(key, "a truth value", v))).transpose()
    };
    let scores = get("scores").map(|v| {
        let list = v.as_array().and_then(MetaArray::as_f32s);
        list.ok_or_else(|| wrong("scores", "a list of f32", v))
    });
    let types = get("token_type").map(|v| -> Result<Vec<i32>, TextError> {
        let list = v.as_array().and_then(MetaArray::to_i64s).ok_or_else(|| wrong("token_type", "a list of integers", v))?;
        // A type that is no i32 is unknown, whatever it is.
        Ok(list.into_iter().map(|t| i32::try_from(t).unwrap_or(-1)).collect())
    });
    let types = types.transpose()?;
    let charsmap = get("precompiled_charsmap").map(|v| {
        let list =
            v.as_array().and_then(MetaArray::to_i64s).ok_or_else(|| wrong("precompiled_charsmap", "a list of bytes", v))?;
        Ok::<_, TextError>(list.into_iter().map(|b| b as u8).collect::<Vec<u8>>())
    });
    let charsmap = charsmap.transpose()?;
    let (tokens, merges) = (strings("tokens")?.unwrap_or_default(), strings("merges")?);
    let vocab = GgufVocab {
        model: model.as_str().ok_or_else(|| wrong("model", "a string", model))?,
        pre: get("pre").map(|v| v.as_str().ok_or_else(|| wrong("pre", "a string", v))).transpose()?,
        tokens: &tokens,
        scores: scores.transpose()?,
        token_types: types.as_deref(),
        merges: merges.as_deref(),
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        eot: id("eot_token_id")?,
        eom: id("eom_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        sep: id("seperator_token_id")?,
        mask: id("mask_token_id")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_space_prefix: flag("add_space_prefix")?,
        remove_extra_whitespaces: flag("remove_extra_whitespaces")?,
        precompiled_charsmap: charsmap.as_deref(),
    };
    Ok(Some(Tokenizer::from_vocab(&vocab)?))
}

fn gguf_template(gguf: &Gguf) -> Result<Option<ChatTemplate>, LoadError> {
    let key = "tokenizer.chat_template";
    let named = gguf.entries().filter_map(|(k, v)| {
        let name = if k == key { "default" } else { k.strip_prefix(key)?.strip_prefix('.')? };
        Some((name, v.as_str()?))
    });
    let named: Vec<_> = named.collect();
    Ok(if named.is_empty() { None } else { Some(ChatTemplate::from_named(named)?) })
}

const MOST_CONFIG_BYTES: u64 = 16 << 20;
const MOST_TOKENIZER_BYTES: u64 = 512 << 20;
