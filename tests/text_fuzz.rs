//! The bodies of the fuzz targets on a seeded corpus: no panic, no hang.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "what test files share is public to nobody else, and tests unwrap")]

#[path = "../fuzz/bodies/template.rs"]
mod template;
#[path = "../fuzz/bodies/tokenizer.rs"]
mod tokenizer;

mod common;

use common::text::Random;

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
