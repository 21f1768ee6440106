//! What the sampler remembers of one sequence: its parameters, its length, and, where penalties or n-grams ask for it,
//! its tokens and how often each stands in the penalty window.
//!
//! Invariant: the counts equal a recount of the last `penalty_window` tokens, after any mix of pushes and truncations.
#![forbid(unsafe_code)]

use super::draw::Draws;
use super::params::SamplingParams;
use crate::error::SubmitError;
use crate::ids::TokenId;

/// One sequence's side of sampling. Push every token, the prompt's too; truncate to take guesses back.
///
/// Cost: `push` and each truncated token are O(1). Memory: 20 to 36 bytes a token of capacity where penalties are on,
/// 4 where only `no_repeat_ngram` is, none otherwise. All of it is allocated at construction.
#[derive(Debug)]
pub struct SamplerState {
    params: SamplingParams,
    len: usize,
    /// All tokens; empty where nothing asks for them.
    tokens: Vec<TokenId>,
    counts: Counts,
    remembers: bool,
}

impl SamplerState {
    /// A sequence without tokens, for a vocabulary of `vocab` and at most `capacity_tokens` tokens, prompt included.
    /// More may be pushed, at the price of an allocation.
    ///
    /// # Errors
    /// [`SubmitError::Parameter`], as [`SamplingParams::validate`] finds it.
    pub fn new(params: SamplingParams, vocab: usize, capacity_tokens: usize) -> Result<Self, SubmitError> {
        params.validate(vocab)?;
        let remembers = params.penalises() || params.no_repeat_ngram > 0;
        let distinct = if params.penalises() { capacity_tokens.min(params.penalty_window).min(vocab) } else { 0 };
        Ok(SamplerState {
            len: 0,
            tokens: Vec::with_capacity(if remembers { capacity_tokens } else { 0 }),
            counts: Counts::with_capacity(distinct),
            remembers,
            params,
        })
    }

    /// The parameters, as they were accepted.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Tokens pushed and not truncated: the position of the token that is sampled next.
    pub fn position(&self) -> usize {
        self.len
    }

    /// The numbers that the seed stands for.
    pub fn draws(&self) -> Draws {
        Draws::new(self.params.seed)
    }

    /// Appends a token.
    pub fn push(&mut self, token: TokenId) {
        self.len += 1;
        if !self.remembers {
            return;
        }
        self.tokens.push(token);
        if self.params.penalises() {
            self.counts.add(token);
            if self.len > self.params.penalty_window {
                self.counts.remove(self.tokens[self.len - 1 - self.params.penalty_window]);
            }
        }
    }

    /// Appends tokens, in order.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        tokens.iter().for_each(|&token| self.push(token));
    }

    /// Takes back what was pushed beyond `len` tokens; does nothing where there are no more than that.
    pub fn truncate(&mut self, len: usize) {
        if !self.remembers {
            self.len = self.len.min(len);
            return;
        }
        while self.len > len {
            if self.params.penalises() {
                if self.len > self.params.penalty_window {
                    self.counts.add(self.tokens[self.len - 1 - self.params.penalty_window]);
                }
                self.counts.remove(self.tokens[self.len - 1]);
            }
            self.tokens.pop();
            self.len -= 1;
        }
    }

    /// True where the row has to be changed before it is looked at.
    pub(super) fn adjusts(&self) -> bool {
        let p = &self.params;
        !p.logit_bias.is_empty() || !p.banned.is_empty() || self.remembers && self.len > 0
    }

    /// Bias, bans, n-grams and penalties, in this order. A finite logit stays finite unless it is banned: an extreme
    /// penalty must not look like a broken model.
    pub(super) fn adjust(&self, row: &mut [f32]) {
        let p = &self.params;
        for &(token, bias) in &p.logit_bias {
            change(row, token, |logit| if bias == f32::NEG_INFINITY { bias } else { finite(logit + bias) });
        }
        for &token in &p.banned {
            change(row, token, |_| f32::NEG_INFINITY);
        }
        self.ban_ngrams(row);
        for (token, count) in self.counts.iter() {
            change(row, token, |logit| {
                let repeated = if logit > 0.0 { logit / p.repetition_penalty } else { logit * p.repetition_penalty };
                finite(finite(repeated) - finite(p.frequency_penalty * count as f32) - p.presence_penalty)
            });
        }
    }

    /// Bans what followed every earlier occurrence of the last n - 1 tokens. Cost: one look at each token.
    fn ban_ngrams(&self, row: &mut [f32]) {
        let n = self.params.no_repeat_ngram;
        if n == 0 || self.tokens.len() < n {
            return;
        }
        let tail = &self.tokens[self.tokens.len() - (n - 1)..];
        for window in self.tokens.windows(n) {
            if &window[..n - 1] == tail {
                change(row, window[n - 1], |_| f32::NEG_INFINITY);
            }
        }
    }
}

/// With the same room for tokens as the original, so that a fork allocates no later than now.
impl Clone for SamplerState {
    fn clone(&self) -> Self {
        let mut tokens = Vec::with_capacity(self.tokens.capacity());
        tokens.extend_from_slice(&self.tokens);
        SamplerState { params: self.params.clone(), tokens, counts: self.counts.clone(), ..*self }
    }
}

/// A token that is ruled out stays ruled out.
fn change(row: &mut [f32], token: TokenId, f: impl FnOnce(f32) -> f32) {
    if let Some(logit) = row.get_mut(token as usize)
        && *logit != f32::NEG_INFINITY
    {
        *logit = f(*logit);
    }
}

fn finite(logit: f32) -> f32 {
    logit.clamp(f32::MIN, f32::MAX)
}

/// Token -> how often, for the tokens that occur: linear probing with backward shift, so that a window can slide for ever
/// without tombstones and therefore without a rehash. A dense table would be 600 KB for each sequence of a vocabulary of
/// 150,000; the standard map may allocate when its tombstones pile up.
#[derive(Clone, Debug)]
struct Counts {
    /// A power of two; count 0 marks an empty slot.
    slots: Vec<(TokenId, u32)>,
    distinct: usize,
}

impl Counts {
    fn with_capacity(distinct: usize) -> Self {
        let slots = if distinct == 0 { 0 } else { ((distinct + 1) * 2).next_power_of_two() };
        Counts { slots: vec![(0, 0); slots], distinct: 0 }
    }

    fn iter(&self) -> impl Iterator<Item = (TokenId, u32)> + '_ {
        self.slots.iter().copied().filter(|&(_, count)| count > 0)
    }

    fn add(&mut self, token: TokenId) {
        if (self.distinct + 1) * 2 > self.slots.len() {
            self.grow();
        }
        let at = self.find(token);
        if self.slots[at].1 == 0 {
            self.slots[at].0 = token;
            self.distinct += 1;
        }
        self.slots[at].1 += 1;
    }

    fn remove(&mut self, token: TokenId) {
        let mut hole = self.find(token);
        debug_assert!(self.slots[hole].1 > 0, "token {token} is removed more often than it was added");
        self.slots[hole].1 -= 1;
        if self.slots[hole].1 > 0 {
            return;
        }
        self.distinct -= 1;
        let mask = self.slots.len() - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            if self.slots[at].1 == 0 {
                return;
            }
            // An entry may move back into the hole unless its home lies between the hole (excluded) and itself.
            let from_home = at.wrapping_sub(self.home(self.slots[at].0)) & mask;
            if from_home >= at.wrapping_sub(hole) & mask {
                self.slots.swap(hole, at);
                hole = at;
            }
        }
    }

    /// The token's slot, or the empty one where it belongs. Ends because at most half the slots are taken.
    fn find(&self, token: TokenId) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = self.home(token);
        while self.slots[at].1 > 0 && self.slots[at].0 != token {
            at = (at + 1) & mask;
        }
        at
    }

    /// Multiplicative hash by the golden ratio, upper bits.
    fn home(&self, token: TokenId) -> usize {
        let mixed = u64::from(token).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        mixed as usize & (self.slots.len() - 1)
    }

    fn grow(&mut self) {
        let mut larger = Counts { slots: vec![(0, 0); (self.slots.len() * 2).max(8)], distinct: self.distinct };
        for (token, count) in self.iter() {
            let at = larger.find(token);
            larger.slots[at] = (token, count);
        }
        *self = larger;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn penalised(window: usize) -> SamplingParams {
        SamplingParams::default().repetition_penalty(1.5).penalty_window(window)
    }

    /// Small numbers without a generator crate: the low bits of a 64-bit LCG are poor, the high ones do.
    fn lcg(state: &mut u64, below: u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % below
    }

    /// Against a recount, with pushes, truncations and a sliding window.
    #[test]
    fn counts_equal_a_recount() {
        for window in [1, 2, 7, 64, usize::MAX] {
            let mut state = SamplerState::new(penalised(window), 50, 300).unwrap();
            let slots = state.counts.slots.len();
            let mut naive: Vec<TokenId> = Vec::new();
            let mut seed = window as u64;
            for _ in 0..5_000 {
                if naive.len() >= 299 || lcg(&mut seed, 3) == 0 {
                    let len = naive.len().saturating_sub(lcg(&mut seed, 9) as usize);
                    naive.truncate(len);
                    state.truncate(len);
                } else {
                    let token = lcg(&mut seed, 50) as TokenId * 4096;
                    naive.push(token);
                    state.push(token);
                }
                let mut expected = BTreeMap::new();
                for &token in &naive[naive.len().saturating_sub(window)..] {
                    *expected.entry(token).or_insert(0) += 1;
                }
                assert_eq!(state.counts.iter().collect::<BTreeMap<_, _>>(), expected);
                assert_eq!(state.counts.distinct, expected.len());
                assert_eq!(state.position(), naive.len());
            }
            assert_eq!(state.counts.slots.len(), slots, "grew although the capacity was announced");
            assert!(state.tokens.capacity() == 300);
        }
    }

    #[test]
    fn more_than_announced_still_counts() {
        let mut state = SamplerState::new(penalised(usize::MAX), 1_000, 2).unwrap();
        state.extend(&(0..1_000).collect::<Vec<_>>());
        assert_eq!(state.counts.iter().count(), 1_000);
        state.truncate(1);
        assert_eq!(state.counts.iter().collect::<Vec<_>>(), [(0, 1)]);
    }

    #[test]
    fn nothing_is_remembered_without_need() {
        let mut state = SamplerState::new(SamplingParams::default(), 10, 1 << 20).unwrap();
        state.extend(&[1, 2, 3]);
        assert_eq!((state.tokens.capacity(), state.counts.slots.len(), state.position()), (0, 0, 3));
        assert!(!state.adjusts());
        state.truncate(1);
        assert_eq!(state.position(), 1);
    }

    #[test]
    fn penalties_by_hand() {
        let params = SamplingParams::default()
            .repetition_penalty(2.0)
            .frequency_penalty(0.5)
            .presence_penalty(0.25)
            .logit_bias(vec![(3, 1.0), (3, 0.5)])
            .banned(vec![4]);
        let mut state = SamplerState::new(params, 6, 8).unwrap();
        state.extend(&[0, 1, 1, 5]);
        let mut row = [4.0, -1.0, 2.0, 2.0, 2.0, f32::NEG_INFINITY];
        state.adjust(&mut row);
        let inf = f32::NEG_INFINITY;
        assert_eq!(row, [2.0 - 0.75, -2.0 - 1.25, 2.0, 3.5, inf, inf]);
    }

    #[test]
    fn the_window_forgets() {
        let mut state = SamplerState::new(penalised(2), 4, 8).unwrap();
        state.extend(&[0, 1, 2]);
        let mut row = [3.0; 4];
        state.adjust(&mut row);
        assert_eq!(row, [3.0, 2.0, 2.0, 3.0]);
    }

    #[test]
    fn extreme_penalties_keep_logits_finite() {
        let params = SamplingParams::default()
            .repetition_penalty(f32::MIN_POSITIVE)
            .frequency_penalty(f32::MAX)
            .presence_penalty(f32::MAX)
            .logit_bias(vec![(2, f32::MAX), (2, f32::MAX)]);
        let mut state = SamplerState::new(params, 3, 8).unwrap();
        state.extend(&[0, 0, 1]);
        let mut row = [1e30, -1e30, 1.0];
        state.adjust(&mut row);
        assert!(row.iter().all(|v| v.is_finite()), "{row:?}");
    }

    #[test]
    fn ngrams() {
        let case = |n: usize, history: &[TokenId], expected: &[TokenId]| {
            let mut state = SamplerState::new(SamplingParams::default().no_repeat_ngram(n), 10, 16).unwrap();
            state.extend(history);
            let mut row = [0.0; 10];
            state.adjust(&mut row);
            let banned: Vec<TokenId> = (0..10).filter(|&t| row[t as usize] == f32::NEG_INFINITY).collect();
            assert_eq!(banned, expected, "n {n}, {history:?}");
        };
        case(2, &[1, 2, 1], &[2]);
        case(2, &[1, 2, 1, 3, 1], &[2, 3]);
        case(3, &[1, 2, 3, 1, 2], &[3]);
        case(3, &[1, 2], &[]);
        case(1, &[4, 5, 4], &[4, 5]);
        case(2, &[], &[]);
        case(4, &[7, 7, 7], &[]);
        case(3, &[7, 7, 7], &[7]);
    }

    #[test]
    fn a_clone_has_the_same_room() {
        let mut state = SamplerState::new(penalised(8), 10, 100).unwrap();
        state.push(1);
        let mut fork = state.clone();
        assert!(fork.tokens.capacity() >= 100);
        fork.push(2);
        assert_eq!((state.position(), fork.position()), (1, 2));
        assert_eq!(state.counts.iter().collect::<Vec<_>>(), [(1, 1)]);
    }
}
