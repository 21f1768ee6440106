//! How a file's bytes are held: mapped, read into memory, or handed in by the program. Knows no format.
//!
//! Invariant: the bytes of a [`Bytes`] never move or change length while any clone of it lives.
#![forbid(unsafe_code)]

use super::map::{Mapping, Room};
use super::say::unsupported;
use crate::error::LoadError;
use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::ops::{ControlFlow, Deref, Range};
use std::path::Path;
use std::sync::Arc;

/// How a file gets into memory. Both give the same bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum LoadMode {
    /// Map the file: opening is instant, pages are read when touched, shared with other processes, and can be given back.
    /// The file must not be changed or shortened while it is open, a packed one as long as an engine runs on it; a shortened one
    /// ends the process when touched.
    #[default]
    Map,
    /// Read the file: it may change or vanish afterwards. Faster where mapping is slow: network volumes, some Windows disks. Takes
    /// as much memory as the file has bytes, beside what loading makes of it; of a packed file that is nothing.
    Read,
}

/// How far loading has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadProgress {
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// The callback of everything that loads: called at the start, then for every few megabytes read and every file mapped; the
/// numbers never fall. `Break` stops loading with [`LoadError::Cancelled`].
pub type OnProgress<'a> = dyn FnMut(LoadProgress) -> ControlFlow<()> + 'a;

/// For callers that do not watch: `&mut no_progress`.
pub fn no_progress(_: LoadProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Bytes that several owners share, or a part of them. Cloning copies a pointer.
#[derive(Clone)]
pub struct Bytes {
    kind: Kind,
    start: usize,
    len: usize,
}

#[derive(Clone)]
enum Kind {
    Mapped(Arc<Mapping>),
    /// A file that was read.
    Filled(Arc<Mapping>),
    Given(Arc<Vec<u8>>),
    Shared(Arc<[u8]>),
    Static(&'static [u8]),
}

impl Kind {
    #[inline]
    fn all(&self) -> &[u8] {
        match self {
            Kind::Mapped(map) | Kind::Filled(map) => map.as_slice(),
            Kind::Given(bytes) => bytes,
            Kind::Shared(bytes) => bytes,
            Kind::Static(bytes) => bytes,
        }
    }
}

impl Bytes {
    /// One file, whole. See [`LoadMode`] and [`OnProgress`].
    pub fn open(path: impl AsRef<Path>, mode: LoadMode, progress: &mut OnProgress<'_>) -> Result<Bytes, LoadError> {
        let path = path.as_ref();
        Loader::new(mode, progress, [path])?.load(path)
    }

    /// The bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        &self.kind.all()[self.start..self.start + self.len]
    }

    /// Some of them, which keep all in memory. Panics if `range` is not inside.
    pub fn part(&self, range: Range<usize>) -> Bytes {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        Bytes { kind: self.kind.clone(), start: self.start + range.start, len: range.len() }
    }

    /// Lets the system take back the pages of `range` where they are a mapped file's; they stay what they are, and are read again
    /// when they are touched. Panics if `range` is not inside.
    pub fn release(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        if let Kind::Mapped(map) = &self.kind {
            map.release(self.start + range.start..self.start + range.end);
        }
    }

    /// All of them will be read, and more than once: huge pages are worth asking for.
    pub(super) fn ask_for_huge_pages(&self) {
        if let Kind::Mapped(map) = &self.kind {
            map.ask_for_huge_pages();
        }
    }

    fn of(kind: Kind) -> Bytes {
        let len = kind.all().len();
        Bytes { kind, start: 0, len }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl From<Arc<[u8]>> for Bytes {
    fn from(bytes: Arc<[u8]>) -> Self {
        Bytes::of(Kind::Shared(bytes))
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::of(Kind::Given(Arc::new(bytes)))
    }
}

impl From<&'static [u8]> for Bytes {
    fn from(bytes: &'static [u8]) -> Self {
        Bytes::of(Kind::Static(bytes))
    }
}

impl<const N: usize> From<&'static [u8; N]> for Bytes {
    fn from(bytes: &'static [u8; N]) -> Self {
        Bytes::of(Kind::Static(bytes))
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.kind {
            Kind::Mapped(_) => "mapped",
            Kind::Filled(_) => "read",
            Kind::Given(_) => "given",
            Kind::Shared(_) => "shared",
            Kind::Static(_) => "static",
        };
        write!(f, "Bytes({kind}, {} bytes)", self.len())
    }
}

/// Loads the files of one model one after the other, and tells the callback about all of them together.
pub(super) struct Loader<'a, 'b> {
    mode: LoadMode,
    progress: &'a mut OnProgress<'b>,
    at: LoadProgress,
}

impl<'a, 'b> Loader<'a, 'b> {
    /// `paths` are all files that will be loaded: their sizes make the total.
    pub(super) fn new<'p>(
        mode: LoadMode,
        progress: &'a mut OnProgress<'b>,
        paths: impl IntoIterator<Item = &'p Path>,
    ) -> Result<Self, LoadError> {
        let mut total_bytes = 0u64;
        for path in paths {
            total_bytes = total_bytes.saturating_add(file_metadata(path)?.len());
        }
        let mut loader = Loader { mode, progress, at: LoadProgress { done_bytes: 0, total_bytes } };
        loader.advance(0)?;
        Ok(loader)
    }

    pub(super) fn load(&mut self, path: &Path) -> Result<Bytes, LoadError> {
        file_metadata(path)?;
        let file = File::open(path).map_err(|e| LoadError::io(path, e))?;
        // Asked again of the open file: the length that counts is that of the file we hold.
        let len = file.metadata().map_err(|e| LoadError::io(path, e))?.len();
        let len = usize::try_from(len).map_err(|_| LoadError::io(path, io::ErrorKind::FileTooLarge.into()))?;
        if len == 0 {
            return Ok(Bytes::from(&[]));
        }
        match self.mode {
            LoadMode::Map => {
                let map = Mapping::new(&file, len).map_err(|e| LoadError::io(path, e))?;
                self.advance(len)?;
                Ok(Bytes::of(Kind::Mapped(Arc::new(map))))
            }
            LoadMode::Read => self.read(path, file, len),
        }
    }

    /// Into memory like that of a mapped file, page for page, so that what is aligned in the one is in the other.
    fn read(&mut self, path: &Path, mut file: File, len: usize) -> Result<Bytes, LoadError> {
        let failed = |e| LoadError::io(path, e);
        let mut room = Room::new(len).map_err(failed)?;
        let (mut done, mut told) = (0, 0);
        while done < len {
            let end = len.min(told + READ_BYTES);
            match file.read(&mut room.bytes()[done..end]) {
                Ok(0) => {
                    let found = format!("{done} bytes: it was shortened while it was read");
                    return Err(LoadError::malformed(path.to_string_lossy(), "length", format!("{len} bytes"), found));
                }
                Ok(got) => done += got,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(failed(e)),
            }
            if done == end {
                self.advance(end - told)?;
                told = end;
            }
        }
        Ok(Bytes::of(Kind::Filled(Arc::new(room.filled().map_err(failed)?))))
    }

    fn advance(&mut self, bytes: usize) -> Result<(), LoadError> {
        self.at.done_bytes += bytes as u64;
        match (self.progress)(self.at) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                let LoadProgress { done_bytes, total_bytes } = self.at;
                Err(LoadError::Cancelled { done_bytes, total_bytes })
            }
        }
    }
}

/// The metadata of a regular file, links followed. Asked before opening, because opening a pipe waits for its writer.
pub(super) fn file_metadata(path: &Path) -> Result<Metadata, LoadError> {
    let metadata = fs::metadata(path).map_err(|e| LoadError::io(path, e))?;
    if metadata.is_dir() {
        return Err(LoadError::io(path, io::ErrorKind::IsADirectory.into()));
    }
    if !metadata.is_file() {
        return Err(unsupported(&path.to_string_lossy(), "this kind of file", "a pipe, socket or device", "a regular file"));
    }
    Ok(metadata)
}

/// Between two calls of the progress callback: a few milliseconds of disk, and large enough to cost nothing.
const READ_BYTES: usize = 8 << 20;
