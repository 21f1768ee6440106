//! Every operation through the trait: against plain f64 code, and the same bits on every tier and for several threads.

use super::super::{CpuOptions, synthetic};
use super::*;
use crate::arch::{AttnDims, NormKind};
use crate::backend::RowOrder;
use crate::batch::{BatchItem, RowsWanted};
use crate::dtype::KvDType;
use crate::ids::BlockGroup;
use crate::weights::TensorView;

const LIMITS: BatchLimits = BatchLimits { tokens: 64, seqs: 4, blocks: 16, rows: 64 };
const GROUP: BlockGroup = BlockGroup { blocks: 12, window: None };
const DIMS: AttnDims = AttnDims { heads: 6, kv_heads: 2, qk_dim: 24, v_dim: 24, v_in_k: false };

fn shape(dtype: KvDType) -> KvShape {
    KvShape::one_group(vec![DIMS; 2], 12, 16, dtype)
}

fn devices() -> Vec<Cpu> {
    let mut out = Vec::new();
    for tier in Cpu::tiers() {
        for threads in [1, 3] {
            let options = CpuOptions { threads, tier: Some(tier.into()), ..CpuOptions::default() };
            out.push(Cpu::new(&options).unwrap());
        }
    }
    out
}

fn filled(cpu: &mut Cpu, values: &[f32]) -> CpuBuf {
    let mut buf = cpu.buf(values.len()).unwrap();
    cpu.upload(values, &mut buf).unwrap();
    buf
}

fn part<'a>(format: FormatId, shape: &'a [usize], bytes: &'a [u8]) -> WeightPart<'a> {
    WeightPart::new("w", TensorView { format, shape, bytes })
}

/// Runs `op` on every device: the results have the same bits, and are near `expected`.
fn check(name: &str, expected: &[f64], tolerance: f64, mut op: impl FnMut(&mut Cpu) -> CpuBuf) {
    let mut first: Option<Vec<f32>> = None;
    for mut cpu in devices() {
        let buf = op(&mut cpu);
        let mut out = vec![f32::NAN; expected.len()];
        cpu.download(&buf, &mut out).unwrap();
        for (i, (found, expected)) in out.iter().zip(expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            assert!(error <= tolerance * (1.0 + expected.abs()), "{name} at {i}: {found} for {expected} on {}", cpu.describe());
        }
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let first = first.get_or_insert_with(|| out.clone());
        assert!(bits(first) == bits(&out), "{name}: other bits on {}", cpu.describe());
    }
}

fn wide(v: &[f32]) -> Vec<f64> {
    v.iter().map(|&v| f64::from(v)).collect()
}

#[test]
fn add_norm_of_both_kinds() {
    let (rows, width) = (7, 100);
    let x = synthetic::normals(rows * width, 1);
    let delta = synthetic::normals(rows * width, 2);
    let (w, b) = (synthetic::normals(width, 3), synthetic::normals(width, 4));
    for kind in [NormKind::Rms, NormKind::Layer] {
        for (with_delta, with_bias) in [(false, false), (true, kind == NormKind::Layer)] {
            let sum: Vec<f64> = x.iter().zip(&delta).map(|(&x, &d)| f64::from(if with_delta { x + d } else { x })).collect();
            let mut expected = Vec::new();
            for row in sum.chunks_exact(width) {
                let mean = if kind == NormKind::Layer { row.iter().sum::<f64>() / width as f64 } else { 0.0 };
                let var = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / width as f64;
                for (i, v) in row.iter().enumerate() {
                    let bias = if with_bias { f64::from(b[i]) } else { 0.0 };
                    expected.push((v - mean) / (var + 1e-5).sqrt() * f64::from(w[i]) + bias);
                }
            }
            check("add_norm", &expected, 1e-5, |cpu| {
                let mut x_buf = filled(cpu, &x);
                let (delta, w, b) = (filled(cpu, &delta), filled(cpu, &w), filled(cpu, &b));
                let mut out = cpu.buf(rows * width).unwrap();
                let norm = NormSpec { kind, ..NormSpec::rms(1e-5) };
                let (d, b) = (with_delta.then_some((&delta, 1.0)), with_bias.then_some(&b));
                cpu.add_norm(rows, width, &mut x_buf, d, &norm, &w, b, &mut out).unwrap();
                let mut after = vec![0.0; rows * width];
                cpu.download(&x_buf, &mut after).unwrap();
                assert_eq!(wide(&after), sum);
                out
            });
        }
    }
}

#[test]
fn embed_linear_gather_and_scale() {
    let (vocab, k) = (50, 64);
    let bytes = synthetic::weights(FormatId::Q8_0, vocab * k, 5);
    let mut table = vec![0.0; vocab * k];
    quant::decode(FormatId::Q8_0, &bytes, &mut table).unwrap();
    let tokens: Vec<u32> = vec![49, 0, 7, 7, 13];
    let embedded: Vec<f64> =
        tokens.iter().flat_map(|&t| table[t as usize * k..][..k].iter().map(|&v| f64::from(v) * 2.5)).collect();
    let begin = |cpu: &mut Cpu| {
        let mut step = cpu.step(&LIMITS, k, &shape(KvDType::F16), &MoeShape::default()).unwrap();
        let mut batch = Batch::new(16, &[GROUP], LIMITS).unwrap();
        let item = BatchItem { tokens: &tokens, start: 0, total: 5, tables: &[&[BlockId(0)]], rows: RowsWanted::Last };
        batch.push(item).unwrap();
        cpu.begin(&batch, &mut step).unwrap();
        step
    };
    check("embed", &embedded, 1e-6, |cpu| {
        let (step, table) = (begin(cpu), cpu.weight(&[part(FormatId::Q8_0, &[vocab, k], &bytes)]).unwrap());
        let mut out = cpu.buf(5 * k).unwrap();
        cpu.embed(&step, &table, 2.5, &mut out).unwrap();
        out
    });

    // The last row alone, through a plain matrix with a bias, scaled and capped.
    let n = 35;
    let w = synthetic::normals(n * k, 6);
    let w_bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
    let bias = synthetic::normals(n, 7);
    let logits: Vec<f64> = (0..n)
        .map(|i| {
            let dot: f64 = (0..k).map(|j| embedded[4 * k + j] * f64::from(w[i * k + j])).sum();
            3.0 * ((dot + f64::from(bias[i])) * 0.5 / 3.0).tanh()
        })
        .collect();
    check("logits", &logits, 1e-5, |cpu| {
        let mut step = begin(cpu);
        let table = cpu.weight(&[part(FormatId::Q8_0, &[vocab, k], &bytes)]).unwrap();
        // The same matrix in two parts.
        let cut = 20 * k * 4;
        let shapes = [[20, k], [15, k]];
        let parts = [part(FormatId::F32, &shapes[0], &w_bytes[..cut]), part(FormatId::F32, &shapes[1], &w_bytes[cut..])];
        let (w, bias) = (cpu.weight(&parts).unwrap(), filled(cpu, &bias));
        let (mut x, mut last, mut out) = (cpu.buf(5 * k).unwrap(), cpu.buf(k).unwrap(), cpu.buf(n).unwrap());
        cpu.embed(&step, &table, 2.5, &mut x).unwrap();
        cpu.gather(&step, k, &x, &mut last).unwrap();
        cpu.linear(1, &last, &w, Some(&bias), &mut step, &mut out).unwrap();
        cpu.scale_cap(n, 0.5, Some(3.0), &mut out).unwrap();
        out
    });

    let mut cpu = Cpu::new(&CpuOptions::default()).unwrap();
    let (step, small) = (begin(&mut cpu), cpu.weight(&[part(FormatId::Q8_0, &[49, k], &bytes[..49 * 68])]).unwrap());
    let mut out = cpu.buf(5 * k).unwrap();
    let error = cpu.embed(&step, &small, 1.0, &mut out).unwrap_err().to_string();
    assert!(error.contains("49") && error.contains("48"), "{error}");
}

#[test]
fn rope_of_both_styles_and_gates() {
    let (rows, rotary) = (5, 16);
    let heads = Heads { stride: 120, offset: 24, heads: 3, dim: 24 };
    let x = synthetic::normals(rows * heads.stride, 8);
    let angles: Vec<f32> = (0..rows)
        .flat_map(|r| {
            let angle = move |i: usize| r as f32 * 0.3 + i as f32;
            (0..rotary / 2).map(move |i| angle(i).cos()).chain((0..rotary / 2).map(move |i| angle(i).sin()))
        })
        .collect();
    for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
        let mut expected = wide(&x);
        for r in 0..rows {
            for h in 0..heads.heads {
                for i in 0..rotary / 2 {
                    let (a, b) = if style == RopeStyle::HalfSplit { (i, i + rotary / 2) } else { (2 * i, 2 * i + 1) };
                    let at = r * heads.stride + heads.offset + h * heads.dim;
                    let (c, s) = (f64::from(angles[r * rotary + i]), f64::from(angles[r * rotary + rotary / 2 + i]));
                    let (u, v) = (expected[at + a], expected[at + b]);
                    expected[at + a] = u * c - v * s;
                    expected[at + b] = u * s + v * c;
                }
            }
        }
        check("rope", &expected, 1e-6, |cpu| {
            let (mut x, angles) = (filled(cpu, &x), filled(cpu, &angles));
            cpu.rope(rows, &mut x, heads, &angles, rotary, style).unwrap();
            x
        });
    }

    let width = 60;
    for act in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu] {
        let f = |x: f64| match act {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => x * 0.5 * (1.0 + libm::erf(x / 2f64.sqrt())),
            Activation::GeluTanh => x * 0.5 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
            Activation::Relu => x.max(0.0),
        };
        let x = &x[..rows * 2 * width];
        let expected: Vec<f64> = x
            .chunks_exact(2 * width)
            .flat_map(|row| (0..width).map(move |i| f(f64::from(row[i])) * f64::from(row[width + i])))
            .collect();
        check("gate", &expected, 1e-5, |cpu| {
            let x = filled(cpu, x);
            let mut out = cpu.buf(rows * width).unwrap();
            cpu.gate(rows, width, Glu::Act(act), &x, &mut out).unwrap();
            out
        });
    }
}

/// A chunk of a longer prompt beside a decode row of another sequence, after blocks were copied.
#[test]
fn attention_over_the_cache() {
    let (q_len, k_len) = (DIMS.heads * DIMS.qk_dim, DIMS.kv_heads * DIMS.qk_dim);
    let stride = q_len + 2 * k_len;
    let (first, second) = (30, 41);
    let all = synthetic::normals((first + second) * stride, 9);
    let heads = |offset, heads| Heads { stride, offset, heads, dim: DIMS.qk_dim };
    let (q, k, v) = (heads(0, DIMS.heads), heads(q_len, DIMS.kv_heads), heads(q_len + k_len, DIMS.kv_heads));
    let sinks = synthetic::normals(DIMS.heads, 10);
    for (window, softcap, with_sinks) in [(None, None, false), (Some(9), None, true), (None, Some(2.0), false)] {
        let args = AttnArgs { dims: DIMS, scale: 0.2, window, softcap };
        // The queries that the last step runs: tokens 20 to 29 of the first sequence, 40 of the second.
        let asked: Vec<(usize, usize, usize)> = (20..30).map(|t| (0, t, first)).chain([(first, 40, second)]).collect();
        let mut expected = Vec::new();
        for (base, t, _) in asked {
            for (h, sink) in sinks.iter().enumerate() {
                let row = |t: usize, heads: Heads, h: usize| {
                    wide(&all[(base + t) * stride + heads.offset + h * heads.dim..][..heads.dim])
                };
                let query = row(t, q, h);
                let from = window.map_or(0, |w: usize| (t + 1).saturating_sub(w));
                let kv_head = h / (DIMS.heads / DIMS.kv_heads);
                let scores: Vec<f64> = (from..=t)
                    .map(|s| {
                        let dot: f64 = query.iter().zip(row(s, k, kv_head)).map(|(a, b)| a * b).sum();
                        let score = dot * f64::from(args.scale);
                        softcap.map_or(score, |c: f32| f64::from(c) * (score / f64::from(c)).tanh()).exp()
                    })
                    .collect();
                let total: f64 = scores.iter().sum::<f64>() + if with_sinks { f64::from(*sink).exp() } else { 0.0 };
                let mut out = vec![0.0; DIMS.v_dim];
                for (s, p) in (from..=t).zip(&scores) {
                    for (o, v) in out.iter_mut().zip(row(s, v, kv_head)) {
                        *o += p / total * v;
                    }
                }
                expected.extend(out);
            }
        }
        for (dtype, tolerance) in [(KvDType::F32, 1e-5), (KvDType::F16, 2e-3)] {
            check("attention", &expected, tolerance, |cpu| {
                let kv_shape = shape(dtype);
                let mut kv = cpu.kv(&kv_shape).unwrap();
                let mut step = cpu.step(&LIMITS, 32, &kv_shape, &MoeShape::default()).unwrap();
                let mut out = cpu.buf(LIMITS.tokens * q_len).unwrap();
                let mut batch = Batch::new(16, &[GROUP], LIMITS).unwrap();
                let tokens = [0u32; 64];
                let sinks = with_sinks.then(|| filled(cpu, &sinks));
                let mut run = |cpu: &mut Cpu, kv: &mut CpuKv, items: &[(usize, usize, usize, &[BlockId])]| {
                    batch.clear();
                    let mut rows = Vec::new();
                    for &(base, start, end, blocks) in items {
                        let tokens = &tokens[start..end];
                        batch.push(BatchItem { tokens, start, total: end, tables: &[blocks], rows: RowsWanted::Last }).unwrap();
                        rows.extend_from_slice(&all[(base + start) * stride..(base + end) * stride]);
                    }
                    let src = filled(cpu, &rows);
                    cpu.begin(&batch, &mut step).unwrap();
                    cpu.kv_write(&step, &src, k, v, kv, 1).unwrap();
                    cpu.attention(&mut step, &args, &src, q, kv, 1, sinks.as_ref(), &mut out).unwrap();
                };
                let (a, b) = ([BlockId(7), BlockId(2)], [BlockId(3), BlockId(11), BlockId(5)]);
                run(cpu, &mut kv, &[(0, 0, 20, &a), (first, 0, 33, &b)]);
                run(cpu, &mut kv, &[(first, 33, 40, &b)]);
                // The second sequence moves to other blocks before its last token.
                let moved = [BlockId(0), BlockId(11), BlockId(9)];
                let copy = |from, to| BlockCopy { group: 0, from: BlockId(from), to: BlockId(to) };
                cpu.copy_blocks(&mut kv, &[copy(3, 0), copy(5, 9)]).unwrap();
                run(cpu, &mut kv, &[(0, 20, 30, &a), (first, 40, 41, &moved)]);
                out
            });
        }
    }
}

#[test]
fn positions_are_added() {
    let (rows, k) = (50, 600);
    // Q3_K keeps the file's blocks, Q8_0 lies in panels; neither width is whole pieces of what is decoded at a time.
    for (format, k) in [(FormatId::F32, k), (FormatId::Q8_0, 608), (FormatId::Q3K, 768)] {
        let bytes = synthetic::weights(format, rows * k, 5);
        let mut table = vec![0.0; rows * k];
        quant::decode(format, &bytes, &mut table).unwrap();
        let x = synthetic::normals(5 * k, 6);
        let at = [30, 31, 7, 8, 9];
        let expected: Vec<_> = (0..5 * k).map(|i| f64::from(x[i] + table[at[i / k] * k + i % k])).collect();
        let begin = |cpu: &mut Cpu| {
            let mut step = cpu.step(&LIMITS, k, &shape(KvDType::F16), &MoeShape::default()).unwrap();
            let mut batch = Batch::new(16, &[GROUP], LIMITS).unwrap();
            let (a, b) = ([BlockId(0), BlockId(1)], [BlockId(2)]);
            batch.push(BatchItem { tokens: &[1, 1], start: 30, total: 32, tables: &[&a], rows: RowsWanted::Last }).unwrap();
            batch.push(BatchItem { tokens: &[1, 1, 1], start: 7, total: 10, tables: &[&b], rows: RowsWanted::Last }).unwrap();
            cpu.begin(&batch, &mut step).unwrap();
            step
        };
        check("embed_positions", &expected, 0.0, |cpu| {
            let (step, table) = (begin(cpu), cpu.weight(&[part(format, &[rows, k], &bytes)]).unwrap());
            let mut x = filled(cpu, &x);
            cpu.embed_positions(&step, &table, &mut x).unwrap();
            x
        });
        let mut cpu = Cpu::new(&CpuOptions::default()).unwrap();
        let part_bytes = &bytes[..format.bytes_of(31 * k).unwrap()];
        let (step, small) = (begin(&mut cpu), cpu.weight(&[part(format, &[31, k], part_bytes)]).unwrap());
        let mut x = filled(&mut cpu, &x);
        let error = cpu.embed_positions(&step, &small, &mut x).unwrap_err();
        assert_eq!(error, RunError::BatchTooLarge { what: "position", found: 31, limit: 30 });
    }
}

#[test]
fn a_matrix_for_each_head() {
    let (rows, heads, from, to) = (9, 5, 24, 17);
    let x = synthetic::normals(rows * 150, 1);
    let w = synthetic::normals(heads * to * from, 2);
    let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
    let x_heads = Heads { stride: 150, offset: 20, heads, dim: from };
    let y_heads = Heads { stride: 99, offset: 3, heads, dim: to };
    let mut expected = vec![0.25; rows * 99];
    for r in 0..rows {
        for h in 0..heads {
            for n in 0..to {
                let x = &x[r * 150 + 20 + h * from..][..from];
                let w = &w[(h * to + n) * from..][..from];
                expected[r * 99 + 3 + h * to + n] = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            }
        }
    }
    // Room for all heads at once, for two, and for one.
    for (tokens, columns) in [(64, 48), (9, 48), (9, 24)] {
        check("linear_heads", &expected, 1e-5, |cpu| {
            let limits = BatchLimits { tokens, ..LIMITS };
            let mut step = cpu.step(&limits, columns, &shape(KvDType::F16), &MoeShape::default()).unwrap();
            let w: Vec<_> = bytes
                .chunks_exact(to * from * 4)
                .map(|bytes| cpu.weight(&[part(FormatId::F32, &[to, from], bytes)]).unwrap())
                .collect();
            let (x, mut out) = (filled(cpu, &x), filled(cpu, &vec![0.25; rows * 99]));
            cpu.linear_heads(rows, &x, x_heads, &w, &mut step, &mut out, y_heads).unwrap();
            out
        });
    }
}

#[test]
fn vectors_are_decoded_and_reordered() {
    let mut cpu = Cpu::new(&CpuOptions::default()).unwrap();
    let halves: Vec<u8> = (0..8).flat_map(|i| half::f16::from_f32(i as f32).to_le_bytes()).collect();
    let singles: Vec<u8> = [0.5f32, -1.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut first = part(FormatId::F16, &[8], &halves);
    first.order = RowOrder::Interleaved { heads: 2 };
    let buf = cpu.vector(&[first, part(FormatId::F32, &[2], &singles)], 0.0).unwrap();
    let mut out = [0.0; 10];
    cpu.download(&buf, &mut out).unwrap();
    assert_eq!(out, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0, 0.5, -1.0]);

    // Two groups of a query, a key and a value of one row each, 1 added to each.
    let six = &halves[..12];
    let grouped = WeightPart { order: RowOrder::Grouped { groups: 2, queries: 1 }, ..part(FormatId::F16, &[6], six) };
    let buf = cpu.vector(&[grouped], 1.0).unwrap();
    cpu.download(&buf, &mut out[..6]).unwrap();
    assert_eq!(out[..6], [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);

    first.order = RowOrder::Interleaved { heads: 3 };
    for (bad, says) in [
        (first, "3 heads"),
        (WeightPart { order: RowOrder::Grouped { groups: 3, queries: 1 }, ..first }, "3 groups of 1"),
        (WeightPart { order: RowOrder::Grouped { groups: 0, queries: 2 }, ..first }, "0 groups"),
        (WeightPart { order: RowOrder::Grouped { groups: 1, queries: usize::MAX }, ..first }, "1 groups"),
        (WeightPart { order: RowOrder::Interleaved { heads: usize::MAX }, ..first }, "even number"),
        (part(FormatId::F32, &[3], &singles), "3 values"),
        (part(FormatId::I8, &[8], &singles), "I8"),
        (part(FormatId::F32, &[usize::MAX, 3], &singles), "shape"),
    ] {
        let error = cpu.vector(&[bad], 0.0).err().expect("refused").to_string();
        assert!(error.contains(says) && error.contains("tensor w"), "{error}");
    }
}

#[test]
fn a_matrix_is_reordered_row_by_row() {
    let mut cpu = Cpu::new(&CpuOptions::default()).unwrap();
    let (n, k) = (8, 256);
    for (format, compute) in [(FormatId::Q4_0, Compute::Fast), (FormatId::Q3K, Compute::Fast), (FormatId::Q4_0, Compute::Exact)] {
        cpu.compute = compute;
        let bytes = synthetic::weights(format, n * k, 31);
        let mut plain = vec![0.0; n * k];
        quant::decode(format, &bytes, &mut plain).unwrap();
        for order in [RowOrder::Interleaved { heads: 2 }, RowOrder::Grouped { groups: 2, queries: 2 }] {
            let w = cpu.weight(&[WeightPart { order, ..part(format, &[n, k], &bytes) }]).unwrap();
            let mut row = vec![0.0; k];
            for r in 0..n {
                w.decode_row(r, &mut row);
                assert_eq!(row, plain[order.source_row(r, n) * k..][..k], "{format} row {r}");
            }
        }
    }
}

#[test]
fn what_a_file_can_get_wrong_is_an_error() {
    let mut cpu = Cpu::new(&CpuOptions::default()).unwrap();
    let bytes = synthetic::weights(FormatId::Q4_0, 4 * 64, 1);
    let mut broken = bytes.clone();
    broken[2 * 36..][..2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
    let plain = synthetic::weights(FormatId::F32, 4 * 48, 1);
    let mut run = |parts: &[WeightPart<'_>]| cpu.weight(parts).err().expect("refused");
    let good = part(FormatId::Q4_0, &[4, 64], &bytes);

    let error = run(&[part(FormatId::Q4_0, &[4, 64], &broken)]).to_string();
    assert!(error.contains("tensor w") && error.contains("row 2"), "{error}");
    assert!(matches!(run(&[part(FormatId::Q4_0, &[4, 48], &bytes)]), LoadError::PartialBlock { row_len: 48, .. }));
    assert!(matches!(run(&[good, part(FormatId::F32, &[4, 48], &plain)]), LoadError::Shape { .. }));
    assert!(matches!(run(&[part(FormatId::Q4_0, &[256], &bytes)]), LoadError::Shape { .. }));
    assert!(matches!(run(&[part(FormatId::I8, &[4, 64], &plain[..256])]), LoadError::TensorFormat { .. }));
    assert!(matches!(run(&[part(FormatId::Q4_0, &[5, 64], &bytes)]), LoadError::Malformed { .. }));
    assert!(matches!(run(&[part(FormatId::F32, &[usize::MAX / 8, 4], &plain)]), LoadError::Malformed { .. }));
    for empty in [[0, 64], [4, 0], [usize::MAX, 0]] {
        assert!(matches!(run(&[part(FormatId::Q4_0, &empty, &[])]), LoadError::Malformed { .. }));
    }
    assert!(matches!(run(&[part(FormatId::F32, &[usize::MAX, 4, 4], &plain)]), LoadError::Malformed { .. }));
    for order in [RowOrder::Interleaved { heads: 3 }, RowOrder::Grouped { groups: 1, queries: 3 }] {
        assert!(matches!(run(&[WeightPart { order, ..good }]), LoadError::Config(_)));
    }
}

#[test]
fn a_batch_beyond_the_step_is_refused() {
    let mut cpu = Cpu::new(&CpuOptions::default()).unwrap();
    let small = BatchLimits { tokens: 2, ..LIMITS };
    let mut step = cpu.step(&small, 32, &shape(KvDType::F16), &MoeShape::default()).unwrap();
    let mut batch = Batch::new(16, &[GROUP], LIMITS).unwrap();
    let item = BatchItem { tokens: &[1, 2, 3], start: 0, total: 3, tables: &[&[BlockId(0)]], rows: RowsWanted::Last };
    batch.push(item).unwrap();
    assert_eq!(cpu.begin(&batch, &mut step), Err(RunError::BatchTooLarge { what: "tokens", found: 3, limit: 2 }));
}

#[test]
fn options_out_of_range_are_refused() {
    for (threads, tier) in [(0, None), (1 << 40, None), (1, Some("sse9".to_string()))] {
        assert!(Cpu::new(&CpuOptions { threads, tier, ..CpuOptions::default() }).is_err());
    }
}
