//! A command line for the examples: `--name value`, `--name=value`, flags, positional words. No dependency, so that the
//! library's users build none.
//!
//! A name that is not declared is an error, and so is a value that does not parse: messages name the option.
// Each example uses its part of this.
#![allow(dead_code)]

use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

/// What a program understands.
pub(crate) struct Usage {
    pub(crate) program: &'static str,
    /// One line: what the program does.
    pub(crate) about: &'static str,
    /// How the positional words are called in the usage line; empty where there are none, and then any is an error.
    pub(crate) words: &'static str,
    pub(crate) options: &'static [Opt],
}

/// One option.
#[derive(Clone, Copy)]
pub(crate) struct Opt {
    /// With its dashes: `--max-tokens`.
    pub(crate) name: &'static str,
    /// What stands for the value in the help, `N` or `PATH`; empty for a flag.
    pub(crate) value: &'static str,
    pub(crate) help: &'static str,
}

/// A command line that was understood.
#[derive(Debug, PartialEq)]
pub(crate) struct Args {
    /// Names with their values, flags with an empty one.
    options: Vec<(&'static str, OsString)>,
    words: Vec<OsString>,
}

/// A value that does not do, by the option's name: a mistake of the caller's, like an unknown option.
#[derive(Debug, PartialEq)]
pub(crate) struct Wrong(pub(crate) String);

impl Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

/// Why there is nothing to run.
#[derive(Debug, PartialEq)]
pub(crate) enum Stop {
    /// Asked for: the text belongs on standard output.
    Help(String),
    /// A mistake, with the usage line.
    Wrong(String),
}

impl Usage {
    /// The arguments of this process. Prints the help and exits with 0 if asked for (with 1 where nobody reads it), prints a
    /// mistake and exits with 2.
    pub(crate) fn read(&self) -> Args {
        match self.parse(std::env::args_os().skip(1)) {
            Ok(args) => args,
            Err(Stop::Help(text)) => std::process::exit(i32::from(writeln!(std::io::stdout(), "{text}").is_err())),
            Err(Stop::Wrong(text)) => {
                let _ = writeln!(std::io::stderr(), "{text}");
                std::process::exit(2)
            }
        }
    }

    /// Of an option that is given twice the last one counts. `--` ends the options.
    pub(crate) fn parse(&self, args: impl IntoIterator<Item = OsString>) -> Result<Args, Stop> {
        let mut args = args.into_iter();
        let mut parsed = Args { options: Vec::new(), words: Vec::new() };
        let mut ended = false;
        while let Some(arg) = args.next() {
            let dashed = arg.as_encoded_bytes().starts_with(b"-") && arg.len() > 1 && !ended;
            if !dashed {
                if self.words.is_empty() {
                    return Err(self.wrong(&format!("no words are expected, found {}", arg.display())));
                }
                parsed.words.push(arg);
                continue;
            }
            if arg == "--" {
                ended = true;
                continue;
            }
            if arg == "--help" || arg == "-h" {
                return Err(Stop::Help(self.help()));
            }
            let text = arg.to_str().ok_or_else(|| self.wrong(&format!("unknown option {}", arg.display())))?;
            let (name, joined) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
            let option = self.options.iter().find(|option| option.name == name);
            let option = option.ok_or_else(|| self.wrong(&format!("unknown option {name}")))?;
            let value = match (option.value, joined) {
                ("", None) => OsString::new(),
                ("", Some(value)) => return Err(self.wrong(&format!("{name} takes no value, found {value}"))),
                (_, Some(value)) => value.into(),
                (what, None) => args
                    .next()
                    .filter(|value| !value.as_encoded_bytes().starts_with(b"--"))
                    .ok_or_else(|| self.wrong(&format!("{name} needs a value: {name} {what}")))?,
            };
            parsed.options.retain(|(earlier, _)| *earlier != option.name);
            parsed.options.push((option.name, value));
        }
        Ok(parsed)
    }

    /// The usage line with every option explained.
    pub(crate) fn help(&self) -> String {
        let left = |option: &Opt| format!("{} {}", option.name, option.value);
        let width = self.options.iter().map(|option| left(option).len()).max().unwrap_or(0);
        let lines = self.options.iter().map(|option| format!("\n  {:width$}  {}", left(option), option.help));
        format!("{}\n\n{}\n{}", self.about, self.line(), lines.collect::<String>())
    }

    fn line(&self) -> String {
        let mut parts = vec!["usage:", self.program];
        parts.extend((!self.options.is_empty()).then_some("[options]"));
        parts.extend((!self.words.is_empty()).then_some(self.words));
        parts.join(" ")
    }

    fn wrong(&self, what: &str) -> Stop {
        Stop::Wrong(format!("{}: {what}\n{}\n--help explains the options", self.program, self.line()))
    }
}

impl Args {
    /// True if the flag was given.
    pub(crate) fn flag(&self, name: &str) -> bool {
        self.raw(name).is_some()
    }

    /// The value as a path, in whatever encoding the system has.
    pub(crate) fn path(&self, name: &str) -> Option<PathBuf> {
        self.raw(name).map(PathBuf::from)
    }

    /// The value as text.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>, Wrong> {
        let utf8 = |value: &'_ OsString| Wrong(format!("{name}: expected UTF-8, found {}", value.display()));
        self.raw(name).map(|value| value.to_str().ok_or_else(|| utf8(value))).transpose()
    }

    /// The value as a number within `range`, or `default` where the option was not given.
    pub(crate) fn number<T>(&self, name: &str, default: T, range: RangeInclusive<T>) -> Result<T, Wrong>
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some(text) = self.text(name)? else { return Ok(default) };
        let number = text.parse().ok().filter(|number| range.contains(number));
        number
            .ok_or_else(|| Wrong(format!("{name}: expected a number from {} to {}, found {text:?}", range.start(), range.end())))
    }

    /// The value as numbers between commas.
    pub(crate) fn list<T: FromStr>(&self, name: &str) -> Result<Option<Vec<T>>, Wrong> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let numbers = text.split(',').map(|part| {
            let wrong = || Wrong(format!("{name}: expected numbers between commas, found {part:?} in {text:?}"));
            part.trim().parse().map_err(|_| wrong())
        });
        numbers.collect::<Result<Vec<T>, Wrong>>().map(Some)
    }

    /// The positional words.
    pub(crate) fn words(&self) -> &[OsString] {
        &self.words
    }

    /// The positional words as one text, a space between them.
    pub(crate) fn sentence(&self) -> Result<String, Wrong> {
        let wrong = |word: &OsString| Wrong(format!("expected UTF-8, found {}", word.display()));
        let word = |word: &OsString| word.to_str().map(str::to_owned).ok_or_else(|| wrong(word));
        Ok(self.words.iter().map(word).collect::<Result<Vec<_>, _>>()?.join(" "))
    }

    fn raw(&self, name: &str) -> Option<&OsString> {
        self.options.iter().find(|(given, _)| *given == name).map(|(_, value)| value)
    }
}
