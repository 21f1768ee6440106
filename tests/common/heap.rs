//! An allocator that counts what the whole process holds, worker threads and all. To be used in a process of its own.
// A test binary exports nothing.
#![allow(unreachable_pub)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

pub struct Heap;

static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);
static PEAK_BYTES: AtomicIsize = AtomicIsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Bytes held now.
pub fn live_bytes() -> isize {
    LIVE_BYTES.load(Ordering::SeqCst)
}

/// Calls that asked for memory during `f`.
pub fn calls_of<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = CALLS.load(Ordering::SeqCst);
    let result = f();
    (result, CALLS.load(Ordering::SeqCst) - before)
}

/// The most bytes that were held at once during `f`, beyond those held before.
pub fn peak_of<T>(f: impl FnOnce() -> T) -> (T, isize) {
    let before = live_bytes();
    PEAK_BYTES.store(before, Ordering::SeqCst);
    let result = f();
    (result, PEAK_BYTES.load(Ordering::SeqCst) - before)
}

fn count(bytes: isize) {
    let live = LIVE_BYTES.fetch_add(bytes, Ordering::SeqCst) + bytes;
    PEAK_BYTES.fetch_max(live, Ordering::SeqCst);
}

// SAFETY: every call goes to the system's allocator unchanged; counting needs no memory.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::SeqCst);
        count(layout.size() as isize);
        // SAFETY: the caller's own promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::SeqCst);
        count(layout.size() as isize);
        // SAFETY: the caller's own promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's own promises.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::SeqCst);
        // Old and new exist together while the bytes are copied.
        count(new_size as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller's own promises.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
