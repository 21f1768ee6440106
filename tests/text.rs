//! Tokenizers, chat templates and the detokenizer through the public API, against encodings made by other implementations.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "what test files share is public to nobody else, and tests unwrap")]

use loquat::text::{
    ChatTemplate, Detokenizer, DetokenizerOptions, EncodeOptions, GgufVocab, Message, RenderOptions, Specials, Start, Tokenizer,
};
use loquat::{TextError, TokenId};
use serde_json::{Value, json};

mod common;

use common::text::{OwnedVocab, PARSE, PLAIN, bpe, build, fixture, ids, json_tokenizer, spm};

fn check_encodings(tokenizer: &Tokenizer, cases: &Value, options: EncodeOptions) {
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text, options).unwrap(), expected, "{text:?}");
        if let Some(decoded) = case["decoded"].as_str() {
            assert_eq!(tokenizer.decode(&expected, false), decoded, "{expected:?}");
        }
    }
}

#[test]
fn encodings_equal_the_reference() {
    let golden = fixture("gguf/tokenizers.json");
    let more = fixture("text/vocabularies.json");
    for tokenizer in [build(&bpe()), json_tokenizer()] {
        check_encodings(&tokenizer, &golden["bpe"], PARSE);
        check_encodings(&tokenizer, &more["bpe"]["plain"], PLAIN);
        check_encodings(&tokenizer, &more["bpe"]["parsed"], PARSE);
    }
    let tokenizer = build(&spm());
    check_encodings(&tokenizer, &golden["spm"], PARSE);
    check_encodings(&tokenizer, &more["spm"]["plain"], PLAIN);
}

#[test]
fn both_file_kinds_hold_the_same_tokenizer() {
    let (gguf, json) = (build(&bpe()), json_tokenizer());
    assert_eq!(gguf.vocab_len(), json.vocab_len());
    for id in 0..gguf.vocab_len() as TokenId {
        assert_eq!(gguf.token_bytes(id), json.token_bytes(id), "{id}");
        assert_eq!(gguf.token_text(id), json.token_text(id), "{id}");
        assert_eq!(gguf.is_special(id), json.is_special(id), "{id}");
        assert_eq!(gguf.token_id(gguf.token_text(id).unwrap()), Some(id));
    }
    assert_eq!(gguf.token_bytes(gguf.vocab_len() as TokenId), None);
}

#[test]
fn plain_text_yields_no_control_token() {
    for tokenizer in [build(&bpe()), json_tokenizer(), build(&spm())] {
        for text in ["<s>", "a<s>b</s>", "</s></s>", "<unk>", "<pad>", " <s> "] {
            let ids = tokenizer.encode(text, PLAIN).unwrap();
            assert!(!ids.iter().any(|&id| tokenizer.is_special(id)), "{text}: {ids:?}");
            assert_eq!(tokenizer.decode(&ids, false), text);
        }
        assert!(tokenizer.encode("a<s>b", PARSE).unwrap().contains(&1));
    }
}

/// A whole word that is the text of a control token, in a model that takes whole words.
#[test]
fn a_word_that_is_a_control_token_is_spelt() {
    let file = json!({
        "added_tokens": [{"id": 3, "content": "ab", "special": true, "normalized": false}],
        "decoder": {"type": "ByteLevel"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3}, "merges": [], "ignore_merges": true},
    });
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
    assert_eq!(tokenizer.encode("ab", PARSE).unwrap(), [3]);
    assert_eq!(tokenizer.encode("ab", PLAIN).unwrap(), [0, 1]);
    assert!(matches!(tokenizer.encode("axc", PLAIN), Err(TextError::Unencodable { .. })));
}

#[test]
fn the_space_before_the_first_word() {
    let tokenizer = build(&spm());
    let with = |text: &str| tokenizer.encode(text, PARSE).unwrap();
    // After a special token text begins anew, with a space before it, as in the reference's older mode.
    let a = with("a");
    assert_eq!(with("<s>a"), [&[1], a.as_slice()].concat());
    assert_eq!(with("<s> a"), [&[1], with(" a").as_slice()].concat());
    assert_eq!(with("a</s>a"), [a.as_slice(), &[2], a.as_slice()].concat());
    assert_eq!(with("<s>"), [1]);
    let mut vocab = spm();
    vocab.add_space_prefix = Some(false);
    let bare = build(&vocab);
    assert_eq!(bare.decode(&bare.encode(" a", PARSE).unwrap(), false), " a");
    assert_eq!(bare.encode("<s>a", PARSE).unwrap(), [&[1], bare.encode("a", PARSE).unwrap().as_slice()].concat());
    let text = "  two  spaces ";
    for specials in [Specials::Parse, Specials::Plain] {
        let ids = tokenizer.encode(text, EncodeOptions { specials, ..PLAIN }).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
}

#[test]
fn a_bos_is_never_doubled() {
    let tokenizer = build(&spm());
    let auto = EncodeOptions { specials: Specials::Parse, ..EncodeOptions::default() };
    let one = tokenizer.encode("a", auto).unwrap();
    assert_eq!(one[0], 1);
    assert_eq!(tokenizer.encode("<s>a", auto).unwrap(), one);
    assert_eq!(tokenizer.encode_chat("<s>a").unwrap(), one);
    assert_eq!(tokenizer.encode_chat("a").unwrap(), one);
    assert_eq!(tokenizer.encode("", auto).unwrap(), [1]);
    // Plain text that spells BOS is not one.
    let plain = tokenizer.encode("<s>", EncodeOptions::default()).unwrap();
    assert_eq!((plain[0], plain.contains(&2)), (1, false));
    assert!(plain.len() > 1 && plain[1] != 1);

    let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true, "add_eos_token": true});
    let configured = json_tokenizer().with_config(&config).unwrap();
    let ids = configured.encode("a", auto).unwrap();
    assert_eq!((ids[0], ids[ids.len() - 1]), (1, 2));
    assert_eq!(configured.encode("<s>a</s>", auto).unwrap(), ids);
    assert_eq!(configured.encode_chat("<s>a").unwrap(), ids[..ids.len() - 1]);
    assert!(json_tokenizer().with_config(&json!({"add_bos_token": true})).is_err());
    assert!(json_tokenizer().with_config(&json!({"bos_token": "<absent>"})).is_err());
}

#[test]
fn end_ids_are_the_union() {
    let tokenizer = build(&bpe());
    assert_eq!(tokenizer.end_ids(), [2]);
    let more = tokenizer.clone().with_end_ids([7, 2]).with_end_ids([300]);
    assert_eq!(more.end_ids(), [2, 7, 300]);
    assert!(more.is_end(7) && more.is_end(2) && !more.is_end(1));
    assert!(!tokenizer.is_end(7));

    let mut vocab = bpe();
    for (text, kind) in [("<|im_end|>", 3), ("<|eot_id|>", 3), ("<|end|>", 4), ("<|endoftext|>", 1)] {
        vocab.tokens.push(text.into());
        vocab.token_types.as_mut().unwrap().push(kind);
    }
    // A normal token is a word, whatever it looks like.
    assert_eq!(build(&vocab).end_ids(), [2, 320, 321, 322]);
    vocab.eot = Some(323);
    assert_eq!(build(&vocab).end_ids(), [2, 320, 321, 322, 323]);
    // Where messages have their own end, it does not end the answer.
    for text in ["<|return|>", "<|call|>"] {
        vocab.tokens.push(text.into());
        vocab.token_types.as_mut().unwrap().push(3);
    }
    assert_eq!(build(&vocab).end_ids(), [2, 320, 321, 323, 324, 325]);
}

/// SentencePiece's merging with a plain scan for the best pair, as the reference describes it.
fn naive_spm(vocab: &OwnedVocab, text: &str) -> Vec<TokenId> {
    let find = |piece: &str| {
        let id = vocab.tokens.iter().position(|token| token == piece)?;
        (vocab.token_types.as_ref().unwrap()[id] == 1).then_some(id)
    };
    let mut symbols: Vec<String> = format!(" {text}").replace(' ', "\u{2581}").chars().map(String::from).collect();
    if text.is_empty() {
        symbols.clear();
    }
    loop {
        let best = (0..symbols.len().saturating_sub(1))
            .filter_map(|i| Some((vocab.scores.as_ref().unwrap()[find(&(symbols[i].clone() + &symbols[i + 1]))?], i)))
            .fold(None, |best: Option<(f32, usize)>, new| if best.is_none_or(|best| new.0 > best.0) { Some(new) } else { best });
        let Some((_, i)) = best else { break };
        let right = symbols.remove(i + 1);
        symbols[i].push_str(&right);
    }
    symbols
        .iter()
        .flat_map(|symbol| match find(symbol) {
            Some(id) => vec![id as TokenId],
            None => symbol.bytes().map(|byte| 3 + TokenId::from(byte)).collect(),
        })
        .collect()
}

#[test]
fn spm_merges_in_the_order_of_scores() {
    let mut vocab = spm();
    let mut random = common::text::Random(11);
    for round in 0..60 {
        // Small whole scores: many ties.
        for score in vocab.scores.as_mut().unwrap() {
            *score = -((random.below(6) * (1 + round % 3)) as f32);
        }
        let tokenizer = build(&vocab);
        for _ in 0..20 {
            let parts = ["the", "re", "s", "e", "n", " ", "or", "t", "i", "\u{e9}", "ion", "a"];
            let text: String = (0..random.below(14)).map(|_| parts[random.below(parts.len())]).collect();
            assert_eq!(tokenizer.encode(&text, PLAIN).unwrap(), naive_spm(&vocab, &text), "{text:?}");
        }
    }
}

#[test]
fn spm_without_byte_tokens_and_with_unused_ones() {
    let vocab = OwnedVocab {
        model: "llama".into(),
        tokens: ["<unk>", "a", "b", "ab", "abc", "c", "\u{2581}", "<u d>"].map(String::from).to_vec(),
        scores: Some(vec![0.0, -1.0, -1.0, -2.0, -3.0, -1.0, -1.0, 0.0]),
        token_types: Some(vec![2, 1, 1, 5, 5, 1, 1, 4]),
        unk: Some(0),
        add_bos: Some(false),
        ..OwnedVocab::default()
    };
    let tokenizer = build(&vocab);
    let encode = |text: &str| tokenizer.encode(text, PLAIN).unwrap();
    // Tokens out of use are merged through and taken apart again.
    assert_eq!(encode("abc"), [6, 1, 2, 5]);
    // A run of unknown characters is one token.
    assert_eq!(encode("axyza"), [6, 1, 0, 1]);
    // User-defined tokens are found in plain text too, and text begins anew after them.
    assert_eq!(encode("a<u d>b"), [6, 1, 7, 6, 2]);
}

#[test]
fn a_megabyte_is_encoded_in_reasonable_time() {
    let (spm, bpe, json) = (build(&spm()), build(&bpe()), json_tokenizer());
    for unit in ["a", " ", "the free ", "\u{65e5}", "<s"] {
        let text = unit.repeat((1 << 20) / unit.len());
        for tokenizer in [&spm, &bpe] {
            let start = std::time::Instant::now();
            let ids = tokenizer.encode(&text, PLAIN).unwrap();
            assert_eq!(tokenizer.decode(&ids, false), text);
            // Quadratic work would take minutes.
            assert!(start.elapsed().as_secs() < 20, "{unit:?}: {:?}", start.elapsed());
        }
    }
    let text = " ".repeat(1 << 20);
    assert_eq!(json.encode(&text, PLAIN).unwrap(), bpe.encode(&text, PLAIN).unwrap());
}

#[test]
fn hostile_vocabularies_are_refused_by_name() {
    let check = |change: &dyn Fn(&mut OwnedVocab), base: OwnedVocab, part: &str| {
        let mut vocab = base;
        change(&mut vocab);
        match vocab.with(|view| Tokenizer::from_vocab(&view)) {
            Err(error @ TextError::Tokenizer { .. }) => {
                assert!(error.to_string().contains(part), "{error} does not name {part}");
            }
            other => panic!("{part}: {other:?}"),
        }
    };
    check(&|v| v.model = "bert".into(), bpe(), "gpt2 or llama");
    check(&|v| v.model = "".into(), bpe(), "gpt2 or llama");
    check(&|v| v.pre = Some("nonesuch".into()), bpe(), "qwen2");
    check(&|v| v.pre = None, bpe(), "tokenizer.ggml.pre");
    check(&|v| v.tokens.clear(), bpe(), "at least one token");
    check(&|v| v.merges = None, bpe(), "tokenizer.ggml.merges");
    for line in ["", " ", "a", "a ", " a", "a b c", "a  b", "zzzz a", "a zzzz", "a !"] {
        check(&|v| v.merges.as_mut().unwrap()[5] = line.into(), bpe(), "merges[5]");
    }
    check(&|v| v.merges.as_mut().unwrap()[0] = "< s>".into(), bpe(), "merges[0]");
    for id in [320, u32::MAX] {
        check(&|v| v.bos = Some(id), bpe(), "bos_token_id");
        check(&|v| v.eos = Some(id), bpe(), "eos_token_id");
        check(&|v| v.eot = Some(id), bpe(), "eot_token_id");
        check(&|v| v.pad = Some(id), bpe(), "padding_token_id");
        check(&|v| v.unk = Some(id + (512 - 320) * u32::from(id == 320)), spm(), "unknown_token_id");
    }
    check(&|v| v.token_types.as_mut().unwrap()[9] = 7, bpe(), "token_type[9]");
    check(&|v| v.token_types.as_mut().unwrap()[9] = -1, bpe(), "token_type[9]");
    check(&|v| v.token_types.as_mut().unwrap().truncate(9), bpe(), "token_type");
    check(&|v| v.token_types = None, spm(), "token_type");
    check(&|v| v.scores = None, spm(), "scores");
    check(&|v| v.scores.as_mut().unwrap()[7] = f32::NAN, spm(), "scores[7]");
    check(&|v| v.scores.as_mut().unwrap().push(0.0), spm(), "scores");
    check(&|v| v.token_types.as_mut().unwrap()[70] = 1, spm(), "no <0x43>");
    check(&|v| v.tokens[70] = "<0xZZ>".into(), spm(), "tokens[70]");
    check(&|v| v.charsmap = Some(vec![1, 2]), spm(), "precompiled_charsmap");
    check(&|v| (v.add_bos, v.bos) = (Some(true), None), bpe(), "bos_token_id");
    check(&|v| v.tokens.iter_mut().for_each(|t| *t = format!("{t}\u{4e00}")), bpe(), "tokens for single bytes");
}

#[test]
fn odd_vocabularies_still_work() {
    // Two tokens of one text: the first is the one that is made.
    let mut vocab = bpe();
    vocab.tokens.push("a".into());
    vocab.token_types.as_mut().unwrap().push(1);
    let tokenizer = build(&vocab);
    assert_eq!(tokenizer.encode("a", PLAIN).unwrap(), [67]);
    assert_eq!(tokenizer.decode(&[67, 320], false), "aa");
    // An empty token, infinite scores, extreme numbers.
    let mut vocab = spm();
    vocab.tokens[300].clear();
    for (id, score) in [(301, f32::INFINITY), (302, f32::NEG_INFINITY), (303, f32::MIN), (304, -0.0)] {
        vocab.scores.as_mut().unwrap()[id] = score;
    }
    let tokenizer = build(&vocab);
    let text = "the free software license";
    assert_eq!(tokenizer.decode(&tokenizer.encode(text, PLAIN).unwrap(), false), text);
    // A vocabulary that lacks a byte says so where it is needed.
    let mut vocab = bpe();
    let x = vocab.tokens.iter().position(|token| token == "x").unwrap();
    vocab.tokens[x] = "xx".into();
    let merges = vocab.merges.as_mut().unwrap();
    merges.retain(|line| !line.contains('x'));
    let tokenizer = build(&vocab);
    match tokenizer.encode("ab<s>ax", PARSE) {
        Err(TextError::Unencodable { at: 6, found }) => assert!(found.contains("0x78"), "{found}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn hostile_json_is_refused() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gguf/bpe_tokenizer.json");
    let good: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let check = |change: &dyn Fn(&mut Value), part: &str| {
        let mut file = good.clone();
        change(&mut file);
        match Tokenizer::from_json(file.to_string().as_bytes()) {
            Err(error) => assert!(error.to_string().contains(part), "{error} does not name {part}"),
            Ok(_) => panic!("{part}: accepted"),
        }
    };
    check(&|f| f["model"]["vocab"]["zz"] = 4_294_967_295_u64.into(), "model.vocab");
    check(&|f| f["model"]["vocab"]["zz"] = 5.into(), "one token for each id");
    check(&|f| f["model"]["vocab"]["zz"] = json!("x"), "model.vocab");
    check(&|f| f["model"]["merges"] = json!([["q", "zzz"]]), "model");
    for line in
        [json!("aaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbbbbbb"), json!(["t", "zzz"]), json!("t"), json!([1, 2]), json!(null)]
    {
        check(&|f| f["model"]["merges"][3] = line.clone(), "merges[3]");
    }
    check(&|f| f["model"]["dropout"] = json!(0.5), "dropout");
    check(&|f| f["model"]["continuing_subword_prefix"] = json!("##"), "continuing_subword_prefix");
    check(&|f| f["model"]["type"] = json!("WordPiece"), "BPE or Unigram");
    check(&|f| f["model"] = json!(null), "BPE or Unigram");
    check(&|f| f["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), "decoder");
    check(&|f| f["decoder"] = json!(null), "decoder");
    check(&|f| f["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "normalizer");
    check(&|f| f["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "Nmt"}]}), "normalizer");
    check(
        &|f| f["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}),
        "pre_tokenizer",
    );
    check(&|f| f["added_tokens"][0]["id"] = json!(77), "added_tokens");
    check(&|f| f["added_tokens"][0]["id"] = json!(-1), "added_tokens[0]");
    check(&|f| f["added_tokens"][0]["content"] = json!(""), "added_tokens[0]");
    check(
        &|f| {
            f["post_processor"] =
                json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}], "special_tokens": {}})
        },
        "post_processor",
    );
    for bytes in [&b""[..], b"{}", b"[]", b"null", b"{\"model\":", b"\xff\xfe", &[b'['; 100_000]] {
        assert!(matches!(Tokenizer::from_json(bytes), Err(TextError::Tokenizer { .. })));
    }
}

#[test]
fn post_processors_name_bos() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gguf/bpe_tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    file["truncation"] = json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"});
    file["post_processor"] = json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}]});
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.adds_bos()), (Some(1), true));
    let auto = EncodeOptions { specials: Specials::Parse, ..EncodeOptions::default() };
    // Neither cut nor filled up, whatever the file says.
    assert_eq!(tokenizer.encode("Hello world", auto).unwrap(), [1, 42, 71, 78, 78, 81, 275, 276, 78, 70]);
    assert_eq!(tokenizer.encode("<s>Hello world", auto).unwrap(), [1, 42, 71, 78, 78, 81, 275, 276, 78, 70]);
}

/// SentencePiece as converted to tokenizer.json: normalizer, byte fallback, and a decoder that takes off the first space.
#[test]
fn sentencepiece_in_json() {
    let vocab = spm();
    let tokens: serde_json::Map<String, Value> =
        vocab.tokens.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
    let file = json!({
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": true, "normalized": false},
            {"id": 1, "content": "<s>", "special": true, "normalized": false},
            {"id": 2, "content": "</s>", "special": true, "normalized": false}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": tokens, "merges": []},
    });
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
    let gguf = build(&vocab);
    for id in 0..gguf.vocab_len() as TokenId {
        assert_eq!(tokenizer.token_bytes(id), gguf.token_bytes(id), "{id}");
    }
    for text in ["a", " a b", "\u{65e5}\u{1f642}", "x<s>y"] {
        let ids = tokenizer.encode(text, PLAIN).unwrap();
        assert_eq!(tokenizer.decode(&ids, true), text);
    }
    assert_eq!(tokenizer.encode("<s>", PARSE).unwrap(), [1]);
}

fn byte_tokenizer() -> Tokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["\u{2581}Hi", "DEF", "G", "HI", "J", "ABC"].map(String::from));
    let len = tokens.len();
    let types = (0..len).map(|id| [2, 3, 3].get(id).copied().unwrap_or(if id < 259 { 6 } else { 1 })).collect();
    build(&OwnedVocab {
        model: "llama".into(),
        tokens,
        scores: Some(vec![0.0; len]),
        token_types: Some(types),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..OwnedVocab::default()
    })
}

fn stream(tokenizer: &Tokenizer, ids: &[TokenId], options: DetokenizerOptions) -> (Vec<String>, Option<usize>) {
    let mut detokenizer = Detokenizer::new(tokenizer, options).unwrap();
    let mut chunks: Vec<String> = ids.iter().map(|&id| detokenizer.push(id).to_owned()).collect();
    chunks.push(detokenizer.finish().to_owned());
    let stopped = detokenizer.stopped();
    assert_eq!(detokenizer.finish(), "");
    assert_eq!(detokenizer.push(ids.first().copied().unwrap_or(1)), "");
    (chunks, stopped)
}

#[test]
fn characters_stay_whole_however_tokens_cut_them() {
    let tokenizer = byte_tokenizer();
    let text = "\u{1f642} \u{65e5}\u{672c}\u{8a9e} \u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467} e\u{301}";
    let ids: Vec<TokenId> = text.bytes().map(|byte| 3 + TokenId::from(byte)).collect();
    let (chunks, _) = stream(&tokenizer, &ids, DetokenizerOptions::default());
    assert_eq!(chunks.concat(), text);
    assert!(chunks.iter().all(|chunk| !chunk.contains('\u{fffd}') && chunk.chars().count() <= 1));
    // Cut anywhere, broken anywhere: what streams is what decodes.
    let mut random = common::text::Random(3);
    for _ in 0..2000 {
        let ids: Vec<TokenId> = (0..random.below(12)).map(|_| random.below(266) as TokenId).collect();
        for skip_special in [true, false] {
            let options = DetokenizerOptions { skip_special, ..DetokenizerOptions::default() };
            assert_eq!(stream(&tokenizer, &ids, options).0.concat(), tokenizer.decode(&ids, skip_special), "{ids:?}");
        }
    }
    let (chunks, _) = stream(&tokenizer, &ids[..3], DetokenizerOptions::default());
    assert_eq!(chunks, ["", "", "", "\u{fffd}"]);
}

#[test]
fn the_first_space_goes_with_the_beginning() {
    let tokenizer = byte_tokenizer();
    let text = |ids: &[TokenId], skip_special, start| {
        let options = DetokenizerOptions { skip_special, start, stop: Vec::new() };
        stream(&tokenizer, ids, options).0.concat()
    };
    assert_eq!(text(&[259, 259], true, Start::Text), "Hi Hi");
    assert_eq!(text(&[259, 259], true, Start::Continuation), " Hi Hi");
    assert_eq!(text(&[1, 259], true, Start::Text), "Hi");
    assert_eq!(text(&[1, 259], false, Start::Text), "<s> Hi");
}

#[test]
fn a_stop_string_over_several_tokens() {
    let tokenizer = byte_tokenizer();
    let options = || DetokenizerOptions { stop: vec!["DEFGHIJ".into()], ..DetokenizerOptions::default() };
    let (abc, def, g, hi, j) = (264, 260, 261, 262, 263);
    let (chunks, stopped) = stream(&tokenizer, &[abc, def, g, hi, j, abc, abc], options());
    assert_eq!((chunks.concat().as_str(), stopped), ("ABC", Some(0)));
    assert_eq!(chunks[0], "ABC");
    // What only looked like it comes out, late and whole.
    let (chunks, stopped) = stream(&tokenizer, &[abc, def, g, g], options());
    assert_eq!((chunks.concat().as_str(), stopped), ("ABCDEFGG", None));
    let (chunks, stopped) = stream(&tokenizer, &[abc, def, g], options());
    assert_eq!((chunks, stopped), (["ABC", "", "", "DEFG"].map(String::from).to_vec(), None));
    let empty = DetokenizerOptions { stop: vec![String::new()], ..DetokenizerOptions::default() };
    assert!(matches!(Detokenizer::new(&tokenizer, empty), Err(TextError::Parameter { name: "stop", .. })));
}

/// The first byte at which a stop is complete decides, and of those complete there the longest.
fn oracle(text: &str, stops: &[String]) -> (usize, Option<usize>) {
    let mut best: Option<(usize, usize, usize)> = None;
    for (index, stop) in stops.iter().enumerate() {
        if let Some(start) = text.find(stop.as_str()) {
            let new = (start + stop.len(), start, index);
            if best.is_none_or(|best| new < best) {
                best = Some(new);
            }
        }
    }
    best.map_or((text.len(), None), |(_, start, index)| (start, Some(index)))
}

#[test]
fn random_stops_against_the_whole_text() {
    let tokenizer = byte_tokenizer();
    let mut random = common::text::Random(5);
    let alphabet = ["a", "b", "ab", "\u{e9}", "\u{65e5}", "\u{1f642}"];
    for _ in 0..4000 {
        let mut words =
            |most: usize| -> String { (0..1 + random.below(most)).map(|_| alphabet[random.below(alphabet.len())]).collect() };
        let mut stops: Vec<String> = vec![words(3), words(5), words(2)];
        stops.dedup();
        let text = words(16);
        let ids: Vec<TokenId> = text.bytes().map(|byte| 3 + TokenId::from(byte)).collect();
        let (cut, stopped) = oracle(&text, &stops);
        let options = DetokenizerOptions { stop: stops.clone(), ..DetokenizerOptions::default() };
        let (chunks, found) = stream(&tokenizer, &ids, options);
        assert_eq!(chunks.concat(), text[..cut], "{text:?} {stops:?}");
        assert_eq!(found.map(|i| &stops[i]), stopped.map(|i| &stops[i]), "{text:?} {stops:?}");
        // Nothing is held that could not become a stop.
        if stopped.is_none() {
            let held = chunks.last().unwrap();
            assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held.as_str())), "{held:?} {stops:?}");
        }
    }
}

#[test]
fn everything_goes_to_other_threads() {
    fn check<T: Send + Sync + Clone>() {}
    check::<Tokenizer>();
    check::<ChatTemplate>();
    check::<Detokenizer>();
    check::<Message>();
    check::<RenderOptions>();
    check::<GgufVocab<'static>>();
}
