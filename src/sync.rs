//! The primitives of the code whose threads are checked in every order: std's and parking_lot's, or under `--cfg loom` those
//! of loom, which runs a test once for each way in which its threads can interleave. The code on top is the same text.
//!
//! Loom knows no time: there a deadline never passes. It takes `SeqCst` for `AcqRel`, so what is checked must not need more.
#![forbid(unsafe_code)]

pub(crate) use primitives::*;

#[cfg(not(loom))]
mod primitives {
    pub(crate) use parking_lot::{Mutex, MutexGuard};
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::{Arc, atomic};
    pub(crate) use std::thread;
    use std::time::Instant;

    #[derive(Default)]
    pub(crate) struct Condvar(parking_lot::Condvar);

    impl Condvar {
        /// Until it is notified, until the deadline, or for no reason at all.
        pub(crate) fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>, until: Option<Instant>) -> MutexGuard<'a, T> {
            match until {
                Some(until) => _ = self.0.wait_until(&mut guard, until),
                None => self.0.wait(&mut guard),
            }
            guard
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }
    }

    /// std's, by loom's interface.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            UnsafeCell(std::cell::UnsafeCell::new(value))
        }

        pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(loom)]
mod primitives {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::{Arc, MutexGuard, atomic};
    pub(crate) use loom::thread;
    use std::time::Instant;

    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("nothing panics under a lock")
        }
    }

    #[derive(Default)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>, _until: Option<Instant>) -> MutexGuard<'a, T> {
            self.0.wait(guard).expect("nothing panics under a lock")
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }
    }
}

#[cfg(loom)]
#[cfg(test)]
pub(crate) mod check {
    /// Runs `body` once for each interleaving of its threads with up to `preemptions` switches away from a thread that could
    /// go on. `LOOM_MAX_PREEMPTIONS` says otherwise.
    pub(crate) fn every_order(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound.get_or_insert(preemptions);
        model.max_branches = 10_000;
        model.check(body);
    }
}
