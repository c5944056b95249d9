//! The `[[routes]]` sections.
//!
//! Tests: `tests/config/routes.rs`, `faults.rs`.

use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;

#[cfg(test)]
use super::schema;
use super::{error::Faults, optional::if_set};
use crate::{
    layer::{LimitLayer, OnLost, ReleaseAt, check_bound},
    ranges::MAX_WEIGHT,
};

/// A route: patterns of requests, and their limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["match"])))]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RouteConfig {
    /// Name of the route in keys by route. Default: its first pattern.
    ///
    /// With the default, a limit with `key = "route"` counts from zero when this pattern changes.
    pub name: Option<String>,
    /// Patterns of the route's requests: an optional method and a path, or `*`. At least one.
    #[serde(rename = "match")]
    #[cfg_attr(test, schemars(length(min = 1)))]
    pub matches: Vec<String>,
    /// Whether a path may have an escaped slash or backslash, or an escape of an escape, as part of a segment.
    ///
    /// Only if the service's router does not decode them. Default: no, such a request is refused with 400.
    pub escaped_slashes: bool,
    /// Names of the route's limits, which apply together. Default: none, requests are not limited.
    #[cfg_attr(test, schemars(length(max = crate::ranges::MAX_SCOPES), extend("uniqueItems" = true)))]
    pub limits: Vec<String>,
    /// Units that a request takes of each concurrent limit. See [`Scope::weight_by`](crate::Scope::weight_by).
    ///
    /// Default: 1.
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_WEIGHT)))]
    pub weight: Option<u32>,
    /// Effect of a lost slot on the response. See [`LimitLayer::on_lost`]. Default: `"continue"`.
    pub on_lost: OnLost,
    /// Effect of a shutdown on open responses. See [`LimitLayer::at_shutdown`]. Default: as `on_lost`.
    pub at_shutdown: Option<OnLost>,
    /// When slots are released. See [`LimitLayer::release_at`]. Default: `"body-end"`.
    pub release_at: ReleaseAt,
    /// Status of a refusal by a limit. See [`LimitLayer::limited_status`].
    ///
    /// Default: 429 if the route's limits have a `key`, else 503.
    #[cfg_attr(test, schemars(range(min = 400, max = 599)))]
    pub limited_status: Option<u16>,
    /// Status of other refusals. See [`LimitLayer::unavailable_status`]. Default: 503.
    #[cfg_attr(test, schemars(range(min = 400, max = 599)))]
    pub unavailable_status: Option<u16>,
    /// Longest time that a request holds its slot. See [`LimitLayer::max_hold`]. Default: no bound.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub max_hold: Option<Duration>,
    /// Longest time that a response is unread. See [`LimitLayer::idle`]. Default: no bound.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub idle: Option<Duration>,
    /// Whether responses have `RateLimit` fields. See [`LimitLayer::rate_limit_fields`]. Default: no.
    pub rate_limit_fields: bool,
}

impl RouteConfig {
    /// The name used for keys by route.
    pub(super) fn key_name(&self) -> &str {
        let name = self.name.as_ref().or(self.matches.first());
        name.map_or("", String::as_str)
    }

    /// Applies the settings of this route to a layer.
    pub(super) fn set(&self, mut layer: LimitLayer) -> LimitLayer {
        layer = layer.on_lost(self.on_lost).release_at(self.release_at);
        let (limited, unavailable) = (self.limited_status, self.unavailable_status);
        layer = if_set(layer, self.at_shutdown, LimitLayer::at_shutdown);
        layer = if_set(layer, refusing(limited), LimitLayer::limited_status);
        layer = if_set(layer, refusing(unavailable), LimitLayer::unavailable_status);
        layer = if_set(layer, self.max_hold, LimitLayer::max_hold);
        layer = if_set(layer, self.idle, LimitLayer::idle);
        if self.rate_limit_fields {
            layer = layer.rate_limit_fields();
        }
        layer
    }

    pub(super) fn check(&self, path: &str, faults: &mut Faults) {
        if self.matches.is_empty() {
            faults.add(format!("{path}.match"), "is missing, or empty");
        }
        if let Some(weight) = self.weight
            && !(1..=MAX_WEIGHT).contains(&weight)
        {
            let message = format!("is {weight}: it must be 1 to {MAX_WEIGHT}");
            faults.add(format!("{path}.weight"), message);
        }
        for (field, bound) in [("max_hold", self.max_hold), ("idle", self.idle)] {
            if let Some(bound) = bound {
                faults.take(&format!("{path}.{field}"), check_bound(field, bound));
            }
        }
        for (field, status) in [
            ("limited_status", self.limited_status),
            ("unavailable_status", self.unavailable_status),
        ] {
            if status.is_some() && refusing(status).is_none() {
                faults.add(format!("{path}.{field}"), "must be 400 to 599");
            }
        }
    }
}

/// The status, if valid for a refusal.
fn refusing(status: Option<u16>) -> Option<StatusCode> {
    let status = StatusCode::from_u16(status?).ok()?;
    (status.is_client_error() || status.is_server_error()).then_some(status)
}
