//! Layers by how far back their attention reaches: those that reach equally far share a pool of cache blocks and a block
//! table. Knows no pool and no sequence.
//!
//! Invariant: a group's window is the longest of its layers', so that nothing is given up that one of them still reads.
#![forbid(unsafe_code)]

use super::spec::ModelSpec;
use crate::ids::MAX_GROUPS;

/// Which layers share a pool of cache blocks: see [`ModelSpec::groups`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerGroups {
    windows: Vec<Option<usize>>,
    of: Vec<usize>,
}

impl LayerGroups {
    /// The window of each group, 1 to [`MAX_GROUPS`] of them, the farthest reach first: no window at all comes before any.
    pub fn windows(&self) -> &[Option<usize>] {
        &self.windows
    }

    /// The group of a layer.
    ///
    /// # Panics
    /// Where there is no such layer.
    pub fn group_of(&self, layer: usize) -> usize {
        self.of[layer]
    }

    /// The group of each layer, in order.
    pub fn layers(&self) -> &[usize] {
        &self.of
    }
}

impl ModelSpec {
    /// Groups the layers by their windows. One that no position within the context can leave is none. Where there are more
    /// than [`MAX_GROUPS`] windows, the shortest join the next longer one.
    pub fn groups(&self) -> LayerGroups {
        let reach = |window: Option<usize>| window.filter(|w| *w < self.context);
        let mut windows: Vec<_> = self.layers.iter().map(|l| reach(l.attn.window)).collect();
        // Without layers there is one group of none.
        if windows.is_empty() {
            windows.push(None);
        }
        windows.sort_by_key(|w| std::cmp::Reverse(w.unwrap_or(usize::MAX)));
        windows.dedup();
        windows.truncate(MAX_GROUPS);
        let group = |window| windows.iter().position(|w| *w == window).unwrap_or(windows.len() - 1);
        let of = self.layers.iter().map(|l| group(reach(l.attn.window))).collect();
        LayerGroups { windows, of }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Arch, Config, Naming};

    fn spec(context: usize, windows: &[Option<usize>]) -> ModelSpec {
        let config = format!(
            r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
                "intermediate_size": 8, "max_position_embeddings": {context}, "rms_norm_eps": 1e-5}}"#
        );
        let config = Config::from_json(&config).unwrap();
        let mut spec = (Arch::find(&config, Naming::HuggingFace).unwrap().spec)(&config).unwrap();
        let layer = spec.layers.remove(0);
        for &window in windows {
            spec.layers.push(layer.clone());
            spec.layers.last_mut().unwrap().attn.window = window;
        }
        spec
    }

    fn check(context: usize, layers: &[Option<usize>], windows: &[Option<usize>], of: &[usize]) {
        let spec = spec(context, layers);
        let groups = spec.groups();
        assert_eq!((groups.windows(), groups.layers()), (windows, of), "{layers:?}");
        for (l, layer) in spec.layers.iter().enumerate() {
            let (reach, group) = (layer.attn.window.unwrap_or(usize::MAX), groups.windows()[groups.group_of(l)]);
            // What a layer reads of any position is what its group keeps for it.
            assert!(group.unwrap_or(usize::MAX).min(context) >= reach.min(context), "layer {l} of {layers:?}");
        }
    }

    #[test]
    fn layers_that_reach_equally_far_share_a_group() {
        check(100, &[], &[None], &[]);
        check(100, &[None; 3], &[None], &[0, 0, 0]);
        check(100, &[Some(9); 2], &[Some(9)], &[0, 0]);
        check(100, &[Some(9), None, Some(9)], &[None, Some(9)], &[1, 0, 1]);
        check(100, &[Some(9), Some(40), None, Some(1)], &[None, Some(40), Some(9), Some(1)], &[2, 1, 0, 3]);
    }

    #[test]
    fn a_window_that_nothing_leaves_is_none() {
        // The last position, 99, sees all 100.
        check(100, &[Some(99), Some(100), Some(1 << 30), None], &[None, Some(99)], &[1, 0, 0, 0]);
        check(100, &[Some(100); 2], &[None], &[0, 0]);
    }

    #[test]
    fn too_many_windows_join_the_next_longer() {
        let layers = [2, 3, 5, 8, 13, 21].map(Some);
        check(100, &layers, &[Some(21), Some(13), Some(8), Some(5)], &[3, 3, 3, 2, 1, 0]);
        check(100, &[Some(2), None, Some(5), Some(8), Some(5), Some(3)], &[None, Some(8), Some(5), Some(3)], &[3, 0, 2, 1, 2, 3]);
    }
}
