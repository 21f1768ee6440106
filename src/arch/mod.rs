//! What a model family is: configuration to plain numbers, and a table from roles to tensor names. Pure. A family adds one
//! file under `family/` and a line in [`ARCHS`]; it never adds code that runs a layer.
#![forbid(unsafe_code)]

mod config;
mod family;
mod fields;
mod groups;
mod rope;
mod rotary;
mod spec;
mod tensors;

pub use config::{Config, Plain};
pub use groups::LayerGroups;
pub use rope::{RopeScaling, RopeSpec, RopeStyle, angles};
pub use spec::{
    Activation, AttnDims, AttnSpec, Ffn, Glu, Groups, HeadSpec, KvLayout, LayerSpec, ModelSpec, NormKind, NormSpan, NormSpec,
    QkNorm, RouteSpec, Score, Wiring,
};
pub use tensors::Role;

use crate::error::ConfigError;

/// Everything the crate knows about one family.
#[derive(Clone, Copy, Debug)]
pub struct Arch {
    /// The family's name.
    pub name: &'static str,
    /// `model_type` in config.json.
    pub model_types: &'static [&'static str],
    /// How GGUF files of this family are, if GGUF has it.
    pub gguf: Option<GgufHabits>,
    /// From fields to numbers.
    pub spec: fn(&Config) -> Result<ModelSpec, ConfigError>,
    /// Tensor names in safetensors; the first entry of a role counts. `{l}` stands for the layer, `{n}` for an expert or head.
    pub tensors: &'static [&'static [(Role, &'static str)]],
    /// How safetensors store matrices where that is not as everywhere.
    pub stored: Stored,
    /// Other starts of the names in `tensors`: what stands there, and what files have in its place.
    pub prefixes: &'static [(&'static str, &'static str)],
    /// Tensors that published files carry and nobody needs: ends of names, or starts where a `*` follows. `{l}` stands for
    /// the number of layers.
    pub ignored: &'static [&'static str],
}

/// What GGUF's converter does to a family.
#[derive(Clone, Copy, Debug)]
pub struct GgufHabits {
    /// `general.architecture`.
    pub name: &'static str,
    /// The name is shared with a family without experts, and this one has them.
    pub experts: bool,
    /// Rows of q and k are interleaved for the other rotary style.
    pub interleaved_qk: bool,
    /// Fields whose values go without saying in these files.
    pub defaults: &'static [(&'static str, Plain)],
    /// Tensor names that differ from the usual ones.
    pub tensors: &'static [(Role, &'static str)],
}

impl GgufHabits {
    /// A family under `name` that has no habits of its own.
    pub const fn named(name: &'static str) -> Self {
        GgufHabits { name, experts: false, interleaved_qk: false, defaults: &[], tensors: &[] }
    }
}

/// How a family's safetensors store matrices.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// Matrices that are `[inputs, outputs]`.
    pub transposed: &'static [Role],
    /// Fused q, k and v go group by group: the queries of a key head, the key, the value.
    pub grouped_qkv: bool,
    /// Rows of fused gate and up projections take turns.
    pub alternating_gate_up: bool,
}

impl Stored {
    /// As everywhere.
    pub const USUAL: Stored = Stored { transposed: &[], grouped_qkv: false, alternating_gate_up: false };
}

/// The families, in order of age.
pub static ARCHS: &[&Arch] = &[
    &family::gpt2::ARCH,
    &family::gpt_neox::ARCH,
    &family::gpt_bigcode::ARCH,
    &family::llama::ARCH,
    &family::falcon::ARCH,
    &family::stablelm::ARCH,
    &family::mistral::ARCH,
    &family::mixtral::ARCH,
    &family::qwen2::ARCH,
    &family::olmo::ARCH,
    &family::gemma::ARCH,
    &family::starcoder2::ARCH,
    &family::cohere::ARCH,
    &family::phi3::ARCH,
    &family::deepseek::ARCH,
    &family::gemma2::ARCH,
    &family::granite::ARCH,
    &family::olmo2::ARCH,
    &family::gemma3::ARCH,
    &family::glm4::ARCH,
    &family::qwen3::ARCH,
    &family::qwen3_moe::ARCH,
    &family::smollm3::ARCH,
    &family::exaone4::ARCH,
    &family::gpt_oss::ARCH,
];

/// Which spelling of tensor names a file uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Naming {
    /// Published safetensors.
    HuggingFace,
    /// GGUF.
    Gguf,
}

impl Arch {
    /// The family that the configuration names.
    ///
    /// # Errors
    /// [`ConfigError::UnknownArch`] with the known ones.
    pub fn find(config: &Config, naming: Naming) -> Result<&'static Arch, ConfigError> {
        let found = config.model_type()?;
        let shared = |name: &str| ARCHS.iter().filter(|a| a.gguf.is_some_and(|g| g.name == name)).count() > 1;
        let here = |a: &&&'static Arch| match (naming, a.gguf) {
            (Naming::HuggingFace, _) => a.model_types.contains(&found),
            (Naming::Gguf, None) => false,
            (Naming::Gguf, Some(g)) => g.name == found && (!shared(found) || g.experts == config.has("num_experts")),
        };
        ARCHS.iter().find(here).copied().ok_or_else(|| ConfigError::UnknownArch {
            found: found.to_owned(),
            known: match naming {
                Naming::HuggingFace => ARCHS.iter().flat_map(|a| a.model_types).copied().collect::<Vec<_>>().join(", "),
                Naming::Gguf => ARCHS.iter().filter_map(|a| Some(a.gguf?.name)).collect::<Vec<_>>().join(", "),
            },
        })
    }

    /// The model's numbers.
    ///
    /// # Errors
    /// [`ConfigError`] for fields that are missing, make no sense, or ask for what is not carried out.
    pub fn read(&self, config: &Config, naming: Naming) -> Result<ModelSpec, ConfigError> {
        if let Some(quantization) = config.section("quantization_config")? {
            let method = quantization.str_or("quant_method", "unknown")?;
            return Err(quantization.invalid("quant_method", "no quantization_config: plain weights", method));
        }
        let habits = match (naming, self.gguf) {
            (Naming::Gguf, Some(habits)) => habits,
            _ => return (self.spec)(config),
        };
        let spec = (self.spec)(&config.or(habits.defaults))?;
        let width = spec.layers.first().map_or(0, |l| l.attn.dims().qk_dim);
        // Pairs that lie side by side in the file would end half a head apart, and those that turn are not half of them.
        match spec.ropes.iter().find(|r| habits.interleaved_qk && r.rotary != width) {
            Some(rope) => Err(config.invalid("rotary_dim", format!("{width}, the width of a head"), rope.rotary)),
            None => Ok(spec),
        }
    }

    /// What a role's tensor may be called in files of this kind: the first name that is there counts. `n` counts experts or
    /// heads; the second value says whether the tensor is this one's alone.
    pub fn names(&self, role: Role, layer: usize, n: usize, naming: Naming) -> Vec<(String, bool)> {
        let tables = match (naming, &self.gguf) {
            (Naming::HuggingFace, _) => self.tensors,
            (Naming::Gguf, Some(habits)) => &[habits.tensors, tensors::GGUF][..],
            (Naming::Gguf, None) => &[tensors::GGUF][..],
        };
        let mut names = Vec::new();
        for (_, template) in tables.iter().flat_map(|t| t.iter()).filter(|(r, _)| *r == role) {
            let name = template.replace("{l}", &layer.to_string()).replace("{n}", &n.to_string());
            let own = template.contains("{n}");
            for (from, to) in self.prefixes.iter().filter(|_| naming == Naming::HuggingFace) {
                names.extend(name.strip_prefix(from).map(|rest| (format!("{to}{rest}"), own)));
            }
            names.push((name, own));
        }
        names
    }

    /// True for a tensor that nobody needs, in a model of `layers` layers.
    pub fn ignores(&self, name: &str, layers: usize) -> bool {
        self.ignored.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(&start.replace("{l}", &layers.to_string())),
            None => name.ends_with(pattern),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_given_once() {
        let mut types: Vec<_> = ARCHS.iter().flat_map(|a| a.model_types).collect();
        let count = types.len();
        types.sort();
        types.dedup();
        assert_eq!(types.len(), count);
    }

    #[test]
    fn what_is_not_carried_out_is_named() {
        let config = |text: &str| Config::from_json(text).unwrap();
        let quantized = config(r#"{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}"#);
        let arch = Arch::find(&quantized, Naming::HuggingFace).unwrap();
        let text = arch.read(&quantized, Naming::HuggingFace).unwrap_err().to_string();
        assert!(text.contains("quantization_config.quant_method") && text.contains("gptq"), "{text}");
        let unknown = Arch::find(&config(r#"{"model_type": "rwkv"}"#), Naming::HuggingFace).unwrap_err().to_string();
        assert!(unknown.contains("rwkv") && unknown.contains("gemma3_text"), "{unknown}");
    }

    #[test]
    fn a_shared_gguf_name_goes_by_the_experts() {
        let arch = |experts: bool| {
            let mut c = Config::from_gguf("llama", []);
            if experts {
                c.set("num_experts", 8);
            }
            Arch::find(&c, Naming::Gguf).unwrap().name
        };
        assert_eq!((arch(false), arch(true)), ("llama", "mixtral"));
    }
}
