//! Reading what may be a word or a table: `key = "route"`, or `key = { header = "x-api-key" }`; and what may be a secret,
//! whose value no error may quote, in whatever format of serde.
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

/// For a visitor of what may be a secret: refuses a value of another type without quoting it.
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
    // Not as a string: then a format may refuse another type by itself, and quote it.
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

/// Reads a word as a `W` or a table as a `T`, and makes the value of it.
///
/// serde's `untagged` would do it too, but its error is only that nothing matched. The error of `word` or `table` is what
/// is expected in place of the value.
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
