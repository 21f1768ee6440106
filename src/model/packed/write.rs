//! Writes packed files: the head, whose sizes are known beforehand, then one tensor after the other, so that no more than one
//! matrix is in memory.
#![forbid(unsafe_code)]

use super::{CHECKSUMS, DIMS, FORMATS, KEYS, LAYOUT, RANKS, TENSORS, TEXT, TEXTS, VERSION, WEIGHTS, panels_name, sum};
use crate::backend::Backend;
use crate::backend::cpu::{self, Compute, Cpu, CpuOptions};
use crate::dtype::FormatId;
use crate::error::{Error, LoadError};
use crate::model::files::{Head, ModelFiles, OpenOptions, SideTexts};
use crate::model::fingerprint::weights_digest;
use crate::model::inventory::{Gone, inventory};
use crate::model::load::Taken;
use crate::model::parts::Part;
use crate::model::tensors::{Gated, Listed, Vector, Visit};
use crate::weights::{
    HeadTensor, LoadMode, LoadProgress, MetaArray, MetaValue, OnProgress, WeightSource, no_progress, write_head,
};
use std::collections::HashSet;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

/// How to pack.
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// Threads, the caller's own included: 1 starts none.
    pub threads: usize,
    /// Map or read the model's files.
    pub mode: LoadMode,
}

impl Default for PackOptions {
    fn default() -> Self {
        PackOptions { threads: 1, mode: LoadMode::default() }
    }
}

/// Writes the model at `path`, whatever [`ModelFiles::open`] opens, as a packed file: its matrices as the CPU's kernels read
/// them, its configuration, tokenizer and templates, all in one. [`ModelFiles::load`] maps such a file and uses it in
/// place: it loads in the time that the tokenizer takes, its pages are shared by all processes that use it, and results are those of the
/// model that was packed, bit by bit. It has about the size of that model.
///
/// `out` is written from its start to its end and flushed; what of a file this leaves after an error is of no use. `progress`
/// counts the bytes written.
///
/// # Errors
/// What [`ModelFiles::open`] and loading the weights find wrong with the model, [`LoadError::Cancelled`], and [`LoadError::Io`]
/// where `out` fails.
pub fn pack(
    path: impl AsRef<Path>,
    options: &PackOptions,
    out: &mut dyn Write,
    progress: &mut OnProgress<'_>,
) -> Result<(), Error> {
    // The texts are copied, not understood.
    let open = OpenOptions { mode: options.mode, ..OpenOptions::default() };
    let Head { weights, gguf, packed, texts } = Head::open(path.as_ref(), &open, &mut no_progress)?;
    let metadata = gguf.clone();
    let texts_of = texts.clone();
    let files = ModelFiles::from_head(Head { weights, gguf, packed, texts }, false)?;
    let source = files.weights();
    let cpu = Cpu::new(&CpuOptions { threads: options.threads, tier: None, compute: Compute::Fast })?;
    let inventory = inventory(&files)?;

    let mut list = List { cpu: &cpu, panels: Vec::new(), seen: HashSet::new(), rows: HashSet::new() };
    inventory.visit(&mut list)?;
    let List { panels, rows, .. } = list;
    let contents = Contents::new(source, panels, &rows)?;
    let mut entries: Vec<(String, MetaValue)> = Vec::new();
    match &metadata {
        Some(gguf) => {
            let own = |key: &str| key.starts_with(KEYS) || key.starts_with("split.");
            entries.extend(gguf.entries().filter(|(key, _)| !own(key)).map(|(key, value)| (key.to_owned(), value.clone())));
        }
        None => {
            entries.push(("general.architecture".to_owned(), MetaValue::Str(files.arch().name.into())));
            let SideTexts { config, generation_config, tokenizer, tokenizer_config, chat_template } = texts_of;
            let texts = [config, generation_config, tokenizer, tokenizer_config, chat_template];
            let there = TEXTS.iter().zip(texts).filter_map(|(name, text)| Some((name, text?)));
            entries.extend(there.map(|(name, text)| (format!("{TEXT}{name}"), MetaValue::Str(text.into()))));
        }
    }
    let digest = files.weights_digest.unwrap_or_else(|| weights_digest(source));
    entries.extend(contents.describe(digest));

    let head = write_head(entries.iter().map(|(key, value)| (&**key, value)), &contents.table, ALIGNMENT);
    let total_bytes = contents.table.iter().map(|t| t.bytes.next_multiple_of(ALIGNMENT.into())).sum::<u64>() + head.len() as u64;
    let mut writer =
        Writer { out, progress, done_bytes: 0, total_bytes, sums: Vec::new(), piece: Vec::with_capacity(PIECE_BYTES) };
    writer.tensor(&head)?;
    drop((head, entries));
    for name in &contents.raw {
        let view = source.tensor(name).expect("a tensor that is listed");
        writer.tensor(view.bytes)?;
        source.release(name);
    }
    inventory.visit(&mut Pack { cpu, source, writer: &mut writer, seen: HashSet::new() })?;
    let sums: Vec<u8> = writer.sums.iter().flat_map(|s| s.to_le_bytes()).collect();
    writer.tensor(&sums)?;
    writer.write_piece()?;
    writer.out.flush().map_err(failed_to_write)?;
    Ok(())
}

/// Cache lines, which the kernels load whole.
const ALIGNMENT: u32 = 64;

fn failed_to_write(error: std::io::Error) -> LoadError {
    LoadError::io(Path::new("the packed file"), error)
}

/// What the file will hold.
struct Contents {
    table: Vec<HeadTensor>,
    /// Tensors that are copied, in the order of the table, in which they come first.
    raw: Vec<String>,
    /// Tensors to describe.
    described: Vec<(String, FormatId, Vec<usize>)>,
}

impl Contents {
    /// `rows` are tensors that are read otherwise than as panels; so are, by configurations, all of one dimension.
    fn new(source: &dyn WeightSource, panels: Vec<(String, usize, u64)>, rows: &HashSet<String>) -> Result<Self, LoadError> {
        let mut contents = Contents { table: Vec::new(), raw: Vec::new(), described: Vec::new() };
        let as_panels: HashSet<&str> = panels.iter().map(|(name, ..)| &**name).collect();
        for name in source.names() {
            let Some(view) = source.tensor(name) else { continue };
            if as_panels.contains(name) && !rows.contains(name) || view.shape.len() > 1 && !rows.contains(name) {
                continue;
            }
            let bytes = view.bytes.len();
            let known = view.format.ggml_type().is_some() && (1..=4).contains(&view.shape.len());
            // Under panels as well, so that both are found by the one description.
            let (format, shape) = match known && !as_panels.contains(name) {
                true => (view.format, view.shape.to_vec()),
                false => (FormatId::I8, vec![bytes]),
            };
            if format != view.format || shape != view.shape {
                contents.described.push((name.to_owned(), view.format, view.shape.to_vec()));
            }
            contents.raw.push(name.to_owned());
            contents.table.push(HeadTensor { name: name.to_owned(), format, shape, bytes: bytes as u64 });
        }
        let raw: HashSet<&String> = contents.raw.iter().collect();
        let mut described = HashSet::new();
        for (name, first, bytes) in &panels {
            if !raw.contains(name) && described.insert(name) {
                let (format, shape) = source.header(name).expect("a tensor of the inventory");
                contents.described.push((name.clone(), format, shape.to_vec()));
            }
            let shape = vec![usize::try_from(*bytes).expect("a matrix that is in memory")];
            contents.table.push(HeadTensor { name: panels_name(name, *first), format: FormatId::I8, shape, bytes: *bytes });
        }
        let sums = 16 * (contents.table.len() + 1);
        let checksums = HeadTensor { name: CHECKSUMS.to_owned(), format: FormatId::I8, shape: vec![sums], bytes: sums as u64 };
        contents.table.push(checksums);
        let mut names = HashSet::new();
        match contents.table.iter().find(|t| !names.insert(&*t.name)) {
            None => Ok(contents),
            Some(t) => Err(LoadError::malformed(source.label(), "names of tensors", "none like those of panels", &t.name)),
        }
    }

    fn describe(&self, digest: u128) -> Vec<(String, MetaValue)> {
        let strings = |list: &mut dyn Iterator<Item = &str>| MetaValue::Array(MetaArray::Str(Box::new(list.collect())));
        let dims = self.described.iter().flat_map(|(_, _, shape)| shape.iter().map(|&d| d as u64)).collect();
        [
            (VERSION, MetaValue::U32(1)),
            (LAYOUT, MetaValue::U32(cpu::PANEL_LAYOUT)),
            (WEIGHTS, MetaValue::Str(format!("{digest:032x}").into())),
            (TENSORS, strings(&mut self.described.iter().map(|(name, ..)| &**name))),
            (FORMATS, strings(&mut self.described.iter().map(|(_, format, _)| format.name()))),
            (RANKS, MetaValue::Array(MetaArray::U32(self.described.iter().map(|(_, _, s)| s.len() as u32).collect()))),
            (DIMS, MetaValue::Array(MetaArray::U64(dims))),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
    }
}

/// Collects what becomes panels.
struct List<'a> {
    cpu: &'a Cpu,
    /// Tensor, first value, bytes.
    panels: Vec<(String, usize, u64)>,
    seen: HashSet<String>,
    /// Tensors of which something is read as it lies.
    rows: HashSet<String>,
}

impl Visit for List<'_> {
    type To = Gone;

    fn matrix(&mut self, parts: &[Part]) -> Result<(), LoadError> {
        for part in parts {
            match part.shape[..] {
                [rows, columns] if cpu::has_panels(part.format) => {
                    if self.seen.insert(panels_name(&part.name, part.first())) {
                        let bytes = self.cpu.weight_bytes(part.format, rows, columns);
                        self.panels.push((part.name.clone(), part.first(), bytes));
                    }
                }
                _ => _ = self.rows.insert(part.name.clone()),
            }
        }
        Ok(())
    }

    fn vector(&mut self, vector: &Vector) -> Result<(), LoadError> {
        self.rows.extend(vector.parts.iter().map(|p| p.name.clone()));
        Ok(())
    }

    fn expert(&mut self, expert: &Gated<Listed>) -> Result<(), LoadError> {
        expert.visit(self).map(|_| ())
    }
}

/// Packs and writes, in the same order.
struct Pack<'a, 'w, 'o, 'p> {
    cpu: Cpu,
    source: &'a dyn WeightSource,
    writer: &'w mut Writer<'o, 'p>,
    seen: HashSet<String>,
}

impl Visit for Pack<'_, '_, '_, '_> {
    type To = Gone;

    fn matrix(&mut self, parts: &[Part]) -> Result<(), LoadError> {
        for part in parts.iter().filter(|p| p.shape.len() == 2 && cpu::has_panels(p.format)) {
            if !self.seen.insert(panels_name(&part.name, part.first())) {
                continue;
            }
            let taken = Taken::of(part, self.source, &self.cpu)?;
            let weight = self.cpu.weight(&[taken.view(part, self.source)])?;
            self.writer.tensor(weight.panels().expect("a format with panels"))?;
            if part.last {
                self.source.release(&part.name);
            }
        }
        Ok(())
    }

    fn vector(&mut self, _: &Vector) -> Result<(), LoadError> {
        Ok(())
    }

    fn expert(&mut self, expert: &Gated<Listed>) -> Result<(), LoadError> {
        expert.visit(self).map(|_| ())
    }
}

/// The file as it grows.
struct Writer<'o, 'p> {
    out: &'o mut dyn Write,
    progress: &'o mut OnProgress<'p>,
    done_bytes: u64,
    total_bytes: u64,
    sums: Vec<u128>,
    /// What was not written yet.
    piece: Vec<u8>,
}

impl Writer<'_, '_> {
    /// The next tensor, and what fills its last line up.
    fn tensor(&mut self, bytes: &[u8]) -> Result<(), LoadError> {
        self.sums.push(sum(bytes));
        let pad = bytes.len().next_multiple_of(ALIGNMENT as usize) - bytes.len();
        for mut bytes in [bytes, &[0; ALIGNMENT as usize][..pad]] {
            while !bytes.is_empty() {
                let (now, rest) = bytes.split_at(bytes.len().min(PIECE_BYTES - self.piece.len()));
                self.piece.extend_from_slice(now);
                bytes = rest;
                if self.piece.len() == PIECE_BYTES {
                    self.write_piece()?;
                }
            }
        }
        Ok(())
    }

    fn write_piece(&mut self) -> Result<(), LoadError> {
        self.out.write_all(&self.piece).map_err(failed_to_write)?;
        self.done_bytes += self.piece.len() as u64;
        self.piece.clear();
        let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
        match (self.progress)(LoadProgress { done_bytes, total_bytes }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(LoadError::Cancelled { done_bytes, total_bytes }),
        }
    }
}

/// Written at once, and between two calls of the progress callback. A multiple of a huge page, so that a file system that keeps what
/// it is given at once together keeps the file on such pages.
const PIECE_BYTES: usize = 8 << 20;
