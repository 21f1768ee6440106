//! What GGUF keeps in its metadata: a configuration, a tokenizer, chat templates.
#![forbid(unsafe_code)]

use crate::arch::{Config, ModelSpec, RopeScaling};
use crate::dtype::FormatId;
use crate::error::{LoadError, TextError};
use crate::ids::TokenId;
use crate::text::{ChatTemplate, GgufVocab, Tokenizer};
use crate::weights::{Gguf, MetaArray, MetaValue, WeightSource};
use serde_json::Value;

/// `source` has the tensors: the file itself, or what it was packed into.
pub(super) fn config(gguf: &Gguf, source: &dyn WeightSource) -> Result<Config, LoadError> {
    let key = "general.architecture";
    let arch = gguf.metadata(key).and_then(MetaValue::as_str);
    let arch = arch.ok_or_else(|| LoadError::malformed(gguf.label(), key, "a string", "nothing of the kind"))?;
    let prefix = format!("{arch}.");
    let entries = gguf.entries().filter(|(key, _)| key.starts_with(&prefix));
    let mut config = Config::from_gguf(arch, entries.filter_map(|(key, v)| Some((key.to_owned(), to_json(v)?))));
    let has = |name: &str| source.header(name).is_some();
    if !config.has("vocab_size")
        && let Some(rows) = source.header("token_embd.weight").and_then(|(_, shape)| shape.first().copied())
    {
        config.set("vocab_size", rows);
    }
    config.set("tie_word_embeddings", !has("output.weight"));
    config.set("attention_bias", has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias"));
    config.set("mlp_bias", has("blk.0.ffn_gate.bias"));
    let head_norms = has("blk.0.attn_q_norm.weight");
    config.set("use_qk_norm", head_norms);
    config.set("qk_layernorm", head_norms);
    // Falcon's newer architecture has two norms before its two halves.
    config.set("new_decoder_architecture", has("blk.0.attn_norm_2.weight"));
    // Lists of rotary divisors are tensors here.
    let lists = (divisors(source, "rope_factors_short.weight")?, divisors(source, "rope_factors_long.weight")?);
    if let (Some(short), Some(long)) = lists {
        config.nest(
            "rope_scaling",
            [("rope_type", "longrope".into()), ("short_factor", short.into()), ("long_factor", long.into())],
        );
    }
    Ok(config)
}

/// Llama 3's frequencies are divisors in a tensor.
pub(super) fn take_rope_factors(source: &dyn WeightSource, spec: &mut ModelSpec) -> Result<(), LoadError> {
    let name = "rope_freqs.weight";
    let (Some(divisors), Some(rope)) = (divisors(source, name)?, spec.ropes.first_mut()) else { return Ok(()) };
    if divisors.len() != rope.rotary / 2 {
        return Err(LoadError::Shape { tensor: name.into(), expected: vec![rope.rotary / 2], found: vec![divisors.len()] });
    }
    rope.scaling = RopeScaling::Factors(divisors);
    match rope.is_sound() {
        true => Ok(()),
        false => Err(LoadError::malformed(source.label(), name, "divisors that leave finite frequencies", "too small ones")),
    }
}

/// A tensor of rotary divisors, if it is there.
fn divisors(source: &dyn WeightSource, name: &str) -> Result<Option<Vec<f64>>, LoadError> {
    let Some(t) = source.tensor(name) else { return Ok(None) };
    if t.format != FormatId::F32 {
        return Err(LoadError::TensorFormat { tensor: name.into(), expected: "F32", found: t.format });
    }
    let divisors: Vec<f64> = t.bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    match divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
        Some(bad) => Err(LoadError::malformed(source.label(), name, "finite divisors above 0", bad)),
        None => Ok(Some(divisors)),
    }
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

pub(super) fn tokenizer(gguf: &Gguf) -> Result<Option<Tokenizer>, LoadError> {
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

pub(super) fn template(gguf: &Gguf) -> Result<Option<ChatTemplate>, LoadError> {
    let key = "tokenizer.chat_template";
    let named = gguf.entries().filter_map(|(k, v)| {
        let name = if k == key { "default" } else { k.strip_prefix(key)?.strip_prefix('.')? };
        Some((name, v.as_str()?))
    });
    let named: Vec<_> = named.collect();
    Ok(if named.is_empty() { None } else { Some(ChatTemplate::from_named(named)?) })
}
