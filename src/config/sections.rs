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

/// A configuration: named limits, and which requests are held to them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// Where the ledgers are. Default: in memory.
    pub store: StoreConfig,
    /// The limits, by their names.
    pub limits: BTreeMap<String, LimitConfig>,
    /// Groups of callers, by their names.
    pub plans: BTreeMap<String, PlanConfig>,
    /// Which requests are held to which limits.
    pub routes: Vec<RouteConfig>,
    /// No route has a limit, and all requests pass. Default: at least one route has one. Unless this is said, a
    /// configuration that limits nothing is an error.
    pub unlimited: bool,
    /// The last line of the file, a comment such as `# end`, so that a file that was cut short is noticed. It stands before
    /// everything else. Default: any line will do. It is checked by [`from_toml`](Self::from_toml) and
    /// [`from_file`](Self::from_file): other formats do not know of lines.
    pub last_line: Option<String>,
}
