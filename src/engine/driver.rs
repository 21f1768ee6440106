//! The other end of the handles: one thread of the caller's that does what they ask, steps the engine while there is work, and
//! sleeps while there is none. Knows nothing of who waits for an answer, or how.
//!
//! ```text
//! loop: do what was sent until now; end, if nobody can want more; step; give each stream its events; sleep, if idle
//! ```
//!
//! Invariants: all that one thread sends is done in the order in which it was sent; whenever the driver goes, by a return or by a
//! panic, everything that waits for it is told.
#![forbid(unsafe_code)]

use super::channel::{Channel, End};
use super::{Engine, Event, EventKind, FinishReason, Status};
use crate::error::{HandleError, RunError, SubmitError};
use crate::ids::SeqId;
use crate::sync::Arc;
use std::collections::BTreeMap;
use std::fmt;
use std::mem::size_of;
use std::sync::OnceLock;
use std::task::Poll;
use std::time::Duration;

/// How an engine serves its handles: see [`Engine::into_handle`].
#[derive(Clone, Debug)]
pub struct HandleOptions {
    /// Commands that may wait for the driver, of all handles together; one more is [`HandleError::Busy`].
    pub commands: usize,
    /// Look for commands after about this time even in the middle of a step, a long prefill perhaps. Without it commands wait for
    /// a step's end, and each token is handed out as soon as it is there; with it, after each slice.
    pub slice: Option<Duration>,
    /// Times that a step is tried again, at once, before its error ends the driver.
    pub retries: u32,
}

impl Default for HandleOptions {
    /// 256 commands, whole steps, no second try.
    fn default() -> Self {
        HandleOptions { commands: 256, slice: None, retries: 0 }
    }
}

/// Steps an engine for its handles: see [`Engine::into_handle`]. Dropping it, run or not, ends every stream and reply with
/// [`HandleError::Gone`].
pub struct EngineDriver {
    // Before the engine: who waits is told before its memory is given back.
    lines: Lines,
    engine: Engine,
    slice: Option<Duration>,
    retries: u32,
}

/// The device failed in every try; nothing of that step was committed. The engine is as it was, without the sequences of the
/// streams, which ended with the error.
pub struct Stopped {
    /// What the device said.
    pub error: RunError,
    /// The engine, to be used or dropped.
    pub engine: Box<Engine>,
}

impl fmt::Debug for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stopped").field("error", &self.error).finish_non_exhaustive()
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the engine's driver has stopped: {}", self.error)
    }
}

impl std::error::Error for Stopped {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// What handles and streams send.
pub(super) enum Message {
    Submit(Box<Submission>, Speaker),
    Call(Box<dyn FnOnce(&mut Engine) + Send>),
    /// The stream wants its sequence to end, or is gone.
    Cancel(Arc<Line>),
}

/// Puts a sequence to work and says which.
pub(super) type Submission = dyn FnOnce(&mut Engine) -> Result<SeqId, SubmitError> + Send;

/// What a stream gives out.
pub(super) type Item = Result<EventKind, HandleError>;

/// From the driver to one stream.
pub(super) struct Line {
    pub(super) items: Channel<Item>,
    /// Once it was taken in.
    pub(super) seq: OnceLock<SeqId>,
}

/// The driver's end of a line.
pub(super) struct Speaker {
    line: Arc<Line>,
    /// Its last item was sent; the sequence is held.
    ended: bool,
}

impl Speaker {
    pub(super) fn new() -> (Self, Arc<Line>) {
        let line = Arc::new(Line { items: Channel::new(), seq: OnceLock::new() });
        (Speaker { line: line.clone(), ended: false }, line)
    }

    fn say(&self, item: Item) {
        // Nobody listens to a stream that is gone, and its sequence is about to end.
        let _ = self.line.items.send(item, usize::MAX);
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        self.line.items.drop_sender();
    }
}

/// What must be told that the driver goes.
struct Lines {
    inbox: Arc<Channel<Message>>,
    /// A stream's sequence is its own: running, or held with its last item sent. In order, so that a run can be repeated.
    streams: BTreeMap<SeqId, Speaker>,
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl EngineDriver {
    pub(super) fn new(engine: Engine, inbox: Arc<Channel<Message>>, options: &HandleOptions) -> Self {
        let lines = Lines { inbox, streams: BTreeMap::new() };
        EngineDriver { lines, engine, slice: options.slice, retries: options.retries }
    }

    /// Serves the handles until [`shutdown`](super::EngineHandle::shutdown), or until the last handle is dropped and every
    /// stream has ended. Gives the engine back, without the sequences that streams own; others, of a
    /// [`call`](super::EngineHandle::call), are in it as they were. With nothing to do the thread sleeps, until the time that the
    /// scheduler asked for if it did.
    ///
    /// # Errors
    /// [`Stopped`] where the device fails more than [`retries`](HandleOptions::retries) times in a row; the streams end with
    /// [`HandleError::Run`].
    ///
    /// # Panics
    /// With the panic of a closure that was [called](super::EngineHandle::call), or of the engine's observer. The engine is dropped,
    /// streams and replies end with [`HandleError::Gone`].
    pub fn run(mut self) -> Result<Engine, Stopped> {
        let mut failures = 0;
        loop {
            // Those that wait now and no others: a flood of commands must not keep the engine from its steps.
            let (waiting, end) = self.lines.inbox.look();
            for _ in 0..waiting {
                if let Poll::Ready(Some(message)) = self.lines.inbox.try_recv() {
                    self.obey(message);
                    self.deliver();
                }
            }
            if end == End::Shut || end == End::Dropped && self.lines.streams.values().all(|s| s.ended) {
                return Ok(self.close());
            }
            let status = match self.slice {
                Some(budget) => self.engine.step_within(budget),
                None => self.engine.step(),
            };
            self.deliver();
            match status {
                Ok(status) => {
                    failures = 0;
                    match status {
                        Status::Idle(None) if end == End::Dropped => self.give_up(),
                        // A time past all clocks is none.
                        Status::Idle(at) => self.lines.inbox.park(end, at.and_then(|at| self.engine.start.checked_add(at))),
                        Status::Paused | Status::Stepped => {}
                    }
                }
                Err(_) if failures < self.retries => failures += 1,
                Err(error) => {
                    for speaker in self.lines.streams.values().filter(|s| !s.ended) {
                        speaker.say(Err(HandleError::Run(error.clone())));
                    }
                    return Err(Stopped { error, engine: Box::new(self.close()) });
                }
            }
        }
    }

    fn obey(&mut self, message: Message) {
        match message {
            // Dropped before its turn.
            Message::Submit(_, speaker) if speaker.line.items.is_closed() => {}
            Message::Submit(submission, speaker) => {
                if let Err(error) = self.take_in(submission, &speaker.line) {
                    return speaker.say(Err(HandleError::Refused(error)));
                }
                let seq = *speaker.line.seq.get().expect("set where a sequence was taken in");
                self.engine.owned.insert(seq);
                // A stream that the sequence had before ends here.
                self.lines.streams.insert(seq, speaker);
            }
            Message::Call(call) => call(&mut self.engine),
            Message::Cancel(line) => {
                let seq = line.seq.get().copied();
                let Some((seq, speaker)) = seq.and_then(|seq| self.lines.streams.get_key_value(&seq)) else { return };
                // The sequence may have another stream by now.
                if Arc::ptr_eq(&speaker.line, &line) {
                    let (seq, over) = (*seq, speaker.ended || line.items.is_closed());
                    // It may be gone already, by a call.
                    let _ = self.engine.cancel(seq);
                    if over {
                        self.forget(seq);
                    }
                }
            }
        }
    }

    fn take_in(&mut self, submission: Box<Submission>, line: &Line) -> Result<(), SubmitError> {
        let seq = submission(&mut self.engine)?;
        let runs = self.engine.runs.contains_key(&seq);
        if runs {
            // What nobody took of an earlier run is not this one's.
            let events = &mut self.engine.events;
            let mut old = events.iter().filter(|e| e.seq == seq && matches!(e.kind, EventKind::Finished(_))).count();
            events.retain(|e| {
                let keep = e.seq != seq || old == 0;
                old -= usize::from(!keep && matches!(e.kind, EventKind::Finished(_)));
                keep
            });
        }
        let said = self.engine.events.iter().filter(|e| e.seq == seq).count();
        if said == 0 && !runs {
            let found = self.engine.state_name(seq);
            return Err(SubmitError::Sequence { seq, expected: "waiting or running", found });
        }
        let (tokens, remaining) = self.engine.view(seq).map_or((0, 0), |v| (v.tokens().len(), v.remaining()));
        // Its tokens, an embedding, the end, and why the driver went.
        let most = said + remaining + 3;
        if line.items.reserve(most).is_err() {
            let _ = self.engine.cancel(seq);
            self.engine.forget_events(seq);
            let needed_bytes = (most * size_of::<Item>()) as u64;
            return Err(SubmitError::Refused { tokens: tokens + remaining, needed_bytes });
        }
        line.seq.set(seq).expect("a line is taken in once");
        Ok(())
    }

    /// Hands out the events of streams; those of others wait for whoever asks for them.
    fn deliver(&mut self) {
        let mut i = 0;
        while let Some(event) = self.engine.events.get(i) {
            let Some(speaker) = self.lines.streams.get_mut(&event.seq) else {
                i += 1;
                continue;
            };
            let Event { seq, kind } = self.engine.events.remove(i).expect("seen a moment ago");
            let ended = matches!(kind, EventKind::Finished(_));
            speaker.say(Ok(kind));
            speaker.ended |= ended;
            if ended && self.engine.view(seq).is_none() {
                self.forget(seq);
            }
        }
    }

    fn forget(&mut self, seq: SeqId) {
        self.engine.forget_events(seq);
        self.lines.streams.remove(&seq);
    }

    /// The policy has no work, and nobody is left who could change its mind.
    fn give_up(&mut self) {
        for (&seq, speaker) in self.lines.streams.iter_mut().filter(|(_, s)| !s.ended) {
            speaker.say(Ok(EventKind::Finished(FinishReason::Failed(RunError::Stalled { seq }))));
            speaker.ended = true;
        }
    }

    fn close(self) -> Engine {
        let EngineDriver { lines, mut engine, .. } = self;
        for &seq in lines.streams.keys() {
            let _ = engine.cancel(seq);
            engine.forget_events(seq);
        }
        engine
    }
}

// What the documentation of streams promises.
const _: () = assert!(size_of::<Item>() <= 96);
