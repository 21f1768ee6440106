//! Files that lie. Each either opens, and then keeps the promises of a source, or is refused with a typed error; none makes
//! the library panic, hang, or allocate for what a header merely announces.

// Tests may.
#![allow(clippy::unwrap_used)]

#[path = "../common/counting.rs"]
mod counting;
#[path = "../common/gguf_writer.rs"]
mod gguf_writer;
#[path = "../common/scratch.rs"]
mod scratch;

mod cuts_and_mutations;
mod gguf;
mod safetensors;
mod shards;

use counting::peak_of;
use loquat::LoadError;
use loquat::weights::{Gguf, LoadMode, Safetensors};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
const MODES: [LoadMode; 2] = [LoadMode::Map, LoadMode::Read];
/// Microseconds in truth; the bound is for a machine that does something else as well.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Runs `f`, which looks at `file_bytes` bytes, and checks its memory and time.
fn bounded<T>(file_bytes: usize, f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let (result, peak_bytes) = peak_of(f);
    assert!(start.elapsed() < AT_ONCE, "{file_bytes} bytes took {:?}", start.elapsed());
    let limit = 8 * file_bytes + (1 << 20);
    assert!(peak_bytes <= limit, "{file_bytes} bytes took {peak_bytes} bytes of memory");
    result
}

fn gguf_error(file: Vec<u8>) -> LoadError {
    bounded(file.len(), || Gguf::from_bytes("hostile", file).unwrap_err())
}

fn safetensors_error(file: Vec<u8>) -> LoadError {
    bounded(file.len(), || Safetensors::from_bytes("hostile", file).unwrap_err())
}

#[track_caller]
fn assert_malformed(error: LoadError, place: &str) {
    assert!(matches!(&error, LoadError::Malformed { at, .. } if at.contains(place)), "{place:?} expected, found: {error}");
}

#[track_caller]
fn assert_unsupported(error: LoadError, word: &str) {
    assert!(
        matches!(&error, LoadError::Unsupported { .. }) && error.to_string().contains(word),
        "{word:?} expected, found: {error}"
    );
}

/// What a count claims.
const HUGE: [u64; 5] = [1 << 60, (1 << 63) - 1, 1 << 63, u64::MAX - 7, u64::MAX];

fn safetensors_file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

fn entry(name: &str, dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}
