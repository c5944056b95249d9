//! Reads a word or a table: `key = "route"`, or `key = { header = "x-api-key" }`; and possible secrets, whose values no
//! error may quote, in any format of serde.
//!
//! Tests: `tests/config/reading.rs`, `tests/security/files.rs`.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{
        Error, MapAccess, Unexpected, Visitor,
        value::{MapAccessDeserializer, StrDeserializer},
    },
};

/// For a visitor of a possible secret: refuses a value of another type without quoting it.
macro_rules! refuse_without_quoting {
    () => {
        refuse_without_quoting! {
            visit_bool: bool, "boolean";
            visit_i64: i64, "integer";
            visit_i128: i128, "integer";
            visit_u64: u64, "integer";
            visit_u128: u128, "integer";
            visit_f64: f64, "floating point number";
        }
    };
    ($($visit:ident: $value:ty, $what:literal;)+) => {$(
        fn $visit<E: Error>(self, _: $value) -> Result<Self::Value, E> {
            Err(E::invalid_type(Unexpected::Other($what), &self))
        }
    )+};
}

/// Reads a text that may be a secret.
pub(super) fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    // Not `deserialize_string`: the format might refuse another type itself, and quote the value.
    deserializer.deserialize_any(Secret)
}

struct Secret;

impl Visitor<'_> for Secret {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, in quotes")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }

    refuse_without_quoting!();
}

/// Reads a word as a `W` or a table as a `T`, and converts it into the value.
///
/// serde's `untagged` would work too, but its error only states that nothing matched. The errors of `word` and `table` name
/// the expected value.
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
    deserializer.deserialize_any(WordOrTableVisitor {
        word,
        table,
        read: PhantomData::<(W, T)>,
    })
}

struct WordOrTableVisitor<F, G, R> {
    word: F,
    table: G,
    read: PhantomData<R>,
}

impl<'de, F, G, W, T, O> Visitor<'de> for WordOrTableVisitor<F, G, (W, T)>
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
        let refuse = |expected| E::invalid_value(Unexpected::Other("string"), &expected);
        (self.word)(word).map_err(refuse)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<O, A::Error> {
        let table = T::deserialize(MapAccessDeserializer::new(map))?;
        let refuse = |expected| A::Error::invalid_value(Unexpected::Map, &expected);
        (self.table)(table).map_err(refuse)
    }

    refuse_without_quoting!();
}
