//! Packed files: a model whose matrices lie as the CPU's kernels read them, so that loading maps them and does no more. The container
//! is GGUF, which has everything but the layout: metadata with the hyper-parameters and the tokenizer, tensors on any
//! alignment, and readers everywhere. The tensors that it has no type for are bytes to it, and keys say what they are:
//!
//! ```text
//! loquat.packed.version   u32            1, this page
//! loquat.packed.layout    u32            of the panels
//! loquat.packed.weights   string         what fingerprints take of the weights, in hexadecimal
//! loquat.packed.tensors   [string]       names of the tensors that the file holds as panels, or in a format that GGUF has not
//! loquat.packed.formats   [string]       their formats, before they were packed
//! loquat.packed.ranks     [u32]          their dimensions' number
//! loquat.packed.dims      [u64]          their dimensions, all in one list, the slowest first
//! loquat.packed.text.*    string         the texts beside safetensors: config, generation_config, tokenizer, ...
//! tensor NAME@FIRST       I8 [bytes]     panels of the matrix made of NAME's values from FIRST on, rows in their order
//! tensor loquat.checksums I8 [16 (n+1)]  the last: sums of the head (all before the first tensor), then of the n others
//! ```
//!
//! Metadata of a GGUF file is copied as it is; a file packed from safetensors has the texts instead. The sum of the head is checked
//! when the file is opened, those of tensors by [`ModelFiles::verify`], as they take the time of reading all of it. A file of
//! another layout would be packed anew when it is loaded, which is possible as packing loses nothing: see
//! [`cpu::unpack`](crate::backend::cpu::unpack).
//!
//! Invariant: a file that opened is one that the checks of GGUF and the sum of its head let through, so that no accident changed its
//! head; but sums keep out no forger, so that sizes, names and formats are checked like any file's. Bytes of panels are
//! numbers to the kernels, whatever they are.
#![forbid(unsafe_code)]

mod write;

pub use write::{PackOptions, pack};

use super::fingerprint::Digest;
use super::inventory::{Gone, inventory};
use super::parts::Part;
use super::tensors::{Gated, Listed, Vector, Visit};
use super::{ModelFiles, SideTexts};
use crate::backend::cpu;
use crate::dtype::FormatId;
use crate::error::LoadError;
use crate::weights::{Gguf, MetaArray, MetaValue, Panels, StrArray, TensorView, WeightSource};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The tensors of a packed file.
pub(super) struct Packed {
    gguf: Arc<Gguf>,
    layout: u32,
    weights_digest: u128,
    /// Those that the container has under another format or shape.
    tensors: HashMap<Box<str>, Described>,
    /// In the file's order.
    names: StrArray,
}

/// What a tensor is.
struct Described {
    format: FormatId,
    shape: Box<[usize]>,
}

impl Packed {
    pub(super) fn is(gguf: &Gguf) -> bool {
        gguf.metadata(VERSION).is_some()
    }

    /// # Errors
    /// [`LoadError`] for another version, a head that does not sum up, and keys that make no sense.
    pub(super) fn open(gguf: Arc<Gguf>) -> Result<Self, LoadError> {
        let key = Keys(&gguf);
        let version = key.number(VERSION)?;
        if version != 1 {
            return Err(LoadError::Unsupported {
                file: gguf.label().to_owned(),
                what: "the version of packed files".to_owned(),
                found: version.to_string(),
                supported: "1".to_owned(),
            });
        }
        let sums = sums(&gguf)?;
        if sums[0] != sum(gguf.head()) {
            let found = "another: the file is damaged";
            return Err(LoadError::malformed(gguf.label(), CHECKSUMS, "the sum of the head", found));
        }
        let layout = u32::try_from(key.number(LAYOUT)?).map_err(|_| key.wrong(LAYOUT, "a u32"))?;
        let hex = key.text(WEIGHTS)?;
        let weights_digest = u128::from_str_radix(hex, 16).map_err(|_| key.wrong(WEIGHTS, "a number in hexadecimal"))?;
        let (names, formats) = (key.strings(TENSORS)?, key.strings(FORMATS)?);
        let (ranks, dims) = (key.numbers(RANKS)?, key.numbers(DIMS)?);
        if formats.len() != names.len() || ranks.len() != names.len() {
            return Err(key.wrong(RANKS, &format!("an entry for each of {} tensors, as of {FORMATS}", names.len())));
        }
        let mut tensors = HashMap::with_capacity(names.len());
        let mut dims = dims.iter();
        for ((name, format), rank) in names.iter().zip(formats.iter()).zip(ranks) {
            let of = |what: &str| format!("{what} of tensor {:?}", &name[..name.floor_char_boundary(160)]);
            let format = FormatId::ALL.iter().copied().find(|f| f.name() == format);
            let format = format.ok_or_else(|| LoadError::malformed(gguf.label(), of("format"), "one that exists", "another"))?;
            let shape: Box<[usize]> = dims.by_ref().take(rank).copied().collect();
            let values = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|_| shape.len() == rank);
            let bytes = values.and_then(|n| format.bytes_of(n)).filter(|&bytes| bytes > 0);
            let Some(bytes) = bytes else {
                return Err(LoadError::malformed(gguf.label(), of("shape"), "whole blocks", format!("{shape:?}")));
            };
            if let Some(there) = gguf.tensor(name).filter(|t| t.bytes.len() != bytes) {
                let found = format!("{} bytes", there.bytes.len());
                return Err(LoadError::malformed(gguf.label(), of("data"), format!("{bytes} bytes"), found));
            }
            if tensors.insert(name.into(), Described { format, shape }).is_some() {
                return Err(LoadError::malformed(gguf.label(), TENSORS, "names that are distinct", "one twice"));
            }
        }
        if dims.next().is_some() {
            return Err(key.wrong(DIMS, "as many as the ranks add up to"));
        }
        let names = names.clone();
        gguf.ask_for_huge_pages();
        Ok(Packed { layout, weights_digest, tensors, names, gguf })
    }

    pub(super) fn weights_digest(&self) -> u128 {
        self.weights_digest
    }

    /// The texts of a model that was packed from safetensors.
    pub(super) fn texts(&self) -> Option<SideTexts> {
        let text = |name| Some(self.gguf.metadata(&format!("{TEXT}{name}"))?.as_str()?.to_owned());
        let [config, generation_config, tokenizer, tokenizer_config, chat_template] = TEXTS.map(text);
        config.is_some().then_some(SideTexts { config, generation_config, tokenizer, tokenizer_config, chat_template })
    }

    /// That each tensor has its sum.
    fn check_sums(&self) -> Result<(), LoadError> {
        let sums = sums(&self.gguf)?;
        for (name, expected) in self.gguf.names().zip(&sums[1..]) {
            let bytes = self.gguf.bytes(name).unwrap_or_else(|| (&[]).into());
            let found = sum(&bytes);
            bytes.release(0..bytes.len());
            if found != *expected {
                let at = format!("tensor {:?}", &name[..name.floor_char_boundary(160)]);
                let (expected, found) = (format!("the sum {expected:032x}"), format!("{found:032x}: the file is damaged"));
                return Err(LoadError::malformed(self.gguf.label(), at, expected, found));
            }
        }
        Ok(())
    }

    /// True for tensors that are not shown by their own names.
    fn hides(&self, name: &str) -> bool {
        let panels =
            |(tensor, first): (&str, &str)| self.tensors.contains_key(tensor) && first.bytes().all(|b| b.is_ascii_digit());
        name == CHECKSUMS || name.rsplit_once('@').is_some_and(panels)
    }
}

impl WeightSource for Packed {
    fn label(&self) -> &str {
        self.gguf.label()
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.gguf.names().filter(|name| !self.hides(name)))
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let view = self.gguf.tensor(name).filter(|_| !self.hides(name))?;
        Some(match self.tensors.get(name) {
            Some(Described { format, shape }) => TensorView { format: *format, shape, ..view },
            None => view,
        })
    }

    fn release(&self, name: &str) {
        self.gguf.release(name);
    }

    fn release_part(&self, name: &str, range: Range<usize>) {
        self.gguf.release_part(name, range);
    }

    fn header(&self, name: &str) -> Option<(FormatId, &[usize])> {
        match self.tensors.get(name) {
            Some(Described { format, shape }) => Some((*format, shape)),
            None => self.gguf.tensor(name).filter(|_| !self.hides(name)).map(|view| (view.format, view.shape)),
        }
    }

    fn packed_names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.names.iter().filter(|name| self.gguf.tensor(name).is_none()))
    }

    fn panels(&self, name: &str, first: usize) -> Option<Panels> {
        if !self.tensors.contains_key(name) {
            return None;
        }
        Some(Panels { layout: self.layout, bytes: self.gguf.bytes(&panels_name(name, first))? })
    }
}

impl ModelFiles {
    /// Reads a packed file to its end and checks what opening leaves out: that every tensor has the sum that it was written with,
    /// and that panels are what packing makes of finite matrices, which loading other files checks as well. To be called
    /// once for a file that came over a network, or of which nobody knows who made it: with panels that are
    /// none, results mean nothing and may differ from one kernel tier to another, though memory stays safe and nothing panics.
    /// Files that are not packed have nothing to check. Cost: about that of loading the file that was packed.
    ///
    /// # Errors
    /// [`LoadError`] naming the tensor.
    pub fn verify(&self) -> Result<(), LoadError> {
        let Some(packed) = &self.packed else { return Ok(()) };
        packed.check_sums()?;
        inventory(self)?.visit(&mut Verify(packed))?;
        Ok(())
    }
}

/// Checks panels.
struct Verify<'a>(&'a Packed);

impl Visit for Verify<'_> {
    type To = Gone;

    fn matrix(&mut self, parts: &[Part]) -> Result<(), LoadError> {
        for part in parts {
            if let (Some(panels), &[rows, columns]) = (part.panels(self.0), &part.shape[..]) {
                cpu::check_panels(&part.name, part.format, rows, columns, &panels)?;
                panels.bytes.release(0..panels.bytes.len());
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

/// A packed file's keys, each an error where it is not what it should be.
struct Keys<'a>(&'a Gguf);

impl<'a> Keys<'a> {
    fn wrong(&self, key: &str, expected: &str) -> LoadError {
        let found = self.0.metadata(key).map_or("nothing", MetaValue::type_name);
        LoadError::malformed(self.0.label(), key, expected, format!("{found} of another kind"))
    }

    fn number(&self, key: &str) -> Result<u64, LoadError> {
        self.0.metadata(key).and_then(MetaValue::as_u64).ok_or_else(|| self.wrong(key, "a number"))
    }

    fn text(&self, key: &str) -> Result<&'a str, LoadError> {
        self.0.metadata(key).and_then(MetaValue::as_str).ok_or_else(|| self.wrong(key, "a string"))
    }

    fn strings(&self, key: &str) -> Result<&'a StrArray, LoadError> {
        self.0.metadata(key).and_then(MetaValue::as_strs).ok_or_else(|| self.wrong(key, "a list of strings"))
    }

    fn numbers(&self, key: &str) -> Result<Vec<usize>, LoadError> {
        let list = self.0.metadata(key).and_then(MetaValue::as_array).and_then(MetaArray::to_i64s);
        let list = list.and_then(|list| list.into_iter().map(|n| usize::try_from(n).ok()).collect());
        list.ok_or_else(|| self.wrong(key, "a list of numbers from 0 on"))
    }
}

/// Of the head, then of each tensor but the last, which they are in.
fn sums(gguf: &Gguf) -> Result<Vec<u128>, LoadError> {
    let tensors = gguf.names().count();
    let bytes = gguf.tensor(CHECKSUMS).filter(|_| gguf.names().last() == Some(CHECKSUMS));
    match bytes.map(|t| t.bytes.as_chunks::<16>()) {
        Some((sums, [])) if sums.len() == tensors => Ok(sums.iter().map(|s| u128::from_le_bytes(*s)).collect()),
        _ => Err(LoadError::malformed(gguf.label(), CHECKSUMS, format!("{tensors} sums as the last tensor"), "none such")),
    }
}

fn sum(bytes: &[u8]) -> u128 {
    let mut digest = Digest::default();
    digest.update(bytes);
    digest.finish()
}

fn panels_name(tensor: &str, first: usize) -> String {
    format!("{tensor}@{first}")
}

const KEYS: &str = "loquat.packed.";
const VERSION: &str = "loquat.packed.version";
const LAYOUT: &str = "loquat.packed.layout";
const WEIGHTS: &str = "loquat.packed.weights";
const TENSORS: &str = "loquat.packed.tensors";
const FORMATS: &str = "loquat.packed.formats";
const RANKS: &str = "loquat.packed.ranks";
const DIMS: &str = "loquat.packed.dims";
const TEXT: &str = "loquat.packed.text.";
const TEXTS: [&str; 5] = ["config", "generation_config", "tokenizer", "tokenizer_config", "chat_template"];
const CHECKSUMS: &str = "loquat.checksums";
