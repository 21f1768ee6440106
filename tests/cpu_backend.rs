//! The CPU backend from outside: a step allocates nothing once everything is built, what is planned is what is allocated,
//! dropping gives everything back.
#![allow(clippy::unwrap_used)]

use loquat::arch::{Activation, AttnDims, Glu, Groups, NormSpec, RopeStyle, RouteSpec, Score};
use loquat::backend::cpu::{Compute, Cpu, CpuOptions};
use loquat::backend::{AttnArgs, Backend, Expert, Heads, KvShape, MoeArgs, MoeShape, WeightPart};
use loquat::batch::{Batch, BatchItem, BatchLimits, RowsWanted};
use loquat::dtype::{FormatId, KvDType};
use loquat::quant;
use loquat::weights::TensorView;
use loquat::{BlockCopy, BlockGroup, BlockId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::SeqCst);
        BYTES.fetch_add(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HIDDEN: usize = 256;
const DIMS: AttnDims = AttnDims { heads: 4, kv_heads: 2, qk_dim: 64, v_dim: 64, v_in_k: false };
const LIMITS: BatchLimits = BatchLimits { tokens: 40, seqs: 8, blocks: 64, rows: 8 };
const MOE: MoeShape = MoeShape { experts: 8, top_k: 3, intermediate: 128, hidden: HIDDEN };
const ROUTE: RouteSpec = RouteSpec {
    experts: MOE.experts,
    top_k: MOE.top_k,
    score: Score::Sigmoid,
    groups: Some(Groups { count: 4, top: 2, best: 2 }),
    correction: true,
    normalize: true,
    scale: 2.5,
};

fn kv_shape() -> KvShape {
    KvShape::one_group(vec![DIMS], 32, 16, KvDType::F16)
}

fn matrix(cpu: &mut Cpu, formats: &[FormatId], rows: usize, columns: usize) -> <Cpu as Backend>::Weight {
    let row: Vec<f32> = (0..columns).map(|i| ((i * 37 % 101) as f32 - 50.0) * 1e-3).collect();
    let bytes: Vec<_> = formats.iter().map(|&f| quant::encode(f, &row, columns).unwrap().repeat(rows)).collect();
    let shape = [rows, columns];
    let views = formats.iter().zip(&bytes).map(|(&format, bytes)| TensorView { format, shape: &shape, bytes });
    let parts: Vec<_> = views.map(|view| WeightPart::new("w", view)).collect();
    cpu.weight(&parts).unwrap()
}

/// Runs one layer over batches of one, of eight and of a chunk; the count is of allocations after the first round.
fn allocations(threads: usize, tier: &str, compute: Compute) -> usize {
    let mut cpu = Cpu::new(&CpuOptions { threads, tier: Some(tier.into()), compute }).unwrap();
    // Quantised and plain; where products are exact, the quantised ones are decoded as they are needed.
    let qkv = matrix(&mut cpu, &[FormatId::Q4_0, FormatId::Q6K], HIDDEN, HIDDEN);
    let up = matrix(&mut cpu, &[FormatId::Q4K, FormatId::Q8_0], HIDDEN, HIDDEN);
    let down = matrix(&mut cpu, &[FormatId::F16], HIDDEN, HIDDEN);
    let table = matrix(&mut cpu, &[FormatId::Q8_0], 64, HIDDEN);
    let positions = matrix(&mut cpu, &[FormatId::F16], 64, HIDDEN);
    let per_head: Vec<_> = (0..4).map(|_| matrix(&mut cpu, &[FormatId::Q8_0], 32, 64)).collect();
    let experts: Vec<_> = (0..MOE.experts)
        .map(|_| Expert {
            gate_up: matrix(&mut cpu, &[FormatId::Q4_0, FormatId::F16], 128, HIDDEN),
            gate_up_bias: Some(cpu.buf(256).unwrap()),
            down: matrix(&mut cpu, &[FormatId::Q8_0], HIDDEN, 128),
            down_bias: None,
        })
        .collect();
    let router = matrix(&mut cpu, &[FormatId::F32], MOE.experts, HIDDEN);
    let (mut scores, correction) = (cpu.buf(LIMITS.tokens * MOE.experts).unwrap(), cpu.buf(MOE.experts).unwrap());
    let sinks = cpu.buf(DIMS.heads).unwrap();
    let mut kv = cpu.kv(&kv_shape()).unwrap();
    let mut step = cpu.step(&LIMITS, HIDDEN, &kv_shape(), &MOE).unwrap();
    let t = LIMITS.tokens;
    let mut buf = |n| cpu.buf(n).unwrap();
    let (mut x, mut y, mut wide, mut last) = (buf(t * HIDDEN), buf(t * HIDDEN), buf(t * 2 * HIDDEN), buf(t * HIDDEN));
    let (mut norm, bias, mut angles, mut logits) = (buf(HIDDEN), buf(2 * HIDDEN), buf(t * 64), buf(t * HIDDEN));
    cpu.upload(&[1.0; HIDDEN], &mut norm).unwrap();
    cpu.upload(&vec![0.7; t * 64], &mut angles).unwrap();
    let blocks: Vec<_> = (0..32).map(BlockId).collect();
    let tokens: Vec<u32> = (0..t as u32).collect();
    let mut out = vec![0.0; HIDDEN];
    let mut batch = Batch::new(16, &[BlockGroup { blocks: 32, window: None }], LIMITS).unwrap();
    let args = AttnArgs { dims: DIMS, scale: 0.125, window: None, softcap: None };
    let spec = NormSpec::rms(1e-5);

    let mut run = |items: usize, len: usize| {
        batch.clear();
        for i in 0..items {
            let item = BatchItem {
                tokens: &tokens[..len],
                start: 20,
                total: 20 + len,
                tables: &[&blocks[4 * i..4 * i + 4]],
                rows: RowsWanted::Last,
            };
            batch.push(item).unwrap();
        }
        let rows = items * len;
        let heads = |offset, heads| Heads { stride: 2 * HIDDEN, offset, heads, dim: 64 };
        cpu.begin(&batch, &mut step).unwrap();
        cpu.embed(&step, &table, 1.0, &mut x).unwrap();
        cpu.embed_positions(&step, &positions, &mut x).unwrap();
        cpu.add_norm(rows, HIDDEN, &mut x, None, &spec, &norm, None, &mut y).unwrap();
        cpu.linear(rows, &y, &qkv, None, &mut step, &mut wide).unwrap();
        cpu.norm_heads(rows, &mut wide, heads(0, 4), &spec, &norm).unwrap();
        cpu.rope(rows, &mut wide, heads(0, 6), &angles, 64, RopeStyle::HalfSplit).unwrap();
        cpu.kv_write(&step, &wide, heads(256, 2), heads(384, 2), &mut kv, 0).unwrap();
        cpu.attention(&mut step, &args, &wide, heads(0, 4), &kv, 0, Some(&sinks), &mut y).unwrap();
        let to = Heads { stride: 2 * HIDDEN, offset: 0, heads: 4, dim: 32 };
        cpu.linear_heads(rows, &y, Heads { stride: HIDDEN, ..heads(0, 4) }, &per_head, &mut step, &mut wide, to).unwrap();
        cpu.add_norm(rows, HIDDEN, &mut x, Some((&y, 0.5)), &spec, &norm, None, &mut last).unwrap();
        cpu.linear(rows, &last, &up, Some(&bias), &mut step, &mut wide).unwrap();
        cpu.gate(rows, HIDDEN, Glu::Act(Activation::Silu), &wide, &mut y).unwrap();
        cpu.activate(rows * HIDDEN, Activation::Gelu, &mut y).unwrap();
        cpu.linear(rows, &y, &router, None, &mut step, &mut scores).unwrap();
        let moe = MoeArgs {
            route: &ROUTE,
            scores: &scores,
            correction: Some(&correction),
            experts: &experts,
            intermediate: 128,
            hidden: HIDDEN,
            glu: Glu::Clamped { alpha: 1.702, limit: 7.0 },
        };
        cpu.moe(rows, &y, &moe, &mut step, &mut wide).unwrap();
        cpu.add(rows * HIDDEN, &mut y, &wide, 1.0).unwrap();
        cpu.gather(&step, HIDDEN, &y, &mut last).unwrap();
        cpu.linear(items, &last, &down, None, &mut step, &mut logits).unwrap();
        cpu.scale_cap(items * HIDDEN, 0.5, Some(30.0), &mut logits).unwrap();
        cpu.copy_blocks(&mut kv, &[BlockCopy { group: 0, from: BlockId(31), to: BlockId(30) }]).unwrap();
        cpu.download(&logits, &mut out).unwrap();
    };
    let mut round = || {
        run(1, 1);
        run(8, 1);
        run(1, 33);
    };
    round();
    let before = CALLS.load(Ordering::SeqCst);
    round();
    CALLS.load(Ordering::SeqCst) - before
}

/// One test: the counters are the process's, and the harness allocates between tests.
#[test]
fn memory_is_a_contract() {
    a_step_allocates_nothing();
    plans_hold_and_dropping_gives_everything_back();
}

fn a_step_allocates_nothing() {
    for threads in [1, 3] {
        for tier in Cpu::tiers() {
            for compute in [Compute::Fast, Compute::Exact] {
                assert_eq!(allocations(threads, tier, compute), 0, "{tier}, {threads} threads, {compute:?}");
            }
        }
    }
}

fn plans_hold_and_dropping_gives_everything_back() {
    let before = BYTES.load(Ordering::SeqCst);
    let mut cpu = Cpu::new(&CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
    // Each array's start on a cache line, a chunk's bookkeeping, the list of layers.
    const SLACK: u64 = 2048;
    let grown = |from: usize| (BYTES.load(Ordering::SeqCst) - from) as u64;

    let at = BYTES.load(Ordering::SeqCst);
    let kv = cpu.kv(&kv_shape()).unwrap();
    let planned = cpu.kv_bytes(&kv_shape());
    assert!((planned..planned + SLACK).contains(&grown(at)), "cache: {planned} planned, {} allocated", grown(at));

    let at = BYTES.load(Ordering::SeqCst);
    let step = cpu.step(&LIMITS, HIDDEN, &kv_shape(), &MOE).unwrap();
    let planned = cpu.step_bytes(&LIMITS, HIDDEN, &kv_shape(), &MOE);
    assert!((planned..planned + SLACK).contains(&grown(at)), "step: {planned} planned, {} allocated", grown(at));

    // Large matrices have chunks of their own.
    let mut weights = Vec::with_capacity(8);
    for format in [FormatId::F32, FormatId::Q4_0, FormatId::Q4K, FormatId::Q6K] {
        let (rows, columns) = (8192, 512);
        let planned = cpu.weight_bytes(format, rows, columns);
        let at = BYTES.load(Ordering::SeqCst);
        weights.push(matrix(&mut cpu, &[format], rows, columns));
        assert!((planned..planned + SLACK).contains(&grown(at)), "{format}: {planned} planned, {} allocated", grown(at));
    }
    drop((kv, step, weights, cpu));
    let left = BYTES.load(Ordering::SeqCst) as i64 - before as i64;
    // The standard library keeps some bytes for each thread that ever was.
    assert!(left < 1024, "{left} bytes left");
}
