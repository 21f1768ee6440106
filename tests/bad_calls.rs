//! What a caller can get wrong about sizes and batches is an error that says what was expected and found, and changes nothing.
#![allow(clippy::unwrap_used)]

mod common;

use common::made::Sizes;
use loquat::backend::cpu::{Cpu, CpuOptions};
use loquat::batch::{Batch, BatchItem, BatchLimits, RowsWanted};
use loquat::model::{Logits, MemoryPlan, Model, ModelLimits, Progress, Transformer, Want};
use loquat::sample::Sampler;
use loquat::sched::{Ledger, LedgerConfig};
use loquat::weights::no_progress;
use loquat::{BlockId, ConfigError, Engine, EngineConfig, Error, FormatId, KvDType, LoadError, RunError};

const BATCH: BatchLimits = BatchLimits { tokens: 8, seqs: 2, blocks: 8, rows: 2 };
const LIMITS: ModelLimits = ModelLimits { batch: BATCH, blocks: 4, block_size: 16, kv_dtype: KvDType::F32 };
const LOGITS: Want = Want { logits: true, hidden: false };

fn model(limits: ModelLimits) -> Result<Transformer<Cpu>, Error> {
    let backend = Cpu::new(&CpuOptions::default()).unwrap();
    Transformer::load(backend, &Sizes::TINY.synthetic(FormatId::F32), limits, &mut no_progress)
}

#[test]
fn limits_of_a_model_out_of_range_are_refused() {
    let batch = |batch| ModelLimits { batch, ..LIMITS };
    let max = usize::MAX;
    for (field, limits) in [
        ("block_size", ModelLimits { block_size: 0, ..LIMITS }),
        ("block_size", ModelLimits { block_size: 8, ..LIMITS }),
        ("block_size", ModelLimits { block_size: 17, ..LIMITS }),
        ("block_size", ModelLimits { block_size: 512, ..LIMITS }),
        ("blocks", ModelLimits { blocks: 0, ..LIMITS }),
        ("blocks", ModelLimits { blocks: 1 << 28, ..LIMITS }),
        ("blocks", ModelLimits { blocks: max, ..LIMITS }),
        ("batch limit tokens", batch(BatchLimits { tokens: 0, ..BATCH })),
        ("batch limit tokens", batch(BatchLimits { tokens: max, ..BATCH })),
        ("batch limit seqs", batch(BatchLimits { seqs: 0, ..BATCH })),
        ("batch limit seqs", batch(BatchLimits { seqs: max, ..BATCH })),
        ("batch limit blocks", batch(BatchLimits { blocks: 0, ..BATCH })),
        ("batch limit rows", batch(BatchLimits { rows: 0, ..BATCH })),
    ] {
        match model(limits).err() {
            Some(Error::Config(ConfigError::Invalid { field: found, .. })) => assert_eq!(found, field),
            other => panic!("{limits:?}: {other:?}"),
        }
        let plan = MemoryPlan::of(&Sizes::TINY.synthetic(FormatId::F32), &Cpu::new(&CpuOptions::default()).unwrap(), &limits);
        assert!(matches!(plan, Err(LoadError::Config(ConfigError::Invalid { .. }))), "{limits:?}: {plan:?}");
    }
}

#[test]
fn a_batch_that_the_model_cannot_run_is_refused() {
    let mut model = model(LIMITS).unwrap();
    let mut logits = Logits::with_capacity(2, model.spec(), LOGITS).unwrap();
    let mut row = |model: &mut Transformer<Cpu>| {
        let mut batch = Batch::new(16, BATCH).unwrap();
        let blocks = [BlockId(3)];
        batch.push(BatchItem { tokens: &[1, 2], start: 0, total: 2, blocks: &blocks, rows: RowsWanted::Last }).unwrap();
        model.begin(&batch, LOGITS).unwrap();
        assert_eq!(model.advance(&mut || false, &mut logits), Ok(Progress::Done));
        logits.row(0).to_vec()
    };
    let before = row(&mut model);
    for (what, block_size, token, block) in
        [("block size", 32, 1, 0), ("block size", 8, 1, 0), ("token", 16, 32, 0), ("block", 16, 1, 4), ("block", 16, 1, 1 << 20)]
    {
        let mut batch = Batch::new(block_size, BATCH).unwrap();
        let (tokens, blocks) = ([1, token], [BlockId(block)]);
        batch.push(BatchItem { tokens: &tokens, start: 0, total: 2, blocks: &blocks, rows: RowsWanted::Last }).unwrap();
        match model.begin(&batch, LOGITS) {
            Err(RunError::BadBatch { what: found, .. }) => assert_eq!(found, what),
            other => panic!("{what}: {other:?}"),
        }
    }
    for pair in [(BlockId(0), BlockId(4)), (BlockId(u32::MAX), BlockId(0))] {
        assert!(matches!(model.copy_blocks(&[pair]), Err(RunError::BadBatch { what: "block", .. })), "{pair:?}");
    }
    assert_eq!(row(&mut model), before);
}

#[test]
fn memory_that_the_system_refuses_is_an_error() {
    // More than an address space.
    let vast = 1 << 56;
    assert!(matches!(Sampler::new(vast), Err(ConfigError::Refused { .. })));
    let model = model(LIMITS).unwrap();
    assert!(matches!(Logits::with_capacity(vast, model.spec(), LOGITS), Err(ConfigError::Refused { .. })));
    assert!(matches!(Logits::with_capacity(usize::MAX, model.spec(), LOGITS), Err(ConfigError::Refused { .. })));
    for (name, cfg) in [
        ("blocks", LedgerConfig::new(usize::MAX, 16, 64)),
        ("max_seqs", LedgerConfig { max_seqs: vast, ..LedgerConfig::new(4, 16, 64) }),
    ] {
        assert!(matches!(Ledger::new(cfg).err(), Some(ConfigError::Invalid { field, .. }) if field == name), "{name}");
    }
}

#[test]
fn settings_of_an_engine_that_depend_on_each_other_are_named() {
    let files = Sizes::TINY.synthetic(FormatId::F32);
    let default = EngineConfig::default;
    for (config, expected) in [
        (EngineConfig { step_tokens: 1, ..default() }, "config: step_tokens: expected at least max_batch, 16, found 1"),
        (EngineConfig { max_seqs: 8, ..default() }, "config: max_batch: expected at most max_seqs, 8, found 16"),
        (EngineConfig { step_tokens: 0, ..default() }, "config: step_tokens: expected 1 to 65536, found 0"),
    ] {
        assert_eq!(Engine::plan(&files, &config).unwrap_err().to_string(), expected);
    }
}
