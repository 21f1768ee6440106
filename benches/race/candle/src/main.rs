//! Times one cell of the race with candle's quantised Llama; prints one JSON object.
//!
//! ```text
//! race-candle MODEL prefill TOKENS
//! race-candle MODEL decode DEPTH STEPS BATCH
//! ```
//!
//! `RAYON_NUM_THREADS` says how many threads. Each cell runs once after a short warm-up: who wants a median runs the program again.

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Error, Result, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use std::fs::File;
use std::time::Instant;

/// `rows` sequences of `len` tokens, none like the other.
fn tokens(rows: usize, len: usize) -> Result<Tensor> {
    let ids: Vec<u32> = (0..rows * len).map(|i| (i as u32).wrapping_mul(2_654_435_761) >> 17).collect();
    Tensor::from_vec(ids, (rows, len), &Device::Cpu)
}

/// The forward pass from `start` on, waited for: the likeliest token of each row.
fn step(model: &mut ModelWeights, input: &Tensor, start: usize) -> Result<Tensor> {
    let rows = input.dim(0)?;
    let chosen = model.forward(input, start)?.reshape((rows, ()))?.argmax(1)?;
    chosen.to_vec1::<u32>()?;
    Ok(chosen)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let usage = || Error::Msg("usage: race-candle MODEL prefill TOKENS | MODEL decode DEPTH STEPS BATCH".into());
    let number = |i: usize| -> Result<usize> { args.get(i).and_then(|a| a.parse().ok()).ok_or_else(usage) };
    let path = args.first().ok_or_else(usage)?;
    let mut file = File::open(path)?;
    let content = Content::read(&mut file)?;
    let mut model = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
    step(&mut model, &tokens(1, 16)?, 0)?;
    match args.get(1).map(String::as_str) {
        Some("prefill") => {
            let n = number(2)?;
            let input = tokens(1, n)?;
            let start = Instant::now();
            step(&mut model, &input, 0)?;
            let seconds = start.elapsed().as_secs_f64();
            println!("{{\"what\":\"prefill\",\"tokens\":{n},\"batch\":1,\"tok_s\":{}}}", n as f64 / seconds);
        }
        Some("decode") => {
            let (depth, steps, batch) = (number(2)?, number(3)?, number(4)?);
            let mut next = match depth {
                0 => tokens(batch, 1)?.reshape(batch)?,
                _ => step(&mut model, &tokens(batch, depth)?, 0)?,
            };
            let start = Instant::now();
            for i in 0..steps {
                next = step(&mut model, &next.reshape((batch, 1))?, depth + i)?;
            }
            let speed = (steps * batch) as f64 / start.elapsed().as_secs_f64();
            println!(
                "{{\"what\":\"decode\",\"depth\":{depth},\"tokens\":{steps},\"batch\":{batch},\"tok_s\":{speed}}}"
            );
        }
        _ => return Err(usage()),
    }
    Ok(())
}
