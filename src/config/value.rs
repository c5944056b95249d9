//! The value of a limit for a plan, or for one caller.
//!
//! Tests: `tests/config/values.rs`.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use super::word_or_table::{NUMBER_OR_TABLE, word_or_table};
use crate::limit::LimitValue;
#[cfg(test)]
use crate::ranges::MAX_LIMIT;

/// A rate with its own burst.
#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct ValueTable {
    /// Requests that start per period.
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_LIMIT)))]
    rate: u32,
    /// Requests that may start at once after a pause.
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_LIMIT)))]
    burst: u32,
}

/// A value that is read from a number or a table.
struct Read(LimitValue);

impl<'de> Deserialize<'de> for Read {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = |max| Ok(Self(LimitValue::new(max)));
        let table = |table: ValueTable| Ok(Self(LimitValue::new(table.rate).burst(table.burst)));
        word_or_table(deserializer, NUMBER_OR_TABLE, number, table)
    }
}

/// Reads the values of plans, or of callers.
pub(super) fn values<'de, K, D>(deserializer: D) -> Result<BTreeMap<K, LimitValue>, D::Error>
where
    K: Deserialize<'de> + Ord,
    D: Deserializer<'de>,
{
    let read = BTreeMap::<K, Read>::deserialize(deserializer)?;
    Ok(read
        .into_iter()
        .map(|(key, value)| (key, value.0))
        .collect())
}
