//! What real templates write and the template engine does not know, rewritten before it reads them: `{% generation %}` and
//! `{% endgeneration %}`, which mark the assistant's words for training and let their content through, become a condition that
//! always holds, so that white-space control around them keeps its meaning. Strings, comments and raw blocks stay as they are.
#![forbid(unsafe_code)]

/// The template with those tags rewritten.
pub(super) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + 64);
    let mut rest = source;
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
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
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
    use super::rewrite;

    #[test]
    fn generation_tags_become_conditions() {
        assert_eq!(rewrite("a{% generation %}b{% endgeneration %}c"), "a{% if true %}b{% endif %}c");
        assert_eq!(rewrite("{%- generation -%} x {%- endgeneration +%}"), "{%- if true -%} x {%- endif +%}");
    }

    #[test]
    fn strings_comments_and_raw_blocks_stay() {
        for same in [
            "{{ '{% generation %}' }}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{%- raw -%}{{ x {% generation %}{%- endraw -%}",
            "{% set generation = 1 %}{{ generation }}",
            "{% set x = '%} {% generation %}' %}",
            "{{ {'a': {'b': \"}}\"}} }}{% if x %}",
            "{{ 'it\\'s {% generation %}' }}",
            "plain { % generation % } {",
            "{% generation",
            "{{ \"open",
            "{#",
        ] {
            assert_eq!(rewrite(same), same);
        }
    }
}
