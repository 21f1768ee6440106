//! From files and settings to an engine.
#![forbid(unsafe_code)]

use super::step::Stage;
use super::{Engine, EngineConfig, Event, SeqRun};
use crate::arch::RopeSpec;
use crate::backend::cpu::Cpu;
use crate::batch::Batch;
use crate::error::{ConfigError, Error, LoadError, reserved};
use crate::ids::{BlockGroup, SeqId};
use crate::model::{Logits, MemoryPlan, Model, ModelFiles, ModelLimits, Transformer, Want};
use crate::sample::Sampler;
use crate::sched::{ContinuousBatching, Ledger, LedgerConfig, Scheduler};
use crate::weights::{OnProgress, no_progress};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// What an engine is made of where the stock parts will not do: see [`Engine::from_parts`].
pub struct EngineParts {
    /// The model.
    pub model: Box<dyn Model>,
    /// The policy.
    pub scheduler: Box<dyn Scheduler>,
    /// Sequences in the engine, whatever their state.
    pub max_seqs: usize,
    /// Allow requests that want their prompt's logits.
    pub prompt_logits: bool,
    /// What a step computes.
    pub want: Want,
    /// Bytes of the model, for [`Engine::memory`].
    pub plan: MemoryPlan,
}

impl Engine {
    /// Loads the model and allocates everything that a step will need, on the CPU, with [`ContinuousBatching`].
    ///
    /// # Errors
    /// [`ConfigError`] for settings out of range or over the memory limit, and
    /// [`LoadError`] for files that do not make a model.
    pub fn new(files: &ModelFiles, config: EngineConfig) -> Result<Self, Error> {
        Self::load(files, config, Box::new(ContinuousBatching::default()), &mut no_progress)
    }

    /// [`Engine::new`] with a policy of the caller's and a callback that sees the load's progress and can break it off.
    ///
    /// # Errors
    /// As [`Engine::new`], and [`LoadError::Cancelled`].
    pub fn load(
        files: &ModelFiles,
        config: EngineConfig,
        scheduler: Box<dyn Scheduler>,
        progress: &mut OnProgress<'_>,
    ) -> Result<Self, Error> {
        let limits = config.limits(files.spec())?;
        let backend = Cpu::new(&config.cpu())?;
        let plan = plan(files, &config, &backend, &limits)?;
        if let Some(limit_bytes) = config.memory_limit_bytes.filter(|limit| plan.total_bytes() > *limit) {
            return Err(ConfigError::Memory { what: "the engine", needed_bytes: plan.total_bytes(), limit_bytes }.into());
        }
        let model = Box::new(Transformer::load(backend, files, limits, progress)?);
        let (max_seqs, prompt_logits, want) = (config.max_seqs, config.prompt_logits, config.want());
        let mut engine = Self::from_parts(EngineParts { model, scheduler, max_seqs, prompt_logits, want, plan })?;
        // After the load, which has read every page that this looks at.
        engine.identify(files.fingerprint());
        Ok(engine)
    }

    /// The bytes that [`Engine::new`] would allocate, without allocating them: reads headers alone.
    ///
    /// # Errors
    /// As [`Engine::new`] as far as headers and settings show.
    pub fn plan(files: &ModelFiles, config: &EngineConfig) -> Result<MemoryPlan, Error> {
        let limits = config.limits(files.spec())?;
        let backend = Cpu::unstarted(&config.cpu())?;
        Ok(plan(files, config, &backend, &limits)?)
    }

    /// An engine around any model and policy.
    ///
    /// # Errors
    /// [`ConfigError`] for sizes out of range, and where the system has not the memory for them.
    pub fn from_parts(parts: EngineParts) -> Result<Self, ConfigError> {
        let EngineParts { model, scheduler, max_seqs, prompt_logits, want, plan } = parts;
        let (spec, limits) = (model.spec(), model.limits());
        let ropes = spec.ropes.clone();
        let ledger = Ledger::new(LedgerConfig {
            groups: model.groups().to_vec(),
            swap: model.swap_blocks().to_vec(),
            block_size: model.block_size(),
            max_seqs,
            step_seqs: limits.seqs,
            step_tokens: limits.tokens,
            context: longest(&*model),
            max_draft: 0,
            regime: Box::new(move |total| regime(&ropes, total)),
        })?;
        Ok(Engine {
            sampler: Sampler::new(spec.vocab)?,
            batch: Batch::new(model.block_size(), model.groups(), limits)?,
            logits: Logits::with_capacity(limits.rows, spec, want)?
                .with_states(if want.hidden { limits.tokens } else { 0 }, spec)?,
            runs: HashMap::with_capacity(most_runs(max_seqs)),
            events: VecDeque::from(reserved("the engine's events", most_events(limits.seqs))?),
            model,
            scheduler,
            ledger,
            want,
            prompt_logits,
            stage: Stage::Between,
            observer: None,
            owned: HashSet::new(),
            asking: Vec::new(),
            released: Arc::default(),
            plan,
            fingerprint: None,
            start: Instant::now(),
        })
    }
}

/// The model's bytes and, among its activations, those of the engine around it.
fn plan(files: &ModelFiles, config: &EngineConfig, backend: &Cpu, limits: &ModelLimits) -> Result<MemoryPlan, LoadError> {
    let (spec, batch) = (files.spec(), &limits.batch);
    let want = config.want();
    let mut plan = MemoryPlan::of(files, backend, limits)?
        .with_logits(spec, batch.rows, want)
        .with_states(spec, if want.hidden { batch.tokens } else { 0 });
    // A hash table is filled to seven eighths, has a power of two of places, and a byte for each.
    let runs = (most_runs(config.max_seqs) * 8 / 7).next_power_of_two() * (size_of::<(SeqId, SeqRun)>() + 1);
    let events = most_events(batch.seqs) * size_of::<Event>();
    let ledger = Ledger::bytes(&LedgerConfig {
        groups: limits.groups.clone(),
        swap: limits.swap.clone(),
        ..LedgerConfig::new(0, limits.block_size, spec.context)
    });
    let batch_bytes = Batch::bytes(batch, limits.groups.len());
    plan.activation_bytes += (Sampler::bytes(spec.vocab) + batch_bytes + runs + events + ledger) as u64;
    Ok(plan)
}

/// The longest sequence that block tables have room for: where all layers have windows, it can be longer than the cache.
fn longest(model: &dyn Model) -> usize {
    let (context, limits) = (model.spec().context, model.limits());
    match model.groups().first() {
        Some(BlockGroup { window: Some(_), .. }) => {
            context.min((limits.blocks / limits.seqs.max(1)).max(1).saturating_mul(model.block_size()))
        }
        _ => context,
    }
}

/// Sequences whose samplers have a place from the start.
fn most_runs(max_seqs: usize) -> usize {
    max_seqs.min(1 << 12)
}

/// Events that have a place from the start: a caller that takes them step by step never makes it grow.
fn most_events(seqs: usize) -> usize {
    seqs.saturating_mul(4)
}

/// One number for the regimes of all rotary tables. None of them ever falls as a sequence grows, so their sum changes where one
/// of them does.
fn regime(ropes: &[RopeSpec], total: usize) -> u32 {
    ropes.iter().map(|r| r.regime(total)).fold(0, u32::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{RopeScaling, RopeStyle};

    #[test]
    fn a_change_of_any_table_is_a_change_of_regime() {
        let long = |original| {
            let scaling = RopeScaling::Long { short: vec![1.0], long: vec![2.0], original, attention_factor: 1.0 };
            RopeSpec { rotary: 2, style: RopeStyle::HalfSplit, theta: 1e4, scaling }
        };
        let dynamic = RopeSpec { scaling: RopeScaling::Dynamic { factor: 2.0, original: 24 }, rotary: 4, ..long(1) };
        for ropes in [vec![long(8), long(16)], vec![long(16), dynamic.clone()], vec![dynamic, long(32)]] {
            for total in 1..64 {
                let changes = ropes.iter().any(|r| r.regime(total) != r.regime(total + 1));
                assert_eq!(regime(&ropes, total) != regime(&ropes, total + 1), changes, "{ropes:?} at {total}");
            }
        }
    }
}
