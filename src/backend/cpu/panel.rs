//! Weight panels. A panel holds [`LANES`] = 32 consecutive outputs, K sequential inside; one layout serves every tier, and
//! a vector lane is one output, so that no horizontal sum exists.
//!
//! Quantised formats are a head of scales and 1 or 8 sub-blocks of 32 k (all little endian, offsets in bytes):
//!
//! ```text
//! Q4_0   576 B   0 d: f16[32]                      64 q: nibbles
//! Q4_1   640 B   0 d: f16[32]     64 m: f16[32]   128 q: nibbles
//! Q5_0  1088 B   0 d: f16[32]                      64 q: bytes, stored + 128 - 16
//! Q5_1  1152 B   0 d: f16[32]     64 m: f16[32]   128 q: bytes
//! Q8_0  1088 B   0 d: f16[32]                      64 q: bytes, stored + 128
//! Q4_K  4736 B   0 d: f16[32]  64 dmin: f16[32]   128 8 x { 0 sc: u8[32]  32 m: u8[32]  64 q: nibbles }
//! Q5_K  8832 B   0 d: f16[32]  64 dmin: f16[32]   128 8 x { 0 sc: u8[32]  32 m: u8[32]  64 q: bytes }
//! Q6_K  8768 B   0 d: f16[32]                      64 8 x { 0 sc: i8[2 halves of k][32]  64 q: bytes, stored + 128 - 32 }
//! ```
//!
//! Quants are `[half of the outputs][line][64]`. A 64-byte line has 4 bytes for each of 16 outputs: byte `4 * n + i` is
//! output `16 * half + n`. Of four nibble lines, line `l` has k = 4 l + i low and k = 16 + 4 l + i high; of eight byte
//! lines, line `g` has k = 4 g + i. Plain formats are `[k][32]`. Outputs past N have zero scales (or zero weights).
//!
//! Packing refuses a scale that is no finite number: the kernels take integer sums out of a constant by a fused
//! multiply-add, and an infinite scale would give NaN where the file means infinity.
#![forbid(unsafe_code)]

use crate::dtype::FormatId;
use half::{bf16, f16};

/// The number of the layout below, for files that hold it. Another layout is another number, and needs a way back from this one:
/// see `unpack`.
pub(super) const LAYOUT: u32 = 1;

/// Outputs in a panel.
pub(super) const LANES: usize = 32;

/// How a format lies in panels.
pub(super) struct Panel {
    /// Index into a tier's kernels.
    pub(super) kernel: usize,
    /// k in a block.
    pub(super) block_len: usize,
    /// Bytes of one block of a panel.
    pub(super) bytes: usize,
    /// Bytes of a block as kernels go through it for many rows: nibbles spread to bytes, half precision to single.
    pub(super) work_bytes: usize,
    /// Activations are quantised, too.
    pub(super) quantized: bool,
    pack: PackFn,
    row: fn(&[u8], usize, &mut [f32]),
}

/// One panel from up to 32 rows in the file's layout. Says which row has a scale that is no finite number.
type PackFn = fn(&[&[u8]], &mut [u8]) -> Result<(), usize>;

impl Panel {
    /// The panel of a format that kernels read as it is: no arithmetic differs from the exact one.
    pub(super) fn plain(format: FormatId) -> Option<&'static Panel> {
        Self::find(format).filter(|p| !p.quantized)
    }

    /// The panel of `format`, if it has one.
    pub(super) fn find(format: FormatId) -> Option<&'static Panel> {
        PANELS.iter().find(|(f, _)| *f == format).map(|(_, p)| p)
    }

    /// Fills `dst`, whole panel blocks, from rows of the file.
    ///
    /// # Errors
    /// The index of a row with a scale that is no finite number.
    pub(super) fn pack(&self, rows: &[&[u8]], dst: &mut [u8]) -> Result<(), usize> {
        (self.pack)(rows, dst)
    }

    /// Output `lane` of a panel as numbers, the same as the file's row decodes to.
    pub(super) fn row(&self, panel: &[u8], lane: usize, out: &mut [f32]) {
        for (block, out) in panel.chunks_exact(self.bytes).zip(out.chunks_exact_mut(self.block_len)) {
            (self.row)(block, lane, out);
        }
    }
}

/// What a quantised panel's kernel must know; everything else follows.
pub(super) trait Quant: 'static {
    /// Bytes of a block of one row in the file.
    const FILE: usize;
    /// Sub-blocks of 32 k.
    const SUBS: usize = 1;
    /// Quants of a byte each, else nibbles.
    const WIDE: bool;
    /// What is added to a quant in storage.
    const ZERO: Zero;
    /// What is done with the minimum.
    const MIN: Min;
    /// A sub-block has two signed 8-bit scales, one for each half of its k, and no minimum.
    const TWO: bool = false;

    /// Bytes before the first sub-block: f16 scales, then f16 minima where there are any.
    const HEAD: usize = if matches!(Self::MIN, Min::None) { 64 } else { 128 };
    /// Bytes of 8-bit scales and minima, or scales alone, before a sub-block's quants.
    const SUB_HEAD: usize = if Self::SUBS > 1 { 64 } else { 0 };
    /// Bytes of a sub-block.
    const SUB: usize = Self::SUB_HEAD + if Self::WIDE { 1024 } else { 512 };
    /// Bytes of a block.
    const BYTES: usize = Self::HEAD + Self::SUBS * Self::SUB;

    /// Puts output `n`'s block where it belongs. False where a scale is no finite number.
    fn put(n: usize, file: &[u8], block: &mut [u8]) -> bool;
}

/// Zero-point of stored quants.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Zero {
    /// 0.
    None,
    /// 8.
    Eight,
    /// 128: as signed bytes, the top bit is flipped.
    Top,
}

/// The minimum of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Min {
    /// There is none.
    None,
    /// Added.
    Plus,
    /// Subtracted.
    Minus,
}

pub(super) const KERNELS: usize = 10;

static PANELS: &[(FormatId, Panel)] = &[
    (FormatId::F32, Panel { kernel: 0, pack: pack_plain::<4>, ..plain(4, f32_row) }),
    (FormatId::F16, Panel { kernel: 1, pack: pack_plain::<2>, ..plain(2, f16_row) }),
    (FormatId::BF16, Panel { kernel: 2, pack: pack_plain::<2>, ..plain(2, bf16_row) }),
    (FormatId::Q8_0, quant::<Q8_0>(3)),
    (FormatId::Q4_0, quant::<Q4_0>(4)),
    (FormatId::Q4_1, quant::<Q4_1>(5)),
    (FormatId::Q4K, quant::<Q4K>(6)),
    // As Q8_0 but for the packing.
    (FormatId::Q5_0, quant::<Q5_0>(3)),
    (FormatId::Q5_1, quant::<Q5_1>(7)),
    (FormatId::Q5K, quant::<Q5K>(8)),
    (FormatId::Q6K, quant::<Q6K>(9)),
];

const fn plain(size: usize, row: fn(&[u8], usize, &mut [f32])) -> Panel {
    Panel { kernel: 0, block_len: 1, bytes: LANES * size, work_bytes: LANES * 4, quantized: false, pack: pack_plain::<4>, row }
}

const fn quant<Q: Quant>(kernel: usize) -> Panel {
    Panel {
        kernel,
        block_len: 32 * Q::SUBS,
        bytes: Q::BYTES,
        work_bytes: 1088 * Q::SUBS,
        quantized: true,
        pack: pack_blocks::<Q>,
        row: quant_row::<Q>,
    }
}

/// Sixteen k at a time, so that the lines written stay in L1 while the rows are read a cache line each.
fn pack_plain<const S: usize>(rows: &[&[u8]], dst: &mut [u8]) -> Result<(), usize> {
    let step = 64 / S;
    for (i, out) in dst.chunks_mut(step * LANES * S).enumerate() {
        if (i * 64).is_multiple_of(WARM) {
            warm(rows, i * 64);
        }
        for (n, row) in rows.iter().enumerate() {
            let from = i * 64;
            for (j, v) in row[from..row.len().min(from + 64)].as_chunks::<S>().0.iter().enumerate() {
                out[j * LANES * S + n * S..][..S].copy_from_slice(v);
            }
        }
    }
    Ok(())
}

fn pack_blocks<Q: Quant>(rows: &[&[u8]], dst: &mut [u8]) -> Result<(), usize> {
    let mut bad = Ok(());
    for (b, out) in dst.chunks_exact_mut(Q::BYTES).enumerate() {
        if b.is_multiple_of(WARM / Q::FILE) {
            warm(rows, b * Q::FILE);
        }
        for (n, row) in rows.iter().enumerate() {
            if !Q::put(n, &row[b * Q::FILE..][..Q::FILE], out) {
                bad = Err(n);
            }
        }
    }
    bad
}

/// Brings the rows' next bytes into the caches. Packing reads a few of them from one row after the other, so that it would wait
/// for each line in turn; here nothing waits, and many lines are on their way at once.
fn warm(rows: &[&[u8]], from: usize) {
    let of = |row: &&[u8]| row.get(from..).unwrap_or(&[]).iter().take(WARM + 64).step_by(64).fold(0, |all, byte| all ^ byte);
    std::hint::black_box(rows.iter().map(of).fold(0, |all, byte| all ^ byte));
}

/// Bytes of a row: those of 32 fit the first cache and half of the second.
const WARM: usize = 1024;

/// Where the four bytes of output `n` lie in line `l` of `lines` a half, from the start of the quants.
#[inline(always)]
pub(super) const fn at(n: usize, l: usize, lines: usize) -> usize {
    (n / 16 * lines + l) * 64 + n % 16 * 4
}

#[inline(always)]
fn word(bytes: &[u8], i: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * i..][..4].try_into().expect("four bytes"))
}

/// Writes one f16 of the head, and says whether it is finite.
#[inline(always)]
fn head(n: usize, file: &[u8], to: &mut [u8]) -> bool {
    to[2 * n..][..2].copy_from_slice(&file[..2]);
    file[1] & 0x7c != 0x7c
}

#[inline(always)]
fn copy_lines(n: usize, file: &[u8], to: &mut [u8]) {
    put_words(n, [word(file, 0), word(file, 1), word(file, 2), word(file, 3)], to);
}

/// A word of output `n` for each of the `L` lines of a half. The place is checked once: checks word by word cost more than the
/// copy.
#[inline(always)]
fn put_words<const L: usize>(n: usize, words: [u32; L], to: &mut [u8]) {
    let (lines, last) = to[at(n, 0, L)..][..64 * L - 60].split_at_mut(64 * L - 64);
    for (line, word) in lines.as_chunks_mut::<64>().0.iter_mut().zip(words) {
        line[..4].copy_from_slice(&word.to_le_bytes());
    }
    last.copy_from_slice(&words[L - 1].to_le_bytes());
}

/// Eight lines of a byte each from sixteen bytes of low nibbles (k below 16 low, the others high) and 32 fifth bits,
/// every byte plus `add`.
#[inline(always)]
fn five_bits(n: usize, nibbles: &[u8], fifth: u32, add: u32, to: &mut [u8]) {
    for l in 0..4 {
        let v = word(nibbles, l);
        to[at(n, l, 8)..][..4].copy_from_slice(&((v & LOW | spread(fifth >> (4 * l))) + add).to_le_bytes());
        to[at(n, 4 + l, 8)..][..4].copy_from_slice(&((v >> 4 & LOW | spread(fifth >> (16 + 4 * l))) + add).to_le_bytes());
    }
}

const LOW: u32 = 0x0f0f_0f0f;

/// The lowest four bits, each as bit 4 of a byte.
#[inline(always)]
fn spread(bits: u32) -> u32 {
    let b = bits & 15;
    (b & 1) << 4 | (b & 2) << 11 | (b & 4) << 18 | (b & 8) << 25
}

/// Scale and minimum of sub-block `j` from the 12 bytes of a K block.
#[inline(always)]
fn k_scale(s: &[u8], j: usize) -> (u8, u8) {
    match j {
        0..4 => (s[j] & 63, s[j + 4] & 63),
        _ => (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4),
    }
}

macro_rules! quants {
    ($($(#[$doc:meta])* $name:ident: $file:literal bytes, $subs:literal x 32, wide $wide:literal, $zero:ident, $min:ident, $put:expr;)*) => {
        $(
            $(#[$doc])*
            pub(super) struct $name;
            impl Quant for $name {
                const FILE: usize = $file;
                const SUBS: usize = $subs;
                const WIDE: bool = $wide;
                const ZERO: Zero = Zero::$zero;
                const MIN: Min = Min::$min;

                #[inline(always)]
                fn put(n: usize, file: &[u8], block: &mut [u8]) -> bool {
                    let put: fn(usize, &[u8; $file], &mut [u8; Self::BYTES]) -> bool = $put;
                    put(n, file.try_into().expect("a block"), block.try_into().expect("a panel block"))
                }
            }
        )*
    };
}

quants! {
    /// In the file: d, 16 bytes (k below 16 low, the others high).
    Q4_0: 18 bytes, 1 x 32, wide false, Eight, None, |n, file, to| {
        copy_lines(n, &file[2..], &mut to[64..]);
        head(n, file, to)
    };
    /// In the file: d, m, 16 bytes.
    Q4_1: 20 bytes, 1 x 32, wide false, None, Plus, |n, file, to| {
        copy_lines(n, &file[4..], &mut to[128..]);
        head(n, file, to) & head(n, &file[2..], &mut to[64..])
    };
    /// In the file: d, 32 signed bytes.
    Q8_0: 34 bytes, 1 x 32, wide true, Top, None, |n, file, to| {
        put_words::<8>(n, std::array::from_fn(|g| word(&file[2..], g) ^ 0x8080_8080), &mut to[64..]);
        head(n, file, to)
    };
    /// In the file: d, 32 fifth bits, 16 bytes.
    Q5_0: 22 bytes, 1 x 32, wide true, Top, None, |n, file, to| {
        five_bits(n, &file[6..], word(&file[2..], 0), 0x7070_7070, &mut to[64..]);
        head(n, file, to)
    };
    /// In the file: d, m, 32 fifth bits, 16 bytes.
    Q5_1: 24 bytes, 1 x 32, wide true, None, Plus, |n, file, to| {
        five_bits(n, &file[8..], word(&file[4..], 0), 0, &mut to[128..]);
        head(n, file, to) & head(n, &file[2..], &mut to[64..])
    };
    /// In the file: d, dmin, 12 bytes of scales and minima, 4 x 32 bytes with sub-blocks 2 c (low) and 2 c + 1 (high).
    Q4K: 144 bytes, 8 x 32, wide false, None, Minus, |n, file, to| {
        for j in 0..8 {
            let sub = &mut to[128 + Self::SUB * j..][..Self::SUB];
            (sub[n], sub[32 + n]) = k_scale(&file[4..16], j);
            let q = &file[16 + j / 2 * 32..][..32];
            let shift = 4 * (j % 2);
            let line = |l| (word(q, l) >> shift & LOW) | (word(q, 4 + l) >> shift & LOW) << 4;
            put_words::<4>(n, std::array::from_fn(line), &mut sub[64..]);
        }
        head(n, file, to) & head(n, &file[2..], &mut to[64..])
    };
    /// In the file: as Q4_K, but before the nibbles 32 bytes of fifth bits: bit j of byte k is of sub-block j.
    Q5K: 176 bytes, 8 x 32, wide true, None, Minus, |n, file, to| {
        for j in 0..8 {
            let sub = &mut to[128 + Self::SUB * j..][..Self::SUB];
            (sub[n], sub[32 + n]) = k_scale(&file[4..16], j);
            let (fifth, q) = (&file[16..48], &file[48 + j / 2 * 32..][..32]);
            let shift = 4 * (j % 2);
            let line = |g| word(q, g) >> shift & LOW | (word(fifth, g) >> j & 0x0101_0101) << 4;
            put_words::<8>(n, std::array::from_fn(line), &mut sub[64..]);
        }
        head(n, file, to) & head(n, &file[2..], &mut to[64..])
    };
}

/// In the file, for each half of the block: 64 bytes of low nibbles, of both halves 32 bytes of high bit pairs, then 16
/// signed scales, d. Sub-block 4 h + c has nibbles at 64 h + 32 (c % 2), the high ones for c > 1, and bits 2 c of the pairs.
pub(super) struct Q6K;

impl Quant for Q6K {
    const FILE: usize = 210;
    const SUBS: usize = 8;
    const WIDE: bool = true;
    const ZERO: Zero = Zero::Top;
    const MIN: Min = Min::None;
    const TWO: bool = true;

    #[inline(always)]
    fn put(n: usize, file: &[u8], to: &mut [u8]) -> bool {
        let file: &[u8; Self::FILE] = file.try_into().expect("a block");
        let to: &mut [u8; Self::BYTES] = to.try_into().expect("a panel block");
        for j in 0..8 {
            let sub = &mut to[Self::HEAD + Self::SUB * j..][..Self::SUB];
            (sub[n], sub[32 + n]) = (file[192 + 2 * j], file[193 + 2 * j]);
            let (h, c) = (j / 4, j % 4);
            let (low, high) = (&file[64 * h + 32 * (c % 2)..][..32], &file[128 + 32 * h..][..32]);
            let v = |g| word(low, g) >> (4 * (c / 2)) & LOW | (word(high, g) >> (2 * c) & 0x0303_0303) << 4;
            put_words::<8>(n, std::array::from_fn(|g| v(g) + 0x6060_6060), &mut sub[Self::SUB_HEAD..]);
        }
        head(n, &file[208..], to)
    }
}

fn f32_row(block: &[u8], lane: usize, out: &mut [f32]) {
    out[0] = f32::from_le_bytes(block[4 * lane..][..4].try_into().expect("four bytes"));
}

fn f16_row(block: &[u8], lane: usize, out: &mut [f32]) {
    out[0] = f16_at(block, lane);
}

fn bf16_row(block: &[u8], lane: usize, out: &mut [f32]) {
    out[0] = bf16::from_le_bytes([block[2 * lane], block[2 * lane + 1]]).to_f32();
}

/// Scale times quant is exact in an f32, so there is one rounding, at the minimum, here as in the file's own decoder.
fn quant_row<Q: Quant>(block: &[u8], lane: usize, out: &mut [f32]) {
    for (j, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let sub = &block[Q::HEAD + j * Q::SUB..][..Q::SUB];
        for (k, v) in out.iter_mut().enumerate() {
            let (scale, min) = scale_and_min::<Q>(block, sub, lane, k / 16);
            let q = f32::from(stored::<Q>(&sub[Q::SUB_HEAD..], lane, k)) - zero::<Q>();
            *v = match Q::MIN {
                Min::None => scale * q,
                Min::Plus => scale * q + min,
                Min::Minus => scale * q - min,
            };
        }
    }
}

/// Scale and minimum of output `lane` for half `half` of the sub-block `sub` of `block`; both products are exact.
#[inline(always)]
pub(super) fn scale_and_min<Q: Quant>(block: &[u8], sub: &[u8], lane: usize, half: usize) -> (f32, f32) {
    if Q::TWO {
        return (f16_at(block, lane) * f32::from(sub[32 * half + lane] as i8), 0.0);
    }
    let (scale, min) = (f16_at(block, lane), if Q::MIN == Min::None { 0.0 } else { f16_at(&block[64..], lane) });
    if Q::SUBS == 1 { (scale, min) } else { (scale * f32::from(sub[lane]), min * f32::from(sub[32 + lane])) }
}

#[inline(always)]
const fn zero<Q: Quant>() -> f32 {
    match Q::ZERO {
        Zero::None => 0.0,
        Zero::Eight => 8.0,
        Zero::Top => 128.0,
    }
}

/// The stored quant of output `n` at k, `q` being a sub-block's quants.
#[inline(always)]
fn stored<Q: Quant>(q: &[u8], n: usize, k: usize) -> u8 {
    if Q::WIDE {
        return q[at(n, k / 4, 8) + k % 4];
    }
    let b = q[at(n, k % 16 / 4, 4) + k % 4];
    if k < 16 { b & 15 } else { b >> 4 }
}

#[inline(always)]
pub(super) fn f16_at(bytes: &[u8], n: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * n], bytes[2 * n + 1]]).to_f32()
}
