//! Storage formats of weights: what the bytes of a block mean. One module a format, one table of all of them.
//!
//! A block stands at no particular alignment and holds any bytes whatever: every format decodes every bit pattern to
//! some numbers, NaN and infinities among them, and never panics. Decoding is the scalar truth that the kernels of the
//! backends are tested against. The module knows nothing of tensors, files or kernels.
//!
//! Invariant: `decode` gives the same bits on every machine, a NaN's payload aside (one order of operations a format, no
//! fused multiply-add), and a written block decodes to finite numbers only.
#![forbid(unsafe_code)]

pub(crate) use bits::IQ4_LEVELS;

use crate::dtype::FormatId;
pub use crate::error::QuantError;

mod bits;
mod fit;
mod grid;
mod k_scales;

pub mod bfloat16;
pub mod float16;
pub mod float32;
pub mod float64;
pub mod float8_e4m3;
pub mod float8_e5m2;
pub mod iq1_m;
pub mod iq1_s;
pub mod iq2_s;
pub mod iq2_xs;
pub mod iq2_xxs;
pub mod iq3_s;
pub mod iq3_xxs;
pub mod iq4_nl;
pub mod iq4_xs;
pub mod mxfp4;
pub mod nvfp4;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;
pub mod tq1_0;
pub mod tq2_0;

/// A storage format: blocks of a fixed number of values in a fixed number of bytes.
pub trait Format: 'static {
    /// Its name elsewhere in the crate.
    const ID: FormatId;
    /// Values in a block.
    const BLOCK_LEN: usize = Self::ID.block_len();
    /// A block as it lies in a file: bytes only, so that it has no alignment.
    type Block: bytemuck::Pod;

    /// Writes the block's values to `out`, which has room for exactly [`BLOCK_LEN`](Self::BLOCK_LEN).
    fn decode(block: &Self::Block, out: &mut [f32]);
}

/// A format that this crate can also write.
pub trait Encode: Format {
    /// The largest magnitude that a block can hold; [`encode`] refuses larger ones.
    const LIMIT: f32;

    /// Stores `src` ([`BLOCK_LEN`](Format::BLOCK_LEN) finite values within [`LIMIT`](Self::LIMIT)) as exactly as the
    /// format's squared error lets it.
    fn encode(src: &[f32], block: &mut Self::Block);
}

/// Bytes of whole blocks, at any address, to their values.
pub type DecodeFn = fn(&[u8], &mut [f32]);

/// Values to the bytes of whole blocks.
pub type EncodeFn = fn(&[f32], &mut [u8]);

/// A format with its type erased: functions over the bytes of any number of blocks.
#[derive(Clone, Copy, Debug)]
pub struct Codec {
    /// The format.
    pub id: FormatId,
    /// Bytes of whole blocks to values. Panics where the lengths do not fit each other; [`decode`] checks them.
    pub decode: DecodeFn,
    /// Values to bytes of whole blocks, where the crate can write the format. Panics where the lengths do not fit each
    /// other; [`encode`] checks them, and the values too.
    pub encode: Option<EncodeFn>,
    /// The largest magnitude that `encode` takes; 0 where there is none.
    pub limit: f32,
}

impl Codec {
    const fn reader<F: Format>() -> Codec {
        const {
            assert!(size_of::<F::Block>() == F::ID.block_bytes() && align_of::<F::Block>() == 1);
            assert!(F::BLOCK_LEN == F::ID.block_len());
        }
        Codec { id: F::ID, decode: decode_blocks::<F>, encode: None, limit: 0.0 }
    }

    const fn writer<F: Encode>() -> Codec {
        Codec { encode: Some(encode_blocks::<F>), limit: F::LIMIT, ..Codec::reader::<F>() }
    }
}

static CODECS: &[Codec] = &[
    Codec::writer::<float32::F32>(),
    Codec::writer::<float16::F16>(),
    Codec::writer::<bfloat16::BF16>(),
    Codec::reader::<float64::F64>(),
    Codec::reader::<float8_e4m3::F8E4M3>(),
    Codec::reader::<float8_e5m2::F8E5M2>(),
    Codec::writer::<q4_0::Q4_0>(),
    Codec::writer::<q4_1::Q4_1>(),
    Codec::writer::<q5_0::Q5_0>(),
    Codec::writer::<q5_1::Q5_1>(),
    Codec::writer::<q8_0::Q8_0>(),
    Codec::reader::<q2_k::Q2K>(),
    Codec::reader::<q3_k::Q3K>(),
    Codec::writer::<q4_k::Q4K>(),
    Codec::writer::<q5_k::Q5K>(),
    Codec::writer::<q6_k::Q6K>(),
    Codec::reader::<iq2_xxs::IQ2XXS>(),
    Codec::reader::<iq2_xs::IQ2XS>(),
    Codec::reader::<iq2_s::IQ2S>(),
    Codec::reader::<iq3_xxs::IQ3XXS>(),
    Codec::reader::<iq3_s::IQ3S>(),
    Codec::reader::<iq1_s::IQ1S>(),
    Codec::reader::<iq1_m::IQ1M>(),
    Codec::reader::<iq4_nl::IQ4NL>(),
    Codec::reader::<iq4_xs::IQ4XS>(),
    Codec::reader::<tq1_0::TQ1_0>(),
    Codec::reader::<tq2_0::TQ2_0>(),
    Codec::reader::<mxfp4::MXFP4>(),
    Codec::reader::<nvfp4::NVFP4>(),
];

/// Every format that the crate reads.
pub fn codecs() -> &'static [Codec] {
    CODECS
}

/// How to read and perhaps write `format`; `None` for the integer types, which hold no weights.
pub fn codec(format: FormatId) -> Option<&'static Codec> {
    CODECS.iter().find(|codec| codec.id == format)
}

/// Decodes whole blocks, which may start at any address. `out` is written only when everything fits. Allocates nothing.
pub fn decode(format: FormatId, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    let codec = codec(format).ok_or(QuantError::NotReadable { format })?;
    if !bytes.len().is_multiple_of(format.block_bytes()) {
        return Err(QuantError::PartialBytes { format, bytes: bytes.len(), block_bytes: format.block_bytes() });
    }
    // Two divisions instead of a product: no length overflows.
    let fits =
        out.len().is_multiple_of(format.block_len()) && out.len() / format.block_len() == bytes.len() / format.block_bytes();
    if !fits {
        return Err(QuantError::Length { format, bytes: bytes.len(), values: out.len() });
    }
    (codec.decode)(bytes, out);
    Ok(())
}

/// Encodes rows of `row_len` values, one after the other. A row must be a whole number of blocks and every value finite
/// and within the format's limit.
pub fn encode(format: FormatId, values: &[f32], row_len: usize) -> Result<Vec<u8>, QuantError> {
    let codec = codec(format).ok_or(QuantError::NotWritable { format })?;
    let write = codec.encode.ok_or(QuantError::NotWritable { format })?;
    if !row_len.is_multiple_of(format.block_len()) {
        return Err(QuantError::PartialBlock { format, row_len, block_len: format.block_len() });
    }
    // Nothing is a multiple of 0 but 0 itself.
    if !values.len().is_multiple_of(row_len) {
        return Err(QuantError::PartialRow { values: values.len(), row_len });
    }
    if let Some(at) = values.iter().position(|v| !v.is_finite()) {
        return Err(QuantError::NotFinite { at, value: values[at] });
    }
    if let Some(at) = values.iter().position(|v| v.abs() > codec.limit) {
        return Err(QuantError::TooLarge { format, at, value: values[at], limit: codec.limit });
    }
    let bytes = format.bytes_of(values.len()).ok_or(QuantError::PartialRow { values: values.len(), row_len })?;
    let mut out = vec![0; bytes];
    write(values, &mut out);
    Ok(out)
}

fn decode_blocks<F: Format>(bytes: &[u8], out: &mut [f32]) {
    let blocks: &[F::Block] = bytemuck::cast_slice(bytes);
    assert_eq!(blocks.len() * F::BLOCK_LEN, out.len(), "values of {} {} blocks", blocks.len(), F::ID);
    for (block, out) in blocks.iter().zip(out.chunks_exact_mut(F::BLOCK_LEN)) {
        F::decode(block, out);
    }
}

fn encode_blocks<F: Encode>(src: &[f32], bytes: &mut [u8]) {
    let blocks: &mut [F::Block] = bytemuck::cast_slice_mut(bytes);
    assert_eq!(blocks.len() * F::BLOCK_LEN, src.len(), "values of {} {} blocks", blocks.len(), F::ID);
    for (block, src) in blocks.iter_mut().zip(src.chunks_exact(F::BLOCK_LEN)) {
        F::encode(src, block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_format_but_the_integers_once() {
        for &format in FormatId::ALL {
            let integer = matches!(format, FormatId::I8 | FormatId::U8 | FormatId::I16 | FormatId::I32 | FormatId::I64);
            let entries = CODECS.iter().filter(|codec| codec.id == format).count();
            assert_eq!(entries, usize::from(!integer), "{format}");
            assert_eq!(codec(format).is_some(), !integer, "{format}");
        }
    }

    #[test]
    fn a_limit_goes_with_an_encoder() {
        for codec in CODECS {
            assert_eq!(codec.encode.is_some(), codec.limit > 0.0, "{}", codec.id);
        }
    }
}
