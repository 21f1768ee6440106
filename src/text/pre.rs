//! How text is cut into words before byte pairs are merged: one row for each meaning of `tokenizer.ggml.pre`, and the engine that
//! runs a row. Knows no tokens.
//!
//! Every published pattern ends in `\s+(?!\S)|\s+`: a run of white space, less its last character where a word follows. The
//! look-ahead is what would need a backtracking engine; here a second pattern finds the run and arithmetic drops the character,
//! so that an automaton does all of it in time linear in the text.
//!
//! Invariant: the pieces of a text are its bytes, in order, none lost and none twice.
#![forbid(unsafe_code)]

use crate::error::TextError;
use regex_automata::meta::Regex;
use std::ops::Range;

/// What one value of `tokenizer.ggml.pre` means.
pub(super) struct Pre {
    /// The names in files.
    names: &'static [&'static str],
    /// Applied one after the other, each to the pieces of the one before; matches and what lies between become pieces.
    stages: &'static [Stage],
    /// A word that is a token is taken whole, without merging.
    pub(super) ignore_merges: bool,
    /// Whether BOS is added where the file does not say.
    pub(super) add_bos: bool,
    /// Whether the text is brought to normal form C first.
    pub(super) nfc: bool,
}

struct Stage {
    pattern: &'static str,
    /// Runs of white space follow as the last alternatives.
    spaces: bool,
}

const fn words(pattern: &'static str) -> Stage {
    Stage { pattern, spaces: true }
}

const fn only(pattern: &'static str) -> Stage {
    Stage { pattern, spaces: false }
}

macro_rules! contractions {
    () => {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}

macro_rules! upper_lower {
    ($upper:literal, $lower:literal, $end:literal) => {
        concat!(r"[^\r\n\p{L}\p{N}]?", $upper, "*", $lower, "+", $end, r"|[^\r\n\p{L}\p{N}]?", $upper, "+", $lower, "*", $end,)
    };
}

macro_rules! cased {
    ($end:literal) => {
        upper_lower!(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", $end)
    };
}

const GPT2: Stage = words(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+");
const LLAMA3: Stage =
    words(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"));
const QWEN2: Stage = words(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"));
const QWEN35: Stage =
    words(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"));
const GPT4O: Stage =
    words(concat!(cased!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"), r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"));
const TEKKEN: Stage = words(concat!(cased!(""), r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"));
const KIMI: Stage = words(concat!(
    r"\p{Han}+|",
    upper_lower!(
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    ),
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
));
const YOUTU: Stage = words(concat!(cased!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"), r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"));
const DEEPSEEK3: Stage = words(concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
));
const SPARK: Stage = words(concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]"
));
const MINICPM5: Stage = words(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"));
const BAILING: Stage = words(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]");
const SEED: Stage = words(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"));
const TURKISH: Stage = words(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+");
const EXAONE_MOE: Stage = words(concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
));
const DIGIT: Stage = only(r"\p{N}");
const DIGITS3: Stage = only(r"\p{N}{1,3}");
const ASCII_DIGITS3: Stage = only("[0-9][0-9][0-9]");
const LINE_BREAK: Stage = only(r"[\r\n]");
const LINES: Stage = only(r"[^\n]+|[\n]+");
const HAN_KANA: Stage = only(r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+");
const ASIAN: Stage = only(r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+");
const BLOOM: Stage = only(r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+");

/// Letters that have case, as the first DeepSeek models listed them.
const CASED_WORD: Stage = only(concat!(
    r"\s?[",
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}",
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}",
    r"\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}",
    r"\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}",
    r"\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}",
    r"\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}",
    r"\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}",
    r"\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}",
    r"\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}",
    r"\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}",
    r"\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}",
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}",
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}",
    "]+",
));

const fn pre(names: &'static [&'static str], stages: &'static [Stage]) -> Pre {
    Pre { names, stages, ignore_merges: false, add_bos: false, nfc: false }
}

static TABLE: &[Pre] = &[
    pre(&["default"], &[only(r"[\p{P}$+<=>^~|]+"), GPT2, only(r"\p{N}+"), ASCII_DIGITS3]),
    pre(
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        &[GPT2],
    ),
    Pre { nfc: true, ..pre(&["mpt", "olmo"], &[GPT2]) },
    pre(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"], &[DIGIT, GPT2]),
    Pre {
        ignore_merges: true,
        add_bos: true,
        ..pre(&["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"], &[LLAMA3])
    },
    pre(&["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"], &[LLAMA3]),
    Pre { nfc: true, ..pre(&["qwen2"], &[QWEN2]) },
    pre(&["deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"], &[QWEN2]),
    Pre { nfc: true, ..pre(&["qwen35"], &[QWEN35]) },
    pre(
        &["deepseek-llm"],
        &[
            LINE_BREAK,
            CASED_WORD,
            only(r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"),
            only(r"\s+$"),
            ASIAN,
            DIGIT,
        ],
    ),
    pre(&["deepseek-coder"], &[LINE_BREAK, only(r"\s?\p{L}+"), only(r"\s?\p{P}+"), ASIAN, DIGIT]),
    pre(&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], &[DIGITS3, HAN_KANA, DEEPSEEK3]),
    pre(&["spark2_5"], &[DIGITS3, HAN_KANA, SPARK, DIGIT]),
    pre(&["falcon"], &[only(r"[\p{P}$+<=>^~|`]+"), GPT2, ASCII_DIGITS3]),
    pre(&["bloom", "poro-chat", "gpt3-finnish"], &[BLOOM]),
    pre(&["viking"], &[BLOOM, DIGIT]),
    Pre { ignore_merges: true, add_bos: true, ..pre(&["tekken"], &[TEKKEN]) },
    pre(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    pre(&["kimi-k2"], &[KIMI]),
    Pre {
        ignore_merges: true,
        ..pre(
            &["youtu"],
            &[
                only(concat!(
                    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+",
                    r"|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}",
                    r"\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+",
                    r"|[\x{3105}-\x{312f}]+|[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
                )),
                YOUTU,
            ],
        )
    },
    Pre { ignore_merges: true, ..pre(&["minicpm5"], &[DIGITS3, MINICPM5]) },
    pre(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    pre(&["seed-coder"], &[SEED]),
    pre(&["ufakzeka"], &[TURKISH]),
    pre(&["laguna"], &[LINES, QWEN2]),
    pre(&["exaone-moe"], &[EXAONE_MOE]),
    Pre {
        add_bos: true,
        ..pre(
            &["chameleon"],
            &[
                only("<sentinel:[0-9]+>"),
                only("IMGIMG[A-I]{1,4}Z"),
                only(r"[\t\n]|    |  "),
                DIGIT,
                only(r"[\p{P}!-/:-@\[-`{-~]"),
                GPT2,
            ],
        )
    },
];

/// The row of that name.
pub(super) fn find(name: &str) -> Result<&'static Pre, TextError> {
    TABLE.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = TABLE.iter().flat_map(|pre| pre.names.iter().copied()).collect();
        TextError::tokenizer("tokenizer.ggml.pre", format!("one of {}", known.join(", ")), format!("{name:?}"))
    })
}

/// A row of the table, compiled.
pub(super) struct Splitter {
    stages: Vec<Regex>,
}

impl Splitter {
    pub(super) fn new(pre: &Pre) -> Result<Self, TextError> {
        let stages = pre
            .stages
            .iter()
            .map(|stage| {
                let patterns: &[&str] = if stage.spaces { &[stage.pattern, r"\s+"] } else { &[stage.pattern] };
                Regex::new_many(patterns).map_err(|e| TextError::tokenizer("tokenizer.ggml.pre", "patterns that compile", e))
            })
            .collect::<Result<_, _>>()?;
        Ok(Splitter { stages })
    }

    /// Leaves the pieces of `text` in `pieces`, as ranges of its bytes; `spare` is room to work in.
    pub(super) fn split(&self, text: &str, pieces: &mut Vec<Range<usize>>, spare: &mut Vec<Range<usize>>) {
        pieces.clear();
        if text.is_empty() {
            return;
        }
        pieces.push(0..text.len());
        for stage in &self.stages {
            std::mem::swap(pieces, spare);
            pieces.clear();
            for piece in spare.iter() {
                split_once(stage, text, piece.clone(), pieces);
            }
        }
    }
}

/// The matches of one stage in one piece, and what lies between them. The piece is the whole world to the pattern: `$` and the
/// end of a run of spaces are its end.
fn split_once(regex: &Regex, text: &str, piece: Range<usize>, out: &mut Vec<Range<usize>>) {
    let hay = &text[piece.clone()];
    let base = piece.start;
    let mut done = 0;
    let mut at = 0;
    while at < hay.len() {
        let input = regex_automata::Input::new(hay).span(at..hay.len());
        let Some(found) = regex.find(input) else { break };
        let (start, mut end) = (found.start(), found.end());
        if found.pattern().as_usize() == SPACES && end < hay.len() {
            // A word follows: its last space belongs to it, unless that is all there is.
            let last = hay[start..end].chars().next_back().map_or(0, char::len_utf8);
            if end - last > start {
                end -= last;
            }
        }
        if start > done {
            out.push(base + done..base + start);
        }
        if end > start {
            out.push(base + start..base + end);
        }
        done = end;
        // No pattern of the table matches nothing; should one ever, the walk still goes on.
        at = if end > start { end } else { end + hay[end..].chars().next().map_or(1, char::len_utf8) };
    }
    if done < hay.len() {
        out.push(base + done..base + hay.len());
    }
}

/// The pattern of a stage that stands for runs of white space.
const SPACES: usize = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(name: &str, text: &str) -> Vec<String> {
        cut(&Splitter::new(find(name).unwrap()).unwrap(), text)
    }

    fn cut(splitter: &Splitter, text: &str) -> Vec<String> {
        let (mut pieces, mut spare) = (Vec::new(), Vec::new());
        splitter.split(text, &mut pieces, &mut spare);
        pieces.into_iter().map(|r| text[r].to_owned()).collect()
    }

    #[test]
    fn every_row_compiles_and_loses_nothing() {
        let text = "Hello  WORLD's\r\n\n\t x1234567 caf\u{e9} e\u{301}\u{2028} \u{65e5}\u{672c}\u{8a9e}\u{30c6}\u{30b9} \u{1f642}!?  \u{3000}a   ";
        for pre in TABLE {
            for name in pre.names {
                assert!(std::ptr::eq(find(name).unwrap(), pre), "{name} is in two rows");
            }
            let splitter = Splitter::new(pre).unwrap();
            for start in (0..=text.len()).filter(|&i| text.is_char_boundary(i)) {
                assert_eq!(cut(&splitter, &text[start..]).concat(), &text[start..], "{:?}", pre.names);
            }
        }
    }

    #[test]
    fn known_splits() {
        let check = |name: &str, text: &str, expected: &[&str]| assert_eq!(pieces(name, text), expected, "{name}: {text:?}");
        check("gpt-2", "Hello  world\n x's 123", &["Hello", " ", " world", "\n", " x", "'s", " 123"]);
        check("gpt-2", "a   ", &["a", "   "]);
        check("gpt-2", "a\nb", &["a", "\n", "b"]);
        check("smollm", "12 34", &["1", "2", " ", "3", "4"]);
        check("llama-bpe", "I'LL 12345\r\n\r\n  x", &["I", "'LL", " ", "123", "45", "\r\n\r\n", " ", " x"]);
        check("qwen2", "a\n\n b 12", &["a", "\n\n", " b", " ", "1", "2"]);
        check("gpt-4o", "camelCase's HTTPServer", &["camel", "Case's", " HTTPServer"]);
        check("tekken", "HTTPServer12", &["HTTPServer", "1", "2"]);
        check("deepseek-v3", "x1234\u{65e5}\u{672c} ok!", &["x", "123", "4", "\u{65e5}\u{672c}", " ok", "!"]);
        check("deepseek-llm", "ab 12  \ncd", &["ab", " ", "1", "2", "  ", "\n", "cd"]);
        check("falcon", "a1234 b!", &["a", "123", "4", " b", "!"]);
        check("kimi-k2", "ab\u{65e5}\u{672c}cd", &["ab", "\u{65e5}\u{672c}", "cd"]);
        check("bloom", "a b, c", &["a", " b", ",", " c"]);
        check("default", "a1234=b", &["a", "123", "4", "=", "b"]);
    }

    /// Against the published patterns, run by the look-ahead engine of the reference. Ends are counted in characters.
    #[test]
    fn the_reference_cuts_in_the_same_places() {
        let file = include_str!("../../tests/fixtures/text/pieces.json");
        let file: serde_json::Value = serde_json::from_str(file).unwrap();
        let texts = file["texts"].as_array().unwrap();
        for (name, all) in file["pieces"].as_object().unwrap() {
            let splitter = Splitter::new(find(name).unwrap()).unwrap();
            for (text, expected) in texts.iter().zip(all.as_array().unwrap()) {
                let text = text.as_str().unwrap();
                let mut end = 0;
                let ends: Vec<usize> = cut(&splitter, text)
                    .iter()
                    .map(|piece| {
                        end += piece.chars().count();
                        end
                    })
                    .collect();
                let expected: Vec<usize> = expected.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect();
                assert_eq!(ends, expected, "{name}: {text:?}");
            }
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let Err(error) = find("no-such") else { panic!("accepted") };
        let message = error.to_string();
        assert!(message.contains("no-such") && message.contains("llama-bpe") && message.contains("qwen2"), "{message}");
    }

    #[test]
    fn a_megabyte_of_anything_is_linear() {
        for name in ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", "deepseek-llm", "deepseek-v3", "exaone-moe"] {
            for unit in [" ", "a", "\n ", "'", "A", "1", "\u{301}", "a "] {
                let text = unit.repeat((1 << 20) / unit.len());
                assert_eq!(pieces(name, &text).iter().map(String::len).sum::<usize>(), text.len());
            }
        }
    }
}
