//! Models split over several GGUF files: `name-00001-of-00003.gguf` and its siblings, each with a `split.no` counted from 0
//! and the same `split.count`.
#![forbid(unsafe_code)]

use super::metadata::Metadata;
use crate::error::LoadError;
use crate::weights::say::unsupported;
use std::path::{Path, PathBuf};

/// What a file says about its place in a set. A file that says nothing is a set of its own.
pub(super) struct Split {
    number: u64,
    count: u64,
    /// Tensors of all files together, where the file tells.
    pub(super) tensors: Option<u64>,
}

impl Split {
    pub(super) fn of(metadata: &Metadata, label: &str) -> Result<Split, LoadError> {
        let field = |key: &str| match metadata.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) => Ok(Some(number)),
                None => Err(LoadError::malformed(label, key, "an integer of at least 0", value.type_name())),
            },
        };
        // Some writers put a count of 0 or 1 into files that are whole.
        let count = field(COUNT)?.unwrap_or(1).max(1);
        let number = field(NUMBER)?.unwrap_or(0);
        let tensors = field(TENSORS)?.filter(|_| count > 1);
        Ok(Split { number, count, tensors })
    }

    /// The file was given as number `index`, from 0, of `parts`.
    pub(super) fn expect(&self, index: usize, parts: usize, label: &str) -> Result<(), LoadError> {
        if self.count != parts as u64 {
            let found = format!("{COUNT} = {} in a set of {parts}", self.count);
            let supported = "all files of a set together, named like model-00001-of-00003.gguf";
            return Err(unsupported(label, "a part of a split model on its own", found, supported));
        }
        if self.number != index as u64 {
            return Err(LoadError::malformed(label, NUMBER, index.to_string(), self.number));
        }
        Ok(())
    }
}

/// The files of the set that `path` belongs to by its name, in order; `path` alone where the name tells of no set.
pub(super) fn files_of(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().and_then(|name| name.to_str());
    match name.and_then(set_of) {
        Some((stem, count)) if count > 1 => {
            (1..=count).map(|number| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf"))).collect()
        }
        _ => vec![path.to_owned()],
    }
}

/// The position in its set, from 1, that a file's name tells.
pub(in crate::weights) fn number_of(name: &str) -> Option<u32> {
    let (rest, _) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    digits(rest.rsplit_once('-')?.1)
}

fn set_of(name: &str) -> Option<(&str, u32)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    digits(number)?;
    Some((stem, digits(count)?))
}

fn digits(text: &str) -> Option<u32> {
    (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

pub(super) const TENSORS: &str = "split.tensors.count";
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_set() {
        let files = files_of(Path::new("dir/m-00002-of-00003.gguf"));
        let expected = ["dir/m-00001-of-00003.gguf", "dir/m-00002-of-00003.gguf", "dir/m-00003-of-00003.gguf"];
        assert_eq!(files, expected.map(PathBuf::from));
        for alone in
            ["m.gguf", "m-00001-of-00001.gguf", "m-1-of-3.gguf", "m-00001-of-0000x.gguf", "-of-.gguf", "m-00001-of-00002.bin"]
        {
            assert_eq!(files_of(Path::new(alone)), [PathBuf::from(alone)], "{alone}");
        }
        assert_eq!(number_of("m-00002-of-00003.gguf"), Some(2));
        assert_eq!(number_of("m.gguf"), None);
    }
}
