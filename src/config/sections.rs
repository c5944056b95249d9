//! All sections of a configuration, as plain data.
//!
//! Tests: `tests/config/reading.rs`.

use std::collections::BTreeMap;

use serde::Deserialize;

#[cfg(test)]
use super::schema;
use super::{limit::LimitConfig, plan::PlanConfig, route::RouteConfig, store::StoreConfig};

/// A configuration: the store, named limits, and the routes to which the limits apply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// The store. Default: in memory.
    pub store: StoreConfig,
    /// The limits, by their names.
    #[cfg_attr(test, schemars(extend("propertyNames" = schema::name())))]
    pub limits: BTreeMap<String, LimitConfig>,
    /// Groups of callers, by their names.
    pub(super) plans: BTreeMap<String, PlanConfig>,
    /// Routes: patterns of requests, and their limits.
    pub routes: Vec<RouteConfig>,
    /// States that no route has a limit. Default: `false`.
    ///
    /// Without it, a configuration that limits no route is an error.
    pub unlimited: bool,
    /// Last line of the file, a comment such as `# end`. Default: any line.
    ///
    /// Detects a truncated file, and comes before everything else. [`from_toml`](Self::from_toml) and
    /// [`from_file`](Self::from_file) check it: other formats have no lines.
    #[cfg_attr(test, schemars(regex(pattern = "^#(.*\\S)?$")))]
    pub last_line: Option<String>,
}

impl Config {
    /// The JSON Schema (draft 7) of a configuration file, for editors and for checks before a deployment.
    ///
    /// The schema covers fields, types, ranges, and the combinations of fields. Only [`from_toml`](Self::from_toml) finds
    /// faults that need the whole file, such as unknown names of limits in routes, and durations out of range. TOML plugins
    /// read the path of a schema from the first line of a file: `#:schema ./turnstile.schema.json`.
    pub const SCHEMA: &str = include_str!("schema.json");

    /// Returns the number of callers with a value of their own under this limit, by their plan or an override.
    pub fn own_values(&self, limit: &str) -> usize {
        let callers = |plan: &String| self.plans.get(plan).map_or(0, |plan| plan.keys.len());
        self.limits.get(limit).map_or(0, |limit| {
            limit.overrides.len() + limit.plans.keys().map(callers).sum::<usize>()
        })
    }
}
