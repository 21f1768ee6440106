//! An engine for many threads and tasks, whatever runs them: handles send, streams and replies receive. The engine itself runs
//! on one thread that the caller makes. Knows no async runtime: futures here are std's, woken by the driver.
//!
//! ```text
//! EngineHandle -- commands, bounded --> EngineDriver::run -- events --> EventStream
//!                                                         -- result --> Reply
//! ```
//!
//! Invariants: sending never waits; each stream has exactly one last item; a dropped stream's sequence ends.
#![forbid(unsafe_code)]

use super::channel::{Channel, Unsent};
use super::driver::{EngineDriver, HandleOptions, Item, Line, Message, Speaker, Submission};
use super::{Engine, EventKind, Request};
use crate::error::{HandleError, SubmitError};
use crate::ids::SeqId;
use crate::sync::Arc;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

impl Engine {
    /// Splits the engine into a handle, to be cloned for everyone who has work for it, and a driver for one thread of the
    /// caller's. No thread is started here.
    ///
    /// ```
    /// use loquat::{Engine, EngineConfig, EventKind, FinishReason, HandleOptions, Request};
    /// # use loquat::weights::{Fill, Synthetic, SyntheticTensor};
    /// # let tensor = |name: &str, shape: &[usize]| SyntheticTensor {
    /// #     name: name.into(),
    /// #     shape: shape.into(),
    /// #     format: loquat::FormatId::F32,
    /// #     fill: if shape.len() == 1 { Fill::Constant(1.0) } else { Fill::Normal(0.2) },
    /// # };
    /// # let layer = "model.layers.0";
    /// # let weights = Synthetic::new(7, vec![
    /// #     tensor("model.embed_tokens.weight", &[96, 32]),
    /// #     tensor(&format!("{layer}.input_layernorm.weight"), &[32]),
    /// #     tensor(&format!("{layer}.self_attn.q_proj.weight"), &[32, 32]),
    /// #     tensor(&format!("{layer}.self_attn.k_proj.weight"), &[16, 32]),
    /// #     tensor(&format!("{layer}.self_attn.v_proj.weight"), &[16, 32]),
    /// #     tensor(&format!("{layer}.self_attn.o_proj.weight"), &[32, 32]),
    /// #     tensor(&format!("{layer}.post_attention_layernorm.weight"), &[32]),
    /// #     tensor(&format!("{layer}.mlp.gate_proj.weight"), &[64, 32]),
    /// #     tensor(&format!("{layer}.mlp.up_proj.weight"), &[64, 32]),
    /// #     tensor(&format!("{layer}.mlp.down_proj.weight"), &[32, 64]),
    /// #     tensor("model.norm.weight", &[32]),
    /// # ])?;
    /// # let config = r#"{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1,
    /// #     "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
    /// #     "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;
    /// # let texts = loquat::SideTexts { config: Some(config.into()), ..Default::default() };
    /// # let files = loquat::ModelFiles::from_texts(std::sync::Arc::new(weights), &texts, false)?;
    /// // A model of random weights, made on the spot.
    /// let engine = Engine::new(&files, EngineConfig { cache_tokens: 256, ..EngineConfig::default() })?;
    /// let (handle, driver) = engine.into_handle(HandleOptions::default());
    /// let thread = std::thread::spawn(move || driver.run());
    ///
    /// // Blocking, event by event; a refusal by the engine is the first.
    /// let stream = handle.submit(Request::new([1, 2, 3], 8))?;
    /// let mut tokens = 0;
    /// for event in stream {
    ///     match event? {
    ///         EventKind::Token { .. } => tokens += 1,
    ///         EventKind::Finished(reason) => assert_eq!(reason, FinishReason::Length),
    ///         _ => {}
    ///     }
    /// }
    /// assert_eq!(tokens, 8);
    ///
    /// // As a future, in whatever runtime.
    /// async fn first(handle: loquat::EngineHandle) -> Result<Option<EventKind>, loquat::HandleError> {
    ///     let mut stream = handle.submit(Request::new([60; 20], 8))?;
    ///     // Dropped after its first event: the sequence ends.
    ///     stream.recv().await.transpose()
    /// }
    /// # let mut future = std::pin::pin!(first(handle.clone()));
    /// # let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    /// # let event = loop {
    /// #     if let std::task::Poll::Ready(event) = future.as_mut().poll(&mut cx) { break event? }
    /// # };
    /// # assert!(matches!(event, Some(EventKind::Token { .. })));
    ///
    /// // Everything else, on the driver's thread.
    /// let free = handle.call(|engine| engine.ledger().free_blocks())?.wait()?;
    /// assert!(free > 0);
    ///
    /// drop(handle);
    /// let _engine: Engine = thread.join().expect("no closure panicked")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_handle(self, options: HandleOptions) -> (EngineHandle, EngineDriver) {
        let inbox = Arc::new(Channel::new());
        let driver = EngineDriver::new(self, inbox.clone(), &options);
        (EngineHandle { inbox, commands: options.commands }, driver)
    }
}

/// Sends work to an engine that a [driver](EngineDriver) runs: see [`Engine::into_handle`]. Cloning is cheap.
///
/// Nothing here waits. When the last handle is dropped, streams go on to their end and [`EngineDriver::run`] returns.
pub struct EngineHandle {
    inbox: Arc<Channel<Message>>,
    commands: usize,
}

impl EngineHandle {
    /// Sends a request. The engine looks at it later, on its own thread: a request that it refuses gives a stream whose only item
    /// is [`HandleError::Refused`].
    ///
    /// # Errors
    /// [`HandleError::Busy`] where too many commands wait, [`HandleError::Gone`] where nobody runs the engine any more.
    pub fn submit(&self, request: Request) -> Result<EventStream, HandleError> {
        self.submit_with(move |engine| engine.submit(request))
    }

    /// Sends a closure that puts a sequence to work by [`Engine::submit`] or [`Engine::resume`] and says which. From then on the
    /// stream owns the sequence; one that it had before ends with [`HandleError::Gone`] unless it has ended, and its
    /// drop ends nothing. So a held sequence goes on:
    ///
    /// ```no_run
    /// # fn f(handle: loquat::EngineHandle) -> Result<(), loquat::HandleError> {
    /// # use loquat::Request;
    /// let mut first = handle.submit(Request::new([1, 2, 3], 8).hold(true))?;
    /// while let Some(event) = first.next() {
    ///     println!("{:?}", event?);
    /// }
    /// let seq = first.seq().expect("it was not refused");
    /// let second = handle.submit_with(move |engine| {
    ///     engine.resume(seq, Request::new([4, 5], 8))?;
    ///     Ok(seq)
    /// })?;
    /// // Not before: dropping a stream ends its sequence, held or not.
    /// drop(first);
    /// # drop(second);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`submit`](Self::submit). The stream's only item is [`HandleError::Refused`] with the closure's error, or where the
    /// sequence that it names neither waits nor runs.
    pub fn submit_with(
        &self,
        submission: impl FnOnce(&mut Engine) -> Result<SeqId, SubmitError> + Send + 'static,
    ) -> Result<EventStream, HandleError> {
        let (speaker, line) = Speaker::new();
        let submission: Box<Submission> = Box::new(submission);
        self.send(Message::Submit(submission, speaker))?;
        Ok(EventStream { line, inbox: self.inbox.clone(), ended: false, cancelled: false })
    }

    /// Sends a closure to be run between two steps, or in a pause of one where there are [slices](HandleOptions::slice). It runs
    /// even if nobody waits for the reply. Events of sequences that it puts to work itself wait in the engine for
    /// [`Engine::next_event`].
    ///
    /// While it runs the engine does not. It must not wait for another reply or for a stream, which would never come; events that
    /// it takes from a stream's sequence the stream lacks. If it panics, [`EngineDriver::run`] does.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn call<T: Send + 'static>(&self, call: impl FnOnce(&mut Engine) -> T + Send + 'static) -> Result<Reply<T>, HandleError> {
        let answer = Arc::new(Channel::new());
        let asked = Asked(answer.clone());
        let reply = Reply(answer);
        self.send(Message::Call(Box::new(move |engine| {
            // Nobody may want to know.
            let _ = asked.0.send(call(engine), 1);
        })))?;
        Ok(reply)
    }

    /// Sends [`Engine::cancel`], for a sequence of whatever origin. A stream's own [`cancel`](EventStream::cancel) always finds room.
    ///
    /// # Errors
    /// As [`submit`](Self::submit); the reply holds the engine's.
    pub fn cancel(&self, seq: SeqId) -> Result<Reply<Result<(), SubmitError>>, HandleError> {
        self.call(move |engine| engine.cancel(seq))
    }

    /// Ends the driver as soon as it has done what was sent before and the step under way. Streams then end with
    /// [`HandleError::Gone`], as does all that is sent from now on.
    pub fn shutdown(&self) {
        self.inbox.shut();
    }

    fn send(&self, message: Message) -> Result<(), HandleError> {
        self.inbox.send(message, self.commands).map_err(|unsent| match unsent {
            Unsent::Full(_) => HandleError::Busy { limit: self.commands },
            Unsent::Gone(_) => HandleError::Gone,
        })
    }
}

impl Clone for EngineHandle {
    fn clone(&self) -> Self {
        self.inbox.add_sender();
        EngineHandle { inbox: self.inbox.clone(), commands: self.commands }
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.inbox.drop_sender();
    }
}

/// What happens to one sequence: tokens, then exactly one last item, [`EventKind::Finished`] or an
/// error; after it, nothing.
///
/// As an iterator it blocks its thread for each event; [`recv`](Self::recv) and [`poll_next`](Self::poll_next) are for tasks.
/// Nothing holds a fast engine back for a slow reader: a stream keeps what its sequence says, at most as many events as its request
/// allows tokens and one more. Room for them, less than 100 bytes each, is taken when the engine takes the sequence in, so that
/// handing an event out allocates nothing. Dropping a stream ends its sequence, held or not, and never waits.
pub struct EventStream {
    line: Arc<Line>,
    inbox: Arc<Channel<Message>>,
    ended: bool,
    cancelled: bool,
}

impl EventStream {
    /// The sequence, once the engine has taken it in: at the latest with its first event.
    pub fn seq(&self) -> Option<SeqId> {
        self.line.seq.get().copied()
    }

    /// The next event, if it is here.
    pub fn try_next(&mut self) -> Poll<Option<Result<EventKind, HandleError>>> {
        self.receive(Channel::try_recv)
    }

    /// Waits for the next event, for so long at most; pending if there is none by then.
    pub fn next_timeout(&mut self, timeout: Duration) -> Poll<Option<Result<EventKind, HandleError>>> {
        let until = Instant::now().checked_add(timeout);
        self.receive(|items| items.recv(until))
    }

    /// The next event, or the task is woken when it is here. With it a stream of any library is a line:
    /// `poll_fn(move |cx| stream.poll_next(cx))`.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<EventKind, HandleError>>> {
        self.receive(|items| items.poll_recv(cx))
    }

    /// The next event as a future, which can be dropped without losing one.
    pub fn recv(&mut self) -> Recv<'_> {
        Recv(self)
    }

    /// Asks for the sequence to end; events that it has by then come first. Always finds room.
    pub fn cancel(&mut self) {
        if !self.ended && !std::mem::replace(&mut self.cancelled, true) {
            self.tell();
        }
    }

    fn tell(&self) {
        // If the driver is gone, so is the sequence.
        let _ = self.inbox.send(Message::Cancel(self.line.clone()), usize::MAX);
    }

    fn receive(&mut self, receive: impl FnOnce(&Channel<Item>) -> Poll<Option<Item>>) -> Poll<Option<Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let item = receive(&self.line.items).map(|item| item.unwrap_or(Err(HandleError::Gone)));
        self.ended = matches!(item, Poll::Ready(Ok(EventKind::Finished(_)) | Err(_)));
        item.map(Some)
    }
}

impl Iterator for EventStream {
    type Item = Result<EventKind, HandleError>;

    /// Waits for the next event.
    fn next(&mut self) -> Option<Self::Item> {
        match self.receive(|items| items.recv(None)) {
            Poll::Ready(item) => item,
            Poll::Pending => unreachable!("there is no deadline"),
        }
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.line.items.close();
        self.tell();
    }
}

/// See [`EventStream::recv`].
#[must_use = "a future does nothing unless it is polled"]
pub struct Recv<'a>(&'a mut EventStream);

impl Future for Recv<'_> {
    type Output = Option<Result<EventKind, HandleError>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_next(cx)
    }
}

/// What a [call](EngineHandle::call) will come to: a future, or to be waited for. Dropping it does not take the call back.
pub struct Reply<T>(Arc<Channel<T>>);

impl<T> Reply<T> {
    /// Waits for it.
    ///
    /// # Errors
    /// [`HandleError::Gone`] where the driver went before the call's turn, or the call panicked.
    pub fn wait(self) -> Result<T, HandleError> {
        match self.0.recv(None) {
            Poll::Ready(Some(value)) => Ok(value),
            _ => Err(HandleError::Gone),
        }
    }

    /// Waits for it, for so long at most; pending if it is not here by then. It comes once: after that,
    /// [`HandleError::Gone`].
    pub fn wait_timeout(&mut self, timeout: Duration) -> Poll<Result<T, HandleError>> {
        self.0.recv(Instant::now().checked_add(timeout)).map(|value| value.ok_or(HandleError::Gone))
    }
}

impl<T> Future for Reply<T> {
    type Output = Result<T, HandleError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_recv(cx).map(|value| value.ok_or(HandleError::Gone))
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The driver's end of a [`Reply`].
struct Asked<T>(Arc<Channel<T>>);

impl<T> Drop for Asked<T> {
    fn drop(&mut self) {
        self.0.drop_sender();
    }
}
