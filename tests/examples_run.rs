//! The examples as programs: what they do with bad input and a reader that has gone. A plain `cargo test` builds them beside
//! the tests.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/scratch.rs"]
mod scratch;

use common::golden::fixtures;
use scratch::Scratch;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// None, with a reason, where only this test was built.
fn example(name: &str) -> Option<Command> {
    let test = std::env::current_exe().unwrap();
    let program: PathBuf = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    if !program.is_file() {
        eprintln!("skipped: {} was not built", program.display());
        return None;
    }
    Some(Command::new(program))
}

/// Exit status and standard error of a program whose output nobody reads.
fn unread(command: &mut Command) -> (Option<i32>, String) {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let Output { status, stderr, .. } = command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

fn run(command: &mut Command, input: &[u8]) -> (Option<i32>, String, String) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A program that does not read ends early.
    let _ = child.stdin.take().unwrap().write_all(input);
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn a_reader_that_is_gone_is_no_panic() {
    let model = fixtures().join("gguf/llama_q4_0.gguf");
    for (name, args) in [
        ("generate", vec!["--help"]),
        ("chat", vec!["--help"]),
        ("measure", vec!["--prompt-tokens", "2", "--gen-tokens", "2", "--repeat", "1", "--threads", "1"]),
        ("generate", vec!["--raw", "--max-tokens", "4", "--threads", "1", "a"]),
    ] {
        let Some(mut command) = example(name) else { return };
        assert_eq!(unread(command.args(&args).arg(format!("--model={}", model.display()))), (Some(1), String::new()), "{name}");
    }
}

#[test]
fn mistakes_on_the_command_line_exit_with_2() {
    for (name, args, expected) in [
        ("generate", &["--nonsense"][..], "unknown option --nonsense"),
        ("generate", &["--max-tokens", "0", "a"], "generate: --max-tokens: expected a number from 1 to"),
        ("generate", &[], "expected a prompt"),
        ("chat", &["--temperature", "x"], "chat: --temperature: expected a number"),
        ("measure", &["--batch", "x"], "measure: --batch: expected numbers between commas, found \"x\""),
        ("measure", &["--policy", "all", "--batch", "2,3"], "measure: --batch: expected a number from 1 to"),
        ("measure", &["--policy", "lazy"], "measure: --policy: expected static, dynamic, continuous or all, found \"lazy\""),
        ("measure", &["--policy", "all", "--repeat", "2"], "measure: --repeat means nothing with policies"),
        ("measure", &["--shared-prefix", "8", "--count", "2"], "measure: --count means nothing without --policy"),
        ("measure", &["--rounds", "2"], "measure: --rounds means nothing without --policy or --shared-prefix"),
        ("measure", &["--shared-prefix", "0"], "measure: --shared-prefix: expected a number from 1 to"),
        ("measure", &["--shared-prefix", "8", "--depth", "2"], "measure: --depth means nothing with --shared-prefix"),
        ("measure", &["--policy", "all", "--profile"], "measure: --profile means nothing with policies"),
        ("measure", &["--batch", "2,0"], "measure: --batch: expected a number from 1 to 4096, found \"0\""),
        ("measure", &["--prompt-tokens", "0", "--gen-tokens", "0"], "expected something to measure, found nothing"),
        ("measure", &["--format", "xml"], "measure: --format: expected table or json, found \"xml\""),
        ("measure", &["--window", "9"], "measure: --window means nothing without --accuracy"),
        ("measure", &["--accuracy", "a", "--batch", "2"], "measure: --batch means nothing with --accuracy"),
        ("simulate", &["--cost", "1,2,3"], "simulate: --cost: expected 4 numbers, found 3"),
        ("dump_logits", &["--ids", "1,x"], "dump_logits: --ids: expected numbers"),
        ("dump_logits", &[], "dump_logits: --ids 1,2,3 is needed"),
        ("simulate", &["--rate", "0"], "simulate: --rate: expected a number from 0.000001 to 1000000, found \"0\""),
        ("pack", &["--model", "a.gguf"], "expected --out FILE"),
        ("simulate", &["policy"], "simulate: no words are expected, found policy"),
        ("custom_scheduler", &["--reserved", "4"], "custom_scheduler: --reserved: expected a number from 0 to 3"),
    ] {
        let Some(mut command) = example(name) else { return };
        let (code, _, error) = run(command.args(args), b"");
        assert!(code == Some(2) && error.contains(expected), "{name} {args:?}: {code:?} {error}");
    }
}

#[test]
fn dump_logits_refuses_what_it_would_have_to_ignore() {
    let gguf = fixtures().join("gguf/llama_q4_0.gguf");
    let scratch = Scratch::new("dump-logits");
    let out = scratch.path("out.safetensors");
    let ids = vec!["1"; 1 << 16].join(",");
    for (args, expected) in [
        (["--ids", "1", "--config", "other.json"], "--config other.json"),
        (["--ids", ids.as_str(), "--threads", "1"], "65536 ids do not fit the model's context of "),
    ] {
        let Some(mut command) = example("dump_logits") else { return };
        let (code, _, error) = run(command.args(args).arg("--model").arg(&gguf).arg("--out").arg(&out), b"");
        assert!(code == Some(2) && error.contains(expected), "{code:?} {error}");
        assert!(!out.exists());
    }
}

#[test]
fn a_model_is_packed_and_answers_as_before() {
    let scratch = Scratch::new("pack");
    let (model, out) = (fixtures().join("gguf/llama_q4_0.gguf"), scratch.path("model.loquat"));
    let Some(mut command) = example("pack") else { return };
    let (code, said, error) = run(command.args(["--threads=1", "--verify", "--out"]).arg(&out).arg("--model").arg(&model), b"");
    assert_eq!((code, error.as_str()), (Some(0), ""), "{said}");
    let answer = |model: &std::path::Path| {
        let mut command = example("generate").unwrap();
        run(command.args(["--raw", "--max-tokens=8", "--threads=1", "a"]).arg("--model").arg(model), b"")
    };
    assert_eq!(answer(&out), answer(&model));
    // What fails leaves nothing behind.
    let Some(mut command) = example("pack") else { return };
    let (code, _, error) = run(command.args(["--out"]).arg(scratch.path("none")).arg("--model=no/such/model"), b"");
    assert!(code == Some(1) && error.contains("no/such/model"), "{code:?} {error}");
    assert_eq!(std::fs::read_dir(scratch.folder()).unwrap().count(), 1);
}

#[test]
fn a_line_that_is_no_text_does_not_end_a_chat() {
    let Some(mut command) = example("chat") else { return };
    let model = fixtures().join("gguf/llama_q4_0.gguf");
    let (code, out, error) = run(command.arg("--threads=1").arg("--model").arg(model), b"ab\xff\n\n/reset\n/quit\n");
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    assert_eq!(out, "> [expected a line of UTF-8, found another byte at 2]\n> > > \n");
}

#[test]
fn a_full_conversation_says_so_and_can_begin_anew() {
    let Some(mut command) = example("chat") else { return };
    let model = fixtures().join("gguf/llama_q4_0.gguf");
    let chat = command.args(["--threads=1", "--context=96", "--max-tokens=20"]).arg("--model").arg(model);
    let (code, out, error) = run(chat, format!("{}/reset\na\n/quit\n", "a\n".repeat(12)).as_bytes());
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains("[no room is left: ") && !out.starts_with("> [no room"), "{out}");
    let after = out.rsplit("/reset begins anew]\n").next().unwrap();
    assert!(after.starts_with("> > "), "{out}");
}

/// At most 1,000,000 tokens are a wish that ends with the context.
#[test]
fn generate_ends_with_the_context() {
    let Some(mut command) = example("generate") else { return };
    let model = fixtures().join("gguf/llama_q4_0.gguf");
    let generate = command.args(["--raw", "--threads=1", "--max-tokens=1000000", "--stats", "a"]).arg("--model").arg(model);
    let (code, _, error) = run(generate, b"");
    assert!(code == Some(0) && error.contains("decode"), "{code:?} {error}");
}

#[test]
fn simulate_prints_one_object_and_nothing_else() {
    let Some(mut command) = example("simulate") else { return };
    let scratch = Scratch::new("simulate-json");
    let (code, out, error) = run(command.current_dir(scratch.path("")).args(["--json", "--count", "40", "--seed", "3"]), b"");
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let policies: Vec<&String> = report.as_object().unwrap().keys().collect();
    assert_eq!(policies, ["static", "dynamic", "continuous"]);
    for (policy, figures) in report.as_object().unwrap() {
        let names: Vec<&str> = figures.as_object().unwrap().keys().map(String::as_str).collect();
        let times = ["ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"];
        assert_eq!(names, [&["throughput_tok_s"][..], &times, &["waste", "hit_rate", "preemptions"]].concat());
        let figure = |name: &str| figures[name].as_f64().unwrap();
        assert!(times.iter().chain(&["throughput_tok_s"]).all(|n| figure(n) > 0.0), "{policy}: {figures}");
        assert!(["waste", "hit_rate"].iter().all(|n| (0.0..1.0).contains(&figure(n))), "{policy}: {figures}");
    }
    let ttft = |policy: &str| report[policy]["ttft_ms_p50"].as_f64().unwrap();
    assert!(ttft("continuous") < ttft("dynamic") && ttft("dynamic") <= ttft("static"), "{out}");
    assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 0, "a plot that nobody asked for");
}

#[test]
fn simulate_reads_a_trace_and_plots_it() {
    let Some(mut command) = example("simulate") else { return };
    let scratch = Scratch::new("simulate-svg");
    let (trace, plot) = (scratch.path("trace.csv"), scratch.path("plot.svg"));
    // The last is longer than any cache that is made up for it.
    std::fs::write(&trace, "# three\n0,100,20\n1.5,30,5\n2,30,1\n3,9000000,1\n").unwrap();
    let (code, out, error) = run(command.arg("--requests").arg(&trace).arg("--svg").arg(&plot), b"");
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    assert!(out.starts_with("4 requests, 1 of them refused") && out.contains("\ncontinuous "), "{out}");
    assert!(out.ends_with(&format!("\nplot written to {}\n", plot.display())), "{out}");
    let svg = std::fs::read_to_string(&plot).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
    // Three in the legend, three in each panel.
    assert_eq!(svg.matches("<polyline").count(), 9);
    for text in ["Time to first token", "Time per output token", ">static<", ">dynamic<", ">continuous<", "100 %", "10 s<"] {
        assert!(svg.contains(text), "{text}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");

    std::fs::remove_file(&plot).unwrap();
    for (text, expected) in
        [("0,5,5\n1,x,1\n", "trace, line 2: prompt_tokens: expected a whole"), ("#\n", "at least one request")]
    {
        std::fs::write(&trace, text).unwrap();
        let mut command = example("simulate").unwrap();
        let (code, out, error) = run(command.arg("--requests").arg(&trace).arg("--svg").arg(&plot), b"");
        assert!(code != Some(0) && out.is_empty() && error.contains(expected), "{code:?} {out} {error}");
        assert!(!plot.exists());
    }
}

/// The README shows what its command gives.
#[test]
fn the_plot_in_the_readme_is_up_to_date() {
    let Some(mut command) = example("simulate") else { return };
    let scratch = Scratch::new("simulate-readme");
    let plot = scratch.path("simulate.svg");
    let (code, out, error) = run(command.arg("--svg").arg(&plot), b"");
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let [shown, drawn] = [root.join("docs/simulate.svg"), plot].map(|path| std::fs::read_to_string(path).unwrap());
    assert!(shown == drawn, "cargo run --release --example simulate -- --svg docs/simulate.svg gives another plot");
    // The figures of the table beside it, by policy.
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    for policy in ["static", "dynamic", "continuous"] {
        let speed = out.lines().find_map(|l| l.strip_prefix(policy)).and_then(|l| l.split_whitespace().next()).unwrap();
        assert!(readme.contains(&format!("\n| {policy} | {speed} | ")), "{policy}: {out}");
    }
}

/// The same answers for all, and the figures of the simulator; what a trace asks for is what is served.
#[test]
fn measure_compares_policies() {
    let model = fixtures().join("gguf/llama_q4_0.gguf");
    let scratch = Scratch::new("measure-policies");
    // One that is cancelled before it could end, one that is longer than the model's context.
    let trace =
        "seconds,prompt_tokens,output_tokens,cancel_s\n0,40,20,\n0,3,5,\n0.001,30,1,\n0,100,100,0\n0,9000000,1,\n0.002,9,12,\n";
    let trace = scratch.write("trace.csv", trace);
    let measure = |args: &[&str]| {
        let mut command = example("measure")?;
        let (code, out, error) = run(command.arg("--threads=1").arg("--model").arg(&model).args(args), b"");
        assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
        Some(out)
    };
    let requests = format!("--requests={}", trace.display());
    let all = [&requests, "--policy=all", "--batch=2", "--linger=0", "--rounds=2"];
    let Some(out) = measure(&[&all[..], &["--shared-prefix=33", "--json", "--fit"]].concat()) else { return };
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&report["requests"], &report["refused"], &report["rounds"]), (&6.into(), &1.into(), &2.into()), "{out}");
    for policy in ["static", "dynamic", "continuous"] {
        let figure = |name: &str| report["policies"][policy][name].as_f64().unwrap();
        let times = ["throughput_tok_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"];
        assert!(times.iter().all(|name| figure(name) > 0.0), "{policy}: {out}");
        assert!(figure("ttft_ms_p50") <= figure("ttft_ms_p99"), "{policy}: {out}");
        // Two can start together before the prefix is there, the others find it; blocks are half empty at the worst.
        assert!((0.1..1.0).contains(&figure("hit_rate")) && (0.0..0.5).contains(&figure("waste")), "{policy}: {out}");
        let ratio = report["against_static"][policy]["throughput_tok_s"].as_f64();
        assert_eq!(ratio.is_some_and(|r| r > 0.0), policy != "static", "{out}");
    }
    let cost: Vec<f64> = report["cost"].as_array().unwrap().iter().map(|c| c.as_f64().unwrap()).collect();
    assert!(cost.len() == 4 && cost.iter().all(|c| *c >= 0.0) && cost.iter().any(|c| *c > 0.0), "{out}");

    let out = measure(&all).unwrap();
    for text in ["6 requests, 1 of them refused; batches of 2", "\ncontinuous ", "as multiples of static\ndynamic "] {
        assert!(out.contains(text), "{text}: {out}");
    }
    let out = measure(&["--requests=mixed", "--count=9", "--rate=500", "--seed=4", "--rounds=1", "--fit"]).unwrap();
    assert!(out.contains("for simulate: --cost ") && !out.contains("multiples"), "{out}");
}

/// A cell for each length, depth and batch; of a decode so many steps of so many rows, whoever shares a prompt.
#[test]
fn measure_times_each_cell_and_each_operation() {
    let Some(mut command) = example("measure") else { return };
    let model = fixtures().join("gguf/llama_q4_0.gguf");
    let lists = ["--prompt-tokens=20,40", "--depth=0,33", "--batch=1,3", "--gen-tokens=5", "--step-tokens=16", "--repeat=1"];
    let command = command.args(lists).args(["--threads=1", "--shared", "--profile", "--json", "--model"]).arg(&model);
    let (code, out, error) = run(command, b"");
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let cells = report["cells"].as_array().unwrap();
    let found: Vec<String> =
        cells.iter().map(|c| format!("{} {} {} {}", c["what"].as_str().unwrap(), c["tokens"], c["depth"], c["batch"])).collect();
    let prefills = ["prefill 20 null 1", "prefill 40 null 1", "prefill 20 null 3", "prefill 40 null 3"];
    assert_eq!(found, [&prefills[..], &["decode 5 0 1", "decode 5 0 3", "decode 5 33 1", "decode 5 33 3"]].concat());
    let layers = 2.0;
    for cell in cells {
        let (profile, decode) = (&cell["profile"], cell["what"] == "decode");
        let tokens = cell["tokens"].as_f64().unwrap() * cell["batch"].as_f64().unwrap();
        let speed = tokens / cell["ms"].as_f64().unwrap() * 1e3;
        assert_eq!(cell["samples_tok_s"].as_array().unwrap().len(), 1);
        assert!((cell["tok_s"].as_f64().unwrap() / speed - 1.0).abs() < 1e-6, "{cell}");
        // A step takes 16 tokens at most.
        let steps = profile["steps"].as_f64().unwrap();
        assert!(if decode { steps == 5.0 } else { (tokens / 16.0..tokens).contains(&steps) }, "{cell}");
        let ops = profile["ops"].as_array().unwrap();
        let shares: f64 = ops.iter().map(|op| op["share"].as_f64().unwrap()).sum();
        assert!((shares - 1.0).abs() < 1e-6, "{shares} of {cell}");
        let calls = |name: &str| ops.iter().find(|op| op["op"] == name).unwrap()["calls_a_step"].as_f64().unwrap();
        for name in ["linear q k v", "attention", "linear out", "linear gate up", "linear down", "kv write"] {
            assert_eq!(calls(name) % layers, 0.0, "{name} of {cell}");
        }
        assert_eq!((calls("embed"), calls("plan, batch")), (1.0, 1.0), "{cell}");
        assert!(!decode || calls("linear head") == 1.0, "{cell}");
    }
    let mut command = example("measure").unwrap();
    let command = command.args(lists).args(["--threads=1", "--profile", "--model"]).arg(&model);
    let (code, out, error) = run(command, b"");
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    for text in ["prefill 40 x 3 ", "decode at 33 x 3 ", "linear gate up ", "rest "] {
        assert!(out.contains(text), "{text}: {out}");
    }
}

/// A little, over all positions and over those with a long context; a text that is too short is refused.
#[test]
fn measure_tells_what_fast_arithmetic_costs() {
    let scratch = Scratch::new("measure-accuracy");
    let ids = scratch.path("ids.json");
    std::fs::write(&ids, format!("{{\"ids\": {:?}}}", (0..96).map(|i| i * 7 % 61).collect::<Vec<u32>>())).unwrap();
    let measure = |model: &str, windows: &str| {
        let mut command = example("measure")?;
        let command = command.args(["--threads=1", "--window=32", "--json", windows, "--accuracy"]).arg(&ids);
        Some(run(command.arg("--model").arg(fixtures().join("gguf").join(model)), b""))
    };
    let Some((code, out, error)) = measure("llama_q4_0.gguf", "--windows=3") else { return };
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    // Positions with a token behind them; the second half begins in the middle.
    for (part, positions) in [("all", 3 * 31), ("second_half", 3 * 15)] {
        let figure = |name: &str| report[part][name].as_f64().unwrap();
        assert_eq!(report[part]["positions"], positions);
        assert!(figure("kl_mean") > 0.0 && figure("kl_mean") < 0.1, "{out}");
        assert!(figure("kl_median") <= figure("kl_p99") && figure("kl_p99") <= figure("kl_max"), "{out}");
        assert!((figure("fast_perplexity") / figure("exact_perplexity") - 1.0).abs() < 0.05, "{out}");
        assert!((0.5..=1.0).contains(&figure("same_top")), "{out}");
    }
    let (code, _, error) = measure("llama_q4_0.gguf", "--windows=4").unwrap();
    assert!(code == Some(2) && error.contains("expected 4 windows of 32 tokens, found 96 in "), "{code:?} {error}");
}

#[test]
fn measure_finds_a_shared_prefix() {
    let Some(mut command) = example("measure") else { return };
    let command = command.args(["--shared-prefix=100", "--rounds=3", "--threads=1", "--json", "--model"]);
    let (code, out, error) = run(command.arg(fixtures().join("gguf/llama_q4_0.gguf")), b"");
    assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(["cold_ttft_ms", "hit_ttft_ms", "cold_over_hit"].iter().all(|n| report[*n].as_f64().unwrap() > 0.0), "{out}");
    assert!(report["cached_tokens"].as_u64().unwrap() >= 100, "{out}");

    // Longer than the model's context.
    let mut command = example("measure").unwrap();
    let command = command.args(["--shared-prefix=300", "--threads=1", "--model"]);
    let (code, _, error) = run(command.arg(fixtures().join("gguf/llama_q4_0.gguf")), b"");
    assert!(code == Some(1) && error.contains("measure: 317 tokens do not fit: expected 256 at most"), "{code:?} {error}");
}

/// Dialogue comes soon whatever is being written, and with a place reserved one book goes on beside it.
#[test]
fn a_custom_scheduler_shares_fairly() {
    let tokens = [
        ("book of stars", 24),
        ("book of herbs", 24),
        ("guard: Halt!", 12),
        ("thief: Me?", 10),
        ("crowd: There!", 6),
        ("guard: You!", 8),
    ];
    for (reserved, waiting) in [("1", ["book of herbs", "crowd: There!"]), ("0", ["book of stars", "book of herbs"])] {
        let Some(mut command) = example("custom_scheduler") else { return };
        let (code, out, error) = run(command.args(["--reserved", reserved]), b"");
        assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
        for (name, tokens) in tokens {
            let line = out.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_else(|| panic!("{name} in {out}")).trim();
            assert_eq!(line.matches('#').count(), tokens, "{name} in {out}");
            assert_eq!(line.contains('.'), waiting.contains(&name), "{name} in {out}");
        }
    }
}
