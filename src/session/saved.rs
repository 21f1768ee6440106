//! Conversations that outlive their engine: to bytes, and back.
//!
//! ```text
//! prefix    the tokens and what is cached of them: see `engine::snapshot`
//! session   raw u8; said u64; last u8; generated u64; reused u64; messages u64, each: role, content, further fields
//! render    add_generation_prompt u8; bos, eos; tools, documents, now, template, further variables as values
//! ```
//!
//! Invariant: a session comes back whole or not at all, and with it the engine as it was.
#![forbid(unsafe_code)]

use super::Session;
use crate::engine::snapshot::{Kind, Reader, Writer};
use crate::engine::{Engine, FinishReason, KvSave};
use crate::error::{Error, SnapshotError};
use crate::model::ModelFiles;
use crate::text::{Message, RenderOptions};
use serde_json::{Value, json};

/// How to save a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SaveOptions {
    /// What becomes of cached keys and values: as they are by default.
    pub kv: KvSave,
}

impl Session {
    /// The conversation as bytes for [`restore`](Self::restore): its tokens and messages, the variables of the chat template, and
    /// what `engine` has cached of it. An answer under way is stopped first. The session goes on as before.
    ///
    /// The bytes depend neither on the engine's threads nor on its blocks. A game saves them with everything else:
    ///
    /// ```no_run
    /// use loquat::{Engine, EngineConfig, GenerateOptions, KvSave, ModelFiles, SaveOptions, Session};
    ///
    /// let files = ModelFiles::load("model.gguf")?;
    /// let mut engine = Engine::new(&files, EngineConfig::default())?;
    /// let mut innkeeper = Session::new(&files)?;
    /// innkeeper.say("system", "You keep the inn at the crossroads.");
    /// innkeeper.say("user", "Any news from the north?");
    /// for piece in innkeeper.generate(&mut engine, &GenerateOptions::default())? {
    ///     print!("{}", piece?);
    /// }
    /// let bytes = innkeeper.save(&mut engine, SaveOptions { kv: KvSave::Int8 })?;
    ///
    /// // The next day, in another process: nothing is run again but the last token.
    /// let mut innkeeper = Session::restore(&files, &mut engine, &bytes)?;
    /// innkeeper.say("user", "You spoke of wolves.");
    /// # Ok::<(), loquat::Error>(())
    /// ```
    ///
    /// Cost: one copy of what is cached: see [`KvSave`] for how large. Where the answer that is stopped takes part in a step with
    /// others that is not over, what it has beyond whole blocks is run again later.
    ///
    /// # Errors
    /// As [`Engine::export`]; the session is then as after [`stop`](Self::stop).
    pub fn save(&mut self, engine: &mut Engine, options: SaveOptions) -> Result<Vec<u8>, Error> {
        self.settle(engine);
        let mut out = engine.snapshot(Kind::Session)?;
        engine.put_prefix(&mut out, self.key, &self.tokens, options.kv)?;
        self.put(&mut out);
        Ok(out.finish())
    }

    /// A session as it was [saved](Self::save), by this program or another, with what was cached of it cached in `engine`: its
    /// next answer runs what is new, and no more than the last token of what is not, as long as nobody has needed the room
    /// until then. The engine's threads, blocks and room may be others than the saver's; for [`KvSave::Exact`] the type of
    /// its cache is the same.
    ///
    /// Of an answer that had failed the error is not kept: it counts as cancelled. [`Engine::import`] says whose
    /// snapshots to trust, [`Imported::cached`](crate::engine::Imported::cached) when nothing is cached in spite of all.
    ///
    /// # Errors
    /// As [`Engine::import`], with [`SnapshotError::Model`] also where `files` are not of the engine's model, and as
    /// [`new`](Self::new). The engine is as it was.
    pub fn restore(files: &ModelFiles, engine: &mut Engine, bytes: &[u8]) -> Result<Session, Error> {
        let mut input = engine.open_snapshot(bytes, Kind::Session)?;
        let (here, there) = (files.fingerprint(), engine.fingerprint());
        if let Some(found) = there.filter(|there| *there != here) {
            let (expected, found) = (format!("{here}, as the files are"), format!("{found}, as the engine is"));
            return Err(SnapshotError::Model { expected, found }.into());
        }
        let mut session = Session::new(files)?;
        let prefix = engine.read_prefix(&mut input)?;
        session.take(&mut input)?;
        input.end()?;
        let imported = engine.take_prefix(prefix)?;
        (session.key, session.tokens) = (imported.key, imported.tokens);
        Ok(session)
    }

    fn put(&self, out: &mut Writer) {
        debug_assert!(self.answer.is_none() && self.queued.is_empty(), "settled");
        out.u8(self.raw.into());
        out.u64(self.said as u64);
        out.u8(match self.last {
            FinishReason::Stop => 0,
            FinishReason::Length => 1,
            FinishReason::Embedded => 2,
            FinishReason::Cancelled | FinishReason::Failed(_) => 3,
        });
        out.u64(self.generated as u64);
        out.u64(self.reused as u64);
        out.u64(self.messages.len() as u64);
        for message in &self.messages {
            out.text(&message.role);
            out.text(&message.content);
            out.json(&Value::Object(message.extra.clone()));
        }
        let RenderOptions { add_generation_prompt, bos_token, eos_token, tools, documents, now, template, extra } = &self.render;
        out.u8((*add_generation_prompt).into());
        out.text(bos_token);
        out.text(eos_token);
        for value in [json!(tools), json!(documents), json!(now), json!(template), json!(extra)] {
            out.json(&value);
        }
    }

    fn take(&mut self, input: &mut Reader<'_>) -> Result<(), SnapshotError> {
        self.raw = input.bool("raw")?;
        self.said = input.count("said")?;
        self.last = match input.u8("last")? {
            0 => FinishReason::Stop,
            1 => FinishReason::Length,
            2 => FinishReason::Embedded,
            3 => FinishReason::Cancelled,
            found => return Err(SnapshotError::malformed("last", "0 to 3", found)),
        };
        (self.generated, self.reused) = (input.count("generated")?, input.count("reused")?);
        // Whatever the count says: each takes bytes.
        for _ in 0..input.count("messages")? {
            let (role, content) = (input.text("role")?, input.text("content")?);
            let extra = input.json_object("a message's fields")?;
            self.messages.push(Message { extra, ..Message::new(role, content) });
        }
        if self.said > self.messages.len() {
            return Err(SnapshotError::malformed("said", format_args!("at most {}", self.messages.len()), self.said));
        }
        let add_generation_prompt = input.bool("add_generation_prompt")?;
        let (bos_token, eos_token) = (input.text("bos_token")?.to_owned(), input.text("eos_token")?.to_owned());
        let given = |value: Value| (!value.is_null()).then_some(value);
        let (tools, documents) = (given(input.json("tools")?), given(input.json("documents")?));
        let now = match input.json("now")? {
            Value::Null => None,
            found => match (found[0].as_i64(), found[1].as_i64().and_then(|s| i32::try_from(s).ok())) {
                (Some(time), Some(offset)) => Some((time, offset)),
                _ => return Err(SnapshotError::malformed("now", "seconds and an offset", found)),
            },
        };
        let template = match input.json("template")? {
            Value::Null => None,
            Value::String(name) => Some(name),
            found => return Err(SnapshotError::malformed("template", "a name or nothing", found)),
        };
        let extra = input.json_object("variables")?;
        self.render = RenderOptions { add_generation_prompt, bos_token, eos_token, tools, documents, now, template, extra };
        Ok(())
    }
}
