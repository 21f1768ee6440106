//! Matrix products of every kernel tier, weight format and batch height on one thread, mixtures of experts, norms, rotations and
//! gates. Criterion's figures are GB/s of weights for one row and multiply-adds for more; beside them stand, for every case,
//! GB/s and Gop/s (two for a multiply-add) and their shares of what this core can read and compute at most, which is measured in the same
//! run. Every result is compared with the scalar tier's before it is timed: all tiers give the same bits.
//!
//! `cargo bench --bench kernels -- 'avx2/Q4_0'` picks some.

#[path = "support/peaks.rs"]
mod peaks;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use loquat::arch::{Activation, AttnDims, Glu, NormSpec, RopeStyle, RouteSpec, Score};
use loquat::backend::cpu::{Cpu, CpuBuf, CpuOptions, CpuStep, CpuWeight};
use loquat::backend::{Backend, Expert, Heads, KvShape, MoeArgs, MoeShape, WeightPart};
use loquat::batch::BatchLimits;
use loquat::dtype::{FormatId, KvDType};
use loquat::quant;
use loquat::weights::TensorView;
use peaks::{Peaks, Work};
use std::time::Duration;

const N: usize = 768;
const K: usize = 1536;
const ROWS: [usize; 6] = [1, 2, 4, 8, 32, 128];
const MOST: usize = ROWS[ROWS.len() - 1];
/// One row reads this much before it comes back to the same weights: more than a core's own caches hold.
const FOOTPRINT: u64 = 8 << 20;

const FORMATS: [FormatId; 14] = [
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
    FormatId::IQ4NL,
    FormatId::IQ4XS,
    FormatId::MXFP4,
];

const MOE: MoeShape = MoeShape { experts: 32, top_k: 4, intermediate: 384, hidden: N };
const ROUTE: RouteSpec = RouteSpec {
    experts: MOE.experts,
    top_k: MOE.top_k,
    score: Score::Softmax,
    groups: None,
    correction: false,
    normalize: true,
    scale: 1.0,
};
const HEADS: Heads = Heads { stride: N, offset: 0, heads: N / 128, dim: 128 };

struct Device {
    cpu: Cpu,
    step: CpuStep,
    x: CpuBuf,
    out: CpuBuf,
}

impl Device {
    fn new(tier: &str) -> Self {
        let options = CpuOptions { tier: Some(tier.into()), ..CpuOptions::default() };
        let mut cpu = Cpu::new(&options).expect("a tier of this machine");
        let rows = MOST;
        let limits = BatchLimits { tokens: rows, seqs: 1, blocks: 1, rows };
        let dims = AttnDims { heads: 1, kv_heads: 1, qk_dim: 16, v_dim: 16, v_in_k: false };
        let kv = KvShape::one_group(vec![dims], 1, 16, KvDType::F16);
        let step = cpu.step(&limits, K, &kv, &MOE).expect("memory");
        let (mut x, out) = (cpu.buf(rows * K).expect("memory"), cpu.buf(rows * N).expect("memory"));
        cpu.upload(&values(rows * K, 2), &mut x).expect("an upload");
        Device { cpu, step, x, out }
    }

    fn weight(&mut self, format: FormatId, bytes: &[u8]) -> CpuWeight {
        self.matrix(format, &[N, K], bytes)
    }

    fn matrix(&mut self, format: FormatId, shape: &[usize; 2], bytes: &[u8]) -> CpuWeight {
        let view = TensorView { format, shape, bytes };
        self.cpu.weight(&[WeightPart::new("w", view)]).expect("a matrix")
    }

    fn run(&mut self, rows: usize, w: &CpuWeight) {
        self.cpu.linear(rows, &self.x, w, None, &mut self.step, &mut self.out).expect("a product");
    }

    fn result(&mut self, rows: usize, w: &CpuWeight) -> Vec<u32> {
        self.run(rows, w);
        self.out(rows)
    }

    fn out(&mut self, rows: usize) -> Vec<u32> {
        let mut out = vec![0.0; rows * N];
        self.cpu.download(&self.out, &mut out).expect("a download");
        out.into_iter().map(f32::to_bits).collect()
    }
}

/// Experts, and the routers' logits for every row.
struct Mixture {
    experts: Vec<Expert<Cpu>>,
    scores: CpuBuf,
}

impl Mixture {
    fn new(device: &mut Device) -> Self {
        let bytes = quant::encode(FormatId::Q4_0, &values(16 * N, 3), N).expect("a format that can be written");
        let wide = bytes.repeat(2 * MOE.intermediate / 16);
        let experts = (0..MOE.experts)
            .map(|_| Expert {
                gate_up: device.matrix(FormatId::Q4_0, &[2 * MOE.intermediate, N], &wide),
                gate_up_bias: None,
                down: device.matrix(FormatId::Q4_0, &[N, MOE.intermediate], &wide[..wide.len() / 2]),
                down_bias: None,
            })
            .collect();
        let logits = values(MOST * MOE.experts, 4);
        let mut scores = device.cpu.buf(logits.len()).expect("memory");
        device.cpu.upload(&logits, &mut scores).expect("an upload");
        Mixture { experts, scores }
    }

    fn run(&self, device: &mut Device, rows: usize) {
        let args = MoeArgs {
            route: &ROUTE,
            scores: &self.scores,
            correction: None,
            experts: &self.experts,
            intermediate: MOE.intermediate,
            hidden: N,
            glu: Glu::Act(Activation::Silu),
        };
        device.cpu.moe(rows, &device.x, &args, &mut device.step, &mut device.out).expect("a mixture");
    }
}

/// Seeded, roughly normal.
fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut unit = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| (0..4).map(|_| unit()).sum::<f32>() * 0.05).collect()
}

/// Sixteen rows. Formats that cannot be written: seeded blocks, tried until their scales are moderate.
fn weights(format: FormatId, few: &[f32]) -> Vec<u8> {
    if let Ok(bytes) = quant::encode(format, few, K) {
        return bytes;
    }
    let mut state = 3u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut bytes = vec![0; format.bytes_of(few.len()).expect("whole blocks")];
    let mut values = vec![0.0; format.block_len()];
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        loop {
            block.fill_with(&mut byte);
            quant::decode(format, block, &mut values).expect("a weight format");
            if values.iter().all(|v| v.abs() < 1.0) {
                break;
            }
        }
    }
    bytes
}

fn matmul(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("matmul");
    group.sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(300));
    let few = values(16 * K, 1);
    let mut truth = Device::new("scalar");
    let mut devices: Vec<_> = Cpu::tiers().map(|t| (t, Device::new(t))).collect();
    let peaks: Vec<_> = devices.iter().map(|(_, device)| Peaks::measure(&device.cpu, FOOTPRINT as usize)).collect();
    for format in FORMATS {
        // Encoding is slow and a kernel does not mind rows that repeat.
        let bytes = weights(format, &few).repeat(N / 16);
        let w = truth.weight(format, &bytes);
        let expected = ROWS.map(|rows| truth.result(rows, &w));
        for ((tier, device), peaks) in devices.iter_mut().zip(&peaks) {
            let size = device.cpu.weight_bytes(format, N, K);
            let copies: Vec<_> = (0..FOOTPRINT.div_ceil(size)).map(|_| device.weight(format, &bytes)).collect();
            for (rows, expected) in ROWS.iter().zip(&expected) {
                assert!(device.result(*rows, &copies[0]) == *expected, "{tier} {format} {rows} rows: other bits");
                group.throughput(match rows {
                    1 => Throughput::Bytes(size),
                    _ => Throughput::Elements((rows * N * K) as u64),
                });
                let mut next = copies.iter().cycle();
                let work = Work { bytes: size, operations: (2 * rows * N * K) as u64, integers: !format.is_plain() };
                let name = format!("{tier}/{format}/{rows}");
                peaks.bench(&mut group, &name, work, || device.run(*rows, next.next().expect("a cycle")));
            }
        }
    }
    group.finish();
}

fn mixture(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("moe");
    group.sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(300));
    let mut truth = Device::new("scalar");
    let scalar = Mixture::new(&mut truth);
    for tier in Cpu::tiers() {
        let mut device = Device::new(tier);
        let moe = Mixture::new(&mut device);
        let peaks = Peaks::measure(&device.cpu, FOOTPRINT as usize);
        let expert_bytes = device.cpu.weight_bytes(FormatId::Q4_0, 3 * MOE.intermediate, N);
        for rows in ROWS {
            scalar.run(&mut truth, rows);
            moe.run(&mut device, rows);
            assert!(device.out(rows) == truth.out(rows), "{tier} mixture of {rows} rows: other bits");
            group.throughput(match rows {
                1 => Throughput::Bytes(MOE.top_k as u64 * expert_bytes),
                _ => Throughput::Elements((rows * MOE.top_k * 3 * MOE.intermediate * N) as u64),
            });
            // An expert is read once however many rows chose it; with many rows, all are.
            let read = (rows * MOE.top_k).min(MOE.experts) as u64 * expert_bytes;
            let operations = (2 * rows * MOE.top_k * 3 * MOE.intermediate * N) as u64;
            let work = Work { bytes: read, operations, integers: true };
            peaks.bench(&mut group, &format!("{tier}/Q4_0/{rows}"), work, || moe.run(&mut device, rows));
        }
    }
    group.finish();
}

/// What stands between the matrices, in bytes read and written: all of it lies in a core's own caches.
fn vectors(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("vectors");
    group.sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(300));
    let norm = NormSpec::rms(1e-6);
    let glu = Glu::Act(Activation::Silu);
    // Cosines and sines of one angle, whichever.
    let angles: Vec<f32> = (0..MOST * HEADS.dim).map(|i| if i % HEADS.dim < HEADS.dim / 2 { 0.6 } else { 0.8 }).collect();
    let mut first = None;
    for tier in Cpu::tiers() {
        let mut device = Device::new(tier);
        let peaks = Peaks::measure(&device.cpu, FOOTPRINT as usize);
        let mut buf = |values: &[f32]| {
            let mut buf = device.cpu.buf(values.len()).expect("memory");
            device.cpu.upload(values, &mut buf).expect("an upload");
            buf
        };
        let (head, row, angles) = (buf(&[1.0; HEADS.dim]), buf(&[1.0; N]), buf(&angles));
        let (mut normed, delta, wide) = (buf(&vec![0.0; MOST * N]), buf(&values(MOST * N, 6)), buf(&values(2 * MOST * N, 7)));
        let mut run = |device: &mut Device, op: &str, rows: usize| {
            let Device { cpu, out, .. } = device;
            match op {
                "norm of heads" => cpu.norm_heads(rows, out, HEADS, &norm, &head),
                "rope" => cpu.rope(rows, out, HEADS, &angles, HEADS.dim, RopeStyle::HalfSplit),
                "add, norm" => cpu.add_norm(rows, N, out, Some((&delta, 0.5)), &norm, &row, None, &mut normed),
                _ => cpu.gate(rows, N, glu, &wide, out),
            }
            .expect("an operation");
        };
        // Operation, and values that it reads and writes for each of a row.
        let ops = [("norm of heads", 2), ("rope", 3), ("add, norm", 4), ("gate", 3)];
        let mut results = Vec::new();
        for (op, _) in ops {
            device.cpu.upload(&values(MOST * N, 5), &mut device.out).expect("an upload");
            run(&mut device, op, MOST);
            results.push(device.out(MOST));
        }
        assert!(*first.get_or_insert_with(|| results.clone()) == results, "{tier} vectors: other bits");
        for (op, moved) in ops {
            device.cpu.upload(&values(MOST * N, 5), &mut device.out).expect("an upload");
            for rows in [1, 8, MOST] {
                let bytes = (4 * moved * rows * N) as u64;
                group.throughput(Throughput::Bytes(bytes));
                let work = Work { bytes, operations: 0, integers: false };
                peaks.bench(&mut group, &format!("{tier}/{op}/{rows}"), work, || run(&mut device, op, rows));
            }
        }
    }
    group.finish();
}

criterion_group!(benches, matmul, mixture, vectors);
criterion_main!(benches);
