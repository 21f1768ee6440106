//! Weights of every fixture, in every way of opening them, against values that other readers found.

// Tests may.
#![allow(clippy::unwrap_used)]

#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/scratch.rs"]
mod scratch;

use gguf_writer::{GgufWriter, everything};
use loquat::LoadError;
use loquat::dtype::FormatId;
use loquat::weights::{
    Bytes, Fill, Gguf, LoadMode, LoadProgress, MetaArray, MetaValue, Opened, Safetensors, StrArray, Synthetic, SyntheticTensor,
    WeightSource, no_progress, open, open_bytes, read_text_file,
};
use scratch::Scratch;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
const MODES: [LoadMode; 2] = [LoadMode::Map, LoadMode::Read];

fn fixtures(folder: &str, suffix: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(Path::new(FIXTURES).join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.to_str().unwrap().ends_with(suffix));
    files.sort();
    assert!(!files.is_empty());
    files
}

fn check_same(a: &dyn WeightSource, b: &dyn WeightSource) {
    assert!(a.names().eq(b.names()));
    assert_eq!(a.total_bytes(), b.total_bytes());
    for name in a.names() {
        let (a, b) = (a.tensor(name).unwrap(), b.tensor(name).unwrap());
        assert_eq!((a.format, a.shape), (b.format, b.shape), "{name}");
        assert!(a.bytes == b.bytes, "{name}");
    }
}

#[test]
fn gguf_fixtures_equal_what_another_reader_found() {
    let text = fs::read_to_string(Path::new(FIXTURES).join("gguf/reader.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    for path in fixtures("gguf", ".gguf") {
        let file = fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        let expected = &expected[name];
        let gguf = Gguf::open(&path, LoadMode::Map, &mut no_progress).unwrap();
        assert_eq!(gguf.label(), path.to_str().unwrap());
        assert_eq!(u64::from(gguf.version()), expected["version"]);

        let metadata = expected["metadata"].as_object().unwrap();
        assert!(gguf.entries().map(|(key, _)| key).eq(metadata.keys()), "{name}");
        for (key, value) in gguf.entries() {
            check_value(value, &metadata[key], &format!("{name}: {key}"));
        }

        let tensors = expected["tensors"].as_array().unwrap();
        assert!(gguf.names().eq(tensors.iter().map(|t| t[0].as_str().unwrap())), "{name}");
        for tensor in tensors {
            let what = format!("{name}: {}", tensor[0]);
            let view = gguf.tensor(tensor[0].as_str().unwrap()).unwrap();
            let shape: Vec<u64> = view.shape.iter().map(|&dim| dim as u64).collect();
            assert_eq!(Value::from(shape), tensor[1], "{what}");
            assert_eq!(u64::from(view.format.ggml_type().unwrap()), tensor[2], "{what}");
            let start = tensor[3].as_u64().unwrap() as usize;
            assert!(view.bytes == &file[start..start + tensor[4].as_u64().unwrap() as usize], "{what}");
        }
        assert!(gguf.tensor("no.such.tensor").is_none());
        assert!(gguf.metadata("no.such.key").is_none());
    }
}

fn check_value(value: &MetaValue, expected: &Value, what: &str) {
    assert_eq!(value.type_name(), expected[0], "{what}");
    match value {
        MetaValue::Array(MetaArray::Str(strings)) => {
            assert_eq!("string", expected[1], "{what}");
            assert_eq!(strings.len() as u64, expected[2], "{what}");
            let joined = strings.iter().collect::<Vec<_>>().join("\0");
            let sum: String = Sha256::digest(joined).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(sum, expected[3], "{what}");
        }
        MetaValue::Array(array) => {
            assert_eq!(array.len() as u64, expected[2], "{what}");
            assert_eq!(array.to_f64s().unwrap().iter().sum::<f64>(), expected[3].as_f64().unwrap(), "{what}");
        }
        MetaValue::Str(_) => assert_eq!(value.as_str(), expected[1].as_str(), "{what}"),
        MetaValue::Bool(_) => assert_eq!(value.as_bool(), expected[1].as_bool(), "{what}"),
        number => assert_eq!(number.as_f64(), expected[1].as_f64(), "{what}"),
    }
}

#[test]
fn safetensors_fixtures_equal_the_format_s_own_crate() {
    let mut files: Vec<PathBuf> = fixtures("gguf", ".safetensors");
    for folder in fixtures("arch", "") {
        files.extend(fixtures(folder.to_str().unwrap(), ".safetensors"));
    }
    for path in files {
        let bytes = fs::read(&path).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let file = Safetensors::open(&path, LoadMode::Map, &mut no_progress).unwrap();
        let mut names: Vec<&str> = file.names().collect();
        let mut expected = reference.names();
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected, "{path:?}");
        for name in names {
            let (view, expected) = (file.tensor(name).unwrap(), reference.tensor(name).unwrap());
            assert_eq!(view.shape, expected.shape(), "{path:?}: {name}");
            assert_eq!(view.format.name(), expected.dtype().to_string(), "{path:?}: {name}");
            assert!(view.bytes == expected.data(), "{path:?}: {name}");
        }
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let expected = metadata.metadata().clone().unwrap_or_default();
        assert_eq!(file.entries().count(), expected.len());
        assert!(expected.iter().all(|(key, value)| file.metadata(key) == Some(value)));
    }
}

#[test]
fn every_way_of_opening_gives_the_same_bytes() {
    let mut paths = fixtures("gguf", ".gguf");
    paths.extend(fixtures("arch", ""));
    for path in paths {
        let [mapped, read] = MODES.map(|mode| open(&path, mode, &mut no_progress).unwrap());
        check_same(&mapped, &read);
        for name in mapped.names() {
            mapped.release(name);
        }
        check_same(&mapped, &read);
        check_same(&*mapped.source(), &read);
        let file = Path::new(mapped.label());
        if !mapped.label().ends_with(".json") {
            let bytes = fs::read(file).unwrap();
            check_same(&open_bytes("memory", Arc::<[u8]>::from(bytes.as_slice())).unwrap(), &mapped);
            check_same(&open_bytes("memory", bytes).unwrap(), &mapped);
        }
    }
}

#[test]
fn shards_in_memory_equal_shards_on_disk() {
    let folder = Path::new(FIXTURES).join("arch/llama_sharded");
    let disk = open(&folder, LoadMode::Map, &mut no_progress).unwrap();
    let index = fs::read_to_string(folder.join("model.safetensors.index.json")).unwrap();
    let mut shard = |name: &str| fs::read(folder.join(name)).ok().map(Bytes::from);
    check_same(&Safetensors::from_shards("archive", &index, &mut shard).unwrap(), &disk);
    let error = Safetensors::from_shards("archive", &index, &mut |_| None).unwrap_err();
    assert!(matches!(&error, LoadError::Malformed { found, .. } if found == "no such file"), "{error}");
}

#[test]
fn every_metadata_type_is_read() {
    let gguf = Gguf::from_bytes("all types", everything().build()).unwrap();
    let get = |key: &str| gguf.metadata(key).unwrap();
    assert_eq!(get("t.u8"), &MetaValue::U8(200));
    assert_eq!(get("t.i8").as_i64(), Some(-3));
    assert_eq!(get("t.i8").as_u64(), None);
    assert_eq!(get("t.u16").as_usize(), Some(60_000));
    assert_eq!(get("t.i16").as_i64(), Some(-300));
    assert_eq!(get("t.u32").as_u64(), Some(4_000_000_000));
    assert_eq!(get("t.i32").as_f64(), Some(-70_000.0));
    assert_eq!(get("t.f32").as_f64(), Some(1.5));
    assert_eq!(get("t.f32").as_i64(), None);
    assert_eq!(get("t.bool").as_bool(), Some(true));
    assert_eq!(get("t.u64").as_u64(), Some(u64::MAX));
    assert_eq!(get("t.u64").as_i64(), None);
    assert_eq!(get("t.i64").as_i64(), Some(i64::MIN));
    assert_eq!(get("t.f64"), &MetaValue::F64(-2.25));
    assert_eq!(get("a.str").as_strs().unwrap(), &StrArray::from_iter(["", "<s>", "é漢", "Ġthe"]));
    assert_eq!(get("a.u8").as_array().unwrap().to_i64s(), Some(vec![1, 2, 3]));
    assert_eq!(get("a.i16").as_array().unwrap().to_f64s(), Some(vec![-1.0, 1.0]));
    assert_eq!(get("a.f32").as_array().unwrap().as_f32s(), Some([1.0, 2.0].as_slice()));
    assert_eq!(get("a.bool").as_array().unwrap().as_bools(), Some([false, true].as_slice()));
    assert!(get("a.empty").as_strs().unwrap().is_empty());
    let MetaValue::Array(MetaArray::Array(nested)) = get("a.nested") else { panic!("nested") };
    assert_eq!(nested[0], MetaArray::U32([1, 2].into()));
    assert_eq!(nested[1].as_strs().unwrap().get(0), Some("x"));
    assert_eq!(gguf.tensor("q4_0").unwrap().shape, [2, 2, 32]);
    assert_eq!(gguf.tensor("q4_k").unwrap().bytes, [4; 144]);
    assert_eq!(gguf.names().collect::<Vec<_>>(), ["f32", "f16", "q4_0", "q4_k"]);
}

#[test]
fn version_2_other_alignments_and_files_without_tensors() {
    let mut writer = everything();
    writer.version = 2;
    assert_eq!(Gguf::from_bytes("v2", writer.build()).unwrap().version(), 2);

    for alignment in [1, 8, 64, 65_536] {
        let mut writer = GgufWriter::new().u32("general.alignment", alignment as u32);
        writer.alignment = alignment;
        let file = writer.tensor("a", &[3], 24, &[7; 3]).tensor("b", &[2], 24, &[8; 2]).build();
        let gguf = Gguf::from_bytes("aligned", file).unwrap();
        assert_eq!(gguf.tensor("a").unwrap().bytes, [7; 3], "{alignment}");
        assert_eq!(gguf.tensor("b").unwrap().bytes, [8; 2], "{alignment}");
    }

    let gguf = Gguf::from_bytes("vocabulary", GgufWriter::new().strs("tokens", &["a"]).build()).unwrap();
    assert_eq!(gguf.names().count(), 0);
}

#[test]
fn a_large_vocabulary_opens_fast() {
    let tokens: Vec<String> = (0..150_000).map(|i| format!("token{i}")).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let file = Bytes::from(GgufWriter::new().strs("tokenizer.ggml.tokens", &tokens).build());
    let start = std::time::Instant::now();
    let gguf = Gguf::from_bytes("vocabulary", file).unwrap();
    let took = start.elapsed();
    let strings = gguf.metadata("tokenizer.ggml.tokens").unwrap().as_strs().unwrap();
    assert!(strings.iter().eq(tokens));
    // A few milliseconds; the bound is for a machine that does something else as well.
    assert!(took.as_millis() < 500, "{took:?}");
}

#[test]
fn split_models_open_from_any_of_their_files() {
    let scratch = Scratch::new("split");
    let part = |number: u16, name: &str| {
        GgufWriter::new()
            .raw("split.no", 2, &number.to_le_bytes())
            .raw("split.count", 2, &2u16.to_le_bytes())
            .raw("split.tensors.count", 5, &2i32.to_le_bytes())
            .tensor(name, &[2], 24, &[number as u8; 2])
    };
    let files = [part(0, "a").build(), part(1, "b").build()];
    let paths = [0, 1].map(|i| scratch.write(&format!("m-0000{}-of-00002.gguf", i + 1), &files[i]));
    for path in [&paths[0], &paths[1], &scratch.folder().to_owned()] {
        let opened = open(path, LoadMode::Read, &mut no_progress).unwrap();
        assert_eq!(opened.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(opened.tensor("b").unwrap().bytes, [1; 2]);
    }
    let named = || files.iter().map(|file| ("part".to_owned(), Bytes::from(file.clone())));
    assert_eq!(Gguf::from_parts(named()).unwrap().names().count(), 2);
    assert!(matches!(Gguf::from_parts(named().rev()).unwrap_err(), LoadError::Malformed { .. }), "wrong order");
    assert!(matches!(Gguf::from_parts([]).unwrap_err(), LoadError::Malformed { .. }), "no parts");
    let alone = Gguf::from_bytes("part", files[0].clone()).unwrap_err();
    assert!(matches!(&alone, LoadError::Unsupported { found, .. } if found.contains("split.count = 2")), "{alone}");
    let missing_tensor = [("a".to_owned(), part(0, "a").build().into()), ("b".to_owned(), part(1, "a").build().into())];
    assert!(matches!(Gguf::from_parts(missing_tensor).unwrap_err(), LoadError::Malformed { .. }), "one name twice");

    fs::remove_file(&paths[1]).unwrap();
    let error = open(&paths[0], LoadMode::Map, &mut no_progress).unwrap_err();
    assert!(matches!(&error, LoadError::Io { path, .. } if *path == paths[1]), "{error}");
}

#[test]
fn progress_is_told_and_stops_loading() {
    let folder = Path::new(FIXTURES).join("arch/llama_sharded");
    for mode in MODES {
        let mut seen: Vec<LoadProgress> = Vec::new();
        open(&folder, mode, &mut |progress| {
            seen.push(progress);
            ControlFlow::Continue(())
        })
        .unwrap();
        assert!(seen.is_sorted_by_key(|progress| progress.done_bytes));
        assert_eq!(seen[0].done_bytes, 0);
        let last = seen.last().unwrap();
        assert_eq!(last.done_bytes, last.total_bytes);
        assert!(seen.iter().all(|progress| progress.total_bytes == last.total_bytes));

        for (stop, &expected) in seen.iter().enumerate() {
            let mut calls = 0;
            let error = open(&folder, mode, &mut |_| {
                calls += 1;
                if calls > stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
            .unwrap_err();
            let LoadProgress { done_bytes, total_bytes } = expected;
            assert!(
                matches!(error, LoadError::Cancelled { done_bytes: d, total_bytes: t } if (d, t) == (done_bytes, total_bytes)),
                "{error}"
            );
        }
    }
}

#[test]
fn folders_and_files_that_hold_no_weights() {
    let scratch = Scratch::new("open");
    let try_open = |path: &Path| open(path, LoadMode::Map, &mut no_progress).map(|_| ()).unwrap_err();

    let missing = try_open(&scratch.path("missing.gguf"));
    assert!(matches!(&missing, LoadError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound), "{missing}");

    scratch.write("config.json", "{}");
    let nothing = try_open(scratch.folder());
    let text = nothing.to_string();
    for wanted in ["model.safetensors.index.json", "model.safetensors", "*.gguf"] {
        assert!(text.contains(wanted), "{text}");
    }

    for (content, word) in [
        (&b""[..], "empty"),
        (b"PK\x03\x04....", "zip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "LFS"),
        (b"hello, world", "hello"),
    ] {
        let error = try_open(&scratch.write("odd", content));
        assert!(matches!(&error, LoadError::Unsupported { found, .. } if found.contains(word)), "{error}");
    }

    let gguf = everything().build();
    scratch.write("one.gguf", &gguf);
    assert!(matches!(open(scratch.folder(), LoadMode::Map, &mut no_progress).unwrap(), Opened::Gguf(_)));
    scratch.write("two.gguf", &gguf);
    let error = try_open(scratch.folder());
    assert!(error.to_string().contains("one.gguf, two.gguf"), "{error}");

    let folder = scratch.folder().to_owned();
    for mode in MODES {
        let error = Gguf::open(&folder, mode, &mut no_progress).unwrap_err();
        assert!(matches!(&error, LoadError::Io { source, .. } if source.kind() == std::io::ErrorKind::IsADirectory), "{error}");
        let error = Safetensors::open(scratch.write("empty", ""), mode, &mut no_progress).unwrap_err();
        assert!(matches!(error, LoadError::Malformed { .. }), "{error}");
    }
}

#[test]
#[cfg(unix)]
fn files_that_are_no_regular_files() {
    use std::os::unix::fs::PermissionsExt;
    let error = open("/dev/null", LoadMode::Map, &mut no_progress).unwrap_err();
    assert!(matches!(&error, LoadError::Unsupported { .. }), "{error}");
    assert!(matches!(read_text_file("/dev/zero", 10).unwrap_err(), LoadError::Unsupported { .. }));

    let scratch = Scratch::new("unreadable");
    let path = scratch.write("m.gguf", everything().build());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    // Root may read everything; then there is nothing to see here.
    if fs::File::open(&path).is_err() {
        let error = open(&path, LoadMode::Map, &mut no_progress).unwrap_err();
        assert!(
            matches!(&error, LoadError::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied),
            "{error}"
        );
    }
}

#[test]
fn text_files_are_read_within_their_bound() {
    let scratch = Scratch::new("text");
    let path = scratch.write("config.json", "{\"é\": 1}");
    assert_eq!(read_text_file(&path, 9).unwrap(), "{\"é\": 1}");
    assert!(matches!(read_text_file(&path, 8).unwrap_err(), LoadError::Malformed { .. }));
    assert!(matches!(read_text_file(scratch.path("absent"), 8).unwrap_err(), LoadError::Io { .. }));
    assert!(matches!(read_text_file(scratch.folder(), 8).unwrap_err(), LoadError::Io { .. }));
    let error = read_text_file(scratch.write("bad", b"ab\xff"), 8).unwrap_err();
    assert!(error.to_string().contains("byte 2"), "{error}");
}

#[test]
#[cfg(target_os = "linux")]
fn closing_gives_handles_and_mappings_back() {
    let scratch = Scratch::new("reload");
    let path = scratch.write("reload.gguf", everything().build());
    let open_files = || {
        let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| *link == path).count()
    };
    let mappings = || fs::read_to_string("/proc/self/maps").unwrap().matches(path.to_str().unwrap()).count();
    for mode in MODES {
        for _ in 0..50 {
            let gguf = Gguf::open(&path, mode, &mut no_progress).unwrap();
            assert_eq!(open_files(), 0, "a mapping outlives its handle");
            assert_eq!(mappings(), usize::from(mode == LoadMode::Map));
            drop(gguf);
            assert_eq!(mappings(), 0);
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn released_tensors_give_their_pages_back() {
    let scratch = Scratch::new("release");
    let path = scratch.write("release.gguf", GgufWriter::new().tensor("w", &[8 << 20], 24, &vec![5; 8 << 20]).build());
    let resident_kb = || {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let (_, mapping) = maps.split_once(path.to_str().unwrap()).unwrap();
        let (_, resident) = mapping.split_once("Rss:").unwrap();
        resident.split_whitespace().next().unwrap().parse::<usize>().unwrap()
    };
    let gguf = Gguf::open(&path, LoadMode::Map, &mut no_progress).unwrap();
    let sum = || gguf.tensor("w").unwrap().bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    assert_eq!(sum(), 5 * (8 << 20));
    assert!(resident_kb() >= 8 << 10, "{}", resident_kb());
    gguf.release("w");
    assert!(resident_kb() < 1 << 10, "{}", resident_kb());
    assert_eq!(sum(), 5 * (8 << 20));
}

#[test]
fn synthetic_weights_are_a_source() {
    let tensor = |name: &str, shape: &[usize], format, fill| SyntheticTensor {
        name: name.to_owned(),
        shape: shape.to_vec(),
        format,
        fill,
    };
    let source: Arc<dyn WeightSource> = Arc::new(
        Synthetic::new(
            42,
            vec![
                tensor("norm", &[64], FormatId::F32, Fill::Constant(1.0)),
                tensor("w", &[8, 64], FormatId::Q8_0, Fill::Normal(0.02)),
            ],
        )
        .unwrap(),
    );
    assert_eq!(source.names().collect::<Vec<_>>(), ["norm", "w"]);
    let norm = source.tensor("norm").unwrap();
    assert!(norm.bytes.as_chunks().0.iter().all(|&value| f32::from_le_bytes(value) == 1.0));
    assert_eq!(source.tensor("w").unwrap().bytes.len(), 8 * 2 * 34);
    assert!(source.tensor("v").is_none());
}
