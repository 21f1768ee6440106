//! Fields that most families share, read once: shapes, activations, rotary settings in both spellings.
#![forbid(unsafe_code)]

use super::config::Config;
use super::rope::{RopeScaling, RopeSpec, RopeStyle};
use super::spec::{Activation, KvLayout};
use crate::error::ConfigError;

/// The sizes that every family has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) vocab: usize,
    pub(super) hidden: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) context: usize,
}

impl Shape {
    pub(super) fn read(c: &Config) -> Result<Self, ConfigError> {
        let hidden = bounded(c, "hidden_size", None, 1 << 20)?;
        let heads = bounded(c, "num_attention_heads", None, 1 << 14)?;
        let kv_heads = bounded(c, "num_key_value_heads", Some(heads), 1 << 14)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(c.invalid("num_key_value_heads", format!("a divisor of num_attention_heads = {heads}"), kv_heads));
        }
        if !c.has("head_dim") && !hidden.is_multiple_of(heads) {
            return Err(c.invalid("num_attention_heads", format!("a divisor of hidden_size = {hidden}"), heads));
        }
        let head_dim = bounded(c, "head_dim", Some(hidden / heads), 1 << 12)?;
        Ok(Shape {
            vocab: bounded(c, "vocab_size", None, 1 << 24)?,
            hidden,
            layers: bounded(c, "num_hidden_layers", None, 1 << 12)?,
            heads,
            kv_heads,
            head_dim,
            context: bounded(c, "max_position_embeddings", None, 1 << 30)?,
        })
    }

    pub(super) fn layout(&self) -> KvLayout {
        KvLayout::Heads { kv_heads: self.kv_heads, head_dim: self.head_dim }
    }
}

/// A count with an upper bound: a field of a hostile file must not decide how much is allocated before a tensor confirms it.
pub(super) fn bounded(c: &Config, field: &str, default: Option<usize>, most: usize) -> Result<usize, ConfigError> {
    let n = c.count_or(field, default)?;
    if n <= most { Ok(n) } else { Err(c.invalid(field, format!("at most {most}"), n)) }
}

pub(super) fn activation(c: &Config, field: &str, default: Option<&str>) -> Result<Activation, ConfigError> {
    let name = match default {
        Some(default) => c.str_or(field, default)?,
        None => c.str(field)?,
    };
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
        "relu" => Ok(Activation::Relu),
        other => Err(c.invalid(field, "silu, gelu, gelu_new, gelu_pytorch_tanh or relu", other)),
    }
}

/// The rotary table: `rope_parameters`, or `rope_theta` with `rope_scaling`.
pub(super) fn rope(c: &Config, rotary: usize, context: usize) -> Result<RopeSpec, ConfigError> {
    let section = match c.section("rope_parameters")? {
        Some(section) => Some(section),
        None => c.section("rope_scaling")?,
    };
    let top_theta = c.positive_or("rope_theta", Some(10_000.0))?;
    let theta = match &section {
        Some(s) => s.positive_or("rope_theta", Some(top_theta))?,
        None => top_theta,
    };
    let rotary = bounded(c, "rotary_dim", Some(rotary), rotary)?;
    if rotary % 2 != 0 {
        let (field, expected) = match (c.has("rotary_dim"), c.has("head_dim")) {
            (true, _) => ("rotary_dim", "an even number"),
            (_, true) => ("head_dim", "an even number"),
            _ => ("head_dim", "an even number; absent, it is hidden_size / num_attention_heads"),
        };
        return Err(c.invalid(field, expected, rotary));
    }
    let scaling = match &section {
        Some(s) => scaling(s, rotary, theta, context)?,
        None => match c.positive_or("rope_scale_linear", Some(1.0))? {
            1.0 => RopeScaling::Default,
            factor => RopeScaling::Linear { factor },
        },
    };
    let rope = RopeSpec { rotary, style: RopeStyle::HalfSplit, theta, scaling };
    match rope.is_sound() {
        true => Ok(rope),
        false => Err(c.invalid("rope_theta", "finite frequencies together with its scaling", format!("{rope:?}"))),
    }
}

fn scaling(s: &Config, rotary: usize, theta: f64, context: usize) -> Result<RopeScaling, ConfigError> {
    let kind = if s.has("rope_type") { s.str("rope_type")? } else { s.str_or("type", "default")? };
    let original = || bounded(s, "original_max_position_embeddings", Some(context), 1 << 30);
    Ok(match kind {
        "default" | "none" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: s.positive_or("factor", None)? },
        "dynamic" => {
            let factor = s.positive_or("factor", None)?;
            if factor < 1.0 {
                return Err(s.invalid("factor", "at least 1", factor));
            }
            if rotary <= 2 {
                return Err(s.invalid("rope_type", format!("another than dynamic where head_dim turns {rotary} values"), kind));
            }
            RopeScaling::Dynamic { factor, original: original()? }
        }
        "yarn" => yarn(s, theta, context, original()?)?,
        "llama3" => {
            let (low, high) = (s.positive_or("low_freq_factor", None)?, s.positive_or("high_freq_factor", None)?);
            if low >= high {
                return Err(s.invalid("high_freq_factor", format!("above low_freq_factor = {low}"), high));
            }
            RopeScaling::Llama3 { factor: s.positive_or("factor", None)?, low, high, original: original()? }
        }
        "longrope" | "su" => {
            let original = original()?;
            if original < 2 {
                return Err(s.invalid("original_max_position_embeddings", "at least 2 for longrope", original));
            }
            let factor = s.positive_or("factor", Some(context as f64 / original as f64))?;
            let plain = if factor <= 1.0 { 1.0 } else { (1.0 + libm::log(factor) / libm::log(original as f64)).sqrt() };
            RopeScaling::Long {
                short: s.numbers("short_factor", rotary / 2)?,
                long: s.numbers("long_factor", rotary / 2)?,
                original,
                attention_factor: s.positive_or("attention_factor", Some(plain))?,
            }
        }
        other => return Err(s.invalid("rope_type", "default, linear, dynamic, yarn, llama3 or longrope", other)),
    })
}

fn yarn(s: &Config, theta: f64, context: usize, original: usize) -> Result<RopeScaling, ConfigError> {
    let factor = s.positive_or("factor", Some(context as f64 / original as f64))?;
    if theta <= 1.0 {
        return Err(s.invalid("rope_theta", "above 1 for yarn", theta));
    }
    // DeepSeek's two corrections: the ratio goes on cosines and sines, the rest on the attention scale.
    let plain = match (s.has("mscale"), s.has("mscale_all_dim")) {
        (true, true) => {
            let (m, all) = (s.positive_or("mscale", None)?, s.positive_or("mscale_all_dim", None)?);
            RopeSpec::yarn_mscale(factor, m) / RopeSpec::yarn_mscale(factor, all)
        }
        _ => RopeSpec::yarn_mscale(factor, 1.0),
    };
    // GGUF's factor comes on top of the computed one, config.json's stands in its place.
    let plain = plain * s.positive_or("attn_factor", Some(1.0))?;
    let (beta_fast, beta_slow) = (s.positive_or("beta_fast", Some(32.0))?, s.positive_or("beta_slow", Some(1.0))?);
    if beta_fast < beta_slow {
        return Err(s.invalid("beta_fast", format!("at least beta_slow = {beta_slow}"), beta_fast));
    }
    Ok(RopeScaling::Yarn {
        factor,
        original,
        beta_fast,
        beta_slow,
        truncate: s.flag_or("truncate", true)?,
        attention_factor: s.positive_or("attention_factor", Some(plain))?,
    })
}
