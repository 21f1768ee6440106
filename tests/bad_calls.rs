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
use loquat::{BlockCopy, BlockGroup, BlockId, ConfigError, Engine, EngineConfig, Error, FormatId, KvDType, LoadError, RunError};

const BATCH: BatchLimits = BatchLimits { tokens: 8, seqs: 2, blocks: 8, rows: 2 };
const GROUP: BlockGroup = BlockGroup { blocks: 4, window: None };
const LOGITS: Want = Want { logits: true, hidden: false };

fn limits() -> ModelLimits {
    ModelLimits { batch: BATCH, groups: vec![GROUP], swap: vec![2], block_size: 16, kv_dtype: KvDType::F32 }
}

fn model(limits: ModelLimits) -> Result<Transformer<Cpu>, Error> {
    let backend = Cpu::new(&CpuOptions::default()).unwrap();
    Transformer::load(backend, &Sizes::TINY.synthetic(FormatId::F32), limits, &mut no_progress)
}

#[test]
fn limits_of_a_model_out_of_range_are_refused() {
    let batch = |batch| ModelLimits { batch, ..limits() };
    let blocks = |blocks| ModelLimits { groups: vec![BlockGroup { blocks, ..GROUP }], ..limits() };
    let max = usize::MAX;
    for (field, limits) in [
        ("block_size", ModelLimits { block_size: 0, ..limits() }),
        ("block_size", ModelLimits { block_size: 8, ..limits() }),
        ("block_size", ModelLimits { block_size: 17, ..limits() }),
        ("block_size", ModelLimits { block_size: 512, ..limits() }),
        ("groups[0]", blocks(0)),
        ("groups[0]", blocks(1 << 28)),
        ("groups[0]", blocks(max)),
        ("groups", ModelLimits { groups: vec![], ..limits() }),
        ("groups", ModelLimits { groups: vec![GROUP; 2], ..limits() }),
        ("groups", ModelLimits { groups: vec![BlockGroup { window: Some(8), ..GROUP }], ..limits() }),
        ("swap", ModelLimits { swap: vec![], ..limits() }),
        ("swap[0]", ModelLimits { swap: vec![1 << 28], ..limits() }),
        ("batch limit tokens", batch(BatchLimits { tokens: 0, ..BATCH })),
        ("batch limit tokens", batch(BatchLimits { tokens: max, ..BATCH })),
        ("batch limit seqs", batch(BatchLimits { seqs: 0, ..BATCH })),
        ("batch limit seqs", batch(BatchLimits { seqs: max, ..BATCH })),
        ("batch limit blocks", batch(BatchLimits { blocks: 0, ..BATCH })),
        ("batch limit rows", batch(BatchLimits { rows: 0, ..BATCH })),
    ] {
        match model(limits.clone()).err() {
            Some(Error::Config(ConfigError::Invalid { field: found, .. })) => assert_eq!(found, field),
            other => panic!("{limits:?}: {other:?}"),
        }
        let plan = MemoryPlan::of(&Sizes::TINY.synthetic(FormatId::F32), &Cpu::new(&CpuOptions::default()).unwrap(), &limits);
        assert!(matches!(plan, Err(LoadError::Config(ConfigError::Invalid { .. }))), "{limits:?}: {plan:?}");
    }
}

#[test]
fn a_batch_that_the_model_cannot_run_is_refused() {
    let mut model = model(limits()).unwrap();
    let mut logits = Logits::with_capacity(2, model.spec(), LOGITS).unwrap();
    let mut row = |model: &mut Transformer<Cpu>| {
        let mut batch = Batch::new(16, model.groups(), BATCH).unwrap();
        let tables: &[&[_]] = &[&[BlockId(3)]];
        batch.push(BatchItem { tokens: &[1, 2], start: 0, total: 2, tables, rows: RowsWanted::Last }).unwrap();
        model.begin(&batch, LOGITS).unwrap();
        assert_eq!(model.advance(&mut || false, &mut logits), Ok(Progress::Done));
        logits.row(0).to_vec()
    };
    let before = row(&mut model);
    let (more, windowed) = (BlockGroup { blocks: 5, ..GROUP }, BlockGroup { window: Some(9), ..GROUP });
    for (what, block_size, token, groups) in [
        ("block size", 32, 1, &[GROUP][..]),
        ("block size", 8, 1, &[GROUP]),
        ("token", 16, 32, &[GROUP]),
        ("groups", 16, 1, &[more]),
        ("groups", 16, 1, &[windowed]),
        ("groups", 16, 1, &[GROUP, windowed]),
    ] {
        let mut batch = Batch::new(block_size, groups, BATCH).unwrap();
        let (tokens, table) = ([1, token], [BlockId(3)]);
        let tables = vec![&table[..]; groups.len()];
        batch.push(BatchItem { tokens: &tokens, start: 0, total: 2, tables: &tables, rows: RowsWanted::Last }).unwrap();
        match model.begin(&batch, LOGITS) {
            Err(RunError::BadBatch { what: found, .. }) => assert_eq!(found, what),
            other => panic!("{what}: {other:?}"),
        }
    }
    assert_eq!(row(&mut model), before);
}

#[test]
fn blocks_that_there_are_not_are_refused_and_nothing_is_copied() {
    type Copies = fn(&mut Transformer<Cpu>, &[BlockCopy]) -> Result<(), RunError>;
    let mut model = model(limits()).unwrap();
    let size = model.token_bytes(0);
    // Two layers of 16 keys and 16 values of four bytes.
    assert_eq!((size, model.token_bytes(1)), (2 * 32 * 4, 0));
    assert_eq!((model.groups(), model.swap_blocks()), (&[GROUP][..], &[2][..]));
    let rubbish: Vec<_> = (0..16 * size).map(|i| (i * 7 % 100) as u8).collect();
    model.write_block(0, BlockId(2), 16, &rubbish).unwrap();
    let read = |model: &mut Transformer<Cpu>, block| {
        let mut bytes = vec![0; 16 * size];
        model.read_block(0, BlockId(block), 16, &mut bytes).unwrap();
        bytes
    };
    let ways: [(Copies, u32, u32, &str, &str); 3] = [
        (|m, c| m.copy_blocks(c), 4, 4, "block", "block"),
        (|m, c| m.swap_out(c), 4, 2, "block", "slot"),
        (|m, c| m.swap_in(c), 2, 4, "slot", "block"),
    ];
    for (act, from, to, from_what, to_what) in ways {
        let copy = |group, from, to| BlockCopy { group, from: BlockId(from), to: BlockId(to) };
        for (what, bad) in [
            (from_what, copy(0, from, 0)),
            (to_what, copy(0, 0, to)),
            (from_what, copy(0, u32::MAX, 0)),
            (to_what, copy(0, 0, u32::MAX)),
            ("group", copy(1, 0, 0)),
            ("group", copy(usize::MAX, 0, 0)),
        ] {
            // A good one before it is not done either.
            match act(&mut model, &[copy(0, 1, 1), copy(0, from - 1, to - 1), bad]) {
                Err(RunError::BadBatch { what: found, .. }) => assert_eq!(found, what, "{bad:?}"),
                other => panic!("{bad:?}: {other:?}"),
            }
            assert!(read(&mut model, 2) == rubbish && read(&mut model, 3) == vec![0; 16 * size], "{bad:?}");
        }
    }
    let mut bytes = vec![0; 17 * size];
    for (what, group, block, tokens, len) in [
        ("group", 1, 0, 1, size),
        ("block", 0, 4, 1, size),
        ("block", 0, u32::MAX, 1, size),
        ("tokens of a block", 0, 0, 17, 17 * size),
        ("tokens of a block", 0, 0, usize::MAX, 0),
        ("bytes", 0, 0, 2, size),
        ("bytes", 0, 0, 1, 2 * size),
        ("bytes", 0, 0, 0, 1),
    ] {
        let refused = [
            model.read_block(group, BlockId(block), tokens, &mut bytes[..len]),
            model.write_block(group, BlockId(block), tokens, &bytes[..len]),
        ];
        for result in refused {
            match result {
                Err(RunError::BadBatch { what: found, .. }) => assert_eq!(found, what, "{block}, {tokens}, {len}"),
                other => panic!("{what}: {other:?}"),
            }
        }
    }
    assert!(read(&mut model, 2) == rubbish);
    // The last of each that there is.
    let copy = |from, to| [BlockCopy { group: 0, from: BlockId(from), to: BlockId(to) }];
    model.swap_out(&copy(2, 1)).unwrap();
    model.swap_in(&copy(1, 0)).unwrap();
    model.copy_blocks(&copy(0, 3)).unwrap();
    assert!(read(&mut model, 3) == rubbish);
}

#[test]
fn memory_that_the_system_refuses_is_an_error() {
    // More than an address space.
    let vast = 1 << 56;
    assert!(matches!(Sampler::new(vast), Err(ConfigError::Refused { .. })));
    let model = model(limits()).unwrap();
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
