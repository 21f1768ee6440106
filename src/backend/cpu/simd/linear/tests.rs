//! The promise: the same bits for a row whatever the batch, the threads and the tier; and the right numbers.

use super::*;
use crate::backend::WeightPart;
use crate::backend::cpu::acts::quantize_block;
use crate::backend::cpu::arena::Arena;
use crate::backend::cpu::simd::Tier;
use crate::backend::cpu::weight::CpuWeight;
use crate::backend::cpu::{Compute, synthetic};
use crate::dtype::FormatId;
use crate::quant;
use crate::weights::TensorView;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn load(parts: &[(FormatId, usize, &[u8])], k: usize, compute: Compute) -> CpuWeight {
    let shapes: Vec<_> = parts.iter().map(|p| [p.1, k]).collect();
    let parts: Vec<_> = parts
        .iter()
        .zip(&shapes)
        .map(|((format, _, bytes), shape)| WeightPart::new("w", TensorView { format: *format, shape, bytes }))
        .collect();
    CpuWeight::load(&parts, compute, &Pool::new(1).unwrap(), &mut Arena::default()).unwrap()
}

fn run(fns: &LinearFns, pool: &Pool, w: &CpuWeight, x: &[f32], bias: Option<&[f32]>) -> Vec<u32> {
    let (k, rows) = (w.columns(), x.len() / w.columns());
    let mut y = vec![f32::NAN; rows * w.rows()];
    let mut scratch = vec![0x7fc0_0000; rows * k];
    fns.matmul(pool, w, &Input { x, rows, bias }, &mut scratch, &mut y);
    y.into_iter().map(f32::to_bits).collect()
}

/// Odd N, N below a panel, K of one block, K not a multiple of the K slice, K so long that rows come in several slices.
fn shapes(format: FormatId) -> &'static [(usize, usize)] {
    match format.block_len() {
        1 => &[(1, 32), (17, 7), (71, 416), (40, 1056), (3, 4100)],
        32 => &[(1, 32), (17, 96), (33, 576), (40, 1056), (5, 8960)],
        _ => &[(1, 256), (33, 512), (7, 8960)],
    }
}

/// Panel formats, and some that are decoded as they are needed.
const CASES: &[(FormatId, Compute)] = &[
    (FormatId::F32, Compute::Fast),
    (FormatId::F16, Compute::Fast),
    (FormatId::BF16, Compute::Fast),
    (FormatId::Q8_0, Compute::Fast),
    (FormatId::Q4_0, Compute::Fast),
    (FormatId::Q4_1, Compute::Fast),
    (FormatId::Q5_0, Compute::Fast),
    (FormatId::Q5_1, Compute::Fast),
    (FormatId::Q4K, Compute::Fast),
    (FormatId::Q5K, Compute::Fast),
    (FormatId::Q4_1, Compute::Exact),
    (FormatId::Q6K, Compute::Fast),
    (FormatId::Q6K, Compute::Exact),
    (FormatId::IQ4NL, Compute::Fast),
    (FormatId::IQ4XS, Compute::Fast),
    (FormatId::IQ4XS, Compute::Exact),
    (FormatId::MXFP4, Compute::Fast),
    (FormatId::Q3K, Compute::Fast),
    (FormatId::F8E4M3, Compute::Fast),
];

/// Every table there is, with a name: two for the scalar tier, and one that stands for what this machine may lack.
fn tables() -> Vec<(&'static str, &'static LinearFns)> {
    let mut tables = vec![("scalar without fma", &SCALAR)];
    tables.extend(Tier::available().map(|t| (t.name, t.linear)));
    #[cfg(target_arch = "x86_64")]
    if Tier::named("avx2").is_ok() {
        tables.push(("avxvnni emulated", &avx2::LINEAR_EMULATED));
    }
    tables
}

#[test]
fn a_row_alone_and_in_a_crowd() {
    let pools = [1, 2, 3].map(|n| Pool::new(n).unwrap());
    for &(format, compute) in CASES {
        for &(n, k) in shapes(format) {
            let bytes = synthetic::weights(format, n * k, 7);
            let w = load(&[(format, n, &bytes)], k, compute);
            let x = synthetic::normals(131 * k, 11);
            for tier in Tier::available() {
                let crowds: &[usize] = match tier.name {
                    "scalar" => &[2, 5, 13],
                    _ => &[2, 3, 5, 6, 7, 8, 11, 12, 13, 33, 131],
                };
                let most = *crowds.last().unwrap();
                let alone: Vec<u32> =
                    x.chunks_exact(k).take(most).flat_map(|x| run(tier.linear, &pools[0], &w, x, None)).collect();
                for (i, &m) in crowds.iter().enumerate() {
                    let pool = &pools[i % 3];
                    let y = run(tier.linear, pool, &w, &x[..m * k], None);
                    assert!(
                        y == alone[..m * n],
                        "{} {format} {compute:?} {n}x{k} rows {m} threads {}",
                        tier.name,
                        pool.threads()
                    );
                }
            }
        }
    }
}

#[test]
fn every_tier_gives_the_same_bits() {
    let pool = Pool::new(1).unwrap();
    for &(format, compute) in CASES {
        for &(n, k) in shapes(format) {
            let bytes = synthetic::weights(format, n * k, 3);
            let w = load(&[(format, n, &bytes)], k, compute);
            // The scalar tiers are slow: small shapes tell as much.
            for m in if k > 2000 { &[3][..] } else { &[1, 3, 14][..] } {
                let mut x = synthetic::normals(m * k, 5);
                // A zero block and a subnormal one.
                x[..32.min(k)].fill(0.0);
                if *m > 1 {
                    x[k..k + 32.min(k)].fill(1e-40);
                }
                let all: Vec<_> = tables().into_iter().map(|(name, fns)| (name, run(fns, &pool, &w, &x, None))).collect();
                for (name, y) in &all[1..] {
                    assert!(*y == all[0].1, "{name} {format} {compute:?} {n}x{k} rows {m}");
                }
            }
        }
    }
}

/// Against f64 on the decoded weights and the activations as quantised: what is left is the rounding of the f32 sums.
#[test]
fn every_format_is_close_to_f64() {
    let pool = Pool::new(2).unwrap();
    for codec in quant::codecs() {
        for compute in [Compute::Fast, Compute::Exact] {
            let format = codec.id;
            for &(n, k) in &shapes(format)[..2] {
                let bytes = synthetic::weights(format, n * k, 9);
                let mut plain = vec![0.0; n * k];
                (codec.decode)(&bytes, &mut plain);
                let w = load(&[(format, n, &bytes)], k, compute);
                let m = 5;
                let x = synthetic::normals(m * k, 13);
                let quantized = w.segments[0].quantized();
                let seen: Vec<f64> = match quantized {
                    false => x.iter().map(|&v| f64::from(v)).collect(),
                    true => x.as_chunks::<32>().0.iter().flat_map(seen_quantized).collect(),
                };
                let y = run(Tier::best().linear, &pool, &w, &x, None);
                for r in 0..m {
                    for c in 0..n {
                        let terms = (0..k).map(|i| seen[r * k + i] * f64::from(plain[c * k + i]));
                        let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                        let got = f64::from(f32::from_bits(y[r * n + c]));
                        let steps = if quantized { 3 * k / 32 } else { k };
                        // Minima cancel against scales: their sizes count apart, which 4 covers.
                        let bound = 4.0 * steps as f64 * 6e-8 * size + 1e-30;
                        assert!((got - sum).abs() <= bound, "{format} {compute:?} {n}x{k} at {r},{c}: {got} for {sum}");
                    }
                }
            }
        }
    }
}

fn seen_quantized(block: &[f32; 32]) -> [f64; 32] {
    let (s, q) = quantize_block(block);
    q.map(|q| f64::from(s) * f64::from(q))
}

#[test]
fn extremes_do_not_saturate() {
    let pool = Pool::new(1).unwrap();
    let (n, k) = (33, 256);
    // Bytes of a block that hold quants, fifth bits and high pairs included.
    let quants = [
        (FormatId::Q8_0, 2..34),
        (FormatId::Q4_0, 2..18),
        (FormatId::Q4_1, 4..20),
        (FormatId::Q5_0, 2..22),
        (FormatId::Q5_1, 4..24),
        (FormatId::Q4K, 16..144),
        (FormatId::Q5K, 16..176),
        (FormatId::Q6K, 0..192),
        (FormatId::IQ4NL, 2..18),
        (FormatId::IQ4XS, 8..136),
        (FormatId::MXFP4, 1..17),
    ];
    for (format, quants) in quants {
        for fill in [0x80u8, 0x7f, 0x00, 0xff] {
            let mut bytes = synthetic::weights(format, n * k, 1);
            for b in bytes.chunks_exact_mut(format.block_bytes()) {
                b[quants.clone()].fill(fill);
            }
            let w = load(&[(format, n, &bytes)], k, Compute::Fast);
            for sign in [1.0, -1.0] {
                let x = [sign; 256];
                let truth = run(&SCALAR, &pool, &w, &x, None);
                for (name, fns) in tables() {
                    assert!(run(fns, &pool, &w, &x, None) == truth, "{name} {format} {fill:#x}");
                }
            }
        }
    }
}

/// Where a tier's kernels lie its rows is its own affair. Weights that are a one in each row read the quants times their
/// scale back, and minima of one the sum of a block.
#[test]
fn activations_are_quantised_alike_on_every_tier() {
    let (rows, k) = (29, 320);
    let mut x = synthetic::normals(rows * k, 17);
    x[5] = f32::NAN;
    x[40] = f32::INFINITY;
    x[64..96].fill(-0.0);
    x[96..128].fill(3e-39);
    x[130] = 3e38;
    let one = half::f16::ONE.to_le_bytes();
    let (mut ones, mut sums) = (vec![0u8; k * k / 32 * 34], vec![0u8; k / 32 * k / 32 * 20]);
    for i in 0..k {
        let block = &mut ones[(i * k + i) / 32 * 34..][..34];
        block[..2].copy_from_slice(&one);
        block[2 + i % 32] = 1;
    }
    for i in 0..k / 32 {
        sums[(i * k / 32 + i) * 20 + 2..][..2].copy_from_slice(&one);
    }
    let ones = load(&[(FormatId::Q8_0, k, &ones)], k, Compute::Fast);
    let sums = load(&[(FormatId::Q4_1, k / 32, &sums)], k, Compute::Fast);
    // A NaN or an infinity spoils its own block alone, and with it the rest of the row by 0 * NaN.
    let same = |got: &[u32], want: &[f32]| {
        got.iter().zip(want).all(|(g, w)| *g == (w + 0.0).to_bits() || f32::from_bits(*g).is_nan() && w.is_nan())
    };
    let (mut quants, mut totals) = (Vec::new(), Vec::new());
    for row in x.chunks(k) {
        let blocks: Vec<_> = row.as_chunks::<32>().0.iter().map(quantize_block).collect();
        let nan = if blocks.iter().any(|(scale, _)| scale.is_nan()) { f32::NAN } else { 0.0 };
        for (scale, q) in &blocks {
            quants.extend(q.map(|q| f32::from(q) * scale + nan));
            totals.push(scale * q.iter().map(|&q| f32::from(q)).sum::<f32>() + nan);
        }
    }
    for threads in [1, 3] {
        let pool = Pool::new(threads).unwrap();
        for (name, fns) in tables() {
            assert!(same(&run(fns, &pool, &ones, &x, None), &quants), "{name} {threads} threads: quants");
            assert!(same(&run(fns, &pool, &sums, &x, None), &totals), "{name} {threads} threads: sums");
        }
    }
}

#[test]
fn parts_of_several_formats_and_a_bias() {
    let pools = [1, 2].map(|n| Pool::new(n).unwrap());
    let k = 512;
    let parts = [(FormatId::Q4K, 40), (FormatId::Q4K, 5), (FormatId::Q3K, 33), (FormatId::F16, 1)];
    let bytes: Vec<_> = parts.iter().zip(1..).map(|(&(f, n), seed)| synthetic::weights(f, n * k, seed)).collect();
    let list: Vec<_> = parts.iter().zip(&bytes).map(|(&(f, n), b)| (f, n, &b[..])).collect();
    let n: usize = parts.iter().map(|p| p.1).sum();
    let bias = synthetic::normals(n, 23);
    for compute in [Compute::Fast, Compute::Exact] {
        let whole = load(&list, k, compute);
        assert_eq!((whole.rows(), whole.columns()), (n, k));
        let x = synthetic::normals(9 * k, 19);
        for tier in Tier::available() {
            for pool in &pools {
                let y = run(tier.linear, pool, &whole, &x, Some(&bias));
                let mut column = 0;
                for part in &list {
                    let alone = run(tier.linear, pool, &load(&[*part], k, compute), &x, None);
                    for (row, alone) in y.chunks_exact(n).zip(alone.chunks_exact(part.1)) {
                        for (c, v) in alone.iter().enumerate() {
                            let expected = f32::from_bits(*v) + bias[column + c];
                            assert_eq!(row[column + c], expected.to_bits(), "{} {compute:?} column {}", tier.name, column + c);
                        }
                    }
                    column += part.1;
                }
            }
        }
    }
}

#[test]
fn a_row_decodes_as_in_the_file() {
    for codec in quant::codecs() {
        for compute in [Compute::Fast, Compute::Exact] {
            let &(n, k) = &shapes(codec.id)[1];
            let bytes = synthetic::weights(codec.id, n * k, 29);
            let mut plain = vec![0.0; n * k];
            (codec.decode)(&bytes, &mut plain);
            let w = load(&[(codec.id, n, &bytes)], k, compute);
            let mut row = vec![0.0; k];
            for (r, expected) in plain.chunks_exact(k).enumerate() {
                w.decode_row(r, &mut row);
                // As numbers: a zero quant may carry the sign of its scale, or not.
                assert!(row == expected, "{} {compute:?} row {r}", codec.id);
            }
        }
    }
}

/// Heads side by side in wider rows, and groups of rows one below the other: each product has the bits it has alone.
#[test]
fn many_products_at_once() {
    let k = 96;
    for (format, other) in [(FormatId::Q4_0, FormatId::Q8_0), (FormatId::F32, FormatId::F16), (FormatId::Q8_0, FormatId::BF16)] {
        let w: Vec<_> = [(33, 1), (7, 2), (64, 3), (20, 4)]
            .iter()
            .map(|&(n, seed)| {
                let (a, b) = (synthetic::weights(format, n * k, seed), synthetic::weights(other, 5 * k, seed + 10));
                load(&[(format, n, &a), (other, 5, &b)], k, Compute::Fast)
            })
            .collect();
        let widest = w.iter().map(CpuWeight::rows).max().unwrap();
        let bias = synthetic::normals(widest, 9);
        let bias = |i: usize| (i % 2 == 1).then_some(&bias[..w[i].rows()]);
        for tier in Tier::available() {
            for threads in [1, 3] {
                let pool = Pool::new(threads).unwrap();
                let alone = |i: usize, x: &[f32]| run(tier.linear, &pool, &w[i], x, bias(i));

                // Heads: gaps between them, in x and in y.
                let (rows, x_step, y_step) = (11, k + 3, widest + 2);
                let (x_stride, y_stride) = (4 * x_step + 1, 4 * y_step + 5);
                let x = synthetic::normals(rows * x_stride, 5);
                let of = |i| Product {
                    w: &w[i],
                    bias: bias(i),
                    rows: 0..rows,
                    x: 2 + i * x_step,
                    y: 4 + i * y_step,
                    before: i * rows,
                };
                let mut y = vec![7.5; rows * y_stride];
                let mut scratch = vec![0; 4 * rows * k];
                let all = Products { count: 4, of: &of, x: &x, x_stride, y_stride };
                tier.linear.products(&pool, &all, &mut scratch, &mut y);
                let mut want = vec![7.5f32.to_bits(); rows * y_stride];
                for (i, w) in w.iter().enumerate() {
                    let n = w.rows();
                    for r in 0..rows {
                        let y = alone(i, &x[r * x_stride + 2 + i * x_step..][..k]);
                        want[r * y_stride + 4 + i * y_step..][..n].copy_from_slice(&y);
                    }
                }
                assert!(y.iter().map(|v| v.to_bits()).eq(want), "heads: {} {format} {threads} threads", tier.name);

                // Groups, one of them empty, one of a single row.
                let cuts = [0, 17, 17, 18, 31];
                let x = synthetic::normals(31 * k, 6);
                let of = |i: usize| Product { w: &w[i], bias: bias(i), rows: cuts[i]..cuts[i + 1], x: 0, y: 0, before: cuts[i] };
                let mut y = vec![7.5; 31 * widest];
                let all = Products { count: 4, of: &of, x: &x, x_stride: k, y_stride: widest };
                tier.linear.products(&pool, &all, &mut scratch, &mut y);
                for i in 0..4 {
                    for r in cuts[i]..cuts[i + 1] {
                        let want = alone(i, &x[r * k..][..k]);
                        let y = &y[r * widest..][..want.len()];
                        assert!(y.iter().map(|v| v.to_bits()).eq(want), "groups: {} {format} row {r}", tier.name);
                    }
                }
            }
        }
    }
}

#[test]
fn products_must_not_meet() {
    let k = 32;
    let w = &load(&[(FormatId::F32, 3, &synthetic::weights(FormatId::F32, 3 * k, 1))], k, Compute::Fast);
    let (x, pool) = (vec![0.0; 4 * k], Pool::new(1).unwrap());
    for (rows, columns, apart) in [
        ([0..2, 2..4], [0, 0], true),
        ([0..2, 0..2], [0, 3], true),
        ([0..2, 1..4], [0, 0], false),
        ([0..2, 0..2], [0, 2], false),
        ([0..2, 0..2], [3, 0], false),
        ([0..2, 2..5], [0, 0], false),
        ([0..2, 2..4], [0, 4], false),
    ] {
        let of = |i: usize| Product { w, bias: None, rows: rows[i].clone(), x: 0, y: columns[i], before: i * rows[0].len() };
        let all = Products { count: 2, of: &of, x: &x, x_stride: k, y_stride: 6 };
        let (mut scratch, mut y) = (vec![0; 5 * k], vec![0.0; 24]);
        let run = AssertUnwindSafe(|| SCALAR.products(&pool, &all, &mut scratch, &mut y));
        let ran = catch_unwind(run);
        assert_eq!(ran.is_ok(), apart, "{rows:?} {columns:?}");
    }
}
