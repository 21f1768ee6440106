//! The one place that maps files into memory, and the only `unsafe` of the weights.
//!
//! Invariant: a mapping is read-only, backed by a regular file and as long as the file was when it was opened; or it is a
//! [`Room`] that was filled.

use memmap2::{Mmap, MmapMut, MmapOptions};
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

    /// All of it will be read, and more than once: asks for huge pages, which a file's first reader gets and later ones share.
    /// Weights in small pages are read an eighth slower.
    pub(super) fn ask_for_huge_pages(&self) {
        // Advice only, as below.
        #[cfg(target_os = "linux")]
        let _ = self.0.advise(memmap2::Advice::HugePage);
    }

    /// Gives the pages of `range` back to the system; touching them again reads them from the file again. Where the system
    /// has no such call, or refuses, the pages simply stay until it needs them.
    /// Not for a room that was filled: its bytes are nowhere else.
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

/// Zeroed memory of our own, on whole pages and huge ones where there are any, to be filled with a file.
pub(super) struct Room(MmapMut);

impl Room {
    /// `len` bytes, which is not 0.
    pub(super) fn new(len: usize) -> io::Result<Room> {
        let room = MmapMut::map_anon(len)?;
        // Advice only, as above; it has to come before the first touch.
        #[cfg(target_os = "linux")]
        let _ = room.advise(memmap2::Advice::HugePage);
        Ok(Room(room))
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// Nobody writes to it any more.
    pub(super) fn filled(self) -> io::Result<Mapping> {
        self.0.make_read_only().map(Mapping)
    }
}
