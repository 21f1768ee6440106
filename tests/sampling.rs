//! The sampler through its public interface: against distributions computed by Hugging Face transformers, at the borders
//! of every parameter, and by drawing.
#![allow(clippy::unwrap_used)]

use loquat::sample::{Law, SampleError, Sampler, SamplerState, SamplingParams};
use safetensors::SafeTensors;
use serde_json::Value;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/sampling/");
/// The reference runs in f32; against its own f64 run it is off by up to 3e-6.
const ATOL: f64 = 1e-5;

fn f32s(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = tensors.tensor(name).unwrap().data().as_chunks::<4>().0.iter();
    bytes.map(|&b| f32::from_le_bytes(b)).collect()
}

fn with(params: SamplingParams, name: &str, value: &Value) -> SamplingParams {
    let number = || value.as_f64().unwrap() as f32;
    let count = || value.as_u64().unwrap() as usize;
    match name {
        "temperature" => params.temperature(number()),
        "top_k" => params.top_k(count()),
        "top_p" => params.top_p(number()),
        "min_p" => params.min_p(number()),
        "typical_p" => params.typical_p(number()),
        "epsilon" => params.epsilon_cutoff(number()),
        "eta" => params.eta_cutoff(number()),
        "repetition_penalty" => params.repetition_penalty(number()),
        "no_repeat_ngram" => params.no_repeat_ngram(count()),
        "suppress" => params.banned(value.as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect()),
        other => panic!("a parameter we do not have: {other}"),
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect()
}

fn dense(law: &Law<'_>, vocab: usize) -> Vec<f64> {
    let mut dense = vec![0.0; vocab];
    law.iter().for_each(|(token, probability)| dense[token as usize] = probability);
    dense
}

fn state(params: SamplingParams, vocab: usize) -> SamplerState {
    SamplerState::new(params, vocab, 64).unwrap()
}

/// At temperature 1, everything else off.
fn plain() -> SamplingParams {
    SamplingParams::default().temperature(1.0)
}

#[test]
fn distributions_equal_the_reference() {
    let json: Value = serde_json::from_str(&std::fs::read_to_string(format!("{FIXTURES}sampling.json")).unwrap()).unwrap();
    let bytes = std::fs::read(format!("{FIXTURES}sampling.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let cases = json["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 147);
    let mut wrong = Vec::new();
    for case in cases {
        let [logits, expected] = ["logits", "probs"].map(|key| f32s(&tensors, case[key].as_str().unwrap()));
        let chain = case["processors_in_order"].as_array().unwrap();
        let params = chain.iter().fold(plain(), |p, step| with(p, step[0].as_str().unwrap(), &step[1]));
        let mut state = state(params, logits.len());
        state.extend(&ids(&case["history"]));
        let mut sampler = Sampler::new(logits.len()).unwrap();
        let law = sampler.probabilities(&state, &logits).unwrap();
        let sum: f64 = law.iter().map(|(_, p)| p).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{case}");
        let mut found = dense(&law, logits.len());
        let mut expected: Vec<f64> = expected.iter().map(|&p| p.into()).collect();
        if case["logits"] == "ties.logits" && !chain.iter().all(|step| step[0] != "top_p") {
            // Which of equal logits the reference keeps is up to its unstable sort; how many is not.
            among_equals(&logits, &mut found);
            among_equals(&logits, &mut expected);
        }
        let off = expected.iter().zip(&found).map(|(e, f)| (e - f).abs()).fold(0.0, f64::max);
        if off > ATOL {
            wrong.push(format!("{}: off by {off}, kept {} of {}", case["probs"], law.tokens().len(), case["kept"]));
        }
    }
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Sorts the probabilities of equal logits.
fn among_equals(logits: &[f32], probabilities: &mut [f64]) {
    let sorted = |by: &dyn Fn(usize) -> f64| {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(by(a).total_cmp(&by(b))));
        order
    };
    let (places, values) = (sorted(&|i| i as f64), sorted(&|i| probabilities[i]));
    let old = probabilities.to_vec();
    places.iter().zip(values).for_each(|(&place, value)| probabilities[place] = old[value]);
}

/// Every border of every parameter with every awkward row: a law that sums to 1 over tokens that the row allows, with the
/// maximum in it, and draws that stay inside it.
#[test]
fn borders() {
    const V: usize = 33;
    let inf = f32::NEG_INFINITY;
    let mut one_finite = vec![inf; V];
    one_finite[20] = -7.0;
    let rows = [
        ("rising", (0..V).map(|i| i as f32 * 0.3 - 4.0).collect()),
        ("all equal", vec![1.5; V]),
        ("two levels", (0..V).map(|i| if i % 3 == 0 { 2.0 } else { -1.0 }).collect()),
        ("half ruled out", (0..V).map(|i| if i % 2 == 0 { inf } else { i as f32 * 0.1 }).collect()),
        ("one finite", one_finite),
        ("huge", (0..V).map(|i| if i == 5 { f32::MAX } else { f32::MIN }).collect()),
        ("signed zeros", (0..V).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect::<Vec<f32>>()),
    ];
    let mut sampler = Sampler::new(V).unwrap();
    for (name, row) in &rows {
        let max = row.iter().copied().fold(inf, f32::max);
        let first = row.iter().position(|&v| v == max).unwrap() as u32;
        let finite = row.iter().filter(|v| **v > inf).count();
        for temperature in [0.0, 1e-6, 1.0, 1e6, f32::MIN_POSITIVE, f32::MAX] {
            for top_k in [0, 1, V, V + 1, usize::MAX] {
                for top_p in [0.0, 1e-9, 0.5, 1.0] {
                    for (min_p, typical_p, cutoff) in
                        [(0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.9, 0.0), (0.0, 1.0, 1.0), (1.0, 0.5, 1e-9)]
                    {
                        let params = SamplingParams::default().temperature(temperature).top_k(top_k).top_p(top_p).min_p(min_p);
                        let params = params.typical_p(typical_p).epsilon_cutoff(cutoff).eta_cutoff(cutoff);
                        let what = format!("{name}: {params:?}");
                        let state = state(params, V);
                        let law = sampler.probabilities(&state, row).unwrap();
                        let sum: f64 = law.iter().map(|(_, p)| p).sum();
                        assert!((sum - 1.0).abs() < 1e-9, "{what}: {sum}");
                        assert!(law.iter().all(|(t, p)| row[t as usize] > inf && p > 0.0 && p <= 1.0), "{what}");
                        assert!(law.tokens().is_sorted(), "{what}");
                        let kept = law.tokens().to_vec();
                        if typical_p == 1.0 {
                            assert!(kept.iter().any(|&t| row[t as usize] == max), "{what}");
                        }
                        if temperature == 0.0 {
                            assert_eq!(kept, [first], "{what}");
                        } else if top_p < 1e-6 {
                            assert_eq!(kept.len(), 1, "{what}");
                        } else if (top_k == 1 || min_p == 1.0) && temperature == 1.0 && typical_p == 1.0 && top_p == 1.0 {
                            assert!(kept.iter().all(|&t| row[t as usize] == max), "{what}");
                        } else if top_k != 1
                            && top_p == 1.0
                            && min_p == 0.0
                            && typical_p == 1.0
                            && cutoff == 0.0
                            && *name != "huge"
                        {
                            assert!(kept.len() == finite || temperature < 1.0, "{what}: {kept:?}");
                        }
                        assert!(kept.contains(&sampler.sample(&state, row).unwrap().token), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let mut sampler = Sampler::new(4).unwrap();
    let row = [1.0, 3.0, 3.0, 3.0];
    assert_eq!(sampler.sample(&state(SamplingParams::default(), 4), &row).unwrap().token, 1);
    let banned = state(SamplingParams::default().banned(vec![1]), 4);
    assert_eq!(sampler.sample(&banned, &row).unwrap().token, 2);
    let narrow = state(plain().top_p(0.0), 4);
    assert_eq!(sampler.sample(&narrow, &row).unwrap().token, 1);
}

#[test]
fn broken_rows_are_errors_whatever_the_parameters() {
    let inf = f32::INFINITY;
    let check = |row: &[f32], expected: SampleError| {
        for params in [SamplingParams::default(), plain(), plain().top_k(1), plain().top_p(0.5).logprobs(Some(3))] {
            for params in [params.clone(), params.clone().banned(vec![1]).logit_bias(vec![(2, -1.0)])] {
                let mut sampler = Sampler::new(4).unwrap();
                let state = state(params, 4);
                assert_eq!(sampler.sample(&state, row), Err(expected), "{row:?}");
                assert_eq!(sampler.probabilities(&state, row).map(|_| ()), Err(expected), "{row:?}");
                assert_eq!(sampler.sample(&state, &[0.0, 0.0, 0.0, 99.0]).unwrap().token, 3, "after an error");
            }
        }
    };
    check(&[0.0, 1.0, f32::NAN, f32::NAN], SampleError::Nan { token: 2 });
    check(&[inf, 1.0, 2.0, -f32::NAN], SampleError::Nan { token: 3 });
    check(&[0.0, inf, inf, 0.0], SampleError::Infinite { token: 1 });
    check(&[-inf; 4], SampleError::NoToken);
    check(&[0.0; 3], SampleError::RowLength { expected: 4, found: 3 });
    check(&[], SampleError::RowLength { expected: 4, found: 0 });
    let mut sampler = Sampler::new(2).unwrap();
    for temperature in [0.0, 1.0] {
        let everything_banned = state(plain().temperature(temperature).banned(vec![0, 1]), 2);
        assert_eq!(sampler.sample(&everything_banned, &[1.0, 2.0]), Err(SampleError::NoToken));
    }
    assert_eq!(Sampler::new(0).unwrap().sample(&state(plain(), 0), &[]), Err(SampleError::NoToken));
}

/// 200,000 draws over positions against the law: chi-square with as many degrees of freedom as tokens less one.
#[test]
fn draws_follow_the_law() {
    let row = [0.3, -1.0, 2.0, 1.1, 0.9, -0.2, 2.1, f32::NEG_INFINITY, 0.0, 1.7];
    let mut sampler = Sampler::new(row.len()).unwrap();
    for params in [
        plain().seed(1),
        plain().temperature(0.6).top_k(6).seed(2),
        plain().temperature(1.4).top_p(0.8).min_p(0.1).seed(3),
        plain().repetition_penalty(1.4).presence_penalty(0.2).logit_bias(vec![(0, 1.0)]).penalty_window(0).seed(4),
    ] {
        let mut state = state(params, row.len());
        let law = dense(&sampler.probabilities(&state, &row).unwrap(), row.len());
        let mut counts = [0usize; 10];
        const N: usize = 200_000;
        for _ in 0..N {
            let token = sampler.sample(&state, &row).unwrap().token;
            counts[token as usize] += 1;
            state.push(token);
        }
        let chi: f64 = (0..row.len())
            .filter(|&t| law[t] > 0.0)
            .map(|t| (counts[t] as f64 - law[t] * N as f64).powi(2) / (law[t] * N as f64))
            .sum();
        assert!((0..row.len()).all(|t| law[t] > 0.0 || counts[t] == 0));
        assert!(chi < 45.0, "chi-square {chi}: {counts:?} against {law:?}");
    }
}

/// A seeded row alone, and among rows with other parameters that share the sampler: equal tokens.
#[test]
fn neighbours_do_not_change_a_draw() {
    const V: usize = 500;
    let row = |salt: usize| (0..V).map(|i| ((i * 7919 + salt * 104_729) % 1009) as f32 / 100.0).collect::<Vec<f32>>();
    let params = plain().temperature(0.9).top_p(0.95).repetition_penalty(1.2).seed(11);
    let run = |neighbours: usize| {
        let mut sampler = Sampler::new(V).unwrap();
        let mut own = state(params.clone(), V);
        let mut others: Vec<SamplerState> =
            (0..neighbours).map(|n| state(plain().top_k(n * 3).min_p(0.01 * n as f32).seed(n as u64), V)).collect();
        let tokens = (0..40).map(|step| {
            for (n, other) in others.iter_mut().enumerate() {
                let token = sampler.sample(other, &row(step * 100 + n)).unwrap().token;
                other.push(token);
            }
            let token = sampler.sample(&own, &row(step)).unwrap().token;
            own.push(token);
            token
        });
        tokens.collect::<Vec<u32>>()
    };
    let alone = run(0);
    (1..16).for_each(|neighbours| assert_eq!(run(neighbours), alone, "{neighbours} neighbours"));
    let distinct: std::collections::BTreeSet<_> = alone.iter().collect();
    assert!(distinct.len() > 20, "the counter does not move: {alone:?}");
}

/// Guesses pushed and taken back leave no trace.
#[test]
fn truncation_restores_the_law() {
    const V: usize = 64;
    let row: Vec<f32> = (0..V).map(|i| (i as f32 * 0.7).rem_euclid(3.0)).collect();
    let params = plain().repetition_penalty(1.3).frequency_penalty(0.4).penalty_window(5).no_repeat_ngram(3);
    let (mut kept, mut sampler) = (state(params, V), Sampler::new(V).unwrap());
    kept.extend(&[3, 9, 3, 9, 40, 41, 3, 9]);
    let before = dense(&sampler.probabilities(&kept, &row).unwrap(), V);
    let mut guessed = kept.clone();
    guessed.extend(&[3, 9, 40, 40, 40, 63, 1]);
    assert_ne!(dense(&sampler.probabilities(&guessed, &row).unwrap(), V), before);
    guessed.truncate(kept.position());
    assert_eq!(dense(&sampler.probabilities(&guessed, &row).unwrap(), V), before);
    assert_eq!(guessed.position(), 8);
}

/// Log-probabilities are the raw row's, whatever the chain does to it.
#[test]
fn logprobs_are_the_models_own() {
    let row = [1.0f32, 4.0, 2.0, 4.0, f32::NEG_INFINITY, 3.0];
    let total: f64 = row.iter().map(|&v| f64::from(v).exp()).sum();
    let expected = |token: u32| (f64::from(row[token as usize]) - total.ln()) as f32;
    let mut sampler = Sampler::new(6).unwrap();
    for params in [SamplingParams::default(), plain().temperature(0.1).top_k(1), plain().banned(vec![1, 3, 5])] {
        for (n, top) in [(0, &[][..]), (1, &[1]), (3, &[1, 3, 5]), (5, &[1, 3, 5, 2, 0]), (255, &[1, 3, 5, 2, 0])] {
            let sampled = sampler.sample(&state(params.clone().logprobs(Some(n)), 6), &row).unwrap();
            assert!((sampled.logprob.unwrap() - expected(sampled.token)).abs() < 1e-6);
            assert_eq!(sampled.top.iter().map(|t| t.0).collect::<Vec<_>>(), top);
            assert!(sampled.top.iter().all(|&(t, logprob)| (logprob - expected(t)).abs() < 1e-6));
        }
        let sampled = sampler.sample(&state(params, 6), &row).unwrap();
        assert_eq!((sampled.logprob, sampled.top), (None, &[][..]));
    }
}

/// Nothing is allocated once sampler and state stand, whatever the parameters, up to the capacity that was announced.
#[test]
fn sampling_allocates_nothing() {
    const V: usize = 3_000;
    let row: Vec<f32> = (0..V).map(|i| ((i * 7919) % 1009) as f32 / 90.0).collect();
    let everything = plain().top_k(500).top_p(0.9).min_p(1e-3).typical_p(0.9).epsilon_cutoff(1e-5).eta_cutoff(1e-5);
    let everything = everything.repetition_penalty(1.1).no_repeat_ngram(2).logit_bias(vec![(5, 1.0)]).banned(vec![6]);
    let flat = plain().temperature(1e6).top_p(0.99).logprobs(Some(255));
    for params in [SamplingParams::default(), plain(), plain().top_k(V - 1), flat, everything] {
        let mut sampler = Sampler::new(V).unwrap();
        let mut state = SamplerState::new(params.clone(), V, 200).unwrap();
        let before = ALLOCATIONS.with(Cell::get);
        for _ in 0..200 {
            let token = sampler.sample(&state, &row).unwrap().token;
            sampler.probabilities(&state, &row).unwrap();
            state.push(token);
        }
        state.truncate(3);
        assert_eq!(ALLOCATIONS.with(Cell::get), before, "{params:?}");
    }
}

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts what the running thread allocates.
struct Counting;

// SAFETY: every call goes on to the system's allocator unchanged; the counter neither allocates nor is dropped.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, and `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bits that must not move: the same on every machine, and in every later version.
#[test]
fn draws_are_pinned() {
    let row: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1009) as f32 / 80.0).collect();
    let mut sampler = Sampler::new(1000).unwrap();
    let mut state = state(plain().temperature(0.8).top_p(0.97).min_p(0.001).frequency_penalty(0.1).seed(2026), 1000);
    let tokens: Vec<u32> = (0..8)
        .map(|_| {
            let token = sampler.sample(&state, &row).unwrap().token;
            state.push(token);
            token
        })
        .collect();
    assert_eq!(tokens, [429, 990, 687, 739, 627, 310, 996, 798]);
    let law = sampler.probabilities(&state, &row).unwrap();
    let mix = |hash: u64, v: u64| (hash ^ v).wrapping_mul(0x0000_0100_0000_01b3);
    let hash = law.iter().fold(0xcbf2_9ce4_8422_2325, |hash, (token, p)| mix(mix(hash, token.into()), p.to_bits()));
    assert_eq!(hash, 7_494_581_417_675_779_686);
}
