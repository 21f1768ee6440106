//! Logits of token ids, written to a safetensors file: `logits` f32 `[rows, vocab]` and, with `--hidden`, `hidden` f32
//! `[rows, hidden]`, the states after the final norm. Computes with f32 activations and an f32 cache on exactly dequantised
//! weights, unless `--fast` asks for the production path. The instrument for comparisons with other implementations.

mod support;

use loquat::KvDType;
use loquat::arch::Naming;
use loquat::backend::cpu::{Compute, Cpu, CpuOptions};
use loquat::batch::{Batch, BatchItem, BatchLimits, RowsWanted};
use loquat::model::{Logits, Model, ModelLimits, Progress, Transformer, Want};
use loquat::weights::no_progress;
use loquat::{BlockId, ModelFiles, OpenOptions};
use safetensors::tensor::{Dtype, TensorView};
use support::args::{Opt, Usage, Wrong};

const USAGE: Usage = Usage {
    program: "dump_logits",
    about: "Writes the logits of token ids to a safetensors file.",
    words: "",
    options: &[
        support::MODEL,
        Opt { name: "--ids", value: "1,2,3", help: "the tokens" },
        Opt { name: "--at", value: "all|last", help: "rows to write (default last)" },
        Opt { name: "--hidden", value: "", help: "write hidden states after the final norm too" },
        Opt { name: "--out", value: "FILE", help: "the file to write" },
        Opt { name: "--fast", value: "", help: "the production path: 8-bit activations where weights are quantised, F16 cache" },
        Opt { name: "--config", value: "PATH", help: "configuration to use in place of config.json" },
        Opt { name: "--tier", value: "NAME", help: "kernels to use, as scalar or avx2 (default: the best there is)" },
        support::THREADS,
    ],
};

/// Tokens run at a time.
const CHUNK: usize = 64;
const BLOCK_SIZE: usize = 16;

fn main() {
    support::end("dump_logits", run());
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let args = USAGE.read();
    let ids: Vec<u32> = args.list("--ids")?.ok_or_else(|| needed("--ids 1,2,3"))?;
    let out = args.path("--out").ok_or_else(|| needed("--out FILE"))?;
    let path = args.path("--model").ok_or_else(|| needed("--model PATH"))?;
    let all = match args.text("--at")?.unwrap_or("last") {
        "all" => true,
        "last" => false,
        other => return Err(Wrong(format!("--at: expected all or last, found {other}")).into()),
    };
    let (hidden, fast) = (args.flag("--hidden"), args.flag("--fast"));
    let options = OpenOptions { text: false, config: args.path("--config"), ..OpenOptions::default() };
    let files = ModelFiles::open(&path, &options, &mut no_progress)?;
    if let Some(config) = args.path("--config").filter(|_| files.naming() == Naming::Gguf) {
        let (config, path) = (config.display(), path.display());
        return Err(Wrong(format!("--config {config}: {path} is a GGUF file, which carries its configuration itself")).into());
    }
    let (vocab, context) = (files.spec().vocab, files.spec().context);
    if ids.len() > context {
        return Err(Wrong(format!("--ids: {} ids do not fit the model's context of {context}", ids.len())).into());
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
        return Err(Wrong(format!("--ids: expected ids below {vocab}, found {id}")).into());
    }

    let blocks = ids.len().div_ceil(BLOCK_SIZE);
    let most = BatchLimits { tokens: CHUNK, seqs: 1, blocks, rows: if all { CHUNK } else { 1 } };
    let kv_dtype = if fast { KvDType::F16 } else { KvDType::F32 };
    let limits = ModelLimits::even(files.spec(), most, blocks, BLOCK_SIZE, kv_dtype);
    let compute = if fast { Compute::Fast } else { Compute::Exact };
    let tier = args.text("--tier")?.map(str::to_owned);
    let backend = Cpu::new(&CpuOptions { threads: support::threads(&args)?, tier, compute })?;
    let mut model = Transformer::load(backend, &files, limits, &mut no_progress)?;

    let want = Want { logits: true, hidden };
    let mut results = Logits::with_capacity(most.rows, files.spec(), want)?;
    let mut batch = Batch::new(BLOCK_SIZE, model.groups(), most)?;
    let table: Vec<BlockId> = (0..blocks as u32).map(BlockId).collect();
    // Blocks enough for everything in each group, so that one table does for all.
    let tables = vec![&table[..]; model.groups().len()];
    let (mut logits, mut states, mut rows) = (Vec::new(), Vec::new(), 0);
    for start in (0..ids.len()).step_by(CHUNK) {
        let end = ids.len().min(start + CHUNK);
        let wanted = match (all, end == ids.len()) {
            (true, _) => RowsWanted::All,
            (false, true) => RowsWanted::Last,
            (false, false) => RowsWanted::None,
        };
        batch.clear();
        batch.push(BatchItem { tokens: &ids[start..end], start, total: ids.len(), tables: &tables, rows: wanted })?;
        model.begin(&batch, want)?;
        while model.advance(&mut || false, &mut results)? != Progress::Done {}
        for r in 0..results.rows() {
            let position = if all { start + r } else { end - 1 };
            for (what, row) in [("logit", results.row(r)), ("hidden state", results.hidden(r))] {
                if let Some(i) = row.iter().position(|v| !v.is_finite()) {
                    return Err(format!("position {position}: {what} {i}: expected a finite number, found {}", row[i]).into());
                }
            }
            logits.extend(results.row(r).iter().flat_map(|v| v.to_le_bytes()));
            states.extend(results.hidden(r).iter().flat_map(|v| v.to_le_bytes()));
            rows += 1;
        }
    }

    let mut tensors = vec![("logits", TensorView::new(Dtype::F32, vec![rows, vocab], &logits)?)];
    if hidden {
        tensors.push(("hidden", TensorView::new(Dtype::F32, vec![rows, files.spec().hidden], &states)?));
    }
    std::fs::write(&out, safetensors::serialize(tensors, None)?).map_err(|e| format!("{}: {e}", out.display()))?;
    Ok(())
}

fn needed(option: &str) -> Wrong {
    Wrong(format!("{option} is needed"))
}
