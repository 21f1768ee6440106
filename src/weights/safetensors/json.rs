//! A JSON object read pair by pair. `serde_json`'s maps, and the `safetensors` crate, which reads into one, keep the last of
//! two equal keys without a word; here every pair reaches the caller.
#![forbid(unsafe_code)]

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Calls the function with each key; it takes the value from the [`Slot`].
pub(super) struct Object<F>(pub(super) F);

/// A value that has to be taken once.
pub(super) struct Slot<'s, 'de, A: MapAccess<'de>> {
    map: &'s mut A,
    life: std::marker::PhantomData<&'de ()>,
}

impl<'de, A: MapAccess<'de>> Slot<'_, 'de, A> {
    pub(super) fn read<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        self.map.next_value_seed(seed)
    }

    pub(super) fn skip(self) -> Result<(), A::Error> {
        self.map.next_value::<IgnoredAny>().map(|_| ())
    }
}

/// What [`Object`] calls for each pair: a trait, as closures cannot be generic over the parser.
pub(super) trait OnPair {
    fn pair<'de, A: MapAccess<'de>>(&mut self, key: &str, value: Slot<'_, 'de, A>) -> Result<(), A::Error>;
}

impl<'de, F: OnPair> DeserializeSeed<'de> for Object<&mut F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, F: OnPair> Visitor<'de> for Object<&mut F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key_seed(Text(|key: &str| Box::<str>::from(key)))? {
            self.0.pair(&key, Slot { map: &mut map, life: std::marker::PhantomData })?;
        }
        Ok(())
    }
}

/// A string, handed to the function.
pub(super) struct Text<F>(pub(super) F);

impl<'de, T, F: FnOnce(&str) -> T> DeserializeSeed<'de> for Text<F> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de, T, F: FnOnce(&str) -> T> Visitor<'de> for Text<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        Ok((self.0)(text))
    }
}

/// An array of at most this many integers of at least 0.
pub(super) struct Integers(pub(super) usize);

impl<'de> DeserializeSeed<'de> for Integers {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<u64>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Integers {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of at most {} integers of at least 0", self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut integers = Vec::new();
        while let Some(integer) = seq.next_element()? {
            if integers.len() == self.0 {
                return Err(A::Error::invalid_length(self.0 + 1, &self));
            }
            integers.push(integer);
        }
        Ok(integers)
    }
}

/// `inner`, or nothing where the value is `null`.
pub(super) struct Nullable<S>(pub(super) S);

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Nullable<S> {
    type Value = Option<S::Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de, S: DeserializeSeed<'de>> Visitor<'de> for Nullable<S> {
    type Value = Option<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or null")
    }

    fn visit_none<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        self.0.deserialize(deserializer).map(Some)
    }
}

/// Parses `text`, which holds one object and nothing after it.
pub(super) fn parse_object(text: &str, on_pair: &mut impl OnPair) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    Object(on_pair).deserialize(&mut deserializer)?;
    deserializer.end()
}
