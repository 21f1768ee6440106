//! Rotary settings in every spelling: `rope_parameters`, `rope_theta` with `rope_scaling`, older names, GGUF's keys.
#![forbid(unsafe_code)]

use super::config::Config;
use super::fields::bounded;
use super::rope::{RopeScaling, RopeSpec, RopeStyle};
use crate::error::ConfigError;

/// The rotary table of a model that has one, for heads of `width` values.
pub(super) fn rope(c: &Config, width: usize, context: usize) -> Result<RopeSpec, ConfigError> {
    let section = match c.section("rope_parameters")? {
        Some(section) => Some(section),
        None => c.section("rope_scaling")?,
    };
    read(c, section.as_ref(), c.positive_or("rope_theta", Some(10_000.0))?, width, context)
}

/// The rotary tables of a model that has one for all of a sequence and one for windows, in this order.
pub(super) fn ropes_by_layer_type(
    c: &Config,
    theta: f64,
    local: f64,
    width: usize,
    context: usize,
) -> Result<Vec<RopeSpec>, ConfigError> {
    let parameters = c.section("rope_parameters")?;
    let (full, sliding) = match &parameters {
        Some(p) => (p.section("full_attention")?, p.section("sliding_attention")?),
        None => (c.section("rope_scaling")?, None),
    };
    let theta = c.positive_or("rope_theta", Some(theta))?;
    let local = c.positive_or("rope_local_base_freq", Some(local))?;
    // Scaling in GGUF's oldest spelling belongs to the first table.
    let bare = Config::from_json("{}")?;
    Ok(vec![read(c, full.as_ref(), theta, width, context)?, read(&bare, sliding.as_ref(), local, width, context)?])
}

fn read(c: &Config, section: Option<&Config>, theta: f64, width: usize, context: usize) -> Result<RopeSpec, ConfigError> {
    let theta = match section {
        Some(s) => s.positive_or("rope_theta", Some(theta))?,
        None => theta,
    };
    let part = "partial_rotary_factor";
    let at = section.filter(|s| s.has(part)).unwrap_or(c);
    let factor = at.positive_or(part, Some(1.0))?;
    if factor > 1.0 {
        return Err(at.invalid(part, "at most 1", factor));
    }
    let rotary = bounded(c, "rotary_dim", Some((width as f64 * factor) as usize), width)?;
    if rotary % 2 != 0 || rotary == 0 {
        let (field, expected) = match (c.has("rotary_dim"), c.has("head_dim")) {
            (true, _) => ("rotary_dim", "an even number"),
            (_, true) => ("head_dim", "an even number"),
            _ => ("head_dim", "an even number; absent, it is hidden_size / num_attention_heads"),
        };
        return Err(c.invalid(field, expected, rotary));
    }
    let scaling = match section {
        Some(s) => scaling(c, s, rotary, theta, context)?,
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

/// DeepSeek's second correction, on the scores: the square of what [`RopeSpec::yarn_mscale`] gives for `mscale_all_dim`.
pub(super) fn yarn_score_factor(c: &Config) -> Result<f64, ConfigError> {
    let section = match c.section("rope_parameters")? {
        Some(section) => Some(section),
        None => c.section("rope_scaling")?,
    };
    let Some(s) = section else { return Ok(1.0) };
    let kind = if s.has("rope_type") { s.str("rope_type")? } else { s.str_or("type", "default")? };
    // GGUF stores a tenth of it.
    let all = match s.has("log_multiplier") {
        true => f64::from((10.0 * s.number("log_multiplier")?) as f32),
        false => s.number_or("mscale_all_dim", Some(0.0))?,
    };
    if kind != "yarn" || all == 0.0 {
        return Ok(1.0);
    }
    let m = RopeSpec::yarn_mscale(s.positive_or("factor", None)?, all);
    Ok(m * m)
}

fn scaling(c: &Config, s: &Config, rotary: usize, theta: f64, context: usize) -> Result<RopeScaling, ConfigError> {
    let kind = if s.has("rope_type") { s.str("rope_type")? } else { s.str_or("type", "default")? };
    let original = || {
        let field = "original_max_position_embeddings";
        let at = if s.has(field) { s } else { c };
        bounded(at, field, Some(context), 1 << 30)
    };
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
        "yarn" => yarn(c, s, theta, context, original()?)?,
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
            // They are f32 in the training code, and in GGUF.
            let divisors = |field: &str| -> Result<Vec<f64>, ConfigError> {
                Ok(s.numbers(field, rotary / 2)?.into_iter().map(|d| f64::from(d as f32)).collect())
            };
            RopeScaling::Long {
                short: divisors("short_factor")?,
                long: divisors("long_factor")?,
                original,
                attention_factor: s.positive_or("attention_factor", Some(plain))?,
            }
        }
        other => return Err(s.invalid("rope_type", "default, linear, dynamic, yarn, llama3 or longrope", other)),
    })
}

fn yarn(c: &Config, s: &Config, theta: f64, context: usize, original: usize) -> Result<RopeScaling, ConfigError> {
    let factor = s.positive_or("factor", Some(context as f64 / original as f64))?;
    if theta <= 1.0 {
        return Err(s.invalid("rope_theta", "above 1 for yarn", theta));
    }
    // DeepSeek's two corrections: the ratio goes on cosines and sines, the rest on the attention scale.
    // Zero counts as absent. GGUF keeps one number for both.
    let plain = match (s.number_or("mscale", Some(0.0))?, s.number_or("mscale_all_dim", Some(0.0))?) {
        _ if s.has("log_multiplier") => 1.0,
        (m, all) if m != 0.0 && all != 0.0 => RopeSpec::yarn_mscale(factor, m) / RopeSpec::yarn_mscale(factor, all),
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
        truncate: s.flag_or("truncate", c.flag_or("rope_truncate", true)?)?,
        attention_factor: s.positive_or("attention_factor", Some(plain))?,
    })
}
