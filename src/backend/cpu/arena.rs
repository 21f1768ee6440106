//! Memory for weights, caches and buffers: on cache lines, and from 2 MiB on asking for huge pages, without which a weight
//! read loses a fifth of its bandwidth to the page tables. Small matrices share a chunk, or they would never see a huge page.
//! An arena keeps no memory alive: a chunk goes with its last piece.
//!
//! Pages cost more than what is written to them: the system clears each when it is first touched. So a matrix is zeroed run by
//! run on the threads that fill it, while the run is in their caches; and what starts as zeros comes from the system as
//! zeros, untouched until it is used, of which a cache may use little.
//!
//! Invariant: pieces of a chunk do not overlap, and every byte of a piece is initialised before anyone sees it.
#![allow(unsafe_code)]

use super::pool::Pool;
use crate::error::RunError;
use bytemuck::Pod;
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Weak};

/// Gives pieces out, for matrices.
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
    /// A piece of `rows` times `width` bytes on a cache line, filled by `fill(first row, their zeroed bytes)` in runs of `grain`
    /// rows on the pool's threads.
    ///
    /// # Errors
    /// [`RunError::Device`] where the system has not that much memory.
    pub(super) fn fill(
        &mut self,
        (rows, width): (usize, usize),
        pool: &Pool,
        grain: usize,
        fill: impl Fn(usize, &mut [u8]) + Sync,
    ) -> Result<Piece, RunError> {
        let len = rows.checked_mul(width).ok_or_else(|| no_memory(usize::MAX))?;
        let (chunk, at) = self.place(len)?;
        assert!(at + len <= chunk.layout.size(), "a piece inside its chunk");
        let start = Start(chunk.start().wrapping_add(at));
        pool.for_each_chunk(rows, grain, |_, r| {
            // One thread gets all of them at once.
            for first in r.clone().step_by(grain.max(1)) {
                let (at, len) = (start.byte(first * width), grain.max(1).min(r.end - first) * width);
                // SAFETY: in bounds as asserted; no other piece has these bytes, and a row is handed out once.
                unsafe { at.write_bytes(0, len) };
                // SAFETY: as above, and initialised just now.
                fill(first, unsafe { slice::from_raw_parts_mut(at, len) });
            }
        });
        Ok(Piece { chunk, at, len })
    }

    /// Room for `len` bytes, which nobody has initialised.
    fn place(&mut self, len: usize) -> Result<(Arc<Chunk>, usize), RunError> {
        let rounded = len.checked_next_multiple_of(LINE).ok_or_else(|| no_memory(len))?;
        if rounded >= HUGE {
            // On its own: nothing to gain from sharing.
            return Ok((Arc::new(Chunk::new(rounded)?), 0));
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
        Ok((chunk, at))
    }
}

/// Where a piece starts, for threads that each fill their own rows of it.
#[derive(Clone, Copy)]
struct Start(*mut u8);

// SAFETY: a plain address; what is done with it says why it may.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}

impl Start {
    fn byte(self, at: usize) -> *mut u8 {
        self.0.wrapping_add(at)
    }
}

/// Bytes of an arena.
pub(super) struct Piece {
    chunk: Arc<Chunk>,
    at: usize,
    len: usize,
}

impl Piece {
    /// Zeros in a chunk of their own.
    ///
    /// # Errors
    /// [`RunError::Device`] where the system has not that much memory.
    pub(super) fn alone(len: usize) -> Result<Self, RunError> {
        let rounded = len.checked_next_multiple_of(LINE).ok_or_else(|| no_memory(len))?;
        Ok(Piece { chunk: Arc::new(Chunk::zeroed(rounded.max(LINE))?), at: 0, len })
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes at `at`, which the piece has alone.
        unsafe { slice::from_raw_parts(self.chunk.start().add(self.at), self.len) }
    }
}

impl DerefMut for Piece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { slice::from_raw_parts_mut(self.chunk.start().add(self.at), self.len) }
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
    /// Bytes before the first that is on a cache line.
    skip: usize,
}

// SAFETY: it owns plain bytes, which only the pieces touch, each its own.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Bytes that nobody has initialised; from a huge page's size on, on a huge page.
    fn new(len: usize) -> Result<Self, RunError> {
        let align = if len >= HUGE { HUGE } else { LINE };
        let layout = Layout::from_size_align(len, align).map_err(|_| no_memory(len))?;
        assert!(len > 0, "a chunk has bytes");
        // SAFETY: the layout has a size.
        let at = NonNull::new(unsafe { alloc(layout) }).ok_or_else(|| no_memory(len))?;
        let chunk = Chunk { at, layout, skip: 0 };
        chunk.ask_for_huge_pages();
        Ok(chunk)
    }

    /// `len` zeros on a cache line. No alignment is asked for, as the system's allocator would take that for a reason to write
    /// the zeros itself, and so to touch all of it.
    fn zeroed(len: usize) -> Result<Self, RunError> {
        let layout =
            len.checked_add(LINE - 1).and_then(|len| Layout::from_size_align(len, 1).ok()).ok_or_else(|| no_memory(len))?;
        // SAFETY: the layout has a size.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| no_memory(len))?;
        let skip = at.as_ptr().addr().next_multiple_of(LINE) - at.as_ptr().addr();
        let chunk = Chunk { at, layout, skip };
        chunk.ask_for_huge_pages();
        Ok(chunk)
    }

    /// The first byte on a cache line.
    fn start(&self) -> *mut u8 {
        self.at.as_ptr().wrapping_add(self.skip)
    }

    fn ask_for_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.layout.size() >= HUGE {
            let skip = self.at.as_ptr().addr().next_multiple_of(PAGE) - self.at.as_ptr().addr();
            let len = (self.layout.size() - skip) / PAGE * PAGE;
            // SAFETY: our own memory, whole pages inside of it. Advice: a failure changes nothing but speed. It has to come
            // before the first touch.
            let _ = unsafe { madvise(self.at.as_ptr().wrapping_add(skip).cast(), len, MADV_HUGEPAGE) };
        }
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

    /// `len` bytes, each found zero and made `byte`.
    fn filled(arena: &mut Arena, pool: &Pool, len: usize, byte: u8) -> Piece {
        let fill = |_, bytes: &mut [u8]| {
            assert!(bytes.iter().all(|&b| b == 0));
            bytes.fill(byte);
        };
        arena.fill((len, 1), pool, 4096, fill).unwrap()
    }

    #[test]
    fn pieces_are_filled_aligned_and_apart() {
        for pool in [Pool::new(1).unwrap(), Pool::new(3).unwrap()] {
            let mut arena = Arena::default();
            let sizes = [0, 1, 64, 65, 100_000, 3, 5_000_000, 1_000_000, 2 << 20, 7];
            let pieces: Vec<_> = sizes.iter().zip(1..).map(|(&len, byte)| filled(&mut arena, &pool, len, byte)).collect();
            for ((piece, len), byte) in pieces.iter().zip(sizes).zip(1..) {
                assert_eq!(piece.as_ptr().addr() % LINE, 0);
                assert!(piece.len() == len && piece.iter().all(|&b| b == byte));
            }
            // What was dropped is not given out again, and what is left lives on.
            drop(arena);
            assert_eq!(pieces[4][99_999], 5);
        }
    }

    #[test]
    fn alone_is_zeroed_and_aligned() {
        for len in [0, 1, 64, 100_000, 2 << 20, 5_000_001] {
            let mut piece = Piece::alone(len).unwrap();
            assert_eq!(piece.as_ptr().addr() % LINE, 0);
            assert!(piece.len() == len && piece.iter().all(|&b| b == 0));
            piece.fill(7);
            let again = Piece::alone(len).unwrap();
            assert!(again.iter().all(|&b| b == 0) && piece.iter().all(|&b| b == 7));
        }
    }

    #[test]
    fn a_chunk_goes_with_its_last_piece() {
        let (mut arena, pool) = (Arena::default(), Pool::new(1).unwrap());
        let (a, b) = (filled(&mut arena, &pool, 10, 1), filled(&mut arena, &pool, 20, 2));
        let chunk = Arc::downgrade(&a.chunk);
        assert!(Arc::ptr_eq(&a.chunk, &b.chunk));
        drop((a, b));
        assert!(chunk.upgrade().is_none());
    }

    #[test]
    fn too_much_is_an_error() {
        let pool = Pool::new(1).unwrap();
        assert!(Arena::default().fill((usize::MAX, 1), &pool, 1, |_, _| {}).is_err());
        assert!(Arena::default().fill((usize::MAX, 2), &pool, 1, |_, _| {}).is_err());
        assert!(Piece::alone(isize::MAX as usize).is_err());
        assert!(Aligned::<f32>::zeroed(usize::MAX / 2).is_err());
    }
}
