//! Writes GGUF files for tests: right ones, and any wrong one.
// Each test file that includes this uses its own part, and a test binary exports nothing.
#![allow(dead_code, unreachable_pub)]

/// A file under construction. What is not overridden is written as it should be.
#[derive(Clone)]
pub struct GgufWriter {
    pub version: u32,
    pub alignment: usize,
    pub tensor_count: Option<u64>,
    pub metadata_count: Option<u64>,
    metadata: Vec<u8>,
    entries: u64,
    infos: Vec<u8>,
    tensors: u64,
    data: Vec<u8>,
}

impl GgufWriter {
    pub fn new() -> Self {
        GgufWriter {
            version: 3,
            alignment: 32,
            tensor_count: None,
            metadata_count: None,
            metadata: Vec::new(),
            entries: 0,
            infos: Vec::new(),
            tensors: 0,
            data: Vec::new(),
        }
    }

    /// A key whose value is given as type number and bytes.
    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.metadata.extend(string(key));
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend(value);
        self.entries += 1;
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn str(self, key: &str, value: &str) -> Self {
        let value = string(value);
        self.raw(key, 8, &value)
    }

    /// An array given as element type, length and bytes.
    pub fn array(self, key: &str, kind: u32, len: u64, elements: &[u8]) -> Self {
        let value = array(kind, len, elements);
        self.raw(key, 9, &value)
    }

    pub fn strs(self, key: &str, values: &[&str]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| string(value)).collect();
        self.array(key, 8, values.len() as u64, &elements)
    }

    /// A tensor; `shape` has the slowest dimension first.
    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, bytes: &[u8]) -> Self {
        let offset = self.data.len() as u64;
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let dims: Vec<u64> = shape.iter().rev().copied().collect();
        self.info(name, dims.len() as u32, &dims, kind, offset)
    }

    /// An entry of the tensor table, as given: `dims` has the fastest dimension first. No data is added.
    pub fn info(mut self, name: &str, dim_count: u32, dims: &[u64], kind: u32, offset: u64) -> Self {
        self.infos.extend(string(name));
        self.infos.extend(dim_count.to_le_bytes());
        dims.iter().for_each(|dim| self.infos.extend(dim.to_le_bytes()));
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self.tensors += 1;
        self
    }

    /// More bytes at the end of the data.
    pub fn data(mut self, bytes: &[u8]) -> Self {
        self.data.extend(bytes);
        self
    }

    pub fn build(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.tensor_count.unwrap_or(self.tensors).to_le_bytes());
        file.extend(self.metadata_count.unwrap_or(self.entries).to_le_bytes());
        file.extend(&self.metadata);
        file.extend(&self.infos);
        if !self.data.is_empty() {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
            file.extend(&self.data);
        }
        file
    }
}

pub fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

pub fn array(kind: u32, len: u64, elements: &[u8]) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(len.to_le_bytes());
    bytes.extend(elements);
    bytes
}

/// A small file with every metadata type, nested arrays and several tensor types.
pub fn everything() -> GgufWriter {
    let nested = [array(4, 2, &[1, 0, 0, 0, 2, 0, 0, 0]), array(8, 1, &string("x"))].concat();
    GgufWriter::new()
        .str("general.architecture", "llama")
        .raw("t.u8", 0, &[200])
        .raw("t.i8", 1, &(-3i8).to_le_bytes())
        .raw("t.u16", 2, &60_000u16.to_le_bytes())
        .raw("t.i16", 3, &(-300i16).to_le_bytes())
        .u32("t.u32", 4_000_000_000)
        .raw("t.i32", 5, &(-70_000i32).to_le_bytes())
        .raw("t.f32", 6, &1.5f32.to_le_bytes())
        .raw("t.bool", 7, &[1])
        .raw("t.u64", 10, &u64::MAX.to_le_bytes())
        .raw("t.i64", 11, &i64::MIN.to_le_bytes())
        .raw("t.f64", 12, &(-2.25f64).to_le_bytes())
        .strs("a.str", &["", "<s>", "é漢", "Ġthe"])
        .array("a.u8", 0, 3, &[1, 2, 3])
        .array("a.i16", 3, 2, &[0xff, 0xff, 1, 0])
        .array("a.f32", 6, 2, &[0, 0, 0x80, 0x3f, 0, 0, 0, 0x40])
        .array("a.bool", 7, 2, &[0, 1])
        .array("a.empty", 8, 0, &[])
        .array("a.nested", 9, 2, &nested)
        .u32("general.alignment", 32)
        .tensor("f32", &[2, 3], 0, &[1; 24])
        .tensor("f16", &[5], 1, &[2; 10])
        .tensor("q4_0", &[2, 2, 32], 2, &[3; 4 * 18])
        .tensor("q4_k", &[1, 256], 12, &[4; 144])
}
