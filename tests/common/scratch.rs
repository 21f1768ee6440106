//! A folder of its own for a test that needs files, gone when the test ends.
// Each test file that includes this uses its own part, and a test binary exports nothing.
#![allow(dead_code, unreachable_pub)]

use std::fs;
use std::path::{Path, PathBuf};

pub struct Scratch(PathBuf);

impl Scratch {
    /// `name` is the test's, distinct within its binary.
    pub fn new(name: &str) -> Scratch {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        Scratch(folder)
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    pub fn write(&self, file: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(file);
        fs::write(&path, bytes).unwrap();
        path
    }

    pub fn folder(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
