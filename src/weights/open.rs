//! From a path to a source: a file of either format, an index of shards, or a folder that holds one of them. The folder's
//! other files (configuration, tokenizer) are another layer's business; [`read_text_file`] reads them for it.
#![forbid(unsafe_code)]

use super::bytes::{LoadMode, OnProgress, file_metadata};
use super::gguf::{Gguf, number_of};
use super::memory::{KIND_BYTES, Kind, unknown};
use super::safetensors::{INDEX_SUFFIX, Safetensors};
use super::{TensorView, WeightSource};
use crate::error::LoadError;
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What was found at a path. GGUF brings its own metadata, safetensors needs the files beside it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Opened {
    /// One GGUF file, or the files of a split one.
    Gguf(Arc<Gguf>),
    /// One safetensors file, or shards.
    Safetensors(Arc<Safetensors>),
}

impl Opened {
    /// The tensors, whatever the format.
    pub fn source(&self) -> Arc<dyn WeightSource> {
        match self {
            Opened::Gguf(gguf) => gguf.clone(),
            Opened::Safetensors(safetensors) => safetensors.clone(),
        }
    }

    fn inner(&self) -> &dyn WeightSource {
        match self {
            Opened::Gguf(gguf) => &**gguf,
            Opened::Safetensors(safetensors) => &**safetensors,
        }
    }
}

impl WeightSource for Opened {
    fn label(&self) -> &str {
        self.inner().label()
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        self.inner().names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.inner().tensor(name)
    }

    fn total_bytes(&self) -> u64 {
        self.inner().total_bytes()
    }

    fn release(&self, name: &str) {
        self.inner().release(name);
    }

    fn release_part(&self, name: &str, range: Range<usize>) {
        self.inner().release_part(name, range);
    }
}

/// Opens the weights at `path`.
///
/// A file is told by its first bytes: GGUF (and its siblings where it is split) or safetensors; `*.index.json` names shards.
/// Of a folder it takes `model.safetensors.index.json`, else `model.safetensors`, else the only GGUF model there is; other
/// files are not looked at.
pub fn open(path: impl AsRef<Path>, mode: LoadMode, progress: &mut OnProgress<'_>) -> Result<Opened, LoadError> {
    let path = path.as_ref();
    let metadata = fs::metadata(path).map_err(|e| LoadError::io(path, e))?;
    let file = if metadata.is_dir() { weights_in(path)? } else { path.to_owned() };
    if file.to_string_lossy().ends_with(INDEX_SUFFIX) {
        return Ok(Opened::Safetensors(Arc::new(Safetensors::open(file, mode, progress)?)));
    }
    // Looked at before loading: a file of another kind is not read to its end first.
    let start = start_of(&file)?;
    match Kind::of(&start) {
        Some(Kind::Gguf) => Ok(Opened::Gguf(Arc::new(Gguf::open(file, mode, progress)?))),
        Some(Kind::Safetensors) => Ok(Opened::Safetensors(Arc::new(Safetensors::open(file, mode, progress)?))),
        None => Err(unknown(&file.to_string_lossy(), &start)),
    }
}

/// A whole text file of at most `max_bytes`, such as a configuration: an error where it is missing, longer, not UTF-8, or not
/// a regular file. Cost: never more memory than the file has bytes.
pub fn read_text_file(path: impl AsRef<Path>, max_bytes: u64) -> Result<String, LoadError> {
    let path = path.as_ref();
    let label = || path.to_string_lossy();
    file_metadata(path)?;
    let file = File::open(path).map_err(|e| LoadError::io(path, e))?;
    let mut bytes = Vec::new();
    // One byte more than allowed, so that a file that grows meanwhile is noticed.
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes).map_err(|e| LoadError::io(path, e))?;
    if bytes.len() as u64 > max_bytes {
        return Err(LoadError::malformed(label(), "length", format!("at most {max_bytes} bytes"), "more"));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        LoadError::malformed(label(), "text", "UTF-8", format!("an invalid sequence at byte {at}"))
    })
}

/// The file to open in a folder.
fn weights_in(folder: &Path) -> Result<PathBuf, LoadError> {
    for name in [INDEX, SINGLE] {
        let file = folder.join(name);
        // A broken link stands for the file that is missing: opening it says so.
        if fs::symlink_metadata(&file).is_ok() {
            return Ok(file);
        }
    }
    let mut ggufs = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| LoadError::io(folder, e))? {
        let entry = entry.map_err(|e| LoadError::io(folder, e))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        // The later files of a split model belong to its first.
        if name.ends_with(".gguf") && number_of(&name).is_none_or(|number| number == 1) {
            ggufs.push(entry.path());
        }
    }
    if ggufs.len() == 1 {
        return Ok(ggufs.swap_remove(0));
    }
    ggufs.sort();
    let names: Vec<_> = ggufs.iter().filter_map(|p| p.file_name()).take(LISTED).map(|n| n.to_string_lossy()).collect();
    let found = match ggufs.len() {
        0 => "none of them".to_owned(),
        n => format!("{n} GGUF models: {}{}", names.join(", "), if n > LISTED { ", ..." } else { "" }),
    };
    Err(LoadError::malformed(folder.to_string_lossy(), "folder", format!("{INDEX}, {SINGLE} or exactly one *.gguf"), found))
}

fn start_of(path: &Path) -> Result<Vec<u8>, LoadError> {
    file_metadata(path)?;
    let mut start = Vec::with_capacity(KIND_BYTES);
    let file = File::open(path).map_err(|e| LoadError::io(path, e))?;
    file.take(KIND_BYTES as u64).read_to_end(&mut start).map_err(|e| LoadError::io(path, e))?;
    Ok(start)
}

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Names shown of a folder with too many models.
const LISTED: usize = 5;
