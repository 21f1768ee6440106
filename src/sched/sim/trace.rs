//! Requests out of a text: one a line, numbers between commas.
//!
//! ```text
//! # Anything after a # is a remark.
//! seconds,prompt_tokens,output_tokens,priority,deadline_s,cancel_s,prefix_tokens,prefix
//! 0.0,    120,          32,           0,       ,          ,        ,
//! 0.25,   900,          8,            1,       2.5,       ,        512,          7
//! ```
//!
//! The first line may name the columns, in any order, those after the third if they are wanted; without it there are the first three.
//! An empty place is a 0, or nothing where there need not be one. Lines need not be in the order of time.
#![forbid(unsafe_code)]

use super::{Arrival, SimError};
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

/// Reads a text of the form above; the requests come back in the order of their arrival. Cost: O(text), and a sort.
///
/// # Errors
/// [`SimError::Trace`] with the line, what was expected and what is there.
pub fn parse_trace(text: &str) -> Result<Vec<Arrival>, SimError> {
    let mut columns = vec![Column::Seconds, Column::PromptTokens, Column::OutputTokens];
    let mut first = true;
    let mut list = Vec::new();
    for (k, line) in text.lines().enumerate() {
        let line = Line { number: k + 1, text: line.split_once('#').map_or(line, |(text, _)| text).trim() };
        if line.text.is_empty() {
            continue;
        }
        if std::mem::take(&mut first) && line.text.starts_with(|c: char| c.is_ascii_alphabetic()) {
            columns = line.columns()?;
            continue;
        }
        list.push(line.arrival(&columns)?);
    }
    list.sort_by_key(|a| a.at);
    Ok(list)
}

struct Line<'a> {
    /// From 1.
    number: usize,
    text: &'a str,
}

impl Line<'_> {
    fn columns(&self) -> Result<Vec<Column>, SimError> {
        let mut columns = Vec::new();
        for name in self.text.split(',').map(str::trim) {
            let column = COLUMNS.iter().find(|(n, _)| *n == name).map(|(_, c)| *c);
            let known = || COLUMNS.map(|(n, _)| n).join(", ");
            let column = column.ok_or_else(|| self.wrong("columns", format!("names out of: {}", known()), name))?;
            if columns.contains(&column) {
                return Err(self.wrong("columns", "each name once", name));
            }
            columns.push(column);
        }
        for (name, needed) in &COLUMNS[..NEEDED] {
            if !columns.contains(needed) {
                return Err(self.wrong("columns", format!("{name} among them"), self.text));
            }
        }
        Ok(columns)
    }

    fn arrival(&self, columns: &[Column]) -> Result<Arrival, SimError> {
        let mut a = Arrival::default();
        let found = self.text.split(',').count();
        if found != columns.len() {
            return Err(self.wrong("numbers", format!("{} between commas", columns.len()), found));
        }
        for (column, text) in columns.iter().zip(self.text.split(',').map(str::trim)) {
            match column {
                Column::Seconds => a.at = self.time("seconds", text)?.unwrap_or_default(),
                Column::PromptTokens => a.prompt_tokens = self.number("prompt_tokens", text)?,
                Column::OutputTokens => a.output_tokens = self.number("output_tokens", text)?,
                Column::Priority => a.priority = self.number("priority", text)?,
                Column::Deadline => a.deadline = self.time("deadline_s", text)?,
                Column::Cancel => a.cancel = self.time("cancel_s", text)?,
                Column::PrefixTokens => a.prefix_tokens = self.number("prefix_tokens", text)?,
                Column::Prefix => a.prefix = self.number("prefix", text)?,
            }
        }
        for (name, tokens) in [("prompt_tokens", a.prompt_tokens), ("output_tokens", a.output_tokens)] {
            if tokens == 0 {
                return Err(self.wrong(name, "at least 1", 0));
            }
        }
        if a.prefix_tokens > a.prompt_tokens {
            let expected = format!("at most the prompt's {}", a.prompt_tokens);
            return Err(self.wrong("prefix_tokens", expected, a.prefix_tokens));
        }
        Ok(a)
    }

    fn number<T: FromStr + Default>(&self, name: &'static str, text: &str) -> Result<T, SimError> {
        if text.is_empty() {
            return Ok(T::default());
        }
        text.parse().map_err(|_| self.wrong(name, "a whole number within its range", text))
    }

    fn time(&self, name: &'static str, text: &str) -> Result<Option<Duration>, SimError> {
        if text.is_empty() {
            return Ok(None);
        }
        let seconds = text.parse::<f64>().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
        seconds.map(Some).ok_or_else(|| self.wrong(name, "seconds, 0 to 2^64 - 1", text))
    }

    fn wrong(&self, field: &'static str, expected: impl Into<String>, found: impl Display) -> SimError {
        // A line can be as long as its file.
        let found = found.to_string();
        let found = match found.char_indices().nth(MAX_SHOWN) {
            Some((end, _)) => format!("{}...", &found[..end]),
            None => found,
        };
        SimError::Trace { line: self.number, field, expected: expected.into(), found }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Column {
    Seconds,
    PromptTokens,
    OutputTokens,
    Priority,
    Deadline,
    Cancel,
    PrefixTokens,
    Prefix,
}

const COLUMNS: [(&str, Column); 8] = [
    ("seconds", Column::Seconds),
    ("prompt_tokens", Column::PromptTokens),
    ("output_tokens", Column::OutputTokens),
    ("priority", Column::Priority),
    ("deadline_s", Column::Deadline),
    ("cancel_s", Column::Cancel),
    ("prefix_tokens", Column::PrefixTokens),
    ("prefix", Column::Prefix),
];
/// The first so many must be there.
const NEEDED: usize = 3;
/// Characters of a mistake that are shown.
const MAX_SHOWN: usize = 60;
