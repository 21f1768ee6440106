//! What is cached of a prefix, as bytes that outlive the engine: taken out of one, and into another of the same model,
//! whatever its threads and blocks. Sessions are saved with it, and a machine that only prefills hands over with it.
//!
//! ```text
//! frame     see `bytes`: version, checksum, and the model that it is of
//! prefix    key u64; tokens u64, then u32 each; how many of them are cached, u64; how, u8: 0 not at all, 1 F32, 2 F16,
//!           3 in 8 bits, 4 BF16
//! cached    where there is any: groups u32; for each: window u64 (0 none), first u64, bytes of a record u64; then records of the
//!           tokens first .. cached, see `kv`
//! ```
//!
//! A group with a window holds what its next token sees, from the start of the saver's block on, and as many as [`BACK`]
//! tokens before that where they are still cached: so the first block of any engine begins within it, and those who part
//! from the prefix a little before its end, as a chat template may, find what they see.
//!
//! Invariant: every byte is hostile. All that a snapshot says is checked, against itself and the engine, before the engine
//! changes; what it cannot show is that its numbers were computed from its tokens.
#![forbid(unsafe_code)]

mod bytes;
mod kv;

pub(crate) use bytes::{Kind, Reader, Writer};

use super::Engine;
use crate::dtype::KvDType;
use crate::error::{Error, SnapshotError, SubmitError};
use crate::ids::{BlockGroup, MAX_GROUPS, TokenId};
use crate::model::{Digest, Fingerprint, Model};
use crate::sched::CachedBlock;
use kv::Layout;

/// How much of the cache goes into a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KvSave {
    /// Tokens alone: 4 bytes each. What follows runs them again.
    None,
    /// Keys and values as they are: what follows has the bits that it would have had. As many bytes as the cache holds for
    /// the tokens, without padding.
    #[default]
    Exact,
    /// A byte for each value, and 2 for each token's key or value in a head: about half of F16, a quarter of F32. A value is off
    /// by at most 0.4% of the largest in its row, and answers can differ: on small models of random weights the next token's
    /// distribution moved by up to 0.0016 nats (Kullback-Leibler). What is taken in again has a key of its own, so that
    /// nothing else in the engine ever meets it; it fits caches of any type.
    Int8,
}

/// What [`Engine::import`] took in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Imported {
    /// The key under which it is cached: [`Request::key`](super::Request::key).
    pub key: u64,
    /// All tokens of the snapshot.
    pub tokens: Vec<TokenId>,
    /// How many of them are cached now, from the first on. 0 where the snapshot has none cached; and where layers have a window
    /// and the engine's blocks are larger than the saver's were, so that what a block holds before the window is missing.
    pub cached: usize,
}

impl Engine {
    /// What is cached of `tokens` under `key`, with the tokens, as a snapshot for [`import`](Self::import): after a
    /// [`Request::prefill`](super::Request::prefill) of them, say. As much as is cached now, perhaps nothing; of a sequence that
    /// runs, whole blocks. Runs nothing. Cost: one copy of what is cached.
    ///
    /// # Errors
    /// [`SubmitError::UnknownToken`]; [`SnapshotError::Unidentified`] for a model [from parts](Self::from_parts) that nobody
    /// [identified](Self::identify); [`SnapshotError::NotFinite`] from [`KvSave::Int8`]; [`SnapshotError::Cache`] for a
    /// model whose cache is of no [`KvDType`]; [`SnapshotError::Refused`]; and what the device says.
    pub fn export(&mut self, key: u64, tokens: &[TokenId], kv: KvSave) -> Result<Vec<u8>, Error> {
        let mut out = self.snapshot(Kind::Prefix)?;
        self.put_prefix(&mut out, key, tokens, kv)?;
        Ok(out.finish())
    }

    /// Takes in what [`export`](Self::export) gave, of this engine or another with the same model: a request that starts with
    /// these tokens, and has the same [key](super::Request::key), finds them cached. They stay as long as nobody needs the
    /// room; [`pin`](Self::pin) keeps them. A step that is open is given up and planned again. Threads and kernel tier of the two
    /// engines make no difference; with another [`compute`](super::EngineConfig::compute) the bits are those of the saver's.
    ///
    /// The checksum finds accidents, not forgeries: whoever can write a snapshot decides what the cache says that its tokens
    /// mean, for everybody with the same key. Take in what you, or those you trust, have saved.
    ///
    /// # Errors
    /// [`SnapshotError`] says what is wrong with the bytes, or which model or type of cache they are of;
    /// [`SubmitError::TooLong`] where running and pinned sequences leave no room for it, [`SubmitError::Refused`]; and what
    /// the device says. The engine is as it was, but that prefixes that nobody holds may have made room.
    pub fn import(&mut self, bytes: &[u8]) -> Result<Imported, Error> {
        let mut input = self.open_snapshot(bytes, Kind::Prefix)?;
        let prefix = self.read_prefix(&mut input)?;
        input.end()?;
        self.take_prefix(prefix)
    }

    /// Says which model this is, for engines [from parts](Self::from_parts); engines from files know. Snapshots of the same
    /// fingerprint are taken for this model's own: it must stand for the weights and for all that decides what they compute.
    pub fn identify(&mut self, fingerprint: Fingerprint) {
        self.fingerprint = Some(fingerprint);
    }

    /// Which model this is, if anybody has said so.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint
    }

    /// The beginning of a snapshot.
    pub(crate) fn snapshot(&self, kind: Kind) -> Result<Writer, SnapshotError> {
        let model = self.fingerprint.ok_or(SnapshotError::Unidentified)?;
        Ok(Writer::new(kind, model, &label(&*self.model)))
    }

    /// Checks a snapshot's frame.
    pub(crate) fn open_snapshot<'a>(&self, bytes: &'a [u8], kind: Kind) -> Result<Reader<'a>, SnapshotError> {
        let model = self.fingerprint.ok_or(SnapshotError::Unidentified)?;
        Reader::open(bytes, kind, model, &label(&*self.model))
    }

    /// The prefix section.
    pub(crate) fn put_prefix(&mut self, out: &mut Writer, key: u64, tokens: &[TokenId], kv: KvSave) -> Result<(), Error> {
        self.sweep();
        let vocab = self.model.spec().vocab;
        if let Some(at) = tokens.iter().position(|t| *t as usize >= vocab) {
            return Err(SubmitError::UnknownToken { token: tokens[at], at, vocab }.into());
        }
        let (cached, blocks) = match kv {
            KvSave::None => (0, Vec::new()),
            _ => self.ledger.cached_blocks(key, tokens, BACK),
        };
        let encoding = match (cached, kv) {
            (0, _) => None,
            (_, KvSave::Int8) => Some(Encoding::Int8),
            _ => Some(Encoding::As(self.cache_dtype()?)),
        };
        out.reserve(size_of_val(tokens) + 64)?;
        out.u64(if encoding == Some(Encoding::Int8) { own_key(key, tokens) } else { key });
        out.u64(tokens.len() as u64);
        tokens.iter().for_each(|t| out.u32(*t));
        out.u64(cached as u64);
        out.u8(Encoding::code(encoding));
        match encoding {
            Some(encoding) => self.put_cached(out, cached, &blocks, encoding),
            None => Ok(()),
        }
    }

    fn put_cached(&mut self, out: &mut Writer, cached: usize, blocks: &[CachedBlock], encoding: Encoding) -> Result<(), Error> {
        let (layouts, bs) = (self.layouts()?, self.model.block_size());
        out.u32(layouts.len() as u32);
        let mut record = Vec::new();
        let mut block = Vec::new();
        for (g, layout) in layouts.iter().enumerate() {
            let mine = || blocks.iter().filter(|b| b.group == g);
            let first = mine().map(|b| b.index * bs).min().unwrap_or(cached);
            let size = encoding.record_bytes(layout);
            out.reserve((cached - first).saturating_mul(size).saturating_add(64))?;
            out.u64(window_code(&self.model.groups()[g]));
            out.u64(first as u64);
            out.u64(size as u64);
            record.resize(layout.record_bytes(), 0);
            for b in mine() {
                block.resize(b.tokens * layout.record_bytes(), 0);
                self.model.read_block(g, b.block, b.tokens, &mut block)?;
                for t in 0..b.tokens {
                    let place = out.zeros(size);
                    match encoding {
                        Encoding::As(_) => layout.take(&block, b.tokens, t, place),
                        Encoding::Int8 => {
                            layout.take(&block, b.tokens, t, &mut record);
                            let not_finite = |value| SnapshotError::NotFinite { group: g, token: b.index * bs + t, value };
                            layout.shrink(&record, place).map_err(not_finite)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the prefix section and checks all that it says. Changes nothing.
    pub(crate) fn read_prefix<'a>(&self, input: &mut Reader<'a>) -> Result<Prefix<'a>, SnapshotError> {
        let key = input.u64("key")?;
        let tokens = input.tokens(self.model.spec().vocab)?;
        let cached = input.count("cached tokens")?;
        let encoding = Encoding::of(input.u8("encoding")?)?;
        if cached > tokens.len() || (cached > 0) != encoding.is_some() {
            let expected = format!("1 to {} where there is an encoding, else 0", tokens.len());
            return Err(SnapshotError::malformed("cached tokens", expected, cached));
        }
        let Some(encoding) = encoding else {
            return Ok(Prefix { key, tokens, cached, encoding: Encoding::Int8, groups: Vec::new() });
        };
        let dtype = self.cache_dtype()?;
        if let Encoding::As(found) = encoding
            && found != dtype
        {
            let (expected, found) = (dtype.to_string(), found.to_string());
            return Err(SnapshotError::Cache { what: "type of cached values", expected, found });
        }
        let layouts = self.layouts()?;
        let shape = |what, expected: &dyn ToString, found: &dyn ToString| {
            Err(SnapshotError::Cache { what, expected: expected.to_string(), found: found.to_string() })
        };
        let count = input.u32("groups")?;
        if count as usize != layouts.len() {
            return shape("groups of layers", &layouts.len(), &count);
        }
        let mut groups = Vec::with_capacity(MAX_GROUPS);
        for (layout, group) in layouts.iter().zip(self.model.groups()) {
            let (window, first, size) = (input.u64("window")?, input.count("first token")?, input.count("record")?);
            if window != window_code(group) {
                return shape("window (0: none)", &window_code(group), &window);
            }
            if size != encoding.record_bytes(layout) {
                return shape("bytes of a token", &encoding.record_bytes(layout), &size);
            }
            // What the next token sees has to be there.
            let needed = group.first_block(cached, 1).min(cached);
            if first > needed {
                return Err(SnapshotError::malformed("first token", format_args!("at most {needed}"), first));
            }
            let bytes = (cached - first).checked_mul(size);
            let bytes = bytes.ok_or_else(|| SnapshotError::malformed("cached tokens", "as many as the bytes hold", cached))?;
            let records = input.take("cached tokens", bytes)?;
            if encoding == Encoding::Int8 {
                let mut record = vec![0; layout.record_bytes()];
                for small in records.chunks_exact(size.max(1)) {
                    let bad = |scale| SnapshotError::malformed("scale", format_args!("one that fits {dtype}"), scale);
                    layout.grow(small, &mut record).map_err(bad)?;
                }
            }
            groups.push(Records { first, size, bytes: records });
        }
        Ok(Prefix { key, tokens, cached, encoding, groups })
    }

    /// Puts a prefix into the cache.
    pub(crate) fn take_prefix(&mut self, prefix: Prefix<'_>) -> Result<Imported, Error> {
        let Prefix { key, tokens, cached, encoding, groups } = prefix;
        let bs = self.model.block_size();
        let whole = |(group, records): (&BlockGroup, &Records<'_>)| records.first <= group.first_block(cached, bs) * bs;
        if cached == 0 || !self.model.groups().iter().zip(&groups).all(whole) {
            return Ok(Imported { key, tokens, cached: 0 });
        }
        self.sweep();
        if self.ledger.step_is_open() {
            self.abandon_step();
        }
        let layouts = self.layouts()?;
        let model = &mut *self.model;
        let (mut block, mut record) = (Vec::new(), Vec::new());
        let from: Vec<_> = groups.iter().map(|records| records.first).collect();
        self.ledger.import(key, &tokens, cached, &from, |blocks| -> Result<(), Error> {
            for b in blocks {
                let (layout, Records { first, size, bytes }) = (&layouts[b.group], &groups[b.group]);
                block.resize(b.tokens * layout.record_bytes(), 0);
                record.resize(layout.record_bytes(), 0);
                for t in 0..b.tokens {
                    let at = (b.index * bs + t - first) * size;
                    let saved = &bytes[at..at + size];
                    match encoding {
                        Encoding::As(_) => layout.put(saved, b.tokens, t, &mut block),
                        Encoding::Int8 => {
                            layout.grow(saved, &mut record).expect("a scale that was looked at before");
                            layout.put(&record, b.tokens, t, &mut block);
                        }
                    }
                }
                model.write_block(b.group, b.block, b.tokens, &block)?;
            }
            Ok(())
        })?;
        Ok(Imported { key, tokens, cached })
    }

    fn cache_dtype(&self) -> Result<KvDType, SnapshotError> {
        let found = || format!("one of neither: {}", self.model.describe());
        let none = || SnapshotError::Cache { what: "type of cached values", expected: "F32, F16 or BF16".into(), found: found() };
        self.model.kv_dtype().ok_or_else(none)
    }

    /// What a token has in each group. A model whose groups are not its layers' has no snapshots.
    fn layouts(&self) -> Result<Vec<Layout>, SnapshotError> {
        let dtype = self.cache_dtype()?;
        let of = |group| {
            let layout = Layout::of(self.model.spec(), group, dtype);
            match (layout.record_bytes(), self.model.token_bytes(group)) {
                (expected, found) if expected == found => Ok(layout),
                (expected, found) => {
                    let (expected, found) =
                        (format!("{expected} by its layers"), format!("{found} of the model in group {group}"));
                    Err(SnapshotError::Cache { what: "bytes of a token", expected, found })
                }
            }
        };
        (0..self.model.groups().len()).map(of).collect()
    }
}

/// A prefix section that was found to be sound.
pub(crate) struct Prefix<'a> {
    key: u64,
    tokens: Vec<TokenId>,
    cached: usize,
    encoding: Encoding,
    groups: Vec<Records<'a>>,
}

/// The records of one group, of the tokens from `first` on.
struct Records<'a> {
    first: usize,
    size: usize,
    bytes: &'a [u8],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Encoding {
    As(KvDType),
    Int8,
}

impl Encoding {
    fn code(encoding: Option<Self>) -> u8 {
        match encoding {
            None => 0,
            Some(Encoding::As(KvDType::F32)) => 1,
            Some(Encoding::As(KvDType::F16)) => 2,
            Some(Encoding::Int8) => 3,
            Some(Encoding::As(KvDType::BF16)) => 4,
        }
    }

    fn of(code: u8) -> Result<Option<Self>, SnapshotError> {
        let [f32, f16, bf16] = [KvDType::F32, KvDType::F16, KvDType::BF16].map(|dtype| Some(Encoding::As(dtype)));
        let all = [None, f32, f16, Some(Encoding::Int8), bf16];
        let found = all.get(usize::from(code)).copied();
        found.ok_or_else(|| SnapshotError::malformed("encoding", "0 to 4", code))
    }

    fn record_bytes(self, layout: &Layout) -> usize {
        match self {
            Encoding::As(_) => layout.record_bytes(),
            Encoding::Int8 => layout.small_bytes(),
        }
    }
}

/// The model in a few words, for messages.
fn label(model: &dyn Model) -> String {
    let spec = model.spec();
    format!("{}, {} layers of {}, {} tokens", spec.arch, spec.layers.len(), spec.hidden, spec.vocab)
}

fn window_code(group: &BlockGroup) -> u64 {
    group.window.map_or(0, |w| w as u64)
}

/// A key that nobody else has: what is rounded to 8 bits must not stand in for what was computed.
fn own_key(key: u64, tokens: &[TokenId]) -> u64 {
    let mut digest = Digest::default();
    digest.text("8 bits");
    digest.number(key);
    tokens.iter().for_each(|t| digest.update(&t.to_le_bytes()));
    // 0 is everybody's.
    (digest.finish() as u64).max(1)
}

/// The largest block of any engine, in tokens.
const BACK: usize = 256;
