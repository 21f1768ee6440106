//! Fields that most families share, read once: shapes, activations, windows, experts, and the parts of a spec in their plain
//! form, which a family changes where it differs.
#![forbid(unsafe_code)]

use super::config::Config;
use super::rope::RopeSpec;
use super::rotary;
use super::spec::{
    Activation, AttnSpec, Ffn, Glu, HeadSpec, KvLayout, LayerSpec, ModelSpec, NormSpan, NormSpec, QkNorm, RouteSpec, Score,
    Wiring,
};
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
        if c.has("value_head_dim") && !c.has("kv_lora_rank") {
            let value = c.count("value_head_dim")?;
            if value != head_dim {
                return Err(c.invalid("value_head_dim", format!("head_dim = {head_dim}"), value));
            }
        }
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

    /// Attention with everything optional off, and rotary table 0.
    pub(super) fn attn(&self) -> AttnSpec {
        AttnSpec {
            heads: self.heads,
            layout: KvLayout::Heads { kv_heads: self.kv_heads, head_dim: self.head_dim },
            rope: Some(0),
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: None,
            softcap: None,
            latent_norm: None,
            qk_norm: None,
            sinks: false,
            qkv_bias: false,
            out_bias: false,
        }
    }

    /// Layers that are all alike, in a model with everything optional off.
    pub(super) fn model(
        &self,
        arch: &'static str,
        layer: LayerSpec,
        norm: NormSpec,
        c: &Config,
    ) -> Result<ModelSpec, ConfigError> {
        let rope = rotary::rope(c, self.head_dim, self.context)?;
        let context = rope.context(self.context);
        Ok(ModelSpec { context, ..self.model_with(arch, layer, norm, vec![rope], c)? })
    }

    /// The same with other rotary tables than one.
    pub(super) fn model_with(
        &self,
        arch: &'static str,
        layer: LayerSpec,
        norm: NormSpec,
        ropes: Vec<RopeSpec>,
        c: &Config,
    ) -> Result<ModelSpec, ConfigError> {
        Ok(ModelSpec {
            arch,
            vocab: self.vocab,
            hidden: self.hidden,
            context: self.context,
            embed_scale: 1.0,
            position_table: false,
            layers: vec![layer; self.layers],
            ropes,
            final_norm: norm,
            head: HeadSpec { tied: c.flag_or("tie_word_embeddings", false)?, bias: false, scale: 1.0, softcap: None },
        })
    }
}

/// A count with an upper bound: a field of a hostile file must not decide how much is allocated before a tensor confirms it.
pub(super) fn bounded(c: &Config, field: &str, default: Option<usize>, most: usize) -> Result<usize, ConfigError> {
    let n = c.count_or(field, default)?;
    if n <= most { Ok(n) } else { Err(c.invalid(field, format!("at most {most}"), n)) }
}

/// A factor: a number above 0.
pub(super) fn factor(c: &Config, field: &str, default: Option<f64>) -> Result<f32, ConfigError> {
    Ok(c.positive_or(field, default)? as f32)
}

/// A number as f32 that stays a number.
pub(super) fn number(c: &Config, field: &str, default: Option<f64>) -> Result<f32, ConfigError> {
    let n = c.number_or(field, default)?;
    let narrow = n as f32;
    if narrow.is_finite() { Ok(narrow) } else { Err(c.invalid(field, "a number that an f32 holds", n)) }
}

/// RMS norm with the epsilon of `rms_norm_eps`.
pub(super) fn rms(c: &Config) -> Result<NormSpec, ConfigError> {
    Ok(NormSpec::rms(c.positive_or("rms_norm_eps", None)? as f32))
}

/// Layer norm with the epsilon of `layer_norm_eps`.
pub(super) fn layer_norm(c: &Config, default: f64) -> Result<NormSpec, ConfigError> {
    Ok(NormSpec::layer(c.positive_or("layer_norm_eps", Some(default))? as f32))
}

/// `cap * tanh(x / cap)`, or none.
pub(super) fn softcap(c: &Config, field: &str) -> Result<Option<f32>, ConfigError> {
    if !c.has(field) { Ok(None) } else { Ok(Some(c.positive_or(field, None)? as f32)) }
}

/// The width of a feed-forward.
pub(super) fn intermediate(c: &Config, field: &str) -> Result<usize, ConfigError> {
    bounded(c, field, None, 1 << 22)
}

/// A gated feed-forward with `hidden_act`.
pub(super) fn gated(c: &Config) -> Result<Ffn, ConfigError> {
    let glu = Glu::Act(activation(c, "hidden_act", Some("silu"))?);
    Ok(Ffn::Gated { intermediate: intermediate(c, "intermediate_size")?, glu, bias: c.flag_or("mlp_bias", false)? })
}

/// Gated experts chosen by softmax, the weights of the chosen adding up to 1 if `normalize` says so.
pub(super) fn experts(c: &Config, width: &str, normalize: bool) -> Result<Ffn, ConfigError> {
    let experts = bounded(c, "num_experts", None, 1 << 12)?;
    let top_k = c.count("num_experts_per_tok")?;
    if top_k > experts {
        return Err(c.invalid("num_experts_per_tok", format!("at most num_experts = {experts}"), top_k));
    }
    Ok(Ffn::Moe {
        route: RouteSpec { experts, top_k, score: Score::Softmax, groups: None, correction: false, normalize, scale: 1.0 },
        intermediate: intermediate(c, width)?,
        glu: Glu::Act(activation(c, "hidden_act", Some("silu"))?),
        bias: false,
        shared: 0,
    })
}

/// Norms on each head of q and k.
pub(super) fn head_norms(norm: NormSpec) -> Option<QkNorm> {
    Some(QkNorm { norm, span: NormSpan::Head })
}

/// An activation function by its published name.
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

/// Which layers see a window only: `layer_types`, or what the family does where that is absent.
pub(super) fn sliding(c: &Config, layers: usize, usual: impl Fn(usize) -> bool) -> Result<Vec<bool>, ConfigError> {
    let Some(types) = c.strs("layer_types")? else { return Ok((0..layers).map(usual).collect()) };
    if types.len() != layers {
        return Err(c.invalid("layer_types", format!("one for each of num_hidden_layers = {layers}"), types.len()));
    }
    types
        .into_iter()
        .map(|kind| match kind {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            other => Err(c.invalid("layer_types", "sliding_attention or full_attention", other)),
        })
        .collect()
}

/// `sliding_window`, or none; GGUF writes 0 for none.
pub(super) fn window(c: &Config) -> Result<Option<usize>, ConfigError> {
    match c.has("sliding_window") && c.whole("sliding_window")? != 0 {
        true => bounded(c, "sliding_window", None, 1 << 30).map(Some),
        false => Ok(None),
    }
}

/// Qwen's windows: `use_sliding_window` switches them on, in the layers from `max_window_layers` on.
pub(super) fn upper_windows(c: &Config, spec: &mut ModelSpec) -> Result<(), ConfigError> {
    if !c.flag_or("use_sliding_window", false)? || !c.has("sliding_window") {
        return Ok(());
    }
    let full = if c.has("max_window_layers") { c.whole("max_window_layers")? } else { 28 };
    let sliding = sliding(c, spec.layers.len(), |l| l as u64 >= full)?;
    set_windows(c, spec, &sliding)
}

/// Gemma's norm: 1 is added to its weights, unless the file's have it already.
pub(super) fn gemma_norm(c: &Config) -> Result<NormSpec, ConfigError> {
    Ok(NormSpec { plus: number(c, "norm_plus", Some(1.0))?, ..rms(c)? })
}

/// Gemma's factor on the scores. GGUF leaves it out: it is that of the width of a head, but for the model of `largest` layers.
pub(super) fn gemma_scale(c: &Config, shape: &Shape, largest: usize) -> Result<f32, ConfigError> {
    if c.has("attention_multiplier") {
        return factor(c, "attention_multiplier", None);
    }
    let width = if shape.layers == largest { shape.hidden / shape.heads } else { shape.head_dim };
    let over = c.positive_or("query_pre_attn_scalar", Some(width as f64))?;
    Ok(1.0 / (over as f32).sqrt())
}

/// A gated feed-forward with `hidden_activation`.
pub(super) fn gemma_gated(c: &Config) -> Result<Ffn, ConfigError> {
    let glu = Glu::Act(activation(c, "hidden_activation", None)?);
    Ok(Ffn::Gated { intermediate: intermediate(c, "intermediate_size")?, glu, bias: false })
}

/// Gives the layers that `sliding` names the window.
pub(super) fn set_windows(c: &Config, spec: &mut ModelSpec, sliding: &[bool]) -> Result<(), ConfigError> {
    if !sliding.contains(&true) {
        return Ok(());
    }
    let window = c.count("sliding_window")?;
    for (layer, _) in spec.layers.iter_mut().zip(sliding).filter(|(_, slides)| **slides) {
        layer.attn.window = Some(window);
    }
    Ok(())
}

/// A layer of llama's shape: pre-norm, gated.
pub(super) fn layer(attn: AttnSpec, ffn: Ffn, norm: NormSpec) -> LayerSpec {
    LayerSpec { attn, ffn, wiring: Wiring::pre_norm(norm) }
}
