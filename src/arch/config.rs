//! A model's configuration as named fields, from config.json or from GGUF metadata. GGUF keys are translated to the names
//! that config.json uses, so that a family reads one spelling.
//!
//! Invariant: an accessor never guesses: a field is there with a sane value, is absent, or is an error that names it.
#![forbid(unsafe_code)]

use crate::error::ConfigError;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Config {
    fields: Map<String, Value>,
    /// Dotted path of `fields` in the file, for messages.
    path: String,
    /// Fields that the file calls otherwise, and how.
    spelled: BTreeMap<String, String>,
}

/// A field's value in a table.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Plain {
    /// A truth value.
    Flag(bool),
    /// A whole number.
    Count(u64),
    /// A number.
    Number(f64),
    /// A string.
    Text(&'static str),
}

/// Whole numbers past this are a mistake in any field that counts something.
const MOST: u64 = 1 << 40;

/// `{arch}.` keys of GGUF and what config.json calls them. A dot in the second column nests.
const GGUF_FIELDS: &[(&str, &str)] = &[
    ("vocab_size", "vocab_size"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.value_length", "value_head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.scale", "attention_multiplier"),
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("attention.key_length_mla", "qk_head_dim"),
    ("attention.value_length_mla", "v_head_dim"),
    ("attention.clamp_kqv", "clip_qkv"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logit_scale"),
    ("use_parallel_residual", "use_parallel_residual"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_count", "n_shared_experts"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("expert_weights_scale", "routed_scaling_factor"),
    ("expert_weights_norm", "norm_topk_prob"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("rope.dimension_count", "rotary_dim"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("rope.freq_base", "rope_theta"),
    ("rope.scaling.type", "rope_scaling.rope_type"),
    ("rope.scaling.factor", "rope_scaling.factor"),
    ("rope.scaling.original_context_length", "rope_scaling.original_max_position_embeddings"),
    ("rope.scaling.attn_factor", "rope_scaling.attn_factor"),
    ("rope.scaling.short_factor", "rope_scaling.short_factor"),
    ("rope.scaling.long_factor", "rope_scaling.long_factor"),
    ("rope.scaling.yarn_beta_fast", "rope_scaling.beta_fast"),
    ("rope.scaling.yarn_beta_slow", "rope_scaling.beta_slow"),
    ("rope.scaling.yarn_log_multiplier", "rope_scaling.log_multiplier"),
    ("rope.scale_linear", "rope_scale_linear"),
];

impl Config {
    /// From the text of a config.json.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] where it is no JSON object, or nests deeper than 128.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let invalid = |found: String| ConfigError::invalid("config.json", "a JSON object", found);
        match serde_json::from_str(text).map_err(|e| invalid(e.to_string()))? {
            Value::Object(fields) => Ok(Config { fields, path: String::new(), spelled: BTreeMap::new() }),
            other => Err(invalid(kind(&other).to_owned())),
        }
    }

    /// From GGUF metadata: `arch` is `general.architecture`, `entries` are the keys that start with it, as JSON values.
    /// Keys without a counterpart keep their own names.
    pub fn from_gguf(arch: &str, entries: impl IntoIterator<Item = (String, Value)>) -> Self {
        let mut fields = Map::new();
        let mut spelled = BTreeMap::from([("model_type".to_owned(), "general.architecture".to_owned())]);
        fields.insert("model_type".into(), arch.into());
        for (key, value) in entries {
            let whole = key.clone();
            let key = key.strip_prefix(arch).and_then(|k| k.strip_prefix('.')).unwrap_or(&key);
            let name = GGUF_FIELDS.iter().find(|(from, _)| *from == key).map_or(key, |(_, to)| *to);
            spelled.insert(name.to_owned(), whole);
            match name.split_once('.') {
                Some(("rope_scaling", inner)) => {
                    let scaling = fields.entry("rope_scaling").or_insert_with(|| Value::Object(Map::new()));
                    if let Value::Object(scaling) = scaling {
                        scaling.insert(inner.into(), value);
                    }
                }
                _ => _ = fields.insert(name.into(), value),
            }
        }
        Config { fields, path: String::new(), spelled }
    }

    /// Sets a field that the file leaves to other evidence, such as the presence of a tensor.
    pub fn set(&mut self, field: &str, value: impl Into<Value>) {
        self.fields.insert(field.into(), value.into());
    }

    /// Sets fields of a nested object, which is made if it is not there.
    pub fn nest(&mut self, section: &str, values: impl IntoIterator<Item = (&'static str, Value)>) {
        let inner = self.fields.entry(section).or_insert_with(|| Value::Object(Map::new()));
        if let Value::Object(inner) = inner {
            inner.extend(values.into_iter().map(|(field, value)| (field.to_owned(), value)));
        }
    }

    /// True where the field is there and not null.
    pub fn has(&self, field: &str) -> bool {
        self.value(field).is_some()
    }

    /// The family's name.
    pub fn model_type(&self) -> Result<&str, ConfigError> {
        self.str("model_type")
    }

    /// A nested object, or none.
    pub fn section(&self, field: &str) -> Result<Option<Config>, ConfigError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Object(fields)) => {
                let inner = |(name, spelled): (&String, &String)| {
                    let name = name.strip_prefix(field)?.strip_prefix('.')?;
                    Some((name.to_owned(), spelled.clone()))
                };
                let spelled = self.spelled.iter().filter_map(inner).collect();
                Ok(Some(Config { fields: fields.clone(), path: self.name(field), spelled }))
            }
            Some(other) => Err(self.wrong(field, "an object", other)),
        }
    }

    /// A whole number, 0 among them.
    pub fn whole(&self, field: &str) -> Result<u64, ConfigError> {
        let value = self.value(field).ok_or_else(|| self.missing(field))?;
        value.as_u64().filter(|n| *n <= MOST).ok_or_else(|| self.wrong(field, "a whole number", value))
    }

    /// A count of at least 1.
    pub fn count(&self, field: &str) -> Result<usize, ConfigError> {
        self.count_or(field, None)
    }

    /// A count of at least 1, with a default where the field is absent.
    pub fn count_or(&self, field: &str, default: Option<usize>) -> Result<usize, ConfigError> {
        match (self.value(field), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(self.missing(field)),
            (Some(value), _) => match value.as_u64() {
                Some(n) if (1..=MOST).contains(&n) => {
                    usize::try_from(n).map_err(|_| self.wrong(field, "a count that fits this machine", value))
                }
                _ => Err(self.wrong(field, "a whole number of at least 1", value)),
            },
        }
    }

    /// A finite number.
    pub fn number(&self, field: &str) -> Result<f64, ConfigError> {
        self.number_or(field, None)
    }

    /// A finite number, with a default where the field is absent.
    pub fn number_or(&self, field: &str, default: Option<f64>) -> Result<f64, ConfigError> {
        match (self.value(field), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(self.missing(field)),
            (Some(value), _) => match value.as_f64() {
                Some(n) if n.is_finite() => Ok(n),
                _ => Err(self.wrong(field, "a finite number", value)),
            },
        }
    }

    /// A number above 0 that f32 holds as well as f64, with a default where the field is absent.
    pub fn positive_or(&self, field: &str, default: Option<f64>) -> Result<f64, ConfigError> {
        let n = self.number_or(field, default)?;
        match is_positive(n) {
            true => Ok(n),
            false => Err(ConfigError::invalid(self.name(field), "a number above 0 within f32", n)),
        }
    }

    /// A truth value, with a default where the field is absent.
    pub fn flag_or(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.value(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(self.wrong(field, "true or false", other)),
        }
    }

    /// A string.
    pub fn str(&self, field: &str) -> Result<&str, ConfigError> {
        match self.value(field) {
            None => Err(self.missing(field)),
            Some(Value::String(s)) => Ok(s),
            Some(other) => Err(self.wrong(field, "a string", other)),
        }
    }

    /// A string, with a default where the field is absent.
    pub fn str_or<'a>(&'a self, field: &str, default: &'a str) -> Result<&'a str, ConfigError> {
        if self.has(field) { self.str(field) } else { Ok(default) }
    }

    /// A list of `len` numbers above 0 that f32 holds.
    pub fn numbers(&self, field: &str, len: usize) -> Result<Vec<f64>, ConfigError> {
        let value = self.value(field).ok_or_else(|| self.missing(field))?;
        let wrong = || self.wrong(field, &format!("{len} numbers above 0 within f32"), value);
        let list = value.as_array().filter(|l| l.len() == len).ok_or_else(wrong)?;
        list.iter().map(|v| v.as_f64().filter(|n| is_positive(*n)).ok_or_else(wrong)).collect()
    }

    /// A list of strings, or none.
    pub fn strs(&self, field: &str) -> Result<Option<Vec<&str>>, ConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let list = value.as_array().and_then(|l| l.iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| self.wrong(field, "a list of strings", value))
    }

    /// A list of whole numbers, or none. Truth values count as 0 and 1.
    pub fn wholes(&self, field: &str) -> Result<Option<Vec<u64>>, ConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let one = |v: &Value| v.as_u64().or_else(|| v.as_bool().map(u64::from));
        let list = value.as_array().and_then(|l| l.iter().map(one).collect());
        list.map(Some).ok_or_else(|| self.wrong(field, "a list of whole numbers", value))
    }

    /// Refuses a field that changes the mathematics in a way that is not carried out: it must be absent, or `harmless`.
    pub fn refuse(&self, field: &str, harmless: &Value) -> Result<(), ConfigError> {
        match self.value(field) {
            Some(value) if !same(value, harmless) => Err(self.wrong(field, &format!("{harmless} or nothing"), value)),
            _ => Ok(()),
        }
    }

    /// The same configuration under the usual names: a field of `aliases`' first column also goes by the second.
    pub fn renamed(&self, aliases: &[(&str, &str)]) -> Config {
        let mut config = self.clone();
        for (from, to) in aliases {
            if let (Some(value), false) = (self.value(from), self.has(to)) {
                config.fields.insert((*to).to_owned(), value.clone());
                config.spelled.insert((*to).to_owned(), self.name(from));
            }
        }
        config
    }

    /// The same configuration with values for fields that it leaves out.
    pub fn or(&self, defaults: &[(&str, Plain)]) -> Config {
        let mut config = self.clone();
        for (field, value) in defaults.iter().filter(|(field, _)| !self.has(field)) {
            let value = match *value {
                Plain::Flag(b) => Value::from(b),
                Plain::Count(n) => Value::from(n),
                Plain::Number(n) => Value::from(n),
                Plain::Text(s) => Value::from(s),
            };
            config.set(field, value);
        }
        config
    }

    /// The language model's part of a configuration that describes more than that, or all of it.
    pub fn text_part(&self) -> Result<Config, ConfigError> {
        let Some(mut text) = self.section("text_config")? else { return Ok(self.clone()) };
        for field in ["tie_word_embeddings", "quantization_config"] {
            if let (Some(value), false) = (self.value(field), text.has(field)) {
                text.fields.insert(field.into(), value.clone());
            }
        }
        Ok(text)
    }

    /// Token ids under `field`: one, a list, or none. Others than whole numbers are an error.
    pub fn token_ids(&self, field: &str) -> Result<Vec<u32>, ConfigError> {
        let one = |v: &Value| {
            v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| self.wrong(field, "a token id or a list of them", v))
        };
        match self.value(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(v) => Ok(vec![one(v)?]),
        }
    }

    /// The error for a value that makes no sense.
    pub fn invalid(&self, field: &str, expected: impl Into<String>, found: impl ToString) -> ConfigError {
        ConfigError::invalid(self.name(field), expected, found)
    }

    fn value(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|v| !v.is_null())
    }

    fn name(&self, field: &str) -> String {
        match self.spelled.get(field) {
            Some(spelled) => spelled.clone(),
            None if self.path.is_empty() => field.to_owned(),
            None => format!("{}.{field}", self.path),
        }
    }

    fn missing(&self, field: &str) -> ConfigError {
        ConfigError::Missing { field: self.name(field) }
    }

    fn wrong(&self, field: &str, expected: &str, found: &Value) -> ConfigError {
        let mut text = found.to_string();
        if text.len() > 80 {
            text = format!("{} ({} bytes)", kind(found), text.len());
        }
        ConfigError::invalid(self.name(field), expected, text)
    }
}

/// What is computed in f64 here ends as f32: neither may it vanish there nor overflow.
fn is_positive(n: f64) -> bool {
    n > 0.0 && (n as f32).is_normal()
}

/// Equal as numbers where both are numbers.
fn same(a: &Value, b: &Value) -> bool {
    a == b || matches!((a.as_f64(), b.as_f64()), (Some(a), Some(b)) if a == b)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accessors_name_the_field_and_both_values() {
        let c = Config::from_json(r#"{"a": 0, "b": {"c": "x"}, "d": null, "e": [1, 2.5], "f": -1e400, "g": 3}"#);
        assert!(c.is_err(), "a number beyond f64");
        let c = Config::from_json(r#"{"a": 0, "b": {"c": "x"}, "d": null, "e": [1, 2.5], "g": 3}"#).unwrap();
        assert_eq!(c.count("a").unwrap_err().to_string(), "config: a: expected a whole number of at least 1, found 0");
        let b = c.section("b").unwrap().unwrap();
        assert_eq!(b.number("c").unwrap_err().to_string(), "config: b.c: expected a finite number, found \"x\"");
        assert_eq!(c.count("d").unwrap_err(), ConfigError::Missing { field: "d".into() });
        assert_eq!(c.numbers("e", 2).unwrap(), [1.0, 2.5]);
        assert!(c.numbers("e", 3).is_err());
        assert_eq!(c.token_ids("g").unwrap(), [3]);
        assert!(c.token_ids("e").is_err());
        assert!(Config::from_json("[]").is_err() && Config::from_json(&"[".repeat(100_000)).is_err());
    }

    #[test]
    fn gguf_keys_get_the_names_of_config_json() {
        let entries = [("llama.block_count", 2.into()), ("llama.rope.scaling.factor", 4.into()), ("llama.odd", 1.into())];
        let c = Config::from_gguf("llama", entries.map(|(k, v)| (k.to_owned(), v)));
        assert_eq!(c.count("num_hidden_layers"), Ok(2));
        assert_eq!(c.section("rope_scaling").unwrap().unwrap().number("factor"), Ok(4.0));
        assert!(c.has("odd"));
    }
}
