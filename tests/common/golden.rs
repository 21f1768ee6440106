//! Golden folders: prompts, greedy tokens and logits made by another implementation.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

pub fn json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

pub fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

/// Tensors of a safetensors file as f32.
pub struct Arrays(Vec<u8>);

impl Arrays {
    pub fn open(path: &Path) -> Self {
        Arrays(fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    pub fn get(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let file = safetensors::SafeTensors::deserialize(&self.0).unwrap();
        let t = file.tensor(name).ok()?;
        assert_eq!(t.dtype(), safetensors::Dtype::F32, "{name}");
        let values = t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Some((t.shape().to_vec(), values))
    }
}

pub struct Greedy {
    pub tokens: Vec<u32>,
    pub margins: Vec<f32>,
}

pub struct Golden {
    pub prompts: Vec<Vec<u32>>,
    pub greedy: Vec<Greedy>,
    pub atol: f32,
    pub arrays: Arrays,
    pub full_logits_prompt: usize,
}

impl Golden {
    /// `folder` holds golden.json and golden.safetensors.
    pub fn open(folder: &Path) -> Self {
        let g = json(&folder.join("golden.json"));
        let greedy = g["greedy"].as_array().unwrap().iter();
        Golden {
            prompts: g["prompts"].as_array().unwrap().iter().map(ids).collect(),
            greedy: greedy.map(|g| Greedy { tokens: ids(&g["tokens"]), margins: floats(&g["top1_minus_top2"]) }).collect(),
            atol: g["suggested_atol_f32"].as_f64().unwrap() as f32,
            arrays: Arrays::open(&folder.join("golden.safetensors")),
            full_logits_prompt: g["full_logits_prompt"].as_u64().unwrap() as usize,
        }
    }
}

/// Fails unless `got` is within `atol` of `want` everywhere; the largest difference.
pub fn close(what: &str, got: &[f32], want: &[f32], atol: f32) -> f32 {
    assert_eq!(got.len(), want.len(), "{what}");
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0f32, |m, d| if d > m || d.is_nan() { d } else { m });
    assert!(worst <= atol, "{what}: off by {worst}, {atol} allowed");
    worst
}

/// Fails where the tokens part before the first near-tie.
pub fn same_greedy(what: &str, got: &[u32], want: &[u32], margins: &[f32], excuse: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    if let Some(i) = (0..want.len()).find(|&i| got[i] != want[i]) {
        assert!(margins[i] < excuse, "{what}: token {i} is {}, not {} (margin {})", got[i], want[i], margins[i]);
    }
}
