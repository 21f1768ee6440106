//! What the examples share, tested without them: the command line, and the way of a model into the cache.
#![allow(clippy::unwrap_used)]

#[path = "../examples/support/args.rs"]
mod args;
#[path = "../examples/support/fetch.rs"]
mod fetch;

use args::{Args, Opt, Stop, Usage, Wrong};
use fetch::{PackageFile, cache_folder, fetch_into, fetch_unless};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

const USAGE: Usage = Usage {
    program: "say",
    about: "Says something.",
    words: "WORDS",
    options: &[
        Opt { name: "--max-tokens", value: "N", help: "how many" },
        Opt { name: "--top-p", value: "P", help: "how wide" },
        Opt { name: "--ids", value: "A,B", help: "which" },
        Opt { name: "--raw", value: "", help: "as it is" },
    ],
};

fn parse(line: &[&str]) -> Result<Args, Stop> {
    USAGE.parse(line.iter().map(OsString::from))
}

#[test]
fn values_flags_and_words() {
    let args = parse(&["why", "--max-tokens", "5", "is", "--top-p=0.5", "--raw", "--", "--blue", "-"]).unwrap();
    assert_eq!(args.number("--max-tokens", 9, 0..=10), Ok(5));
    assert_eq!(args.number("--top-p", 1.0, 0.0..=1.0), Ok(0.5));
    assert!(args.flag("--raw"));
    assert_eq!(args.sentence().unwrap(), "why is --blue -");
    let empty = parse(&[]).unwrap();
    assert_eq!((empty.number("--max-tokens", 9, 0..=10), empty.flag("--raw"), empty.words().len()), (Ok(9), false, 0));
    assert_eq!(parse(&["--ids", "1, 2,3"]).unwrap().list::<u32>("--ids"), Ok(Some(vec![1, 2, 3])));
    assert_eq!(parse(&["--ids=1", "--ids=2"]).unwrap().text("--ids"), Ok(Some("2")));
    assert_eq!(parse(&["--ids", "a=b"]).unwrap().path("--ids"), Some(PathBuf::from("a=b")));
    assert_eq!(parse(&["--ids="]).unwrap().text("--ids"), Ok(Some("")));
}

#[test]
fn mistakes_name_the_option() {
    let wrong = |line: &[&str], expected: &str| match parse(line) {
        Err(Stop::Wrong(text)) => assert!(text.contains(expected) && text.contains("usage: say [options] WORDS"), "{text}"),
        other => panic!("{line:?}: {other:?}"),
    };
    wrong(&["--max-token", "5"], "unknown option --max-token");
    wrong(&["--max-token=5"], "unknown option --max-token");
    wrong(&["-x"], "unknown option -x");
    wrong(&["--max-tokens"], "--max-tokens needs a value: --max-tokens N");
    wrong(&["--max-tokens", "--raw"], "--max-tokens needs a value");
    wrong(&["--raw=1"], "--raw takes no value");
    let wordless = Usage { words: "", ..USAGE };
    assert!(matches!(wordless.parse(["x".into()]), Err(Stop::Wrong(text)) if text.contains("no words are expected, found x")));

    let args = parse(&["--max-tokens", "-3", "--top-p", "NaN", "--ids", "1,x"]).unwrap();
    assert_eq!(
        args.number("--max-tokens", 9, 0..=10),
        Err(Wrong("--max-tokens: expected a number from 0 to 10, found \"-3\"".into()))
    );
    assert!(args.number("--top-p", 1.0, 0.0..=1.0).unwrap_err().0.starts_with("--top-p: expected a number from 0 to 1,"));
    assert!(args.list::<u32>("--ids").unwrap_err().0.starts_with("--ids: expected numbers between commas, found \"x\""));
}

#[test]
fn help_lists_everything() {
    for line in [&["--help"][..], &["-h"], &["--raw", "x", "--help", "--nonsense"]] {
        let Err(Stop::Help(text)) = parse(line) else { panic!("{line:?}") };
        assert!(text.starts_with("Says something.\n\nusage: say [options] WORDS\n"));
        assert!(USAGE.options.iter().all(|option| text.contains(option.name) && text.contains(option.help)), "{text}");
    }
}

/// An empty folder of this test's own, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("loquat-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.filter(|name| !name.ends_with(".lock")).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// "hello world" in two parts.
const FILE: PackageFile<'static> = PackageFile {
    packages: &["hello"],
    version: "1.0",
    members: &["hello/a", "hello/b"],
    bytes: 11,
    sha256: "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9",
    file_name: "hello.bin",
};

fn put_wheel(folder: &Path, members: &[(&str, &str)]) {
    put_wheel_named(folder, "hello", members);
}

fn put_wheel_named(folder: &Path, package: &str, members: &[(&str, &str)]) {
    let mut wheel = zip::ZipWriter::new(File::create(folder.join(format!("{package}-1.0-py3-none-any.whl"))).unwrap());
    for (name, content) in members {
        wheel.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
        wheel.write_all(content.as_bytes()).unwrap();
    }
    wheel.finish().unwrap();
}

fn good(_: &PackageFile<'_>, folder: &Path) -> Result<(), String> {
    put_wheel(folder, &[("hello/__init__.py", "no"), ("hello/b", "world"), ("hello/a", "hello ")]);
    Ok(())
}

fn refuse(_: &PackageFile<'_>, _: &Path) -> Result<(), String> {
    Err("no network here".into())
}

#[test]
fn a_fetched_file_is_whole_and_stays() {
    let scratch = Scratch::new("whole");
    let folder = scratch.0.join("deep/er");
    let path = fetch_into(&folder, &FILE, &good).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"hello world");
    assert_eq!(fetch_into(&folder, &FILE, &refuse).as_ref(), Ok(&path), "the second call finds the first one's file");
    fs::write(&path, "hello").unwrap();
    assert!(fetch_into(&folder, &FILE, &refuse).is_err(), "a file of the wrong size is not taken");
    assert_eq!(fs::read(fetch_into(&folder, &FILE, &good).unwrap()).unwrap(), b"hello world");
}

#[test]
fn parts_may_lie_in_several_packages() {
    let scratch = Scratch::new("parts");
    let file = PackageFile { packages: &["one", "two"], ..FILE };
    let path = fetch_into(&scratch.0, &file, &|file, folder| {
        assert_eq!(file.packages, ["one", "two"]);
        put_wheel_named(folder, "one", &[("hello/b", "world")]);
        put_wheel_named(folder, "two", &[("hello/a", "hello ")]);
        Ok(())
    });
    assert_eq!(fs::read(path.unwrap()).unwrap(), b"hello world");
    assert_eq!(scratch.names(), ["hello.bin"]);
}

#[test]
fn a_bad_download_leaves_nothing() {
    let check = |test: &str, file: PackageFile<'_>, download: &dyn Fn(&Path), expected: &str| {
        let scratch = Scratch::new(test);
        let error = fetch_into(&scratch.0, &file, &|_, folder| {
            download(folder);
            Ok(())
        })
        .unwrap_err();
        assert!(error.contains(expected), "{test}: {error}");
        assert_eq!(scratch.names(), Vec::<String>::new(), "{test}");
    };
    let whole = |folder: &Path| good(&FILE, folder).unwrap();
    let zeros = "0".repeat(64);
    check("sum", PackageFile { sha256: &zeros, ..FILE }, &whole, "expected SHA-256 0000");
    check("short", PackageFile { bytes: 12, ..FILE }, &whole, "expected 12 bytes, found 11");
    check("long", PackageFile { bytes: 7, ..FILE }, &whole, "expected 7 bytes, found more");
    check("member", PackageFile { members: &["hello/c"], ..FILE }, &whole, "hello/c");
    check("nothing", FILE, &|_| {}, "no wheel");
    for cut in [1, 30, 200] {
        let truncated = |folder: &Path| {
            whole(folder);
            let wheel = folder.join("hello-1.0-py3-none-any.whl");
            let bytes = fs::read(&wheel).unwrap();
            fs::write(&wheel, &bytes[..bytes.len() - cut]).unwrap();
        };
        check("cut", FILE, &truncated, ".whl: ");
    }
    let scratch = Scratch::new("refused");
    assert_eq!(fetch_into(&scratch.0, &FILE, &refuse), Err("no network here".into()));
    assert_eq!(scratch.names(), Vec::<String>::new());
}

#[test]
fn offline_writes_nothing() {
    let scratch = Scratch::new("offline");
    let folder = scratch.0.join("cache");
    let error = fetch_unless(true, &folder, &FILE, &good).unwrap_err();
    assert!(error.contains("hello.bin") && error.contains("LOQUAT_OFFLINE"), "{error}");
    assert!(!folder.exists());
    let path = fetch_unless(false, &folder, &FILE, &good).unwrap();
    assert_eq!(fetch_unless(true, &folder, &FILE, &refuse), Ok(path));
}

/// Eight callers at once: one download, eight good answers.
#[test]
fn callers_wait_for_each_other() {
    let scratch = Scratch::new("crowd");
    let downloads = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    fetch_into(&scratch.0, &FILE, &|file, folder| {
                        downloads.fetch_add(1, Ordering::Relaxed);
                        good(file, folder)
                    })
                })
            })
            .collect();
        for caller in callers {
            assert_eq!(fs::read(caller.join().unwrap().unwrap()).unwrap(), b"hello world");
        }
    });
    assert_eq!(downloads.into_inner(), 1);
    assert_eq!(scratch.names(), ["hello.bin"]);
}

#[test]
fn the_cache_is_where_the_system_keeps_caches() {
    let check = |os: &str, vars: &[(&str, &str)], expected: Option<&str>| {
        let var = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value));
        assert_eq!(cache_folder(os, &var).ok(), expected.map(PathBuf::from), "{os} {vars:?}");
    };
    check("linux", &[("HOME", "/home/me")], Some("/home/me/.cache/loquat"));
    check("freebsd", &[("HOME", "/home/me"), ("LOCALAPPDATA", "/x")], Some("/home/me/.cache/loquat"));
    check("macos", &[("HOME", "/Users/me"), ("XDG_CACHE_HOME", "/x")], Some("/Users/me/Library/Caches/loquat"));
    check("windows", &[("LOCALAPPDATA", "L"), ("HOME", "/x")], Some("L/loquat"));
    check("linux", &[("LOQUAT_CACHE", "mine"), ("HOME", "/home/me")], Some("mine"));
    check("windows", &[("LOQUAT_CACHE", "mine")], Some("mine"));
    check("linux", &[("LOQUAT_CACHE", ""), ("HOME", "/h")], Some("/h/.cache/loquat"));
    check("linux", &[("XDG_CACHE_HOME", "relative"), ("HOME", "/h")], Some("/h/.cache/loquat"));
    check("linux", &[], None);
    check("windows", &[("HOME", "/h")], None);
    if cfg!(unix) {
        check("linux", &[("XDG_CACHE_HOME", "/c"), ("HOME", "/h")], Some("/c/loquat"));
    }
}
