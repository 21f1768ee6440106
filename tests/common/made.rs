//! Models made up on the spot: config.json as a text, tensors from a seed or given.

use loquat::FormatId;
use loquat::model::{ModelFiles, SideTexts};
use loquat::weights::{Fill, Synthetic, SyntheticTensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sizes of a made-up Llama.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub vocab: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub intermediate: usize,
    pub context: usize,
}

impl Sizes {
    pub const TINY: Sizes = Sizes { vocab: 32, hidden: 16, layers: 2, heads: 2, intermediate: 24, context: 64 };

    pub fn config(&self) -> Value {
        json!({
            "model_type": "llama", "vocab_size": self.vocab, "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        })
    }

    /// Names and shapes of every tensor, the head included.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (h, i) = (self.hidden, self.intermediate);
        let mut list = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab, h]),
            ("model.norm.weight".to_owned(), vec![h]),
            ("lm_head.weight".to_owned(), vec![self.vocab, h]),
        ];
        for l in 0..self.layers {
            for (name, shape) in [
                ("input_layernorm", vec![h]),
                ("self_attn.q_proj", vec![h, h]),
                ("self_attn.k_proj", vec![h, h]),
                ("self_attn.v_proj", vec![h, h]),
                ("self_attn.o_proj", vec![h, h]),
                ("post_attention_layernorm", vec![h]),
                ("mlp.gate_proj", vec![i, h]),
                ("mlp.up_proj", vec![i, h]),
                ("mlp.down_proj", vec![h, i]),
            ] {
                list.push((format!("model.layers.{l}.{name}.weight"), shape));
            }
        }
        list
    }

    /// A model out of a seed, its matrices stored as `format`.
    pub fn synthetic(&self, format: FormatId) -> ModelFiles {
        let make = |(name, shape): (String, Vec<usize>)| {
            let vector = shape.len() == 1;
            let fill = if vector { Fill::Constant(1.0) } else { Fill::Normal(0.05) };
            SyntheticTensor { name, shape, format: if vector { FormatId::F32 } else { format }, fill }
        };
        let weights = Synthetic::new(1, self.tensors().into_iter().map(make).collect()).unwrap();
        let texts = SideTexts { config: Some(self.config().to_string()), ..SideTexts::default() };
        ModelFiles::from_texts(Arc::new(weights), &texts, false).unwrap()
    }
}

/// Tensors of a safetensors file under construction.
#[derive(Clone)]
pub struct Tensors(pub BTreeMap<String, (Vec<usize>, Vec<f32>)>);

impl Tensors {
    /// Those of a Llama, with values that differ everywhere.
    pub fn of(sizes: &Sizes) -> Self {
        let mut random = super::text::Random(7);
        let mut value = || (random.below(2001) as f32 - 1000.0) / 2500.0;
        let list = sizes.tensors().into_iter();
        Tensors(list.map(|(name, s)| (name, (s.clone(), (0..s.iter().product()).map(|_| value()).collect()))).collect())
    }

    pub fn file(&self) -> Vec<u8> {
        let bytes: Vec<(&str, &[usize], Vec<u8>)> = self
            .0
            .iter()
            .map(|(name, (shape, values))| {
                (name.as_str(), shape.as_slice(), values.iter().flat_map(|v| v.to_le_bytes()).collect())
            })
            .collect();
        let views = bytes.iter().map(|(name, shape, bytes)| {
            (*name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), bytes).unwrap())
        });
        safetensors::serialize(views, None).unwrap()
    }
}
