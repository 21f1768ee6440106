//! Right files cut at every place, and changed at random: by what the fuzz targets run, and within the same bounds.

#[path = "../../fuzz/bodies/gguf.rs"]
mod gguf_body;
#[path = "../../fuzz/bodies/safetensors.rs"]
mod safetensors_body;
#[path = "../../fuzz/bodies/views.rs"]
mod views;

use super::gguf_writer::everything;
use super::{FIXTURES, bounded, entry, peak_of, safetensors_file};
use loquat::LoadError;
use loquat::weights::{Gguf, LoadMode, Safetensors, WeightSource, no_progress, open};
use std::fs;
use std::path::{Path, PathBuf};

fn fixtures() -> Vec<PathBuf> {
    let folders = fs::read_dir(Path::new(FIXTURES).join("arch")).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = folders.collect();
    folders.push(Path::new(FIXTURES).join("gguf"));
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|path| is_gguf(path) || has_extension(path, "safetensors")).collect();
    files.sort();
    files
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found == extension)
}

fn is_gguf(path: &Path) -> bool {
    has_extension(path, "gguf")
}

fn open_static(gguf: bool, file: &'static [u8]) -> Result<Box<dyn WeightSource>, LoadError> {
    Ok(if gguf { Box::new(Gguf::from_bytes("cut", file)?) } else { Box::new(Safetensors::from_bytes("cut", file)?) })
}

/// Where the tensors of an open file start and end in it, and so also where its header ends.
fn borders(source: &dyn WeightSource, file: &[u8]) -> Vec<usize> {
    let mut borders: Vec<usize> = source
        .names()
        .flat_map(|name| {
            let start = source.tensor(name).unwrap().bytes.as_ptr() as usize - file.as_ptr() as usize;
            [start, start + source.tensor(name).unwrap().bytes.len()]
        })
        .collect();
    borders.sort_unstable();
    borders
}

fn check_truncations(gguf: bool, file: Vec<u8>, every_byte: bool) {
    let file: &'static [u8] = file.leak();
    let borders = borders(&*open_static(gguf, file).unwrap(), file);
    let (header, end) = (borders[0], *borders.last().unwrap());
    let mut draws = Draws(file.len() as u64);
    let cuts: Vec<usize> = if every_byte {
        (0..file.len()).collect()
    } else {
        let near = borders.iter().flat_map(|&at| at.saturating_sub(3)..at + 3);
        let sampled = (0..200).map(|_| header + draws.below(file.len() - header));
        (0..header).chain(near).chain(sampled).filter(|&cut| cut < file.len()).collect()
    };
    for cut in cuts {
        let opened = open_static(gguf, &file[..cut]);
        // GGUF pads the last tensor; the padding may go.
        let complete = gguf && cut >= end;
        assert_eq!(opened.is_ok(), complete, "{cut} of {} bytes", file.len());
    }
}

#[test]
fn no_truncation_of_a_small_file_opens() {
    check_truncations(true, everything().build(), true);
    check_truncations(false, small_safetensors(), true);
    for name in ["gguf/llama_f16.gguf", "arch/llama_sharded/model-00003-of-00003.safetensors"] {
        let path = Path::new(FIXTURES).join(name);
        check_truncations(is_gguf(&path), fs::read(&path).unwrap(), true);
    }
}

#[test]
fn no_truncation_of_a_fixture_opens() {
    for path in fixtures() {
        check_truncations(is_gguf(&path), fs::read(&path).unwrap(), false);
    }
}

fn small_safetensors() -> Vec<u8> {
    let entries = [
        entry("model.norm.weight", "F32", "[2,3]", "[0,24]"),
        entry("b", "BF16", "[5]", "[24,34]"),
        entry("c", "BOOL", "[]", "[34,35]"),
        entry("d", "I64", "[0,7]", "[35,35]"),
    ];
    safetensors_file(&format!("{{\"__metadata__\":{{\"format\":\"pt\"}},{}}}", entries.join(",")), &[9; 35])
}

/// splitmix64, so that a failure repeats.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// One to four changes of the kinds that break parsers: bits, interesting numbers, cuts, copies, insertions. Most fall into
/// the first `header` bytes.
fn mutate(file: &mut Vec<u8>, header: usize, draws: &mut Draws) {
    const NUMBERS: [u64; 12] = [0, 1, 2, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 60, 1 << 63, u64::MAX - 31, u64::MAX];
    for _ in 0..=draws.below(4) {
        if file.is_empty() {
            return;
        }
        let within = if draws.below(8) == 0 { file.len() } else { header.clamp(1, file.len()) };
        let at = draws.below(within);
        match draws.below(8) {
            0 => file[at] ^= 1 << draws.below(8),
            1 => file[at] = draws.next() as u8,
            2 | 3 => {
                let number = NUMBERS[draws.below(NUMBERS.len())].to_le_bytes();
                let len = [1, 4, 8][draws.below(3)].min(file.len() - at);
                file[at..at + len].copy_from_slice(&number[..len]);
            }
            4 => file[at] = b"0123456789[]{}\":,-.eE\\"[draws.below(22)],
            5 if draws.below(4) == 0 => file.truncate(at),
            5 | 6 => {
                let len = (1 + draws.below(32)).min(file.len() - at);
                let copied = file[at..at + len].to_vec();
                let to = draws.below(within);
                file.splice(to..to, copied);
            }
            _ => drop(file.drain(at..(at + 1 + draws.below(16)).min(file.len()))),
        }
    }
}

fn check_mutations(file: &[u8], header: usize, times: usize, body: fn(&[u8])) {
    let mut draws = Draws(file.len() as u64);
    let mut changed = Vec::new();
    for _ in 0..times {
        changed.clear();
        changed.extend_from_slice(file);
        mutate(&mut changed, header, &mut draws);
        bounded(changed.len(), || body(&changed));
    }
}

#[test]
fn fifty_thousand_mutations_of_gguf() {
    let small = everything().build();
    check_mutations(&small, small.len(), 40_000, gguf_body::run);
    let path = Path::new(FIXTURES).join("gguf/llama_f16.gguf");
    check_mutations(&fs::read(path).unwrap(), 10_000, 10_000, gguf_body::run);
}

#[test]
fn fifty_thousand_mutations_of_safetensors() {
    let small = small_safetensors();
    let header = small.len() - 35;
    check_mutations(&small, header, 35_000, safetensors_body::run);
    let index = r#"{"metadata":{"total_size":10},"weight_map":{"a":"a.safetensors","b":"a.safetensors","c":"b.safetensors","d":"b.safetensors"}}"#;
    check_mutations(index.as_bytes(), index.len(), 10_000, safetensors_body::run);
    let path = Path::new(FIXTURES).join("arch/llama_sharded/model-00003-of-00003.safetensors");
    check_mutations(&fs::read(path).unwrap(), 200, 5_000, safetensors_body::run);
}

#[test]
fn bodies_of_the_fuzz_targets_accept_what_is_right() {
    gguf_body::run(&everything().build());
    safetensors_body::run(&small_safetensors());
    for path in fixtures() {
        let file = fs::read(&path).unwrap();
        if is_gguf(&path) { gguf_body::run(&file) } else { safetensors_body::run(&file) }
    }
}

#[test]
fn opening_a_mapped_file_allocates_for_its_header_only() {
    for path in fixtures() {
        let file: &'static [u8] = fs::read(&path).unwrap().leak();
        let header = borders(&*open_static(is_gguf(&path), file).unwrap(), file)[0];
        let (opened, peak_bytes) = peak_of(|| open(&path, LoadMode::Map, &mut no_progress));
        opened.unwrap();
        assert!(peak_bytes < 8 * header + 4096, "{path:?}: {peak_bytes} for a header of {header}");
    }
}
