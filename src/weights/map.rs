//! The one place that maps files into memory, and the only `unsafe` of the weights.
//!
//! Invariant: a mapping is read-only, backed by a regular file, and as long as the file was when it was opened.

use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::io;
use std::ops::Range;

/// A file in memory, its pages read when they are touched.
pub(super) struct Mapping(Mmap);

impl Mapping {
    /// Maps the first `len` bytes, which the file must have. `len` is not 0.
    pub(super) fn new(file: &File, len: usize) -> io::Result<Mapping> {
        // SAFETY: a shared borrow of a file's bytes is sound while nobody writes to the file or shortens it. No program can
        // enforce that; `LoadMode::Map` documents it as the caller's side, and `LoadMode::Read` is there for files that may
        // change. Nothing derived from the bytes is trusted for memory safety: strings are copied when they are checked.
        let map = unsafe { MmapOptions::new().len(len).map(file) }?;
        Ok(Mapping(map))
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.0
    }

    /// Gives the pages of `range` back to the system; touching them again reads them from the file again. Where the system
    /// has no such call, or refuses, the pages simply stay until it needs them.
    pub(super) fn release(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.0.len(), "a tensor lies inside its file");
        if range.is_empty() {
            return;
        }
        #[cfg(unix)]
        {
            // SAFETY: the mapping is read-only and file-backed, so no page holds data that is not in the file; a dropped page
            // comes back with the same bytes. The range was checked just above.
            let advised = unsafe {
                self.0.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.end - range.start)
            };
            // Advice only: a system that refuses keeps the pages, which costs memory and nothing else.
            let _ = advised;
        }
    }
}
