//! Measurements that belong to a whole process: what is measured runs again in a process of its own, without other tests.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const CHILD: &str = "LOQUAT_TEST_ALONE";

/// Runs `body` in a process of its own; `test` is the path of the calling test. What the process wrote comes back, without
/// the test harness's lines.
pub fn alone(test: &str, body: fn()) -> Option<String> {
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        wait_for_harness();
        body();
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, test);
    let output = child.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{test}:\n{out}{err}");
    assert!(out.contains("1 passed"), "{test} ran nothing:\n{out}{err}");
    // With the harness's line open, what the test prints would stand behind its dots.
    let harness = |line: &&str| {
        line.is_empty()
            || *line == "running 1 test"
            || *line == format!("test {test} ... ok")
            || line.starts_with("test result: ")
    };
    Some(out.lines().filter(|line| !harness(line)).chain(err.lines()).map(|line| format!("{line}\n")).collect())
}

/// Until the harness's own thread, the first of the process, sleeps and waits for the test: it allocates before it does.
fn wait_for_harness() {
    let start = Instant::now();
    let sleeps = || {
        let stat = fs::read_to_string(format!("/proc/self/task/{}/stat", std::process::id())).ok()?;
        Some(stat.rsplit_once(')')?.1.trim_start().starts_with('S'))
    };
    while sleeps() == Some(false) && start.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
}

/// Name and CPU time, in clock ticks, of every thread of this process. Empty where there is no /proc.
pub fn threads() -> Vec<(String, u64)> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let one = |entry: fs::DirEntry| {
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let (head, tail) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = tail.split_whitespace().collect();
        // utime and stime are fields 14 and 15; `tail` starts with field 3.
        let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
        Some((head.split_once('(')?.1.to_owned(), ticks))
    };
    tasks.filter_map(|entry| one(entry.ok()?)).collect()
}
