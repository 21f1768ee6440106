//! What real templates write and the template engine does not know, rewritten before it reads them: `{% generation %}` and
//! `{% endgeneration %}`, which mark the assistant's words for training and let their content through, become a condition that
//! always holds, so that white-space control around them keeps its meaning. Strings, comments and raw blocks stay as they are.
//!
//! A tag of more than [`MOST_WORDS`] words is refused: the engine recurses once for each operator of an expression. And a check goes in after every tag that gives a value a name ([`CHECK`]): values that grow with each round of a loop, by
//! nesting or by doubling, do so through a name, and the engine itself bounds neither.
#![forbid(unsafe_code)]

use crate::error::TextError;

/// The function that looks at a value just named and gives it back, or what to keep in its place.
pub(super) const CHECK: &str = "__loquat_bounded";

/// The longest tags of published templates have some two hundred.
const MOST_WORDS: usize = 1000;
/// The engine recurses once for each branch of a condition, too.
const MOST_BRANCHES: usize = 500;

/// The template with those tags rewritten.
pub(super) fn rewrite(source: &str) -> Result<String, TextError> {
    let mut out = String::with_capacity(source.len() + 64);
    let mut rest = source;
    let mut branches = 0;
    while let Some((text, opening, inside)) = next_tag(rest) {
        out.push_str(text);
        out.push_str(opening);
        let close = match opening {
            "{#" => "#}",
            "{{" => "}}",
            _ => "%}",
        };
        let Some(len) = tag_len(inside, close) else {
            // An unfinished tag: the engine says where.
            rest = inside;
            break;
        };
        let (tag, after) = inside.split_at(len);
        let words = if opening == "{#" { 0 } else { count_words(tag) };
        if words > MOST_WORDS {
            let line = source[..source.len() - inside.len()].lines().count();
            return Err(TextError::template(format!(
                "a tag of at most {MOST_WORDS} words expected, found {words} (line {line})"
            )));
        }
        if opening != "{%" {
            out.push_str(tag);
            rest = after;
            continue;
        }
        let body = &tag[..tag.len() - close.len()];
        match tag_words(body) {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            "raw" => {
                out.push_str(tag);
                let end = raw_end(after);
                out.push_str(&after[..end]);
                rest = &after[end..];
                continue;
            }
            words => {
                branches += usize::from(words.starts_with("elif"));
                if branches > MOST_BRANCHES {
                    return Err(TextError::template(format!("at most {MOST_BRANCHES} elif tags expected, found more")));
                }
                out.push_str(tag);
                if let Some(names) = named(words) {
                    // The same mark at the end, so that what follows is trimmed as before.
                    let mark = body.chars().next_back().filter(|mark| matches!(mark, '-' | '+'));
                    let mark = mark.map(String::from).unwrap_or_default();
                    let names = names.trim();
                    let single = words.starts_with("set") && !names.contains(['(', ',', '[']);
                    if let Some(attributes) = namespace(words).filter(|_| single) {
                        // It stays the namespace that it is, with its attributes looked at.
                        for name in attributes {
                            out.push_str(&format!("{{% set {names}.{name} = {CHECK}({names}.{name}) {mark}%}}"));
                        }
                    } else if single {
                        out.push_str(&format!("{{% set {names} = {CHECK}({names}) {mark}%}}"));
                    }
                    if !single || namespace(words).is_some() {
                        out.push_str(&format!("{{% do {CHECK}([{names}]) {mark}%}}"));
                    }
                }
            }
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

/// Words and signs of a tag; a string is one.
fn count_words(tag: &str) -> usize {
    let bytes = tag.as_bytes();
    let (mut words, mut at) = (0, 0);
    while at < bytes.len() {
        let byte = bytes[at];
        at += 1;
        if byte == b'"' || byte == b'\'' {
            while at < bytes.len() && bytes[at] != byte {
                at += 1 + usize::from(bytes[at] == b'\\');
            }
            at += 1;
        } else if byte.is_ascii_whitespace() {
            continue;
        } else if !byte.is_ascii_punctuation() {
            while at < bytes.len() && !bytes[at].is_ascii_whitespace() && !bytes[at].is_ascii_punctuation() {
                at += 1;
            }
        }
        words += 1;
    }
    words
}

/// The text before the first tag, what opens the tag, and what follows.
fn next_tag(source: &str) -> Option<(&str, &str, &str)> {
    let at = source.as_bytes().windows(2).position(|pair| matches!(pair, b"{{" | b"{%" | b"{#"))?;
    Some((&source[..at], &source[at..at + 2], &source[at + 2..]))
}

/// Bytes up to and with the end of a tag; in a tag, not in a comment, strings may hold what looks like its end.
fn tag_len(inside: &str, close: &str) -> Option<usize> {
    let bytes = inside.as_bytes();
    if close == "#}" {
        return inside.find(close).map(|at| at + 2);
    }
    let mut braces = 0usize;
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            quote @ (b'"' | b'\'') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
            }
            b'{' => braces += 1,
            // The braces of a map inside an expression do not end it.
            b'}' if braces > 0 => braces -= 1,
            _ if bytes[at..].starts_with(close.as_bytes()) => return Some(at + 2),
            _ => {}
        }
        at += 1;
    }
    None
}

/// What a block tag says, without the marks of white-space control.
fn tag_words(body: &str) -> &str {
    body.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}

/// The names that a tag gives values to, with commas between.
fn named(words: &str) -> Option<String> {
    let keyword = words.find(|c: char| !c.is_ascii_alphabetic())?;
    let (keyword, rest) = words.split_at(keyword);
    let names = match keyword {
        "set" => assigned(rest)?.to_owned(),
        "for" => {
            let mut words = rest.split_whitespace();
            let names: Vec<&str> = words.by_ref().take_while(|&word| word != "in").collect();
            words.next()?;
            names.join(" ")
        }
        "with" => list(top_level(rest).into_iter().filter_map(assigned)),
        "macro" | "call" => {
            let open = rest.find('(')?;
            // `{% call m(x) %}` calls with x and names nothing; `{% call(x) m() %}` names x.
            if keyword == "call" && !rest[..open].trim().is_empty() {
                return None;
            }
            let inside = &rest[open + 1..];
            let close = top_level_end(inside);
            list(top_level(&inside[..close]).into_iter().map(|name| assigned(name).unwrap_or(name)))
        }
        _ => return None,
    };
    (!names.trim().is_empty()).then_some(names)
}

/// The attributes that `set x = namespace(a=1, b=2)` names; `None` for any other tag.
fn namespace(words: &str) -> Option<Vec<&str>> {
    let inside = words.split_once('=')?.1.trim_start().strip_prefix("namespace")?.trim_start().strip_prefix('(')?;
    let close = top_level_end(inside);
    Some(top_level(&inside[..close]).into_iter().filter_map(assigned).map(str::trim).collect())
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(str::trim).filter(|name| !name.is_empty()).collect::<Vec<_>>().join(", ")
}

/// What stands before the `=` of an assignment.
fn assigned(source: &str) -> Option<&str> {
    let (names, value) = source.split_once('=')?;
    (!value.starts_with('=') && !names.contains(['"', '\'', '|', '!', '<', '>'])).then_some(names)
}

/// The parts between commas that are in no bracket and no string.
fn top_level(source: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = source;
    loop {
        let end = scan(rest, |byte| byte == b',');
        parts.push(&rest[..end]);
        match rest.get(end + 1..) {
            Some(after) if end < rest.len() => rest = after,
            _ => return parts,
        }
    }
}

/// Where the bracket ends in which `source` begins.
fn top_level_end(source: &str) -> usize {
    scan(source, |byte| byte == b')')
}

/// The first byte outside brackets and strings that `stop` wants.
fn scan(source: &str, stop: impl Fn(u8) -> bool) -> usize {
    let bytes = source.as_bytes();
    let (mut depth, mut at) = (0usize, 0);
    while at < bytes.len() {
        match bytes[at] {
            byte if depth == 0 && stop(byte) => return at,
            quote @ (b'"' | b'\'') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

/// Bytes of a raw block, up to its end tag.
fn raw_end(source: &str) -> usize {
    let mut at = 0;
    while let Some(found) = source[at..].find("{%") {
        let tag = at + found;
        let inside = &source[tag + 2..];
        let Some(len) = inside.find("%}") else { break };
        if tag_words(&inside[..len]) == "endraw" {
            return tag;
        }
        at = tag + 2;
    }
    source.len()
}

#[cfg(test)]
mod tests {
    use super::{CHECK, rewrite};

    #[test]
    fn generation_tags_become_conditions() {
        assert_eq!(rewrite("a{% generation %}b{% endgeneration %}c").unwrap(), "a{% if true %}b{% endif %}c");
        assert_eq!(rewrite("{%- generation -%} x {%- endgeneration +%}").unwrap(), "{%- if true -%} x {%- endif +%}");
    }

    #[test]
    fn named_values_are_checked() {
        let check = |source: &str, names: &str, mark: &str| {
            assert_eq!(rewrite(source).unwrap(), format!("{source}{{% do {CHECK}([{names}]) {mark}%}}"));
        };
        let again = |source: &str, name: &str, mark: &str| {
            assert_eq!(rewrite(source).unwrap(), format!("{source}{{% set {name} = {CHECK}({name}) {mark}%}}"));
        };
        again("{% set x = '=' %}", "x", "");
        again("{%- set ns.x = ns.x + [1] -%}", "ns.x", "-");
        check("{% set a, b = 1, 2 +%}", "a, b", "+");
        let source = "{%- set n = namespace(x=m[1:], y=f(z=1)) -%}";
        let sets = ["x", "y"].map(|name| format!("{{% set n.{name} = {CHECK}(n.{name}) -%}}")).concat();
        assert_eq!(rewrite(source).unwrap(), format!("{source}{sets}{{% do {CHECK}([n]) -%}}"));
        check("{% for k, v in x.items() if v == 'in' recursive %}", "k, v", "");
        check("{% with a = [1, '),'], b = (2, 3) -%}", "a, b", "-");
        check("{%- macro m(x, y='a, b=(', z=[1]) -%}", "x, y, z", "-");
        check("{% call(x) m(y) %}", "x", "");
        for same in ["{% macro m() %}", "{% call m(x) %}", "{% endfor %}", "{% if x = 1 %}", "{% for x %}", "{% set %}"] {
            assert_eq!(rewrite(same).unwrap(), same);
        }
    }

    #[test]
    fn strings_comments_and_raw_blocks_stay() {
        for same in [
            "{{ '{% generation %}' }}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{%- raw -%}{{ x {% generation %}{%- endraw -%}",
            "{% set x %}{{ generation }}",
            "{% if x == '%} {% generation %}' %}",
            "{{ {'a': {'b': \"}}\"}} }}{% if x %}",
            "{{ 'it\\'s {% generation %}' }}",
            "plain { % generation % } {",
            "{% generation",
            "{{ \"open",
            "{#",
        ] {
            assert_eq!(rewrite(same).unwrap(), same);
        }
    }
}
