//! Lists of tensors to weights on a backend, tensor by tensor: matrices that read the same input become one.
#![forbid(unsafe_code)]

use super::inventory::{Gone, inventory};
use super::parts::Part;
use super::plan::ModelLimits;
use super::tensors::{Gated, Listed, Loaded, Vector, Visit};
use super::{ModelFiles, Transformer};
use crate::backend::{Backend, Expert, RowOrder, WeightPart, cpu};
use crate::error::{Error, LoadError};
use crate::weights::{LoadProgress, OnProgress, Panels, Release, TensorView, WeightSource};
use std::borrow::Cow;

impl<B: Backend> Transformer<B> {
    /// Loads the weights, tensor by tensor, and allocates everything a step of up to `limits` needs. `progress` counts the
    /// bytes of the tensors.
    ///
    /// # Errors
    /// [`ConfigError`](crate::ConfigError) for limits out of range,
    /// [`LoadError`] for tensors that are missing, too many, or of another shape or format than the configuration says, and
    /// where `progress` breaks off; [`RunError`](crate::RunError) where the device has not the memory.
    pub fn load(mut backend: B, files: &ModelFiles, limits: ModelLimits, progress: &mut OnProgress<'_>) -> Result<Self, Error> {
        limits.check(files.spec())?;
        let inventory = inventory(files)?;
        let mut total_bytes = 0;
        inventory.visit(&mut Sum {
            total: &mut total_bytes,
            matrix: part_bytes,
            vector: |v: &Vector| v.parts.iter().map(part_bytes).sum(),
        })?;
        let mut loader = Loader { backend: &mut backend, source: files.weights(), progress, done_bytes: 0, total_bytes };
        loader.report(0)?;
        let weights = inventory.visit(&mut loader)?;
        Transformer::new(backend, files.spec().clone(), weights, limits)
    }
}

/// Bytes of the weights as `backend` holds them.
///
/// # Errors
/// As [`Transformer::load`] for everything that headers and configuration show.
pub(super) fn weight_bytes<B: Backend>(files: &ModelFiles, backend: &B) -> Result<u64, LoadError> {
    let mut total = 0;
    inventory(files)?.visit(&mut Sum {
        total: &mut total,
        matrix: |p: &Part| match p.shape[..] {
            [rows, columns] => {
                let beside = p.panels(files.weights()).and_then(|x| backend.panels_bytes(p.format, rows, columns, &x));
                beside.unwrap_or_else(|| backend.weight_bytes(p.format, rows, columns))
            }
            _ => 0,
        },
        vector: |v: &Vector| 4 * v.len as u64,
    })?;
    Ok(total)
}

/// Adds something up over all parts of matrices and all vectors.
struct Sum<'a, M, V> {
    total: &'a mut u64,
    matrix: M,
    vector: V,
}

impl<M: Fn(&Part) -> u64, V: Fn(&Vector) -> u64> Visit for Sum<'_, M, V> {
    type To = Gone;

    fn matrix(&mut self, parts: &[Part]) -> Result<(), LoadError> {
        *self.total += parts.iter().map(&self.matrix).sum::<u64>();
        Ok(())
    }

    fn vector(&mut self, vector: &Vector) -> Result<(), LoadError> {
        *self.total += (self.vector)(vector);
        Ok(())
    }

    fn expert(&mut self, expert: &Gated<Listed>) -> Result<(), LoadError> {
        expert.visit(self).map(|_| ())
    }
}

/// Bytes of a part in its file's layout.
fn part_bytes(p: &Part) -> u64 {
    p.format.bytes_of(p.shape.iter().product()).unwrap_or(0) as u64
}

/// What a backend is given of a part.
pub(super) enum Taken<'a> {
    /// Its rows, as they lie or made.
    Rows(Cow<'a, [u8]>),
    /// Its rows in their order, from panels.
    Unpacked(Vec<u8>),
    Panels(Panels),
}

impl<'a> Taken<'a> {
    pub(super) fn of<B: Backend>(p: &Part, source: &'a dyn WeightSource, backend: &B) -> Result<Self, LoadError> {
        let Some(panels) = p.panels(source) else { return Ok(Taken::Rows(p.bytes(source)?)) };
        let &[rows, columns] = &p.shape[..] else {
            return Err(LoadError::malformed(format!("tensor {}", p.name), "data", "values, as it is no matrix", "panels"));
        };
        Ok(match backend.panels_bytes(p.format, rows, columns, &panels) {
            Some(_) => Taken::Panels(panels),
            None => {
                let unpacked = cpu::unpack(&p.name, p.format, rows, columns, &panels)?;
                panels.bytes.release(0..panels.bytes.len());
                Taken::Unpacked(unpacked)
            }
        })
    }

    pub(super) fn view<'v>(&'v self, p: &'v Part, source: &'v dyn WeightSource) -> WeightPart<'v> {
        let (bytes, panels): (&[u8], _) = match self {
            Taken::Rows(bytes) => (bytes, None),
            Taken::Unpacked(bytes) => (bytes, None),
            Taken::Panels(panels) => (&[], Some(panels)),
        };
        let order = if matches!(self, Taken::Rows(_)) { p.order } else { RowOrder::Natural };
        let first = p.first_byte().filter(|_| matches!(self, Taken::Rows(Cow::Borrowed(_))));
        let release = first.map(|first| Release::new(source, &p.name, first));
        WeightPart { order, panels, release, ..WeightPart::new(&p.name, TensorView { format: p.format, shape: &p.shape, bytes }) }
    }
}

struct Loader<'a, 'p, B> {
    backend: &'a mut B,
    source: &'a dyn WeightSource,
    progress: &'a mut OnProgress<'p>,
    done_bytes: u64,
    total_bytes: u64,
}

impl<B: Backend> Visit for Loader<'_, '_, B> {
    type To = Loaded<B>;

    fn matrix(&mut self, parts: &[Part]) -> Result<B::Weight, LoadError> {
        self.with_views(parts, |backend, views| backend.weight(views))
    }

    fn vector(&mut self, vector: &Vector) -> Result<B::Buf, LoadError> {
        if vector.parts.is_empty() {
            let mut ones = self.backend.buf(vector.len)?;
            self.backend.upload(&vec![1.0; vector.len], &mut ones)?;
            return Ok(ones);
        }
        self.with_views(&vector.parts, |backend, views| backend.vector(views, vector.plus))
    }

    fn expert(&mut self, expert: &Gated<Listed>) -> Result<Expert<B>, LoadError> {
        let Gated { gate_up, gate_up_bias, down, down_bias } = expert.visit(self)?;
        Ok(Expert { gate_up, gate_up_bias, down, down_bias })
    }
}

impl<B: Backend> Loader<'_, '_, B> {
    fn with_views<T>(
        &mut self,
        parts: &[Part],
        f: impl FnOnce(&mut B, &[WeightPart<'_>]) -> Result<T, LoadError>,
    ) -> Result<T, LoadError> {
        let taken = parts.iter().map(|p| Taken::of(p, self.source, self.backend)).collect::<Result<Vec<_>, _>>()?;
        let views: Vec<_> = parts.iter().zip(&taken).map(|(p, t)| t.view(p, self.source)).collect();
        let made = f(self.backend, &views)?;
        for p in parts.iter().filter(|p| p.last) {
            self.source.release(&p.name);
        }
        self.report(parts.iter().map(part_bytes).sum())?;
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
