//! Weight panels. A panel holds [`LANES`] = 32 consecutive outputs, K sequential inside; one layout serves every tier, and
//! a vector lane is one output, so that no horizontal sum exists.
//!
//! Quantised formats are a head of scales and 1 or 8 sub-blocks of 32 k (all little endian, offsets in bytes):
//!
//! ```text
//! Q4_0     576 B   0 d: f16[32]                      64 q: nibbles
//! Q4_1     640 B   0 d: f16[32]     64 m: f16[32]   128 q: nibbles
//! Q5_0     704 B   0 d: f16[32]                      64 q: nibbles, fifth bits
//! Q5_1     768 B   0 d: f16[32]     64 m: f16[32]   128 q: nibbles, fifth bits
//! Q8_0    1088 B   0 d: f16[32]                      64 q: bytes, stored + 128
//! Q4_K    4736 B   0 d: f16[32]  64 dmin: f16[32]   128 8 x { 0 sc: u8[32]  32 m: u8[32]  64 q: nibbles }
//! Q5_K    5760 B   0 d: f16[32]  64 dmin: f16[32]   128 8 x { 0 sc: u8[32]  32 m: u8[32]  64 q: nibbles, fifth bits }
//! Q6_K    6720 B   0 d: f16[32]                      64 8 x { 0 sc: i8[2 halves of k][32]  64 q: nibbles, bit pairs }
//! IQ4_NL   576 B   0 d: f16[32]                      64 q: nibbles, places in a table
//! IQ4_XS  4672 B   0 d: f16[32]                      64 8 x { 0 sc: i8[32]  64 q: nibbles, places in a table }
//! MXFP4    576 B   0 d: bf16[32]                     64 q: nibbles, places in a table
//! ```
//!
//! Quants are `[half of the outputs][line][64]`. A 64-byte line has 4 bytes for each of 16 outputs: byte `4 * n + i` is
//! output `16 * half + n`. Of four nibble lines, line `l` has k = 4 l + i low and k = 16 + 4 l + i high; of eight byte
//! lines, line `g` has k = 4 g + i. After all nibbles come the lines of higher bits: bit `g` of a fifth-bit byte is of
//! k = 4 g + i; of two lines of pairs, line `p` has that of k = 16 p + 4 c + i in bits 2 c. Plain formats are `[k][32]`.
//! Outputs past N have zero scales (or zero weights).
//!
//! Packing refuses a scale that is no finite number (in MXFP4, one of 2^100 or more): the kernels take integer sums out of
//! a constant by a fused multiply-add, and an infinite product of the two would give NaN where the file means infinity.
#![forbid(unsafe_code)]

use crate::dtype::FormatId;
use crate::quant::IQ4_LEVELS;
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
    /// Bits of a quant in storage: 4, 5, 6 or 8.
    const BITS: usize;
    /// What is added to a quant in storage.
    const ZERO: Zero;
    /// What is done with the minimum.
    const MIN: Min;
    /// A sub-block has two signed 8-bit scales, one for each half of its k, and no minimum.
    const TWO: bool = false;
    /// A nibble is a place in this table.
    const TABLE: Option<&'static [i8; 16]> = None;
    /// Scales are bf16, not f16.
    const BRAIN: bool = false;

    /// Kernels multiply signed bytes: the table's, or those that lose their zero-point by a flipped bit.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const SIGNED: bool = Self::TABLE.is_some() || matches!(Self::ZERO, Zero::Top);
    /// So many products of pairs add up in an i16: of the largest byte that kernels multiply, and 127.
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    const FIT: usize = {
        let largest = match Self::TABLE {
            Some(table) => {
                let (mut i, mut top) = (0, 0);
                while i < 16 {
                    let v = table[i].unsigned_abs() as usize;
                    top = if v > top { v } else { top };
                    i += 1;
                }
                top
            }
            None if Self::BITS == 8 => 128,
            None => (1 << Self::BITS) - 1,
        };
        let fit = i16::MAX as usize / (2 * 127 * largest);
        if fit < 8 { fit } else { 8 }
    };
    /// Bytes before the first sub-block: scales, then f16 minima where there are any.
    const HEAD: usize = if matches!(Self::MIN, Min::None) { 64 } else { 128 };
    /// Bytes of 8-bit scales and minima, or scales alone, before a sub-block's quants.
    const SUB_HEAD: usize = if Self::SUBS > 1 { 64 } else { 0 };
    /// Bytes of a sub-block.
    const SUB: usize = Self::SUB_HEAD + 128 * Self::BITS;
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
    /// 16.
    Sixteen,
    /// 32.
    ThirtyTwo,
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

pub(super) const KERNELS: usize = 14;

static PANELS: &[(FormatId, Panel)] = &[
    (FormatId::F32, Panel { kernel: 0, pack: pack_plain::<4>, ..plain(4, f32_row) }),
    (FormatId::F16, Panel { kernel: 1, pack: pack_plain::<2>, ..plain(2, f16_row) }),
    (FormatId::BF16, Panel { kernel: 2, pack: pack_plain::<2>, ..plain(2, bf16_row) }),
    (FormatId::Q8_0, quant::<Q8_0>(3)),
    (FormatId::Q4_0, quant::<Q4_0>(4)),
    (FormatId::Q4_1, quant::<Q4_1>(5)),
    (FormatId::Q4K, quant::<Q4K>(6)),
    (FormatId::Q5_1, quant::<Q5_1>(7)),
    (FormatId::Q5K, quant::<Q5K>(8)),
    (FormatId::Q6K, quant::<Q6K>(9)),
    (FormatId::Q5_0, quant::<Q5_0>(10)),
    (FormatId::IQ4NL, quant::<IQ4NL>(11)),
    (FormatId::IQ4XS, quant::<IQ4XS>(12)),
    (FormatId::MXFP4, quant::<MXFP4>(13)),
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

/// Where the higher bits of output `n` start, from the start of the quants, in `lines` lines a half.
#[inline(always)]
const fn above(n: usize, line: usize, lines: usize) -> usize {
    512 + at(n, line, lines)
}

/// The line of fifth bits from those of 32 k, in order.
#[inline(always)]
fn fifth_bits(n: usize, bits: u32, to: &mut [u8]) {
    for i in 0..4 {
        to[above(n, 0, 1) + i] = (0..8).fold(0, |byte, g| byte | (bits >> (4 * g + i) & 1) << g) as u8;
    }
}

const LOW: u32 = 0x0f0f_0f0f;

/// The nibble lines from groups of four quants.
#[inline(always)]
fn nibble_lines(n: usize, group: impl Fn(usize) -> u32, to: &mut [u8]) {
    put_words::<4>(n, std::array::from_fn(|l| group(l) & LOW | (group(4 + l) & LOW) << 4), to);
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
    ($($(#[$doc:meta])* $name:ident: $file:literal bytes, $subs:literal x 32, $bits:literal bits, $zero:ident, $min:ident, $put:expr;)*) => {
        $(
            $(#[$doc])*
            pub(super) struct $name;
            impl Quant for $name {
                const FILE: usize = $file;
                const SUBS: usize = $subs;
                const BITS: usize = $bits;
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
    Q4_0: 18 bytes, 1 x 32, 4 bits, Eight, None, |n, file, to| {
        copy_lines(n, &file[2..], &mut to[64..]);
        head(n, file, to)
    };
    /// In the file: d, m, 16 bytes.
    Q4_1: 20 bytes, 1 x 32, 4 bits, None, Plus, |n, file, to| {
        copy_lines(n, &file[4..], &mut to[128..]);
        head(n, file, to) & head(n, &file[2..], &mut to[64..])
    };
    /// In the file: d, 32 signed bytes.
    Q8_0: 34 bytes, 1 x 32, 8 bits, Top, None, |n, file, to| {
        put_words::<8>(n, std::array::from_fn(|g| word(&file[2..], g) ^ 0x8080_8080), &mut to[64..]);
        head(n, file, to)
    };
    /// In the file: d, 32 fifth bits, 16 bytes.
    Q5_0: 22 bytes, 1 x 32, 5 bits, Sixteen, None, |n, file, to| {
        copy_lines(n, &file[6..], &mut to[64..]);
        fifth_bits(n, word(&file[2..], 0), &mut to[64..]);
        head(n, file, to)
    };
    /// In the file: d, m, 32 fifth bits, 16 bytes.
    Q5_1: 24 bytes, 1 x 32, 5 bits, None, Plus, |n, file, to| {
        copy_lines(n, &file[8..], &mut to[128..]);
        fifth_bits(n, word(&file[4..], 0), &mut to[128..]);
        head(n, file, to) & head(n, &file[2..], &mut to[64..])
    };
    /// In the file: d, dmin, 12 bytes of scales and minima, 4 x 32 bytes with sub-blocks 2 c (low) and 2 c + 1 (high).
    Q4K: 144 bytes, 8 x 32, 4 bits, None, Minus, |n, file, to| {
        for j in 0..8 {
            let sub = &mut to[128 + Self::SUB * j..][..Self::SUB];
            (sub[n], sub[32 + n]) = k_scale(&file[4..16], j);
            let q = &file[16 + j / 2 * 32..][..32];
            nibble_lines(n, |g| word(q, g) >> (4 * (j % 2)), &mut sub[64..]);
        }
        head(n, file, to) & head(n, &file[2..], &mut to[64..])
    };
    /// In the file: as Q4_K, but before the nibbles 32 bytes of fifth bits: bit j of byte k is of sub-block j.
    Q5K: 176 bytes, 8 x 32, 5 bits, None, Minus, |n, file, to| {
        for j in 0..8 {
            let sub = &mut to[128 + Self::SUB * j..][..Self::SUB];
            (sub[n], sub[32 + n]) = k_scale(&file[4..16], j);
            let (fifth, q) = (&file[16..48], &file[48 + j / 2 * 32..][..32]);
            nibble_lines(n, |g| word(q, g) >> (4 * (j % 2)), &mut sub[64..]);
            let line = (0..8).fold(0, |line, g| line | (word(fifth, g) >> j & 0x0101_0101) << g);
            sub[64 + above(n, 0, 1)..][..4].copy_from_slice(&line.to_le_bytes());
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
    const BITS: usize = 6;
    const ZERO: Zero = Zero::ThirtyTwo;
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
            let q = &mut sub[Self::SUB_HEAD..];
            nibble_lines(n, |g| word(low, g) >> (4 * (c / 2)), q);
            for p in 0..2 {
                let line = (0..4).fold(0, |line, g| line | (word(high, 4 * p + g) >> (2 * c) & 0x0303_0303) << (2 * g));
                q[above(n, p, 2)..][..4].copy_from_slice(&line.to_le_bytes());
            }
        }
        head(n, &file[208..], to)
    }
}

macro_rules! tables {
    ($($(#[$doc:meta])* $name:ident: $file:literal bytes, $subs:literal x 32, brain $brain:literal, $table:expr, $put:expr;)*) => {
        $(
            $(#[$doc])*
            pub(super) struct $name;
            impl Quant for $name {
                const FILE: usize = $file;
                const SUBS: usize = $subs;
                const BITS: usize = 4;
                const ZERO: Zero = Zero::None;
                const MIN: Min = Min::None;
                const TABLE: Option<&'static [i8; 16]> = Some(&$table);
                const BRAIN: bool = $brain;

                #[inline(always)]
                fn put(n: usize, file: &[u8], block: &mut [u8]) -> bool {
                    let put: fn(usize, &[u8; $file], &mut [u8; Self::BYTES]) -> bool = $put;
                    put(n, file.try_into().expect("a block"), block.try_into().expect("a panel block"))
                }
            }
        )*
    };
}

/// IQ4's levels, which are whole.
const IQ4: [i8; 16] = {
    let (mut levels, mut i) = ([0; 16], 0);
    while i < 16 {
        levels[i] = IQ4_LEVELS[i] as i8;
        i += 1;
    }
    levels
};
/// E2M1, doubled.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

tables! {
    /// In the file: d, 16 bytes (k below 16 low, the others high).
    IQ4NL: 18 bytes, 1 x 32, brain false, IQ4, |n, file, to| {
        copy_lines(n, &file[2..], &mut to[64..]);
        head(n, file, to)
    };
    /// In the file: d, upper two bits of 8 scales, lower four bits, 8 x 16 bytes.
    IQ4XS: 136 bytes, 8 x 32, brain false, IQ4, |n, file, to| {
        for j in 0..8 {
            let sub = &mut to[64 + Self::SUB * j..][..Self::SUB];
            let (high, low) = (file[2 + j / 4] >> (j % 4 * 2) & 3, file[4 + j / 2] >> (j % 2 * 4) & 15);
            sub[n] = (low | high << 4).wrapping_sub(32);
            copy_lines(n, &file[8 + 16 * j..], &mut sub[64..]);
        }
        head(n, file, to)
    };
    /// In the file: an exponent, 16 bytes. The scale is half of its power of two, as the table is doubled.
    MXFP4: 17 bytes, 1 x 32, brain true, E2M1, |n, file, to| {
        copy_lines(n, &file[1..], &mut to[64..]);
        let bits = match file[0] {
            // Subnormal.
            e @ 0..2 => 0x0020 << e,
            e => u16::from(e - 1) << 7,
        };
        to[2 * n..][..2].copy_from_slice(&bits.to_le_bytes());
        file[0] < 228
    };
}

fn f32_row(block: &[u8], lane: usize, out: &mut [f32]) {
    out[0] = f32::from_le_bytes(block[4 * lane..][..4].try_into().expect("four bytes"));
}

fn f16_row(block: &[u8], lane: usize, out: &mut [f32]) {
    out[0] = f16_at(block, lane);
}

fn bf16_row(block: &[u8], lane: usize, out: &mut [f32]) {
    out[0] = bf16_at(block, lane);
}

/// Scale times quant is exact in an f32, so there is one rounding, at the minimum, here as in the file's own decoder.
fn quant_row<Q: Quant>(block: &[u8], lane: usize, out: &mut [f32]) {
    for (j, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let sub = &block[Q::HEAD + j * Q::SUB..][..Q::SUB];
        for (k, v) in out.iter_mut().enumerate() {
            let (scale, min) = scale_and_min::<Q>(block, sub, lane, k / 16);
            let q = value::<Q>(&sub[Q::SUB_HEAD..], lane, k) as f32;
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
    let d = if Q::BRAIN { bf16_at(block, lane) } else { f16_at(block, lane) };
    match Q::MIN {
        Min::None if Q::SUBS == 1 => (d, 0.0),
        Min::None => (d * f32::from(sub[if Q::TWO { 32 * half } else { 0 } + lane] as i8), 0.0),
        _ if Q::SUBS == 1 => (d, f16_at(&block[64..], lane)),
        _ => (d * f32::from(sub[lane]), f16_at(&block[64..], lane) * f32::from(sub[32 + lane])),
    }
}

/// The quant of output `n` at k as it is stored, `q` being a sub-block's quants.
#[inline(always)]
pub(super) fn stored<Q: Quant>(q: &[u8], n: usize, k: usize) -> u8 {
    let (g, i) = (k / 4, k % 4);
    if Q::BITS == 8 {
        return q[at(n, g, 8) + i];
    }
    let low = q[at(n, g % 4, 4) + i] >> (g / 4 * 4) & 15;
    match Q::BITS {
        5 => low | (q[above(n, 0, 1) + i] >> g & 1) << 4,
        6 => low | (q[above(n, g / 4, 2) + i] >> (g % 4 * 2) & 3) << 4,
        _ => low,
    }
}

/// The same as a number.
#[inline(always)]
pub(super) fn value<Q: Quant>(q: &[u8], n: usize, k: usize) -> i32 {
    let stored = stored::<Q>(q, n, k);
    if let Some(table) = Q::TABLE {
        return i32::from(table[usize::from(stored)]);
    }
    i32::from(stored)
        - match Q::ZERO {
            Zero::None => 0,
            Zero::Eight => 8,
            Zero::Sixteen => 16,
            Zero::ThirtyTwo => 32,
            Zero::Top => 128,
        }
}

#[inline(always)]
fn bf16_at(bytes: &[u8], n: usize) -> f32 {
    bf16::from_le_bytes([bytes[2 * n], bytes[2 * n + 1]]).to_f32()
}

#[inline(always)]
pub(super) fn f16_at(bytes: &[u8], n: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * n], bytes[2 * n + 1]]).to_f32()
}
