//! Safetensors files with one thing wrong.

use super::{HUGE, assert_malformed, assert_unsupported, bounded, entry, safetensors_error, safetensors_file};
use loquat::weights::{Safetensors, WeightSource};

#[test]
fn safetensors_of_100_bytes_with_a_header_of_2_to_the_60() {
    for len in HUGE.into_iter().chain([93, 1000, 100_000_001]) {
        let mut file = len.to_le_bytes().to_vec();
        file.extend(b"{");
        file.resize(100, b' ');
        assert_malformed(safetensors_error(file), "header length");
    }
    for len in 0..8 {
        assert_malformed(safetensors_error(vec![0; len]), "header length");
    }
}

#[test]
fn safetensors_headers_that_are_no_headers() {
    for header in ["", " {}", "[]", "null", "x"] {
        assert_malformed(safetensors_error(safetensors_file(header, &[])), "header");
    }
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    let deeper = format!(r#"{{"a":{{"x":{}{}}}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    for header in ["{", "{}}", "{} x", "{\"a\":1}", "{\"a\":{\"dtype\":1}}", deep.as_str()] {
        assert_malformed(safetensors_error(safetensors_file(header, &[])), "header");
    }
    // A field that the format does not know is passed over, however deep.
    assert_malformed(safetensors_error(safetensors_file(&deeper, &[])), "dtype of tensor \"a\"");
    let mut file = safetensors_file("{\"a\":{}}", &[]);
    file[10] = 0xff;
    assert_malformed(safetensors_error(file), "header");
    // What is right for comparison: nothing at all, and padding.
    for header in ["{}", "{}      ", r#"{"__metadata__":null}"#, r#"{"__metadata__":{"format":"pt"}}"#] {
        Safetensors::from_bytes("empty", safetensors_file(header, &[])).unwrap();
    }
}

#[test]
fn safetensors_with_wrong_entries() {
    let cases = [
        (entry("t", "F32", "[2]", "[0,4]"), "data_offsets of tensor \"t\""),
        (entry("t", "F16", "[2]", "[0,8]"), "data_offsets of tensor \"t\""),
        (entry("t", "U8", "[8]", "[8,0]"), "data_offsets of tensor \"t\""),
        (entry("t", "U8", "[9]", "[0,9]"), "data_offsets of tensor \"t\""),
        (entry("t", "U8", "[8]", "[0]"), "data_offsets of tensor \"t\""),
        (entry("t", "U8", "[8]", "[0,8,8]"), "header"),
        (entry("t", "U8", "[8]", "[0,18446744073709551615]"), "data_offsets of tensor \"t\""),
        (entry("t", "U8", "[4294967296,4294967296]", "[0,8]"), "shape of tensor \"t\""),
        (entry("t", "F32", "[4611686018427387904]", "[0,8]"), "shape of tensor \"t\""),
        (entry("t", "U8", "[18446744073709551615,2,1,1]", "[0,8]"), "shape of tensor \"t\""),
        (entry("t", "U8", "[18446744073709551616]", "[0,8]"), "header"),
        (entry("t", "U8", "[-1]", "[0,8]"), "header"),
        (entry("t", "U8", "[8.0]", "[0,8]"), "header"),
        (entry("t", "U8", "[1,1,1,1,1,1,1,1,8]", "[0,8]"), "header"),
        (r#""t":{"shape":[8],"data_offsets":[0,8]}"#.to_owned(), "dtype of tensor \"t\""),
        (r#""t":{"dtype":"U8","data_offsets":[0,8]}"#.to_owned(), "shape of tensor \"t\""),
        (r#""t":{"dtype":"U8","shape":[8]}"#.to_owned(), "data_offsets of tensor \"t\""),
        (r#""t":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}"#.to_owned(), "header"),
    ];
    for (entry, place) in cases {
        assert_malformed(safetensors_error(safetensors_file(&format!("{{{entry}}}"), &[0; 8])), place);
    }
    for dtype in ["F4", "C64", "U32", "F8_E8M0", "bfloat", ""] {
        let header = format!("{{{}}}", entry("some.tensor", dtype, "[8]", "[0,8]"));
        assert_unsupported(safetensors_error(safetensors_file(&header, &[0; 8])), "some.tensor");
    }
}

#[test]
fn safetensors_with_holes_overlaps_doubles_and_wrong_lengths() {
    let file = |entries: &[(&str, usize, usize)], data: usize| {
        let entries: Vec<String> = entries
            .iter()
            .map(|&(name, start, end)| entry(name, "U8", &format!("[{}]", end - start), &format!("[{start},{end}]")))
            .collect();
        safetensors_file(&format!("{{{}}}", entries.join(",")), &vec![0; data])
    };
    assert_malformed(safetensors_error(file(&[("a", 0, 4), ("b", 5, 8)], 8)), "data_offsets of tensor \"b\"");
    assert_malformed(safetensors_error(file(&[("a", 0, 5), ("b", 4, 8)], 8)), "data_offsets of tensor \"b\"");
    assert_malformed(safetensors_error(file(&[("a", 0, 4), ("b", 0, 4)], 4)), "data_offsets of tensor");
    assert_malformed(safetensors_error(file(&[("a", 1, 4)], 4)), "data_offsets of tensor \"a\"");
    assert_malformed(safetensors_error(file(&[("a", 0, 4)], 5)), "data");
    assert_malformed(safetensors_error(file(&[], 1)), "data");
    assert_malformed(safetensors_error(file(&[("a", 0, 4), ("a", 4, 8)], 8)), "tensor \"a\"");
    assert_malformed(safetensors_error(file(&[("a", 0, 0), ("a", 0, 0)], 0)), "tensor \"a\"");
    let twice = r#"{"__metadata__":{"k":"1","k":"2"}}"#;
    assert_malformed(safetensors_error(safetensors_file(twice, &[])), "__metadata__ key \"k\"");
    let twice = r#"{"__metadata__":{},"__metadata__":{}}"#;
    assert_malformed(safetensors_error(safetensors_file(twice, &[])), "header");
    // Any order and empty tensors are fine.
    Safetensors::from_bytes("order", file(&[("b", 4, 8), ("e", 4, 4), ("a", 0, 4)], 8)).unwrap();
}

#[test]
fn safetensors_headers_of_many_small_things() {
    let tensors: Vec<String> = (0..20_000).map(|i| entry(&format!("{i}"), "U8", "[0]", "[0,0]")).collect();
    let pairs: Vec<String> = (0..50_000).map(|i| format!("\"{i}\":\"\"")).collect();
    let header = format!("{{\"__metadata__\":{{{}}},{}}}", pairs.join(","), tensors.join(","));
    let file = safetensors_file(&header, &[]);
    let opened = bounded(file.len(), || Safetensors::from_bytes("many", file).unwrap());
    assert_eq!((opened.names().count(), opened.entries().count()), (20_000, 50_000));
}
