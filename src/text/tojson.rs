//! The `tojson` filter as chat templates expect it: Python's `json.dumps(value, ensure_ascii=False)` with keys in their own
//! order, nothing escaped for HTML, and its `indent`, `separators`, `sort_keys` and `ensure_ascii`.
#![forbid(unsafe_code)]

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt::Write;

/// Values nested deeper than this are an error: they come from hostile templates, and the walk is recursive.
const DEEPEST: usize = 128;

/// Writes a value as JSON.
pub(super) fn tojson(state: &State, value: Value, indent: Option<Value>, args: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => args.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => {
                let width = usize::try_from(indent)?;
                if width > 64 {
                    return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: indent: at most 64, found {width}")));
                }
                Some(" ".repeat(width))
            }
        },
    };
    let separators = match args.get::<Option<Value>>("separators")?.filter(|given| !given.is_none()) {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(given) => {
            let mut parts = given.try_iter()?.map(|part| part.as_str().map(str::to_owned));
            match (parts.next().flatten(), parts.next().flatten(), parts.next()) {
                (Some(item), Some(key), None) => (item, key),
                _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators: expected two strings")),
            }
        }
    };
    let mut writer = Writer {
        state,
        out: String::new(),
        charged: 0,
        indent,
        item: separators.0,
        key: separators.1,
        ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    args.assert_all_used()?;
    writer.value(&value, 0)?;
    Ok(Value::from(writer.out))
}

struct Writer<'a, 'env, 'state> {
    state: &'a State<'env, 'state>,
    out: String,
    /// Bytes of `out` that are paid for.
    charged: usize,
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: values nested at most {DEEPEST} deep")));
        }
        self.pay()?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push('[');
                let mut any = false;
                for inner in value.try_iter()? {
                    self.separate(any, depth + 1);
                    any = true;
                    self.value(&inner, depth + 1)?;
                }
                self.close(any, depth, ']');
            }
            ValueKind::Map => {
                self.out.push('{');
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                let any = !keys.is_empty();
                for (i, key) in keys.iter().enumerate() {
                    self.separate(i > 0, depth + 1);
                    match key.kind() {
                        ValueKind::Bool => self.string(if key.is_true() { "true" } else { "false" }),
                        ValueKind::None => self.string("null"),
                        _ => self.string(&key.to_string()),
                    }
                    let between = std::mem::take(&mut self.key);
                    self.out.push_str(&between);
                    self.key = between;
                    self.value(&value.get_item(key)?, depth + 1)?;
                }
                self.close(any, depth, '}');
            }
            other => {
                let message = format!("tojson: a value that JSON can hold, found {other}");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    fn separate(&mut self, not_first: bool, depth: usize) {
        if not_first {
            self.out.push_str(&self.item);
        }
        self.line(depth);
    }

    fn close(&mut self, any: bool, depth: usize, bracket: char) {
        if any {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").expect("a String takes everything");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    /// Charges what was written since the last call, one unit for 16 bytes, so that no template makes it endless.
    fn pay(&mut self) -> Result<(), Error> {
        let new = self.out.len() - self.charged;
        self.charged = self.out.len();
        self.state.consume_fuel(1 + new as u64 / 16)
    }
}
