//! Where weights come from: files of several formats, bytes in memory, a seeded generator. A source hands out views of
//! named tensors and knows nothing of models.
//!
//! Invariant: a source that opened has checked every count, offset and length against its bytes, so a view never fails.

use crate::dtype::FormatId;

/// One tensor's bytes, borrowed from its source.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// How the values are stored.
    pub format: FormatId,
    /// Dimensions, the slowest first: `[rows, columns]` for a matrix, whose rows lie one after the other.
    pub shape: &'a [usize],
    /// Exactly `format.bytes_of(shape's product)` bytes, little endian, at no particular alignment.
    pub bytes: &'a [u8],
}

impl TensorView<'_> {
    /// Values in the tensor.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True for a tensor with a dimension of 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A set of named tensors.
pub trait WeightSource: Send + Sync {
    /// What to call this source in messages: a path, or what stands for it.
    fn label(&self) -> &str;

    /// The names, in the source's own order.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_>;

    /// The tensor of that name. Cost: one look-up; the bytes are not touched.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;

    /// The bytes of `name` were used for the last time for now: a mapped file may give the pages back.
    fn release(&self, _name: &str) {}
}
