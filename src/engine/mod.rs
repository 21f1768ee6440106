//! The lane, driven by its caller: plan, forward, sample, commit. An engine owns one model, one ledger and one scheduler; it
//! starts no thread of its own, never blocks and prints nothing.
//!
//! ```text
//! submit -> [ledger] -> scheduler -> plan -> batch -> model -> rows -> sampler -> commit -> events
//! ```
//!
//! Invariants: after an error nothing is half committed: the step is retried, or its sequence fails and the others go on.
//! Each submission ends in exactly one [`EventKind::Finished`].
#![forbid(unsafe_code)]

mod beam;
mod build;
mod channel;
mod config;
mod driver;
mod embed;
mod handle;
mod request;
mod samples;
pub(crate) mod snapshot;
mod steer;
mod step;

pub use beam::{BeamOptions, BeamSearch, BeamStop, Hypothesis};
pub use build::EngineParts;
pub use config::EngineConfig;
pub use driver::{EngineDriver, HandleOptions, Stopped};
pub use embed::{EmbedOptions, Pooling, normalize};
pub use handle::{EngineHandle, EventStream, Recv, Reply};
pub use request::{Event, EventKind, FinishReason, Request, RowView, Status};
pub use samples::{BestOf, Ranking, Sample};
pub use snapshot::{Imported, KvSave};

use crate::batch::{Batch, RowsWanted};
use crate::error::SubmitError;
use crate::ids::{SeqId, TokenId};
use crate::model::{Fingerprint, Logits, MemoryPlan, Model, Want};
use crate::sample::{Sampler, SamplerState};
use crate::sched::{Ledger, NewSeq, PinId, PlanItem, Scheduler, SeqState, SeqView};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Runs sequences through one model. See the module's documentation.
///
/// `Send`, not `Sync`: one thread at a time drives it. Dropping it ends its worker threads and gives all memory back.
pub struct Engine {
    model: Box<dyn Model>,
    scheduler: Box<dyn Scheduler>,
    ledger: Ledger,
    sampler: Sampler,
    /// Every sequence that waits or runs.
    runs: HashMap<SeqId, SeqRun>,
    batch: Batch,
    logits: Logits,
    want: Want,
    prompt_logits: bool,
    stage: step::Stage,
    events: VecDeque<Event>,
    observer: Option<Box<Observer>>,
    /// Sequences whose events are for their [`Held`]'s owner alone.
    owned: HashSet<SeqId>,
    /// Steered sequences that were shown a row and given no token since, in the order in which they asked.
    asking: Vec<SeqId>,
    released: Arc<Mutex<Vec<SeqId>>>,
    plan: MemoryPlan,
    /// Which model it is, where somebody said so.
    fingerprint: Option<Fingerprint>,
    start: Instant,
}

/// Sees every row that the model computes: see [`Engine::observe`].
type Observer = dyn FnMut(RowView<'_>) + Send;

/// What the engine remembers of a sequence beside the ledger's part.
struct SeqRun {
    sampler: SamplerState,
    stop_tokens: Vec<TokenId>,
    prompt_logits: bool,
    embedding: Option<Box<embed::Pool>>,
    /// Generates nothing.
    prefill: bool,
    hold: bool,
    /// Positions before this one were run, and shown where anyone wanted to see them.
    shown: usize,
    /// To end, held, once its share of the open step is booked.
    stopping: bool,
    /// The caller chooses its tokens.
    steered: bool,
    /// It is one of [`Engine::asking`].
    asks: bool,
    /// Parked until the first of its group has run the prompt.
    follows: bool,
    /// The others of its group, the next one last; not all of them may be there, or follow, any more.
    followers: Vec<SeqId>,
}

impl SeqRun {
    /// What is wanted of an item. Of positions that are run anew, after a preemption or in another rotary regime, the first
    /// result counted.
    fn rows(&self, item: &PlanItem) -> RowsWanted {
        match &self.embedding {
            Some(pool) if pool.wants(item, self.shown) => RowsWanted::States,
            Some(_) => RowsWanted::None,
            None if self.prompt_logits && item.start + item.len > self.shown => RowsWanted::All,
            None if item.last && !self.prefill => RowsWanted::Last,
            None => RowsWanted::None,
        }
    }
}

/// Owns a sequence of an engine: dropping it ends the sequence, which the engine does at its next call.
#[derive(Debug)]
pub struct Held {
    seq: SeqId,
    engine: Weak<Mutex<Vec<SeqId>>>,
}

impl Held {
    /// The sequence.
    pub fn seq(&self) -> SeqId {
        self.seq
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(released) = self.engine.upgrade() {
            released.lock().push(self.seq);
        }
    }
}

impl Engine {
    /// Bytes that the engine and its model hold.
    pub fn memory(&self) -> MemoryPlan {
        self.plan
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// The bookkeeping of sequences and blocks, to look at.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// A sequence in the engine, unless it is gone.
    pub fn view(&self, seq: SeqId) -> Option<SeqView<'_>> {
        self.ledger.view(seq)
    }

    /// Time since the engine was built, as schedulers see it.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Shows `observer` every row of logits that is computed, before a token is chosen from it.
    pub fn observe(&mut self, observer: impl FnMut(RowView<'_>) + Send + 'static) {
        self.observer = Some(Box::new(observer));
    }

    /// Stops showing rows.
    pub fn stop_observing(&mut self) {
        self.observer = None;
    }

    /// Takes a request in. Allocates the memory of the sequence's whole life; nothing runs yet.
    ///
    /// # Errors
    /// [`SubmitError`] for what can never run; the engine is then as it was.
    pub fn submit(&mut self, request: Request) -> Result<SeqId, SubmitError> {
        self.sweep();
        let (run, new) = self.admit(request, &[])?;
        let now = self.start.elapsed();
        let generates = run.embedding.is_none() && !run.prefill;
        let seq = if generates { self.ledger.submit(new, now)? } else { self.ledger.submit_any(new, now)? };
        self.enter(seq, run);
        Ok(seq)
    }

    /// Takes over what a sequence needs beside the ledger's part. In a step it asks without allocating.
    fn enter(&mut self, seq: SeqId, run: SeqRun) {
        if run.steered {
            self.asking.reserve(self.runs.len() + 1);
        }
        self.runs.insert(seq, run);
    }

    /// Continues a held sequence with the request's tokens; with none it goes on where it stopped. Of what is still cached
    /// nothing is run again, but for the last token where nothing else is left to run. Priority, deadline and key stay as they
    /// were.
    ///
    /// # Errors
    /// [`SubmitError`]; the sequence is then held as before.
    pub fn resume(&mut self, seq: SeqId, request: Request) -> Result<(), SubmitError> {
        self.sweep();
        let held = self.ledger.view(seq).filter(|v| v.state() == SeqState::Held);
        let Some(held) = held else {
            return Err(SubmitError::Sequence { seq, expected: "held", found: self.state_name(seq) });
        };
        if request.embedding.is_some() {
            let (name, expected) = ("embedding", "a new sequence: of a held one the hidden states are gone");
            return Err(SubmitError::Parameter { name, expected, found: format!("sequence {seq}, which is held") });
        }
        if request.prefill {
            let (name, expected) = ("prefill", "a new sequence: the tokens of a held one are cached as far as there is room");
            return Err(SubmitError::Parameter { name, expected, found: format!("sequence {seq}, which is held") });
        }
        let (run, new) = self.admit(request, held.tokens())?;
        self.ledger.resume_with(seq, &new.tokens, new.max_tokens, new.reuse, self.start.elapsed())?;
        self.enter(seq, run);
        Ok(())
    }

    /// A second sequence with the tokens of one that is held, itself held: both find the same blocks cached. Or with those of one
    /// that asks for a [choice](Request::steered): the fork has the same blocks, and asks for a choice of its own, by the event
    /// that the first had.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one in another state, [`SubmitError::QueueFull`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, SubmitError> {
        self.sweep();
        match self.state_name(seq) {
            "held" => self.ledger.fork(seq, self.start.elapsed()),
            ASKS => self.fork_asking(seq),
            found => Err(SubmitError::Sequence { seq, expected: "held, or waiting for a choice", found }),
        }
    }

    /// Keeps the cached prefix of `tokens` whatever room others need, until it is [unpinned](Self::unpin): a system prompt, say, that
    /// was run once by [`Request::prefill`]. Says how many tokens were pinned: whole blocks alone. What is pinned takes from
    /// the [longest](Self::max_len) that a sequence can be. Where rotary frequencies follow the length, it serves sequences
    /// that are as long as `tokens`, or in the same regime; [`Ledger::pin`] says more.
    ///
    /// # Errors
    /// [`SubmitError::Parameter`] where not even one block of them is cached; [`SubmitError::TooLong`] where a sequence in the
    /// engine could not run any more beside it; [`SubmitError::Refused`].
    pub fn pin(&mut self, key: u64, tokens: &[TokenId]) -> Result<(PinId, usize), SubmitError> {
        self.ledger.pin(key, tokens, tokens.len())
    }

    /// Lets a pinned prefix go; it stays cached as long as nobody needs the room.
    ///
    /// # Errors
    /// [`SubmitError::Parameter`] for one that is not pinned any more.
    pub fn unpin(&mut self, pin: PinId) -> Result<(), SubmitError> {
        self.ledger.unpin(pin)
    }

    /// Forgets a held sequence's tokens from `len` on.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that is not held, [`SubmitError::Parameter`] where it has fewer tokens.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), SubmitError> {
        self.ledger.truncate(seq, len)
    }

    /// Ends a waiting or running sequence, which stays held if its request said so. Its last event says
    /// [`FinishReason::Cancelled`]. In the middle of a step that others take part in it ends with the step, whose token may
    /// still come; a step of its own is given up.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that neither waits nor runs.
    pub fn stop(&mut self, seq: SeqId) -> Result<(), SubmitError> {
        let Some(run) = self.runs.get_mut(&seq) else {
            return Err(SubmitError::Sequence { seq, expected: "waiting or running", found: self.state_name(seq) });
        };
        if self.stage == step::Stage::Forward && self.ledger.plan_items().iter().any(|i| i.seq == seq) {
            if self.ledger.plan_items().len() > 1 {
                run.stopping = true;
                return Ok(());
            }
            self.stage = step::Stage::Between;
            self.ledger.abort_step();
        }
        self.end(seq, FinishReason::Cancelled);
        Ok(())
    }

    /// Ends a sequence in any state, held or in the middle of a step. Its blocks come back at once; forks of it go on.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that is gone.
    pub fn cancel(&mut self, seq: SeqId) -> Result<(), SubmitError> {
        self.ledger.cancel(seq)?;
        if self.forget_run(seq).is_some() {
            self.events.push_back(Event { seq, kind: EventKind::Finished(FinishReason::Cancelled) });
        }
        Ok(())
    }

    /// Ties a sequence's life to a value: when that is dropped, the sequence ends in whatever state. From now on its events
    /// come from [`next_event_of`](Self::next_event_of) and [`next_event_for`](Self::next_event_for) alone.
    pub fn own(&mut self, seq: SeqId) -> Held {
        self.owned.insert(seq);
        Held { seq, engine: Arc::downgrade(&self.released) }
    }

    /// The sequence that `held` owns, if it is one of this engine's and still here.
    pub fn owned(&self, held: &Held) -> Option<SeqId> {
        (self.is_mine(held) && self.ledger.view(held.seq).is_some()).then_some(held.seq)
    }

    /// The oldest event of the sequence that `held` owns. Of another engine's there is none.
    pub fn next_event_for(&mut self, held: &Held) -> Option<Event> {
        if self.is_mine(held) { self.next_event_of(held.seq) } else { None }
    }

    fn is_mine(&self, held: &Held) -> bool {
        std::ptr::eq(held.engine.as_ptr(), Arc::as_ptr(&self.released))
    }

    /// The most tokens that one sequence can have, prompt and answer together: the model's context, or the cache beside what is
    /// pinned in it.
    pub fn max_len(&self) -> usize {
        self.ledger.max_len()
    }

    /// The oldest event not yet taken, but for those of [owned](Self::own) sequences.
    pub fn next_event(&mut self) -> Option<Event> {
        let i = self.events.iter().position(|e| !self.owned.contains(&e.seq))?;
        self.events.remove(i)
    }

    /// The oldest event of one sequence. Cost: a look at each older event of others.
    pub fn next_event_of(&mut self, seq: SeqId) -> Option<Event> {
        let i = self.events.iter().position(|e| e.seq == seq)?;
        self.events.remove(i)
    }

    /// Forgets the events of sequences that nobody listens to any more, and ends those sequences.
    fn sweep(&mut self) {
        loop {
            // Not in the loop's head: the lock would last as long as its body.
            let Some(seq) = self.released.lock().pop() else { return };
            // It may have ended by itself, unheld.
            let _ = self.ledger.cancel(seq);
            self.forget_run(seq);
            self.forget_events(seq);
        }
    }

    /// Nobody owns the sequence any more, and nobody wants what it still had to say.
    fn forget_events(&mut self, seq: SeqId) {
        self.owned.remove(&seq);
        self.events.retain(|e| e.seq != seq);
    }

    /// Checks everything about a request that is not the ledger's business.
    fn admit(&self, request: Request, known: &[TokenId]) -> Result<(SeqRun, NewSeq), SubmitError> {
        let vocab = self.model.spec().vocab;
        let alien = |t: &TokenId| *t as usize >= vocab;
        if let Some(at) = request.tokens.iter().position(alien) {
            return Err(SubmitError::UnknownToken { token: request.tokens[at], at, vocab });
        }
        if request.prompt_logits && !self.prompt_logits {
            let (name, expected) = ("prompt_logits", "an engine built with prompt_logits");
            return Err(SubmitError::Parameter { name, expected, found: "one without".into() });
        }
        let embedding = self.admit_embedding(&request)?;
        steer::admit(&request)?;
        let tokens = known.len() + request.tokens.len();
        // What is longer the ledger refuses; the file's own idea of a context must not decide how much is allocated.
        let most = tokens.saturating_add(request.max_tokens).min(self.max_len().max(tokens));
        let mut sampler = SamplerState::new(request.sampling, vocab, most)?;
        sampler.extend(known);
        sampler.extend(&request.tokens);
        let run = SeqRun {
            sampler,
            stop_tokens: request.stop_tokens,
            prompt_logits: request.prompt_logits,
            embedding,
            prefill: request.prefill,
            hold: request.hold,
            shown: known.len().saturating_sub(1),
            stopping: false,
            steered: request.steered,
            asks: false,
            follows: false,
            followers: Vec::new(),
        };
        let new = NewSeq {
            tokens: request.tokens,
            max_tokens: request.max_tokens,
            priority: request.priority,
            deadline: request.deadline,
            hold: request.hold,
            key: request.key,
            // What is cached already is not shown again.
            reuse: match (&run.embedding, run.prompt_logits) {
                (Some(_), _) => Some(0),
                (None, true) => Some(run.shown),
                (None, false) => None,
            },
        };
        Ok((run, new))
    }

    /// Ends a sequence that is in no open step.
    fn end(&mut self, seq: SeqId, reason: FinishReason) {
        let run = self.forget_run(seq);
        let held = self.ledger.finish(seq).expect("a sequence that runs can end");
        if held && !run.is_some_and(|r| r.hold) {
            self.ledger.release(seq).expect("a held sequence can be released");
        }
        self.events.push_back(Event { seq, kind: EventKind::Finished(reason) });
    }

    fn state_name(&self, seq: SeqId) -> &'static str {
        if self.runs.get(&seq).is_some_and(|run| run.asks) {
            return ASKS;
        }
        match self.ledger.view(seq).map(|v| v.state()) {
            None => "gone",
            Some(SeqState::Waiting) => "waiting",
            Some(SeqState::Running) => "running",
            Some(SeqState::Held) => "held",
        }
    }
}

/// State of a sequence, beside the ledger's.
const ASKS: &str = "waiting for a choice";
