//! A matrix as the kernels read it: segments, one for each part it was made of, each with the layout that its format has.
//! Formats without a panel, and all quantised ones where the arithmetic is to be exact, keep the file's own blocks. Panels that
//! a packed file holds are read where they lie.
//!
//! Invariant: a segment's bytes are whole panels, or whole rows, of exactly `rows` by `k`.
#![forbid(unsafe_code)]

use super::Compute;
use super::arena::{Arena, Piece};
use super::panel::{LANES, LAYOUT, Panel};
use super::pool::Pool;
use crate::backend::{RowOrder, WeightPart};
use crate::dtype::FormatId;
use crate::error::{ConfigError, LoadError};
use crate::quant::{self, Codec};
use crate::weights::{Bytes, Panels};
use parking_lot::Mutex;
use std::ops::{Deref, Range};

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
    bytes: Held,
}

/// Memory of our own, or a file's.
enum Held {
    Own(Piece),
    File(Bytes),
}

impl Deref for Held {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Held::Own(piece) => piece,
            Held::File(bytes) => bytes,
        }
    }
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

/// Bytes that `rows` by `columns` values take beside `panels`: none where these are read as they lie. `None` where they are not
/// what the kernels for `compute` read.
pub(super) fn beside(format: FormatId, rows: usize, columns: usize, panels: &Panels, compute: Compute) -> Option<u64> {
    let store = Store::choose(format, compute).filter(|s| matches!(s, Store::Panels(_)))?;
    let same = panels.layout == LAYOUT && store.bytes(rows, columns) == Some(panels.bytes.len());
    same.then(|| if aligned(&panels.bytes) { 0 } else { panels.bytes.len() as u64 })
}

/// The kernels load whole lines.
fn aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(64)
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

    /// The panels of a matrix that was made of one part and lies in panels: what a packed file holds.
    pub fn panels(&self) -> Option<&[u8]> {
        match &*self.segments {
            [one] if matches!(one.store, Store::Panels(_)) => Some(&one.bytes),
            _ => None,
        }
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
        let bytes = match part.panels {
            Some(panels) => {
                if beside(format, rows, k, panels, compute).is_none() {
                    let expected = format!("panels of layout {LAYOUT} of {rows} by {k} values");
                    let found = format!("{} bytes of layout {}", panels.bytes.len(), panels.layout);
                    return Err(malformed(part, "panels", expected, found));
                }
                match aligned(&panels.bytes) {
                    true => Held::File(panels.bytes.clone()),
                    false => Held::Own(copied(&panels.bytes, rows.div_ceil(LANES), pool, arena)?),
                }
            }
            None => Held::Own(Self::own(part, store, rows, pool, arena)?),
        };
        Ok(Segment { store, rows, k, column, bytes })
    }

    /// A copy of the view's rows, as `store` says.
    fn own(part: &WeightPart<'_>, store: Store, rows: usize, pool: &Pool, arena: &mut Arena) -> Result<Piece, LoadError> {
        let k = part.view.shape[1];
        let row_bytes = check_bytes(part, rows, k)?;
        check_order(part, rows)?;
        let source = Rows { part, rows, row_bytes };
        if store.bytes(rows, k).is_none() {
            return Err(shape(part, vec![usize::MAX / row_bytes.max(1), k]));
        }
        match store {
            Store::Panels(panel) => pack(&source, panel, k, pool, arena),
            Store::Source(_) => Ok(arena.fill((rows, row_bytes), pool, 64.max(source.grain(1)), |first, to| {
                for (i, to) in to.chunks_exact_mut(row_bytes).enumerate() {
                    to.copy_from_slice(source.row(first + i));
                }
                source.release(first..first + to.len() / row_bytes);
            })?),
        }
    }
}

/// The rows of a part.
struct Rows<'a> {
    part: &'a WeightPart<'a>,
    rows: usize,
    row_bytes: usize,
}

impl<'a> Rows<'a> {
    fn row(&self, r: usize) -> &'a [u8] {
        &self.part.view.bytes[self.part.order.source_row(r, self.rows) * self.row_bytes..][..self.row_bytes]
    }

    /// True where rows are given back run by run: in the file's order, and of a tensor beside which the calls cost nothing.
    fn releases(&self) -> bool {
        self.part.release.is_some() && self.part.order == RowOrder::Natural && self.part.view.bytes.len() >= RELEASE_FROM
    }

    /// Units of `rows` rows in a run.
    fn grain(&self, rows: usize) -> usize {
        if self.releases() { RELEASE_RUN.div_ceil(rows * self.row_bytes) } else { 1 }
    }

    /// These were read for the last time.
    fn release(&self, rows: Range<usize>) {
        if let Some(release) = self.part.release.filter(|_| self.releases()) {
            release.bytes(rows.start * self.row_bytes..rows.end.min(self.rows) * self.row_bytes);
        }
    }
}

fn pack(source: &Rows<'_>, panel: &Panel, k: usize, pool: &Pool, arena: &mut Arena) -> Result<Piece, LoadError> {
    let (rows, stride) = (source.rows, k / panel.block_len * panel.bytes);
    let bad = Mutex::new(None);
    let piece = arena.fill((rows.div_ceil(LANES), stride), pool, source.grain(LANES), |panels, to| {
        for (i, to) in to.chunks_exact_mut(stride).enumerate() {
            let first = (panels + i) * LANES;
            let count = LANES.min(rows - first);
            let mut list = [&[][..]; LANES];
            for (i, slot) in list[..count].iter_mut().enumerate() {
                *slot = source.row(first + i);
            }
            if let Err(r) = panel.pack(&list[..count], to) {
                bad.lock().get_or_insert(first + r);
            }
        }
        source.release(panels * LANES..(panels + to.len() / stride) * LANES);
    })?;
    let part = source.part;
    match bad.into_inner() {
        None => Ok(piece),
        Some(r) => {
            let at = format!("row {}", part.order.source_row(r, rows));
            Err(malformed(part, at, "finite scales", "an infinity or NaN"))
        }
    }
}

/// The same bytes on cache lines.
fn copied(bytes: &[u8], panels: usize, pool: &Pool, arena: &mut Arena) -> Result<Piece, LoadError> {
    let stride = bytes.len() / panels;
    Ok(arena.fill((panels, stride), pool, 1, |first, to| to.copy_from_slice(&bytes[first * stride..][..to.len()]))?)
}

/// Tensors that are given back as they are packed, so that at no time both copies of a large one are in memory; and bytes at
/// a time, beside which the call and what it does to the page tables cost little.
const RELEASE_FROM: usize = 8 << 20;
const RELEASE_RUN: usize = 1 << 20;

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

#[cfg(test)]
mod tests {
    use super::super::synthetic;
    use super::*;
    use crate::weights::{Release, TensorView, WeightSource};

    /// Remembers what it was told.
    struct Told(Mutex<Vec<Range<usize>>>);

    impl WeightSource for Told {
        fn label(&self) -> &str {
            "told"
        }

        fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
            Box::new(std::iter::empty())
        }

        fn tensor(&self, _: &str) -> Option<TensorView<'_>> {
            None
        }

        fn release_part(&self, name: &str, range: Range<usize>) {
            assert_eq!(name, "w");
            self.0.lock().push(range);
        }
    }

    /// Of a large tensor in its own order every byte, once, in runs; of others nothing.
    #[test]
    fn rows_are_given_back_as_they_are_packed() {
        let k = 4096;
        for (format, rows, order, given) in [
            (FormatId::F16, 1500, RowOrder::Natural, true),
            (FormatId::Q8_0, 2500, RowOrder::Natural, true),
            (FormatId::Q8_0, 64, RowOrder::Natural, false),
            (FormatId::F16, 1500, RowOrder::Interleaved { heads: 2 }, false),
        ] {
            let bytes = synthetic::weights(format, k, 3).repeat(rows);
            for threads in [1, 3] {
                for compute in [Compute::Fast, Compute::Exact] {
                    let told = Told(Mutex::new(Vec::new()));
                    let view = TensorView { format, shape: &[rows, k], bytes: &bytes };
                    let release = Some(Release::new(&told, "w", 100));
                    let part = WeightPart { order, release, ..WeightPart::new("w", view) };
                    CpuWeight::load(&[part], compute, &Pool::new(threads).unwrap(), &mut Arena::default()).unwrap();
                    let mut ranges = told.0.into_inner();
                    ranges.sort_by_key(|r| r.start);
                    assert_eq!(!ranges.is_empty(), given, "{format} {rows}");
                    assert!(ranges.windows(2).all(|w| w[0].end == w[1].start), "{format}: {ranges:?}");
                    if let (Some(first), Some(last)) = (ranges.first(), ranges.last()) {
                        assert_eq!((first.start, last.end), (100, 100 + bytes.len()), "{format}");
                        assert!(ranges.iter().all(|r| r.len() < 2 * RELEASE_RUN) && ranges.len() > 4, "{format}: {ranges:?}");
                    }
                }
            }
        }
    }
}
