//! Fork-join threads: the caller is thread 0; workers spin for a moment after a job and then park, so that an idle pool
//! uses no CPU. A pool of one thread starts none. Knows nothing of kernels.
//!
//! ```text
//! caller: job = f; open a new epoch; unpark who is asleep; f(0); close; wait until nobody is inside; re-raise a panic
//! worker: wait for a new epoch; if it is open still, enter (count up); f(id); leave (count down)
//! ```
//!
//! A worker whose core does something else comes late or not at all, and then nobody waits for it: a job is for the caller and
//! whoever comes in time. One that is stopped inside a job has to be waited for; where that happens, the caller works alone for
//! some milliseconds before it asks for help again (see [`Rest`]).
//!
//! Invariants: `job` is written only while the epoch is closed and nobody is inside, and read only after entering; a worker
//! says that it is asleep before its last look at the epoch, and both sides do so by a swap of the same flag, of which one
//! comes first: either the caller finds the worker asleep, or the worker finds the epoch; `run` returns or unwinds only after
//! everybody inside has left.
//!
//! A pool is `Send` and not `Sync`: a job is `Sync` and thus cannot hold the pool it runs on.
#![allow(unsafe_code)]

use super::float_env::FloatEnv;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Mutex, UnsafeCell, spin_loop};
use crossbeam::utils::CachePadded;
use std::any::Any;
use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::time::{Duration, Instant};

/// See the module's documentation.
pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Pauses of the joining caller before it yields its core.
    join_spins: u32,
    rest: Cell<Rest>,
    /// Not `Sync`: one `run` at a time.
    _one: PhantomData<std::cell::UnsafeCell<()>>,
}

impl Pool {
    /// `threads` counts the caller.
    ///
    /// # Errors
    /// The system's, where it refuses a thread; those already started are joined.
    pub(super) fn new(threads: usize) -> io::Result<Self> {
        // With a core for each thread waiting is short; without, whoever spins keeps another from working.
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let (spins, join_spins) = if threads > cores { (SPINS.min(64), JOIN_SPINS.min(64)) } else { (SPINS, JOIN_SPINS) };
        let shared = Arc::new(Shared {
            gate: CachePadded::new(AtomicUsize::new(0)),
            asleep: (1..threads).map(|_| CachePadded::new(AtomicBool::new(false))).collect(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            started: AtomicUsize::new(0),
            spins,
        });
        let workers = Vec::with_capacity(threads.max(1) - 1);
        let mut pool = Pool { shared, workers, join_spins, rest: Cell::default(), _one: PhantomData };
        for id in 1..threads {
            let shared = pool.shared.clone();
            let worker = thread::Builder::new().name(format!("loquat-{id}")).spawn(move || work(&shared, id))?;
            pool.workers.push(worker);
        }
        // What a thread allocates as it starts belongs here, not in the first steps; loom has enough orders without.
        while !cfg!(loom) && pool.shared.started.load(Ordering::Acquire) < pool.workers.len() {
            thread::yield_now();
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(thread)` once on the caller and on every worker that comes before the caller is done, and returns when all of
    /// these are. Says how long the caller worked and how long it then waited.
    ///
    /// # Panics
    /// With a job's panic, once everybody is done; the pool stays usable.
    fn run(&self, job: &(dyn Fn(usize) + Sync)) -> Spent {
        let _env = FloatEnv::enter();
        let s = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the pointer while they are inside, and this function does not leave,
        // not even by a panic, before the epoch is closed and nobody is.
        let job_ptr = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job) };
        // SAFETY: the last epoch is closed and nobody inside, so no worker reads; `&self` of a pool that is not `Sync`, so no
        // other caller writes.
        s.job.with_mut(|job| unsafe { *job = Some(job_ptr) });
        let start = Instant::now();
        // Nobody but the caller changes a closed gate.
        let epoch = (s.gate.load(Ordering::Relaxed) >> EPOCH).wrapping_add(1);
        s.gate.store(epoch << EPOCH | OPEN, Ordering::Release);
        for (asleep, worker) in s.asleep.iter().zip(&self.workers) {
            if asleep.swap(false, Ordering::AcqRel) {
                worker.thread().unpark();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(|| job(0)));
        let worked = Instant::now();
        let mut spent = Spent { work: worked - start, wait: Duration::ZERO };
        let mut inside = s.gate.fetch_and(!OPEN, Ordering::AcqRel) & INSIDE;
        let mut n = 0;
        while inside != 0 {
            n += 1;
            if n < self.join_spins {
                spin_loop()
            } else {
                thread::yield_now()
            }
            inside = s.gate.load(Ordering::Acquire) & INSIDE;
        }
        if n >= self.join_spins {
            spent.wait = worked.elapsed();
        }
        let theirs = s.panic.lock().take();
        if let Some(payload) = mine.err().or(theirs) {
            resume_unwind(payload);
        }
        spent
    }

    /// Hands the indices `0..count` out in runs of `grain` to whichever thread is free: `f(thread, indices)`. One run's worth
    /// of work stays on the caller, where a fork would cost more.
    pub(super) fn for_each_chunk(&self, count: usize, grain: usize, f: impl Fn(usize, Range<usize>) + Sync) {
        let grain = grain.max(1);
        let mut rest = self.rest.get();
        if count <= grain || self.workers.is_empty() || rest.goes_on(Instant::now) {
            if count > 0 {
                let _env = FloatEnv::enter();
                f(0, 0..count);
            }
            return;
        }
        let next = CachePadded::new(AtomicUsize::new(0));
        let runs = AtomicUsize::new(0);
        let spent = self.run(&|thread| {
            loop {
                // Relaxed: each index once is all that is asked of the counter; `run` orders the data.
                let first = next.fetch_add(grain, Ordering::Relaxed);
                if first >= count {
                    break;
                }
                f(thread, first..count.min(first + grain));
                if thread == 0 {
                    runs.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        rest.after(&spent, runs.into_inner(), Instant::now);
        self.rest.set(rest);
    }

    /// Cuts `data` into rows of `width` and hands them out in runs of `grain` rows: `f(first row, the rows' values)`.
    pub(super) fn for_each_row<T: Send>(&self, data: &mut [T], width: usize, grain: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        let rows = data.len() / width;
        let data = Disjoint::new(data);
        self.for_each_chunk(rows, grain, |_, r| {
            // SAFETY: every row is handed out once.
            f(r.start, unsafe { data.slice(r.start * width..r.end * width) });
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.fetch_add(1 << EPOCH, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its jobs' panics, so there is none to report.
            let _ = worker.join();
        }
    }
}

/// A slice whose parts several threads write at once.
#[derive(Clone, Copy)]
pub(super) struct Disjoint<'a, T> {
    at: *mut T,
    len: usize,
    _data: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands `&mut T`s to other threads, as `&mut [T]` does, under `slice`'s contract.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Borrows `data` for `'a`.
    pub(super) fn new(data: &'a mut [T]) -> Self {
        Disjoint { at: data.as_mut_ptr(), len: data.len(), _data: PhantomData }
    }

    /// Part of the slice.
    ///
    /// # Safety
    /// While the result lives, nobody else uses any of its elements.
    ///
    /// # Panics
    /// Where `range` leaves the slice.
    pub(super) unsafe fn slice(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds of a slice borrowed for 'a; nobody else has these elements, as the caller promises.
        unsafe { &mut *ptr::slice_from_raw_parts_mut(self.at.add(range.start), range.len()) }
    }
}

/// What a job took of the caller's time.
struct Spent {
    work: Duration,
    /// Zero where it was short.
    wait: Duration,
}

/// When the caller works alone. A worker that another process pushes from its core while it is inside a job keeps the caller
/// waiting for a time slice, which is longer than most jobs: on a busy machine help is asked for seldom, and more seldom
/// where that keeps happening.
#[derive(Clone, Copy, Default)]
struct Rest {
    until: Option<Instant>,
    length: Duration,
}

impl Rest {
    const SHORTEST: Duration = Duration::from_millis(4);
    const LONGEST: Duration = Duration::from_millis(64);
    /// A wait shorter than this is nobody's time slice.
    const STALL: Duration = Duration::from_micros(400);

    /// True while there is one.
    fn goes_on(&self, now: impl Fn() -> Instant) -> bool {
        self.until.is_some_and(|until| now() < until)
    }

    /// Begins one where the caller waited for longer than a few of its own runs of indices took.
    fn after(&mut self, spent: &Spent, runs: usize, now: impl Fn() -> Instant) {
        if spent.wait < Self::STALL || runs == 0 || spent.wait < 3 * spent.work / runs as u32 {
            return;
        }
        let now = now();
        let again = self.until.is_some_and(|until| now < until + self.length);
        self.length = if again { (2 * self.length).min(Self::LONGEST) } else { Self::SHORTEST };
        self.until = Some(now + self.length);
    }
}

type Job = dyn Fn(usize) + Sync;

/// In `gate`: how many workers are inside, whether the job may be entered, and above these the job's number.
const INSIDE: usize = OPEN - 1;
const OPEN: usize = 1 << (EPOCH - 1);
const EPOCH: u32 = 16;

struct Shared {
    gate: CachePadded<AtomicUsize>,
    asleep: Box<[CachePadded<AtomicBool>]>,
    job: UnsafeCell<Option<*const Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    started: AtomicUsize,
    spins: u32,
}

// SAFETY: `job` is written only while nobody is inside and read only after entering; it points to a `Sync` function.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

fn work(s: &Shared, id: usize) {
    // A thread starts with its maker's control word.
    let _env = FloatEnv::enter();
    s.started.fetch_add(1, Ordering::Release);
    let mut seen = 0;
    loop {
        let mut n = 0;
        let mut gate = s.gate.load(Ordering::Acquire);
        while gate >> EPOCH == seen {
            n += 1;
            if n < s.spins {
                spin_loop();
            } else if n < s.spins + YIELDS {
                thread::yield_now();
            } else {
                s.asleep[id - 1].swap(true, Ordering::AcqRel);
                if s.gate.load(Ordering::Acquire) >> EPOCH == seen {
                    thread::park();
                }
                s.asleep[id - 1].swap(false, Ordering::AcqRel);
            }
            gate = s.gate.load(Ordering::Acquire);
        }
        let entered = loop {
            // Of each epoch that is seen, as it may be the last. Ordered by the gate.
            if s.stop.load(Ordering::Relaxed) {
                return;
            }
            seen = gate >> EPOCH;
            if gate & OPEN == 0 {
                break false;
            }
            match s.gate.compare_exchange_weak(gate, gate + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break true,
                Err(now) => gate = now,
            }
        };
        if !entered {
            continue;
        }
        // SAFETY: written before the gate was opened, and not again before this thread leaves.
        let job = s.job.with(|job| unsafe { *job }).expect("a job comes with its epoch");
        // SAFETY: the caller keeps the function alive until nobody is inside.
        let job = unsafe { &*job };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(id))) {
            s.panic.lock().get_or_insert(payload);
        }
        s.gate.fetch_sub(1, Ordering::Release);
    }
}

/// Pauses of an idle worker before it gives its core away: some 50 to 150 us, more than lies between two kernels.
const SPINS: u32 = if cfg!(loom) { 0 } else { 4_000 };
/// Yields after those and before it parks.
const YIELDS: u32 = if cfg!(loom) { 2 } else { 8 };
/// Pauses of the joining caller before it yields.
const JOIN_SPINS: u32 = if cfg!(loom) { 0 } else { 2_000 };

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn check(threads: usize) {
        let pool = Pool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads.max(1));
        for round in 0..200 {
            let ran: Vec<_> = (0..threads.max(1)).map(|_| AtomicUsize::new(0)).collect();
            pool.run(&|t| {
                ran[t].fetch_add(1, Ordering::Relaxed);
                // Every other time the caller is not done before all are there.
                while round % 2 == 0 && ran.iter().any(|n| n.load(Ordering::Relaxed) == 0) {
                    thread::yield_now();
                }
            });
            let ran: Vec<_> = ran.into_iter().map(AtomicUsize::into_inner).collect();
            let least = if round % 2 == 0 { 1 } else { 0 };
            assert!(ran[0] == 1 && ran.iter().all(|n| (least..=1).contains(n)), "round {round}: {ran:?}");
            let mut rows = vec![0usize; 7 * round];
            pool.for_each_row(&mut rows, 7, 3, |first, rows| {
                for (i, row) in rows.chunks_exact_mut(7).enumerate() {
                    row.fill(first + i + 1);
                }
            });
            assert!(rows.iter().enumerate().all(|(i, &v)| v == i / 7 + 1));
        }
    }

    #[test]
    fn every_thread_runs_once_and_every_row_is_written() {
        for threads in [0, 1, 2, 3, 5] {
            check(threads);
        }
    }

    #[test]
    fn more_threads_than_cores_make_progress() {
        let start = Instant::now();
        check(64);
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap();
        let caught: Vec<_> = (0..3)
            .map(|bad| {
                let there = AtomicUsize::new(0);
                catch_unwind(AssertUnwindSafe(|| {
                    pool.run(&|t| {
                        there.fetch_add(1, Ordering::Relaxed);
                        while there.load(Ordering::Relaxed) < 3 {
                            thread::yield_now();
                        }
                        assert_ne!(t, bad, "thread {bad} fails");
                    });
                }))
            })
            .collect();
        for (bad, caught) in caught.into_iter().enumerate() {
            let message = caught.expect_err("the job panicked").downcast::<String>().unwrap();
            assert!(message.contains(&format!("thread {bad} fails")), "{message}");
        }
        let mut rows = [0; 100];
        pool.for_each_row(&mut rows, 1, 1, |first, row| row[0] = first);
        assert!(rows.iter().enumerate().all(|(i, row)| i == *row));
    }

    #[test]
    fn a_stalled_worker_is_left_alone_for_longer_and_longer() {
        let mut rest = Rest::default();
        let mut now = Instant::now();
        let ms = Duration::from_millis;
        let stall = Spent { work: ms(2), wait: ms(3) };
        assert!(!rest.goes_on(|| now));
        // Shorter than a few runs of the caller's own, or nothing to compare with.
        rest.after(&stall, 1, || now);
        rest.after(&Spent { wait: Duration::from_micros(300), ..stall }, 100, || now);
        rest.after(&stall, 0, || now);
        assert!(!rest.goes_on(|| now));
        for length in [4, 8, 16, 32, 64, 64] {
            rest.after(&stall, 8, || now);
            assert!(rest.goes_on(|| now + ms(length - 1)) && !rest.goes_on(|| now + ms(length)), "{length} ms");
            now += ms(length + 1);
        }
        now += ms(100);
        rest.after(&stall, 8, || now);
        assert!(!rest.goes_on(|| now + Rest::SHORTEST), "forgotten");
    }

    #[test]
    fn every_index_once_whoever_comes() {
        let pool = Pool::new(3).unwrap();
        // The caller alone is done before the workers have woken, or not: either way, all indices once.
        for _ in 0..1000 {
            let sum = AtomicUsize::new(0);
            pool.for_each_chunk(5, 1, |_, r| _ = sum.fetch_add(r.start + 1, Ordering::Relaxed));
            assert_eq!(sum.into_inner(), 15);
        }
    }

    #[test]
    fn idle_workers_park_and_wake_again() {
        let pool = Pool::new(3).unwrap();
        let start = Instant::now();
        for _ in 0..3 {
            pool.run(&|_| {});
            while !pool.shared.asleep.iter().all(|a| a.load(Ordering::SeqCst)) {
                assert!(start.elapsed() < Duration::from_secs(60), "workers still spin");
                thread::yield_now();
            }
        }
    }

    #[test]
    fn a_pool_may_move_between_threads() {
        let pool = Pool::new(2).unwrap();
        let pool = thread::spawn(move || {
            pool.run(&|_| {});
            pool
        })
        .join()
        .unwrap();
        pool.run(&|_| {});
    }
}

/// Every order of the threads: no wake-up is lost, each thread runs each job once, `run` comes back after the last of them and
/// not before, by a panic too, and a pool that is dropped ends its workers, parked or not. Loom finds deadlocks and races.
#[cfg(loom)]
#[cfg(test)]
mod loom_checks {
    use super::*;
    use crate::sync::check::every_order;

    /// Runs jobs that count in cells of the caller's stack frame: a worker that still runs while the caller looks is a race.
    fn check(threads: usize, jobs: usize, preemptions: usize) {
        every_order(preemptions, move || {
            let pool = Pool::new(threads).unwrap();
            for job in 1..=jobs {
                let ran: Vec<_> = (0..threads).map(|_| Cell(UnsafeCell::new(0))).collect();
                pool.run(&|t| ran[t].add(job));
                assert!(ran[0].get() == job && ran.iter().all(|cell| [0, job].contains(&cell.get())), "job {job}");
            }
        });
    }

    struct Cell(UnsafeCell<usize>);

    // SAFETY: each thread has a cell of its own, and the caller looks when they are done; loom finds it where not.
    unsafe impl Sync for Cell {}

    impl Cell {
        fn add(&self, n: usize) {
            // SAFETY: loom ends the test where another thread has access.
            self.0.with_mut(|at| unsafe { *at += n });
        }

        fn get(&self) -> usize {
            // SAFETY: as above.
            self.0.with(|at| unsafe { *at })
        }
    }

    #[test]
    fn one_worker_three_jobs() {
        check(2, 3, 3);
    }

    #[test]
    fn two_workers() {
        check(3, 1, 2);
        check(3, 2, 1);
    }

    #[test]
    fn dropped_unused() {
        check(3, 0, 3);
    }

    #[test]
    fn a_panic_waits_for_the_others() {
        for bad in 0..2 {
            every_order(3, move || {
                let pool = Pool::new(2).unwrap();
                let ran = [Cell(UnsafeCell::new(0)), Cell(UnsafeCell::new(0))];
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(&|t| {
                        ran[t].add(1);
                        if t == bad {
                            // Without the hook's message, a thousand times.
                            resume_unwind(Box::new(t));
                        }
                    });
                }));
                let came = ran[1].get();
                assert_eq!(ran[0].get(), 1, "the caller always runs");
                match caught {
                    Err(payload) => assert_eq!(payload.downcast_ref(), Some(&bad)),
                    Ok(_) => assert!(bad == 1 && came == 0, "a panic is not lost"),
                }
                pool.run(&|t| ran[t].add(1));
                assert!(ran[0].get() == 2 && ran[1].get() <= came + 1);
            });
        }
    }
}
