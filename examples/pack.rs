//! Packs a model: one file that loads in milliseconds, as its matrices already lie as the kernels read them.
//!
//! ```text
//! cargo run --release --example pack -- --model model.gguf --out model.loquat
//! cargo run --release --example generate -- --model model.loquat "Why is the sky blue?"
//! ```
//!
//! Everything that opens a model opens the packed file too, whatever its name; results are the same, bit by bit.

mod support;

use loquat::ModelFiles;
use loquat::model::{PackOptions, pack};
use loquat::weights::{LoadProgress, no_progress};
use std::fs::{self, File};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use support::args::{Opt, Usage, Wrong};

const USAGE: Usage = Usage {
    program: "pack",
    about: "Packs a model into one file that loads at once.",
    words: "",
    options: &[
        support::MODEL,
        Opt { name: "--out", value: "FILE", help: "the file to write" },
        Opt { name: "--verify", value: "", help: "read the file again and check all of it; without --out, the model's file" },
        Opt { name: "--progress", value: "", help: "say how far it has come, on standard error" },
        support::THREADS,
    ],
};

fn main() {
    support::end("pack", run());
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let (path, out) = (support::model(&args)?, args.path("--out"));
    let Some(out) = out else {
        if !args.flag("--verify") {
            return Err(Wrong("expected --out FILE, found none (--help explains the options)".into()).into());
        }
        ModelFiles::load(&path)?.verify()?;
        return Ok(());
    };
    // Under another name until it is whole: a file of that name that is in use stays what it is.
    let mut part = out.clone().into_os_string();
    part.push(".part");
    let part = Path::new(&part);
    let written = write(&path, part, support::threads(&args)?, args.flag("--progress"));
    if let Err(error) = written.and_then(|()| Ok(fs::rename(part, &out)?)) {
        let _ = fs::remove_file(part);
        return Err(error);
    }
    if args.flag("--verify") {
        ModelFiles::load(&out)?.verify()?;
    }
    writeln!(std::io::stdout(), "{} bytes in {}", fs::metadata(&out)?.len(), out.display())?;
    Ok(())
}

fn write(path: &Path, part: &Path, threads: usize, talk: bool) -> Result<(), Box<dyn std::error::Error>> {
    let mut file = File::create(part)?;
    let options = PackOptions { threads, ..PackOptions::default() };
    let mut percent = u64::MAX;
    let mut say = |p: LoadProgress| {
        let now = p.done_bytes * 100 / p.total_bytes.max(1);
        if now != std::mem::replace(&mut percent, now) {
            let _ = write!(std::io::stderr(), "\r{now:>3} %{}", if now == 100 { "\n" } else { "" });
        }
        ControlFlow::Continue(())
    };
    match talk {
        true => pack(path, &options, &mut file, &mut say)?,
        false => pack(path, &options, &mut file, &mut no_progress)?,
    }
    file.sync_all()?;
    Ok(())
}
