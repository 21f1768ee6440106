//! Decoding speed of every block format, in bytes read, beside a plain copy of as many values.
//!
//! The blocks are the reference's, repeated; every result is compared with the reference's values before it is timed.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use loquat::dtype::FormatId;
use loquat::quant;
use safetensors::SafeTensors;
use std::hint::black_box;
use std::time::Duration;

/// Fits a second-level cache in and out, so that the decoder is measured and not the memory.
const VALUES: usize = 1 << 16;

fn decode(criterion: &mut Criterion) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gguf/blocks.safetensors");
    let file = std::fs::read(path).expect("the fixture is in the repository");
    let tensors = SafeTensors::deserialize(&file).expect("the fixture is valid");
    let mut group = criterion.benchmark_group("decode");
    group.sample_size(20).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(500));

    let source = vec![1.0f32; VALUES];
    let mut out = vec![0.0f32; VALUES];
    group.throughput(Throughput::Bytes(4 * VALUES as u64));
    group.bench_function("copy", |b| b.iter(|| black_box(&mut out[..]).copy_from_slice(black_box(&source))));

    for &format in FormatId::ALL {
        let Ok(bytes) = tensors.tensor(&format!("{format}.rand.bytes")) else { continue };
        let values = tensors.tensor(&format!("{format}.rand.values")).expect("bytes come with values");
        let values: Vec<f32> = values.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let times = VALUES / values.len();
        let bytes = bytes.data().repeat(times);
        quant::decode(format, &bytes, &mut out).expect("whole blocks");
        let same = |(found, expected): (&f32, &f32)| found.to_bits() == expected.to_bits() || expected.is_nan() && found.is_nan();
        assert!(out.iter().zip(values.iter().cycle()).all(same), "{format} decodes to other values");

        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(format.name(), |b| {
            b.iter(|| quant::decode(format, black_box(&bytes), black_box(&mut out)).expect("whole blocks"));
        });
    }
    group.finish();
}

criterion_group!(benches, decode);
criterion_main!(benches);
