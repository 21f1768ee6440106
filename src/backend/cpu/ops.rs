//! The [`Backend`] operations of the CPU: checks and shapes here, work in the files beside.
#![forbid(unsafe_code)]

use super::arena::Aligned;
use super::float_env::FloatEnv;
use super::simd::{Input, Product, Products};
use super::weight::{Store, beside, check_order, malformed, values};
use super::{Compute, Cpu, CpuBuf, CpuKv, CpuStep, CpuWeight, attention, moe, vector};
use crate::arch::{Activation, Glu, NormSpec, RopeStyle};
use crate::backend::{AttnArgs, Backend, Heads, KvShape, MoeArgs, MoeShape, RowOrder, WeightPart};
use crate::batch::{Batch, BatchLimits};
use crate::dtype::FormatId;
use crate::error::{LoadError, RunError};
use crate::ids::{BlockCopy, BlockId};
use crate::quant;
use crate::weights::Panels;

impl Backend for Cpu {
    type Buf = CpuBuf;
    type Weight = CpuWeight;
    type Kv = CpuKv;
    type Step = CpuStep;

    fn describe(&self) -> String {
        let compute = match self.compute {
            Compute::Exact => "exact f32 products",
            Compute::Fast => "8-bit activations",
        };
        let threads = self.threads();
        format!("CPU, {}, {threads} {}, {compute}", self.tier.name, if threads == 1 { "thread" } else { "threads" })
    }

    fn tier(&self) -> &'static str {
        self.tier.name
    }

    fn weight_bytes(&self, format: FormatId, rows: usize, columns: usize) -> u64 {
        Store::choose(format, self.compute).and_then(|s| s.bytes(rows, columns)).map_or(0, |b| b as u64)
    }

    fn panels_bytes(&self, format: FormatId, rows: usize, columns: usize, panels: &Panels) -> Option<u64> {
        beside(format, rows, columns, panels, self.compute)
    }

    fn kv_bytes(&self, shape: &KvShape) -> u64 {
        CpuKv::bytes(shape).map_or(u64::MAX, |b| b as u64)
    }

    fn step_bytes(&self, limits: &BatchLimits, max_columns: usize, kv: &KvShape, moe: &MoeShape) -> u64 {
        CpuStep::bytes(limits, max_columns, kv, moe, self.threads(), self.tier)
    }

    fn buf(&mut self, len: usize) -> Result<CpuBuf, RunError> {
        Ok(CpuBuf(Aligned::zeroed(len)?))
    }

    fn vector(&mut self, parts: &[WeightPart<'_>], plus: f32) -> Result<CpuBuf, LoadError> {
        let _env = FloatEnv::enter();
        let mut len = 0usize;
        for part in parts {
            // Checked before the buffer is sized by it.
            let (n, format) = (values(part)?, part.view.format);
            if format.bytes_of(n) != Some(part.view.bytes.len()) {
                let found = format!("{} bytes of {format}", part.view.bytes.len());
                return Err(malformed(part, "data", format!("{n} values"), found));
            }
            len = len.saturating_add(n);
        }
        let mut buf = self.buf(len)?;
        let mut rest = &mut buf.0[..];
        for part in parts {
            let view = &part.view;
            let (out, after) = rest.split_at_mut(view.len());
            rest = after;
            let unreadable = |_| LoadError::TensorFormat {
                tensor: part.name.into(),
                expected: "a floating-point or quantised format",
                found: view.format,
            };
            match part.order {
                RowOrder::Natural => quant::decode(view.format, view.bytes, out).map_err(unreadable)?,
                order => {
                    check_order(part, view.len())?;
                    let mut file = vec![0.0; view.len()];
                    quant::decode(view.format, view.bytes, &mut file).map_err(unreadable)?;
                    for (i, v) in out.iter_mut().enumerate() {
                        *v = file[order.source_row(i, view.len())];
                    }
                }
            }
        }
        if plus != 0.0 {
            buf.0.iter_mut().for_each(|v| *v += plus);
        }
        Ok(buf)
    }

    fn weight(&mut self, parts: &[WeightPart<'_>]) -> Result<CpuWeight, LoadError> {
        CpuWeight::load(parts, self.compute, &self.pool, &mut self.arena)
    }

    fn kv(&mut self, shape: &KvShape) -> Result<CpuKv, RunError> {
        CpuKv::new(shape)
    }

    fn step(&mut self, limits: &BatchLimits, max_columns: usize, kv: &KvShape, moe: &MoeShape) -> Result<CpuStep, RunError> {
        CpuStep::new(limits, max_columns, kv, moe, self.threads(), self.tier)
    }

    fn begin(&mut self, batch: &Batch, step: &mut CpuStep) -> Result<(), RunError> {
        step.begin(batch)
    }

    fn upload(&mut self, values: &[f32], buf: &mut CpuBuf) -> Result<(), RunError> {
        buf.0[..values.len()].copy_from_slice(values);
        Ok(())
    }

    fn embed(&mut self, step: &CpuStep, table: &CpuWeight, scale: f32, out: &mut CpuBuf) -> Result<(), RunError> {
        if let Some(&token) = step.tokens.iter().find(|&&t| t as usize >= table.rows()) {
            return Err(RunError::BatchTooLarge { what: "token id", found: token as usize, limit: table.rows() - 1 });
        }
        let k = table.columns();
        self.pool.for_each_row(&mut out.0[..step.tokens.len() * k], k, 4, |first, rows| {
            for (row, &token) in rows.chunks_exact_mut(k).zip(&step.tokens[first..]) {
                table.decode_row(token as usize, row);
                if scale != 1.0 {
                    row.iter_mut().for_each(|v| *v *= scale);
                }
            }
        });
        Ok(())
    }

    fn embed_positions(&mut self, step: &CpuStep, table: &CpuWeight, x: &mut CpuBuf) -> Result<(), RunError> {
        if let Some(&at) = step.positions.iter().find(|&&at| at as usize >= table.rows()) {
            return Err(RunError::BatchTooLarge { what: "position", found: at as usize, limit: table.rows() - 1 });
        }
        let k = table.columns();
        self.pool.for_each_row(&mut x.0[..step.positions.len() * k], k, 4, |first, rows| {
            let mut values = [0.0; PART];
            for (row, &at) in rows.chunks_exact_mut(k).zip(&step.positions[first..]) {
                for (i, x) in row.chunks_mut(PART).enumerate() {
                    let values = &mut values[..x.len()];
                    table.decode_part(at as usize, i * PART, values);
                    x.iter_mut().zip(values).for_each(|(x, v)| *x += *v);
                }
            }
        });
        Ok(())
    }

    fn add(&mut self, len: usize, x: &mut CpuBuf, delta: &CpuBuf, scale: f32) -> Result<(), RunError> {
        vector::add(&self.pool, self.tier, &mut x.0[..len], &delta.0, scale);
        Ok(())
    }

    fn add_norm(
        &mut self,
        rows: usize,
        width: usize,
        x: &mut CpuBuf,
        delta: Option<(&CpuBuf, f32)>,
        norm: &NormSpec,
        weight: &CpuBuf,
        bias: Option<&CpuBuf>,
        out: &mut CpuBuf,
    ) -> Result<(), RunError> {
        let (delta, bias, len) = (delta.map(|(d, scale)| (&d.0[..], scale)), bias.map(|b| &b.0[..]), rows * width);
        vector::add_norm(&self.pool, self.tier, width, &mut x.0[..len], delta, norm, &weight.0, bias, &mut out.0[..len]);
        Ok(())
    }

    fn linear(
        &mut self,
        rows: usize,
        x: &CpuBuf,
        w: &CpuWeight,
        bias: Option<&CpuBuf>,
        step: &mut CpuStep,
        out: &mut CpuBuf,
    ) -> Result<(), RunError> {
        let input = Input { x: &x.0[..rows * w.columns()], rows, bias: bias.map(|b| &b.0[..w.rows()]) };
        self.tier.linear.matmul(&self.pool, w, &input, &mut step.words, &mut out.0[..rows * w.rows()]);
        Ok(())
    }

    fn linear_heads(
        &mut self,
        rows: usize,
        x: &CpuBuf,
        from: Heads,
        w: &[CpuWeight],
        step: &mut CpuStep,
        out: &mut CpuBuf,
        to: Heads,
    ) -> Result<(), RunError> {
        assert!(w.len() == from.heads && w.len() == to.heads, "{} matrices, {from:?}, {to:?}", w.len());
        // As many heads at once as the scratch holds.
        let most = (step.words.len() / (rows * from.dim).max(1)).max(1);
        for first in (0..w.len()).step_by(most) {
            let of = |i| Product {
                w: &w[first + i],
                bias: None,
                rows: 0..rows,
                x: from.offset + (first + i) * from.dim,
                y: to.offset + (first + i) * to.dim,
                before: i * rows,
            };
            let all = Products { count: most.min(w.len() - first), of: &of, x: &x.0, x_stride: from.stride, y_stride: to.stride };
            self.tier.linear.products(&self.pool, &all, &mut step.words, &mut out.0);
        }
        Ok(())
    }

    fn norm_heads(
        &mut self,
        rows: usize,
        x: &mut CpuBuf,
        heads: Heads,
        norm: &NormSpec,
        weight: &CpuBuf,
    ) -> Result<(), RunError> {
        vector::norm_heads(&self.pool, self.tier, rows, &mut x.0, heads, norm, &weight.0);
        Ok(())
    }

    fn rope(
        &mut self,
        rows: usize,
        x: &mut CpuBuf,
        heads: Heads,
        angles: &CpuBuf,
        rotary: usize,
        style: RopeStyle,
    ) -> Result<(), RunError> {
        vector::rope(&self.pool, self.tier, rows, &mut x.0, heads, &angles.0, rotary, style);
        Ok(())
    }

    fn kv_write(
        &mut self,
        step: &CpuStep,
        kv_src: &CpuBuf,
        k: Heads,
        v: Heads,
        kv: &mut CpuKv,
        layer: usize,
    ) -> Result<(), RunError> {
        kv.write(&self.pool, self.tier, layer, step.slots(kv.group_of(layer)), &kv_src.0, k, v);
        Ok(())
    }

    fn attention(
        &mut self,
        step: &mut CpuStep,
        args: &AttnArgs,
        q_src: &CpuBuf,
        q: Heads,
        kv: &CpuKv,
        layer: usize,
        sinks: Option<&CpuBuf>,
        out: &mut CpuBuf,
    ) -> Result<(), RunError> {
        let sinks = sinks.map(|s| &s.0[..args.dims.heads]);
        // The caller's thread joins pieces outside of the pool's jobs.
        let _env = FloatEnv::enter();
        let (batch, scratch) = step.attention(kv.group_of(layer));
        attention::attention(&self.pool, self.tier, scratch, batch, args, sinks, &q_src.0, q, kv, layer, &mut out.0);
        Ok(())
    }

    fn gate(&mut self, rows: usize, width: usize, glu: Glu, x: &CpuBuf, out: &mut CpuBuf) -> Result<(), RunError> {
        vector::gate(&self.pool, self.tier, width, glu, &x.0[..2 * rows * width], &mut out.0[..rows * width]);
        Ok(())
    }

    fn activate(&mut self, len: usize, act: Activation, x: &mut CpuBuf) -> Result<(), RunError> {
        vector::activate(&self.pool, self.tier, act, &mut x.0[..len]);
        Ok(())
    }

    fn moe(
        &mut self,
        rows: usize,
        x: &CpuBuf,
        args: &MoeArgs<'_, Self>,
        step: &mut CpuStep,
        out: &mut CpuBuf,
    ) -> Result<(), RunError> {
        let len = rows * args.hidden;
        moe::moe(&self.pool, self.tier, rows, &x.0[..len], args, &mut step.moe, &mut step.words, &mut out.0[..len]);
        Ok(())
    }

    fn gather(&mut self, step: &CpuStep, width: usize, x: &CpuBuf, out: &mut CpuBuf) -> Result<(), RunError> {
        vector::gather(width, &step.rows, &x.0, &mut out.0);
        Ok(())
    }

    fn scale_cap(&mut self, len: usize, scale: f32, softcap: Option<f32>, x: &mut CpuBuf) -> Result<(), RunError> {
        vector::scale_cap(&self.pool, self.tier, &mut x.0[..len], scale, softcap);
        Ok(())
    }

    fn copy_blocks(&mut self, kv: &mut CpuKv, copies: &[BlockCopy]) -> Result<(), RunError> {
        kv.copy_blocks(copies);
        Ok(())
    }

    fn swap_out(&mut self, kv: &mut CpuKv, copies: &[BlockCopy]) -> Result<(), RunError> {
        kv.swap_out(copies);
        Ok(())
    }

    fn swap_in(&mut self, kv: &mut CpuKv, copies: &[BlockCopy]) -> Result<(), RunError> {
        kv.swap_in(copies);
        Ok(())
    }

    fn read_block(&mut self, kv: &CpuKv, group: usize, block: BlockId, tokens: usize, out: &mut [u8]) -> Result<(), RunError> {
        kv.read_block(group, block, tokens, out);
        Ok(())
    }

    fn write_block(&mut self, kv: &mut CpuKv, group: usize, block: BlockId, tokens: usize, bytes: &[u8]) -> Result<(), RunError> {
        kv.write_block(group, block, tokens, bytes);
        Ok(())
    }

    fn download(&mut self, buf: &CpuBuf, out: &mut [f32]) -> Result<(), RunError> {
        out.copy_from_slice(&buf.0[..out.len()]);
        Ok(())
    }
}

/// Values of a row that are decoded at a time: whole blocks of every format.
const PART: usize = 256;

#[cfg(test)]
mod tests;
