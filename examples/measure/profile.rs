//! Where the time of a step goes: a backend around the CPU's that times each operation. It stands between the model and its
//! device only where it is asked for, so that it costs nothing where it is not.
//!
//! What runs between two operations, angles of rotary tables among it, is the rest; what comes before the first is the plan and
//! the batch; what comes after the last, the choice of tokens and the bookkeeping.

use loquat::arch::{Activation, Ffn, Glu, NormSpec, RopeStyle};
use loquat::backend::cpu::{Cpu, CpuOptions};
use loquat::backend::{AttnArgs, Backend, Heads, KvShape, MoeArgs, MoeShape, WeightPart};
use loquat::batch::{Batch, BatchLimits};
use loquat::engine::EngineParts;
use loquat::model::{ModelLimits, Transformer, Want};
use loquat::sched::ContinuousBatching;
use loquat::weights::{Panels, no_progress};
use loquat::{BlockCopy, BlockId, Engine, EngineConfig, FormatId, LoadError, MemoryPlan, ModelFiles, RunError};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a step spends its time on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Op {
    Plan,
    Embed,
    Norm,
    Qkv,
    Rope,
    KvWrite,
    Attention,
    Out,
    GateUp,
    Activation,
    Down,
    Linear,
    Gather,
    Head,
    Copy,
    Choice,
}

const NAMES: [&str; 16] = [
    "plan, batch",
    "embed",
    "norms, adds",
    "linear q k v",
    "rope",
    "kv write",
    "attention",
    "linear out",
    "linear gate up",
    "activation",
    "linear down",
    "linear, others",
    "gather rows",
    "linear head",
    "copies",
    "tokens, commit",
];

/// The role of a matrix by its tensors' names, whoever gave them.
fn role(name: &str) -> Op {
    let roles: [(Op, &[&str]); 5] = [
        (Op::Down, &["down_proj", "ffn_down", "mlp.c_proj", "fc2", "4h_to_h"]),
        (Op::GateUp, &["gate_proj", "up_proj", "gate_up", "ffn_gate", "ffn_up", "c_fc", "fc1", "h_to_4h"]),
        (Op::Out, &["o_proj", "attn_output", "attn.c_proj", "attention.dense", "out_proj"]),
        (Op::Qkv, &["q_proj", "k_proj", "v_proj", "qkv", "attn_q", "attn_k", "attn_v", "c_attn", "query_key_value"]),
        // Tied embeddings are multiplied with as the head; looking tokens up is another operation.
        (Op::Head, &["lm_head", "embed_out", "embed_tokens", "token_embd", "wte", "word_embeddings", "embed_in"]),
    ];
    if name == "output.weight" {
        return Op::Head;
    }
    roles.iter().find(|(_, parts)| parts.iter().any(|part| name.contains(part))).map_or(Op::Linear, |(op, _)| *op)
}

#[derive(Clone, Copy, Default)]
struct Tally {
    calls: usize,
    time: Duration,
    /// Of weights, or of the cache, that were to be read.
    bytes: u64,
    /// Multiplications and additions.
    operations: u64,
}

#[derive(Clone, Default)]
struct Tallies {
    ops: [Tally; NAMES.len()],
    steps: usize,
    whole: Duration,
    /// Begin of the first operation of the open step, and end of the last.
    first: Option<Instant>,
    last: Option<Instant>,
}

/// What was measured so far, shared by the backend and who asks.
#[derive(Clone, Default)]
pub(crate) struct Profile(Arc<Mutex<Tallies>>);

impl Profile {
    fn with<T>(&self, f: impl FnOnce(&mut Tallies) -> T) -> T {
        // Counters alone: a panic in between leaves nothing broken.
        f(&mut self.0.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        self.with(|t| *t = Tallies::default());
    }

    /// What there is, and begins anew.
    pub(crate) fn taken(&self) -> Report {
        Report(self.with(std::mem::take))
    }

    /// A call of the engine has ended; it `ran` a step, or found nothing to do.
    pub(crate) fn step(&self, start: Instant, ran: bool) {
        self.with(|t| {
            let (first, last) = (t.first.take(), t.last.take());
            let (Some(first), Some(last), true) = (first, last, ran) else { return };
            t.steps += 1;
            t.whole += start.elapsed();
            for (op, time) in [(Op::Plan, first - start), (Op::Choice, last.elapsed())] {
                t.ops[op as usize].calls += 1;
                t.ops[op as usize].time += time;
            }
        });
    }

    fn add(&self, op: Op, start: Instant, bytes: u64, operations: u64) {
        let end = Instant::now();
        self.with(|t| {
            t.first.get_or_insert(start);
            t.last = Some(end);
            let tally = &mut t.ops[op as usize];
            tally.calls += 1;
            tally.time += end - start;
            tally.bytes += bytes;
            tally.operations += operations;
        });
    }
}

/// Name, calls and milliseconds a step, share, GB/s and Gop/s where they mean something.
type Row = (&'static str, f64, f64, f64, Option<f64>, Option<f64>);

/// A profile that is complete.
pub(crate) struct Report(Tallies);

impl Report {
    /// What was timed, and the rest last.
    fn rows(&self) -> Vec<Row> {
        let Tallies { ops, steps, whole, .. } = &self.0;
        let (steps, whole) = ((*steps).max(1) as f64, whole.as_secs_f64().max(1e-12));
        let known: f64 = ops.iter().map(|t| t.time.as_secs_f64()).sum();
        let row = |(name, t): (&&'static str, &Tally)| {
            let seconds = t.time.as_secs_f64().max(1e-12);
            let rate = |n: u64| (n > 0).then_some(n as f64 / seconds / 1e9);
            (*name, t.calls as f64 / steps, seconds * 1e3 / steps, seconds / whole, rate(t.bytes), rate(t.operations))
        };
        let mut rows: Vec<_> = NAMES.iter().zip(ops).filter(|(_, t)| t.calls > 0).map(row).collect();
        let rest = (whole - known).max(0.0);
        rows.push(("rest", 0.0, rest * 1e3 / steps, rest / whole, None, None));
        rows
    }

    pub(crate) fn json(&self) -> Value {
        let ops: Vec<Value> = self
            .rows()
            .into_iter()
            .map(|(op, calls, ms, share, gb_s, gop_s)| {
                json!({"op": op, "calls_a_step": calls, "ms_a_step": ms, "share": share, "gb_s": gb_s, "gop_s": gop_s})
            })
            .collect();
        json!({"steps": self.0.steps, "ms_a_step": self.0.whole.as_secs_f64() * 1e3 / self.0.steps.max(1) as f64, "ops": ops})
    }

    pub(crate) fn table(&self, out: &mut impl Write) -> std::io::Result<()> {
        let rate = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.1}"));
        writeln!(out, "  a step of {:<16} {:>8} {:>9} {:>8} {:>8} {:>8}", self.0.steps, "calls", "ms", "share", "GB/s", "Gop/s")?;
        for (name, calls, ms, share, gb_s, gop_s) in self.rows() {
            let (gb_s, gop_s, percent) = (rate(gb_s), rate(gop_s), share * 100.0);
            writeln!(out, "  {name:<26} {calls:>8.1} {ms:>9.3} {percent:>6.1} % {gb_s:>8} {gop_s:>8}")?;
        }
        Ok(())
    }
}

/// An engine as [`Engine::new`] makes it, but for the timer.
pub(crate) fn engine(files: &ModelFiles, config: &EngineConfig, profile: &Profile) -> Result<Engine, Box<dyn std::error::Error>> {
    let spec = files.spec();
    if spec.layers.iter().any(|l| matches!(l.ffn, Ffn::Moe { .. })) {
        return Err("--profile: expected a model without experts, found one with".into());
    }
    let options = CpuOptions { threads: config.threads, tier: config.tier.clone(), compute: config.compute };
    let cpu = Cpu::new(&options)?;
    let blocks = config.cache_tokens.div_ceil(config.block_size);
    let batch = BatchLimits {
        tokens: config.step_tokens,
        seqs: config.max_batch,
        blocks: blocks * config.max_batch,
        rows: config.max_batch,
    };
    let limits = ModelLimits::even(spec, batch, blocks, config.block_size, config.kv_dtype);
    let want = Want { logits: true, hidden: false };
    let plan = MemoryPlan::of(files, &cpu, &limits)?.with_logits(spec, batch.rows, want);
    let backend =
        Timed { cpu, profile: profile.clone(), cache_bytes: config.kv_dtype.bytes() as u64, keys: Vec::new(), pairs: 0 };
    Ok(Engine::from_parts(EngineParts {
        model: Box::new(Transformer::load(backend, files, limits, &mut no_progress)?),
        scheduler: Box::new(ContinuousBatching::default()),
        max_seqs: config.max_seqs,
        prompt_logits: false,
        want,
        plan,
    })?)
}

/// The CPU with a clock.
struct Timed {
    cpu: Cpu,
    profile: Profile,
    /// Bytes of a value in the cache.
    cache_bytes: u64,
    /// Of the batch: tokens that each sequence looks at, and pairs of a query and a key.
    keys: Vec<u64>,
    pairs: u64,
}

/// A matrix that knows what it is for.
struct Matrix {
    weight: <Cpu as Backend>::Weight,
    op: Op,
    bytes: u64,
    values: u64,
}

type Buf = <Cpu as Backend>::Buf;
type Kv = <Cpu as Backend>::Kv;
type Step = <Cpu as Backend>::Step;
type Run = Result<(), RunError>;

impl Timed {
    fn timed(&mut self, op: Op, f: impl FnOnce(&mut Cpu) -> Run) -> Run {
        let start = Instant::now();
        let result = f(&mut self.cpu);
        self.profile.add(op, start, 0, 0);
        result
    }
}

impl Backend for Timed {
    type Buf = Buf;
    type Weight = Matrix;
    type Kv = Kv;
    type Step = Step;

    fn describe(&self) -> String {
        self.cpu.describe()
    }

    fn tier(&self) -> &'static str {
        self.cpu.tier()
    }

    fn weight_bytes(&self, format: FormatId, rows: usize, columns: usize) -> u64 {
        self.cpu.weight_bytes(format, rows, columns)
    }

    fn panels_bytes(&self, format: FormatId, rows: usize, columns: usize, panels: &Panels) -> Option<u64> {
        self.cpu.panels_bytes(format, rows, columns, panels)
    }

    fn kv_bytes(&self, shape: &KvShape) -> u64 {
        self.cpu.kv_bytes(shape)
    }

    fn step_bytes(&self, limits: &BatchLimits, max_columns: usize, kv: &KvShape, moe: &MoeShape) -> u64 {
        self.cpu.step_bytes(limits, max_columns, kv, moe)
    }

    fn buf(&mut self, len: usize) -> Result<Buf, RunError> {
        self.cpu.buf(len)
    }

    fn vector(&mut self, parts: &[WeightPart<'_>], plus: f32) -> Result<Buf, LoadError> {
        self.cpu.vector(parts, plus)
    }

    fn weight(&mut self, parts: &[WeightPart<'_>]) -> Result<Matrix, LoadError> {
        let (mut bytes, mut values) = (0, 0);
        for part in parts {
            if let [rows, columns] = *part.view.shape {
                bytes += self.cpu.weight_bytes(part.view.format, rows, columns);
                values += (rows * columns) as u64;
            }
        }
        let op = parts.first().map_or(Op::Linear, |part| role(part.name));
        Ok(Matrix { weight: self.cpu.weight(parts)?, op, bytes, values })
    }

    fn kv(&mut self, shape: &KvShape) -> Result<Kv, RunError> {
        self.cpu.kv(shape)
    }

    fn step(&mut self, limits: &BatchLimits, max_columns: usize, kv: &KvShape, moe: &MoeShape) -> Result<Step, RunError> {
        self.keys.reserve(limits.seqs);
        self.cpu.step(limits, max_columns, kv, moe)
    }

    fn begin(&mut self, batch: &Batch, step: &mut Step) -> Run {
        self.keys.clear();
        self.keys.extend(batch.kv_lens().iter().map(|n| u64::from(*n)));
        self.pairs = batch.positions().iter().map(|p| u64::from(*p) + 1).sum();
        self.timed(Op::Copy, |cpu| cpu.begin(batch, step))
    }

    fn upload(&mut self, values: &[f32], buf: &mut Buf) -> Run {
        self.timed(Op::Copy, |cpu| cpu.upload(values, buf))
    }

    fn embed(&mut self, step: &Step, table: &Matrix, scale: f32, out: &mut Buf) -> Run {
        self.timed(Op::Embed, |cpu| cpu.embed(step, &table.weight, scale, out))
    }

    fn embed_positions(&mut self, step: &Step, table: &Matrix, x: &mut Buf) -> Run {
        self.timed(Op::Embed, |cpu| cpu.embed_positions(step, &table.weight, x))
    }

    fn add(&mut self, len: usize, x: &mut Buf, delta: &Buf, scale: f32) -> Run {
        self.timed(Op::Norm, |cpu| cpu.add(len, x, delta, scale))
    }

    fn add_norm(
        &mut self,
        rows: usize,
        width: usize,
        x: &mut Buf,
        delta: Option<(&Buf, f32)>,
        norm: &NormSpec,
        weight: &Buf,
        bias: Option<&Buf>,
        out: &mut Buf,
    ) -> Run {
        self.timed(Op::Norm, |cpu| cpu.add_norm(rows, width, x, delta, norm, weight, bias, out))
    }

    fn linear(&mut self, rows: usize, x: &Buf, w: &Matrix, bias: Option<&Buf>, step: &mut Step, out: &mut Buf) -> Run {
        let start = Instant::now();
        let result = self.cpu.linear(rows, x, &w.weight, bias, step, out);
        self.profile.add(w.op, start, w.bytes, 2 * rows as u64 * w.values);
        result
    }

    /// Head by head, which splits it less well over threads than the whole does.
    fn linear_heads(
        &mut self,
        rows: usize,
        x: &Buf,
        from: Heads,
        w: &[Matrix],
        step: &mut Step,
        out: &mut Buf,
        to: Heads,
    ) -> Run {
        let one = |heads: Heads, h: usize| Heads { heads: 1, offset: heads.offset + h * heads.dim, ..heads };
        w.iter().enumerate().try_for_each(|(h, w)| {
            let start = Instant::now();
            let weights = std::slice::from_ref(&w.weight);
            let result = self.cpu.linear_heads(rows, x, one(from, h), weights, step, out, one(to, h));
            self.profile.add(w.op, start, w.bytes, 2 * rows as u64 * w.values);
            result
        })
    }

    fn norm_heads(&mut self, rows: usize, x: &mut Buf, heads: Heads, norm: &NormSpec, weight: &Buf) -> Run {
        self.timed(Op::Norm, |cpu| cpu.norm_heads(rows, x, heads, norm, weight))
    }

    fn rope(&mut self, rows: usize, x: &mut Buf, heads: Heads, angles: &Buf, rotary: usize, style: RopeStyle) -> Run {
        self.timed(Op::Rope, |cpu| cpu.rope(rows, x, heads, angles, rotary, style))
    }

    fn kv_write(&mut self, step: &Step, kv_src: &Buf, k: Heads, v: Heads, kv: &mut Kv, layer: usize) -> Run {
        self.timed(Op::KvWrite, |cpu| cpu.kv_write(step, kv_src, k, v, kv, layer))
    }

    fn attention(
        &mut self,
        step: &mut Step,
        args: &AttnArgs,
        q_src: &Buf,
        q: Heads,
        kv: &Kv,
        layer: usize,
        sinks: Option<&Buf>,
        out: &mut Buf,
    ) -> Run {
        let d = &args.dims;
        let width = d.kv_heads * (d.qk_dim + if d.v_in_k { 0 } else { d.v_dim });
        let seen = |n: &u64| args.window.map_or(*n, |w| (*n).min(w as u64));
        let bytes = self.keys.iter().map(seen).sum::<u64>() * width as u64 * self.cache_bytes;
        // Of a windowed layer this counts what it skips.
        let operations = 2 * self.pairs * (d.heads * (d.qk_dim + d.v_dim)) as u64;
        let start = Instant::now();
        let result = self.cpu.attention(step, args, q_src, q, kv, layer, sinks, out);
        self.profile.add(Op::Attention, start, bytes, if args.window.is_some() { 0 } else { operations });
        result
    }

    fn gate(&mut self, rows: usize, width: usize, glu: Glu, x: &Buf, out: &mut Buf) -> Run {
        self.timed(Op::Activation, |cpu| cpu.gate(rows, width, glu, x, out))
    }

    fn activate(&mut self, len: usize, act: Activation, x: &mut Buf) -> Run {
        self.timed(Op::Activation, |cpu| cpu.activate(len, act, x))
    }

    fn moe(&mut self, _: usize, _: &Buf, _: &MoeArgs<'_, Self>, _: &mut Step, _: &mut Buf) -> Run {
        unreachable!("a model with experts was refused")
    }

    fn gather(&mut self, step: &Step, width: usize, x: &Buf, out: &mut Buf) -> Run {
        self.timed(Op::Gather, |cpu| cpu.gather(step, width, x, out))
    }

    fn scale_cap(&mut self, len: usize, scale: f32, softcap: Option<f32>, x: &mut Buf) -> Run {
        self.timed(Op::Head, |cpu| cpu.scale_cap(len, scale, softcap, x))
    }

    fn copy_blocks(&mut self, kv: &mut Kv, copies: &[BlockCopy]) -> Run {
        self.timed(Op::Copy, |cpu| cpu.copy_blocks(kv, copies))
    }

    fn swap_out(&mut self, kv: &mut Kv, copies: &[BlockCopy]) -> Run {
        self.timed(Op::Copy, |cpu| cpu.swap_out(kv, copies))
    }

    fn swap_in(&mut self, kv: &mut Kv, copies: &[BlockCopy]) -> Run {
        self.timed(Op::Copy, |cpu| cpu.swap_in(kv, copies))
    }

    fn read_block(&mut self, kv: &Kv, group: usize, block: BlockId, tokens: usize, out: &mut [u8]) -> Run {
        self.cpu.read_block(kv, group, block, tokens, out)
    }

    fn write_block(&mut self, kv: &mut Kv, group: usize, block: BlockId, tokens: usize, bytes: &[u8]) -> Run {
        self.cpu.write_block(kv, group, block, tokens, bytes)
    }

    fn download(&mut self, buf: &Buf, out: &mut [f32]) -> Run {
        self.timed(Op::Copy, |cpu| cpu.download(buf, out))
    }
}
