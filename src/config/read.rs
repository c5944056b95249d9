//! Reading what may be a word or a table: `key = "route"`, or `key = { header = "x-api-key" }`.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{
        Error, MapAccess, Visitor,
        value::{MapAccessDeserializer, StrDeserializer},
    },
};

/// Reads a word as a `W` or a table as a `T`, and makes the value of it.
///
/// serde's `untagged` would do it too, but of all that can be wrong it says no more than that nothing matched.
pub(super) fn word_or_table<'de, D, W, T, O>(
    deserializer: D,
    word: impl FnOnce(W) -> Result<O, &'static str>,
    table: impl FnOnce(T) -> Result<O, &'static str>,
) -> Result<O, D::Error>
where
    D: Deserializer<'de>,
    W: Deserialize<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_any(WordOrTable {
        word,
        table,
        read: PhantomData::<(W, T)>,
    })
}

struct WordOrTable<F, G, R> {
    word: F,
    table: G,
    read: PhantomData<R>,
}

impl<'de, F, G, W, T, O> Visitor<'de> for WordOrTable<F, G, (W, T)>
where
    F: FnOnce(W) -> Result<O, &'static str>,
    G: FnOnce(T) -> Result<O, &'static str>,
    W: Deserialize<'de>,
    T: Deserialize<'de>,
{
    type Value = O;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a table")
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<O, E> {
        let word = W::deserialize(StrDeserializer::new(word))?;
        (self.word)(word).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<O, A::Error> {
        let table = T::deserialize(MapAccessDeserializer::new(map))?;
        (self.table)(table).map_err(A::Error::custom)
    }
}
