//! Storage formats against an independent reference, and what must hold for any bytes and any values.

use loquat::dtype::FormatId;
use loquat::error::QuantError;
use loquat::quant;
use proptest::prelude::*;
use safetensors::SafeTensors;

const WRITABLE: [FormatId; 11] = [
    FormatId::F32,
    FormatId::F16,
    FormatId::BF16,
    FormatId::Q8_0,
    FormatId::Q4_0,
    FormatId::Q4_1,
    FormatId::Q5_0,
    FormatId::Q5_1,
    FormatId::Q4K,
    FormatId::Q5K,
    FormatId::Q6K,
];

fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/gguf/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn floats(tensors: &SafeTensors, name: &str) -> Vec<f32> {
    let data = tensors.tensor(name).unwrap();
    data.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn decode(format: FormatId, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / format.block_bytes() * format.block_len()];
    quant::decode(format, bytes, &mut out).unwrap();
    out
}

fn encode(format: FormatId, values: &[f32]) -> Vec<u8> {
    quant::encode(format, values, values.len()).unwrap()
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

/// The formats of the fixture, by name.
fn fixture_formats() -> Vec<FormatId> {
    let json: serde_json::Value = serde_json::from_slice(&fixture("blocks.json")).unwrap();
    let names: Vec<_> = json["types"].as_object().unwrap().keys().cloned().collect();
    assert!(names.len() >= 25);
    let of = |name: &String| FormatId::ALL.iter().copied().find(|f| f.name() == name).unwrap_or_else(|| panic!("{name}"));
    names.iter().map(of).collect()
}

#[test]
fn blocks_decode_bit_for_bit_as_the_reference_does() {
    let file = fixture("blocks.safetensors");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut compared = 0;
    for format in fixture_formats() {
        for part in ["rand", "quant"] {
            let Ok(bytes) = tensors.tensor(&format!("{format}.{part}.bytes")) else { continue };
            let expected = floats(&tensors, &format!("{format}.{part}.values"));
            let found = decode(format, bytes.data());
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                assert!(same, "{format} {part} value {i}: expected {expected:e}, found {found:e}");
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 2 * 25 - 1, "F16 has random bytes only");
}

#[test]
fn decoding_is_the_same_at_every_address() {
    let file = fixture("blocks.safetensors");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for format in fixture_formats() {
        let bytes = tensors.tensor(&format!("{format}.rand.bytes")).unwrap();
        let expected: Vec<_> = decode(format, bytes.data()).iter().map(|v| v.to_bits()).collect();
        for shift in 0..9 {
            let mut moved = vec![0xa5; shift];
            moved.extend(bytes.data());
            let found: Vec<_> = decode(format, &moved[shift..]).iter().map(|v| v.to_bits()).collect();
            assert_eq!(found, expected, "{format} moved by {shift}");
        }
    }
}

#[test]
fn encoding_loses_no_more_than_the_reference() {
    let file = fixture("blocks.safetensors");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for format in WRITABLE {
        let Ok(_) = tensors.tensor(&format!("{format}.quant.input")) else { continue };
        let input = floats(&tensors, &format!("{format}.quant.input"));
        let reference = squared_error(&input, &floats(&tensors, &format!("{format}.quant.values")));
        let ours = squared_error(&input, &decode(format, &encode(format, &input)));
        println!("{format}: squared error {:.4} of the reference's", ours / reference);
        assert!(ours <= reference, "{format}: {ours:e} against {reference:e}");
    }
}

/// Relative root mean square error, and the bound of it, on distributions that models have and on ones they should not.
#[test]
fn encoding_stays_within_its_step_on_other_distributions() {
    let mut state = 1u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut normal = || (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
    let n = 4096;
    let gauss: Vec<f32> = (0..n).map(|_| normal()).collect();
    let cases: Vec<(&str, Vec<f32>)> = vec![
        ("gauss", gauss.clone()),
        ("small", gauss.iter().map(|v| v * 1e-3).collect()),
        ("large", gauss.iter().map(|v| v * 3e3).collect()),
        ("heavy tails", gauss.iter().map(|v| v * v * v).collect()),
        ("outlier", gauss.iter().enumerate().map(|(i, v)| if i % 256 == 77 { 40.0 } else { *v }).collect()),
        ("shifted up", gauss.iter().map(|v| v + 8.0).collect()),
        ("shifted down", gauss.iter().map(|v| v - 8.0).collect()),
        ("positive", gauss.iter().map(|v| v.abs()).collect()),
        ("two levels", gauss.iter().map(|v| v.signum() * 0.7).collect()),
        ("ramp", (0..n).map(|i| i as f32 - 2048.0).collect()),
    ];
    for (name, values) in &cases {
        for format in WRITABLE {
            let decoded = decode(format, &encode(format, values));
            let error = squared_error(values, &decoded).sqrt();
            // The error of one step everywhere, by the widest span of each block of the format.
            let step = |block: &[f32]| {
                let (least, most) = block.iter().fold((0f32, 0f32), |(l, m), v| (l.min(*v), m.max(*v)));
                let levels = match format {
                    FormatId::Q4_0 | FormatId::Q4_1 | FormatId::Q4K => 15.0,
                    FormatId::Q5_0 | FormatId::Q5_1 | FormatId::Q5K => 31.0,
                    FormatId::Q6K => 63.0,
                    FormatId::Q8_0 => 254.0,
                    FormatId::BF16 => 256.0,
                    FormatId::F16 => 2048.0,
                    _ => f32::INFINITY,
                };
                let span = 2.0 * most.max(-least);
                f64::from(span / levels).powi(2) / 3.0 * block.len() as f64
            };
            let group = if format == FormatId::Q6K { 16 } else { 32 };
            let bound = values.chunks(group).map(step).sum::<f64>().sqrt();
            assert!(error <= bound, "{name} as {format}: {error:e} above {bound:e}");
        }
    }
}

#[test]
fn numbers_that_a_format_has_come_back_as_they_were() {
    let with_codes =
        |low: i32, high: i32, scale: f32| -> Vec<f32> { (0..256).map(|i| (low + i % (high - low + 1)) as f32 * scale).collect() };
    let check = |format: FormatId, values: &[f32]| {
        assert_eq!(decode(format, &encode(format, values)), values, "{format}");
    };
    for scale in [1.0, 0.125, -3.0, 1536.0, 2f32.powi(-24)] {
        // 32 values that hold all 16 codes, as many as there are of 5 bits, and byte codes with both ends.
        check(FormatId::Q4_0, &with_codes(-8, 7, scale));
        check(FormatId::Q5_0, &with_codes(-16, 15, scale));
        check(FormatId::Q6K, &with_codes(-32, 31, scale));
        let bytes: Vec<f32> =
            with_codes(-127, 127, scale).chunks(31).flat_map(|c| c.iter().copied().chain([127.0 * scale])).collect();
        check(FormatId::Q8_0, &bytes[..256]);
    }
    for (scale, min) in [(1.0, 0.0), (0.5, -4.0), (0.25, 3.0), (16.0, -128.0)] {
        let lines = |high| with_codes(0, high, scale).iter().map(|v| v + min).collect::<Vec<_>>();
        check(FormatId::Q4_1, &lines(15));
        check(FormatId::Q5_1, &lines(31));
    }
    for format in WRITABLE {
        check(format, &[0.0; 256]);
    }
}

#[test]
fn every_half_and_every_bfloat_round_trips() {
    for format in [FormatId::F16, FormatId::BF16] {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let values = decode(format, &all);
        for (bits, value) in values.iter().enumerate().filter(|(_, v)| v.is_finite()) {
            assert_eq!(encode(format, &[*value]), (bits as u16).to_le_bytes(), "{format} {bits:#06x}");
        }
    }
}

#[test]
fn doubles_and_singles_decode_as_numbers() {
    let doubles = [0.0, -0.0, 1.0 / 3.0, 1e300, -1e300, 1e-300, f64::NAN];
    let bytes: Vec<u8> = doubles.iter().flat_map(|v| v.to_le_bytes()).collect();
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&decode(FormatId::F64, &bytes))[..6], bits(&doubles.map(|v| v as f32))[..6]);
    assert!(decode(FormatId::F64, &bytes)[6].is_nan());
    let singles = [1.5f32, -0.0, f32::INFINITY, f32::MIN_POSITIVE, 1e-40];
    let bytes: Vec<u8> = singles.iter().flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(bits(&decode(FormatId::F32, &bytes)), bits(&singles));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let format = FormatId::Q4K;
    let mut out = [7.0; 256];
    for cut in [1, 143, 145, 287] {
        let error = quant::decode(format, &vec![0; cut], &mut out).unwrap_err();
        assert_eq!(error, QuantError::PartialBytes { format, bytes: cut, block_bytes: 144 });
    }
    let error = quant::decode(format, &[0; 144], &mut out[..255]).unwrap_err();
    assert_eq!(error, QuantError::Length { format, bytes: 144, values: 255 });
    let error = quant::decode(format, &[0; 288], &mut out).unwrap_err();
    assert_eq!(error, QuantError::Length { format, bytes: 288, values: 256 });
    assert_eq!(out, [7.0; 256], "a refused call writes nothing");
    assert_eq!(quant::decode(FormatId::I8, &[0], &mut out[..1]), Err(QuantError::NotReadable { format: FormatId::I8 }));

    assert_eq!(
        quant::encode(format, &[0.0; 512], 128).unwrap_err().to_string(),
        "rows of 128 values are not whole blocks of 256 (Q4_K)"
    );
    assert_eq!(quant::encode(format, &[0.0; 300], 256).unwrap_err(), QuantError::PartialRow { values: 300, row_len: 256 });
    assert_eq!(quant::encode(format, &[0.0; 256], 0).unwrap_err(), QuantError::PartialRow { values: 256, row_len: 0 });
    assert_eq!(quant::encode(format, &[], 0), Ok(vec![]));
    assert_eq!(quant::decode(format, &[], &mut []), Ok(()));
    let error = quant::encode(FormatId::Q2K, &[0.0; 256], 256).unwrap_err();
    assert_eq!(error, QuantError::NotWritable { format: FormatId::Q2K });
}

#[test]
fn numbers_without_a_place_in_the_format_are_refused() {
    for format in WRITABLE {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [0.5; 512];
            values[300] = bad;
            match quant::encode(format, &values, 256) {
                Err(QuantError::NotFinite { at: 300, value }) => assert_eq!(value.to_bits(), bad.to_bits()),
                other => panic!("{format} took {bad}: {other:?}"),
            }
        }
        let limit = quant::codec(format).unwrap().limit;
        for values in [[limit; 256], [-limit; 256], std::array::from_fn(|j| if j % 2 == 0 { limit } else { -limit })] {
            let decoded = decode(format, &encode(format, &values));
            assert!(decoded.iter().all(|v| v.is_finite()), "{format} at its limit");
            let off = decoded.iter().zip(&values).map(|(d, v)| ((d - v) / limit).abs()).fold(0.0, f32::max);
            assert!(off < 0.15, "{format} at its limit is off by {off}");
        }
        if format != FormatId::F32 {
            let mut values = [0.0; 256];
            values[9] = -limit.next_up();
            let error = quant::encode(format, &values, 256).unwrap_err();
            assert_eq!(error, QuantError::TooLarge { format, at: 9, value: values[9], limit });
        }
    }
}

#[test]
fn scales_of_infinity_and_nan_decode_to_something() {
    for codec in quant::codecs() {
        let (bytes, values) = (codec.id.block_bytes(), codec.id.block_len());
        for byte in 0..=255u8 {
            (codec.decode)(&vec![byte; 3 * bytes], &mut vec![0.0; 3 * values]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_decode(seed: Vec<u8>, blocks in 1usize..4, at in 0usize..8) {
        for codec in quant::codecs() {
            let bytes: Vec<u8> = seed.iter().copied().chain([0x7c, 0xff, 0x00]).cycle().skip(at).take(blocks * codec.id.block_bytes()).collect();
            let mut out = vec![0.0; blocks * codec.id.block_len()];
            quant::decode(codec.id, &bytes, &mut out).unwrap();
        }
    }

    /// One block decodes alone as it does among others.
    #[test]
    fn blocks_are_independent(bytes in prop::collection::vec(any::<u8>(), 3 * 256)) {
        for codec in quant::codecs() {
            let (size, len) = (codec.id.block_bytes(), codec.id.block_len());
            let all: Vec<_> = decode(codec.id, &bytes[..3 * size]).iter().map(|v| v.to_bits()).collect();
            let second: Vec<_> = decode(codec.id, &bytes[size..2 * size]).iter().map(|v| v.to_bits()).collect();
            prop_assert_eq!(&all[len..2 * len], &second[..], "{}", codec.id);
        }
    }

    /// The error of a block is at most that of rounding to one step everywhere.
    #[test]
    fn a_written_block_is_near(values in prop::collection::vec(-1f32..1.0, 256), exponent in -8i32..12) {
        let scale = 2f32.powi(exponent);
        let values: Vec<f32> = values.iter().map(|v| v * scale).collect();
        for (format, step) in [
            (FormatId::Q8_0, 2.0 / 254.0),
            (FormatId::Q4_0, 2.0 / 15.0),
            (FormatId::Q4_1, 2.0 / 15.0),
            (FormatId::Q5_0, 2.0 / 31.0),
            (FormatId::Q5_1, 2.0 / 31.0),
            (FormatId::Q4K, 2.0 / 15.0),
            (FormatId::Q5K, 2.0 / 31.0),
            (FormatId::Q6K, 2.0 / 63.0),
            (FormatId::BF16, 1.0 / 256.0),
            (FormatId::F16, 1.0 / 2048.0),
        ] {
            let error = (squared_error(&values, &decode(format, &encode(format, &values))) / 256.0).sqrt();
            prop_assert!(error <= f64::from(step * scale) / 2.0, "{}: {} for a step of {}", format, error, step * scale);
        }
    }
}
