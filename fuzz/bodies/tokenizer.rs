//! Bytes as a vocabulary, a text and ids: a tokenizer is built or refused, and one that was built keeps its promises.

use loquat::text::{AddSpecial, Detokenizer, DetokenizerOptions, EncodeOptions, GgufVocab, Specials, Start, Tokenizer};

/// Reads `data` as a `tokenizer.json` where it begins with a brace, else as the parts of a GGUF vocabulary.
pub fn run(data: &[u8]) {
    if data.first() == Some(&b'{') {
        let (file, text) = data.iter().rposition(|&byte| byte == b'}').map_or((data, &[][..]), |at| data.split_at(at + 1));
        if let Ok(tokenizer) = Tokenizer::from_json(file) {
            check(&tokenizer, &String::from_utf8_lossy(text));
        }
        return;
    }
    let mut rest = data;
    let mut byte = || {
        let (&first, after) = rest.split_first().unwrap_or((&0, &[]));
        rest = after;
        first
    };
    let (kind, pre, flags) = (byte(), byte(), byte());
    let marks: Vec<u8> = (0..5).map(|_| byte()).collect();
    let tail = String::from_utf8_lossy(rest).into_owned();
    let mut parts = tail.split('\u{1f}');
    let listed = parts.next().unwrap_or_default();
    let merges: Vec<&str> = parts.next().unwrap_or_default().split('\u{1e}').filter(|line| !line.is_empty()).collect();
    let text = parts.next().unwrap_or_default();

    // Most inputs want a vocabulary that can be built: bytes first, then what the input lists.
    let alphabet: Vec<String> = if kind & 2 == 0 {
        Vec::new()
    } else if kind & 1 == 0 {
        (0..=u8::MAX).map(|byte| char_of(byte).to_string()).collect()
    } else {
        (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")).collect()
    };
    let mut tokens: Vec<&str> = alphabet.iter().map(String::as_str).collect();
    let mut types: Vec<i32> = vec![if kind & 1 == 0 { 1 } else { 6 }; tokens.len()];
    let mut scores: Vec<f32> = vec![0.0; tokens.len()];
    for entry in listed.split('\u{1e}') {
        let mut chars = entry.chars();
        types.push(chars.next().map_or(1, |c| c as i32 - '0' as i32));
        scores.push(chars.next().map_or(0.0, |c| c as u32 as f32 - 64.0));
        tokens.push(chars.as_str());
    }
    let id = |mark: u8| (mark > 0).then(|| if mark == 255 { u32::MAX } else { u32::from(mark) + 250 });
    let flag = |bit: u8| (flags >> bit & 1 == 1).then_some(flags >> (bit + 1) & 1 == 1);
    let vocab = GgufVocab {
        model: ["gpt2", "llama"][usize::from(kind & 1)],
        pre: Some(PRES[usize::from(pre) % PRES.len()]),
        tokens: &tokens,
        scores: (kind & 4 == 0).then_some(&scores),
        token_types: (kind & 8 == 0).then_some(&types),
        merges: (kind & 16 == 0).then_some(&merges),
        bos: id(marks[0]),
        eos: id(marks[1]),
        eot: id(marks[2]),
        unk: id(marks[3]),
        pad: id(marks[4]),
        add_bos: flag(0),
        add_eos: flag(2),
        add_space_prefix: flag(4),
        remove_extra_whitespaces: flag(6),
        ..GgufVocab::default()
    };
    if let Ok(tokenizer) = Tokenizer::from_vocab(&vocab) {
        check(&tokenizer, text);
    }
}

fn check(tokenizer: &Tokenizer, text: &str) {
    for specials in [Specials::Plain, Specials::Parse] {
        for add in [AddSpecial::Auto, AddSpecial::Never] {
            for start in [Start::Text, Start::Continuation] {
                let Ok(ids) = tokenizer.encode(text, EncodeOptions { specials, add, start }) else { continue };
                assert!(ids.iter().all(|&id| tokenizer.token_bytes(id).is_some()), "an id outside the vocabulary");
                let options = DetokenizerOptions { skip_special: false, ..DetokenizerOptions::default() };
                let mut stream = Detokenizer::new(tokenizer, options).expect("there is no stop string");
                let mut streamed = String::new();
                for &id in &ids {
                    streamed.push_str(stream.push(id));
                }
                streamed.push_str(stream.finish());
                assert_eq!(streamed, tokenizer.decode(&ids, false), "the stream differs from the whole");
            }
        }
    }
    let _ = tokenizer.encode_chat(text);
    let _ = tokenizer.token_id(text);
}

fn char_of(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !printable(byte)).count() as u32;
    char::from_u32(0x100 + before).expect("below U+0144")
}

const PRES: &[&str] = &["gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "tekken", "bloom", "unheard-of"];
