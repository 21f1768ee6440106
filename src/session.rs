//! One conversation: text in, text out, with the cache of earlier turns kept between them. A session owns a sequence in an
//! [`Engine`], which the caller passes to each call: many sessions can share one engine, and none borrows it.
//!
//! ```text
//! push / say -> start -> [engine steps] -> poll -> text          generate = start, then steps and polls
//! ```
//!
//! Invariants: `tokens` is what the conversation is; what the engine holds for it is a prefix of that, plus what it generates
//! now. Nothing here waits: only [`Generate`] steps the engine.
#![forbid(unsafe_code)]

mod saved;

pub use saved::SaveOptions;

use crate::engine::{Engine, EventKind, FinishReason, Held, Request, Status};
use crate::error::{Error, RunError, SubmitError, TextError};
use crate::ids::{SeqId, TokenId};
use crate::model::ModelFiles;
use crate::sample::SamplingParams;
use crate::text::{
    AddSpecial, ChatTemplate, Detokenizer, DetokenizerOptions, EncodeOptions, Message, RenderOptions, Start, Tokenizer,
};

/// How to answer.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// How to choose them. Greedy by default.
    pub sampling: SamplingParams,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Go on past the model's end tokens.
    pub ignore_end: bool,
    /// Give out the texts of special tokens too.
    pub show_special: bool,
    /// Higher goes first where sessions share an engine.
    pub priority: i32,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_tokens: 256,
            sampling: SamplingParams::default(),
            stop: Vec::new(),
            ignore_end: false,
            show_special: false,
            priority: 0,
        }
    }
}

/// What [`Session::poll`] found.
#[derive(Clone, PartialEq, Debug)]
pub enum Polled {
    /// More of the answer.
    Text(String),
    /// Nothing yet: step the engine.
    Pending,
    /// The answer is complete, or none was started.
    Done(FinishReason),
}

/// See the module's documentation. Dropping it frees its sequence at the engine's next call.
///
/// A session may be passed another engine than before: the conversation moves there and is computed anew, and an answer under way
/// in the old one ends with what was polled of it.
pub struct Session {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    render: RenderOptions,
    end_ids: Vec<TokenId>,
    /// The whole conversation, generated tokens included.
    tokens: Vec<TokenId>,
    /// The sequence in the engine, and how many of `tokens` it was given or made.
    held: Option<Held>,
    sent: usize,
    /// Pushed while an answer was under way, and after it.
    queued: Vec<TokenId>,
    /// Of its requests; another than 0 after it was restored from 8 bits.
    key: u64,
    /// Some of the conversation is raw text.
    raw: bool,
    messages: Vec<Message>,
    /// Of the messages, those that an answer was started to, and the answers.
    said: usize,
    answer: Option<Answer>,
    last: FinishReason,
    generated: usize,
    reused: usize,
}

/// An answer under way.
struct Answer {
    detokenizer: Detokenizer,
    /// All of its text, for the conversation.
    text: String,
    /// It belongs to a conversation of messages.
    chat: bool,
    /// Why the engine ended it; its last text was given out.
    ended: Option<FinishReason>,
}

impl Session {
    /// An empty conversation with the model in `files`.
    ///
    /// # Errors
    /// [`TextError::Absent`] where the files have no tokenizer.
    pub fn new(files: &ModelFiles) -> Result<Self, TextError> {
        let tokenizer = files.tokenizer()?.clone();
        Ok(Session {
            render: RenderOptions::for_tokenizer(&tokenizer),
            template: files.template().ok().cloned(),
            end_ids: files.end_ids().to_vec(),
            tokenizer,
            tokens: Vec::new(),
            held: None,
            sent: 0,
            queued: Vec::new(),
            key: 0,
            raw: false,
            messages: Vec::new(),
            said: 0,
            answer: None,
            last: FinishReason::Stop,
            generated: 0,
            reused: 0,
        })
    }

    /// What the chat template reads besides the messages: tools, the date, variables of its own.
    pub fn render_options(&mut self) -> &mut RenderOptions {
        &mut self.render
    }

    /// Appends raw text, without a template. BOS goes before the first of it where the model wants one; the texts of special
    /// tokens in it are text. While an answer is under way the text waits for its end. A conversation is of raw text or of
    /// messages: see [`TextError::Mixed`].
    ///
    /// # Errors
    /// [`TextError`] where the vocabulary cannot express it.
    pub fn push(&mut self, text: &str) -> Result<(), TextError> {
        let first = self.tokens.is_empty() && self.queued.is_empty() && self.answer.is_none();
        let options = match first {
            true => EncodeOptions::default(),
            false => EncodeOptions { start: Start::Continuation, add: AddSpecial::Never, ..EncodeOptions::default() },
        };
        let more = self.tokenizer.encode(text, options)?;
        self.push_tokens(&more);
        Ok(())
    }

    /// [`push`](Self::push) of tokens.
    pub fn push_tokens(&mut self, tokens: &[TokenId]) {
        let end = if self.answer.is_some() { &mut self.queued } else { &mut self.tokens };
        end.extend_from_slice(tokens);
        self.raw |= !tokens.is_empty();
    }

    /// Appends a message to the conversation, to be rendered by the model's chat template when the next answer starts.
    /// Answers append themselves. The texts of special tokens in it count as those tokens, as in every chat template.
    pub fn say(&mut self, role: impl Into<String>, content: impl Into<String>) {
        self.say_message(Message::new(role, content));
    }

    /// [`say`](Self::say) with all the fields of a message.
    pub fn say_message(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// The messages of the conversation so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The tokens of the conversation so far.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Tokens of the last answer.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Tokens that the last answer found cached and did not run again.
    pub fn reused(&self) -> usize {
        self.reused
    }

    /// Takes back the last message, unless an answer was started to it.
    pub fn unsay(&mut self) -> Option<Message> {
        if self.messages.len() > self.said { self.messages.pop() } else { None }
    }

    /// The sequence in the engine, once an answer was started.
    pub fn seq(&self) -> Option<SeqId> {
        self.held.as_ref().map(Held::seq)
    }

    /// Starts an answer to what was pushed or said; step the engine and [`poll`](Self::poll) for it. Tokens that the engine
    /// still has cached are not run again. It gets as many tokens as the options say, or as the engine has room for. An answer
    /// still under way is [stopped](Self::stop) first.
    ///
    /// # Errors
    /// [`SubmitError`] where the conversation does not fit, [`TextError`] from the chat template or for a conversation of both
    /// raw text and messages; the conversation is as it was.
    pub fn start(&mut self, engine: &mut Engine, options: &GenerateOptions) -> Result<(), Error> {
        self.settle(engine);
        let chat = self.messages.len() > self.said;
        let tokens = match (chat, self.raw) {
            (true, true) => return Err(TextError::Mixed.into()),
            (true, false) => self.rendered()?,
            (false, _) => self.tokens.clone(),
        };
        if tokens.is_empty() {
            return Err(SubmitError::EmptyPrompt.into());
        }
        let detokenizer = Detokenizer::new(
            &self.tokenizer,
            DetokenizerOptions { skip_special: !options.show_special, start: Start::Continuation, stop: options.stop.clone() },
        )?;
        let room = engine.max_len().saturating_sub(tokens.len()).max(1);
        let request = |tokens: &[TokenId]| Request {
            sampling: options.sampling.clone(),
            stop_tokens: if options.ignore_end { Vec::new() } else { self.end_ids.clone() },
            priority: options.priority,
            hold: true,
            key: self.key,
            ..Request::new(tokens, options.max_tokens.min(room))
        };
        match self.here(engine) {
            Some(seq) => {
                // A template may render earlier turns anew: what differs is forgotten and run again.
                let same = self.tokens[..self.sent].iter().zip(&tokens).take_while(|(a, b)| a == b).count();
                if same < self.sent {
                    engine.truncate(seq, same)?;
                    self.sent = same;
                }
                engine.resume(seq, request(&tokens[same..]))?;
            }
            None => {
                let seq = engine.submit(request(&tokens))?;
                self.held = Some(engine.own(seq));
            }
        }
        self.reused = self.seq().map_or(0, |seq| engine.ledger().cached_prefix(seq));
        self.generated = 0;
        self.sent = tokens.len();
        self.tokens = tokens;
        self.said = self.messages.len();
        self.answer = Some(Answer { detokenizer, text: String::new(), chat, ended: None });
        Ok(())
    }

    /// The next piece of the answer, if the engine has made one. Never steps the engine. Where the engine no longer has the
    /// answer's sequence, the answer is done: [`FinishReason::Cancelled`].
    ///
    /// # Errors
    /// None of its own today; the signature leaves room for devices that fail late.
    pub fn poll(&mut self, engine: &mut Engine) -> Result<Polled, Error> {
        while let Some(answer) = &mut self.answer {
            if let Some(reason) = answer.ended.take() {
                self.close_answer(reason.clone());
                return Ok(Polled::Done(reason));
            }
            let event = self.held.as_ref().and_then(|held| engine.next_event_for(held));
            let Some(event) = event else {
                if self.here(engine).is_some() {
                    return Ok(Polled::Pending);
                }
                self.lose();
                continue;
            };
            let text = match event.kind {
                EventKind::Token { token, .. } => {
                    self.tokens.push(token);
                    self.sent += 1;
                    self.generated += 1;
                    // Others may have needed the room before it was admitted.
                    self.reused = engine.view(event.seq).map_or(self.reused, |v| v.hit());
                    let stopped = answer.detokenizer.stopped();
                    let text = answer.detokenizer.push(token).to_owned();
                    if answer.detokenizer.stopped() != stopped {
                        // The engine knows no stop strings. Its last event comes at once, or with the step under way.
                        let _ = engine.stop(event.seq);
                    }
                    text
                }
                // A session asks for none.
                EventKind::Embedding(_) | EventKind::Choice { .. } => continue,
                EventKind::Finished(reason) => {
                    answer.ended = Some(if answer.detokenizer.stopped().is_some() { FinishReason::Stop } else { reason });
                    answer.detokenizer.finish().to_owned()
                }
            };
            answer.text.push_str(&text);
            if !text.is_empty() {
                return Ok(Polled::Text(text));
            }
        }
        Ok(Polled::Done(self.last.clone()))
    }

    /// Starts an answer and gives its pieces as they come, stepping the engine for each. Dropping the iterator stops the
    /// answer; what was generated by then stays part of the conversation.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn generate<'a>(&'a mut self, engine: &'a mut Engine, options: &GenerateOptions) -> Result<Generate<'a>, Error> {
        self.start(engine, options)?;
        Ok(Generate { session: self, engine, done: false })
    }

    /// Asks the engine to end the answer under way, if there is one; [`poll`](Self::poll) gives what is left of it and then
    /// [`Polled::Done`]. Does not wait: in the middle of a step that other sequences take part in, the end comes with the step.
    /// What was generated stays part of the conversation.
    pub fn stop(&mut self, engine: &mut Engine) {
        if let (Some(_), Some(seq)) = (&self.answer, self.here(engine)) {
            // It may have ended by itself: its last event waits then.
            let _ = engine.stop(seq);
        }
    }

    /// Forgets everything from token `len` on; an answer under way is stopped. Messages are forgotten altogether: what is kept is
    /// raw text from here on. To take back turns of a chat, see [`truncate_messages`](Self::truncate_messages).
    ///
    /// # Errors
    /// [`SubmitError::Parameter`] where there are fewer tokens.
    pub fn truncate(&mut self, engine: &mut Engine, len: usize) -> Result<(), Error> {
        self.settle(engine);
        if len > self.tokens.len() {
            let found = format!("{len} of {}", self.tokens.len());
            return Err(SubmitError::Parameter { name: "len", expected: "at most the conversation's length", found }.into());
        }
        let keep = len.min(self.sent);
        if let Some(seq) = self.here(engine) {
            engine.truncate(seq, keep)?;
        }
        self.tokens.truncate(len);
        self.sent = keep;
        self.messages.clear();
        self.said = 0;
        self.raw = len > 0;
        Ok(())
    }

    /// Forgets the messages from `len` on; an answer under way is stopped. What the remaining ones have cached is found again by
    /// the next answer.
    pub fn truncate_messages(&mut self, engine: &mut Engine, len: usize) {
        self.settle(engine);
        self.messages.truncate(len);
        // The last message may want an answer again.
        self.said = self.said.min(len.saturating_sub(1));
    }

    /// A second session with the same conversation; an answer under way is stopped. Both share what is cached until one of them
    /// goes on.
    ///
    /// # Errors
    /// [`SubmitError::QueueFull`].
    pub fn fork(&mut self, engine: &mut Engine) -> Result<Session, Error> {
        self.settle(engine);
        let held = match self.here(engine) {
            Some(seq) => {
                let copy = engine.fork(seq)?;
                Some(engine.own(copy))
            }
            None => None,
        };
        Ok(Session {
            tokenizer: self.tokenizer.clone(),
            template: self.template.clone(),
            render: self.render.clone(),
            end_ids: self.end_ids.clone(),
            tokens: self.tokens.clone(),
            sent: if held.is_some() { self.sent } else { 0 },
            held,
            queued: Vec::new(),
            key: self.key,
            raw: self.raw,
            messages: self.messages.clone(),
            said: self.said,
            answer: None,
            last: self.last.clone(),
            generated: self.generated,
            reused: self.reused,
        })
    }

    /// Ends an answer under way at once. Where the engine cannot end it before others have finished their step, its sequence is
    /// given up and the conversation computed anew later.
    fn settle(&mut self, engine: &mut Engine) {
        self.stop(engine);
        while self.answer.is_some() {
            if let Ok(Polled::Pending) | Err(_) = self.poll(engine) {
                self.held = None;
                self.lose();
            }
        }
        // Of a sequence in another engine, or one that is gone, nothing is left to go on from.
        if self.here(engine).is_none() {
            self.held = None;
            self.sent = 0;
        }
    }

    /// The engine has nothing more of the answer under way.
    fn lose(&mut self) {
        self.held = None;
        self.sent = 0;
        self.close_answer(FinishReason::Cancelled);
    }

    /// The session's sequence, if it is one of this engine's.
    fn here(&self, engine: &Engine) -> Option<SeqId> {
        self.held.as_ref().and_then(|held| engine.owned(held))
    }

    /// The conversation as tokens, by the template.
    fn rendered(&self) -> Result<Vec<TokenId>, TextError> {
        let template = self.template.as_ref().ok_or(TextError::Absent { what: "chat template" })?;
        self.tokenizer.encode_chat(&template.render(&self.messages, &self.render)?)
    }

    fn close_answer(&mut self, reason: FinishReason) {
        let answer = self.answer.take();
        if let Some(answer) = answer.filter(|a| a.chat && !matches!(reason, FinishReason::Failed(_))) {
            // Before what was said while it was under way.
            self.messages.insert(self.said, Message::new("assistant", answer.text));
            self.said += 1;
        }
        self.tokens.append(&mut self.queued);
        self.last = reason;
    }
}

/// An answer as it comes: see [`Session::generate`].
pub struct Generate<'a> {
    session: &'a mut Session,
    engine: &'a mut Engine,
    done: bool,
}

impl Generate<'_> {
    /// Why the answer ended, once it has.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.done.then_some(&self.session.last)
    }
}

impl Generate<'_> {
    /// Waits, in the middle of a step or for the policy, until the answer has more. Nothing else that this thread does could
    /// bring it on.
    fn advance(&mut self) -> Result<Option<String>, Error> {
        loop {
            match self.session.poll(self.engine)? {
                Polled::Text(text) => return Ok(Some(text)),
                Polled::Done(FinishReason::Failed(error)) => return Err(error.into()),
                Polled::Done(_) => return Ok(None),
                Polled::Pending => {}
            }
            match self.engine.step()? {
                Status::Idle(Some(when)) => std::thread::sleep(when.saturating_sub(self.engine.now())),
                Status::Idle(None) => match self.session.seq() {
                    Some(seq) => return Err(RunError::Stalled { seq }.into()),
                    None => return Ok(None),
                },
                _ => {}
            }
        }
    }
}

impl Iterator for Generate<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = self.advance().transpose();
        self.done = !matches!(next, Some(Ok(_)));
        next
    }
}

impl Drop for Generate<'_> {
    fn drop(&mut self) {
        self.session.settle(self.engine);
    }
}
