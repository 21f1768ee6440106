//! A queue with one receiver, who waits as a thread, as a task, or not at all. Knows nothing of engines.
//!
//! ```text
//! send: under the lock, push and take the waker; then notify the thread and wake the task
//! wait: under the lock, look; if there is nothing, leave a waker, or sleep on the condition
//! ```
//!
//! Invariants: a receiver looks and leaves word under one lock, so no item falls between; what is sent is received or dropped,
//! never under the lock, since dropping an item and waking a task may run any code.
#![forbid(unsafe_code)]

use crate::sync::{Condvar, Mutex};
use std::collections::{TryReserveError, VecDeque};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// See the module's documentation.
pub(super) struct Channel<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
}

struct State<T> {
    items: VecDeque<T>,
    senders: usize,
    shut: bool,
    /// The receiver is gone.
    closed: bool,
    waker: Option<Waker>,
}

/// Whether more can come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// It can.
    Open,
    /// Every sender is gone.
    Dropped,
    /// A sender said so.
    Shut,
}

/// What was not sent, for the sender to drop.
pub(super) enum Unsent<T> {
    /// There is no room.
    Full(T),
    /// Nobody will receive it.
    Gone(T),
}

impl<T> State<T> {
    fn end(&self) -> End {
        match (self.shut, self.senders) {
            (true, _) => End::Shut,
            (false, 0) => End::Dropped,
            (false, _) => End::Open,
        }
    }

    fn take(&mut self) -> Poll<Option<T>> {
        match self.items.pop_front() {
            Some(item) => Poll::Ready(Some(item)),
            None if self.end() != End::Open => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

impl<T> Channel<T> {
    /// With one sender.
    pub(super) fn new() -> Self {
        let state = State { items: VecDeque::new(), senders: 1, shut: false, closed: false, waker: None };
        Channel { state: Mutex::new(state), ready: Condvar::default() }
    }

    /// Makes room for so many items more.
    pub(super) fn reserve(&self, more: usize) -> Result<(), TryReserveError> {
        self.state.lock().items.try_reserve_exact(more)
    }

    /// Sends unless `most` items wait already.
    pub(super) fn send(&self, item: T, most: usize) -> Result<(), Unsent<T>> {
        let mut state = self.state.lock();
        if state.closed || state.shut {
            return Err(Unsent::Gone(item));
        }
        if state.items.len() >= most {
            return Err(Unsent::Full(item));
        }
        state.items.push_back(item);
        let waker = state.waker.take();
        drop(state);
        self.tell(waker);
        Ok(())
    }

    pub(super) fn add_sender(&self) {
        self.state.lock().senders += 1;
    }

    pub(super) fn drop_sender(&self) {
        let mut state = self.state.lock();
        state.senders -= 1;
        let waker = if state.senders == 0 { state.waker.take() } else { None };
        drop(state);
        self.tell(waker);
    }

    /// Nothing more is sent, whoever tries; what was sent before is received.
    pub(super) fn shut(&self) {
        let mut state = self.state.lock();
        state.shut = true;
        let waker = state.waker.take();
        drop(state);
        self.tell(waker);
    }

    fn tell(&self, waker: Option<Waker>) {
        self.ready.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The receiver goes. What it has not received is dropped, and nothing more can be sent.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let left = (std::mem::take(&mut state.items), state.waker.take());
        drop(state);
        drop(left);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// How many items wait, and whether more can come.
    pub(super) fn look(&self) -> (usize, End) {
        let state = self.state.lock();
        (state.items.len(), state.end())
    }

    /// The next item, if it is here; `None` where none can come.
    pub(super) fn try_recv(&self) -> Poll<Option<T>> {
        self.state.lock().take()
    }

    /// The next item, as soon as it is here; pending at the deadline.
    pub(super) fn recv(&self, until: Option<Instant>) -> Poll<Option<T>> {
        let mut state = self.state.lock();
        loop {
            let found = state.take();
            if found.is_ready() || until.is_some_and(|until| Instant::now() >= until) {
                return found;
            }
            state = self.ready.wait(state, until);
        }
    }

    /// The next item, or the task is woken when it is here.
    pub(super) fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.state.lock();
        let found = state.take();
        if found.is_ready() || state.waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
            return found;
        }
        let old = state.waker.replace(cx.waker().clone());
        drop(state);
        drop(old);
        found
    }

    /// Sleeps until there is an item, the end is another than `known`, or the deadline has come.
    pub(super) fn park(&self, known: End, until: Option<Instant>) {
        let mut state = self.state.lock();
        while state.items.is_empty() && state.end() == known && until.is_none_or(|until| Instant::now() < until) {
            state = self.ready.wait(state, until);
        }
    }
}

/// Every order of the threads: no word is lost between looking and sleeping, nothing is left over. Loom itself finds deadlocks,
/// and memory that nobody frees.
#[cfg(loom)]
#[cfg(test)]
mod loom_checks {
    use super::*;
    use crate::sync::check::every_order;
    use crate::sync::{Arc, thread};
    use std::task::Wake;

    /// Unparks its thread, as an executor does.
    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }

    /// A task that has a thread of its own, and a new waker for each poll if asked for.
    fn next_as_task(channel: &Channel<u32>, fresh: bool) -> Option<u32> {
        let waker = || Waker::from(std::sync::Arc::new(Unpark(thread::current())));
        let first = waker();
        loop {
            let new = fresh.then(waker);
            match channel.poll_recv(&mut Context::from_waker(new.as_ref().unwrap_or(&first))) {
                Poll::Ready(item) => return item,
                Poll::Pending => thread::park(),
            }
        }
    }

    fn next_as_thread(channel: &Channel<u32>) -> Option<u32> {
        match channel.recv(None) {
            Poll::Ready(item) => item,
            Poll::Pending => panic!("no deadline"),
        }
    }

    /// Two items and the sender's end arrive in order and once, whichever way the receiver waits.
    fn two_items(next: fn(&Channel<u32>) -> Option<u32>) {
        every_order(3, move || {
            let channel = Arc::new(Channel::new());
            let sender = channel.clone();
            let sends = thread::spawn(move || {
                assert!(sender.send(1, 2).is_ok() && sender.send(2, 2).is_ok());
                sender.drop_sender();
            });
            assert_eq!([next(&channel), next(&channel), next(&channel)], [Some(1), Some(2), None]);
            channel.close();
            sends.join().unwrap();
        });
    }

    #[test]
    fn a_thread_receives() {
        two_items(next_as_thread);
    }

    #[test]
    fn a_task_receives() {
        two_items(|channel| next_as_task(channel, false));
    }

    #[test]
    fn a_task_that_moves_receives() {
        two_items(|channel| next_as_task(channel, true));
    }

    /// Two clients send, and go; the driver's loop obeys, sleeps, and ends when they have gone.
    fn serve(clients: usize, preemptions: usize, client: fn(usize, &Channel<u32>)) {
        every_order(preemptions, move || {
            let inbox = Arc::new(Channel::new());
            (1..clients).for_each(|_| inbox.add_sender());
            let threads: Vec<_> = (0..clients)
                .map(|i| {
                    let inbox = inbox.clone();
                    thread::spawn(move || {
                        client(i, &inbox);
                        inbox.drop_sender();
                    })
                })
                .collect();
            let mut obeyed = Vec::new();
            loop {
                let (waiting, end) = inbox.look();
                for _ in 0..waiting {
                    if let Poll::Ready(Some(item)) = inbox.try_recv() {
                        obeyed.push(item);
                    }
                }
                if end != End::Open {
                    break;
                }
                inbox.park(end, None);
            }
            inbox.close();
            for thread in threads {
                thread.join().unwrap();
            }
            assert!(inbox.look().0 == 0, "left over");
            let sent: Vec<_> = (0..clients as u32).flat_map(|i| [10 * i, 10 * i + 1]).collect();
            let shut = inbox.look().1 == End::Shut;
            obeyed.sort_unstable();
            assert!(if shut { obeyed.iter().all(|o| sent.contains(o)) } else { obeyed == sent }, "{obeyed:?}");
            // What the one who shut the inbox sent before was obeyed.
            assert!(!shut || obeyed.contains(&0) && obeyed.contains(&1), "{obeyed:?}");
        });
    }

    #[test]
    fn a_driver_serves_until_the_last_handle_goes() {
        serve(2, 2, |i, inbox| {
            let at = 10 * i as u32;
            assert!(inbox.send(at, usize::MAX).is_ok() && inbox.send(at + 1, usize::MAX).is_ok());
        });
    }

    #[test]
    fn a_driver_does_what_came_before_a_shutdown() {
        serve(2, 2, |i, inbox| {
            let at = 10 * i as u32;
            let sent = inbox.send(at, usize::MAX).is_ok() && inbox.send(at + 1, usize::MAX).is_ok();
            if i == 0 {
                assert!(sent, "nobody else shuts the inbox");
                inbox.shut();
            }
        });
    }

    /// A stream that goes while its events come: each event is received, refused or dropped, once.
    #[test]
    fn a_receiver_goes_while_items_come() {
        every_order(3, || {
            let counted = Arc::new(());
            let channel = Arc::new(Channel::new());
            let (sender, item) = (channel.clone(), counted.clone());
            let sends = thread::spawn(move || {
                for _ in 0..2 {
                    let _ = sender.send(item.clone(), usize::MAX);
                }
                sender.drop_sender();
            });
            let first = channel.try_recv();
            assert!(!matches!(first, Poll::Ready(None)) || channel.look().1 == End::Dropped);
            channel.close();
            assert!(channel.send(counted.clone(), usize::MAX).is_err(), "sent to nobody");
            sends.join().unwrap();
            assert_eq!(channel.look().0, 0);
        });
    }
}
