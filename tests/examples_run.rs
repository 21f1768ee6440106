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
        ("measure", &["--batch", "x"], "measure: --batch: expected a number"),
        ("dump_logits", &["--ids", "1,x"], "dump_logits: --ids: expected numbers"),
        ("dump_logits", &[], "dump_logits: --ids 1,2,3 is needed"),
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
