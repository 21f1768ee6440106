//! Element types of plain tensors and storage formats of weights, with their sizes. Knows no bytes: what a block means is
//! the business of [`crate::quant`].
#![forbid(unsafe_code)]

use std::fmt;

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident = $text:literal, ggml $ggml:expr, $len:literal in $bytes:literal;)*) => {
        /// How the numbers of a weight tensor are stored: blocks of [`block_len`](Self::block_len) values in
        /// [`block_bytes`](Self::block_bytes) bytes.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum FormatId { $($(#[$doc])* $name,)* }

        impl FormatId {
            /// Every format, in order of declaration.
            pub const ALL: &'static [FormatId] = &[$(FormatId::$name,)*];

            /// The name as GGUF tools print it.
            pub const fn name(self) -> &'static str {
                match self { $(FormatId::$name => $text,)* }
            }

            /// The type number in a GGUF file, where GGUF has the format.
            pub const fn ggml_type(self) -> Option<u32> {
                match self { $(FormatId::$name => $ggml,)* }
            }

            /// Values in a block.
            pub const fn block_len(self) -> usize {
                match self { $(FormatId::$name => $len,)* }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> usize {
                match self { $(FormatId::$name => $bytes,)* }
            }
        }
    };
}

formats! {
    /// IEEE single precision.
    F32 = "F32", ggml Some(0), 1 in 4;
    /// IEEE half precision.
    F16 = "F16", ggml Some(1), 1 in 2;
    /// The upper half of a single.
    BF16 = "BF16", ggml Some(30), 1 in 2;
    /// IEEE double precision.
    F64 = "F64", ggml Some(28), 1 in 8;
    /// 8-bit float, 4 bits of exponent, no infinity.
    F8E4M3 = "F8_E4M3", ggml None, 1 in 1;
    /// 8-bit float, 5 bits of exponent.
    F8E5M2 = "F8_E5M2", ggml None, 1 in 1;
    /// Signed bytes.
    I8 = "I8", ggml Some(24), 1 in 1;
    /// Unsigned bytes, booleans among them.
    U8 = "U8", ggml None, 1 in 1;
    /// Signed 16-bit integers.
    I16 = "I16", ggml Some(25), 1 in 2;
    /// Signed 32-bit integers.
    I32 = "I32", ggml Some(26), 1 in 4;
    /// Signed 64-bit integers.
    I64 = "I64", ggml Some(27), 1 in 8;
    /// 4 bits, one f16 scale for 32.
    Q4_0 = "Q4_0", ggml Some(2), 32 in 18;
    /// 4 bits, f16 scale and minimum for 32.
    Q4_1 = "Q4_1", ggml Some(3), 32 in 20;
    /// 5 bits, one f16 scale for 32.
    Q5_0 = "Q5_0", ggml Some(6), 32 in 22;
    /// 5 bits, f16 scale and minimum for 32.
    Q5_1 = "Q5_1", ggml Some(7), 32 in 24;
    /// 8 bits, one f16 scale for 32.
    Q8_0 = "Q8_0", ggml Some(8), 32 in 34;
    /// 2 bits, 4-bit scales and minima for 16, in blocks of 256.
    Q2K = "Q2_K", ggml Some(10), 256 in 84;
    /// 3 bits, 6-bit scales for 16, in blocks of 256.
    Q3K = "Q3_K", ggml Some(11), 256 in 110;
    /// 4 bits, 6-bit scales and minima for 32, in blocks of 256.
    Q4K = "Q4_K", ggml Some(12), 256 in 144;
    /// 5 bits, 6-bit scales and minima for 32, in blocks of 256.
    Q5K = "Q5_K", ggml Some(13), 256 in 176;
    /// 6 bits, 8-bit scales for 16, in blocks of 256.
    Q6K = "Q6_K", ggml Some(14), 256 in 210;
    /// 2.06 bits: a grid of 8 magnitudes, 256 entries.
    IQ2XXS = "IQ2_XXS", ggml Some(16), 256 in 66;
    /// 2.31 bits: a grid of 8 magnitudes, 512 entries.
    IQ2XS = "IQ2_XS", ggml Some(17), 256 in 74;
    /// 3.06 bits: a grid of 4 magnitudes, 256 entries.
    IQ3XXS = "IQ3_XXS", ggml Some(18), 256 in 98;
    /// 1.56 bits: a grid of 8 ternary values, 2048 entries.
    IQ1S = "IQ1_S", ggml Some(19), 256 in 50;
    /// 4 bits through a table of 16 values, one f16 scale for 32.
    IQ4NL = "IQ4_NL", ggml Some(20), 32 in 18;
    /// 3.44 bits: a grid of 4 magnitudes, 512 entries.
    IQ3S = "IQ3_S", ggml Some(21), 256 in 110;
    /// 2.5 bits: a grid of 8 magnitudes, 1024 entries.
    IQ2S = "IQ2_S", ggml Some(22), 256 in 82;
    /// 4 bits through the table of IQ4_NL, 6-bit scales for 32, in blocks of 256.
    IQ4XS = "IQ4_XS", ggml Some(23), 256 in 136;
    /// 1.75 bits: the grid of IQ1_S with finer scales.
    IQ1M = "IQ1_M", ggml Some(29), 256 in 56;
    /// Ternary, five to a byte.
    TQ1_0 = "TQ1_0", ggml Some(34), 256 in 54;
    /// Ternary, four to a byte.
    TQ2_0 = "TQ2_0", ggml Some(35), 256 in 66;
    /// OCP microscaling: 4-bit floats (E2M1), one power of two for 32.
    MXFP4 = "MXFP4", ggml Some(39), 32 in 17;
    /// 4-bit floats (E2M1), an unsigned E4M3 scale for 16, in blocks of 64.
    NVFP4 = "NVFP4", ggml Some(40), 64 in 36;
}

impl FormatId {
    /// The format with this GGUF type number.
    pub fn from_ggml(ggml_type: u32) -> Option<FormatId> {
        Self::ALL.iter().copied().find(|f| f.ggml_type() == Some(ggml_type))
    }

    /// True where a value is one number and not part of a block.
    pub const fn is_plain(self) -> bool {
        self.block_len() == 1
    }

    /// Bytes of `values` values, or `None` where they are no whole number of blocks or do not fit a `usize`.
    pub fn bytes_of(self, values: usize) -> Option<usize> {
        if !values.is_multiple_of(self.block_len()) {
            return None;
        }
        (values / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for FormatId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Element type of the KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum KvDType {
    /// 4 bytes a value: exact, for comparisons.
    F32,
    /// 2 bytes a value: the default. Keys and values beyond 65,504 become infinite, which shows as an error of the sequence.
    #[default]
    F16,
    /// 2 bytes a value with the range of F32 and 8 bits of precision, F16 having 11: for models whose keys are too large for F16.
    BF16,
}

impl KvDType {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            KvDType::F32 => 4,
            KvDType::F16 | KvDType::BF16 => 2,
        }
    }
}

impl fmt::Display for KvDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvDType::F32 => "F32",
            KvDType::F16 => "F16",
            KvDType::BF16 => "BF16",
        })
    }
}
