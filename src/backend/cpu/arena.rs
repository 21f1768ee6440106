//! Memory for weights, caches and buffers: zeroed, on cache lines, and from 2 MiB on asking for huge pages, without which a
//! weight read loses a fifth of its bandwidth to the page tables. Small matrices share a chunk, or they would never see a
//! huge page. An arena keeps no memory alive: a chunk goes with its last piece.
//!
//! Invariant: pieces of a chunk do not overlap.
#![allow(unsafe_code)]

use crate::error::RunError;
use bytemuck::Pod;
use std::alloc::{Layout, alloc, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Weak};

/// Gives pieces out.
#[derive(Default)]
pub(super) struct Arena {
    open: Vec<Open>,
    given_bytes: usize,
}

struct Open {
    chunk: Weak<Chunk>,
    used: usize,
    len: usize,
}

impl Arena {
    /// A zeroed piece of `len` bytes on a cache line.
    ///
    /// # Errors
    /// [`RunError::Device`] where the system has not that much memory.
    pub(super) fn take(&mut self, len: usize) -> Result<Piece, RunError> {
        let rounded = len.checked_next_multiple_of(LINE).ok_or_else(|| no_memory(len))?;
        if rounded >= HUGE {
            // On its own: nothing to gain from sharing.
            let chunk = Arc::new(Chunk::new(rounded)?);
            return Ok(Piece::zeroed(chunk, 0, len));
        }
        self.open.retain(|o| o.chunk.strong_count() > 0);
        let found = self.open.iter_mut().filter(|o| o.len - o.used >= rounded).find_map(|o| Some((o.chunk.upgrade()?, o)));
        let (chunk, open) = match found {
            Some(found) => found,
            None => {
                // As much as was given out so far, within limits: a small model wastes little and a large one gets huge pages.
                let len = self.given_bytes.next_multiple_of(LINE).clamp(SHARED_MIN, SHARED_MAX).max(rounded);
                let chunk = Arc::new(Chunk::new(len)?);
                self.open.push(Open { chunk: Arc::downgrade(&chunk), used: 0, len });
                (chunk, self.open.last_mut().expect("just pushed"))
            }
        };
        let at = open.used;
        open.used += rounded;
        self.given_bytes += rounded;
        Ok(Piece::zeroed(chunk, at, len))
    }
}

/// Bytes of an arena.
pub(super) struct Piece {
    chunk: Arc<Chunk>,
    at: usize,
    len: usize,
}

impl Piece {
    fn zeroed(chunk: Arc<Chunk>, at: usize, len: usize) -> Self {
        assert!(at + len <= chunk.layout.size(), "a piece inside its chunk");
        // SAFETY: in bounds as asserted, and no other piece has these bytes. Only these are touched, so that the rest of a
        // chunk takes no memory before it is used.
        unsafe { chunk.at.as_ptr().add(at).write_bytes(0, len) };
        Piece { chunk, at, len }
    }

    /// A piece with a chunk of its own.
    ///
    /// # Errors
    /// [`RunError::Device`] where the system has not that much memory.
    pub(super) fn alone(len: usize) -> Result<Self, RunError> {
        let rounded = len.checked_next_multiple_of(LINE).ok_or_else(|| no_memory(len))?;
        Ok(Self::zeroed(Arc::new(Chunk::new(rounded.max(LINE))?), 0, len))
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes at `at`, which the piece has alone.
        unsafe { slice::from_raw_parts(self.chunk.at.as_ptr().add(self.at), self.len) }
    }
}

impl DerefMut for Piece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { slice::from_raw_parts_mut(self.chunk.at.as_ptr().add(self.at), self.len) }
    }
}

/// A fixed number of values on cache lines.
pub(super) struct Aligned<T> {
    piece: Piece,
    _type: PhantomData<T>,
}

impl<T: Pod> Aligned<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`RunError::Device`] where the system has not that much memory.
    pub(super) fn zeroed(len: usize) -> Result<Self, RunError> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| no_memory(usize::MAX))?;
        Ok(Aligned { piece: Piece::alone(bytes)?, _type: PhantomData })
    }
}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.piece)
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.piece)
    }
}

struct Chunk {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns plain bytes, which only the pieces touch, each its own.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(len: usize) -> Result<Self, RunError> {
        let align = if len >= HUGE { HUGE } else { LINE };
        let layout = Layout::from_size_align(len, align).map_err(|_| no_memory(len))?;
        assert!(len > 0, "a chunk has bytes");
        // SAFETY: the layout has a size.
        let at = NonNull::new(unsafe { alloc(layout) }).ok_or_else(|| no_memory(len))?;
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            // SAFETY: our own memory, whole pages inside of it. Advice: a failure changes nothing but speed. It has to come
            // before the first touch, so `alloc_zeroed` would be too late.
            let _ = unsafe { madvise(at.as_ptr().cast(), len / PAGE * PAGE, MADV_HUGEPAGE) };
        }
        Ok(Chunk { at, layout })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.at.as_ptr(), self.layout) }
    }
}

fn no_memory(bytes: usize) -> RunError {
    RunError::Device { device: "cpu".into(), message: format!("the system refused {bytes} bytes of memory") }
}

const LINE: usize = 64;
const HUGE: usize = 2 << 20;
/// Bounds of a chunk that small pieces share.
const SHARED_MIN: usize = 64 << 10;
const SHARED_MAX: usize = 4 << 20;

#[cfg(target_os = "linux")]
const PAGE: usize = 64 << 10;
#[cfg(target_os = "linux")]
const MADV_HUGEPAGE: core::ffi::c_int = 14;

#[cfg(target_os = "linux")]
unsafe extern "C" {
    // The one system call that std has no name for; not worth a dependency.
    fn madvise(at: *mut core::ffi::c_void, len: usize, advice: core::ffi::c_int) -> core::ffi::c_int;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zeroed_aligned_and_apart() {
        let mut arena = Arena::default();
        let sizes = [0, 1, 64, 65, 100_000, 3, 5_000_000, 1_000_000, 2 << 20, 7];
        let mut pieces: Vec<_> = sizes.iter().map(|&len| arena.take(len).unwrap()).collect();
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert_eq!(piece.as_ptr() as usize % LINE, 0);
            assert!(piece.len() == sizes[i] && piece.iter().all(|&b| b == 0));
            piece.fill(i as u8 + 1);
        }
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.iter().all(|&b| b == i as u8 + 1));
        }
        // What was dropped is not given out again, and what is left lives on.
        drop(arena);
        assert_eq!(pieces[4][99_999], 5);
    }

    #[test]
    fn a_chunk_goes_with_its_last_piece() {
        let mut arena = Arena::default();
        let (a, b) = (arena.take(10).unwrap(), arena.take(20).unwrap());
        let chunk = Arc::downgrade(&a.chunk);
        assert!(Arc::ptr_eq(&a.chunk, &b.chunk));
        drop((a, b));
        assert!(chunk.upgrade().is_none());
    }

    #[test]
    fn too_much_is_an_error() {
        assert!(Arena::default().take(usize::MAX).is_err());
        assert!(Piece::alone(isize::MAX as usize).is_err());
        assert!(Aligned::<f32>::zeroed(usize::MAX / 2).is_err());
    }
}
