//! A matrix as the kernels read it: segments, one for each part it was made of, each with the layout that its format has.
//! Formats without a panel, and all quantised ones where the arithmetic is to be exact, keep the file's own blocks.
//!
//! Invariant: a segment's bytes are whole panels, or whole rows, of exactly `rows` by `k`.
#![forbid(unsafe_code)]

use super::Compute;
use super::arena::{Arena, Piece};
use super::panel::{LANES, Panel};
use super::pool::Pool;
use crate::backend::{RowOrder, WeightPart};
use crate::dtype::FormatId;
use crate::error::{ConfigError, LoadError};
use crate::quant::{self, Codec};
use parking_lot::Mutex;

/// A weight matrix `[N, K]` of the CPU backend.
pub struct CpuWeight {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) segments: Box<[Segment]>,
}

/// Rows of one format.
pub(super) struct Segment {
    pub(super) store: Store,
    pub(super) rows: usize,
    pub(super) k: usize,
    /// Where its first row stands among the matrix's rows.
    pub(super) column: usize,
    bytes: Piece,
}

/// How a segment's bytes lie.
#[derive(Clone, Copy)]
pub(super) enum Store {
    /// In panels.
    Panels(&'static Panel),
    /// Row after row as in the file.
    Source(&'static Codec),
}

impl Store {
    /// How a tensor of `format` is kept; `None` for a format that is no weight format.
    pub(super) fn choose(format: FormatId, compute: Compute) -> Option<Store> {
        let panel = match compute {
            Compute::Exact => Panel::plain(format),
            Compute::Fast => Panel::find(format),
        };
        panel.map(Store::Panels).or_else(|| quant::codec(format).map(Store::Source))
    }

    /// Bytes of `rows` by `k`, whole blocks assumed. `None` where they do not fit a `usize`.
    pub(super) fn bytes(self, rows: usize, k: usize) -> Option<usize> {
        match self {
            Store::Panels(p) => rows.div_ceil(LANES).checked_mul((k / p.block_len).checked_mul(p.bytes)?),
            Store::Source(c) => rows.checked_mul(c.id.bytes_of(k)?),
        }
    }
}

impl Segment {
    /// True where activations are quantised for it.
    pub(super) fn quantized(&self) -> bool {
        matches!(self.store, Store::Panels(p) if p.quantized)
    }

    /// Panels, those that are decoded as they are needed included.
    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Panel `p` of a segment in panels.
    pub(super) fn panel(&self, p: usize) -> &[u8] {
        let stride = self.bytes.len() / self.panels();
        &self.bytes[p * stride..][..stride]
    }

    /// The blocks that hold `len` values of `row` from `first` on, of a segment that keeps the file's blocks.
    pub(super) fn source(&self, codec: &Codec, row: usize, first: usize, len: usize) -> &[u8] {
        let (block, bytes) = (codec.id.block_len(), codec.id.block_bytes());
        &self.bytes[(row * self.k + first) / block * bytes..][..len / block * bytes]
    }

    /// Values of row `row` from `first` on as numbers.
    fn decode_part(&self, row: usize, first: usize, out: &mut [f32]) {
        match self.store {
            Store::Panels(panel) => {
                panel.row(&self.panel(row / LANES)[first / panel.block_len * panel.bytes..], row % LANES, out);
            }
            Store::Source(codec) => (codec.decode)(self.source(codec, row, first, out.len()), out),
        }
    }
}

impl CpuWeight {
    /// Packs the parts, whose rows follow each other.
    ///
    /// # Errors
    /// [`LoadError`] naming the part that does not fit, or whose scales are no numbers.
    pub(super) fn load(parts: &[WeightPart<'_>], compute: Compute, pool: &Pool, arena: &mut Arena) -> Result<Self, LoadError> {
        assert!(!parts.is_empty(), "a matrix is made of something");
        let k = parts[0].view.shape.last().copied().unwrap_or(0);
        let mut n = 0;
        let mut segments = Vec::with_capacity(parts.len());
        for part in parts {
            let segment = Segment::load(part, k, n, compute, pool, arena)?;
            n += segment.rows;
            segments.push(segment);
        }
        Ok(CpuWeight { n, k, segments: segments.into() })
    }

    /// Rows, N.
    pub fn rows(&self) -> usize {
        self.n
    }

    /// Columns, K.
    pub fn columns(&self) -> usize {
        self.k
    }

    /// Row `row` as numbers, exactly as the file's format means them.
    pub(super) fn decode_row(&self, row: usize, out: &mut [f32]) {
        self.decode_part(row, 0, out);
    }

    /// Values of row `row` from `first` on; both ends lie between blocks.
    pub(super) fn decode_part(&self, row: usize, first: usize, out: &mut [f32]) {
        let segment = self.segments.iter().rfind(|s| s.column <= row).expect("a matrix has rows");
        segment.decode_part(row - segment.column, first, out);
    }
}

impl Segment {
    fn load(
        part: &WeightPart<'_>,
        k: usize,
        column: usize,
        compute: Compute,
        pool: &Pool,
        arena: &mut Arena,
    ) -> Result<Self, LoadError> {
        let (view, format) = (&part.view, part.view.format);
        let &[rows, columns] = view.shape else {
            return Err(shape(part, vec![values(part)? / k.max(1), k]));
        };
        if rows == 0 || columns == 0 {
            return Err(malformed(part, "shape", "at least one row and one column", format!("{rows} by {columns}")));
        }
        if columns != k {
            return Err(shape(part, vec![rows, k]));
        }
        if !k.is_multiple_of(format.block_len()) {
            return Err(LoadError::PartialBlock { tensor: part.name.into(), row_len: k, block_len: format.block_len(), format });
        }
        let store = Store::choose(format, compute).ok_or_else(|| LoadError::TensorFormat {
            tensor: part.name.into(),
            expected: "a floating-point or quantised format",
            found: format,
        })?;
        let row_bytes = check_bytes(part, rows, k)?;
        check_order(part, rows)?;
        let too_large = || shape(part, vec![usize::MAX / row_bytes.max(1), k]);
        let mut bytes = arena.take(store.bytes(rows, k).ok_or_else(too_large)?)?;
        let row = |r: usize| &view.bytes[part.order.source_row(r, rows) * row_bytes..][..row_bytes];
        if !bytes.is_empty() {
            match store {
                Store::Source(_) => pool.for_each_row(&mut bytes, row_bytes, 64, |first, to| {
                    for (i, to) in to.chunks_exact_mut(row_bytes).enumerate() {
                        to.copy_from_slice(row(first + i));
                    }
                }),
                Store::Panels(panel) => pack(part, panel, rows, &row, pool, &mut bytes)?,
            }
        }
        Ok(Segment { store, rows, k, column, bytes })
    }
}

fn pack<'a>(
    part: &WeightPart<'_>,
    panel: &Panel,
    rows: usize,
    row: &(dyn Fn(usize) -> &'a [u8] + Sync),
    pool: &Pool,
    bytes: &mut [u8],
) -> Result<(), LoadError> {
    let stride = bytes.len() / rows.div_ceil(LANES);
    let bad = Mutex::new(None);
    pool.for_each_row(bytes, stride, 1, |panels, to| {
        for (i, to) in to.chunks_exact_mut(stride).enumerate() {
            let first = (panels + i) * LANES;
            let count = LANES.min(rows - first);
            let mut list = [&[][..]; LANES];
            for (i, slot) in list[..count].iter_mut().enumerate() {
                *slot = row(first + i);
            }
            if let Err(r) = panel.pack(&list[..count], to) {
                bad.lock().get_or_insert(first + r);
            }
        }
    });
    match bad.into_inner() {
        None => Ok(()),
        Some(r) => {
            let at = format!("row {}", part.order.source_row(r, rows));
            Err(malformed(part, at, "finite scales", "an infinity or NaN"))
        }
    }
}

/// Bytes of a row, once the view's bytes are as many as its shape says.
fn check_bytes(part: &WeightPart<'_>, rows: usize, k: usize) -> Result<usize, LoadError> {
    let row_bytes = part.view.format.bytes_of(k);
    match row_bytes.and_then(|b| b.checked_mul(rows)) {
        Some(bytes) if bytes == part.view.bytes.len() => Ok(row_bytes.unwrap_or(0)),
        expected => {
            let expected = expected.map_or("a size that can be addressed".into(), |b| format!("{b} bytes"));
            Err(malformed(part, "data", expected, format!("{} bytes", part.view.bytes.len())))
        }
    }
}

/// Values that the shape asks for.
pub(super) fn values(part: &WeightPart<'_>) -> Result<usize, LoadError> {
    part.view
        .shape
        .iter()
        .try_fold(1usize, |n, d| n.checked_mul(*d))
        .ok_or_else(|| malformed(part, "shape", "a size that can be addressed", format!("{:?}", part.view.shape)))
}

/// An order other than the natural one needs heads of the same number of rows, of an even number where halves interleave.
pub(super) fn check_order(part: &WeightPart<'_>, rows: usize) -> Result<(), LoadError> {
    let (unit, expected) = match part.order {
        RowOrder::Natural => return Ok(()),
        RowOrder::Interleaved { heads } => (heads.checked_mul(2), format!("{heads} heads of an even number of rows")),
        RowOrder::Rolled { heads, .. } => (Some(heads), format!("{heads} heads")),
        RowOrder::Grouped { groups, queries } => (
            queries.checked_add(2).and_then(|heads| heads.checked_mul(groups)),
            format!("{groups} groups of {queries} query heads, a key head and a value head"),
        ),
    };
    match unit {
        Some(unit) if unit > 0 && rows > 0 && rows.is_multiple_of(unit) => Ok(()),
        _ => Err(ConfigError::invalid(format!("rows of tensor {}", part.name), expected, rows).into()),
    }
}

pub(super) fn malformed(
    part: &WeightPart<'_>,
    at: impl Into<String>,
    expected: impl Into<String>,
    found: impl ToString,
) -> LoadError {
    LoadError::malformed(format!("tensor {}", part.name), at, expected, found)
}

fn shape(part: &WeightPart<'_>, expected: Vec<usize>) -> LoadError {
    LoadError::Shape { tensor: part.name.into(), expected, found: part.view.shape.to_vec() }
}
