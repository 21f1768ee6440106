//! The grids of the IQ formats: which combinations of levels a code may stand for. They are part of the formats, found
//! once by their authors; stored as digits, spread out at compile time into tables of levels (34 KB) for the decoders.
#![forbid(unsafe_code)]

mod one;
mod three;
mod two;

/// Eight magnitudes for each code of IQ2_XXS.
pub(super) static IQ2_XXS: [[i8; 8]; 256] = spread(&two::XXS, 2, &TWO);
/// Eight magnitudes for each code of IQ2_XS.
pub(super) static IQ2_XS: [[i8; 8]; 512] = spread(&two::XS, 2, &TWO);
/// Eight magnitudes for each code of IQ2_S.
pub(super) static IQ2_S: [[i8; 8]; 1024] = spread(&two::S, 2, &TWO);
/// Four magnitudes for each code of IQ3_XXS.
pub(super) static IQ3_XXS: [[i8; 4]; 256] = spread(&three::XXS, 3, &[4, 12, 20, 28, 36, 44, 52, 62]);
/// Four magnitudes for each code of IQ3_S.
pub(super) static IQ3_S: [[i8; 4]; 512] = spread(&three::S, 3, &[1, 3, 5, 7, 9, 11, 13, 15]);
/// Eight of -1, 0 and 1 for each code of IQ1_S and IQ1_M.
pub(super) static IQ1: [[i8; 8]; 2048] = spread(&one::S, 2, &[-1, 0, 1]);

const TWO: [i8; 3] = [8, 25, 43];

const fn spread<const W: usize, const N: usize>(codes: &[u16; N], digit_bits: usize, levels: &[i8]) -> [[i8; W]; N] {
    let mut out = [[0; W]; N];
    let mut i = 0;
    while i < N {
        let mut j = 0;
        while j < W {
            let digit = codes[i] as usize >> (digit_bits * j) & ((1 << digit_bits) - 1);
            out[i][j] = levels[digit];
            j += 1;
        }
        i += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_grid_has_an_entry_twice() {
        assert_eq!(IQ2_XXS.iter().collect::<HashSet<_>>().len(), 256);
        assert_eq!(IQ2_XS.iter().collect::<HashSet<_>>().len(), 512);
        assert_eq!(IQ2_S.iter().collect::<HashSet<_>>().len(), 1024);
        assert_eq!(IQ3_XXS.iter().collect::<HashSet<_>>().len(), 256);
        assert_eq!(IQ3_S.iter().collect::<HashSet<_>>().len(), 512);
        assert_eq!(IQ1.iter().collect::<HashSet<_>>().len(), 2048);
    }
}
