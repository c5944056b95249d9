//! Reads a word, a number or a boolean, or else a table: `key = "route"`, or `key = { header = "x-api-key" }`; and possible
//! secrets, whose values no error may quote, in any format of serde.
//!
//! Tests: `tests/config/reading.rs`, `tests/security/files.rs`.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{
        Error, IgnoredAny, IntoDeserializer, MapAccess, Unexpected, Visitor,
        value::{MapAccessDeserializer, StrDeserializer},
    },
};

/// Passes values other than texts and tables to the visitor's method `scalar`, with names that quote nothing.
macro_rules! visit_scalars {
    ($($visit:ident: $value:ty, $what:literal;)+) => {$(
        fn $visit<E: Error>(self, value: $value) -> Result<Self::Value, E> {
            self.scalar(IntoDeserializer::<E>::into_deserializer(value), $what)
        }
    )+};
}

/// Names of the expected value in messages.
pub(super) const WORD_OR_TABLE: &str = "a string or a table";
pub(super) const TIME_OR_TABLE: &str = "a duration or a table";
pub(super) const NUMBER_OR_TABLE: &str = "a number or a table";

/// Reads a text that may be a secret.
pub(super) fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    // Not `String::deserialize`: the format might refuse another type itself, and quote the value.
    const EXPECTED: &str = "a string, in quotes";
    word_or_table(deserializer, EXPECTED, Ok, |_: IgnoredAny| Err(EXPECTED))
}

/// Reads a word, a number or a boolean as a `W`, or a table as a `T`, and converts it into the value.
///
/// serde's `untagged` would work too, but its error only states that nothing matched. The errors of `word` and `table` name
/// the expected value.
pub(super) fn word_or_table<'de, D, W, T, O>(
    deserializer: D,
    expected: &'static str,
    word: impl FnOnce(W) -> Result<O, &'static str>,
    table: impl FnOnce(T) -> Result<O, &'static str>,
) -> Result<O, D::Error>
where
    D: Deserializer<'de>,
    W: Deserialize<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_any(WordOrTableVisitor {
        expected,
        word,
        table,
        read: PhantomData::<(W, T)>,
    })
}

struct WordOrTableVisitor<F, G, R> {
    expected: &'static str,
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
        f.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<O, E> {
        self.converted(W::deserialize(StrDeserializer::new(word))?)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<O, A::Error> {
        let table = T::deserialize(MapAccessDeserializer::new(map))?;
        let refuse = |expected| A::Error::invalid_value(Unexpected::Map, &expected);
        (self.table)(table).map_err(refuse)
    }

    visit_scalars! {
        visit_bool: bool, "boolean";
        visit_i64: i64, "integer";
        visit_i128: i128, "integer";
        visit_u64: u64, "integer";
        visit_u128: u128, "integer";
        visit_f64: f64, "floating point number";
    }
}

impl<F: FnOnce(W) -> Result<O, &'static str>, G, W, T, O> WordOrTableVisitor<F, G, (W, T)> {
    fn scalar<'de, D: Deserializer<'de>>(self, scalar: D, what: &str) -> Result<O, D::Error>
    where
        W: Deserialize<'de>,
    {
        let expected = self.expected;
        let refuse = |_| D::Error::invalid_type(Unexpected::Other(what), &expected);
        self.converted(W::deserialize(scalar).map_err(refuse)?)
    }

    fn converted<E: Error>(self, word: W) -> Result<O, E> {
        let refuse = |expected| E::invalid_value(Unexpected::Other("string"), &expected);
        (self.word)(word).map_err(refuse)
    }
}
