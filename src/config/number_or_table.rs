//! Reads a number or a table: `cost = 5`, or `cost = { header = "x-prompt-tokens" }`.
//!
//! Tests: `tests/config/costs.rs`, `values.rs`.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor, value::MapAccessDeserializer},
};

/// Reads a number, or a table as a `T`, and converts it into the value. `what` names the value in faults.
pub(super) fn number_or_table<'de, D, T, O>(
    deserializer: D,
    what: &'static str,
    number: impl FnOnce(u32) -> O,
    table: impl FnOnce(T) -> O,
) -> Result<O, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_any(NumberOrTable {
        what,
        number,
        table,
        read: PhantomData::<T>,
    })
}

struct NumberOrTable<F, G, T> {
    what: &'static str,
    number: F,
    table: G,
    read: PhantomData<T>,
}

impl<'de, F, G, T, O> Visitor<'de> for NumberOrTable<F, G, T>
where
    F: FnOnce(u32) -> O,
    G: FnOnce(T) -> O,
    T: Deserialize<'de>,
{
    type Value = O;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number or a table")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<O, E> {
        let what = self.what;
        match u32::try_from(number) {
            Ok(number) => Ok((self.number)(number)),
            Err(_) => Err(E::custom(format_args!("a {what} is at most {}", u32::MAX))),
        }
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<O, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::custom(format_args!("a {} is not negative", self.what))),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<O, A::Error> {
        let table = T::deserialize(MapAccessDeserializer::new(map))?;
        Ok((self.table)(table))
    }
}
