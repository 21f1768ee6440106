//! Routing against plain f64 code, whole mixtures too, and a row's bits alone, in a crowd, on every tier and for several
//! threads.

use super::*;
use crate::arch::{Activation, AttnDims, Glu};
use crate::backend::cpu::{CpuBuf, CpuOptions, CpuWeight, synthetic};
use crate::backend::{Backend, KvShape, WeightPart};
use crate::batch::BatchLimits;
use crate::dtype::{FormatId, KvDType};
use crate::quant;
use crate::weights::TensorView;

fn route(experts: usize, top_k: usize, score: Score) -> RouteSpec {
    RouteSpec { experts, top_k, score, groups: None, correction: false, normalize: false, scale: 1.0 }
}

/// As Mixtral, as Qwen with a factor, as gpt-oss, as DeepSeek 2 and 3, and all experts at once.
fn routes() -> Vec<RouteSpec> {
    let groups = |count, top, best| Some(Groups { count, top, best });
    vec![
        RouteSpec { normalize: true, ..route(8, 2, Score::Softmax) },
        RouteSpec { scale: 2.5, ..route(33, 4, Score::Softmax) },
        route(17, 4, Score::SoftmaxOfChosen),
        RouteSpec { groups: groups(8, 3, 1), scale: 16.0, ..route(24, 6, Score::Softmax) },
        RouteSpec { groups: groups(8, 4, 2), correction: true, normalize: true, scale: 2.5, ..route(32, 8, Score::Sigmoid) },
        route(3, 3, Score::Sigmoid),
    ]
}

/// The rules as the families' authors state them: chosen experts with their weights, by number.
fn truth(route: &RouteSpec, logits: &[f32], correction: &[f32]) -> Vec<(usize, f64)> {
    let wide: Vec<_> = logits.iter().map(|v| f64::from(*v)).collect();
    let softmax = |v: &[f64]| {
        let total: f64 = v.iter().map(|v| v.exp()).sum();
        v.iter().map(|v| v.exp() / total).collect::<Vec<_>>()
    };
    let scores = match route.score {
        Score::Softmax => softmax(&wide),
        Score::Sigmoid => wide.iter().map(|v| 1.0 / (1.0 + (-v).exp())).collect(),
        Score::SoftmaxOfChosen => wide,
    };
    let mut choice: Vec<_> =
        scores.iter().zip(correction).map(|(s, c)| if route.correction { s + f64::from(*c) } else { *s }).collect();
    if let Some(g) = route.groups {
        let size = route.experts / g.count;
        let mut groups: Vec<(f64, usize)> = choice
            .chunks(size)
            .enumerate()
            .map(|(i, group)| {
                let mut group = group.to_vec();
                group.sort_by(|a, b| b.total_cmp(a));
                (group[..g.best].iter().sum(), i)
            })
            .collect();
        groups.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, lost) in &groups[g.top..] {
            choice[lost * size..(lost + 1) * size].fill(f64::NEG_INFINITY);
        }
    }
    let mut order: Vec<_> = (0..route.experts).collect();
    order.sort_by(|a, b| choice[*b].total_cmp(&choice[*a]));
    order.truncate(route.top_k);
    let mut weights: Vec<_> = order.iter().map(|e| scores[*e]).collect();
    if route.score == Score::SoftmaxOfChosen {
        weights = softmax(&weights);
    }
    let sum: f64 = weights.iter().sum();
    let factor = f64::from(route.scale) / if route.normalize { sum } else { 1.0 };
    let mut pairs: Vec<_> = order.into_iter().zip(weights.iter().map(|w| w * factor)).collect();
    pairs.sort_by_key(|p| p.0);
    pairs
}

fn routed(tier: &Tier, route: &RouteSpec, logits: &[f32], correction: Option<&[f32]>) -> (Vec<u32>, Vec<f32>) {
    let (mut scores, mut ranks) = (logits.to_vec(), vec![9; 2 * logits.len()]);
    let (mut chosen, mut weights) = (vec![0; route.top_k], vec![0.0; route.top_k]);
    route_row(tier, route, correction, &mut scores, &mut ranks, &mut chosen, &mut weights);
    (chosen, weights)
}

#[test]
fn experts_and_weights() {
    for route in routes() {
        let correction: Vec<_> = synthetic::normals(route.experts, 3).iter().map(|v| v * 0.2).collect();
        for seed in 0..50 {
            let logits: Vec<_> = synthetic::normals(route.experts, 10 + seed).iter().map(|v| v * 2.0).collect();
            let want = truth(&route, &logits, &correction);
            let mut bits = None;
            for tier in Tier::available() {
                let (chosen, weights) = routed(tier, &route, &logits, route.correction.then_some(&correction));
                assert!(chosen.iter().map(|e| *e as usize).eq(want.iter().map(|p| p.0)), "{route:?}: {chosen:?} for {want:?}");
                for (w, (e, want)) in weights.iter().zip(&want) {
                    assert!((f64::from(*w) - want).abs() <= 2e-6 * want, "{route:?}: expert {e}: {w} for {want}");
                }
                let weights: Vec<_> = weights.iter().map(|w| w.to_bits()).collect();
                assert_eq!(*bits.get_or_insert_with(|| weights.clone()), weights, "{}", tier.name);
            }
        }
    }
}

#[test]
fn ties_go_to_the_lowest_and_nan_is_not_passed_over() {
    let tier = Tier::best();
    let spec = route(6, 3, Score::SoftmaxOfChosen);
    assert_eq!(routed(tier, &spec, &[1.0, 2.0, 2.0, 2.0, 2.0, 0.0], None).0, [1, 2, 3]);
    assert_eq!(routed(tier, &spec, &[-0.0, 0.0, -1.0, 0.0, 0.0, -0.0], None).0, [0, 1, 3]);
    assert_eq!(routed(tier, &spec, &[f32::NEG_INFINITY; 6], None).0, [0, 1, 2]);
    for score in [Score::Softmax, Score::SoftmaxOfChosen, Score::Sigmoid] {
        let (chosen, weights) = routed(tier, &route(6, 3, score), &[1.0, 2.0, 3.0, 4.0, f32::NAN, 0.0], None);
        assert!(weights.iter().any(|w| w.is_nan()), "{score:?}: {chosen:?} {weights:?}");
    }
    // Equal groups: the first ones; within them the first experts.
    let groups = Some(Groups { count: 3, top: 2, best: 2 });
    assert_eq!(routed(tier, &RouteSpec { groups, ..spec.clone() }, &[1.0; 6], None).0, [0, 1, 2]);
    // The best expert of all is in a group that loses.
    let logits = [5.0, -5.0, 3.0, 3.0, 2.0, 2.0];
    assert_eq!(routed(tier, &RouteSpec { groups, ..spec.clone() }, &logits, None).0, [2, 3, 4]);
    assert_eq!(
        routed(tier, &RouteSpec { groups: Some(Groups { count: 3, top: 2, best: 1 }), ..spec }, &logits, None).0,
        [0, 2, 3]
    );
    // All scores underflow: no weight, not NaN.
    let spec = RouteSpec { normalize: true, ..route(4, 2, Score::Sigmoid) };
    assert_eq!(routed(tier, &spec, &[-1e4; 4], None), (vec![0, 1], vec![0.0, 0.0]));
}

const HIDDEN: usize = 96;
const INSIDE: usize = 64;
const ROWS: usize = 37;

struct Mixture {
    route: RouteSpec,
    format: FormatId,
    glu: Glu,
    bias: bool,
    x: Vec<f32>,
    scores: Vec<f32>,
    correction: Vec<f32>,
}

impl Mixture {
    fn new(route: RouteSpec, format: FormatId, glu: Glu, bias: bool) -> Self {
        let scores = synthetic::normals(ROWS * route.experts, 2).iter().map(|v| v * 2.0).collect();
        let correction = synthetic::normals(route.experts, 3).iter().map(|v| v * 0.2).collect();
        Mixture { x: synthetic::normals(ROWS * HIDDEN, 1), scores, correction, route, format, glu, bias }
    }

    fn matrix(&self, e: usize, rows: usize, columns: usize) -> Vec<u8> {
        synthetic::weights(self.format, rows * columns, 100 + 2 * e as u64 + u64::from(rows == HIDDEN))
    }

    fn biases(&self, e: usize) -> (Vec<f32>, Vec<f32>) {
        (synthetic::normals(2 * INSIDE, 300 + e as u64), synthetic::normals(HIDDEN, 400 + e as u64))
    }

    fn experts(&self, cpu: &mut Cpu) -> Vec<Expert<Cpu>> {
        let weight = |cpu: &mut Cpu, e, rows, columns| -> CpuWeight {
            let (bytes, shape) = (self.matrix(e, rows, columns), [rows, columns]);
            let view = TensorView { format: self.format, shape: &shape, bytes: &bytes };
            cpu.weight(&[WeightPart::new("w", view)]).unwrap()
        };
        (0..self.route.experts)
            .map(|e| {
                let (a, b) = self.biases(e);
                Expert {
                    gate_up: weight(cpu, e, 2 * INSIDE, HIDDEN),
                    gate_up_bias: self.bias.then(|| filled(cpu, &a)),
                    down: weight(cpu, e, HIDDEN, INSIDE),
                    down_bias: self.bias.then(|| filled(cpu, &b)),
                }
            })
            .collect()
    }

    /// Rows `from..to` as one batch in a step made for `tokens`.
    fn run(&self, cpu: &mut Cpu, experts: &[Expert<Cpu>], tokens: usize, from: usize, to: usize) -> Vec<u32> {
        let n = self.route.experts;
        let limits = BatchLimits { tokens, seqs: 1, blocks: 1, rows: 1 };
        let dims = AttnDims { heads: 1, kv_heads: 1, qk_dim: 16, v_dim: 16, v_in_k: false };
        let kv = KvShape::one_group(vec![dims], 1, 16, KvDType::F16);
        let shape = MoeShape { experts: n, top_k: self.route.top_k, intermediate: INSIDE, hidden: HIDDEN };
        let mut step = cpu.step(&limits, HIDDEN, &kv, &shape).unwrap();
        let (x, scores) = (filled(cpu, &self.x[from * HIDDEN..to * HIDDEN]), filled(cpu, &self.scores[from * n..to * n]));
        let correction = self.route.correction.then(|| filled(cpu, &self.correction));
        let mut out = filled(cpu, &vec![f32::NAN; (to - from) * HIDDEN]);
        let args = MoeArgs {
            route: &self.route,
            scores: &scores,
            correction: correction.as_ref(),
            experts,
            intermediate: INSIDE,
            hidden: HIDDEN,
            glu: self.glu,
        };
        // Twice: nothing of the first may show in the second.
        for _ in 0..2 {
            cpu.moe(to - from, &x, &args, &mut step, &mut out).unwrap();
        }
        let mut host = vec![0.0; (to - from) * HIDDEN];
        cpu.download(&out, &mut host).unwrap();
        host.into_iter().map(f32::to_bits).collect()
    }

    fn truth(&self) -> Vec<f64> {
        let n = self.route.experts;
        let decoded = |e, rows, columns| {
            let mut out = vec![0.0; rows * columns];
            quant::decode(self.format, &self.matrix(e, rows, columns), &mut out).unwrap();
            out
        };
        let weights: Vec<_> = (0..n).map(|e| (decoded(e, 2 * INSIDE, HIDDEN), decoded(e, HIDDEN, INSIDE))).collect();
        let product = |w: &[f32], x: &[f64], bias: &[f32]| -> Vec<f64> {
            let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
            w.chunks(x.len()).zip(bias).map(|(w, b)| dot(w) + if self.bias { f64::from(*b) } else { 0.0 }).collect()
        };
        let mut out = Vec::new();
        for (x, logits) in self.x.chunks(HIDDEN).zip(self.scores.chunks(n)) {
            let x: Vec<_> = x.iter().map(|v| f64::from(*v)).collect();
            let mut sum = vec![0.0; HIDDEN];
            for (e, weight) in truth(&self.route, logits, &self.correction) {
                let (a, b) = self.biases(e);
                let inner = product(&weights[e].0, &x, &a);
                let (gate, up) = inner.split_at(INSIDE);
                let inner: Vec<_> = gate.iter().zip(up).map(|(g, u)| self.glu(*g, *u)).collect();
                sum.iter_mut().zip(product(&weights[e].1, &inner, &b)).for_each(|(s, y)| *s += weight * y);
            }
            out.extend(sum);
        }
        out
    }

    fn glu(&self, gate: f64, up: f64) -> f64 {
        match self.glu {
            Glu::Clamped { alpha, limit } => {
                let (g, u) = (gate.min(f64::from(limit)), up.clamp(-f64::from(limit), f64::from(limit)));
                (u + 1.0) * g / (1.0 + (-f64::from(alpha) * g).exp())
            }
            _ => gate / (1.0 + (-gate).exp()) * up,
        }
    }
}

fn filled(cpu: &mut Cpu, values: &[f32]) -> CpuBuf {
    let mut buf = cpu.buf(values.len()).unwrap();
    cpu.upload(values, &mut buf).unwrap();
    buf
}

#[test]
fn a_row_alone_and_in_a_crowd_on_every_tier() {
    let clamped = Glu::Clamped { alpha: 1.702, limit: 0.5 };
    for (i, route) in routes().into_iter().enumerate() {
        let (glu, bias) = if i == 2 { (clamped, true) } else { (Glu::Act(Activation::Silu), false) };
        for format in [FormatId::F32, FormatId::Q8_0, FormatId::Q4_0, FormatId::F8E4M3] {
            let mixture = Mixture::new(route.clone(), format, glu, bias);
            let mut first: Option<Vec<u32>> = None;
            for tier in Cpu::tiers() {
                for threads in [1, 3] {
                    let options = CpuOptions { threads, tier: Some(tier.into()), ..CpuOptions::default() };
                    let mut cpu = Cpu::new(&options).unwrap();
                    let experts = mixture.experts(&mut cpu);
                    // Several runs of experts, and one.
                    let all = mixture.run(&mut cpu, &experts, ROWS, 0, ROWS);
                    let what = format!("{format} {route:?} on {}", cpu.describe());
                    assert!(all == mixture.run(&mut cpu, &experts, 400, 0, ROWS), "one run: {what}");
                    let alone: Vec<_> = (0..ROWS).flat_map(|r| mixture.run(&mut cpu, &experts, 1, r, r + 1)).collect();
                    assert!(all == alone, "alone: {what}");
                    assert!(all[5 * HIDDEN..] == mixture.run(&mut cpu, &experts, 40, 5, ROWS), "a part: {what}");
                    assert!(all == *first.get_or_insert_with(|| all.clone()), "other bits: {what}");
                }
            }
            if format == FormatId::F32 {
                let got = first.expect("a tier ran");
                for (row, (got, want)) in got.chunks(HIDDEN).zip(mixture.truth().chunks(HIDDEN)).enumerate() {
                    let most = want.iter().fold(1.0f64, |most, v| most.max(v.abs()));
                    for (got, want) in got.iter().map(|v| f64::from(f32::from_bits(*v))).zip(want) {
                        assert!((got - want).abs() <= 1e-5 * most, "{format} {route:?} row {row}: {got} for {want}");
                    }
                }
            }
        }
    }
}
