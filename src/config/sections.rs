//! All sections of a configuration, as plain data; how it is read and checked.
//!
//! Tests: `tests/config/reading.rs`, `cuts.rs`.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;

#[cfg(test)]
use super::schema;
use super::{
    check::Checked,
    error::ConfigFileError,
    file::{check_last_line, read_file},
    limit::LimitConfig,
    plan::PlanConfig,
    route::RouteConfig,
    store::StoreConfig,
    toml_faults::parse,
};

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
    /// faults that need the whole file, such as unknown names of limits in routes. TOML plugins read the path of a schema
    /// from the first line of a file: `#:schema ./turnstile.schema.json`.
    pub const SCHEMA: &str = include_str!("schema.json");

    /// Parses a configuration and [checks](Self::validate) it.
    ///
    /// # Errors
    ///
    /// If the text is not TOML: all faults of its syntax. If it has unknown fields or values of wrong types: all of these.
    /// If the text [may be cut short](super#a-file-that-was-cut-short). Otherwise, all faults of the values.
    pub fn from_toml(text: &str) -> Result<Self, ConfigFileError> {
        let config: Self = parse(text)?;
        if let Some(end) = &config.last_line {
            check_last_line(text, end)?;
        }
        config.validate()?;
        Ok(config)
    }

    /// Reads and parses a file. See [`from_toml`](Self::from_toml).
    ///
    /// An editor may be writing the file during the read. So the file is read again after a tenth of a second, until two
    /// reads agree in bytes and modification time. A write that pauses for longer is not noticed: see [a
    /// file that was cut short](super#a-file-that-was-cut-short).
    ///
    /// # Errors
    ///
    /// Returns the errors of [`from_toml`](Self::from_toml), and an error if the file cannot be read, is not a regular
    /// file, is larger than 1 MiB, is not UTF-8, or still changes after two seconds.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with timers.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigFileError> {
        let text = read_file(path.as_ref()).await;
        let text = text.map_err(|error| ConfigFileError::of("file", error.to_string()))?;
        Self::from_toml(&text)
    }

    /// Checks all values, without a store.
    ///
    /// # Errors
    ///
    /// If values are out of range or inconsistent, names are unknown, or patterns conflict: all these faults. Otherwise, if
    /// no route has a limit, or a limit has no route, unless the configuration declares it.
    pub fn validate(&self) -> Result<(), ConfigFileError> {
        Checked::new(self).map(drop)
    }

    /// Returns the number of callers with a value of their own under this limit, by their plan or an override.
    pub fn own_values(&self, limit: &str) -> usize {
        let callers = |plan: &String| self.plans.get(plan).map_or(0, |plan| plan.keys.len());
        self.limits.get(limit).map_or(0, |limit| {
            limit.overrides.len() + limit.plans.keys().map(callers).sum::<usize>()
        })
    }
}

/// Calls the setter if the file has a value, and keeps the default otherwise.
pub(super) fn if_set<S, T>(to: S, value: Option<T>, setter: impl FnOnce(S, T) -> S) -> S {
    match value {
        Some(value) => setter(to, value),
        None => to,
    }
}
