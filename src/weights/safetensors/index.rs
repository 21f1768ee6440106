//! `model.safetensors.index.json`: which tensor lies in which shard. Believed only where the shards agree.
//!
//! Invariant: tensor names are distinct, and each shard is the plain name of a file, so that none can lead out of the folder.
#![forbid(unsafe_code)]

use super::json::{Object, OnPair, Slot, Text, parse_object};
use crate::error::LoadError;
use crate::weights::say::{clipped, quoted};
use crate::weights::table::{Entry, NameIndex};
use serde::de::{Error, MapAccess};
use std::collections::BTreeMap;

/// A parsed index.
pub(super) struct Index {
    /// File names in the order in which the index first names them.
    pub(super) shards: Vec<Box<str>>,
    tensors: Vec<(Box<str>, usize)>,
    by_name: NameIndex,
}

impl Index {
    pub(super) fn parse(label: &str, text: &str) -> Result<Index, LoadError> {
        let mut raw = RawIndex::default();
        parse_object(text, &mut raw)
            .map_err(|e| LoadError::malformed(label, "index", "the JSON of an index", clipped(&e.to_string())))?;
        let Some(WeightMap { shards, tensors, .. }) = raw.map else {
            return Err(LoadError::malformed(label, "index", "a weight_map", "none"));
        };
        if let Some(shard) = shards.iter().find(|shard| !is_plain_name(shard)) {
            return Err(LoadError::malformed(label, "weight_map", "names of files in the same folder", quoted(shard)));
        }
        let by_name = NameIndex::new(tensors.len(), |i| &tensors[i].0).map_err(|i| {
            LoadError::malformed(label, format!("weight_map: tensor {}", quoted(&tensors[i].0)), "one entry", "two")
        })?;
        Ok(Index { shards, tensors, by_name })
    }

    pub(super) fn missing_shard(&self, label: &str, shard: &str) -> LoadError {
        LoadError::malformed(label, format!("shard {}", quoted(shard)), "a file in the same folder", "no such file")
    }

    /// Every tensor of shard `at` is one that the index looks for there.
    pub(super) fn check_shard(&self, label: &str, at: usize, entries: &[Entry]) -> Result<(), LoadError> {
        for entry in entries {
            let listed = self.by_name.find(&entry.name, |i| &self.tensors[i].0).map(|i| self.tensors[i].1);
            if listed != Some(at) {
                let expected = match listed {
                    Some(other) => format!("only in shard {}", quoted(&self.shards[other])),
                    None => "listed, as its shard is".to_owned(),
                };
                let found = format!("in shard {}", quoted(&self.shards[at]));
                return Err(LoadError::malformed(label, format!("tensor {}", quoted(&entry.name)), expected, found));
            }
        }
        Ok(())
    }

    /// Every tensor of the index was found. `all` are the tensors of all shards, which [`check_shard`](Self::check_shard) has
    /// seen, so that counting them is enough until one is missing.
    pub(super) fn check_count(&self, label: &str, all: &[Entry]) -> Result<(), LoadError> {
        let found = NameIndex::new(all.len(), |i| &all[i].name).map_err(|i| {
            LoadError::malformed(label, format!("tensor {}", quoted(&all[i].name)), "one tensor of that name", "two")
        })?;
        match self.tensors.iter().find(|(name, _)| found.find(name, |i| &all[i].name).is_none()) {
            None => Ok(()),
            Some((name, shard)) => {
                let expected = format!("in shard {}", quoted(&self.shards[*shard]));
                Err(LoadError::malformed(label, format!("tensor {}", quoted(name)), expected, "not in that file's header"))
            }
        }
    }
}

/// One component, the same on every system: `\` separates and `:` names a drive or a stream on Windows.
fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', ':', '\0'])
}

#[derive(Default)]
struct RawIndex {
    map: Option<WeightMap>,
}

impl OnPair for RawIndex {
    fn pair<'de, A: MapAccess<'de>>(&mut self, key: &str, value: Slot<'_, 'de, A>) -> Result<(), A::Error> {
        if key != "weight_map" {
            return value.skip();
        }
        let mut map = WeightMap::default();
        value.read(Object(&mut map))?;
        match self.map.replace(map) {
            None => Ok(()),
            Some(_) => Err(A::Error::custom("weight_map stands there twice")),
        }
    }
}

#[derive(Default)]
struct WeightMap {
    shards: Vec<Box<str>>,
    numbers: BTreeMap<Box<str>, usize>,
    tensors: Vec<(Box<str>, usize)>,
}

impl OnPair for WeightMap {
    fn pair<'de, A: MapAccess<'de>>(&mut self, key: &str, value: Slot<'_, 'de, A>) -> Result<(), A::Error> {
        let WeightMap { shards, numbers, tensors } = self;
        let shard = value.read(Text(|shard: &str| match numbers.get(shard) {
            Some(&number) => number,
            None => {
                numbers.insert(shard.into(), shards.len());
                shards.push(shard.into());
                shards.len() - 1
            }
        }))?;
        tensors.push((key.into(), shard));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_shards() {
        for name in ["model-00001-of-00003.safetensors", "..hidden", "a b"] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in ["", ".", "..", "../x", "/x", "a/b", "a\\b", "C:x", "x\0"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }
}
