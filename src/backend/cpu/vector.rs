//! Row operations over the threads: rows are shared out where there is work enough to pay for a fork.
//!
//! Invariant: a row's result depends on that row alone.
#![allow(unsafe_code)]

use super::pool::{Disjoint, Pool};
use super::simd::{LANES, Tier};
use crate::arch::{Activation, Glu, NormSpec, RopeStyle};
use crate::backend::Heads;

/// `x += delta * scale` where there is a delta, then `out = norm(x) * weight (+ bias)`, each `[rows, width]`.
#[allow(clippy::too_many_arguments)]
pub(super) fn add_norm(
    pool: &Pool,
    tier: &Tier,
    width: usize,
    x: &mut [f32],
    delta: Option<(&[f32], f32)>,
    norm: &NormSpec,
    weight: &[f32],
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    assert!(x.len() == out.len() && x.len().is_multiple_of(width), "{} and {} values of rows of {width}", x.len(), out.len());
    let (delta, weight, bias) = (delta.map(|(d, scale)| (&d[..x.len()], scale)), &weight[..width], bias.map(|b| &b[..width]));
    let rows = x.len() / width;
    let (x, out) = (Disjoint::new(x), Disjoint::new(out));
    pool.for_each_chunk(rows, grain(width), |_, rows| {
        let values = rows.start * width..rows.end * width;
        // SAFETY: a row is handed out once, and each is its own part of both.
        let (x, out) = unsafe { (x.slice(values.clone()), out.slice(values.clone())) };
        if let Some((delta, scale)) = delta {
            tier.vector.add(x, &delta[values], scale);
        }
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            tier.vector.norm(*norm, x, weight, bias, out);
        }
    });
}

/// `x += delta * scale`, one rounding each.
pub(super) fn add(pool: &Pool, tier: &Tier, x: &mut [f32], delta: &[f32], scale: f32) {
    let delta = &delta[..x.len()];
    for_each_run(pool, x, PAYS, |first, x| tier.vector.add(x, &delta[first..][..x.len()], scale));
}

/// `head = norm(head) * weight` for each head, in place.
pub(super) fn norm_heads(pool: &Pool, tier: &Tier, rows: usize, x: &mut [f32], heads: Heads, norm: &NormSpec, weight: &[f32]) {
    assert!(heads.offset + heads.heads * heads.dim <= heads.stride, "{heads:?}: heads beyond their row");
    let weight = &weight[..heads.dim];
    pool.for_each_row(&mut x[..rows * heads.stride], heads.stride, grain(heads.heads * heads.dim), |_, x| {
        for row in x.chunks_exact_mut(heads.stride) {
            for head in row[heads.offset..][..heads.heads * heads.dim].chunks_exact_mut(heads.dim) {
                tier.vector.norm_in_place(*norm, head, weight);
            }
        }
    });
}

/// Turns the first `rotary` values of each head in place; `angles` is `[rows, rotary]`: `rotary / 2` cosines of a row, then
/// as many sines.
#[allow(clippy::too_many_arguments)]
pub(super) fn rope(
    pool: &Pool,
    tier: &Tier,
    rows: usize,
    x: &mut [f32],
    heads: Heads,
    angles: &[f32],
    rotary: usize,
    style: RopeStyle,
) {
    assert!(rotary.is_multiple_of(2) && rotary <= heads.dim, "{rotary} of {} values of a head turn", heads.dim);
    assert!(heads.offset + heads.heads * heads.dim <= heads.stride, "{heads:?}: heads beyond their row");
    pool.for_each_row(&mut x[..rows * heads.stride], heads.stride, grain(heads.heads * rotary), |first, x| {
        for (i, row) in x.chunks_exact_mut(heads.stride).enumerate() {
            let (cos, sin) = angles[(first + i) * rotary..][..rotary].split_at(rotary / 2);
            for head in row[heads.offset..][..heads.heads * heads.dim].chunks_exact_mut(heads.dim) {
                tier.vector.rope(style, &mut head[..rotary], cos, sin);
            }
        }
    });
}

/// `out[rows, width] = glu(x[.., ..width], x[.., width..])`, `x` being `[rows, 2 * width]`.
pub(super) fn gate(pool: &Pool, tier: &Tier, width: usize, glu: Glu, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), 2 * out.len(), "values of rows of twice {width} against {width}");
    pool.for_each_row(out, width, grain(4 * width), |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let (a, b) = x[(first + i) * 2 * width..][..2 * width].split_at(width);
            tier.vector.gate(glu, a, b, out);
        }
    });
}

/// `x = act(x)`.
pub(super) fn activate(pool: &Pool, tier: &Tier, act: Activation, x: &mut [f32]) {
    for_each_run(pool, x, PAYS / 4, |_, x| tier.vector.activate(act, x));
}

/// `x = cap * tanh(x * scale / cap)`; without a cap the factor alone.
pub(super) fn scale_cap(pool: &Pool, tier: &Tier, x: &mut [f32], scale: f32, cap: Option<f32>) {
    let run = if cap.is_some() { PAYS / 4 } else { PAYS };
    for_each_run(pool, x, run, |_, x| tier.vector.scale_cap(x, scale, cap));
}

/// `out[r] = x[wanted[r]]`, rows of `width`.
pub(super) fn gather(width: usize, wanted: &[u32], x: &[f32], out: &mut [f32]) {
    for (&row, out) in wanted.iter().zip(out[..wanted.len() * width].chunks_exact_mut(width)) {
        out.copy_from_slice(&x[row as usize * width..][..width]);
    }
}

/// Runs of about `run` values, cut between vectors so that a value's lane stays the same: `f(first, values)`.
fn for_each_run(pool: &Pool, x: &mut [f32], run: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    let len = x.len();
    let x = Disjoint::new(x);
    pool.for_each_chunk(len.div_ceil(LANES), run / LANES, |_, vectors| {
        let values = vectors.start * LANES..len.min(vectors.end * LANES);
        // SAFETY: a vector is handed out once.
        f(values.start, unsafe { x.slice(values) });
    });
}

/// Rows of `width` values of work that make a share.
pub(super) fn grain(width: usize) -> usize {
    PAYS.div_ceil(width.max(1))
}

/// Values that take about as long as waking a thread: some 2 to 4 us.
const PAYS: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::NormKind;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let next = |s: &mut u32| {
            *s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Some((*s >> 8) as f32 / (1 << 22) as f32 - 2.0)
        };
        std::iter::successors(Some(seed), |s| Some(s.wrapping_add(1))).scan(seed, |s, _| next(s)).take(n).collect()
    }

    /// Runs on every tier and over threads, asks for the scalar tier's bits and gives its result.
    fn everywhere(f: impl Fn(&Pool, &Tier) -> Vec<f32>) -> Vec<f32> {
        let one = Pool::new(1).unwrap();
        let truth = f(&one, Tier::named("scalar").unwrap());
        for tier in Tier::available() {
            for threads in [1, 2, 5] {
                let got = f(&Pool::new(threads).unwrap(), tier);
                let same = truth.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
                assert!(same && truth.len() == got.len(), "{} with {threads} threads", tier.name);
            }
        }
        truth
    }

    fn near(got: &[f32], want: impl IntoIterator<Item = f64>, tolerance: f64, what: &str) {
        let mut n = 0;
        for (i, want) in want.into_iter().enumerate() {
            let got = f64::from(got[i]);
            assert!((got - want).abs() <= tolerance * want.abs().max(1.0), "{what}: value {i}: {got} for {want}");
            n += 1;
        }
        assert_eq!(n, got.len(), "{what}");
    }

    #[test]
    fn norms() {
        for (rows, width) in [(1, 1), (3, 15), (2, 16), (5, 17), (1, 576), (70, 576), (3, 1000)] {
            for kind in [NormKind::Rms, NormKind::Layer] {
                for (delta, bias) in [(false, false), (true, false), (true, true)] {
                    let (x, d, w, b) = (values(rows * width, 1), values(rows * width, 2), values(width, 3), values(width, 4));
                    let spec = NormSpec { kind, ..NormSpec::rms(1e-5) };
                    let got = everywhere(|pool, tier| {
                        let (mut x, mut out) = (x.clone(), vec![0.0; x.len()]);
                        let (d, b) = (delta.then_some((&d[..], 1.0)), bias.then_some(&b[..]));
                        add_norm(pool, tier, width, &mut x, d, &spec, &w, b, &mut out);
                        [x, out].concat()
                    });
                    let (sum, out) = got.split_at(rows * width);
                    near(sum, x.iter().zip(&d).map(|(x, d)| f64::from(if delta { x + d } else { *x })), 0.0, "sum");
                    let want = sum.chunks(width).flat_map(|row| {
                        let n = width as f64;
                        let mean = match kind {
                            NormKind::Rms => 0.0,
                            NormKind::Layer => row.iter().map(|v| f64::from(*v)).sum::<f64>() / n,
                        };
                        let var = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
                        let (w, b) = (&w, &b);
                        row.iter().enumerate().map(move |(i, v)| {
                            let y = (f64::from(*v) - mean) / (var + f64::from(1e-5f32)).sqrt() * f64::from(w[i]);
                            y + if bias { f64::from(b[i]) } else { 0.0 }
                        })
                    });
                    // A row of one value has no variance: its rounded mean is off by an ulp, over the square root of eps.
                    near(out, want, 2e-6, &format!("{kind:?} {rows} x {width}"));
                }
            }
        }
    }

    #[test]
    fn rotations() {
        for (rows, heads, dim, rotary) in [(1, 3, 64, 64), (5, 2, 80, 32), (3, 1, 24, 22), (200, 9, 64, 64)] {
            let heads = Heads { stride: heads * dim + 5, offset: 3, heads, dim };
            let (x, angles) = (values(rows * heads.stride, 5), values(rows * rotary, 6));
            for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
                let got = everywhere(|pool, tier| {
                    let mut x = x.clone();
                    rope(pool, tier, rows, &mut x, heads, &angles, rotary, style);
                    x
                });
                let mut want: Vec<_> = x.iter().map(|v| f64::from(*v)).collect();
                for (row, angles) in want.chunks_mut(heads.stride).zip(angles.chunks(rotary)) {
                    for head in row[3..].chunks_exact_mut(dim).take(heads.heads) {
                        for i in 0..rotary / 2 {
                            let (a, b) = match style {
                                RopeStyle::HalfSplit => (i, i + rotary / 2),
                                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                            };
                            let (c, s) = (f64::from(angles[i]), f64::from(angles[i + rotary / 2]));
                            (head[a], head[b]) = (head[a] * c - head[b] * s, head[b] * c + head[a] * s);
                        }
                    }
                }
                near(&got, want, 1e-6, &format!("{style:?} {rotary} of {dim}"));
            }
        }
    }

    const ACTS: [Activation; 4] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu];
    const CLAMPED: Glu = Glu::Clamped { alpha: 1.702, limit: 7.0 };

    fn act_f64(act: Activation, x: f64) -> f64 {
        match act {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => x * 0.5 * libm::erfc(-x / 2f64.sqrt()),
            Activation::GeluTanh => x * 0.5 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh()),
            Activation::Relu => x.max(0.0),
        }
    }

    fn glu_f64(glu: Glu, gate: f64, up: f64) -> f64 {
        match glu {
            Glu::Act(act) => act_f64(act, gate) * up,
            Glu::Clamped { alpha, limit } => {
                let (gate, up) = (gate.min(f64::from(limit)), up.clamp(-f64::from(limit), f64::from(limit)));
                (up + 1.0) * gate / (1.0 + (-f64::from(alpha) * gate).exp())
            }
        }
    }

    #[test]
    fn gates_and_activations() {
        for (rows, width) in [(1, 1), (2, 33), (1, 1536), (40, 1536)] {
            let x: Vec<_> = values(rows * 2 * width, 7).iter().map(|v| v * 5.0).collect();
            for glu in ACTS.map(Glu::Act).into_iter().chain([CLAMPED]) {
                let got = everywhere(|pool, tier| {
                    let mut out = vec![0.0; rows * width];
                    gate(pool, tier, width, glu, &x, &mut out);
                    out
                });
                let want = x.chunks(2 * width).flat_map(|row| {
                    let (a, b) = row.split_at(width);
                    a.iter().zip(b).map(|(a, b)| glu_f64(glu, f64::from(*a), f64::from(*b))).collect::<Vec<_>>()
                });
                near(&got, want, 3e-6, &format!("{glu:?} {rows} x {width}"));
            }
            for act in ACTS {
                let got = everywhere(|pool, tier| {
                    let mut x = x.clone();
                    activate(pool, tier, act, &mut x);
                    x
                });
                near(&got, x.iter().map(|x| act_f64(act, f64::from(*x))), 3e-6, &format!("{act:?} {rows} x {width}"));
            }
        }
    }

    #[test]
    fn a_factor_on_the_sum() {
        for (rows, width) in [(1, 1), (3, 17), (70, 576)] {
            let (x, d) = (values(rows * width, 1), values(rows * width, 2));
            for scale in [1.0, 0.22, -3.0] {
                let sum = everywhere(|pool, tier| {
                    let mut x = x.clone();
                    add(pool, tier, &mut x, &d, scale);
                    x
                });
                assert!(sum.iter().zip(x.iter().zip(&d)).all(|(s, (x, d))| s.to_bits() == d.mul_add(scale, *x).to_bits()));
                let plain = sum.iter().zip(x.iter().zip(&d)).all(|(s, (x, d))| s.to_bits() == (x + d).to_bits());
                assert!(plain || scale != 1.0, "a factor of 1 is a plain sum");
                let normed = everywhere(|pool, tier| {
                    let (mut x, mut out) = (x.clone(), vec![0.0; d.len()]);
                    add_norm(pool, tier, width, &mut x, Some((&d, scale)), &NormSpec::rms(1e-6), &d[..width], None, &mut out);
                    x
                });
                assert!(normed == sum, "the same sum as with a norm after it");
            }
        }
    }

    #[test]
    fn norms_of_heads_are_those_of_rows() {
        for (rows, heads, dim) in [(1, 3, 64), (5, 2, 80), (3, 1, 23), (200, 9, 64), (4, 2, 1)] {
            let heads = Heads { stride: heads * dim + 5, offset: 3, heads, dim };
            let (x, w) = (values(rows * heads.stride, 5), values(dim, 6));
            for kind in [NormKind::Rms, NormKind::Layer] {
                let spec = NormSpec { kind, ..NormSpec::rms(1e-5) };
                let got = everywhere(|pool, tier| {
                    let mut x = x.clone();
                    norm_heads(pool, tier, rows, &mut x, heads, &spec, &w);
                    x
                });
                let mut want = x.clone();
                let tier = Tier::named("scalar").unwrap();
                for (i, head) in
                    want.chunks_mut(heads.stride).flat_map(|r| r[3..].chunks_exact_mut(dim).take(heads.heads)).enumerate()
                {
                    let row = head.to_vec();
                    tier.vector.norm(spec, &row, &w, None, head);
                    let n = dim as f64;
                    let mean = if kind == NormKind::Rms { 0.0 } else { row.iter().map(|v| f64::from(*v)).sum::<f64>() / n };
                    let var = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
                    let truth = row
                        .iter()
                        .zip(&w)
                        .map(|(v, w)| (f64::from(*v) - mean) / (var + f64::from(1e-5f32)).sqrt() * f64::from(*w));
                    near(head, truth, 2e-6, &format!("{kind:?} head {i}"));
                }
                assert!(got == want, "{kind:?} {heads:?}");
            }
        }
    }

    #[test]
    fn softmax_and_sigmoid_of_a_row() {
        for n in [1, 2, 15, 16, 17, 60, 128, 300] {
            let x: Vec<_> = values(n, 9).iter().map(|v| v * 6.0).collect();
            let on = |f: fn(&Tier, &mut [f32]), x: &[f32]| {
                everywhere(|_, tier| {
                    let mut x = x.to_vec();
                    f(tier, &mut x);
                    x
                })
            };
            let softmax: fn(&Tier, &mut [f32]) = |tier, x| tier.vector.softmax(x);
            let total: f64 = x.iter().map(|v| f64::from(*v).exp()).sum();
            near(&on(softmax, &x), x.iter().map(|v| f64::from(*v).exp() / total), 1e-6, "softmax");
            near(
                &on(|tier, x| tier.vector.sigmoid(x), &x),
                x.iter().map(|v| 1.0 / (1.0 + (-f64::from(*v)).exp())),
                1e-6,
                "sigmoid",
            );
            for at in [0, n / 2, n - 1] {
                let mut bad = x.clone();
                bad[at] = f32::NAN;
                assert!(on(softmax, &bad).iter().all(|v| v.is_nan()), "a NaN at {at} of {n}");
                bad[at] = f32::NEG_INFINITY;
                assert!(n == 1 || on(softmax, &bad)[at] == 0.0);
            }
        }
    }

    #[test]
    fn every_value_has_the_same_bits_on_every_tier() {
        // Every exponent and sign, NaN and infinities among them, through every function.
        let x: Vec<_> = (0..=u16::MAX).map(|b| f32::from_bits(u32::from(b) << 16 | 0x5a5a & (u32::from(b) * 77))).collect();
        let pairs: Vec<_> = x.iter().map(|v| [*v, 1.0]).collect::<Vec<_>>().into_flattened();
        for glu in ACTS.map(Glu::Act).into_iter().chain([CLAMPED]) {
            // Width 1 is one partial vector a row; as one row all are whole.
            let rows = everywhere(|pool, tier| {
                let mut out = vec![0.0; x.len()];
                gate(pool, tier, 1, glu, &pairs, &mut out);
                out
            });
            let row: Vec<_> = x.iter().copied().chain(x.iter().map(|_| 1.0)).collect();
            let whole = everywhere(|pool, tier| {
                let mut out = vec![0.0; x.len()];
                gate(pool, tier, x.len(), glu, &row, &mut out);
                out
            });
            assert!(rows.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()), "{glu:?}");
            assert!(x.iter().zip(&rows).all(|(x, y)| !x.is_nan() || y.is_nan()), "{glu:?}");
        }
        let capped = everywhere(|pool, tier| {
            let mut x = x.clone();
            scale_cap(pool, tier, &mut x, 0.5, Some(30.0));
            x
        });
        assert!(x.iter().zip(&capped).all(|(x, y)| if x.is_nan() { y.is_nan() } else { y.abs() <= 30.0 }));
    }

    #[test]
    fn factors_caps_and_rows() {
        let x = values(50_007, 8);
        let got = everywhere(|pool, tier| {
            let mut x = x.clone();
            scale_cap(pool, tier, &mut x, 0.25, None);
            x
        });
        assert!(got.iter().zip(&x).all(|(got, x)| *got == x * 0.25));
        let got = everywhere(|pool, tier| {
            let mut x = x.clone();
            scale_cap(pool, tier, &mut x, 20.0, Some(30.0));
            x
        });
        near(&got, x.iter().map(|x| 30.0 * (f64::from(*x) * 20.0 / 30.0).tanh()), 1e-6, "cap");
        let mut out = [0.0; 6];
        gather(3, &[1, 4], &x, &mut out);
        assert_eq!(out, [x[3], x[4], x[5], x[12], x[13], x[14]]);
    }
}
