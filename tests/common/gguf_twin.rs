//! The GGUF file that a converter would make of a folder of safetensors: names, keys, and what it does to the tensors.

use super::gguf_writer::GgufWriter;
use super::golden::json;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Model type, architecture in GGUF, rows of q and k interleaved.
const ARCHS: &[(&str, &str, bool)] = &[
    ("llama", "llama", true),
    ("mixtral", "llama", true),
    ("granite", "granite", true),
    ("smollm3", "smollm3", true),
    ("qwen2", "qwen2", false),
    ("qwen3", "qwen3", false),
    ("qwen3_moe", "qwen3moe", false),
    ("gemma2", "gemma2", false),
    ("gemma3_text", "gemma3", false),
    ("phi3", "phi3", false),
    ("gpt2", "gpt2", false),
    ("gpt_bigcode", "starcoder", false),
    ("gpt_neox", "gptneox", false),
    ("falcon", "falcon", false),
    ("olmo2", "olmo2", false),
    ("gpt_oss", "gpt-oss", false),
    ("deepseek_v2", "deepseek2", false),
    ("deepseek_v3", "deepseek2", false),
];

/// Fields of config.json (a dot nests) and what GGUF calls them; the first that is there counts.
const KEYS: &[(&[&str], &str)] = &[
    (&["hidden_size", "n_embd"], "embedding_length"),
    (&["num_hidden_layers", "n_layer"], "block_count"),
    (&["num_attention_heads", "n_head"], "attention.head_count"),
    (&["num_key_value_heads"], "attention.head_count_kv"),
    (&["max_position_embeddings", "n_positions"], "context_length"),
    (&["intermediate_size", "ffn_hidden_size", "n_inner"], "feed_forward_length"),
    (&["rms_norm_eps"], "attention.layer_norm_rms_epsilon"),
    (&["layer_norm_eps", "layer_norm_epsilon"], "attention.layer_norm_epsilon"),
    (&["rope_theta", "rotary_emb_base"], "rope.freq_base"),
    (&["sliding_window"], "attention.sliding_window"),
    (&["attn_logit_softcapping"], "attn_logit_softcapping"),
    (&["final_logit_softcapping"], "final_logit_softcapping"),
    (&["embedding_multiplier"], "embedding_scale"),
    (&["residual_multiplier"], "residual_scale"),
    (&["attention_multiplier"], "attention.scale"),
    (&["logits_scaling"], "logit_scale"),
    (&["num_local_experts", "num_experts", "n_routed_experts"], "expert_count"),
    (&["num_experts_per_tok"], "expert_used_count"),
    (&["moe_intermediate_size"], "expert_feed_forward_length"),
    (&["n_shared_experts"], "expert_shared_count"),
    (&["routed_scaling_factor"], "expert_weights_scale"),
    (&["first_k_dense_replace"], "leading_dense_block_count"),
    (&["q_lora_rank"], "attention.q_lora_rank"),
    (&["kv_lora_rank"], "attention.kv_lora_rank"),
    (&["v_head_dim"], "attention.value_length_mla"),
    (&["qk_rope_head_dim"], "rope.dimension_count"),
    (&["rope_scaling.factor"], "rope.scaling.factor"),
    (
        &["rope_scaling.original_max_position_embeddings", "original_max_position_embeddings"],
        "rope.scaling.original_context_length",
    ),
    // The last ones are this test's own: no published model needs them.
    (&["swiglu_limit"], "swiglu_limit"),
    (&["sliding_window_pattern"], "sliding_window_pattern"),
];

/// Ends of names in safetensors and in GGUF.
const NAMES: &[(&str, &str)] = &[
    ("embed_tokens.weight", "token_embd.weight"),
    ("wte.weight", "token_embd.weight"),
    ("word_embeddings.weight", "token_embd.weight"),
    ("embed_in.weight", "token_embd.weight"),
    ("wpe.weight", "position_embd.weight"),
    ("lm_head.weight", "output.weight"),
    ("embed_out.weight", "output.weight"),
    ("ln_f.", "output_norm."),
    ("final_layer_norm.", "output_norm."),
    ("norm.weight", "output_norm.weight"),
    ("input_layernorm.", "attn_norm."),
    ("ln_1.", "attn_norm."),
    ("ln_2.", "ffn_norm."),
    ("pre_feedforward_layernorm.", "ffn_norm."),
    ("post_feedforward_layernorm.", "post_ffw_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("attn.q_norm.", "attn_q_norm."),
    ("attn.k_norm.", "attn_k_norm."),
    ("attn.q_proj.", "attn_q."),
    ("attn.k_proj.", "attn_k."),
    ("attn.v_proj.", "attn_v."),
    ("attn.o_proj.", "attn_output."),
    ("attn.qkv_proj.", "attn_qkv."),
    ("attn.c_attn.", "attn_qkv."),
    ("attn.c_proj.", "attn_output."),
    ("query_key_value.", "attn_qkv."),
    ("attention.dense.", "attn_output."),
    ("attn.sinks", "attn_sinks.weight"),
    ("q_a_proj.", "attn_q_a."),
    ("q_a_layernorm.", "attn_q_a_norm."),
    ("q_b_proj.", "attn_q_b."),
    ("kv_a_proj_with_mqa.", "attn_kv_a_mqa."),
    ("kv_a_layernorm.", "attn_kv_a_norm."),
    ("shared_experts.gate_proj.", "ffn_gate_shexp."),
    ("shared_experts.up_proj.", "ffn_up_shexp."),
    ("shared_experts.down_proj.", "ffn_down_shexp."),
    ("experts.gate_proj.", "ffn_gate_exps."),
    ("experts.up_proj.", "ffn_up_exps."),
    ("experts.down_proj.", "ffn_down_exps."),
    ("experts.w1.", "ffn_gate_exps."),
    ("experts.w3.", "ffn_up_exps."),
    ("experts.w2.", "ffn_down_exps."),
    ("mlp.gate_up_proj.", "ffn_up."),
    ("mlp.gate_proj.", "ffn_gate."),
    ("mlp.up_proj.", "ffn_up."),
    ("mlp.down_proj.", "ffn_down."),
    ("mlp.c_fc.", "ffn_up."),
    ("mlp.c_proj.", "ffn_down."),
    ("dense_h_to_4h.", "ffn_up."),
    ("dense_4h_to_h.", "ffn_down."),
    ("e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.router.", "ffn_gate_inp."),
    ("mlp.gate.", "ffn_gate_inp."),
    ("block_sparse_moe.gate.", "ffn_gate_inp."),
];

/// Rows of numbers, all as f32: what the formats of the fixtures hold, exactly.
#[derive(Clone)]
struct Tensor {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Tensor {
    /// Columns become rows, in each matrix of a stack.
    fn transposed(&self) -> Tensor {
        let (r, c) = (self.shape[self.shape.len() - 2], self.shape[self.shape.len() - 1]);
        let turn = |m: &[f32]| -> Vec<f32> { (0..r * c).map(|i| m[i % r * c + i / r]).collect() };
        let mut shape = self.shape.clone();
        let n = shape.len();
        shape.swap(n - 2, n - 1);
        Tensor { shape, values: self.values.chunks_exact(r * c).flat_map(turn).collect() }
    }

    /// Row `i` is row `from(i)`.
    fn rows(&self, count: usize, from: impl Fn(usize) -> usize) -> Tensor {
        let width = self.values.len() / self.shape[0];
        let values = (0..count).flat_map(|i| self.values[from(i) * width..][..width].to_vec()).collect();
        Tensor { shape: [&[count], &self.shape[1..]].concat(), values }
    }
}

/// The file's bytes, or none for a family that GGUF does not have.
pub fn twin(folder: &Path) -> Option<Vec<u8>> {
    let (new, old) = (json(&folder.join("config.json")), json(&folder.join("config_v4.json")));
    let get = |field: &str| -> Value {
        let at = |c: &Value| field.split('.').try_fold(c.clone(), |v, f| v.get(f).cloned()).filter(|v| !v.is_null());
        at(&new).or_else(|| at(&old)).unwrap_or(Value::Null)
    };
    let count = |field: &str| get(field).as_u64().unwrap() as usize;
    let model_type = get("model_type").as_str().unwrap().to_owned();
    let (_, arch, interleaved) = *ARCHS.iter().find(|(t, ..)| *t == model_type)?;
    let mut w = GgufWriter::new().str("general.architecture", arch);
    let key = |name: &str| format!("{arch}.{name}");
    for (fields, name) in KEYS {
        let value = fields.iter().map(|f| get(f)).find(|v| !v.is_null());
        w = match value {
            Some(v) if v.is_u64() && !name.contains("scale") && !name.contains("freq") && !name.contains("cap") => {
                w.u32(&key(name), v.as_u64().unwrap() as u32)
            }
            Some(v) if v.is_number() => w.raw(&key(name), 6, &(v.as_f64().unwrap() as f32).to_le_bytes()),
            _ => w,
        };
    }
    let heads = get("num_attention_heads").as_u64().or_else(|| get("n_head").as_u64()).unwrap() as usize;
    let hidden = get("hidden_size").as_u64().or_else(|| get("n_embd").as_u64()).unwrap() as usize;
    let latent = !get("kv_lora_rank").is_null();
    let head_dim = if latent { 0 } else { get("head_dim").as_u64().map_or(hidden / heads, |n| n as usize) };
    let kv_heads = match (get("multi_query").as_bool(), get("num_key_value_heads").as_u64()) {
        (Some(true), _) => 1,
        (_, n) => n.map_or(heads, |n| n as usize),
    };
    if !latent {
        w = w.u32(&key("attention.key_length"), head_dim as u32).u32(&key("attention.value_length"), head_dim as u32);
        if get("num_key_value_heads").is_null() {
            w = w.u32(&key("attention.head_count_kv"), kv_heads as u32);
        }
        for part in ["partial_rotary_factor", "rotary_pct"] {
            if let Some(part) = get(part).as_f64() {
                w = w.u32(&key("rope.dimension_count"), (head_dim as f64 * part) as u32);
            }
        }
    }
    let mut tensors = read(folder);
    match (get("rope_scaling.type").as_str().or(get("rope_scaling.rope_type").as_str()), latent) {
        (Some("longrope"), _) => {
            for (field, name) in [("short_factor", "rope_factors_short"), ("long_factor", "rope_factors_long")] {
                let list = get(&format!("rope_scaling.{field}"));
                let values: Vec<f32> = list.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
                tensors.insert(format!("{name}.weight"), Tensor { shape: vec![values.len()], values });
            }
        }
        (Some(kind), _) => w = w.str(&key("rope.scaling.type"), kind),
        (None, _) => {}
    }
    if latent {
        let all = get("rope_scaling.mscale_all_dim").as_f64().unwrap() * 0.1;
        let v3 = model_type == "deepseek_v3";
        w = w
            .raw(&key("rope.scaling.yarn_log_multiplier"), 6, &(all as f32).to_le_bytes())
            .u32(&key("attention.key_length_mla"), (count("qk_nope_head_dim") + count("qk_rope_head_dim")) as u32)
            .u32(&key("expert_gating_func"), if v3 { 2 } else { 1 })
            .raw(&key("expert_weights_norm"), 7, &[u8::from(v3)]);
        if count("n_group") > 1 {
            w = w.u32(&key("expert_group_count"), count("n_group") as u32);
            w = w.u32(&key("expert_group_used_count"), count("topk_group") as u32);
        }
    }
    if let Some(scalar) = get("query_pre_attn_scalar").as_f64() {
        // As no published model has it; 1 over its root is what is computed with.
        w = w.raw(&key("attention.scale"), 6, &(1.0 / (scalar as f32).sqrt()).to_le_bytes());
    }
    for (name, tensor) in convert(tensors, &model_type, (heads, kv_heads, head_dim), interleaved, &count) {
        let dims: Vec<u64> = tensor.shape.iter().map(|d| *d as u64).collect();
        let bytes: Vec<u8> = tensor.values.iter().flat_map(|v| v.to_le_bytes()).collect();
        w = w.tensor(&name, &dims, 0, &bytes);
    }
    Some(w.build())
}

fn convert(
    tensors: BTreeMap<String, Tensor>,
    model_type: &str,
    (heads, kv_heads, head_dim): (usize, usize, usize),
    interleaved: bool,
    count: &impl Fn(&str) -> usize,
) -> BTreeMap<String, Tensor> {
    let mut out = BTreeMap::<String, Tensor>::new();
    for (name, mut t) in tensors {
        if name.starts_with("rope_factors") {
            out.insert(name, t);
            continue;
        }
        // Experts lie next to each other under one name.
        let parts: Vec<&str> = name.split('.').collect();
        let layer = parts.windows(2).find(|p| ["layers", "h"].contains(&p[0])).map(|p| p[1].to_owned());
        let expert = parts.windows(2).find(|p| p[0] == "experts").and_then(|p| p[1].parse::<usize>().ok());
        let plain = match expert {
            Some(n) => name.replace(&format!("experts.{n}."), "experts."),
            None => name.clone(),
        };
        let prefix = layer.map_or(String::new(), |l| format!("blk.{l}."));
        if model_type == "gpt2" && t.shape.len() == 2 && name.contains(".c_") {
            t = t.transposed();
        }
        if model_type.starts_with("gemma") && name.ends_with("norm.weight") {
            t.values.iter_mut().for_each(|v| *v += 1.0);
        }
        if interleaved && (name.contains("q_proj") || name.contains("k_proj")) {
            let rows = t.shape[0];
            t = t.rows(rows, |i| i / head_dim * head_dim + i % head_dim % 2 * (head_dim / 2) + i % head_dim / 2);
        }
        if name.contains("query_key_value") {
            // Group by group becomes all queries, all keys, all values.
            let queries = heads / kv_heads;
            let from = |i: usize| {
                let (head, row) = (i / head_dim, i % head_dim);
                let (group, at) = match head {
                    h if h < heads => (h / queries, h % queries),
                    h if h < heads + kv_heads => (h - heads, queries),
                    h => (h - heads - kv_heads, queries + 1),
                };
                (group * (queries + 2) + at) * head_dim + row
            };
            t = t.rows((heads + 2 * kv_heads) * head_dim, from);
        }
        if name.contains("kv_b_proj") {
            let (nope, value) = (count("qk_nope_head_dim"), count("v_head_dim"));
            let rank = t.shape[1];
            let both = nope + value;
            let mut key = t.rows(heads * nope, |i| i / nope * both + i % nope);
            key.shape = vec![heads, nope, rank];
            let mut v = t.rows(heads * value, |i| i / value * both + nope + i % value);
            v.shape = vec![heads, value, rank];
            out.insert(format!("{prefix}attn_k_b.weight"), key.transposed());
            out.insert(format!("{prefix}attn_v_b.weight"), v);
            continue;
        }
        if model_type == "gpt_oss" && name.contains("mlp.experts") {
            let bias = name.ends_with("_bias");
            let end = if bias { "bias" } else { "weight" };
            let t = if bias { t } else { t.transposed() };
            if name.contains("down_proj") {
                out.insert(format!("{prefix}ffn_down_exps.{end}"), t);
                continue;
            }
            let (experts, rows) = (t.shape[0], t.shape[1]);
            let flat = Tensor { shape: [&[experts * rows], &t.shape[2..]].concat(), values: t.values.clone() };
            for (first, to) in [(0, "ffn_gate_exps"), (1, "ffn_up_exps")] {
                let mut half = flat.rows(experts * rows / 2, |i| 2 * i + first);
                half.shape = [&[experts, rows / 2], &t.shape[2..]].concat();
                out.insert(format!("{prefix}{to}.{end}"), half);
            }
            continue;
        }
        let outside = |to: &str| ["token", "position", "output"].iter().any(|start| to.starts_with(start));
        let (from, to) = NAMES
            .iter()
            .filter(|(from, to)| plain.contains(from) && prefix.is_empty() == outside(to))
            .max_by_key(|(from, _)| from.len())
            .unwrap_or_else(|| panic!("{name}"));
        let end = &plain[plain.find(from).unwrap() + from.len()..];
        // What stands after attention is a norm on its result in some families, whatever it is called.
        let to = match (*to, model_type) {
            ("ffn_norm.", "gemma2" | "gemma3_text" | "olmo2" | "gpt_oss") if from.starts_with("post_attention") => {
                "post_attention_norm."
            }
            (to, _) => to,
        };
        let name = format!("{prefix}{to}{end}");
        match (expert, out.get_mut(&name)) {
            (Some(n), Some(stack)) => {
                assert_eq!(stack.shape[0], n, "experts in order");
                stack.shape[0] += 1;
                stack.values.extend(t.values);
            }
            (Some(_), None) => _ = out.insert(name, Tensor { shape: [&[1], &t.shape[..]].concat(), values: t.values }),
            (None, _) => _ = out.insert(name, t),
        }
    }
    out
}

fn read(folder: &Path) -> BTreeMap<String, Tensor> {
    let mut out = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap();
        if !(name.starts_with("model") && name.ends_with(".safetensors")) {
            continue;
        }
        let bytes = std::fs::read(&entry).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, t) in file.tensors() {
            let values = match t.dtype() {
                safetensors::Dtype::F32 => t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                safetensors::Dtype::BF16 => {
                    t.data().as_chunks::<2>().0.iter().map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)).collect()
                }
                other => panic!("{name}: {other:?}"),
            };
            out.insert(name.clone(), Tensor { shape: t.shape().to_vec(), values });
        }
    }
    out
}
