//! Chat templates: the Jinja programs that published models carry to turn messages into a prompt, run as transformers runs them
//! (its options for white space, its filters and functions, Python's methods and JSON). Knows no tokens and no clock: the
//! time, the texts of special tokens and whatever else a template reads come with the call.
//!
//! Invariants: what a template does wrong, or says with `raise_exception`, is an error and never a shorter prompt; a template
//! ends: its work is counted, its depth bounded. (One thing is not counted: the engine joins a chain of more than 32 lists within
//! one expression by copying them before it charges; what a chain holds is charged where it gets a name.)
#![forbid(unsafe_code)]

use super::clock;
use super::tags;
use super::tojson::tojson;
use super::tokenizer::Tokenizer;
use crate::error::TextError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
    /// Further fields, such as `tool_calls` or `reasoning_content`; a `content` here takes the place of the text.
    pub extra: Map<String, Json>,
}

impl Message {
    /// A message without further fields.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into(), extra: Map::new() }
    }

    fn to_json(&self) -> Json {
        let mut map = Map::new();
        map.insert("role".into(), self.role.as_str().into());
        map.insert("content".into(), self.content.as_str().into());
        map.extend(self.extra.iter().map(|(key, value)| (key.clone(), value.clone())));
        Json::Object(map)
    }
}

/// What a template reads besides the messages.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderOptions {
    /// Ends the prompt with the beginning of the assistant's answer. On unless switched off.
    pub add_generation_prompt: bool,
    /// The text of BOS; empty where the model has none.
    pub bos_token: String,
    /// The text of EOS; empty where the model has none.
    pub eos_token: String,
    /// Descriptions of tools, as the model's makers write them.
    pub tools: Option<Json>,
    /// Documents for retrieval.
    pub documents: Option<Json>,
    /// The time for `strftime_now`: seconds since 1970 in UTC, and the local offset in seconds. Without it the function does not
    /// exist, and templates that ask whether it does write their own date.
    pub now: Option<(i64, i32)>,
    /// Which of several templates; without it `tool_use` where there are tools and such a template, else `default`.
    pub template: Option<String>,
    /// More variables, such as `enable_thinking`. They take the place of any above.
    pub extra: Map<String, Json>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        RenderOptions {
            add_generation_prompt: true,
            bos_token: String::new(),
            eos_token: String::new(),
            tools: None,
            documents: None,
            now: None,
            template: None,
            extra: Map::new(),
        }
    }
}

impl RenderOptions {
    /// The defaults with the texts of the tokenizer's BOS and EOS.
    pub fn for_tokenizer(tokenizer: &Tokenizer) -> Self {
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default().to_owned();
        RenderOptions { bos_token: text(tokenizer.bos()), eos_token: text(tokenizer.eos()), ..Self::default() }
    }
}

/// A model's chat template, or its several named ones, compiled. Cheap to clone.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    sources: Arc<BTreeMap<String, String>>,
}

impl ChatTemplate {
    /// Compiles one template: chat_template.jinja, `chat_template` of tokenizer_config.json, or `tokenizer.chat_template` of GGUF.
    ///
    /// # Errors
    /// [`TextError::Template`] with the engine's words and the line.
    pub fn new(source: &str) -> Result<Self, TextError> {
        Self::from_named([(DEFAULT, source)])
    }

    /// Compiles several templates with their names.
    pub fn from_named<'a>(templates: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, TextError> {
        let mut environment = environment();
        let mut sources = BTreeMap::new();
        for (name, source) in templates {
            if source.len() > LONGEST_SOURCE {
                let found = source.len();
                return Err(TextError::template(format!("{name}: at most {LONGEST_SOURCE} bytes expected, found {found}")));
            }
            environment.add_template_owned(name.to_owned(), tags::rewrite(source)?).map_err(error)?;
            sources.insert(name.to_owned(), source.to_owned());
        }
        if sources.is_empty() {
            return Err(TextError::Absent { what: "chat template" });
        }
        Ok(ChatTemplate { environment: Arc::new(environment), sources: Arc::new(sources) })
    }

    /// The `chat_template` of a tokenizer_config.json: one text, or a list of `{name, template}`. `None` where it has none.
    pub fn from_config(config: &Json) -> Result<Option<Self>, TextError> {
        match config.get("chat_template") {
            None | Some(Json::Null) => Ok(None),
            Some(Json::String(source)) => Self::new(source).map(Some),
            Some(Json::Array(list)) => {
                let named = list
                    .iter()
                    .map(|entry| match (entry["name"].as_str(), entry["template"].as_str()) {
                        (Some(name), Some(source)) => Ok((name, source)),
                        _ => Err(TextError::template(format!("chat_template: name and template expected, found {entry}"))),
                    })
                    .collect::<Result<Vec<_>, _>>()?;
                Self::from_named(named).map(Some)
            }
            Some(other) => Err(TextError::template(format!("chat_template: a text or a list expected, found {other}"))),
        }
    }

    /// The names of the templates.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    /// The text of a template as the model's files hold it.
    pub fn source(&self, name: &str) -> Option<&str> {
        self.sources.get(name).map(String::as_str)
    }

    /// Renders a conversation. Give the result to [`Tokenizer::encode_chat`].
    ///
    /// # Errors
    /// [`TextError::Template`] with what the template raised or did wrong, or that it did not end in a work budget that grows with
    /// the messages.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TextError> {
        self.render_json(&Json::Array(messages.iter().map(Message::to_json).collect()), options)
    }

    /// [`render`](Self::render) for messages in JSON, with whatever fields they have.
    pub fn render_json(&self, messages: &Json, options: &RenderOptions) -> Result<String, TextError> {
        let name = match &options.template {
            Some(name) => name.as_str(),
            None if options.tools.is_some() && self.sources.contains_key(TOOL_USE) => TOOL_USE,
            None if self.sources.len() == 1 => self.sources.keys().next().expect("there is one"),
            None => DEFAULT,
        };
        if !self.sources.contains_key(name) {
            let known: Vec<&str> = self.names().collect();
            return Err(TextError::template(format!("one of {} expected, found {name:?}", known.join(", "))));
        }
        let mut size = size_of(messages, 0)?;
        for value in options.tools.iter().chain(&options.documents).chain(options.extra.values()) {
            size += size_of(value, 0)?;
        }
        let mut context: BTreeMap<String, Value> = BTreeMap::new();
        let mut put = |key: &str, value: Value| context.insert(key.to_owned(), value);
        put("messages", json(messages));
        put("add_generation_prompt", options.add_generation_prompt.into());
        put("bos_token", options.bos_token.as_str().into());
        put("eos_token", options.eos_token.as_str().into());
        put("tools", options.tools.as_ref().map_or(Value::from(()), json));
        put("documents", options.documents.as_ref().map_or(Value::from(()), json));
        if let Some((seconds, offset)) = options.now {
            let strftime = move |format: &str| {
                clock::strftime(seconds, offset, format)
                    .map_err(|what| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: expected {what}")))
            };
            put("strftime_now", Value::from_function(strftime));
        }
        for (key, value) in &options.extra {
            put(key, json(value));
        }
        // The budget belongs to the call, the compiled templates to all calls: the copy shares them.
        let mut environment = (*self.environment).clone();
        environment.set_fuel(Some(BASE_FUEL + FUEL_PER_BYTE * size as u64));
        environment.get_template(name).and_then(|template| template.render(Value::from(context))).map_err(error)
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("sources", &self.sources).finish_non_exhaustive()
    }
}

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
/// The largest published templates are below 100 KB.
const LONGEST_SOURCE: usize = 1 << 20;
/// A unit is an instruction or 64 bytes; templates of published models take some hundred a message.
const BASE_FUEL: u64 = 200_000;
/// Covers messages that a template looks at dozens of times.
const FUEL_PER_BYTE: u64 = 16;
/// Messages and tools nested deeper than this are refused before anything walks them.
const DEEPEST: usize = 64;
/// The engine recurses for macros and recursive loops; this many levels fit the stack of a small thread.
const RECURSION: usize = 100;

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    // What transformers sets.
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().expect("the default delimiters are valid");
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_unknown_method_callback(|state: &mut State, value: &Value, method: &str, args: &[Value]| {
        if method == "format" && value.as_str().is_some_and(has_wide_field) {
            return Err(Error::new(ErrorKind::InvalidOperation, "format: widths of at most four digits expected"));
        }
        unknown_method_callback(state, value, method, args)
    });
    environment.set_recursion_limit(RECURSION);
    environment.add_filter("tojson", tojson);
    environment.add_filter("sum", sum);
    environment.remove_global("debug");
    environment
        .add_function(tags::CHECK, |state: &State, named: Value| bounded(state, &named, 0).map(|new| new.unwrap_or(named)));
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment
}

/// Bytes of text and 32 for each value: what the work of a template may grow with.
fn size_of(value: &Json, depth: usize) -> Result<usize, TextError> {
    if depth > DEEPEST {
        return Err(TextError::template(format!("values nested at most {DEEPEST} deep expected")));
    }
    Ok(32
        + match value {
            Json::String(text) => text.len(),
            Json::Array(items) => items.iter().try_fold(0, |sum, item| Ok::<_, TextError>(sum + size_of(item, depth + 1)?))?,
            Json::Object(map) => {
                map.iter().try_fold(0, |sum, (key, item)| Ok::<_, TextError>(sum + key.len() + size_of(item, depth + 1)?))?
            }
            _ => 0,
        })
}

/// Walks a value that was just named and charges for each part of it: nothing may be deeper, longer or more tangled than a
/// template has use for. What is lazy inside is computed once and kept, as a chain of lazy steps is walked by recursion; then
/// the new value is given.
fn bounded(state: &State, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
    if depth > DEEPEST {
        let message = format!("values nested at most {DEEPEST} deep expected");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    state.consume_fuel(1)?;
    let kind = value.kind();
    match kind {
        ValueKind::Map => {
            let mut changed = Vec::new();
            for key in value.try_iter()? {
                if let Some(new) = bounded(state, &value.get_item(&key)?, depth + 1)? {
                    changed.push((key, new));
                }
            }
            if changed.is_empty() {
                return Ok(None);
            }
            let mut pairs = Vec::new();
            let mut changed = changed.into_iter().peekable();
            for key in value.try_iter()? {
                let item = match changed.next_if(|(name, _)| *name == key) {
                    Some((_, new)) => new,
                    None => value.get_item(&key)?,
                };
                pairs.push((key, item));
            }
            Ok(Some(Value::from_pairs(pairs)))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let mut items = Vec::new();
            let mut lazy = kind == ValueKind::Iterable;
            for inner in value.try_iter()? {
                let new = bounded(state, &inner, depth + 1)?;
                lazy |= new.is_some();
                items.push(new.unwrap_or(inner));
            }
            Ok(lazy.then(|| Value::from(items)))
        }
        _ => Ok(None),
    }
}

/// A width or precision that Python's `format` would fill a gigabyte for; the method is charged only afterwards.
fn has_wide_field(format: &str) -> bool {
    format.as_bytes().windows(5).any(|digits| digits.iter().all(u8::is_ascii_digit))
}

/// The `sum` filter for numbers. The engine's own also joins lists, each step a longer copy.
fn sum(values: Value, args: Kwargs) -> Result<Value, Error> {
    let number = |value: &Value| f64::try_from(value.clone());
    let attribute: Option<String> = args.get("attribute")?;
    let start: Option<Value> = args.get("start")?;
    args.assert_all_used()?;
    let mut whole = Some(0i64);
    let mut total = 0.0;
    let mut add = |value: &Value| -> Result<(), Error> {
        whole = whole.and_then(|sum| sum.checked_add(i64::try_from(value.clone()).ok().filter(|_| value.is_integer())?));
        total += number(value)?;
        Ok(())
    };
    start.iter().try_for_each(&mut add)?;
    for value in values.try_iter()? {
        match &attribute {
            Some(name) => add(&value.get_attr(name)?)?,
            None => add(&value)?,
        }
    }
    Ok(whole.map_or(Value::from(total), Value::from))
}

fn json(value: &Json) -> Value {
    Value::from(Serde(value))
}

/// The engine's message with its place and its causes.
fn error(error: Error) -> TextError {
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        message.push_str(": ");
        message.push_str(&inner.to_string());
        cause = inner.source();
    }
    TextError::template(message)
}
