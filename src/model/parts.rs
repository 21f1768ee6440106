//! A piece of a tensor of a file, and how it becomes a matrix or a part of one: as it lies, as a slice, the other way round, or
//! built into a larger matrix.
//!
//! Invariant: a part that was made fits its tensor, so taking it does not fail.
#![forbid(unsafe_code)]

use crate::arch::Role;
use crate::backend::RowOrder;
use crate::dtype::FormatId;
use crate::error::LoadError;
use crate::quant;
use crate::weights::{Panels, WeightSource};
use std::borrow::Cow;

/// Format and shape of a tensor.
pub(super) type Header<'a> = (FormatId, &'a [usize]);

/// See the module's documentation.
pub(super) struct Part {
    role: Role,
    pub(super) name: String,
    /// Rows, and columns where it is a matrix.
    pub(super) shape: Vec<usize>,
    /// Of what is taken.
    pub(super) format: FormatId,
    pub(super) order: RowOrder,
    /// Values of the tensor before the first that is taken.
    first: usize,
    take: Take,
    /// Nothing after this part reads the tensor.
    pub(super) last: bool,
}

/// What is done with the values.
#[derive(Clone, Copy)]
enum Take {
    AsTheyLie,
    /// The tensor's columns become rows.
    Transposed,
    /// The matrix that carries a head's query into the space of the cached keys: of the query, the first `rope` values pass as
    /// they are behind the `rank` values that the others give.
    Absorbed {
        rank: usize,
        rope: usize,
        nope: usize,
        transposed: bool,
    },
}

impl Part {
    /// The whole of a tensor.
    pub(super) fn whole(role: Role, name: String, view: Header<'_>, shape: &[usize]) -> Result<Self, LoadError> {
        Self::of(role, name, view, 0, shape)
    }

    /// The values from `first` on.
    pub(super) fn of(role: Role, name: String, view: Header<'_>, first: usize, shape: &[usize]) -> Result<Self, LoadError> {
        let row = shape.last().copied().unwrap_or(0);
        let (format, whole) = view;
        let (len, block) = (shape.iter().product::<usize>(), format.block_len());
        let values = whole.iter().product();
        if first + len > values {
            return Err(LoadError::Shape { tensor: name, expected: shape.to_vec(), found: whole.to_vec() });
        }
        if !row.is_multiple_of(block) || !first.is_multiple_of(block) {
            return Err(LoadError::PartialBlock { tensor: name, row_len: row, block_len: block, format });
        }
        let last = first + len == values;
        Ok(Part { role, name, shape: shape.to_vec(), format, order: RowOrder::Natural, first, take: Take::AsTheyLie, last })
    }

    /// The same with its rows in another order.
    pub(super) fn ordered(self, order: RowOrder) -> Self {
        Part { order, ..self }
    }

    /// The same the other way round.
    pub(super) fn transposed(mut self) -> Self {
        self.shape.reverse();
        Part { take: Take::Transposed, format: flat(self.format), ..self }
    }

    /// A head's key projection built into the matrix that carries its query over: see [`Take::Absorbed`]. `self` is
    /// `[nope, rank]`, or `[rank, nope]` where it is transposed already.
    pub(super) fn absorbed(self, rope: usize, transposed: bool) -> Self {
        let (rank, nope) = if transposed { (self.shape[0], self.shape[1]) } else { (self.shape[1], self.shape[0]) };
        let take = Take::Absorbed { rank, rope, nope, transposed };
        Part { take, shape: vec![rank + rope, rope + nope], format: flat(self.format), ..self }
    }

    /// The matrix as the source has it laid out for kernels, if it has.
    pub(super) fn panels(&self, source: &dyn WeightSource) -> Option<Panels> {
        source.panels(&self.name, self.first)
    }

    /// What tells its panels from those of other parts.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// Where its bytes start in the tensor, if they are taken as they lie.
    pub(super) fn first_byte(&self) -> Option<usize> {
        matches!(self.take, Take::AsTheyLie).then(|| self.format.bytes_of(self.first).expect("whole blocks"))
    }

    /// The values.
    pub(super) fn bytes<'a>(&self, source: &'a dyn WeightSource) -> Result<Cow<'a, [u8]>, LoadError> {
        let view = source.tensor(&self.name);
        let view = view.ok_or_else(|| LoadError::MissingTensor { name: self.name.clone(), role: self.role.to_string() })?;
        let bytes = |values: usize| view.format.bytes_of(values).expect("whole blocks");
        let len = match self.take {
            Take::Absorbed { rank, nope, .. } => rank * nope,
            _ => self.shape.iter().product(),
        };
        let taken = &view.bytes[bytes(self.first)..][..bytes(len)];
        let turned = |rows: usize, columns: usize| -> Result<Vec<u8>, LoadError> {
            let (values, size) = self.flattened(view.format, taken, len)?;
            Ok(transpose(&values, size, rows, columns))
        };
        Ok(match self.take {
            Take::AsTheyLie => Cow::Borrowed(taken),
            Take::Transposed => Cow::Owned(turned(self.shape[1], self.shape[0])?),
            Take::Absorbed { rank, rope, nope, transposed } => {
                let key = if transposed { self.flattened(view.format, taken, len)?.0.into_owned() } else { turned(nope, rank)? };
                Cow::Owned(absorb(&key, self.format, rank, rope, nope))
            }
        })
    }

    /// The values one by one, and the bytes of one.
    fn flattened<'a>(&self, format: FormatId, taken: &'a [u8], len: usize) -> Result<(Cow<'a, [u8]>, usize), LoadError> {
        if self.format == format {
            return Ok((Cow::Borrowed(taken), format.block_bytes()));
        }
        let mut values = vec![0.0f32; len];
        quant::decode(format, taken, &mut values).map_err(|source| LoadError::Quant { tensor: self.name.clone(), source })?;
        Ok((Cow::Owned(values.iter().flat_map(|v| v.to_le_bytes()).collect()), 4))
    }
}

/// How values are kept that have to be apart from each other: short plain ones as they are.
fn flat(format: FormatId) -> FormatId {
    match format {
        FormatId::F16 | FormatId::BF16 => format,
        _ => FormatId::F32,
    }
}

/// `values` is `[rows, columns]` of `size` bytes each.
fn transpose(values: &[u8], size: usize, rows: usize, columns: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(values.len());
    for c in 0..columns {
        for r in 0..rows {
            out.extend_from_slice(&values[(r * columns + c) * size..][..size]);
        }
    }
    out
}

/// `[[0, key], [1, 0]]`, `key` being `[rank, nope]`.
fn absorb(key: &[u8], format: FormatId, rank: usize, rope: usize, nope: usize) -> Vec<u8> {
    let one: &[u8] = match format {
        FormatId::F16 => &[0x00, 0x3c],
        FormatId::BF16 => &[0x80, 0x3f],
        _ => &[0x00, 0x00, 0x80, 0x3f],
    };
    let (size, width) = (one.len(), rope + nope);
    let mut out = vec![0; (rank + rope) * width * size];
    for (row, key) in out.chunks_exact_mut(width * size).zip(key.chunks_exact(nope * size)) {
        row[rope * size..].copy_from_slice(key);
    }
    for i in 0..rope {
        out[((rank + i) * width + i) * size..][..size].copy_from_slice(one);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_carried_over() {
        // key = [[1, 2, 3], [4, 5, 6]], rank 2, nope 3, rope 2.
        let key: Vec<u8> = (1..=6).flat_map(|v| (v as f32).to_le_bytes()).collect();
        let bytes = absorb(&key, FormatId::F32, 2, 2, 3);
        let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let want = [[0., 0., 1., 2., 3.], [0., 0., 4., 5., 6.], [1., 0., 0., 0., 0.], [0., 1., 0., 0., 0.]];
        assert_eq!(values, want.concat());
    }

    #[test]
    fn columns_become_rows() {
        assert_eq!(transpose(&[1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], 2, 2, 3), [1, 1, 4, 4, 2, 2, 5, 5, 3, 3, 6, 6]);
    }
}
