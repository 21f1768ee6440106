//! Spec and tensors to layers: which tensor plays which role, with its shape checked; matrices that read the same input are
//! fused into one. Every tensor of the file is used, or known to be of no use, or an error.
#![forbid(unsafe_code)]

use super::plan::ModelLimits;
use super::{ModelFiles, Transformer};
use crate::arch::{Ffn, ModelSpec, Naming, Role};
use crate::backend::{Backend, RowOrder, WeightPart};
use crate::dtype::FormatId;
use crate::error::{Error, LoadError};
use crate::weights::{LoadProgress, OnProgress, TensorView, WeightSource};
use std::collections::HashSet;

/// A model's tensors: matrices as `M`, vectors as `V`. First each is a list of [`Part`]s, then what a backend made of it.
pub(super) struct Tensors<M, V> {
    pub(super) embed: M,
    pub(super) layers: Vec<Layer<M, V>>,
    pub(super) final_norm: V,
    /// None where the embedding serves.
    pub(super) head: Option<M>,
}

/// A layer's tensors.
pub(super) struct Layer<M, V> {
    pub(super) attn_norm: V,
    pub(super) qkv: M,
    pub(super) qkv_bias: Option<V>,
    pub(super) out: M,
    pub(super) out_bias: Option<V>,
    pub(super) ffn_norm: V,
    pub(super) gate_up: M,
    pub(super) gate_up_bias: Option<V>,
    pub(super) down: M,
    pub(super) down_bias: Option<V>,
}

/// A model's weights on a backend.
pub(super) type Weights<B> = Tensors<<B as Backend>::Weight, <B as Backend>::Buf>;

/// One tensor of the file that the model uses.
pub(super) struct Part {
    role: Role,
    name: String,
    /// Rows, and columns where it is a matrix.
    pub(super) shape: Vec<usize>,
    pub(super) format: FormatId,
    order: RowOrder,
}

/// The parts of each matrix or vector, in order.
type Parts = Vec<Part>;

/// What becomes of the parts of a matrix and of a vector.
trait Visit {
    type Matrix;
    type Vector;
    fn matrix(&mut self, parts: &Parts) -> Result<Self::Matrix, LoadError>;
    fn vector(&mut self, parts: &Parts) -> Result<Self::Vector, LoadError>;
}

impl Tensors<Parts, Parts> {
    /// Meets every tensor in the order in which the forward pass does.
    fn visit<X: Visit>(&self, x: &mut X) -> Result<Tensors<X::Matrix, X::Vector>, LoadError> {
        Ok(Tensors {
            embed: x.matrix(&self.embed)?,
            layers: self.layers.iter().map(|l| l.visit(x)).collect::<Result<_, _>>()?,
            final_norm: x.vector(&self.final_norm)?,
            head: self.head.as_ref().map(|h| x.matrix(h)).transpose()?,
        })
    }
}

impl Layer<Parts, Parts> {
    fn visit<X: Visit>(&self, x: &mut X) -> Result<Layer<X::Matrix, X::Vector>, LoadError> {
        let bias = |x: &mut X, parts: &Option<Parts>| parts.as_ref().map(|p| x.vector(p)).transpose();
        Ok(Layer {
            attn_norm: x.vector(&self.attn_norm)?,
            qkv: x.matrix(&self.qkv)?,
            qkv_bias: bias(x, &self.qkv_bias)?,
            out: x.matrix(&self.out)?,
            out_bias: bias(x, &self.out_bias)?,
            ffn_norm: x.vector(&self.ffn_norm)?,
            gate_up: x.matrix(&self.gate_up)?,
            gate_up_bias: bias(x, &self.gate_up_bias)?,
            down: x.matrix(&self.down)?,
            down_bias: bias(x, &self.down_bias)?,
        })
    }
}

impl<B: Backend> Transformer<B> {
    /// Loads the weights, tensor by tensor, and allocates everything a step of up to `limits` needs. `progress` counts the
    /// bytes of the tensors.
    ///
    /// # Errors
    /// [`ConfigError`](crate::ConfigError) for limits out of range,
    /// [`LoadError`] for tensors that are missing, too many, or of another shape or format than the configuration says, and
    /// where `progress` breaks off; [`RunError`](crate::RunError) where the device has not the memory.
    pub fn load(mut backend: B, files: &ModelFiles, limits: ModelLimits, progress: &mut OnProgress<'_>) -> Result<Self, Error> {
        limits.check()?;
        let inventory = inventory(files)?;
        let mut total_bytes = 0;
        each_part(&inventory, |p| total_bytes += p.format.bytes_of(p.shape.iter().product()).unwrap_or(0) as u64);
        let mut loader = Loader { backend: &mut backend, source: files.weights(), progress, done_bytes: 0, total_bytes };
        loader.report(0)?;
        let weights = inventory.visit(&mut loader)?;
        Transformer::new(backend, files.spec().clone(), weights, limits)
    }
}

/// Every tensor that the model uses.
///
/// # Errors
/// As [`Transformer::load`] for everything that headers and configuration show.
pub(super) fn weight_parts(files: &ModelFiles, f: impl FnMut(&Part)) -> Result<(), LoadError> {
    each_part(&inventory(files)?, f);
    Ok(())
}

fn each_part<F: FnMut(&Part)>(inventory: &Tensors<Parts, Parts>, f: F) {
    struct Each<F>(F);
    impl<F: FnMut(&Part)> Visit for Each<F> {
        type Matrix = ();
        type Vector = ();
        fn matrix(&mut self, parts: &Parts) -> Result<(), LoadError> {
            parts.iter().for_each(&mut self.0);
            Ok(())
        }
        fn vector(&mut self, parts: &Parts) -> Result<(), LoadError> {
            self.matrix(parts)
        }
    }
    inventory.visit(&mut Each(f)).expect("a visit that only looks does not fail");
}

struct Loader<'a, 'p, B> {
    backend: &'a mut B,
    source: &'a dyn WeightSource,
    progress: &'a mut OnProgress<'p>,
    done_bytes: u64,
    total_bytes: u64,
}

impl<B: Backend> Visit for Loader<'_, '_, B> {
    type Matrix = B::Weight;
    type Vector = B::Buf;

    fn matrix(&mut self, parts: &Parts) -> Result<B::Weight, LoadError> {
        self.with_views(parts, |backend, views| backend.weight(views))
    }

    fn vector(&mut self, parts: &Parts) -> Result<B::Buf, LoadError> {
        self.with_views(parts, |backend, views| backend.vector(views))
    }
}

impl<B: Backend> Loader<'_, '_, B> {
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

/// Finds every tensor that the spec asks for and checks its shape.
fn inventory(files: &ModelFiles) -> Result<Tensors<Parts, Parts>, LoadError> {
    let spec = files.spec();
    let find = Find { files };
    let inventory = Tensors {
        embed: vec![find.part(Role::Embed, 0, &[spec.vocab, spec.hidden])?],
        layers: (0..spec.layers.len()).map(|l| find.layer(spec, l)).collect::<Result<_, _>>()?,
        final_norm: vec![find.part(Role::FinalNorm, 0, &[spec.hidden])?],
        head: match spec.head.tied {
            true => None,
            false => Some(vec![find.part(Role::Head, 0, &[spec.vocab, spec.hidden])?]),
        },
    };
    let mut used = HashSet::new();
    each_part(&inventory, |p| _ = used.insert(p.name.clone()));
    let arch = files.arch();
    // A tied model's file may repeat its head; rotary divisors were read with the configuration.
    let spare = [Role::Head, Role::RopeFactors].map(|role| arch.tensor(role, 0, files.naming()));
    let known = |name: &str| {
        used.contains(name) || spare.iter().flatten().any(|s| s == name) || arch.ignored.iter().any(|end| name.ends_with(end))
    };
    match files.weights().names().find(|name| !known(name)) {
        None => Ok(inventory),
        Some(name) => Err(LoadError::ExtraTensor { name: name.to_owned(), arch: arch.name.to_owned() }),
    }
}

/// Looks tensors up by role.
struct Find<'a> {
    files: &'a ModelFiles,
}

impl Find<'_> {
    fn layer(&self, spec: &ModelSpec, l: usize) -> Result<Layer<Parts, Parts>, LoadError> {
        let (layer, h) = (&spec.layers[l], spec.hidden);
        let a = &layer.attn;
        let dims = a.dims();
        let (q, k, v) = (dims.heads * dims.qk_dim, dims.kv_heads * dims.qk_dim, dims.kv_heads * dims.v_dim);
        let Ffn::Gated { intermediate: i, bias, .. } = layer.ffn;
        let part = |role, shape: &[usize]| self.part(role, l, shape);
        let turned = |role, heads, shape: &[usize]| -> Result<Part, LoadError> {
            Ok(Part { order: self.turn(heads), ..part(role, shape)? })
        };
        Ok(Layer {
            attn_norm: vec![part(Role::AttnNorm, &[h])?],
            qkv: vec![
                turned(Role::Query, dims.heads, &[q, h])?,
                turned(Role::Key, dims.kv_heads, &[k, h])?,
                part(Role::Value, &[v, h])?,
            ],
            qkv_bias: match a.qkv_bias {
                false => None,
                true => Some(vec![
                    turned(Role::QueryBias, dims.heads, &[q])?,
                    turned(Role::KeyBias, dims.kv_heads, &[k])?,
                    part(Role::ValueBias, &[v])?,
                ]),
            },
            out: vec![part(Role::AttnOut, &[h, dims.heads * dims.v_dim])?],
            out_bias: if a.out_bias { Some(vec![part(Role::AttnOutBias, &[h])?]) } else { None },
            ffn_norm: vec![part(Role::FfnNorm, &[h])?],
            gate_up: vec![part(Role::Gate, &[i, h])?, part(Role::Up, &[i, h])?],
            gate_up_bias: if bias { Some(vec![part(Role::GateBias, &[i])?, part(Role::UpBias, &[i])?]) } else { None },
            down: vec![part(Role::Down, &[h, i])?],
            down_bias: if bias { Some(vec![part(Role::DownBias, &[h])?]) } else { None },
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
