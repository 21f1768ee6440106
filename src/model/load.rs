//! Spec and tensors to layers: which tensor plays which role, with its shape checked; matrices that read the same input are
//! fused into one. Every tensor of the file is used, or known to be of no use, or an error.
#![forbid(unsafe_code)]

use super::plan::ModelLimits;
use super::{ModelFiles, Transformer};
use crate::arch::{Ffn, ModelSpec, Naming, Role};
use crate::backend::{Backend, RowOrder, WeightPart};
use crate::error::{Error, LoadError};
use crate::weights::{LoadProgress, OnProgress, TensorView, WeightSource};
use std::collections::HashSet;

/// A model's weights on a backend.
pub(super) struct Weights<B: Backend> {
    pub(super) embed: B::Weight,
    pub(super) layers: Vec<Layer<B>>,
    pub(super) final_norm: B::Buf,
    /// None where the embedding serves.
    pub(super) head: Option<B::Weight>,
}

/// A layer's weights on a backend.
pub(super) struct Layer<B: Backend> {
    pub(super) attn_norm: B::Buf,
    pub(super) qkv: B::Weight,
    pub(super) qkv_bias: Option<B::Buf>,
    pub(super) out: B::Weight,
    pub(super) out_bias: Option<B::Buf>,
    pub(super) ffn_norm: B::Buf,
    pub(super) gate_up: B::Weight,
    pub(super) gate_up_bias: Option<B::Buf>,
    pub(super) down: B::Weight,
    pub(super) down_bias: Option<B::Buf>,
}

/// One tensor that the model uses.
pub(super) struct Part {
    role: Role,
    name: String,
    /// Rows, and columns where it is a matrix.
    pub(super) shape: Vec<usize>,
    pub(super) format: crate::dtype::FormatId,
    order: RowOrder,
}

/// The parts of each matrix or vector, in the order in which the forward pass meets them.
struct Inventory {
    embed: Vec<Part>,
    layers: Vec<LayerParts>,
    final_norm: Vec<Part>,
    head: Option<Vec<Part>>,
}

struct LayerParts {
    attn_norm: Vec<Part>,
    qkv: Vec<Part>,
    qkv_bias: Option<Vec<Part>>,
    out: Vec<Part>,
    out_bias: Option<Vec<Part>>,
    ffn_norm: Vec<Part>,
    gate_up: Vec<Part>,
    gate_up_bias: Option<Vec<Part>>,
    down: Vec<Part>,
    down_bias: Option<Vec<Part>>,
}

impl<B: Backend> Transformer<B> {
    /// Loads the weights, tensor by tensor, and allocates everything a step of up to `limits` needs. `progress` counts the
    /// bytes of the tensors.
    ///
    /// # Errors
    /// [`LoadError`] for tensors that are missing, too many, or of another shape or format than the configuration says, and
    /// where `progress` breaks off; [`RunError`](crate::RunError) where the device has not the memory.
    pub fn load(mut backend: B, files: &ModelFiles, limits: ModelLimits, progress: &mut OnProgress<'_>) -> Result<Self, Error> {
        let inventory = Inventory::of(files)?;
        let total_bytes = inventory.parts().map(|p| bytes(files.weights(), p)).sum();
        let mut loader = Loader { backend: &mut backend, source: files.weights(), progress, done_bytes: 0, total_bytes };
        let weights = loader.run(&inventory)?;
        Ok(Transformer::new(backend, files.spec().clone(), weights, limits)?)
    }
}

/// Every tensor that the model uses.
pub(super) fn weight_parts(files: &ModelFiles) -> Result<Vec<Part>, LoadError> {
    Ok(Inventory::of(files)?.into_parts())
}

struct Loader<'a, 'p, B> {
    backend: &'a mut B,
    source: &'a dyn WeightSource,
    progress: &'a mut OnProgress<'p>,
    done_bytes: u64,
    total_bytes: u64,
}

impl<B: Backend> Loader<'_, '_, B> {
    fn run(&mut self, inventory: &Inventory) -> Result<Weights<B>, LoadError> {
        self.report(0)?;
        let embed = self.matrix(&inventory.embed)?;
        let layers = inventory.layers.iter().map(|l| self.layer(l)).collect::<Result<_, _>>()?;
        let final_norm = self.vector(&inventory.final_norm)?;
        let head = inventory.head.as_ref().map(|h| self.matrix(h)).transpose()?;
        Ok(Weights { embed, layers, final_norm, head })
    }

    fn layer(&mut self, l: &LayerParts) -> Result<Layer<B>, LoadError> {
        Ok(Layer {
            attn_norm: self.vector(&l.attn_norm)?,
            qkv: self.matrix(&l.qkv)?,
            qkv_bias: self.bias(&l.qkv_bias)?,
            out: self.matrix(&l.out)?,
            out_bias: self.bias(&l.out_bias)?,
            ffn_norm: self.vector(&l.ffn_norm)?,
            gate_up: self.matrix(&l.gate_up)?,
            gate_up_bias: self.bias(&l.gate_up_bias)?,
            down: self.matrix(&l.down)?,
            down_bias: self.bias(&l.down_bias)?,
        })
    }

    fn matrix(&mut self, parts: &[Part]) -> Result<B::Weight, LoadError> {
        self.with_views(parts, |backend, views| backend.weight(views))
    }

    fn vector(&mut self, parts: &[Part]) -> Result<B::Buf, LoadError> {
        self.with_views(parts, |backend, views| backend.vector(views))
    }

    fn bias(&mut self, parts: &Option<Vec<Part>>) -> Result<Option<B::Buf>, LoadError> {
        parts.as_ref().map(|p| self.vector(p)).transpose()
    }

    fn with_views<T>(
        &mut self,
        parts: &[Part],
        f: impl FnOnce(&mut B, &[WeightPart<'_>]) -> Result<T, LoadError>,
    ) -> Result<T, LoadError> {
        let mut views = Vec::with_capacity(parts.len());
        for p in parts {
            views.push(WeightPart { name: &p.name, view: view(self.source, p.role, &p.name)?, order: p.order });
        }
        let made = f(self.backend, &views)?;
        for p in parts {
            self.source.release(&p.name);
        }
        self.report(views.iter().map(|v| v.view.bytes.len() as u64).sum())?;
        Ok(made)
    }

    fn report(&mut self, more: u64) -> Result<(), LoadError> {
        self.done_bytes += more;
        let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
        match (self.progress)(LoadProgress { done_bytes, total_bytes }) {
            std::ops::ControlFlow::Continue(()) => Ok(()),
            std::ops::ControlFlow::Break(()) => Err(LoadError::Cancelled { done_bytes, total_bytes }),
        }
    }
}

impl Inventory {
    fn of(files: &ModelFiles) -> Result<Self, LoadError> {
        let spec = files.spec();
        let find = Find { files };
        let inventory = Inventory {
            embed: vec![find.part(Role::Embed, 0, &[spec.vocab, spec.hidden])?],
            layers: (0..spec.layers.len()).map(|l| find.layer(spec, l)).collect::<Result<_, _>>()?,
            final_norm: vec![find.part(Role::FinalNorm, 0, &[spec.hidden])?],
            head: match spec.head.tied {
                true => None,
                false => Some(vec![find.part(Role::Head, 0, &[spec.vocab, spec.hidden])?]),
            },
        };
        inventory.refuse_extra(files)?;
        Ok(inventory)
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        let ends = self.embed.iter().chain(&self.final_norm).chain(self.head.iter().flatten());
        ends.chain(self.layers.iter().flat_map(LayerParts::parts))
    }

    fn into_parts(self) -> Vec<Part> {
        let ends = self.embed.into_iter().chain(self.final_norm).chain(self.head.into_iter().flatten());
        ends.chain(self.layers.into_iter().flat_map(LayerParts::into_parts)).collect()
    }

    fn refuse_extra(&self, files: &ModelFiles) -> Result<(), LoadError> {
        let used: HashSet<&str> = self.parts().map(|p| p.name.as_str()).collect();
        let arch = files.arch();
        // A tied model's file may repeat its head; rotary divisors were read with the configuration.
        let spare = [Role::Head, Role::RopeFactors].map(|role| arch.tensor(role, 0, files.naming()));
        let known = |name: &str| {
            used.contains(name)
                || spare.iter().flatten().any(|s| s == name)
                || arch.ignored.iter().any(|end| name.ends_with(end))
        };
        match files.weights().names().find(|name| !known(name)) {
            None => Ok(()),
            Some(name) => Err(LoadError::ExtraTensor { name: name.to_owned(), arch: arch.name.to_owned() }),
        }
    }
}

impl LayerParts {
    fn parts(&self) -> impl Iterator<Item = &Part> {
        let plain = [&self.attn_norm, &self.qkv, &self.out, &self.ffn_norm, &self.gate_up, &self.down];
        let biases = [&self.qkv_bias, &self.out_bias, &self.gate_up_bias, &self.down_bias];
        plain.into_iter().chain(biases.into_iter().flatten()).flatten()
    }

    fn into_parts(self) -> impl Iterator<Item = Part> {
        let plain = [self.attn_norm, self.qkv, self.out, self.ffn_norm, self.gate_up, self.down];
        let biases = [self.qkv_bias, self.out_bias, self.gate_up_bias, self.down_bias];
        plain.into_iter().chain(biases.into_iter().flatten()).flatten()
    }
}

/// Looks tensors up by role.
struct Find<'a> {
    files: &'a ModelFiles,
}

impl Find<'_> {
    fn layer(&self, spec: &ModelSpec, l: usize) -> Result<LayerParts, LoadError> {
        let (layer, h) = (&spec.layers[l], spec.hidden);
        let a = &layer.attn;
        let dims = a.dims();
        let (q, k, v) = (dims.heads * dims.qk_dim, dims.kv_heads * dims.qk_dim, dims.kv_heads * dims.v_dim);
        let Ffn::Gated { intermediate: i, bias, .. } = layer.ffn;
        let vector = |role, len: usize| Ok::<_, LoadError>(vec![self.part(role, l, &[len])?]);
        let matrix = |role, rows: usize, columns: usize| self.part(role, l, &[rows, columns]);
        let maybe = |there: bool, parts: &[(Role, usize)]| -> Result<Option<Vec<Part>>, LoadError> {
            there.then(|| parts.iter().map(|&(role, len)| self.part(role, l, &[len])).collect()).transpose()
        };
        Ok(LayerParts {
            attn_norm: vector(Role::AttnNorm, h)?,
            qkv: vec![
                self.turned(matrix(Role::Query, q, h)?, dims.heads),
                self.turned(matrix(Role::Key, k, h)?, dims.kv_heads),
                matrix(Role::Value, v, h)?,
            ],
            qkv_bias: maybe(a.qkv_bias, &[(Role::QueryBias, q), (Role::KeyBias, k), (Role::ValueBias, v)])?.map(|mut parts| {
                for (part, heads) in parts.iter_mut().zip([dims.heads, dims.kv_heads]) {
                    part.order = self.turn(heads);
                }
                parts
            }),
            out: vec![matrix(Role::AttnOut, h, dims.heads * dims.v_dim)?],
            out_bias: maybe(a.out_bias, &[(Role::AttnOutBias, h)])?,
            ffn_norm: vector(Role::FfnNorm, h)?,
            gate_up: vec![matrix(Role::Gate, i, h)?, matrix(Role::Up, i, h)?],
            gate_up_bias: maybe(bias, &[(Role::GateBias, i), (Role::UpBias, i)])?,
            down: vec![matrix(Role::Down, h, i)?],
            down_bias: maybe(bias, &[(Role::DownBias, h)])?,
        })
    }

    fn part(&self, role: Role, layer: usize, shape: &[usize]) -> Result<Part, LoadError> {
        let missing = |name: String| LoadError::MissingTensor { name, role: role.to_string() };
        let name = self.files.arch().tensor(role, layer, self.files.naming());
        let name = name.ok_or_else(|| missing(format!("of layer {layer}")))?;
        let view = view(self.files.weights(), role, &name)?;
        if view.shape != shape {
            return Err(LoadError::Shape { tensor: name, expected: shape.to_vec(), found: view.shape.to_vec() });
        }
        Ok(Part { role, name, shape: shape.to_vec(), format: view.format, order: RowOrder::Natural })
    }

    fn turned(&self, mut part: Part, heads: usize) -> Part {
        part.order = self.turn(heads);
        part
    }

    /// How GGUF files of this family order the rows of q and k.
    fn turn(&self, heads: usize) -> RowOrder {
        match (self.files.naming(), self.files.arch().gguf) {
            (Naming::Gguf, Some(habits)) if habits.interleaved_qk => RowOrder::Interleaved { heads },
            _ => RowOrder::Natural,
        }
    }
}

fn view<'a>(source: &'a dyn WeightSource, role: Role, name: &str) -> Result<TensorView<'a>, LoadError> {
    source.tensor(name).ok_or_else(|| LoadError::MissingTensor { name: name.to_owned(), role: role.to_string() })
}

fn bytes(source: &dyn WeightSource, part: &Part) -> u64 {
    source.tensor(&part.name).map_or(0, |t| t.bytes.len() as u64)
}
