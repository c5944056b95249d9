//! The `[plans]` section, and the values and shares declared for single callers and for the callers of a plan.
//!
//! Tests: `tests/config/values.rs`, `faults.rs`.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Deserializer};

use super::{
    error::{Faults, unknown},
    key::{CallerKey, KeyConfig},
    word_or_table::{NUMBER_OR_TABLE, word_or_table},
};
#[cfg(test)]
use crate::ranges::MAX_RATE;
use crate::{key::Key, limit::LimitValue};

/// A group of callers with the same values, such as all customers who pay for more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct PlanConfig {
    /// Keys of its callers.
    pub(super) keys: Vec<CallerKey>,
}

/// Checks that no caller is in two plans, since neither would take precedence.
pub(super) fn check_plans(plans: &BTreeMap<String, PlanConfig>, faults: &mut Faults) {
    let mut seen = BTreeMap::new();
    for (name, plan) in plans {
        for (index, key) in plan.keys.iter().enumerate() {
            if let Some(other) = seen.insert(key, name) {
                let message = format!("is in plan `{other}` already");
                faults.add(format!("plans.{name}.keys[{index}]"), message);
            }
        }
    }
}

/// Values for plans, by their names, and for single callers, which take precedence.
pub(super) struct Own<'a, V> {
    /// Path of the table that has both.
    pub path: String,
    pub by_plan: &'a BTreeMap<String, V>,
    /// Name of the field with single callers.
    pub field: &'static str,
    pub by_caller: &'a BTreeMap<CallerKey, V>,
}

impl<V: Copy + PartialEq> Own<'_, V> {
    /// Returns the value of each caller with a value. Faults do not name the callers.
    pub(super) fn resolve(
        &self,
        plans: &BTreeMap<String, PlanConfig>,
        key: &KeyConfig,
        check: impl Fn(&str, V, &mut Faults),
        faults: &mut Faults,
    ) -> HashMap<Key, V> {
        let path = format!("{}.plans", self.path);
        let mut groups = Vec::new();
        for (plan, value) in self.by_plan {
            match plans.get(plan) {
                Some(PlanConfig { keys }) => {
                    let callers = keys.iter().collect();
                    groups.push((format!("{path}.{plan}"), callers, *value, true));
                }
                // The name may be a caller's key in the wrong table.
                None => {
                    let other = "names a plan that `[plans]` does not have";
                    faults.add(&path, unknown("plan", plan, plans.keys(), other));
                }
            }
        }
        for (caller, value) in self.by_caller {
            let path = format!("{}.{}", self.path, self.field);
            groups.push((path, vec![caller], *value, false));
        }
        let mut values = HashMap::new();
        for (path, callers, value, is_plan) in groups {
            check(&path, value, faults);
            let keys: Result<Vec<_>, _> = callers.iter().map(|caller| key.of(caller)).collect();
            if let Err(message) = &keys {
                faults.add(&path, *message);
            }
            for key in keys.into_iter().flatten() {
                // Two addresses of one network, or one address written in two ways.
                let differs = |(other, of_plan)| of_plan == is_plan && other != value;
                if values.insert(key, (value, is_plan)).is_some_and(differs) {
                    faults.add(&path, "has a key that is the same caller as another one");
                }
            }
        }
        let values = values.into_iter();
        values.map(|(key, (value, _))| (key, value)).collect()
    }
}

/// A rate with its own burst.
#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct ValueTable {
    /// Requests that start per period.
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_RATE)))]
    rate: u32,
    /// Requests that may start at once after a pause.
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_RATE)))]
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
