//! GGUF files with one thing wrong.

use super::gguf_writer::{GgufWriter, array, everything, string};
use super::{HUGE, assert_malformed, assert_unsupported, bounded, gguf_error};
use loquat::LoadError;
use loquat::weights::{Gguf, WeightSource};

#[test]
fn gguf_announcing_huge_counts() {
    for huge in HUGE {
        let with = |f: fn(&mut GgufWriter, u64)| {
            let mut writer = everything();
            f(&mut writer, huge);
            writer.build()
        };
        assert_malformed(gguf_error(with(|writer, n| writer.tensor_count = Some(n))), "tensor count");
        assert_malformed(gguf_error(with(|writer, n| writer.metadata_count = Some(n))), "metadata count");

        let string_of = |text: &str| [&huge.to_le_bytes()[..], text.as_bytes()].concat();
        assert_malformed(gguf_error(GgufWriter::new().raw("k", 8, &string_of("abc")).build()), "value of \"k\"");
        for kind in 0..=12 {
            let error = gguf_error(GgufWriter::new().array("k", kind, huge, &[0; 64]).build());
            assert_malformed(error, "value of \"k\"");
        }
        let inner = array(4, huge, &[0; 16]);
        assert_malformed(gguf_error(GgufWriter::new().array("k", 9, 1, &inner).build()), "value of \"k\"");

        let mut key = b"GGUF\x03\0\0\0".to_vec();
        key.extend(0u64.to_le_bytes());
        key.extend(1u64.to_le_bytes());
        key.extend(string_of("some key"));
        key.resize(key.len() + 16, 0);
        assert_malformed(gguf_error(key), "key 0");
    }
}

#[test]
fn tiny_gguf_with_an_array_of_2_to_the_63() {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(0u64.to_le_bytes());
    file.extend(1u64.to_le_bytes());
    file.extend(string("a"));
    file.extend(9u32.to_le_bytes());
    file.extend(0u32.to_le_bytes());
    file.extend((1u64 << 63).to_le_bytes()[..2].iter());
    assert_eq!(file.len(), 43);
    assert_malformed(gguf_error(file.clone()), "length of value of \"a\"");
    file.truncate(41);
    file.extend((1u64 << 63).to_le_bytes());
    assert_malformed(gguf_error(file), "value of \"a\"");
}

#[test]
fn gguf_with_wrong_alignments() {
    for alignment in [0, 3, 48, 1 << 17, 1 << 30, u32::MAX] {
        assert_malformed(gguf_error(GgufWriter::new().u32("general.alignment", alignment).build()), "general.alignment");
    }
    assert_malformed(gguf_error(GgufWriter::new().str("general.alignment", "32").build()), "general.alignment");
}

#[test]
fn gguf_arrays_nested_deep() {
    let mut bytes = array(9, 1, &[]).repeat(10_000);
    bytes.extend(array(0, 1, &[7]));
    assert_malformed(gguf_error(GgufWriter::new().raw("k", 9, &bytes).build()), "value of \"k\"");
    // Wide instead of deep: empty arrays are the least that an element can be.
    let wide: Vec<u8> = std::iter::repeat_n(array(0, 0, &[]), 20_000).flatten().collect();
    let file = GgufWriter::new().array("k", 9, 20_000, &wide).build();
    bounded(file.len(), || Gguf::from_bytes("wide", file).unwrap());
}

#[test]
fn gguf_with_unknown_metadata_types() {
    for kind in [13, 99, u32::MAX] {
        assert_unsupported(gguf_error(GgufWriter::new().raw("some.key", kind, &[0; 16]).build()), "some.key");
        assert_unsupported(gguf_error(GgufWriter::new().array("some.key", kind, 1, &[0; 16]).build()), "some.key");
    }
    assert_malformed(gguf_error(GgufWriter::new().raw("k", 7, &[2]).build()), "value of \"k\"");
    assert_malformed(gguf_error(GgufWriter::new().array("k", 7, 2, &[1, 255]).build()), "value of \"k\"");
}

#[test]
fn gguf_text_that_is_no_utf8() {
    let bad = [&3u64.to_le_bytes()[..], b"a\xff\xfe"].concat();
    assert_malformed(gguf_error(GgufWriter::new().raw("k", 8, &bad).build()), "value of \"k\"");
    assert_malformed(gguf_error(GgufWriter::new().array("tokens", 8, 1, &bad).build()), "element 0 of value of \"tokens\"");
    let mut file = GgufWriter::new().u32("kkkk", 1).build();
    let at = file.windows(4).position(|window| window == b"kkkk").unwrap();
    file[at] = 0xc0;
    assert_malformed(gguf_error(file), "key 0");
    let mut file = GgufWriter::new().tensor("tttt", &[1], 24, &[0]).build();
    let at = file.windows(4).position(|window| window == b"tttt").unwrap();
    file[at] = 0xc0;
    assert_malformed(gguf_error(file), "name of tensor 0");
}

#[test]
fn gguf_with_keys_or_names_twice() {
    assert_malformed(gguf_error(GgufWriter::new().u32("same", 1).u32("other", 1).str("same", "").build()), "\"same\"");
    let twice = GgufWriter::new().tensor("same", &[1], 24, &[0]).tensor("same", &[1], 24, &[0]);
    assert_malformed(gguf_error(twice.build()), "tensor \"same\"");
    assert_malformed(gguf_error(GgufWriter::new().u32(&"k".repeat(65_536), 1).build()), "key 0");
}

#[test]
fn gguf_versions_and_byte_orders() {
    let with = |version| {
        let mut writer = everything();
        writer.version = version;
        writer.build()
    };
    assert_unsupported(gguf_error(with(1)), "version is not supported: found 1, supported: 2 and 3");
    for version in [0, 4, 77] {
        assert_unsupported(gguf_error(with(version)), "2 and 3");
    }
    for version in [1u32, 2, 3] {
        assert_unsupported(gguf_error(with(version.swap_bytes())), "big endian");
    }
    let mut file = everything().build();
    file[0] = b'g';
    assert_malformed(gguf_error(file), "magic");
}

#[test]
fn gguf_with_wrong_dimension_counts() {
    for count in [0, 5, 9, u32::MAX] {
        let dims = vec![1; (count as usize).min(9)];
        let file = GgufWriter::new().info("t", count, &dims, 24, 0).data(&[0; 64]).build();
        assert_malformed(gguf_error(file), "dimension count of tensor \"t\"");
    }
}

#[test]
fn gguf_with_shapes_that_overflow() {
    let wrapping: [&[u64]; 6] = [
        &[u64::MAX, 2, 1, 1],
        &[1 << 32, 1 << 32, 1, 1],
        &[1 << 63, 2],
        &[1 << 61, 8, 1],
        &[u64::MAX],
        &[1 << 16, 1 << 16, 1 << 16, 1 << 16],
    ];
    for dims in wrapping {
        for kind in [0, 1, 24, 28] {
            let file = GgufWriter::new().info("t", dims.len() as u32, dims, kind, 0).data(&[0; 64]).build();
            let error = gguf_error(file);
            assert!(matches!(&error, LoadError::Malformed { at, .. } if at.contains("of tensor \"t\"")), "{dims:?}: {error}");
        }
    }
    for dims in [&[0u64][..], &[0, u64::MAX, u64::MAX], &[4, 0]] {
        let file = GgufWriter::new().info("t", dims.len() as u32, dims, 24, 0).data(&[0; 64]).build();
        assert_malformed(gguf_error(file), "shape of tensor \"t\"");
    }
}

#[test]
fn gguf_with_offsets_outside_the_file() {
    for offset in [64, 96, 1 << 40, u64::MAX - 31, u64::MAX - 63] {
        let file = GgufWriter::new().info("t", 1, &[25], 0, offset).data(&[0; 96]).build();
        assert_malformed(gguf_error(file), "data of tensor \"t\"");
    }
    for offset in [1, 16, 33, u64::MAX] {
        let file = GgufWriter::new().info("t", 1, &[1], 0, offset).data(&[0; 96]).build();
        assert_malformed(gguf_error(file), "offset of tensor \"t\"");
    }
}

#[test]
fn gguf_with_tensors_that_overlap() {
    let two = |a: u64, b: u64| GgufWriter::new().info("a", 1, &[40], 24, a).info("b", 1, &[40], 24, b).data(&[0; 192]).build();
    for (a, b) in [(0, 0), (0, 32), (32, 0), (64, 32)] {
        assert_malformed(gguf_error(two(a, b)), "data of tensor");
    }
    // Apart, out of order and with a hole: as good as any.
    assert_eq!(Gguf::from_bytes("hole", two(128, 0)).unwrap().names().collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn gguf_with_partial_blocks_and_unknown_types() {
    for (kind, row) in [(2u32, 33u64), (12, 128), (39, 16), (40, 32)] {
        let error = gguf_error(GgufWriter::new().info("t", 2, &[row, 64], kind, 0).data(&[0; 4096]).build());
        assert!(matches!(&error, LoadError::PartialBlock { row_len, .. } if *row_len as u64 == row), "{error}");
    }
    for (kind, word) in [
        (4, "Q4_2"),
        (5, "Q4_3"),
        (9, "Q8_1"),
        (15, "Q8_K"),
        (31, "Q4_0"),
        (36, "IQ4_NL"),
        (41, "type 41"),
        (u32::MAX, "type 4294967295"),
    ] {
        let error = gguf_error(GgufWriter::new().info("some.tensor", 1, &[256], kind, 0).data(&[0; 4096]).build());
        let text = error.to_string();
        assert_unsupported(error, word);
        assert!(text.contains("some.tensor"), "{text}");
    }
}

#[test]
fn names_in_messages_are_clipped_and_escaped() {
    let name = format!("\u{1b}[2J{}", "n".repeat(100_000));
    let error = gguf_error(GgufWriter::new().info(&name, 7, &[1], 0, 0).build()).to_string();
    assert!(error.len() < 500 && !error.contains('\u{1b}'), "{error}");
}
