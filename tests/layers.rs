//! The layers of the crate, held by reading its source: who may import whom, where `unsafe` may stand, what pure modules
//! may not touch, how long a file may be.
//!
//! A small lexer drops comments, strings and lifetimes; every path that starts at `crate`, `super` or `self` is resolved,
//! in `use` trees and in the middle of code, tests included.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

/// A module and the modules whose names it may speak. Layer 0 is in every list without saying. What is below the engine
/// and not listed is off limits; a module that is missing here fails the test until someone decides where it belongs.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("dtype", &[]),
    ("ids", &[]),
    ("sync", &[]),
    ("weights", &[]),
    ("quant", &[]),
    ("arch", &[]),
    ("cache", &[]),
    ("sample", &[]),
    ("spec", &["sample"]),
    ("text", &[]),
    ("batch", &["cache", "sample", "spec"]),
    ("sched", &["cache", "sample", "spec"]),
    ("backend", &["sync", "weights", "quant", "arch", "batch"]),
    ("model", &["weights", "quant", "arch", "cache", "sample", "spec", "text", "batch", "backend"]),
    ("engine", &["sync", "weights", "quant", "arch", "cache", "sample", "spec", "text", "batch", "sched", "backend", "model"]),
    ("session", &["engine", "model", "text", "sample"]),
];
const LAYER_0: &[&str] = &["error", "dtype", "ids"];

/// Where `unsafe` may stand: files, and folders with a slash at the end. `forbid` reaches down into submodules, so the
/// modules above these cannot carry it either; they must do without the word instead.
const UNSAFE: &[&str] = &["weights/map.rs", "weights/safetensors.rs", "backend/cpu/", "backend/cuda/"];

/// No I/O, clock or thread in these: time comes in as a `Duration`, bytes as slices.
const PURE: &[&str] = &["arch", "cache", "sample", "spec", "batch", "sched"];
const IMPURE: &[&[&str]] = &[
    &["std", "fs"],
    &["std", "io"],
    &["std", "net"],
    &["std", "env"],
    &["std", "process"],
    &["std", "thread"],
    &["std", "time", "Instant"],
    &["std", "time", "SystemTime"],
    &["crossbeam"],
    &["memmap2"],
    &["parking_lot"],
];

const MAX_LINES: usize = 600;
/// The line in a module's header that excuses a longer file, followed by the reason.
const LENGTH: &str = "//! Length:";

#[test]
fn the_source_keeps_its_layers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    list(&root, &mut files);
    assert!(files.len() > 10, "no source under {}", root.display());
    let mut faults = Vec::new();
    for file in files {
        let name = file.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
        faults.extend(faults_of(&name, &std::fs::read_to_string(&file).unwrap()));
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

fn list(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => list(&path, out),
            false if path.extension().is_some_and(|e| e == "rs") => out.push(path),
            false => {}
        }
    }
}

/// Everything that is wrong with one file; `name` is its path under `src/`.
fn faults_of(name: &str, text: &str) -> Vec<String> {
    let tokens = lex(text);
    let module = module_of(name);
    let mut faults = Vec::new();
    for path in paths(&tokens, &module) {
        if let Some(fault) = import_fault(&module, &path) {
            faults.push(format!("src/{name}:{}: {}: {fault}", path.line, path.segments.join("::")));
        }
    }
    faults.extend(unsafe_fault(name, &tokens).map(|fault| format!("src/{name}: {fault}")));
    let lines = text.lines().count();
    let header = text.lines().take_while(|line| line.starts_with("//!"));
    let excused = header.into_iter().any(|line| line.strip_prefix(LENGTH).is_some_and(|reason| !reason.trim().is_empty()));
    if lines > MAX_LINES && !excused {
        faults.push(format!("src/{name}: {lines} lines, {MAX_LINES} allowed without a `{LENGTH}` line in the header"));
    }
    faults
}

fn import_fault(module: &[String], path: &Found) -> Option<String> {
    let from = module.first()?.as_str();
    if !path.inside {
        let impure =
            IMPURE.iter().any(|bad| path.segments.len() >= bad.len() && bad.iter().zip(&path.segments).all(|(b, s)| b == s));
        return (PURE.contains(&from) && impure && !path.in_tests).then(|| format!("{from} is a pure module"));
    }
    let to = path.segments.first()?.as_str();
    let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == from) else {
        return Some(format!("{from} has no place in the table of layers"));
    };
    if from == "backend" && to == "backend" {
        let (own, other) = (module.get(1).map(String::as_str), path.segments.get(1).map(String::as_str));
        let apart = matches!((own, other), (Some("cpu"), Some("cuda")) | (Some("cuda"), Some("cpu")));
        return apart.then(|| "one device imports the other".to_owned());
    }
    if from == to || LAYER_0.contains(&to) || allowed.contains(&to) {
        return None;
    }
    Some(match MAY_IMPORT.iter().any(|(name, _)| *name == to) {
        true => format!("{from} may not import {to}"),
        false => format!("{to} is no module of the table: import from where a name is defined, not from the crate's root"),
    })
}

fn unsafe_fault(name: &str, tokens: &[Token]) -> Option<String> {
    let may = UNSAFE.iter().any(|&place| name == place || place.ends_with('/') && name.starts_with(place));
    if may || tokens.is_empty() {
        return None;
    }
    let forbids = spells(tokens, &["#", "!", "[", "forbid", "(", "unsafe_code", ")", "]"]);
    let folder = name.strip_suffix("mod.rs").map_or_else(|| format!("{}/", name.trim_end_matches(".rs")), str::to_owned);
    let above = name == "lib.rs" || UNSAFE.iter().any(|place| place.starts_with(&folder));
    if above {
        let line = tokens.iter().find(|t| t.text == "unsafe")?.line;
        return Some(format!("line {line}: unsafe, where the module only stands above those that may use it"));
    }
    (!forbids).then(|| "#![forbid(unsafe_code)] is missing at the top".to_owned())
}

fn spells(tokens: &[Token], words: &[&str]) -> bool {
    tokens.windows(words.len()).any(|window| window.iter().zip(words).all(|(token, word)| token.text == *word))
}

/// `arch/llama.rs` is `[arch, llama]`, `arch/mod.rs` and `arch.rs` are `[arch]`, `lib.rs` is the root.
fn module_of(name: &str) -> Vec<String> {
    let mut module: Vec<String> = name.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
        module.pop();
    }
    module
}

#[derive(Debug)]
struct Found {
    segments: Vec<String>,
    line: usize,
    /// Of this crate, with the segments counted from its root.
    inside: bool,
    in_tests: bool,
}

/// All paths of a file: those of this crate resolved from its root, others as they are written.
fn paths(tokens: &[Token], module: &[String]) -> Vec<Found> {
    let mut found = Vec::new();
    // Inline modules that are open, each with the brace depth inside it: `super` counts them.
    let mut inline: Vec<(String, usize)> = Vec::new();
    let mut depth = 0;
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].text.as_str() {
            "{" => depth += 1,
            "}" => {
                inline.pop_if(|(_, opened)| *opened == depth);
                depth -= 1;
            }
            "mod" if text(tokens, at + 2) == "{" => {
                inline.push((tokens[at + 1].text.clone(), depth + 1));
            }
            word if is_word(word) && text(tokens, at + 1) == "::" && (at == 0 || text(tokens, at - 1) != "::") => {
                let here: Vec<String> = module.iter().cloned().chain(inline.iter().map(|(name, _)| name.clone())).collect();
                let mut leaves = Vec::new();
                at = tree(tokens, at, &[], &mut leaves);
                for (segments, line) in leaves {
                    let in_tests = inline.iter().any(|(name, _)| name == "tests");
                    let resolved = resolve(&here, &segments);
                    let inside = resolved.is_some();
                    found.push(Found { segments: resolved.unwrap_or(segments), line, inside, in_tests });
                }
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// Reads `a::b`, `a::{b, c::d}` or `a::*` from `at`; returns where it ends.
fn tree(tokens: &[Token], mut at: usize, prefix: &[String], leaves: &mut Vec<(Vec<String>, usize)>) -> usize {
    let mut segments = prefix.to_vec();
    let line = tokens[at].line;
    while is_word(text(tokens, at)) {
        segments.push(tokens[at].text.clone());
        if text(tokens, at + 1) != "::" {
            leaves.push((segments, line));
            return at + 1;
        }
        at += 2;
    }
    if text(tokens, at) != "{" {
        // A glob, or the `<` of a turbofish.
        leaves.push((segments, line));
        return at;
    }
    at += 1;
    while !matches!(text(tokens, at), "}" | "") {
        let before = at;
        at = tree(tokens, at, &segments, leaves);
        while !matches!(text(tokens, at), "," | "}" | "") {
            at += 1;
        }
        at += usize::from(text(tokens, at) == ",");
        assert!(at > before || matches!(text(tokens, at), "}" | ""), "the reader of use trees is stuck");
    }
    at + 1
}

/// The path from the crate's root, or `None` for one that starts in another crate or at a local name.
fn resolve(here: &[String], segments: &[String]) -> Option<Vec<String>> {
    let mut base = match segments.first()?.as_str() {
        "crate" => Vec::new(),
        "self" => here.to_vec(),
        "super" => here[..here.len().saturating_sub(1)].to_vec(),
        _ => return None,
    };
    for segment in &segments[1..] {
        match segment.as_str() {
            "super" => {
                base.pop();
            }
            "self" => {}
            other => base.push(other.to_owned()),
        }
    }
    Some(base)
}

#[derive(Debug)]
struct Token {
    text: String,
    line: usize,
}

fn text(tokens: &[Token], at: usize) -> &str {
    tokens.get(at).map_or("", |token| token.text.as_str())
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c == '_' || c.is_alphabetic())
}

/// Words, `::` and single marks. Comments, string and character literals, numbers' suffixes and lifetimes are gone.
fn lex(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let peek = |at: usize| chars.get(at).copied().unwrap_or('\0');
    let word_end = |mut at: usize| {
        while peek(at) == '_' || peek(at).is_alphanumeric() {
            at += 1;
        }
        at
    };
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    while at < chars.len() {
        let start = at;
        let mut word = None;
        match (chars[at], peek(at + 1)) {
            ('/', '/') => {
                while at < chars.len() && chars[at] != '\n' {
                    at += 1;
                }
            }
            ('/', '*') => at = comment_end(&chars, at),
            ('"', _) => at = string_end(&chars, at, 0),
            ('\'', _) if peek(at + 2) == '\'' && peek(at + 1) != '\\' => at += 3,
            ('\'', '\\') => {
                at += 3;
                while at < chars.len() && chars[at] != '\'' {
                    at += 1;
                }
                at += 1;
            }
            ('\'', _) => at = word_end(at + 1),
            (':', ':') => {
                word = Some("::".to_owned());
                at += 2;
            }
            (c, _) if c == '_' || c.is_alphanumeric() => {
                at = word_end(at);
                let name: String = chars[start..at].iter().collect();
                let hashes = (at..).take_while(|&i| peek(i) == '#').count();
                let raw = matches!(name.as_str(), "r" | "br" | "cr");
                if peek(at + hashes) == '"' && (raw || hashes == 0 && matches!(name.as_str(), "b" | "c")) {
                    at = string_end(&chars, at + hashes, if raw { hashes + 1 } else { 0 });
                } else if !c.is_numeric() {
                    word = Some(name);
                }
            }
            (c, _) => {
                word = (!c.is_whitespace()).then(|| c.to_string());
                at += 1;
            }
        }
        tokens.extend(word.map(|text| Token { text, line }));
        line += chars[start..at.min(chars.len())].iter().filter(|&&c| c == '\n').count();
    }
    tokens
}

fn comment_end(chars: &[char], mut at: usize) -> usize {
    let mut depth = 0;
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// From the opening quote to behind the closing one. `raw` is 0 for a string with escapes, else 1 + its hashes.
fn string_end(chars: &[char], quote: usize, raw: usize) -> usize {
    let mut at = quote + 1;
    while at < chars.len() {
        match chars[at] {
            '\\' if raw == 0 => at += 1,
            '"' if raw == 0 => return at + 1,
            '"' if chars[at + 1..].iter().take_while(|&&c| c == '#').count() >= raw - 1 => return at + raw,
            _ => {}
        }
        at += 1;
    }
    at
}

/// The checker itself: what must fail does, what must not does not.
#[test]
fn snippets() {
    let safe = |body: &str| format!("//! Doc.\n#![forbid(unsafe_code)]\n{body}");
    let bad = [
        ("weights/gguf.rs", "use crate::quant::Format;", "weights may not import quant"),
        ("weights/gguf.rs", "use super::super::quant::Format;", "weights may not import quant"),
        ("weights/mod.rs", "use super::quant::Format;", "weights may not import quant"),
        ("cache/mod.rs", "use crate::{ids::BlockId, engine::{Engine}};", "cache may not import engine"),
        ("cache/mod.rs", "use crate::{\n    ids::{BlockId, SeqId},\n    sched::*,\n};", "src/cache/mod.rs:5"),
        ("quant/q8.rs", "fn f() -> usize { 1 + crate::backend::cpu::N }", "quant may not import backend"),
        ("quant/q8.rs", "fn f<'a>(c: char) { if c == '\"' { crate::text::g::<u8>(\"x\") } }", "quant may not import text"),
        ("quant/q8.rs", "pub(crate) use crate::text::g;", "quant may not import text"),
        ("quant/q8.rs", "pub(in crate::quant) fn f(x: &dyn crate::model::Model) {}", "quant may not import model"),
        ("arch/mod.rs", "mod tests { use super::super::text; }", "arch may not import text"),
        ("arch/mod.rs", "mod a { mod b {} use super::super::text; }", "arch may not import text"),
        ("arch/mod.rs", "macro_rules! m { () => { $crate::text::f() } }", "arch may not import text"),
        ("sched/mod.rs", "use crate::backend::Backend;", "sched may not import backend"),
        ("backend/mod.rs", "use crate::sched::Ledger;", "backend may not import sched"),
        ("backend/cpu/mod.rs", "use crate::backend::cuda::X;", "one device imports the other"),
        ("backend/cuda/mod.rs", "use super::cpu::X;", "one device imports the other"),
        ("model/mod.rs", "use crate::sched::Ledger;", "model may not import sched"),
        ("spec/mod.rs", "use crate::cache::BlockPool;", "spec may not import cache"),
        ("session.rs", "use crate::backend::Backend;", "session may not import backend"),
        ("cache/mod.rs", "use crate::TokenId;", "no module of the table"),
        ("extra.rs", "use crate::ids::TokenId;", "no place in the table"),
        ("sched/mod.rs", "use std::{fmt, time::{Duration, Instant}};", "pure module"),
        ("cache/mod.rs", "fn f() { std::thread::yield_now() }", "pure module"),
        ("weights/mod.rs", "fn f() { unsafe { g() } }", "unsafe, where"),
        ("lib.rs", "fn f() { unsafe { g() } }", "unsafe, where"),
    ];
    for (name, body, expected) in bad {
        let faults = faults_of(name, &safe(body));
        assert!(faults.len() == 1 && faults[0].contains(expected), "{name}: {body}: {faults:?}");
    }
    let good = [
        ("spec/mod.rs", "use crate::sample::Sampler;"),
        ("weights/gguf.rs", "use super::TensorView; use crate::dtype::FormatId; pub(crate) fn f() {}"),
        (
            "weights/gguf.rs",
            "// use crate::quant::A;\n/* crate::quant /* crate::engine::B */ */\n/// [`crate::quant`]\nfn f() {}",
        ),
        (
            "weights/gguf.rs",
            "fn f() -> [&'static str; 3] { [\"crate::quant\", r#\"\" crate::quant::X\"#, \"\\\" crate::quant::X\"] }",
        ),
        ("weights/gguf.rs", "mod tests { use super::*; use crate::ids::TokenId; fn f() { self::g(); super::g() } }"),
        ("engine/mod.rs", "use crate::{sched::Ledger, model::Model, backend::cpu::Cpu}; fn f() { std::thread::yield_now() }"),
        ("lib.rs", "pub mod engine; pub use engine::Engine; pub use crate::session::Session;"),
        ("cache/mod.rs", "use std::time::Duration; mod tests { fn f() { std::fs::read(\"x\"); } }"),
        ("backend/cpu/simd/avx2.rs", "use crate::backend::cpu::K; fn f() { unsafe { g() } }"),
    ];
    for (name, body) in good {
        assert_eq!(faults_of(name, &safe(body)), Vec::<String>::new(), "{name}: {body}");
    }
}

#[test]
fn headers() {
    let long = |header: &str| format!("{header}\n#![forbid(unsafe_code)]\n{}", "fn f() {}\n".repeat(MAX_LINES));
    assert!(faults_of("cache/mod.rs", &long("//! Doc."))[0].contains("602 lines"));
    assert!(faults_of("cache/mod.rs", &long("//! Length:"))[0].contains("602 lines"));
    assert!(faults_of("cache/mod.rs", &long("//! Doc.\n//! Length: one table, and a table has no seams")).is_empty());
    assert!(faults_of("cache/mod.rs", "//! Doc.\nfn f() {}")[0].contains("forbid"));
    assert!(faults_of("cache/mod.rs", "//! Doc.\n// #![forbid(unsafe_code)]\nfn f() {}")[0].contains("forbid"));
    for excused in ["lib.rs", "weights/mod.rs", "weights/map.rs", "backend/mod.rs", "backend/cpu/attn.rs"] {
        assert!(faults_of(excused, "//! Doc.\nfn f() {}").is_empty(), "{excused}");
    }
    assert!(faults_of("cache/mod.rs", "//! Nothing in it yet.\n").is_empty());
}
