//! What a `tokenizer.json` may do to a text before its model sees it, and where a text begins.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "what test files share is public to nobody else, and tests unwrap")]

use loquat::TextError;
use loquat::text::{EncodeOptions, GgufVocab, Specials, Start, Tokenizer};
use serde_json::{Value, json};

mod common;

use common::text::{PARSE, PLAIN, bpe, build, json_tokenizer, spm};

/// The file of the byte-level fixture with one part changed.
fn changed(key: &str, value: Value) -> Result<Tokenizer, TextError> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gguf/bpe_tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    file[key] = value;
    Tokenizer::from_json(file.to_string().as_bytes())
}

fn replace(pattern: Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

fn split(pattern: &str, behavior: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": false})
}

#[test]
fn a_replace_of_nothing_is_refused() {
    for pattern in [
        "",
        "a*",
        r"\b",
        "x|",
        "(?=a)",
        "(?<=a)",
        "(?!a)",
        "a?(?=b)",
        "(?:)",
        "^",
        "$",
        "a{0}",
        r"(a|(?=b))",
        r"(a)\1*?|()",
        r"\G",
    ] {
        let nested = json!({"type": "Sequence", "normalizers": [replace(json!({"Regex": pattern}), "b")]});
        for normalizer in [replace(json!({"Regex": pattern}), "b"), nested] {
            match changed("normalizer", normalizer) {
                Err(error @ TextError::Tokenizer { .. }) => {
                    assert!(error.to_string().contains(&format!("{pattern:?}")), "{error} does not name {pattern:?}");
                }
                other => panic!("{pattern:?}: {other:?}"),
            }
        }
    }
    assert!(changed("normalizer", replace(json!({"String": ""}), "b")).is_err());
    // A look to the side of something is something; what only runs can tell is told by the run.
    let same = json_tokenizer();
    let tokenizer = changed("normalizer", replace(json!({"Regex": r"x+(?=y)|(?<!q)z"}), "b")).unwrap();
    assert_eq!(tokenizer.encode("xxy xz", PLAIN).unwrap(), same.encode("by xb", PLAIN).unwrap());
    if let Ok(tokenizer) = changed("normalizer", replace(json!({"Regex": r"(?:a\K)b*"}), "b")) {
        assert!(matches!(tokenizer.encode("xac", PLAIN), Err(TextError::Tokenizer { .. })));
    }
    // Cuts between characters are cuts.
    for pattern in ["", "a*", r"\b", "x|", r"(?=(\d{3})+(?!\d))", "(?<=a)"] {
        for behavior in ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"] {
            let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
            let steps = json!({"type": "Sequence", "pretokenizers": [split(pattern, behavior), bytes]});
            let tokenizer = changed("pre_tokenizer", steps).unwrap();
            for text in ["the free", "\u{e9}\u{65e5}a", "a<s>b 1234567", "", "\u{1f642}"] {
                let ids = tokenizer.encode(text, PARSE).unwrap();
                if behavior != "Removed" {
                    assert_eq!(tokenizer.decode(&ids, false), text, "{pattern:?} {behavior}");
                }
            }
        }
    }
}

#[test]
fn steps_that_blow_a_text_up_are_stopped() {
    let check = |tokenizer: Result<Tokenizer, TextError>, part: &str| {
        let start = std::time::Instant::now();
        let error = tokenizer.and_then(|tokenizer| tokenizer.encode(&"a ".repeat(500), PLAIN)).unwrap_err();
        assert!(matches!(error, TextError::Tokenizer { .. }) && error.to_string().contains(part), "{error}");
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    };
    let many = |step: Value| json!({"type": "Sequence", "normalizers": vec![step; 40]});
    check(changed("normalizer", many(replace(json!({"String": "a"}), "aa"))), "normalizer");
    check(changed("normalizer", many(replace(json!({"Regex": "[a ]"}), "a a"))), "normalizer");
    check(changed("normalizer", replace(json!({"Regex": "a"}), &"b".repeat(100_000))), "normalizer");
    check(changed("normalizer", many(json!({"type": "Prepend", "prepend": "b".repeat(1000)}))), "normalizer");
    let accent = json!({"type": "Sequence", "normalizers": [
        replace(json!({"String": "a"}), "\u{e9}"), many(json!({"type": "ByteLevel"}))]});
    check(changed("normalizer", accent), "normalizer");
    let marks: Vec<Value> = (0..80)
        .map(|i| json!({"type": "Metaspace", "replacement": if i % 2 == 0 { "x" } else { "y" }, "prepend_scheme": "always", "split": true}))
        .collect();
    check(changed("pre_tokenizer", json!({"type": "Sequence", "pretokenizers": marks})), "pre_tokenizer");
    let decoder = json!({"type": "Sequence", "decoders": vec![replace(json!({"String": "a"}), "aa"); 40]});
    check(changed("decoder", decoder), "decoder");
    // Each of many pieces has its share of one bound, not a bound of its own.
    let tokenizer = changed("normalizer", json!({"type": "Prepend", "prepend": "b".repeat(900)})).unwrap();
    assert!(tokenizer.encode("a", PARSE).is_ok());
    assert!(matches!(tokenizer.encode(&"a<s>".repeat(1000), PARSE), Err(TextError::Tokenizer { .. })));
}

#[test]
fn a_token_of_which_nothing_is_left_is_refused() {
    let mut file = json!({
        "added_tokens": [{"id": 2, "content": "a", "special": false, "normalized": true}],
        "decoder": {"type": "ByteLevel"},
        "normalizer": replace(json!({"String": "a"}), ""),
        "model": {"type": "BPE", "vocab": {"b": 0, "c": 1, "a": 2}, "merges": []},
    });
    let error = Tokenizer::from_json(file.to_string().as_bytes()).unwrap_err();
    assert!(error.to_string().contains("added_tokens[0]"), "{error}");
    // White space that takes the white space before it, after a token that took it already.
    file["normalizer"] = replace(json!({"Regex": "."}), "\t");
    file["added_tokens"][0]["lstrip"] = json!(true);
    file["added_tokens"][0]["rstrip"] = json!(true);
    let error = Tokenizer::from_json(file.to_string().as_bytes()).unwrap_err();
    assert!(error.to_string().contains("lstrip"), "{error}");
    file["normalizer"] = json!(null);
    assert!(Tokenizer::from_json(file.to_string().as_bytes()).is_ok());
}

#[test]
fn a_pattern_that_gives_up_says_so() {
    let text = "a".repeat(60) + "c";
    let pattern = r"(?:a|a|(?=q)a)+(?!c)b";
    for step in [split(pattern, "Isolated"), split(pattern, "Removed")] {
        let tokenizer = changed("pre_tokenizer", step).unwrap();
        match tokenizer.encode(&text, PLAIN) {
            Err(error @ TextError::Tokenizer { .. }) => assert!(error.to_string().contains(&format!("{pattern:?}")), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    let tokenizer = changed("normalizer", replace(json!({"Regex": pattern}), "b")).unwrap();
    match tokenizer.encode(&text, PLAIN) {
        Err(error @ TextError::Tokenizer { .. }) => assert!(error.to_string().contains(&format!("{pattern:?}")), "{error}"),
        other => panic!("{other:?}"),
    }
    // The words of ByteLevel never give up.
    let (json, gguf) = (json_tokenizer(), build(&bpe()));
    let text = " ".repeat(3 << 20) + "the free 1 2";
    assert_eq!(json.encode(&text, PLAIN).unwrap(), gguf.encode(&text, PLAIN).unwrap());
}

#[test]
fn a_continuation_begins_without_a_space_or_bos() {
    let tokenizer = build(&spm());
    let next = EncodeOptions { specials: Specials::Parse, start: Start::Continuation, ..EncodeOptions::default() };
    let with = |text: &str| tokenizer.encode(text, PARSE).unwrap();
    for text in ["world", " world", "  two", "\u{e9}t\u{e9}", ""] {
        let ids = tokenizer.encode(text, next).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap()).copied().collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
    // " world" is what "world" is at the beginning of a text.
    assert_eq!(tokenizer.encode(" world", next).unwrap(), with("world"));
    // After a special token within it text begins anew.
    assert_eq!(tokenizer.encode("<s>a", next).unwrap(), with("<s>a"));
    let inside = tokenizer.encode("b<s>a", next).unwrap();
    assert_eq!(inside[inside.len() - with("<s>a").len()..], with("<s>a"));
    // Where spaces are squeezed, the one that parts it from what was before stays.
    let squeezed = spm().with(|view| Tokenizer::from_vocab(&GgufVocab { remove_extra_whitespaces: Some(true), ..view })).unwrap();
    assert_eq!(squeezed.encode("  a  b ", next).unwrap(), with("a b"));

    // The same in tokenizer.json, wherever the prefix comes from.
    let prepend = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u{2581}"}, replace(json!({"String": " "}), "\u{2581}")]});
    let meta = |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    for (normalizer, pre_tokenizer, space) in [
        (prepend, json!(null), "\u{2581}"),
        (json!(null), meta("always"), "\u{2581}"),
        (json!(null), meta("first"), "\u{2581}"),
        (json!(null), bytes, "\u{120}"),
    ] {
        let file = json!({
            "added_tokens": [{"id": 0, "content": "<s>", "special": true, "normalized": false}],
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": {"type": "Fuse"},
            "post_processor": {"type": "TemplateProcessing", "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]},
            "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, space: 2}, "merges": []},
        });
        let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
        let text = EncodeOptions { specials: Specials::Parse, ..EncodeOptions::default() };
        assert_eq!(tokenizer.encode("a", text).unwrap(), [0, 2, 1], "{file}");
        assert_eq!(tokenizer.encode("a", next).unwrap(), [1], "{file}");
        assert_eq!(tokenizer.encode(" a", next).unwrap(), [2, 1], "{file}");
    }
}
