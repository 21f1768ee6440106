//! Shards and indices that disagree.

use super::scratch::Scratch;
use super::{FIXTURES, MODES, assert_malformed, entry, safetensors_file};
use loquat::LoadError;
use loquat::weights::{LoadMode, WeightSource, no_progress, open};
use std::fs;
use std::path::Path;

fn sharded(name: &str) -> (Scratch, String) {
    let scratch = Scratch::new(name);
    let folder = Path::new(FIXTURES).join("arch/llama_sharded");
    for file in fs::read_dir(folder).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), scratch.folder().join(file.file_name())).unwrap();
    }
    let index = fs::read_to_string(scratch.path("model.safetensors.index.json")).unwrap();
    (scratch, index)
}

fn open_error(path: &Path) -> LoadError {
    let [mapped, read] = MODES.map(|mode| open(path, mode, &mut no_progress).unwrap_err());
    assert_eq!(mapped.to_string(), read.to_string());
    mapped
}

#[test]
fn shards_cut_short_or_lengthened_never_open() {
    let (scratch, _) = sharded("cut");
    let shard = scratch.path("model-00002-of-00003.safetensors");
    let whole = fs::read(&shard).unwrap();
    for keep in [whole.len() - 1, whole.len() - 4096, whole.len() / 2, 100, 7, 0] {
        fs::write(&shard, &whole[..keep]).unwrap();
        let error = open_error(scratch.folder());
        assert!(matches!(&error, LoadError::Malformed { file, .. } if file.contains("00002")), "{keep}: {error}");
    }
    fs::write(&shard, [&whole[..], b"x"].concat()).unwrap();
    assert_malformed(open_error(scratch.folder()), "data");
    fs::write(&shard, &whole).unwrap();
    open(scratch.folder(), LoadMode::Map, &mut no_progress).unwrap();
}

#[test]
fn index_naming_a_shard_that_is_missing() {
    let (scratch, _) = sharded("missing-shard");
    fs::remove_file(scratch.path("model-00003-of-00003.safetensors")).unwrap();
    assert_malformed(open_error(scratch.folder()), "model-00003-of-00003.safetensors");
}

#[test]
fn index_and_headers_that_disagree() {
    let (scratch, index) = sharded("disagree");
    let path = scratch.path("model.safetensors.index.json");
    let mut value: serde_json::Value = serde_json::from_str(&index).unwrap();
    let map = value["weight_map"].as_object_mut().unwrap();
    let (first, shard) = map.iter().next().map(|(name, shard)| (name.clone(), shard.clone())).unwrap();
    let (other, other_shard) = map.iter().find(|(_, s)| **s != shard).map(|(n, s)| (n.clone(), s.clone())).unwrap();

    let check = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>), name: &str| {
        let mut changed = value.clone();
        change(changed["weight_map"].as_object_mut().unwrap());
        fs::write(&path, changed.to_string()).unwrap();
        assert_malformed(open_error(scratch.folder()), name);
    };
    // Two entries swapped, one missing from the index, one missing from the shards.
    check(
        &|map| {
            map.insert(first.clone(), other_shard.clone());
            map.insert(other.clone(), shard.clone());
        },
        "tensor",
    );
    check(&|map| drop(map.remove(&other)), &other);
    check(&|map| drop(map.insert("no.such.tensor".to_owned(), shard.clone())), "no.such.tensor");

    // A tensor in two shards: the last shard becomes a copy of the first with its own tensors' place in the index.
    fs::write(&path, &index).unwrap();
    fs::copy(scratch.path(shard.as_str().unwrap()), scratch.path(other_shard.as_str().unwrap())).unwrap();
    assert_malformed(open_error(scratch.folder()), "tensor");
}

#[test]
fn index_leading_out_of_the_folder() {
    let (scratch, index) = sharded("escape");
    let outside = scratch.folder().parent().unwrap().join("model-00001-of-00003.safetensors");
    let path = scratch.path("model.safetensors.index.json");
    for name in ["../model-00001-of-00003.safetensors", outside.to_str().unwrap(), "sub/x", "..", "", "C:x", "a\\\\b"] {
        fs::write(&path, index.replace("model-00001-of-00003.safetensors", name)).unwrap();
        assert_malformed(open_error(scratch.folder()), "weight_map");
    }
}

#[test]
fn index_that_is_no_index() {
    let (scratch, index) = sharded("no-index");
    let path = scratch.path("model.safetensors.index.json");
    for text in ["", "{}", "[]", "{\"weight_map\": 3}", "{\"weight_map\": {\"a\": 3}}", "{\"weight_map\":{},\"weight_map\":{}}"] {
        fs::write(&path, text).unwrap();
        assert_malformed(open_error(scratch.folder()), "index");
    }
    let twice =
        index.replacen("\"weight_map\": {", "\"weight_map\": {\"lm_head.weight\": \"model-00001-of-00003.safetensors\",", 1);
    assert_ne!(twice, index);
    fs::write(&path, twice).unwrap();
    assert_malformed(open_error(scratch.folder()), "lm_head.weight");
    fs::write(&path, b"{\"\xff\"").unwrap();
    assert_malformed(open_error(scratch.folder()), "text");
}

#[test]
fn files_that_the_index_does_not_list_are_ignored() {
    let (scratch, _) = sharded("stray");
    let before = open(scratch.folder(), LoadMode::Read, &mut no_progress).unwrap();
    let name = before.names().next().unwrap();
    let view = before.tensor(name).unwrap();
    let stray = entry(name, "U8", &format!("[{}]", view.bytes.len()), &format!("[0,{}]", view.bytes.len()));
    scratch.write("stray.safetensors", safetensors_file(&format!("{{{stray}}}"), &vec![0xaa; view.bytes.len()]));
    scratch.write("model.safetensors", b"garbage");
    let after = open(scratch.folder(), LoadMode::Map, &mut no_progress).unwrap();
    assert!(after.names().eq(before.names()));
    assert!(after.tensor(name).unwrap().bytes == view.bytes);
}
