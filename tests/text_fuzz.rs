//! The bodies of the fuzz targets on a seeded corpus: no panic, no hang.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "what test files share is public to nobody else, and tests unwrap")]

#[path = "../fuzz/bodies/template.rs"]
mod template;
#[path = "../fuzz/bodies/tokenizer.rs"]
mod tokenizer;

mod common;

use common::text::Random;
use loquat::text::Tokenizer;
use serde_json::{Value, json};

/// Runs every seed, every cut of it, and random changes: bytes, copies, and pieces of other seeds.
fn mutate(seeds: &[Vec<u8>], rounds: usize, run: fn(&[u8])) {
    for seed in seeds {
        run(seed);
        for len in (0..seed.len()).step_by(1 + seed.len() / 200) {
            run(&seed[..len]);
        }
    }
    let mut random = Random(1);
    for _ in 0..rounds {
        let mut data = seeds[random.below(seeds.len())].clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(data.len() + 1);
            match random.below(4) {
                0 if at < data.len() => data[at] = random.below(256) as u8,
                1 => data.insert(at, b"{%}#'\"[]()\x1e\x1f \xc3"[random.below(14)]),
                2 => {
                    let other = &seeds[random.below(seeds.len())];
                    let start = random.below(other.len());
                    let end = start + random.below((other.len() - start).min(40));
                    data.splice(at..at, other[start..end].iter().copied());
                }
                _ => {
                    let end = at + random.below((data.len() - at).min(16) + 1);
                    data.drain(at..end);
                }
            }
            if data.is_empty() {
                data.push(b'{');
            }
        }
        run(&data);
    }
}

#[test]
fn tokenizers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gguf/bpe_tokenizer.json");
    let json = String::from_utf8(std::fs::read(path).unwrap()).unwrap();
    let small = r#"{"added_tokens":[{"id":3,"content":"<s>","special":true,"normalized":false}],"normalizer":{"type":"NFC"},
        "pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{N}{1,3}"},"behavior":"Isolated","invert":false},
        {"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}]},"decoder":{"type":"ByteLevel"},
        "post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],
        "special_tokens":{"<s>":{"id":"<s>","ids":[3],"tokens":["<s>"]}}},
        "model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"],"ignore_merges":true}}abab<s>ab1"#;
    let unigram = r#"{"added_tokens":[],"pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"always","split":true},
        "decoder":{"type":"Metaspace","replacement":"_","prepend_scheme":"always","split":true},
        "model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["_a",-1.0],["b",-2.0],["a",-3.5]],"byte_fallback":false}}ab ba xx"#;
    let mut seeds: Vec<Vec<u8>> = vec![small.into(), unigram.into()];
    for (kind, pre) in [(2, 0), (2, 1), (2, 3), (3, 0), (1, 0), (0, 0)] {
        let mut seed = vec![kind, pre, 0b0101_0101, 1, 2, 0, 3, 0];
        let tail = "1Aab\u{1e}3A<s>\u{1e}3A</s>\u{1e}2A<unk>\u{1e}1Babc\u{1e}5Cbc\u{1e}4D  \u{1e}1A\u{2581}a\u{1f}a b\u{1e}ab c\u{1f}abc <s>a  b\u{e9}\u{1f642}123";
        seed.extend_from_slice(tail.as_bytes());
        seeds.push(seed);
    }
    mutate(&seeds, 4000, tokenizer::run);
    seeds.push(json.into_bytes());
    mutate(&seeds[seeds.len() - 1..], 20, tokenizer::run);
}

/// A `tokenizer.json` whose parts are put together at random: valid as a file, whatever it does to a text.
fn assembled(random: &mut Random) -> Value {
    let texts = [
        "a",
        "b",
        "ab",
        " ",
        "\u{e9}",
        "e\u{301}",
        "\u{2581}",
        "\u{fdfa}",
        "<s>",
        "\u{1f642}",
        "\u{3000}",
        "\t",
        "1",
        "\u{130}",
        "",
    ];
    let patterns = [
        "a",
        "b+",
        r"\s+",
        r"\s+(?!\S)",
        "(?=a)",
        "(?<=b)",
        "",
        "a*",
        ".",
        r"\p{L}+",
        r"[^\p{L}]",
        r"(a)\1",
        r"\b",
        "^.",
        ".$",
        r"(?i:A)",
        r"(?<!a)b",
        r"\p{M}",
        r"\Z",
        r"\Ga",
        r"(?>a|b)+",
        "(?:\u{e9}|\u{2581})",
        r"\X",
        r"a\Kb*",
        r"(?(?=a).|b)",
    ];
    let schemes = ["always", "never", "first"];
    let behaviors = ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"];
    fn pick<'a>(random: &mut Random, list: &[&'a str]) -> &'a str {
        list[random.below(list.len())]
    }
    let pattern = |random: &mut Random| match random.below(2) {
        0 => json!({"String": pick(random, &texts)}),
        _ => json!({"Regex": pick(random, &patterns)}),
    };
    let plain = ["NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Lowercase", "ByteLevel"];
    let normalizers: Vec<Value> = (0..random.below(5))
        .map(|_| match random.below(8) {
            0 | 1 => json!({"type": "Replace", "pattern": pattern(random), "content": pick(random, &texts)}),
            2 => json!({"type": "Prepend", "prepend": pick(random, &texts)}),
            3 => json!({"type": "Strip", "strip_left": random.below(2) == 0, "strip_right": random.below(2) == 0}),
            _ => json!({"type": pick(random, &plain)}),
        })
        .collect();
    let cuts: Vec<Value> = (0..random.below(4))
        .map(|_| match random.below(9) {
            0..3 => json!({"type": "Split", "pattern": pattern(random), "behavior": pick(random, &behaviors), "invert": random.below(2) == 0}),
            3 => json!({"type": "ByteLevel", "add_prefix_space": random.below(2) == 0, "trim_offsets": true, "use_regex": random.below(2) == 0}),
            4 => json!({"type": "Metaspace", "replacement": pick(random, &["\u{2581}", "a", " "]), "prepend_scheme": pick(random, &schemes), "split": random.below(2) == 0}),
            5 => json!({"type": "Digits", "individual_digits": random.below(2) == 0}),
            6 => json!({"type": "Punctuation", "behavior": pick(random, &behaviors)}),
            _ => json!({"type": pick(random, &["Whitespace", "WhitespaceSplit", "UnicodeScripts"])}),
        })
        .collect();
    let added: Vec<Value> = (0..random.below(4))
        .map(|i| {
            let mut flag = || random.below(2) == 0;
            let (special, normalized, single_word, lstrip, rstrip) = (flag(), flag(), flag(), flag(), flag());
            let content = ["<s>", "\u{c9}", " a"][i];
            json!({"id": 7 + i, "content": content, "special": special, "normalized": normalized,
                "single_word": single_word, "lstrip": lstrip, "rstrip": rstrip})
        })
        .collect();
    let model = match random.below(3) {
        0 => {
            json!({"type": "Unigram", "unk_id": 0, "byte_fallback": random.below(2) == 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0],
            ["ab", -1.5], ["\u{2581}", -3.0], ["\u{120}", -1.0], ["<0x61>", -9.0]]})
        }
        _ => json!({"type": "BPE", "unk_token": "<unk>", "fuse_unk": random.below(2) == 0, "byte_fallback": random.below(2) == 0,
            "ignore_merges": random.below(2) == 0, "merges": [["a", "b"]],
            "vocab": {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "\u{2581}": 4, "\u{120}": 5, "<0x61>": 6}}),
    };
    json!({"added_tokens": added, "decoder": {"type": pick(random, &["ByteLevel", "Fuse", "ByteFallback"])}, "model": model,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts}})
}

/// Files that are read, with texts that are not kind to them: no step of the crate beneath may fall over what another left.
#[test]
fn valid_tokenizer_files() {
    let rounds = std::env::var("LOQUAT_FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(3000);
    let mut random = Random(std::env::var("LOQUAT_FUZZ_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(7));
    let parts = [
        "a",
        "b",
        "A",
        " ",
        "  ",
        "<s>",
        "\u{c9}",
        "e\u{301}",
        "\u{fdfa}",
        "\u{1f642}",
        "\u{3000}",
        "\n",
        "12",
        ".",
        "\u{130}",
        "\u{2581}",
        "\u{301}",
    ];
    let mut read = 0;
    for round in 0..rounds {
        let mut data = assembled(&mut random).to_string().into_bytes();
        read += usize::from(Tokenizer::from_json(&data).is_ok());
        for _ in 0..4 {
            let text: String = (0..random.below(12)).map(|_| parts[random.below(parts.len())]).collect();
            let len = data.len();
            data.extend_from_slice(text.as_bytes());
            let done = std::panic::catch_unwind(|| tokenizer::run(&data));
            assert!(done.is_ok(), "round {round}: {}", String::from_utf8_lossy(&data));
            data.truncate(len);
        }
    }
    assert!(read > rounds / 4, "only {read} of {rounds} files were read");
}

#[test]
fn templates() {
    let seeds = [
        "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '>' + m['content'] | trim }}{% endfor %}\u{1f}user\u{1f}hi\u{1f}assistant\u{1f} yo ",
        "{% set ns = namespace(x=[1], n=0) %}{% for i in range(20) %}{% set ns.x = ns.x + [ns.x] %}{% if i == 3 %}{% continue %}{% endif %}{% endfor %}{{ ns.x | tojson(indent=2) }}",
        "{%- macro f(a, b='c') -%}{{ a ~ b }}{%- endmacro -%}{{ f('x') * 3 }}{% generation %}{{ strftime_now('%d %b %Y') }}{% endgeneration %}",
        "{% raw %}{{ x }}{% endraw %}{# c #}{{ messages[::-1] | map(attribute='role') | join(', ') }}{{ 'a,b'.split(',') }}{% break %}\u{1f}a\u{1f}b",
        "{% if tools is not none and tools | length > 0 %}{{ tools | tojson }}{% else %}{{ raise_exception('no') }}{% endif %}\u{1f}t\u{1f}",
    ];
    let seeds: Vec<Vec<u8>> = seeds.iter().map(|seed| seed.as_bytes().to_vec()).collect();
    mutate(&seeds, 6000, template::run);
}
