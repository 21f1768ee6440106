//! Any bytes as a packed file, as they are or with the sum of its head made to fit: refused with a word, or a model that an engine
//! runs, whatever its numbers come to.
#![allow(unreachable_pub)] // Included by binaries, which export nothing.

use super::digest::digest;
use loquat::weights::{Bytes, Gguf, WeightSource};
use loquat::{Compute, Engine, EngineConfig, ModelFiles, Request, SideTexts, Status};
use std::sync::Arc;

/// The first byte says whether the sum is to be made to fit, and how the model computes.
pub fn run(data: &[u8]) {
    let Some((&how, bytes)) = data.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if how & 1 == 1 {
        seal(&mut bytes);
    }
    let files = match ModelFiles::from_memory("fuzz", bytes, &SideTexts::default()) {
        Ok(files) => files,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    if let Err(error) = files.verify() {
        assert!(!error.to_string().is_empty());
    }
    let config = EngineConfig {
        compute: if how & 2 == 2 { Compute::Exact } else { Compute::Fast },
        tier: (how & 4 == 4).then(|| "scalar".to_owned()),
        cache_tokens: 64,
        max_seqs: 1,
        max_batch: 1,
        step_tokens: 16,
        // What a head says can be large, and a model of that size is none of this test's business.
        memory_limit_bytes: Some(1 << 28),
        ..EngineConfig::default()
    };
    let mut engine = match Engine::new(&files, config) {
        Ok(engine) => engine,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    if let Err(error) = engine.submit(Request::new([1, 2, 3], 2)) {
        return assert!(!error.to_string().is_empty());
    }
    for _ in 0..100 {
        match engine.step() {
            Ok(Status::Stepped) => while engine.next_event().is_some() {},
            Ok(_) => return,
            Err(error) => return assert!(!error.to_string().is_empty()),
        }
    }
    panic!("a request without end");
}

/// Makes the sum of the head fit the head, where both are there.
pub fn seal(bytes: &mut [u8]) {
    let shared: Arc<[u8]> = Arc::from(&*bytes);
    let Ok(gguf) = Gguf::from_bytes("sealed", Bytes::from(shared.clone())) else { return };
    let at = |name: &str| gguf.tensor(name).map(|t| t.bytes.as_ptr().addr() - shared.as_ptr().addr());
    let head = gguf.names().filter_map(at).min().unwrap_or(bytes.len());
    let Some(sums) = at("loquat.checksums").filter(|sums| sums + 16 <= bytes.len()) else { return };
    let sum = digest(&bytes[..head]);
    bytes[sums..sums + 16].copy_from_slice(&sum);
}
