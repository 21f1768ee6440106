//! Where weights come from: files of several formats, bytes in memory, a seeded generator. A source hands out views of
//! named tensors and knows nothing of models.
//!
//! [`open`] takes a path and finds out what is there; [`Gguf`], [`Safetensors`] and [`Synthetic`] are the sources it or a
//! program can build. Files are mapped or read ([`LoadMode`]); [`Bytes`] holds either, and bytes that came in memory.
//!
//! Invariant: a source that opened has checked every count, offset and length against its bytes, so a view never fails.
//! Opening allocates at most a small multiple of the header it reads, whatever the header says.

mod bytes;
mod gguf;
mod map;
mod memory;
mod open;
mod safetensors;
mod say;
mod strings;
mod synthetic;
mod table;

pub use bytes::{Bytes, LoadMode, LoadProgress, OnProgress, no_progress};
pub use gguf::{Gguf, MetaArray, MetaValue};
pub(crate) use gguf::{HeadTensor, write_head};
pub use memory::open_bytes;
pub use open::{Opened, open, read_text_file};
pub use safetensors::Safetensors;
pub use strings::StrArray;
pub use synthetic::{Fill, Synthetic, SyntheticTensor};

use crate::dtype::FormatId;
use std::fmt;
use std::ops::Range;

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

/// A matrix that a source holds as a backend's kernels read it.
#[derive(Clone, Debug)]
pub struct Panels {
    /// The number of the layout.
    pub layout: u32,
    /// The matrix, on a cache line where it is to be read in place.
    pub bytes: Bytes,
}

/// Tells a source which bytes of a tensor were read for the last time, while others are still being read.
#[derive(Clone, Copy)]
pub struct Release<'a> {
    source: &'a dyn WeightSource,
    tensor: &'a str,
    first: usize,
}

impl<'a> Release<'a> {
    /// Of `tensor`'s bytes from `first` on.
    pub fn new(source: &'a dyn WeightSource, tensor: &'a str, first: usize) -> Self {
        Release { source, tensor, first }
    }

    /// These, counted from the first.
    pub fn bytes(&self, range: Range<usize>) {
        self.source.release_part(self.tensor, self.first + range.start..self.first + range.end);
    }
}

impl fmt::Debug for Release<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Release({}, from {})", self.tensor, self.first)
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

    /// Bytes of all tensors together: what a stage that goes through them once reports as its total.
    fn total_bytes(&self) -> u64 {
        self.names().filter_map(|name| self.tensor(name)).map(|view| view.bytes.len() as u64).sum()
    }

    /// The bytes of `name` were used for the last time for now: a mapped file may give the pages back. Views stay valid;
    /// reading them again reads the file again.
    fn release(&self, _name: &str) {}

    /// The same of some of its bytes. Ranges outside the tensor do nothing.
    fn release_part(&self, _name: &str, _range: Range<usize>) {}

    /// Format and shape of a tensor, whether [`tensor`](Self::tensor) can show its bytes or the source holds it as
    /// [`panels`](Self::panels) alone.
    fn header(&self, name: &str) -> Option<(FormatId, &[usize])> {
        self.tensor(name).map(|view| (view.format, view.shape))
    }

    /// Names of tensors that [`names`](Self::names) leaves out, because [`tensor`](Self::tensor) cannot show them.
    fn packed_names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(std::iter::empty())
    }

    /// The matrix made of a tensor's values from `first` on, where the source holds it laid out for kernels.
    fn panels(&self, _name: &str, _first: usize) -> Option<Panels> {
        None
    }
}
