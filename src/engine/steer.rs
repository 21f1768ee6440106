//! Sequences whose tokens the caller chooses: beam search, games with grammars, search of any kind. The engine shows what the model
//! thinks and waits; the policy sees none of it.
//!
//! ```text
//! submit -> prompt runs -> Choice -> [fork] -> choose -> token runs -> Choice -> ... -> Finished
//! ```
//!
//! Invariant: one that waits for a choice keeps nobody else from running: when others want to run and a step begins, it loses its
//! place and leaves its blocks to the prefix cache.
#![forbid(unsafe_code)]

use super::{ASKS, Engine, Request, SeqRun};
use crate::error::SubmitError;
use crate::ids::{SeqId, TokenId};
use crate::sample::SamplingParams;

impl Request {
    /// With the caller to choose each token: instead of a token comes [`EventKind::Choice`](super::EventKind::Choice) with the `top`
    /// likeliest, and [`Engine::choose`] goes on, with these or any other. The [observer](Engine::observe) sees all logits.
    /// Until then the sequence can be [forked](Engine::fork) into several that go on differently.
    ///
    /// A choice made before the next step costs nothing. Later, others may have been given the sequence's place: it waits its turn
    /// and finds what is still cached of it.
    pub fn steered(mut self, top: u8) -> Self {
        self.steered = true;
        self.sampling.logprobs = Some(top);
        self
    }
}

impl Engine {
    /// Gives a sequence that asks for a [choice](Request::steered) its next token, whatever the model thinks of it. At
    /// one of the request's stop tokens, and with the last of `max_tokens`, the sequence ends.
    ///
    /// # Errors
    /// [`SubmitError::Sequence`] for one that does not ask, [`SubmitError::UnknownToken`].
    pub fn choose(&mut self, seq: SeqId, token: TokenId) -> Result<(), SubmitError> {
        self.sweep();
        let found = self.state_name(seq);
        let Some(run) = self.runs.get_mut(&seq).filter(|run| run.asks) else {
            return Err(SubmitError::Sequence { seq, expected: ASKS, found });
        };
        let vocab = self.model.spec().vocab;
        if token as usize >= vocab {
            let at = self.ledger.view(seq).map_or(0, |v| v.total());
            return Err(SubmitError::UnknownToken { token, at, vocab });
        }
        self.ledger.append(seq, token)?;
        run.asks = false;
        run.sampler.push(token);
        let stop = run.stop_tokens.contains(&token);
        self.asking.retain(|asking| *asking != seq);
        self.grown(seq, stop);
        Ok(())
    }

    /// A second one of a sequence that asks for a choice.
    pub(super) fn fork_asking(&mut self, seq: SeqId) -> Result<SeqId, SubmitError> {
        let parent = self.ledger.view(seq).expect("a sequence that asks is there");
        // As old as the first, or each fork would rank behind whatever has arrived since.
        let arrival = parent.arrival();
        let counts = self.ledger.counts();
        let fork = match self.ledger.fork(seq, arrival) {
            // There is room for it, but not among those that run.
            Err(SubmitError::QueueFull { .. })
                if counts.waiting + counts.running + counts.held < self.ledger.config().max_seqs =>
            {
                self.ledger.step_aside(seq);
                self.ledger.fork(seq, arrival)
            }
            other => other,
        }?;
        let run = &self.runs[&seq];
        let run = SeqRun {
            sampler: run.sampler.clone(),
            stop_tokens: run.stop_tokens.clone(),
            embedding: None,
            followers: Vec::new(),
            ..*run
        };
        self.enter(fork, run);
        self.asking.push(fork);
        Ok(fork)
    }

    /// Those that ask give way before a step, unless there is nobody else.
    pub(super) fn make_way(&mut self) {
        if self.asking.len() < self.runs.len() {
            // Each to the front of those that wait: the first comes first again.
            self.asking.iter().rev().for_each(|seq| self.ledger.step_aside(*seq));
        }
    }
}

/// Checks what a steered request says.
pub(super) fn admit(request: &Request) -> Result<(), SubmitError> {
    if !request.steered {
        return Ok(());
    }
    let refused = |name, expected, found: String| Err(SubmitError::Parameter { name, expected, found });
    let p = &request.sampling;
    if (SamplingParams { logprobs: p.logprobs, ..SamplingParams::default() }) != *p {
        return refused("sampling", "nothing but logprobs where the caller chooses", format!("{p:?}"));
    }
    if request.prefill || request.embedding.is_some() {
        return refused("steered", "a request that generates", "one that does not".into());
    }
    Ok(())
}
