//! The simulator: cases small enough to be computed by hand, traces that are hostile, generated requests against their own
//! description, and replays that must come to the same report.
#![allow(clippy::unwrap_used)]

mod common;

use common::text::Random;
use loquat::sched::sim::*;
use loquat::sched::*;
use std::time::Duration;

fn s(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// A second a step, whatever it runs.
const SECOND: CostModel = CostModel { step: 1.0, row: 0.0, prefill_token: 0.0, attended_token: 0.0 };

fn config(blocks: usize, cost: CostModel) -> SimConfig {
    SimConfig { check: true, ..SimConfig::new(blocks, 16, 4096, cost) }
}

fn run(config: &SimConfig, arrivals: &[Arrival], policy: &mut dyn Scheduler) -> Report {
    let (report, log) = simulate(config, arrivals, policy).unwrap();
    assert_eq!(replay(&log).unwrap(), report, "the replay");
    assert_eq!(report.finished + report.cancelled + report.refused, arrivals.len());
    assert!(report.requests.iter().all(|o| o.end != End::Open));
    report
}

#[test]
fn two_requests_by_hand() {
    let arrivals = [Arrival::new(s(0.0), 20, 3), Arrival::new(s(0.5), 20, 2)];
    let r = run(&config(8, SECOND), &arrivals, &mut ContinuousBatching::default());
    let all = |v| Percentiles { p50: v, p90: v, p99: v };
    assert_eq!((r.makespan, r.steps, r.tokens, r.throughput_tok_s), (s(3.0), 3, 5, 5.0 / 3.0));
    assert_eq!(r.ttft, Some(Percentiles { p50: s(1.0), p90: s(1.5), p99: s(1.5) }));
    assert_eq!(r.tpot, Some(all(s(1.0))));
    // Blocks of 16, at the ends of the steps: 20 of 32; 21 and 20 of 64; 22 and 21 of 64.
    assert_eq!(r.waste, (12 + 23 + 21) as f64 / (32 + 64 + 64) as f64);
    assert_eq!((r.hit_rate, r.preemptions, r.late, r.refused), (0.0, 0, 0, 0));
}

#[test]
fn every_price_counts_what_it_should() {
    let cost = CostModel { step: 1.0, row: 0.125, prefill_token: 0.25, attended_token: 0.0625 };
    // 4 prompt tokens that see 1 + 2 + 3 + 4; then one row that sees 5.
    let r = run(&config(4, cost), &[Arrival::new(s(0.0), 4, 2)], &mut ContinuousBatching::default());
    assert_eq!(r.requests[0].first, Some(s(1.0 + 4.0 * 0.25 + 10.0 * 0.0625)));
    assert_eq!(r.makespan, r.requests[0].first.unwrap() + s(1.0 + 0.125 + 5.0 * 0.0625));
    // In chunks of 3: (1 + 2 + 3), then a last token that is a row like any other.
    let small = SimConfig { step_tokens: 3, ..config(4, cost) };
    let r = run(&small, &[Arrival::new(s(0.0), 4, 1)], &mut ContinuousBatching::default());
    assert_eq!(r.makespan, s(1.0 + 3.0 * 0.25 + 6.0 * 0.0625) + s(1.0 + 0.125 + 4.0 * 0.0625));
}

/// Three requests and two places: a static batch keeps the third out until its longest answer is complete.
#[test]
fn policies_differ_as_they_should() {
    let two = SimConfig { step_seqs: 2, ..config(64, SECOND) };
    let arrivals = [1, 4, 1].map(|output| Arrival::new(s(0.0), 8, output));
    let third = |policy: &mut dyn Scheduler| run(&two, &arrivals, policy).requests[2].first.unwrap();
    assert_eq!(third(&mut ContinuousBatching::default()), s(2.0));
    assert_eq!(third(&mut StaticBatching::new(2).linger(s(0.0))), s(5.0));
    assert_eq!(third(&mut StaticBatching::new(2).linger(s(7.0))), s(8.0));
    assert_eq!(third(&mut DynamicBatching::new(2, s(0.0))), s(5.0));
    let alone = [Arrival::new(s(10.0), 8, 1)];
    assert_eq!(run(&two, &alone, &mut DynamicBatching::new(2, s(0.25))).makespan, s(1.25));
}

#[test]
fn each_request_ends_in_its_way() {
    let one = SimConfig { step_seqs: 1, max_seqs: 5, ..config(4, SECOND) };
    let base = Arrival::new(s(0.0), 8, 4);
    let arrivals = [
        Arrival { deadline: Some(s(4.0)), ..base },
        // In the queue; in the first step, of which it is not; in its third step, which is the last.
        Arrival { cancel: Some(s(1.5)), deadline: Some(s(100.0)), ..base },
        Arrival { cancel: Some(s(0.0)), ..base },
        Arrival { cancel: Some(s(5.5)), ..base },
        // Longer than the pool; longer than the model; longer than can be added up; more than fit the ledger.
        Arrival { prompt_tokens: 61, ..base },
        Arrival { output_tokens: 4090, ..base },
        Arrival { prompt_tokens: usize::MAX, output_tokens: usize::MAX, ..base },
        base,
        base,
        Arrival { at: s(100.0), cancel: Some(Duration::MAX), deadline: Some(s(3.5)), ..base },
    ];
    let r = run(&one, &arrivals, &mut ContinuousBatching::default());
    let ends: Vec<End> = r.requests.iter().map(|o| o.end).collect();
    use End::*;
    assert_eq!(ends, [Finished, Cancelled, Cancelled, Cancelled, Refused, Refused, Refused, Finished, Refused, Finished]);
    assert_eq!(r.requests[3].tokens, 2);
    assert_eq!(r.requests[2].cached, None);
    assert_eq!(r.late, 2, "the second, and the last by half a second");
    assert_eq!(r.makespan, s(104.0));
}

/// Half as good as nothing: a policy that leaves requests behind is an error, not an endless loop.
#[test]
fn policies_that_do_not_end_are_errors() {
    struct Idle(Option<Duration>);
    impl Scheduler for Idle {
        fn schedule(&mut self, step: &mut StepBuilder<'_>) {
            self.0.into_iter().for_each(|t| step.wake_at(t));
        }
    }
    let arrivals = [Arrival::new(s(2.0), 8, 4); 3];
    for wake_at in [None, Some(s(0.0)), Some(s(2.0))] {
        let error = simulate(&config(8, SECOND), &arrivals, &mut Idle(wake_at)).unwrap_err();
        assert_eq!(error, SimError::Stalled { unfinished: 3, at: s(2.0) });
    }
    let error = simulate(&config(8, SECOND), &arrivals, &mut StaticBatching::new(4).linger(Duration::MAX)).unwrap_err();
    assert_eq!(error, SimError::Stalled { unfinished: 3, at: s(2.0) });
    let short = SimConfig { max_turns: 4, ..config(8, SECOND) };
    let error = simulate(&short, &arrivals, &mut ContinuousBatching::default()).unwrap_err();
    assert_eq!(error, SimError::Endless { unfinished: 3, limit: 4 });
    // The same ends where nothing is left to do: a turn at time 0, and one a token.
    let (report, _) = simulate(&SimConfig { max_turns: 5, ..short }, &arrivals, &mut ContinuousBatching::default()).unwrap();
    assert_eq!(report.finished, 3);
}

#[test]
fn numbers_out_of_range_are_refused() {
    let one = [Arrival::new(s(0.0), 8, 4)];
    let fails = |config: &SimConfig, arrivals: &[Arrival]| {
        simulate(config, arrivals, &mut ContinuousBatching::default()).unwrap_err().to_string()
    };
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        let message = fails(&config(8, CostModel { row: bad, ..SECOND }), &one);
        assert!(message.starts_with("cost of a row: expected a finite number, at least 0, found"), "{message}");
    }
    let message = fails(&config(8, CostModel { step: 1e300, ..SECOND }), &one);
    assert!(message.contains("seconds of a step: expected at most 2^64 - 1"), "{message}");
    let message = fails(&config(8, CostModel { step: 1e19, ..SECOND }), &one);
    assert!(message.contains("time of the simulation"), "{message}");
    let message = fails(&config(0, SECOND), &one);
    assert!(message.contains("blocks") && message.contains("found 0"), "{message}");
    assert!(fails(&config(8, SECOND), &[Arrival::new(s(0.0), 0, 1)]).contains("prompt_tokens of request 0"));
    assert!(fails(&config(8, SECOND), &[one[0], Arrival::new(s(0.0), 1, 0)]).contains("output_tokens of request 1"));
    let long = Arrival { prefix_tokens: 9, ..one[0] };
    assert!(fails(&config(8, SECOND), &[long]).contains("prefix_tokens of request 0: expected at most its prompt's 8, found 9"));
}

fn mixed(seed: u64) -> Arrivals {
    let chat = RequestKind {
        weight: 3.0,
        prefix_tokens: 40,
        prefix_share: 0.5,
        priority: 1,
        deadline: Some(s(4.0)),
        cancel_share: 0.2,
        cancel_within: s(3.0),
        ..RequestKind::new(Lengths::Uniform { min: 1, max: 60 }, Lengths::LogNormal { median: 20.0, sigma: 1.0, max: 90 })
    };
    let text = RequestKind::new(Lengths::LogNormal { median: 80.0, sigma: 0.5, max: 150 }, Lengths::Fixed(30));
    Arrivals { seed, requests: 60, rate: 8.0, mix: vec![chat, text] }
}

/// Small pools, cancels, every policy, `check` in each step: all end, and the log gives the same report again.
#[test]
fn worlds_end_and_can_be_replayed() {
    let cost = CostModel { step: 0.02, row: 0.002, prefill_token: 0.001, attended_token: 1e-6 };
    let mut preempted = 0;
    for seed in 0..30 {
        let mut rng = Random(seed);
        let mut sizes = config(12 + rng.below(40), cost);
        (sizes.seed, sizes.block_size) = (seed, 4 + rng.below(16));
        (sizes.step_seqs, sizes.step_tokens, sizes.max_seqs) = (1 + rng.below(12), 8 + rng.below(100), 20 + rng.below(60));
        let arrivals = mixed(seed).generate().unwrap();
        let size = 1 + rng.below(8);
        let mut policies: [Box<dyn Scheduler>; 3] = [
            Box::new(StaticBatching::new(size)),
            Box::new(DynamicBatching::new(size, s(0.25))),
            Box::new(ContinuousBatching::default().max_chunk(16).patience(s(2.0)).ageing(s(1.0))),
        ];
        for (k, policy) in policies.iter_mut().enumerate() {
            let report = run(&sizes, &arrivals, &mut **policy);
            assert!(report.waste > 0.0 && report.waste < 1.0);
            assert!(k == 2 || report.preemptions == 0);
            preempted += report.preemptions;
        }
    }
    assert!(preempted > 50, "{preempted}: the pools are too large to test anything");
}

#[test]
fn an_altered_log_is_told_apart() {
    let arrivals = [Arrival::new(s(0.0), 20, 3), Arrival::new(s(0.5), 20, 2)];
    let (report, log) = simulate(&config(8, SECOND), &arrivals, &mut ContinuousBatching::default()).unwrap();
    assert_eq!(log.turns.len(), report.steps + 1, "the last one finds nothing to do");
    assert_eq!(log.turns[1].items.iter().map(|r| r.request).collect::<Vec<_>>(), [0, 1]);
    let turn = |change: &dyn Fn(&mut Log)| {
        let mut log = log.clone();
        change(&mut log);
        match replay(&log) {
            Err(SimError::Replay { turn, .. }) => turn,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(turn(&|l| l.turns[1].items[1].item.len = 21), 1);
    assert_eq!(turn(&|l| l.turns[1].items[1].item.start = 1), 1);
    assert_eq!(turn(&|l| l.turns[2].at += s(0.5)), 2);
    let first = log.turns[1].items[0].item.seq;
    assert_eq!(turn(&|l| l.turns[0].preempted.push(first)), 0);
    assert_eq!(turn(&|l| l.config.cost.step = 2.0), 1);
    assert_eq!(turn(&|l| drop(l.turns.pop())), 3);
    assert_eq!(turn(&|l| l.turns.truncate(2)), 2);
    // Part of a prompt is run, but not to its last token.
    assert_eq!(turn(&|l| l.turns[1].items[1].item.len = 5), 1);
}

/// Tokens are the same at the same place, and prompts share what they are said to share and nothing else.
#[test]
fn tokens_are_a_function_of_seed_request_and_position() {
    struct Spy(ContinuousBatching, Vec<Vec<u32>>);
    impl Scheduler for Spy {
        fn schedule(&mut self, step: &mut StepBuilder<'_>) {
            self.1.extend(step.waiting().map(|s| s.tokens().to_vec()));
            self.0.schedule(step);
        }
    }
    let prefixed = |prefix, prefix_tokens| Arrival { prefix_tokens, prefix, ..Arrival::new(s(0.0), 40, 1) };
    let arrivals = [prefixed(1, 30), prefixed(1, 20), prefixed(2, 30), prefixed(1, 0)];
    let prompts = |seed| {
        let mut spy = Spy(ContinuousBatching::default(), Vec::new());
        run(&SimConfig { seed, ..config(64, SECOND) }, &arrivals, &mut spy);
        spy.1.truncate(4);
        spy.1
    };
    let a = prompts(5);
    let common = |x: &[u32], y: &[u32]| x.iter().zip(y).take_while(|(p, q)| p == q).count();
    assert_eq!([common(&a[0], &a[1]), common(&a[0], &a[2]), common(&a[0], &a[3])], [20, 0, 0]);
    assert_eq!(a, prompts(5));
    assert_eq!(common(&a[0], &prompts(6)[0]), 0);
}

#[test]
fn generated_requests_are_what_they_were_asked_to_be() {
    let all = Arrivals { requests: 4000, ..mixed(3) };
    let list = all.generate().unwrap();
    assert_eq!(list[..60], mixed(3).generate().unwrap(), "a longer list begins like a shorter one");
    assert_ne!(list[0], mixed(4).generate().unwrap()[0]);
    assert!(list.is_sorted_by_key(|a| a.at));
    // Within five standard deviations of what is to be expected of 4000.
    let near = |name: &str, found: f64, expected: f64, within: f64| {
        assert!((found - expected).abs() < within, "{name}: {found}, {expected} expected");
    };
    let share = |part: &dyn Fn(&&Arrival) -> bool, of: &[Arrival]| of.iter().filter(part).count() as f64 / of.len() as f64;
    near("rate", 4000.0 / list[3999].at.as_secs_f64(), 8.0, 5.0 * 8.0 / 4000f64.sqrt());
    let gaps: Vec<f64> = list.windows(2).map(|w| (w[1].at - w[0].at).as_secs_f64() * 8.0).collect();
    // Exponential: a share of 1/e is longer than the mean, and 1/e^2 than twice that.
    let longer = |than: f64| gaps.iter().filter(|g| **g > than).count() as f64 / gaps.len() as f64;
    near("gaps", longer(1.0), 0.368, 0.04);
    near("long gaps", longer(2.0), 0.135, 0.03);
    near("the first kind", share(&|a| a.priority == 1, &list), 0.75, 0.035);
    let chats: Vec<Arrival> = list.iter().filter(|a| a.priority == 1).copied().collect();
    let texts: Vec<Arrival> = list.iter().filter(|a| a.priority == 0).copied().collect();
    near("prefixes", share(&|a| a.prefix_tokens == 40, &chats), 0.5, 0.05);
    near("cancels", share(&|a| a.cancel.is_some(), &chats), 0.2, 0.04);
    near("half of the answers", share(&|a| a.output_tokens <= 20, &chats), 0.51, 0.05);
    // ln(20 e) is one deviation above the median; 0.841 lie below.
    near("most of the answers", share(&|a| a.output_tokens <= 54, &chats), 0.841, 0.04);
    let own = |a: &Arrival| a.prompt_tokens - a.prefix_tokens;
    assert!(chats.iter().all(|a| (1..=60).contains(&own(a)) && (1..=90).contains(&a.output_tokens)));
    assert!((1..=60).all(|n| chats.iter().any(|a| own(a) == n)), "every length of a uniform range comes");
    assert!(chats.iter().all(|a| a.deadline == Some(s(4.0)) && a.cancel.is_none_or(|c| c <= s(3.0))));
    assert!(texts.iter().all(|a| a.output_tokens == 30 && a.prompt_tokens <= 150 && a.prefix_tokens == 0));

    let at_once = Arrivals { rate: f64::INFINITY, ..mixed(3) };
    assert!(at_once.generate().unwrap().iter().all(|a| a.at == Duration::ZERO));
}

/// Paged blocks waste the rest of a sequence's last block, and nothing else. Requests as long as those of people who talk to an
/// assistant: half of the prompts above 160 tokens, half of the answers above 200. Published for such requests are 4 % ("PagedAttention",
/// Kwon et al., 2023), and 60 to 80 where room for the longest is reserved.
#[test]
fn blocks_waste_less_than_one_a_sequence() {
    struct Spy(ContinuousBatching, usize);
    impl Scheduler for Spy {
        fn schedule(&mut self, step: &mut StepBuilder<'_>) {
            for s in step.running() {
                let (held, used) = (s.block_table(0).len() * 16, s.cached());
                assert!(used <= held && held - used < 16, "{} holds {held} slots for {used} tokens", s.id());
                self.1 += 1;
            }
            self.0.schedule(step);
        }
    }
    let lengths = |median| Lengths::LogNormal { median, sigma: 1.0, max: 2000 };
    let mix = vec![RequestKind::new(lengths(160.0), lengths(200.0))];
    let cost = CostModel { step: 0.02, row: 0.001, prefill_token: 0.0002, attended_token: 1e-8 };
    let sizes = SimConfig { check: false, step_seqs: 64, ..config(1536, cost) };
    for seed in 0..3 {
        // More than it can serve, so that the cache is full and sequences are preempted; and less.
        for rate in [10.0, 1.0] {
            let arrivals = Arrivals { seed, requests: 400, rate, mix: mix.clone() }.generate().unwrap();
            let mut spy = Spy(ContinuousBatching::default(), 0);
            let report = run(&sizes, &arrivals, &mut spy);
            assert_eq!((report.finished, report.preemptions > 0), (400, rate == 10.0));
            assert!(spy.1 > 10_000, "{} looks", spy.1);
            println!("seed {seed}, {rate} requests a second: {:.2} % of the slots held are empty", report.waste * 100.0);
            assert!(report.waste > 0.0 && report.waste < 0.04, "{}", report.waste);
        }
    }
}

#[test]
fn descriptions_that_make_no_requests_are_refused() {
    type Change<'a> = &'a dyn Fn(&mut Arrivals);
    let fails = |change: Change<'_>| {
        let mut arrivals = mixed(0);
        change(&mut arrivals);
        arrivals.generate().unwrap_err().to_string()
    };
    let changes: [(Change<'_>, &str); 10] = [
        (&|a| a.rate = 0.0, "rate: expected more than 0, found 0"),
        (&|a| a.rate = f64::NAN, "rate: expected more than 0, found NaN"),
        (&|a| a.rate = 1e-300, "arrival in seconds"),
        (&|a| a.mix.clear(), "mix: expected at least one kind"),
        (&|a| a.mix[1].weight = -1.0, "weight: expected a finite number, more than 0, found -1"),
        (&|a| a.mix[0].prefix_share = 1.5, "prefix_share: expected 0 to 1, found 1.5"),
        (&|a| a.mix[0].cancel_share = f64::NAN, "cancel_share: expected 0 to 1, found NaN"),
        (&|a| a.mix[0].prompt = Lengths::Fixed(0), "lengths of the prompt: expected at least 1"),
        (&|a| a.mix[0].output = Lengths::Uniform { min: 5, max: 4 }, "lengths of the output: expected 1 <= min <= max"),
        (
            &|a| a.mix[0].output = Lengths::LogNormal { median: f64::INFINITY, sigma: 1.0, max: 9 },
            "lengths of the output: expected finite numbers",
        ),
    ];
    for (change, expected) in changes {
        let message = fails(change);
        assert!(message.contains(expected), "{message}");
    }
    let mut huge = mixed(0);
    huge.mix[0].prompt = Lengths::Uniform { min: 1, max: usize::MAX };
    huge.mix[0].output = Lengths::LogNormal { median: 1e300, sigma: 1e300, max: usize::MAX };
    assert!(huge.generate().unwrap().iter().all(|a| a.prompt_tokens > 0 && a.output_tokens > 0));
}

#[test]
fn prices_are_found_again() {
    let truth = CostModel { step: 0.02, row: 0.003, prefill_token: 0.0012, attended_token: 2e-7 };
    let mut rng = Random(1);
    let mut samples = |n: usize| -> Vec<CostSample> {
        let load = |_| StepLoad { rows: rng.below(32), prefill_tokens: rng.below(128), attended_tokens: rng.below(60_000) };
        (0..n).map(load).map(|load| CostSample { load, seconds: truth.seconds(&load) }).collect()
    };
    let close = |a: f64, b: f64, within: f64| (a - b).abs() <= within * b;
    for n in [4, 5, 300] {
        let fit = CostModel::fit(&samples(n)).unwrap();
        for (a, b) in [(fit.step, truth.step), (fit.row, truth.row), (fit.attended_token, truth.attended_token)] {
            assert!(close(a, b, 1e-6), "{fit:?}");
        }
    }
    // One in ten off, up and down alike.
    let mut noisy = samples(2000);
    for (k, sample) in noisy.iter_mut().enumerate() {
        sample.seconds *= 1.0 + 0.1 * [1.0, -1.0][k % 2];
    }
    let fit = CostModel::fit(&noisy).unwrap();
    assert!(close(fit.step, truth.step, 0.1) && close(fit.row, truth.row, 0.1), "{fit:?}");
    assert!(close(fit.prefill_token, truth.prefill_token, 0.1), "{fit:?}");
    // A price that would be negative is 0, and the others make the best of it.
    let mut falling = samples(300);
    falling.iter_mut().for_each(|s| s.seconds -= 1e-7 * 3.0 * s.load.attended_tokens as f64);
    falling.retain(|s| s.seconds > 0.0);
    let fit = CostModel::fit(&falling).unwrap();
    assert!(fit.attended_token == 0.0 && fit.step > 0.0 && fit.row > 0.0, "{fit:?}");

    let mut alike = samples(300);
    alike.iter_mut().for_each(|s| s.load.rows = 2 * s.load.prefill_tokens);
    let mut none = samples(300);
    none.iter_mut().for_each(|s| s.load.rows = 0);
    let mut nan = samples(5);
    nan[2].seconds = f64::NAN;
    for (samples, expected) in [
        (alike, "samples: expected steps whose rows, prefill tokens and attended tokens vary independently"),
        (none, "found 300 that do not"),
        (samples(3), "found 3 that do not"),
        (Vec::new(), "found 0 that do not"),
        (nan, "seconds of sample 2: expected a finite number, at least 0, found NaN"),
    ] {
        let message = CostModel::fit(&samples).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn traces_are_read() {
    let text = "# a day\n0.5, 20,3\n\n0,7,1 # first\n";
    let expected = [Arrival::new(s(0.0), 7, 1), Arrival::new(s(0.5), 20, 3)];
    assert_eq!(parse_trace(text).unwrap(), expected);
    assert_eq!(parse_trace("").unwrap(), []);
    let text = "prefix,seconds,output_tokens,prompt_tokens,prefix_tokens,priority,deadline_s,cancel_s\r\n\
                7,1e-3,5,20,20,-2,2.5,0\r\n,0,1,1,,,,\r\n";
    let full = Arrival {
        priority: -2,
        deadline: Some(s(2.5)),
        cancel: Some(s(0.0)),
        prefix_tokens: 20,
        prefix: 7,
        ..Arrival::new(s(0.001), 20, 5)
    };
    assert_eq!(parse_trace(text).unwrap(), [Arrival::new(s(0.0), 1, 1), full]);
}

#[test]
fn hostile_traces_are_refused() {
    let long = format!("0,{},1", "9".repeat(1 << 20));
    for (text, expected) in [
        ("0,1", "trace, line 1: numbers: expected 3 between commas, found 2"),
        ("0,1,1\n0,1,1,1", "trace, line 2: numbers: expected 3 between commas, found 4"),
        ("0,0,1", "prompt_tokens: expected at least 1, found 0"),
        ("0,,1", "prompt_tokens: expected at least 1, found 0"),
        ("0,1,0", "output_tokens: expected at least 1, found 0"),
        ("0,-1,1", "prompt_tokens: expected a whole number within its range, found -1"),
        ("0,1.5,1", "prompt_tokens: expected a whole number within its range, found 1.5"),
        ("0,1,18446744073709551616", "output_tokens: expected a whole number"),
        ("-1,1,1", "seconds: expected seconds, 0 to 2^64 - 1, found -1"),
        ("nan,1,1", "columns: expected names out of: seconds, prompt_tokens"),
        ("0,1,1\nnan,1,1", "trace, line 2: seconds: expected seconds, 0 to 2^64 - 1, found nan"),
        ("0,1,1\ninf,1,1", "found inf"),
        ("1e300,1,1", "seconds: expected seconds, 0 to 2^64 - 1, found 1e300"),
        ("seconds,prompt_tokens", "columns: expected output_tokens among them, found seconds,prompt_tokens"),
        ("seconds,prompt_tokens,output_tokens,seconds", "columns: expected each name once, found seconds"),
        ("0,1,1\nseconds,prompt_tokens,output_tokens", "line 2: seconds: expected seconds"),
        ("seconds,prompt_tokens,output_tokens,prefix_tokens\n0,4,1,5", "prefix_tokens: expected at most the prompt's 4, found 5"),
        ("seconds,prompt_tokens,output_tokens,priority\n0,4,1,2147483648", "priority: expected a whole number"),
        ("seconds,prompt_tokens,output_tokens,deadline_s\n0,4,1,-3", "deadline_s: expected seconds"),
        ("0;1;1", "numbers: expected 3 between commas, found 1"),
        ("\u{feff}0,1,1", "seconds: expected seconds"),
        (&long, "999..."),
    ] {
        let message = parse_trace(text).unwrap_err().to_string();
        assert!(message.contains(expected) && message.len() < 300, "{text:.60}: {message}");
    }
    // Whatever it is, it is an answer and no panic; and what is read can be simulated.
    let mut rng = Random(9);
    let mut read = 0;
    const PIECES: [&str; 14] = ["0", "1", "9", "40", "1.5", "-1", "1e9", "", "é", "#", ",", "\n", "priority", "\0"];
    for k in 0..20_000 {
        let mut line = || [(); 3].map(|()| PIECES[rng.below(14)]).join(",");
        let text = [line(), line()][..1 + k % 2].join("\n");
        let Ok(list) = parse_trace(&text) else { continue };
        read += list.len();
        if list.iter().all(|a| a.output_tokens < 100) {
            run(&config(64, SECOND), &list, &mut ContinuousBatching::default());
        }
    }
    assert!(read > 200, "{read} lines were read");
}
