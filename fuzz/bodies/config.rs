//! Bytes as a model's configuration, as config.json and as keys of a GGUF file: it is refused with a word, or it means a model
//! of sane numbers.
#![allow(unreachable_pub)] // Included by binaries, which export nothing.

use loquat::arch::{Arch, Config, Ffn, ModelSpec, Naming};
use serde_json::Value;

/// The whole as JSON; and, where it is an object, its fields as GGUF keys of the architecture that `model_type` names.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let config = match Config::from_json(&text) {
        Ok(config) => config,
        Err(error) => return assert!(error.to_string().contains("config.json")),
    };
    check(&config, Naming::HuggingFace);
    for field in ["eos_token_id", "bos_token_id"] {
        if let Err(error) = config.token_ids(field) {
            assert!(error.to_string().contains(field), "{error}");
        }
    }
    let Ok(Value::Object(fields)) = serde_json::from_str(&text) else { unreachable!("it was an object a moment ago") };
    let arch = fields.get("model_type").and_then(Value::as_str).unwrap_or("llama").to_owned();
    let entries = fields.into_iter().map(|(key, value)| (if key.contains('.') { format!("{arch}.{key}") } else { key }, value));
    check(&Config::from_gguf(&arch, entries), Naming::Gguf);
}

fn check(config: &Config, naming: Naming) {
    match Arch::find(config, naming).and_then(|arch| arch.read(config, naming)) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(spec) => sane(&spec),
    }
}

/// What the forward pass relies on.
fn sane(spec: &ModelSpec) {
    assert!((1..=1 << 12).contains(&spec.layers.len()) && (1..=1 << 30).contains(&spec.context));
    assert!((1..=1 << 20).contains(&spec.hidden) && (1..=1 << 24).contains(&spec.vocab));
    assert!(usable(spec.final_norm.eps) && usable(spec.embed_scale) && usable(spec.head.scale));
    for layer in &spec.layers {
        let dims = layer.attn.dims();
        assert!(dims.heads >= 1 && dims.heads.is_multiple_of(dims.kv_heads) && usable(layer.attn.scale));
        assert!(layer.attn.rope.is_none_or(|r| spec.ropes[r].rotary <= dims.qk_dim), "{:?}", layer.attn);
        assert!(usable(layer.wiring.residual_scale));
        let inside = match &layer.ffn {
            Ffn::Gated { intermediate, .. } | Ffn::Plain { intermediate, .. } => *intermediate,
            Ffn::Moe { route, intermediate, .. } => {
                assert!((1..=route.experts).contains(&route.top_k) && usable(route.scale), "{route:?}");
                if let Some(g) = route.groups {
                    let room = route.experts / g.count.max(1) * g.top;
                    assert!(g.count >= 1 && route.experts.is_multiple_of(g.count) && g.top <= g.count, "{route:?}");
                    assert!(g.top >= 1 && route.top_k <= room && g.best >= 1, "{route:?}");
                }
                *intermediate
            }
            other => panic!("a new kind of feed-forward: {other:?}"),
        };
        assert!((1..=1 << 24).contains(&inside));
    }
    for rope in &spec.ropes {
        assert!(rope.rotary >= 2 && rope.rotary.is_multiple_of(2), "{rope:?}");
        assert!(usable(rope.attention_factor()), "{rope:?}");
        let mut out = vec![f32::NAN; rope.rotary / 2];
        for total in [1, spec.context / 2 + 1, spec.context] {
            rope.frequencies(total, &mut out);
            assert!(out.iter().all(|f| f.is_finite() && *f >= 0.0), "{rope:?} at {total}: {out:?}");
        }
    }
}

fn usable(x: f32) -> bool {
    x.is_finite() && x > 0.0
}
