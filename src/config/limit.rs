//! The `[limits]` section.
//!
//! Tests: `tests/config/reading.rs`, `faults.rs`.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use serde::{Deserialize, Deserializer};

use super::{
    cost::CostConfig,
    error::Faults,
    fair::{FairConfig, fair},
    key::{CallerKey, KeyConfig},
    plan::{Own, PlanConfig},
    value::values,
    word_or_table::{WORD_OR_TABLE, word_or_table},
};
#[cfg(test)]
use super::{
    cost::CostTable,
    fair::FairTable,
    key::{KeyTable, KeyWord},
    schema,
    value::ValueTable,
};
#[cfg(test)]
use crate::ranges::MAX_WAITERS;
use crate::{
    error::ConfigError,
    key::Key,
    layer::check_pause,
    limit::{Class, Fallback, Limit, LimitValue, Mode},
    ranges::MAX_LIMIT,
};

/// A limit: its value, its key, and the treatment of excess requests. The name of its table is the limit's name.
///
/// Either [`concurrent`](Self::concurrent), or [`rate`](Self::rate) and [`per`](Self::per), is required.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("allOf" = schema::limit_rules())))]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct LimitConfig {
    /// Concurrent requests per key. See [`Limit::concurrent`].
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_LIMIT)))]
    pub concurrent: Option<u32>,
    /// Requests that start per period and key. See [`Limit::rate`].
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_LIMIT)))]
    pub rate: Option<u32>,
    /// Period of a rate.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub per: Option<Duration>,
    /// Requests that may start at once after a pause. See [`Limit::burst`]. Default: the rate.
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_LIMIT)))]
    pub burst: Option<u32>,
    /// Unit of a rate. See [`Limit::unit`]. Default: `"requests"`.
    #[cfg_attr(test, schemars(regex(pattern = r"^[A-Za-z][A-Za-z0-9._-]{0,31}$")))]
    pub unit: Option<String>,
    /// Cost of a request at a rate: a number, or `{ header = "x-prompt-tokens" }`. See [`Scope::cost_by`](crate::Scope::cost_by).
    ///
    /// Default: 1.
    #[cfg_attr(test, schemars(with = "schema::WordOrTable<schema::Cost, CostTable>"))]
    pub(super) cost: Option<CostConfig>,
    /// Whether a cost above the burst counts as the burst. See [`Scope::clamp_cost`](crate::Scope::clamp_cost).
    ///
    /// Default: no, a request with such a cost is refused.
    pub clamp_cost: bool,
    /// Selects the requests that the limit counts together. Default: all of them.
    #[cfg_attr(test, schemars(with = "schema::WordOrTable<KeyWord, KeyTable>"))]
    pub(super) key: KeyConfig,
    /// Whether a request without a key is refused. See [`Scope::require_key`](crate::Scope::require_key).
    ///
    /// Default: a request without a `bearer` or `any_of` key is refused. With other keys, requests without a key share one.
    pub require_key: Option<bool>,
    /// Class: `"caller"`, `"tenant"`, `"route"` or `"global"`. See [`Limit::class`].
    ///
    /// Default: caller, but route for a key by route, and global for a limit that all requests share.
    pub class: Option<Class>,
    /// Longest wait of a request. See [`Limit::wait_up_to`]. Default: zero, the request is refused at once.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub wait: Option<Duration>,
    /// Length of the queue of one key. See [`Limit::max_waiters`]. Default: 1,000.
    #[cfg_attr(test, schemars(range(max = MAX_WAITERS)))]
    pub max_waiters: Option<u32>,
    /// States that no route has this limit, because only code uses it. Default: `false`.
    ///
    /// Without it a limit without a route is an error. See [`LiveConfig::limit`](super::LiveConfig::limit).
    pub unrouted: bool,
    /// Whether a released slot may serve the next request of its process. See [`Limit::reuse`]. Default: no.
    pub reuse: bool,
    /// Fair shares among tenants: `true`, or `{ by = { header = "x-tenant" }, shares = { acme = 3 }, plans = { gold = 3 } }`.
    /// See [`Limit::fair`]. Default: no, first come, first served.
    #[serde(deserialize_with = "fair")]
    #[cfg_attr(test, schemars(with = "schema::BoolOrTable<FairTable>"))]
    pub(super) fair: Option<FairConfig>,
    /// Whether a request without a tenant is refused. See [`Scope::require_tenant`](crate::Scope::require_tenant).
    ///
    /// Default: no, all requests without a tenant are one tenant.
    pub require_tenant: bool,
    /// Judgement of responses: `"overload"` pauses the limit for the key of a request, in all replicas, if its response says
    /// that the service is overloaded, and for how long. See [`Scope::outcome_by`](crate::Scope::outcome_by). Default: none.
    pub(super) outcome: Option<OutcomeConfig>,
    /// Longest pause, at most 1 hour. See [`Scope::pause_at_most`](crate::Scope::pause_at_most). Default: 60 seconds.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub pause_at_most: Option<Duration>,
    /// Mode: `"enforce"`, `"shadow"` or `"off"`. Default: enforce.
    pub mode: Mode,
    /// Fallback: `"local"`, `{ local = 3 }`, `"share"`, `"allow"` or `"reject"`. See [`Limit::fallback`].
    ///
    /// Default (`None`): local, with the limit's own value.
    #[serde(deserialize_with = "fallback")]
    #[cfg_attr(
        test,
        schemars(with = "schema::WordOrTable<FallbackWord, FallbackTable>")
    )]
    pub fallback: Option<Fallback>,
    /// Total time for which the fallback may decide. See [`Limit::fallback_for`]. Default: as long as the store is
    /// down.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub fallback_for: Option<Duration>,
    /// Values for the callers of a plan, by the plan's name: numbers, or for a rate `{ rate = 100, burst = 20 }`.
    ///
    /// A number has the limit's [`burst`](Self::burst), or if the limit sets none, a burst equal to the number.
    #[serde(deserialize_with = "values")]
    #[cfg_attr(
        test,
        schemars(with = "BTreeMap<String, schema::WordOrTable<schema::Value, ValueTable>>")
    )]
    pub plans: BTreeMap<String, LimitValue>,
    /// Values for single callers, which take precedence over plans. See [`Scope::values`](crate::Scope::values).
    ///
    /// A caller with a value of 0 is always refused; a rate cannot be 0.
    #[serde(deserialize_with = "values")]
    #[cfg_attr(
        test,
        schemars(with = "BTreeMap<String, schema::WordOrTable<schema::Value, ValueTable>>")
    )]
    pub(super) overrides: BTreeMap<CallerKey, LimitValue>,
}

/// A judgement of responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub(super) enum OutcomeConfig {
    /// See [`overload`](crate::layer::overload).
    Overload,
}

impl LimitConfig {
    /// Returns the limit, and adds its faults.
    pub(super) fn limit(&self, name: &str, faults: &mut Faults) -> Option<Limit> {
        let path = format!("limits.{name}");
        let kind = match self.rate {
            Some(_) => Limit::try_rate(name.to_owned(), MAX_LIMIT, Duration::from_secs(1)),
            None => Limit::try_concurrent(name.to_owned(), 1),
        };
        let plain = faults.take(&path, kind)?;
        let amount = self.amount(&path, faults);
        let valid = amount.and_then(|(field, max)| {
            let field = self.faulty(name, max).unwrap_or(field);
            faults.take(&format!("{path}.{field}"), self.bare(name, max.into()))
        });
        // The other settings are checked even if the amount has a fault: then with another amount of the same kind.
        let is_valid = valid.is_some();
        let bare = self.in_unit(&path, valid.unwrap_or(plain), faults);

        let mut limit = bare.clone().mode(self.mode);
        let by_key = (self.key == KeyConfig::Route).then_some(Class::Route);
        if let Some(class) = self.class.or(by_key) {
            limit = limit.class(class);
        }
        if self.reuse && limit.period().is_some() {
            faults.add(format!("{path}.reuse"), "a rate has no slots to be reused");
        } else if self.reuse {
            limit = limit.reuse();
        }
        limit = self.in_fairness(&path, limit, faults);
        self.check_required_tenant(&path, faults);
        self.check_outcome(&path, faults);
        let burst = limit.current_burst();
        if let Some(cost) = &self.cost {
            cost.check(&format!("{path}.cost"), burst, self.clamp_cost, faults);
        }
        if self.clamp_cost && burst.is_none() {
            let message = "belongs to a `rate`, and there is none";
            faults.add(format!("{path}.clamp_cost"), message);
        }
        if self.requires_key() && matches!(self.key, KeyConfig::Shared | KeyConfig::Route) {
            let message = "is true, and no request lacks a key of this limit";
            faults.add(format!("{path}.require_key"), message);
        }
        let mut set = |field: &str, change: &dyn Fn(Limit) -> Limit| {
            faults.take(&format!("{path}.{field}"), change(bare.clone()).validate());
            limit = change(limit.clone());
        };
        if let Some(wait) = self.wait {
            set("wait", &|limit| limit.wait_up_to(wait));
        }
        if let Some(max_waiters) = self.max_waiters {
            set("max_waiters", &|limit| limit.max_waiters(max_waiters));
        }
        if let Some(policy) = self.fallback {
            set("fallback", &|limit| limit.fallback(policy));
        }
        if let Some(time) = self.fallback_for {
            set("fallback_for", &|limit| limit.fallback_for(time));
        }
        is_valid.then_some(limit)
    }

    /// Returns whether a request without a key is refused, by [`require_key`](Self::require_key) or by default.
    pub fn requires_key(&self) -> bool {
        let default = self.key.is_required_by_default();
        self.require_key.unwrap_or(default)
    }

    /// Returns where a request's key comes from, for people: `x-api-key`, `authorization (bearer)`.
    pub fn key_source(&self) -> String {
        self.key.to_string()
    }

    /// Returns where a request's tenant comes from, for people. `None`: the limit is not fair.
    pub fn tenant_source(&self) -> Option<String> {
        let by = self.fair.as_ref()?.by.as_ref();
        Some(by.map_or("(tenants in code)".to_owned(), KeyConfig::to_string))
    }

    fn check_outcome(&self, path: &str, faults: &mut Faults) {
        if self.outcome.is_some() && self.rate.is_some() {
            faults.add(
                format!("{path}.outcome"),
                "a rate has no slots to be paused",
            );
        }
        let path = format!("{path}.pause_at_most");
        match self.pause_at_most {
            Some(_) if self.outcome.is_none() => {
                faults.add(path, "belongs to an `outcome`, and there is none");
            }
            Some(time) => drop(faults.take(&path, check_pause(time))),
            None => {}
        }
    }

    /// Returns the limit with its unit, if set.
    fn in_unit(&self, path: &str, limit: Limit, faults: &mut Faults) -> Limit {
        // A unit without a rate is already a fault.
        match self.unit.as_deref().filter(|_| limit.period().is_some()) {
            Some(unit) => {
                let counted = limit.clone().in_unit(unit);
                faults
                    .take(&format!("{path}.unit"), counted)
                    .unwrap_or(limit)
            }
            None => limit,
        }
    }

    /// The field of a rate that is at fault, other than the count.
    fn faulty(&self, name: &str, count: u32) -> Option<&'static str> {
        let name = name.to_owned();
        if let Some(period) = self.per
            && Limit::try_rate(name.clone(), 1, period).is_err()
        {
            return Some("per");
        }
        let is_counted = Limit::try_concurrent(name, count).is_ok();
        (is_counted && self.burst.is_some()).then_some("burst")
    }

    /// The value, and its field.
    fn amount(&self, path: &str, faults: &mut Faults) -> Option<(&'static str, u32)> {
        if self.rate.is_none() {
            for (field, is_set) in [
                ("per", self.per.is_some()),
                ("burst", self.burst.is_some()),
                ("unit", self.unit.is_some()),
            ] {
                if is_set {
                    faults.add(
                        format!("{path}.{field}"),
                        "belongs to a `rate`, and there is none",
                    );
                }
            }
        } else if self.per.is_none() {
            faults.add(
                format!("{path}.per"),
                "is missing: a rate is a count in a period",
            );
        }
        match (self.concurrent, self.rate) {
            (Some(_), Some(_)) => {
                faults.add(
                    path,
                    "is either `concurrent` or a `rate`: two limits can do both",
                );
                None
            }
            (None, None) => {
                faults.add(path, "has neither `concurrent` nor a `rate`");
                None
            }
            (Some(max), None) => Some(("concurrent", max)),
            (None, Some(max)) => self.per.map(|_| ("rate", max)),
        }
    }

    fn bare(&self, name: &str, value: LimitValue) -> Result<Limit, ConfigError> {
        let (name, max) = (name.to_owned(), value.max);
        let limit = match (self.rate, self.per) {
            (Some(_), Some(period)) => Limit::try_rate(name, max, period)?,
            _ => Limit::try_concurrent(name, max)?,
        };
        let limit = match value.burst.or(self.burst) {
            Some(burst) if limit.period().is_some() => limit.burst(burst),
            _ => limit,
        };
        limit.validate()?;
        Ok(limit)
    }

    /// The callers' own values.
    pub(super) fn own_values(
        &self,
        name: &str,
        plans: &BTreeMap<String, PlanConfig>,
        faults: &mut Faults,
    ) -> HashMap<Key, LimitValue> {
        let own = Own {
            path: format!("limits.{name}"),
            by_plan: &self.plans,
            field: "overrides",
            by_caller: &self.overrides,
        };
        let check = |path: &str, value: LimitValue, faults: &mut Faults| {
            self.check_own(name, path, value, faults);
        };
        own.resolve(plans, &self.key, check, faults)
    }

    /// Returns the limit, made fair if it is declared so.
    fn in_fairness(&self, path: &str, limit: Limit, faults: &mut Faults) -> Limit {
        let mut fault = |message| faults.add(format!("{path}.fair"), message);
        match &self.fair {
            None => return limit,
            Some(_) if self.rate.is_some() => fault("a rate has no slots to be shared"),
            Some(_) if self.reuse => fault("excludes `reuse`, which passes over other tenants"),
            Some(_) if self.wait.unwrap_or_default().is_zero() => {
                fault("needs a `wait`: tenants share by the order in which their requests wait");
            }
            Some(_) => return limit.fair(),
        }
        limit
    }

    fn check_required_tenant(&self, path: &str, faults: &mut Faults) {
        let by = self.fair.as_ref().and_then(|fair| fair.by.as_ref());
        if self.require_tenant && by.is_none() {
            let message = "belongs to `fair` with `by`, and there is none";
            faults.add(format!("{path}.require_tenant"), message);
        }
    }
}

/// A value for some callers.
impl LimitConfig {
    fn check_own(&self, name: &str, path: &str, value: LimitValue, faults: &mut Faults) {
        if self.rate.is_none() && value.burst.is_some() {
            return faults.add(
                path,
                "has a burst, which belongs to a `rate`, and there is none",
            );
        }
        // A value of 0 refuses every request of a caller. A rate cannot be 0.
        let least = u32::from(self.rate.is_none());
        let max = value.max.max(least);
        let limit = faults.take(path, self.bare(name, LimitValue { max, ..value }));
        let burst = limit.and_then(|limit| limit.current_burst());
        if let (Some(cost), Some(burst)) = (&self.cost, burst)
            && cost.is_above(burst)
            && !self.clamp_cost
        {
            let message =
                format!("has a burst of {burst}, and a request costs more: none is admitted");
            faults.add(path, message);
        }
    }
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
enum FallbackWord {
    /// Each process enforces the limit's own value separately.
    Local,
    /// Each process enforces its share of the limit, by the number of replicas.
    Share,
    /// Every request is admitted.
    Allow,
    /// Every request is refused.
    Reject,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct FallbackTable {
    /// Each process enforces this value separately.
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_LIMIT)))]
    local: u32,
}

fn fallback<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Fallback>, D::Error> {
    word_or_table(
        deserializer,
        WORD_OR_TABLE,
        |word| {
            Ok(match word {
                FallbackWord::Local => None,
                FallbackWord::Share => Some(Fallback::Share),
                FallbackWord::Allow => Some(Fallback::Allow),
                FallbackWord::Reject => Some(Fallback::Reject),
            })
        },
        |table: FallbackTable| Ok(Some(Fallback::Local(table.local))),
    )
}
