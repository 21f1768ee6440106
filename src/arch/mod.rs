//! What a model family is: configuration to plain numbers, and a table from roles to tensor names. Pure. A family adds one
//! file under `family/` and a line in [`ARCHS`]; it never adds code that runs a layer.
#![forbid(unsafe_code)]

mod config;
mod family;
mod fields;
mod rope;
mod spec;
mod tensors;

pub use config::Config;
pub use rope::{RopeScaling, RopeSpec, RopeStyle, angles};
pub use spec::{
    Activation, AttnDims, AttnSpec, Ffn, Glu, Groups, HeadSpec, KvLayout, LayerSpec, ModelSpec, NormKind, NormSpec, QkNorm,
    RouteSpec, Score, Wiring,
};
pub use tensors::Role;

use crate::error::ConfigError;

/// Everything the crate knows about one family.
#[derive(Debug)]
pub struct Arch {
    /// The family's name.
    pub name: &'static str,
    /// `model_type` in config.json.
    pub model_types: &'static [&'static str],
    /// How GGUF files of this family differ, if GGUF has it (under [`name`](Self::name)).
    pub gguf: Option<GgufHabits>,
    /// From fields to numbers.
    pub spec: fn(&Config) -> Result<ModelSpec, ConfigError>,
    /// Tensor names in safetensors; `{l}` stands for the layer.
    pub tensors: &'static [(Role, &'static str)],
    /// Ends of tensor names that published files carry and nobody needs.
    pub ignored: &'static [&'static str],
}

/// What GGUF's converter does to a family's tensors.
#[derive(Clone, Copy, Debug)]
pub struct GgufHabits {
    /// Rows of q and k are interleaved for the other rotary style.
    pub interleaved_qk: bool,
}

/// The families, in order of age.
pub static ARCHS: &[&Arch] = &[&family::llama::ARCH];

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
        let here = |a: &&&'static Arch| match naming {
            Naming::HuggingFace => a.model_types.contains(&found),
            Naming::Gguf => a.gguf.is_some() && a.name == found,
        };
        ARCHS.iter().find(here).copied().ok_or_else(|| ConfigError::UnknownArch {
            found: found.to_owned(),
            known: ARCHS.iter().map(|a| a.name).collect::<Vec<_>>().join(", "),
        })
    }

    /// The name of a role's tensor, or none where files of this kind have no such tensor.
    pub fn tensor(&self, role: Role, layer: usize, naming: Naming) -> Option<String> {
        let table = match naming {
            Naming::HuggingFace => self.tensors,
            Naming::Gguf => tensors::GGUF,
        };
        let (_, template) = table.iter().find(|(r, _)| *r == role)?;
        Some(template.replace("{l}", &layer.to_string()))
    }
}
