//! An allocator that counts what the calling thread holds, so that tests that run side by side do not see each other.
// A test binary exports nothing.
#![allow(unreachable_pub)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

pub struct Counting;

thread_local! {
    static HELD_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

/// The most memory that `f` held at once beyond what was held before it.
pub fn peak_of<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD_BYTES.get();
    PEAK_BYTES.set(before);
    let result = f();
    (result, (PEAK_BYTES.get() - before).max(0) as usize)
}

fn count(bytes: isize) {
    let held = HELD_BYTES.get() + bytes;
    HELD_BYTES.set(held);
    if held > PEAK_BYTES.get() {
        PEAK_BYTES.set(held);
    }
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches two cells that need no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's own promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
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
        // Old and new exist together while the bytes are copied.
        count(new_size as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller's own promises.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
