//! One conversation: text in, text out, with the cache of earlier turns kept between them. A session owns a sequence in an
//! [`Engine`], which the caller passes to each call: many sessions can share one engine, and none borrows it.
//!
//! ```text
//! push / say -> start -> [engine steps] -> poll -> text          generate = start, then steps and polls
//! ```
//!
//! Invariant: `tokens` is what the conversation is; what the engine holds for it is a prefix of that, plus what it generates
//! now.
#![forbid(unsafe_code)]

use crate::engine::{Engine, EventKind, FinishReason, Held, Request};
use crate::error::{Error, SubmitError, TextError};
use crate::ids::{SeqId, TokenId};
use crate::model::ModelFiles;
use crate::sample::SamplingParams;
use crate::text::{ChatTemplate, Detokenizer, DetokenizerOptions, EncodeOptions, Message, RenderOptions, Start, Tokenizer};

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
    /// tokens in it are text.
    ///
    /// # Errors
    /// [`TextError`] where the vocabulary cannot express it.
    pub fn push(&mut self, text: &str) -> Result<(), TextError> {
        let mut options = EncodeOptions::default();
        if !self.tokens.is_empty() {
            options.add = crate::text::AddSpecial::Never;
        }
        let more = self.tokenizer.encode(text, options)?;
        self.tokens.extend(more);
        Ok(())
    }

    /// Appends tokens.
    pub fn push_tokens(&mut self, tokens: &[TokenId]) {
        self.tokens.extend_from_slice(tokens);
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
    /// still has cached are not run again. An answer still under way is [stopped](Self::stop) first.
    ///
    /// # Errors
    /// [`SubmitError`] where the conversation does not fit, [`TextError`] from the chat template; the conversation is as it
    /// was.
    pub fn start(&mut self, engine: &mut Engine, options: &GenerateOptions) -> Result<(), Error> {
        self.stop(engine)?;
        let chat = self.messages.len() > self.said;
        let tokens = if chat { self.rendered()? } else { self.tokens.clone() };
        let detokenizer = Detokenizer::new(
            &self.tokenizer,
            DetokenizerOptions {
                skip_special: !options.show_special,
                start: if tokens.is_empty() { Start::Text } else { Start::Continuation },
                stop: options.stop.clone(),
            },
        )?;
        let request = |tokens: &[TokenId]| Request {
            sampling: options.sampling.clone(),
            stop_tokens: if options.ignore_end { Vec::new() } else { self.end_ids.clone() },
            priority: options.priority,
            hold: true,
            ..Request::new(tokens, options.max_tokens)
        };
        match self.held.as_ref().map(Held::seq).filter(|&seq| engine.view(seq).is_some()) {
            Some(seq) => {
                if tokens.is_empty() {
                    return Err(SubmitError::EmptyPrompt.into());
                }
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
        self.reused = self.seq().and_then(|seq| engine.view(seq)).map_or(0, |v| v.cached());
        self.generated = 0;
        self.sent = tokens.len();
        self.tokens = tokens;
        self.said = self.messages.len();
        self.answer = Some(Answer { detokenizer, text: String::new(), chat, ended: None });
        Ok(())
    }

    /// The next piece of the answer, if the engine has made one. Never steps the engine.
    ///
    /// # Errors
    /// None of its own today; the signature leaves room for devices that fail late.
    pub fn poll(&mut self, engine: &mut Engine) -> Result<Polled, Error> {
        let Some(seq) = self.seq() else { return Ok(Polled::Done(self.last.clone())) };
        while let Some(answer) = &mut self.answer {
            if let Some(reason) = answer.ended.take() {
                self.close_answer(reason.clone());
                return Ok(Polled::Done(reason));
            }
            let Some(event) = engine.next_event_of(seq) else { return Ok(Polled::Pending) };
            let text = match event.kind {
                EventKind::Token { token, .. } => {
                    self.tokens.push(token);
                    self.sent += 1;
                    self.generated += 1;
                    let stopped = answer.detokenizer.stopped();
                    let text = answer.detokenizer.push(token).to_owned();
                    if answer.detokenizer.stopped() != stopped {
                        // The engine knows no stop strings. Its last event comes at once, or with the step under way.
                        let _ = engine.stop(seq);
                    }
                    text
                }
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

    /// Stops the answer under way, if there is one. What was generated stays part of the conversation.
    ///
    /// # Errors
    /// [`RunError`](crate::RunError) where the engine is in the middle of a step that cannot be completed.
    pub fn stop(&mut self, engine: &mut Engine) -> Result<(), Error> {
        if let (Some(_), Some(seq)) = (&self.answer, self.seq()) {
            // It may have ended by itself: its last event waits then.
            let _ = engine.stop(seq);
        } else {
            return Ok(());
        }
        // A step under way has to be completed before its tokens are known.
        loop {
            match self.poll(engine)? {
                Polled::Done(_) => return Ok(()),
                Polled::Text(_) => {}
                Polled::Pending => _ = engine.step()?,
            }
        }
    }

    /// Forgets everything from token `len` on. Messages are forgotten altogether: what is kept is raw text from here on.
    ///
    /// # Errors
    /// [`SubmitError::Parameter`] where there are fewer tokens.
    pub fn truncate(&mut self, engine: &mut Engine, len: usize) -> Result<(), Error> {
        if len > self.tokens.len() {
            let found = format!("{len} of {}", self.tokens.len());
            return Err(SubmitError::Parameter { name: "len", expected: "at most the conversation's length", found }.into());
        }
        self.stop(engine)?;
        let keep = len.min(self.sent);
        if let Some(seq) = self.seq().filter(|&seq| engine.view(seq).is_some()) {
            engine.truncate(seq, keep)?;
        }
        self.tokens.truncate(len);
        self.sent = keep;
        self.messages.clear();
        self.said = 0;
        Ok(())
    }

    /// A second session with the same conversation. Both share what is cached until one of them goes on.
    ///
    /// # Errors
    /// [`SubmitError::QueueFull`].
    pub fn fork(&mut self, engine: &mut Engine) -> Result<Session, Error> {
        self.stop(engine)?;
        let held = match self.seq().filter(|&seq| engine.view(seq).is_some()) {
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
            messages: self.messages.clone(),
            said: self.said,
            answer: None,
            last: self.last.clone(),
            generated: self.generated,
            reused: self.reused,
        })
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

impl Iterator for Generate<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.done {
            match self.session.poll(self.engine) {
                Ok(Polled::Text(text)) => return Some(Ok(text)),
                Ok(Polled::Pending) => {
                    if let Err(error) = self.engine.step() {
                        self.done = true;
                        return Some(Err(error.into()));
                    }
                }
                Ok(Polled::Done(reason)) => {
                    self.done = true;
                    if let FinishReason::Failed(error) = reason {
                        return Some(Err(error.into()));
                    }
                }
                Err(error) => {
                    self.done = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

impl Drop for Generate<'_> {
    fn drop(&mut self) {
        // Nothing can be reported from here; a device that fails now fails at the next call again.
        let _ = self.session.stop(self.engine);
    }
}
