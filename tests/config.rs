//! Configurations and the tensors that belong to them: what is wrong is an error that names the field or the tensor and what is
//! there; nothing is guessed.
#![allow(clippy::unwrap_used)]

#[path = "../fuzz/bodies/config.rs"]
mod body;
mod common;
#[path = "common/counting.rs"]
mod counting;

use common::engines::alone;
use common::golden::{fixtures, json as json_file};
use common::made::{Sizes, Tensors};
use common::text::Random;
use counting::peak_of;
use loquat::arch::{Arch, Config, Naming, RopeScaling};
use loquat::engine::{Engine, EngineConfig};
use loquat::model::{ModelFiles, SideTexts};
use loquat::{ConfigError, Error, LoadError};
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// Runs the fuzz target's body within bounds: a model of many layers is the largest thing that a small file may ask for.
fn run(data: &[u8]) {
    let ((), peak_bytes) = peak_of(|| body::run(data));
    assert!(peak_bytes < (4 << 20) + 64 * data.len(), "{peak_bytes} bytes for {}", String::from_utf8_lossy(data));
}

/// Configurations of the fixtures, and one for each other way to spell or scale.
fn seeds() -> Vec<Value> {
    let mut list = Vec::new();
    for entry in std::fs::read_dir(fixtures().join("arch")).unwrap() {
        let folder = entry.unwrap().path();
        list.extend(["config.json", "config_v4.json"].map(|name| json_file(&folder.join(name))));
    }
    assert!(list.len() >= 16);
    let with = |section: &str, scaling: Value| {
        let mut config = Sizes::TINY.config();
        config[section] = scaling;
        config
    };
    let divisors = [1.0, 1.5, 2.0, 4.0];
    list.push(with(
        "rope_scaling",
        json!({ "type": "longrope", "short_factor": divisors, "long_factor": divisors, "original_max_position_embeddings": 32 }),
    ));
    list.push(with("rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1, "truncate": false, "attention_factor": 1.1 })));
    list.push(with("rope_parameters", json!({ "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32 })));
    // The keys of a GGUF file.
    list.push(json!({
        "model_type": "llama", "vocab_size": 256, "context_length": 128, "embedding_length": 64, "block_count": 2,
        "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 16, "rope.freq_base": 1e4,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
    }));
    list
}

/// Values that no field expects, beside those that some do.
fn odd_values() -> Vec<Value> {
    let mut list = vec![json!(null), json!(true), json!(""), json!("NaN"), json!([]), json!([[1]]), json!({}), json!({ "a": 1 })];
    list.extend([json!(-1), json!(0), json!(1), json!(2), json!(3), json!(7), json!(1.5), json!(-0.0), json!(1u64 << 40)]);
    list.extend([
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1e300),
        json!(-1e300),
        json!(1e-300),
        json!(5e-324),
        json!(1e39),
        json!(1e-46),
    ]);
    list.push(json!("x".repeat(1000)));
    list
}

/// Dotted paths of all fields.
fn paths(config: &Value) -> Vec<Vec<String>> {
    let mut list = Vec::new();
    for (key, value) in config.as_object().unwrap() {
        list.push(vec![key.clone()]);
        if value.is_object() {
            list.extend(paths(value).into_iter().map(|rest| [vec![key.clone()], rest].concat()));
        }
    }
    list
}

/// `config` with the field at `path` replaced, or removed.
fn changed(config: &Value, path: &[String], value: Option<Value>) -> Value {
    let mut config = config.clone();
    let (last, sections) = path.split_last().unwrap();
    let section = sections.iter().fold(&mut config, |at, key| &mut at[key]).as_object_mut().unwrap();
    match value {
        Some(value) => _ = section.insert(last.clone(), value),
        None => _ = section.remove(last),
    }
    config
}

fn spec_of(config: &Value) -> Result<loquat::arch::ModelSpec, ConfigError> {
    let config = Config::from_json(&config.to_string())?;
    (Arch::find(&config, Naming::HuggingFace)?.spec)(&config)
}

#[test]
fn every_field_removed_or_changed_is_fine_or_named() {
    let (mut fine, mut named) = (0, 0);
    for config in seeds() {
        let readable = spec_of(&config).is_ok();
        for path in paths(&config) {
            let values = odd_values().into_iter().map(Some).chain([None]);
            for value in values {
                let config = changed(&config, &path, value.clone());
                run(config.to_string().as_bytes());
                match spec_of(&config) {
                    Ok(_) => fine += 1,
                    Err(ConfigError::UnknownArch { found, known }) => {
                        assert!(path == ["model_type"] && known.contains("llama"), "{found}");
                    }
                    Err(error) => {
                        named += 1;
                        // A list as long as half a head contradicts whatever changes the head.
                        let says = error.to_string();
                        let list = says.contains("short_factor: expected") && says.contains(" numbers above 0");
                        // Other families have fields that contradict each other, and names that only they use: some field is named.
                        let plain = config["model_type"] == "llama";
                        let named = if plain { says.contains(path.last().unwrap()) } else { says.starts_with("config: ") };
                        assert!(!readable || list || named, "{path:?} = {value:?}: {says}");
                    }
                }
            }
        }
    }
    assert!(fine > 2000 && named > 2000, "{fine} fine, {named} named");
}

#[test]
fn configs_cut_and_mixed_at_random() {
    let seeds: Vec<Vec<u8>> = seeds().iter().map(|config| config.to_string().into_bytes()).collect();
    for seed in &seeds {
        (0..seed.len()).step_by(7).for_each(|len| run(&seed[..len]));
    }
    let mut random = Random(3);
    for _ in 0..6000 {
        let mut data = seeds[random.below(seeds.len())].clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(data.len());
            match random.below(3) {
                0 => data[at] = b"0123456789-.eE\"[]{},:tnf"[random.below(24)],
                1 => _ = data.splice(at..at, b"0123456789"[..random.below(10)].iter().copied()),
                _ => _ = data.drain(at..data.len().min(at + random.below(9))),
            }
        }
        run(&data);
    }
    run(&b"[".repeat(100_000));
    run(format!("{{\"a\":{}", "{\"a\":".repeat(100_000)).as_bytes());
    run(&[0xff; 100]);
}

#[test]
fn what_a_model_cannot_do_without() {
    for field in [
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ] {
        let path = [field.to_owned()];
        let config = Sizes::TINY.config();
        for absent in [None, Some(Value::Null)] {
            let error = spec_of(&changed(&config, &path, absent)).unwrap_err();
            assert_eq!(error, ConfigError::Missing { field: field.into() });
        }
        let numbers = [json!("8"), json!([8]), json!(true), json!(-1), json!(0), json!(1e300), json!(-5e-324)];
        let counts = [json!(1.5), json!(u64::MAX), json!(1u64 << 39)];
        let bad = numbers.into_iter().chain(if field == "rms_norm_eps" { Vec::new() } else { counts.into() });
        for value in bad.filter(|v| field != "model_type" || !v.is_string()) {
            let error = spec_of(&changed(&config, &path, Some(value.clone()))).unwrap_err();
            assert!(matches!(&error, ConfigError::Invalid { field: f, .. } if f == field), "{field} = {value}: {error}");
        }
    }
}

#[test]
fn what_is_unknown_is_named_beside_what_is_known() {
    let config = Sizes::TINY.config();
    let says = |field: &[&str], value: Value, words: &[&str]| {
        let path: Vec<_> = field.iter().map(|&f| f.to_owned()).collect();
        let mut config = config.clone();
        config["rope_scaling"] = json!({ "factor": 2.0 });
        let error = spec_of(&changed(&config, &path, Some(value))).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
    };
    says(&["model_type"], json!("mamba9"), &["architecture", "mamba9", "llama"]);
    says(&["hidden_act"], json!("swigloo"), &["hidden_act", "swigloo", "silu"]);
    says(&["rope_scaling", "rope_type"], json!("spiral"), &["rope_scaling.rope_type", "spiral", "yarn"]);
    says(&["rope_scaling", "type"], json!("spiral"), &["rope_scaling", "type", "spiral", "yarn"]);
    says(&["num_key_value_heads"], json!(3), &["num_key_value_heads", "3", "num_attention_heads = 2"]);
    says(&["num_attention_heads"], json!(3), &["num_attention_heads", "3", "hidden_size = 16"]);
    says(&["head_dim"], json!(7), &["head_dim", "7"]);
    let arch = ModelFiles::from_memory("m", Tensors::of(&Sizes::TINY).file(), &texts(json!({ "model_type": "mamba9" })));
    assert!(matches!(arch.map(drop), Err(LoadError::Config(ConfigError::UnknownArch { .. }))));
}

#[test]
fn both_spellings_of_scaling_mean_the_same() {
    let mut old = Sizes::TINY.config();
    old["rope_theta"] = json!(5000.0);
    old["rope_scaling"] = json!({ "type": "linear", "factor": 4.0 });
    let mut new = Sizes::TINY.config();
    new["rope_parameters"] = json!({ "rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0 });
    assert_eq!(spec_of(&old).unwrap(), spec_of(&new).unwrap());
    assert_eq!(spec_of(&old).unwrap().ropes[0].scaling, RopeScaling::Linear { factor: 4.0 });
}

fn texts(config: Value) -> SideTexts {
    SideTexts { config: Some(config.to_string()), ..SideTexts::default() }
}

fn files(tensors: &Tensors, config: &Value) -> ModelFiles {
    ModelFiles::from_memory("made up", tensors.file(), &texts(config.clone())).unwrap()
}

/// Logits of a prompt, or why there is no engine. The plan comes to the same answer without loading.
fn logits(tensors: &Tensors, config: &Value) -> Result<Vec<Vec<f32>>, LoadError> {
    let files = files(tensors, config);
    let planned = Engine::plan(&files, &EngineConfig::default()).map(drop);
    match Engine::new(&files, EngineConfig::default()) {
        Ok(_) => {
            planned.unwrap();
            Ok(alone(&files, EngineConfig::default(), &[1, 2, 3, 4], 3).1)
        }
        Err(Error::Load(error)) => {
            assert_eq!(planned.unwrap_err().to_string(), error.to_string(), "plan and load disagree");
            Err(error)
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn tied_embeddings_four_ways() {
    let tied = |flag: Value| {
        let mut config = Sizes::TINY.config();
        config["tie_word_embeddings"] = flag;
        config
    };
    let with_head = Tensors::of(&Sizes::TINY);
    let mut without = with_head.clone();
    without.0.remove("lm_head.weight");
    let mut head_is_embedding = with_head.clone();
    let embedding = with_head.0["model.embed_tokens.weight"].clone();
    head_is_embedding.0.insert("lm_head.weight".into(), embedding);

    let embedding_as_head = logits(&head_is_embedding, &tied(json!(false))).unwrap();
    let own_head = logits(&with_head, &tied(json!(false))).unwrap();
    assert_ne!(own_head, embedding_as_head, "the head does nothing");
    assert_eq!(logits(&without, &tied(json!(true))).unwrap(), embedding_as_head);
    assert_eq!(logits(&with_head, &tied(json!(true))).unwrap(), embedding_as_head, "tied, whatever else is in the file");
    for flag in [json!(false), json!(null)] {
        let error = logits(&without, &tied(flag)).unwrap_err();
        assert!(matches!(&error, LoadError::MissingTensor { name, .. } if name == "lm_head.weight"), "{error}");
    }
}

#[test]
fn every_tensor_is_needed_and_none_is_too_many() {
    let all = Tensors::of(&Sizes::TINY);
    let config = Sizes::TINY.config();
    logits(&all, &config).unwrap();
    for name in all.0.keys() {
        let mut tensors = all.clone();
        tensors.0.remove(name);
        let error = logits(&tensors, &config).unwrap_err();
        assert!(matches!(&error, LoadError::MissingTensor { name: n, .. } if n == name), "{name}: {error}");

        let (shape, values) = &all.0[name];
        let mut wrong = vec![[&shape[..shape.len() - 1], &[shape[shape.len() - 1] + 1]].concat(), vec![1], vec![0]];
        wrong.push([&shape[..], &[1]].concat());
        wrong.push(shape.iter().rev().copied().collect());
        wrong.push(vec![shape.iter().product()]);
        for found in wrong.into_iter().filter(|w| w != shape) {
            let len = found.iter().product();
            let mut tensors = all.clone();
            let values = values.iter().copied().cycle().take(len).collect();
            tensors.0.insert(name.clone(), (found.clone(), values));
            let error = logits(&tensors, &config).unwrap_err();
            assert!(
                matches!(&error, LoadError::Shape { tensor, expected, found: f } if tensor == name && expected == shape && *f == found),
                "{name}: {error}"
            );
        }
    }
    for extra in ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight", "lm_head.bias", "x"] {
        let mut tensors = all.clone();
        tensors.0.insert(extra.into(), (vec![4], vec![0.0; 4]));
        let error = logits(&tensors, &config).unwrap_err();
        assert!(matches!(&error, LoadError::ExtraTensor { name, .. } if name == extra), "{error}");
    }
    // What every old checkpoint carries.
    let mut tensors = all.clone();
    tensors.0.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (vec![4], vec![0.0; 4]));
    logits(&tensors, &config).unwrap();
    // Biases are read where the configuration says so, and are too many where it does not.
    let mut biased = all.clone();
    for l in 0..Sizes::TINY.layers {
        for part in ["q", "k", "v", "o"] {
            let name = format!("model.layers.{l}.self_attn.{part}_proj.bias");
            biased.0.insert(name, (vec![Sizes::TINY.hidden], vec![0.25; Sizes::TINY.hidden]));
        }
    }
    let with_bias = changed(&config, &["attention_bias".into()], Some(json!(true)));
    assert_ne!(logits(&biased, &with_bias).unwrap(), logits(&all, &config).unwrap());
    assert!(matches!(logits(&all, &with_bias), Err(LoadError::MissingTensor { name, .. }) if name.ends_with("_proj.bias")));
    assert!(matches!(logits(&biased, &config), Err(LoadError::ExtraTensor { name, .. }) if name.ends_with("_proj.bias")));
}

#[test]
fn end_ids_of_three_files_count_together() {
    let tokenizer = r#"{"added_tokens":[{"id":3,"content":"<s>","special":true,"normalized":false},
        {"id":4,"content":"</s>","special":true,"normalized":false}],
        "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},"decoder":{"type":"ByteLevel"},
        "model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}"#;
    let weights = Tensors::of(&Sizes::TINY).file();
    let ends = |config: Value, generation: Option<Value>, tokenizer_config: Option<Value>| -> Result<Vec<u32>, LoadError> {
        let texts = SideTexts {
            config: Some(changed(&Sizes::TINY.config(), &["eos_token_id".into()], Some(config)).to_string()),
            generation_config: generation.map(|ids| json!({ "eos_token_id": ids }).to_string()),
            tokenizer: tokenizer_config.is_some().then(|| tokenizer.to_owned()),
            tokenizer_config: tokenizer_config.map(|eos| json!({ "eos_token": eos }).to_string()),
            chat_template: None,
        };
        Ok(ModelFiles::from_memory("made up", weights.clone(), &texts)?.end_ids().to_vec())
    };
    assert!(ends(json!(null), None, None).unwrap().is_empty());
    assert_eq!(ends(json!(2), None, None).unwrap(), [2]);
    assert_eq!(ends(json!([9, 2, 9]), None, None).unwrap(), [2, 9]);
    assert_eq!(ends(json!(2), Some(json!([7, 5])), None).unwrap(), [2, 5, 7]);
    assert_eq!(ends(json!(2), Some(json!(null)), Some(json!("</s>"))).unwrap(), [2, 4]);
    assert_eq!(ends(json!([2, 1]), Some(json!(9)), Some(json!({ "content": "</s>" }))).unwrap(), [1, 2, 4, 9]);
    for bad in [json!(-1), json!("2"), json!([2, 1.5]), json!(1u64 << 32), json!({})] {
        for error in [ends(bad.clone(), None, None), ends(json!(1), Some(bad.clone()), None)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("eos_token_id"), "{bad}: {error}");
        }
    }
}

#[test]
fn broken_texts_beside_the_weights() {
    let weights = Tensors::of(&Sizes::TINY).file();
    let open = |texts: SideTexts| ModelFiles::from_memory("made up", weights.clone(), &texts).map(drop).unwrap_err().to_string();
    let good = || texts(Sizes::TINY.config());
    assert!(open(SideTexts::default()).contains("config.json"));
    for bad in ["", "{", "[]", "\u{0}", "{\"model_type\": 1e999}"] {
        assert!(open(SideTexts { config: Some(bad.into()), ..good() }).contains("config"), "{bad:?}");
        assert!(open(SideTexts { generation_config: Some(bad.into()), ..good() }).contains("config"), "{bad:?}");
    }
    assert!(open(SideTexts { tokenizer: Some("{".into()), ..good() }).contains("tokenizer"));
    assert!(open(SideTexts { tokenizer_config: Some("{".into()), ..good() }).contains("tokenizer_config.json"));
    assert!(open(SideTexts { chat_template: Some("{% if %}".into()), ..good() }).contains("chat template"));
}

/// In Llama's GGUF files the rows of q and k lie so that only whole heads can turn.
#[test]
fn a_gguf_head_turns_whole_or_not_at_all() {
    let fields = |rotary: usize| {
        let entries = [
            ("vocab_size", 64),
            ("context_length", 128),
            ("embedding_length", 64),
            ("block_count", 1),
            ("feed_forward_length", 96),
            ("attention.head_count", 4),
            ("rope.dimension_count", rotary),
        ];
        let whole = entries.map(|(key, n)| (format!("llama.{key}"), Value::from(n)));
        let eps = ("llama.attention.layer_norm_rms_epsilon".to_owned(), Value::from(1e-5));
        Config::from_gguf("llama", whole.into_iter().chain([eps]))
    };
    let read = |rotary| {
        let config = fields(rotary);
        Arch::find(&config, Naming::Gguf).and_then(|arch| arch.read(&config, Naming::Gguf))
    };
    assert!(read(16).is_ok());
    let refused = read(8).unwrap_err().to_string();
    assert_eq!(refused, "config: llama.rope.dimension_count: expected 16, the width of a head, found 8");
}
