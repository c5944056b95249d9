//! All sections of a configuration, as plain data.
//!
//! Tests: `tests/config/reading.rs`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{
    limit::{LimitConfig, PlanConfig},
    route::RouteConfig,
    store::StoreConfig,
};

/// A configuration: the store, named limits, and the routes that they apply to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// The store. Default: in memory.
    pub store: StoreConfig,
    /// The limits, by their names.
    pub limits: BTreeMap<String, LimitConfig>,
    /// Groups of callers, by their names.
    pub plans: BTreeMap<String, PlanConfig>,
    /// Routes: which requests are under which limits.
    pub routes: Vec<RouteConfig>,
    /// States that no route has a limit. Default: `false`.
    ///
    /// Without it a configuration that limits nothing is an error.
    pub unlimited: bool,
    /// Last line of the file, a comment such as `# end`. Default: any line.
    ///
    /// Detects a file that was cut short, and comes before everything else. [`from_toml`](Self::from_toml) and
    /// [`from_file`](Self::from_file) check it: other formats have no lines.
    pub last_line: Option<String>,
}
