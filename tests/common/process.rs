//! Measurements that belong to a whole process: what is measured runs again in a process of its own, without other tests.

use std::fs;
use std::process::Command;

const CHILD: &str = "LOQUAT_TEST_ALONE";

/// Runs `body` in a process of its own; `test` is the path of the calling test. What the process wrote comes back, without
/// the test harness's lines.
pub fn alone(test: &str, body: fn()) -> Option<String> {
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        body();
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, test);
    let output = child.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{test}:\n{out}{err}");
    assert!(out.contains("1 passed"), "{test} ran nothing:\n{out}{err}");
    let harness = |line: &&str| line.is_empty() || line.starts_with("running 1 test") || line.starts_with("test ");
    // With the harness's line open, what is printed stands behind the three dots.
    let said: String = out.lines().filter(|line| !harness(line)).chain(err.lines()).map(|line| format!("{line}\n")).collect();
    let open = format!("test {test} ... ok");
    let whole = out.lines().any(|line| line == open || line == "ok");
    Some(if whole { said.replace("ok\n", "") } else { format!("{said}{out}") })
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
