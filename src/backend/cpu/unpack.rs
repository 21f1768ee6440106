//! The way back from panels to the file's rows: what a packed file holds serves a backend with another layout, or exact
//! arithmetic, as well. Each layout that files were ever written in stays here.
//!
//! Invariant: unpacking undoes packing bit by bit. Panels that no packing makes, such as quants out of their range, become some
//! rows, and then are not what packing these gives: so [`check_panels`] finds them.
#![forbid(unsafe_code)]

use super::panel::{IQ4XS, LANES, LAYOUT, Panel, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quant, at, stored};
use crate::dtype::FormatId;
use crate::error::LoadError;
use crate::weights::Panels;

/// The layout of the panels that this version makes: see [`Panels::layout`].
pub const PANEL_LAYOUT: u32 = LAYOUT;

/// True for formats whose matrices the CPU's kernels read as panels. For the others they read the file's own blocks.
pub fn has_panels(format: FormatId) -> bool {
    Panel::find(format).is_some() && back(format).is_some()
}

/// Rows `[rows, columns]` of `format` in the file's layout. Cost: about that of packing.
///
/// # Errors
/// [`LoadError::Unsupported`] for a layout or format that this version does not know, [`LoadError::Malformed`] for panels of
/// another size. Both name `tensor`.
pub fn unpack(tensor: &str, format: FormatId, rows: usize, columns: usize, panels: &Panels) -> Result<Vec<u8>, LoadError> {
    let unsupported = |what: &str, found: String, supported: String| LoadError::Unsupported {
        file: format!("tensor {tensor}"),
        what: what.to_owned(),
        found,
        supported,
    };
    if panels.layout != LAYOUT {
        return Err(unsupported("the layout of panels", panels.layout.to_string(), format!("layout {LAYOUT}")));
    }
    let (Some(panel), Some(back)) = (Panel::find(format), back(format)) else {
        return Err(unsupported("the format of panels", format.to_string(), "formats that have panels".to_owned()));
    };
    let (blocks, block) = (columns / panel.block_len, format.block_bytes());
    let bytes = rows.div_ceil(LANES).checked_mul(blocks).and_then(|n| n.checked_mul(panel.bytes));
    let row_bytes = blocks * block;
    let size =
        rows.checked_mul(row_bytes).filter(|_| bytes == Some(panels.bytes.len()) && columns.is_multiple_of(panel.block_len));
    let Some(size) = size.filter(|&size| size > 0) else {
        let expected = format!("panels of {rows} by {columns} values of {format}");
        return Err(LoadError::malformed(format!("tensor {tensor}"), "data", expected, format!("{} bytes", panels.bytes.len())));
    };
    let mut out = Vec::new();
    out.try_reserve_exact(size)
        .map_err(|_| LoadError::malformed(format!("tensor {tensor}"), "rows", format!("memory for {size} bytes"), "less"))?;
    out.resize(size, 0u8);
    for (rows, panel_bytes) in out.chunks_mut(LANES * row_bytes).zip(panels.bytes.chunks_exact(blocks * panel.bytes)) {
        for (b, from) in panel_bytes.chunks_exact(panel.bytes).enumerate() {
            for (n, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
                back(n, from, &mut row[b * block..][..block]);
            }
        }
    }
    Ok(out)
}

/// That `panels` are what packing makes of some finite matrix: scales are numbers, quants in their range, and nothing is in the
/// outputs past the last.
///
/// # Errors
/// As [`unpack`], and [`LoadError::Malformed`] naming the first row of the panel that is not.
pub fn check_panels(tensor: &str, format: FormatId, rows: usize, columns: usize, panels: &Panels) -> Result<(), LoadError> {
    let unpacked = unpack(tensor, format, rows, columns, panels)?;
    let panel = Panel::find(format).expect("a format that was unpacked has panels");
    let row_bytes = unpacked.len() / rows;
    let stride = panels.bytes.len() / rows.div_ceil(LANES);
    let mut again = vec![0; stride];
    for (p, (rows, bytes)) in unpacked.chunks(LANES * row_bytes).zip(panels.bytes.chunks_exact(stride)).enumerate() {
        let list: Vec<&[u8]> = rows.chunks_exact(row_bytes).collect();
        again.fill(0);
        if panel.pack(&list, &mut again).is_err() || again != bytes {
            let at = format!("rows from {}", p * LANES);
            return Err(LoadError::malformed(format!("tensor {tensor}"), at, "finite scales and quants of the format", "others"));
        }
    }
    Ok(())
}

/// Output `n` of a panel's block as the file's block, which comes zeroed.
type Back = fn(usize, &[u8], &mut [u8]);

fn back(format: FormatId) -> Option<Back> {
    Some(match format {
        FormatId::F32 => plain::<4>,
        FormatId::F16 | FormatId::BF16 => plain::<2>,
        // A table changes nothing of how nibbles lie.
        FormatId::Q4_0 | FormatId::IQ4NL => q4_0,
        FormatId::IQ4XS => iq4_xs,
        FormatId::MXFP4 => mxfp4,
        FormatId::Q4_1 => q4_1,
        FormatId::Q5_0 => q5_0,
        FormatId::Q5_1 => q5_1,
        FormatId::Q8_0 => q8_0,
        FormatId::Q4K => q4_k,
        FormatId::Q5K => q5_k,
        FormatId::Q6K => q6_k,
        _ => return None,
    })
}

fn plain<const S: usize>(n: usize, from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(&from[S * n..][..S]);
}

fn q4_0(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, to);
    nibble_lines(n, &from[64..], &mut to[2..]);
}

fn q4_1(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, to);
    half(n, &from[64..], &mut to[2..]);
    nibble_lines(n, &from[Q4_1::HEAD..], &mut to[4..]);
}

fn q8_0(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, to);
    for (k, to) in to[2..].iter_mut().enumerate() {
        *to = stored::<Q8_0>(&from[Q8_0::HEAD..], n, k) ^ 0x80;
    }
}

fn q5_0(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, to);
    five_bits::<Q5_0>(n, &from[Q5_0::HEAD..], &mut to[2..]);
}

fn q5_1(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, to);
    half(n, &from[64..], &mut to[2..]);
    five_bits::<Q5_1>(n, &from[Q5_1::HEAD..], &mut to[4..]);
}

fn q4_k(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, to);
    half(n, &from[64..], &mut to[2..]);
    for j in 0..8 {
        let sub = &from[Q4K::HEAD + j * Q4K::SUB..][..Q4K::SUB];
        k_scale(j, sub[n], sub[LANES + n], &mut to[4..16]);
        let mut nibbles = [0; 16];
        nibble_lines(n, &sub[Q4K::SUB_HEAD..], &mut nibbles);
        let q = &mut to[16 + j / 2 * 32..][..32];
        for (k, v) in nibbles.into_iter().enumerate() {
            q[k] |= (v & 15) << (4 * (j % 2));
            q[16 + k] |= v >> 4 << (4 * (j % 2));
        }
    }
}

fn q5_k(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, to);
    half(n, &from[64..], &mut to[2..]);
    for j in 0..8 {
        let sub = &from[Q5K::HEAD + j * Q5K::SUB..][..Q5K::SUB];
        k_scale(j, sub[n], sub[LANES + n], &mut to[4..16]);
        for k in 0..32 {
            let v = stored::<Q5K>(&sub[Q5K::SUB_HEAD..], n, k);
            to[48 + j / 2 * 32 + k] |= (v & 15) << (4 * (j % 2));
            to[16 + k] |= (v >> 4 & 1) << j;
        }
    }
}

fn q6_k(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, &mut to[208..]);
    for j in 0..8 {
        let sub = &from[Q6K::HEAD + j * Q6K::SUB..][..Q6K::SUB];
        (to[192 + 2 * j], to[193 + 2 * j]) = (sub[n], sub[LANES + n]);
        let (h, c) = (j / 4, j % 4);
        for k in 0..32 {
            let v = stored::<Q6K>(&sub[Q6K::SUB_HEAD..], n, k);
            to[64 * h + 32 * (c % 2) + k] |= (v & 15) << (4 * (c / 2));
            to[128 + 32 * h + k] |= (v >> 4 & 3) << (2 * c);
        }
    }
}

fn iq4_xs(n: usize, from: &[u8], to: &mut [u8]) {
    half(n, from, to);
    for j in 0..8 {
        let sub = &from[IQ4XS::HEAD + j * IQ4XS::SUB..][..IQ4XS::SUB];
        let scale = sub[n].wrapping_add(32);
        to[2 + j / 4] |= (scale >> 4 & 3) << (j % 4 * 2);
        to[4 + j / 2] |= (scale & 15) << (j % 2 * 4);
        nibble_lines(n, &sub[IQ4XS::SUB_HEAD..], &mut to[8 + 16 * j..]);
    }
}

fn mxfp4(n: usize, from: &[u8], to: &mut [u8]) {
    let scale = u16::from_le_bytes([from[2 * n], from[2 * n + 1]]);
    to[0] = if scale < 0x0080 { (scale >> 6) as u8 } else { ((scale >> 7) as u8).wrapping_add(1) };
    nibble_lines(n, &from[64..], &mut to[1..]);
}

/// One f16 of the head.
fn half(n: usize, from: &[u8], to: &mut [u8]) {
    to[..2].copy_from_slice(&from[2 * n..][..2]);
}

/// Sixteen bytes of nibbles from four lines.
fn nibble_lines(n: usize, quants: &[u8], to: &mut [u8]) {
    for l in 0..4 {
        to[4 * l..][..4].copy_from_slice(&quants[at(n, l, 4)..][..4]);
    }
}

/// Four bytes of fifth bits and sixteen of nibbles.
fn five_bits<Q: Quant>(n: usize, quants: &[u8], to: &mut [u8]) {
    let fifth = (0..32).fold(0, |fifth, k| fifth | u32::from(stored::<Q>(quants, n, k) >> 4) << k);
    to[..4].copy_from_slice(&fifth.to_le_bytes());
    nibble_lines(n, quants, &mut to[4..]);
}

/// Puts scale and minimum of sub-block `j` into the 12 bytes of a K block.
fn k_scale(j: usize, scale: u8, min: u8, s: &mut [u8]) {
    if j < 4 {
        s[j] |= scale & 63;
        s[j + 4] |= min & 63;
    } else {
        s[j + 4] |= scale & 15 | (min & 15) << 4;
        s[j - 4] |= (scale >> 4 & 3) << 6;
        s[j] |= (min >> 4 & 3) << 6;
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic;
    use super::*;
    use crate::weights::Bytes;

    fn packed(format: FormatId, rows: usize, columns: usize, file: &[u8]) -> Vec<u8> {
        let panel = Panel::find(format).unwrap();
        let row_bytes = file.len() / rows;
        let stride = columns / panel.block_len * panel.bytes;
        let mut out = vec![0; rows.div_ceil(LANES) * stride];
        for (rows, to) in file.chunks(LANES * row_bytes).zip(out.chunks_exact_mut(stride)) {
            panel.pack(&rows.chunks_exact(row_bytes).collect::<Vec<_>>(), to).unwrap();
        }
        out
    }

    fn panels(bytes: &[u8]) -> Panels {
        Panels { layout: LAYOUT, bytes: Bytes::from(bytes.to_vec()) }
    }

    /// A format that gets panels needs its way back.
    fn formats() -> impl Iterator<Item = FormatId> {
        FormatId::ALL.iter().copied().filter(|&f| Panel::find(f).is_some())
    }

    #[test]
    fn what_was_packed_comes_back_bit_by_bit() {
        for format in formats() {
            for (rows, columns) in [(1, 256), (32, 256), (33, 512), (70, 768)] {
                let file = synthetic::weights(format, rows * columns, 7);
                let bytes = packed(format, rows, columns, &file);
                assert!(unpack("w", format, rows, columns, &panels(&bytes)).unwrap() == file, "{format} {rows} {columns}");
                check_panels("w", format, rows, columns, &panels(&bytes)).unwrap();
            }
        }
        assert!(has_panels(FormatId::Q4_1) && !has_panels(FormatId::F64));
    }

    #[test]
    fn what_no_packing_makes_is_found() {
        for format in formats() {
            let (rows, columns) = (33, 256);
            let bytes = packed(format, rows, columns, &synthetic::weights(format, rows * columns, 8));
            let refused = |change: &dyn Fn(&mut [u8])| {
                let mut bytes = bytes.clone();
                change(&mut bytes);
                let error = check_panels("w", format, rows, columns, &panels(&bytes)).unwrap_err();
                assert!(error.to_string().contains("tensor w"), "{error}");
            };
            // The second panel holds one row: its last lane is past the end.
            let second = bytes.len() / 2;
            refused(&|b| *b.last_mut().unwrap() ^= 0x10);
            if !format.is_plain() {
                refused(&|b| b[1] = 0x7c);
                refused(&|b| b[second + 1] = 0xff);
            }
            for wrong in [&bytes[..0], &bytes[1..]] {
                assert!(unpack("w", format, rows, columns, &panels(wrong)).is_err());
            }
            assert!(unpack("w", format, usize::MAX, columns, &panels(&bytes)).is_err());
            assert!(unpack("w", format, rows, 0, &panels(&bytes)).is_err());
            let other = Panels { layout: LAYOUT + 1, ..panels(&bytes) };
            assert!(unpack("w", format, rows, columns, &other).unwrap_err().to_string().contains("layout"));
        }
        // Scales that are out of their range: six bits, six bits less 32, powers of two.
        for (format, at) in [(FormatId::Q4K, 128), (FormatId::Q5K, 128), (FormatId::IQ4XS, 64), (FormatId::MXFP4, 0)] {
            let mut bytes = packed(format, 32, 256, &synthetic::weights(format, 32 * 256, 9));
            bytes[at] |= 0x40;
            bytes[at] ^= if format == FormatId::IQ4XS { 0x20 } else { 0x01 };
            let found = check_panels("w", format, 32, 256, &panels(&bytes));
            assert!(found.is_err(), "{format}");
        }
    }
}
