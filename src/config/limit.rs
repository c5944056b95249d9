//! The `[limits]` section.
//!
//! Tests: `tests/config/reading.rs`, `faults.rs`.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use humantime_serde::Serde;
use serde::{Deserialize, Deserializer};

use super::{
    cost::CostConfig,
    error::Faults,
    fair::{FairConfig, fair},
    key::{CallerKey, KeyConfig, check_name},
    optional::if_set,
    plan::{Own, PlanConfig, values},
    word_or_table::{TIME_OR_TABLE, WORD_OR_TABLE, word_or_table},
};
#[cfg(test)]
use super::{
    cost::CostTable,
    key::{KeyTable, KeyWord},
    schema,
};
#[cfg(test)]
use crate::ranges::{MAX_RATE, MAX_WAITERS};
use crate::{
    key::Key,
    layer::check_pause,
    ledger::Rate,
    limit::{Adapt, Class, Fallback, Limit, LimitValue, Mode},
    ranges::MAX_LIMIT,
    unit::{MAX_UNIT_LEN, Unit},
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
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_RATE)))]
    pub rate: Option<u32>,
    /// Period of a rate.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    pub per: Option<Duration>,
    /// Requests that may start at once after a pause. See [`Limit::burst`]. Default: the rate.
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_RATE)))]
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
    /// Longest wait of a request: `"30s"`, or `{ at_most = "30s", header = "x-max-wait" }` if its caller may shorten it. See
    /// [`Limit::wait_up_to`] and [`Scope::wait_by_header`](crate::Scope::wait_by_header).
    ///
    /// Default: zero, the request is refused at once.
    #[serde(deserialize_with = "wait")]
    #[cfg_attr(test, schemars(with = "schema::WordOrTable<schema::Time, WaitTable>"))]
    pub(super) wait: Option<WaitTable>,
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
    #[cfg_attr(test, schemars(with = "schema::BoolOrTable<FairConfig>"))]
    pub(super) fair: Option<FairConfig>,
    /// Whether a request without a tenant is refused. See [`Scope::require_tenant`](crate::Scope::require_tenant).
    ///
    /// Default: no, all requests without a tenant are one tenant.
    pub require_tenant: bool,
    /// Judgement of responses: `"overload"` pauses the limit for the key of a request, in all replicas, if its response says
    /// that the service is overloaded, and for how long. `{ slower_than = "2s" }` also judges a later response head as overloaded,
    /// for an [`adapt`](Self::adapt). See [`Scope::outcome_by`](crate::Scope::outcome_by). Default: none.
    pub(super) outcome: Option<OutcomeConfig>,
    /// Bounds within which the limit finds its own value: `{ floor = 5, ceiling = 400 }`. See
    /// [`Scope::adapt`](crate::Scope::adapt). Default: none, the value is fixed.
    pub(super) adapt: Option<Adapt>,
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
    #[cfg_attr(test, schemars(with = "schema::Values"))]
    pub plans: BTreeMap<String, LimitValue>,
    /// Values for single callers, which take precedence over plans. See [`Scope::values`](crate::Scope::values).
    ///
    /// A caller with a value of 0 is always refused; a rate cannot be 0.
    #[serde(deserialize_with = "values")]
    #[cfg_attr(test, schemars(with = "schema::Values"))]
    pub(super) overrides: BTreeMap<CallerKey, LimitValue>,
}

/// A judgement of responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(super) enum OutcomeConfig {
    /// By status, gRPC status and `Retry-After`: see [`overload`](crate::layer::overload).
    Overload,
    /// In the same way, and by the time from the admission of a request to the head of its response: see
    /// [`slower_than`](crate::layer::slower_than).
    SlowerThan(
        #[serde(with = "humantime_serde")]
        #[cfg_attr(test, schemars(with = "schema::Time"))]
        Duration,
    ),
}

impl LimitConfig {
    /// Returns the limit, and adds its faults. `None`: its amount has a fault.
    pub(super) fn limit(&self, name: &str, faults: &mut Faults) -> Option<Limit> {
        let path = format!("limits.{name}");
        let amount = self.amount(&path, faults);
        // The other settings are checked even if the amount has a fault.
        let plain = self.plain(name, amount.map(|(_, max)| max), self.per);
        let limit = self.set(plain);
        let mut is_valid = amount.is_some();
        for (setting, fault) in limit.faults() {
            is_valid &= !matches!(setting, "name" | "max" | "period" | "burst");
            let field = match (setting, amount) {
                ("name", _) => {
                    faults.add(&path, fault);
                    continue;
                }
                ("max", Some((field, _))) => field,
                ("period", _) => "per",
                (setting, _) => setting,
            };
            faults.add(format!("{path}.{field}"), fault);
        }
        // A faulty burst is not also a fault of the cost.
        let rate = limit.to_rate(limit.max());
        let burst = rate.map(|rate| if is_valid { rate.burst } else { u32::MAX });
        self.check_rate(&path, burst, faults);
        self.check_slots(&path, faults);
        is_valid.then_some(limit)
    }

    /// The limit without other settings. Without an amount, it has the largest or the smallest of its kind.
    fn plain(&self, name: &str, amount: Option<u32>, per: Option<Duration>) -> Limit {
        let name = name.to_owned();
        match self.rate {
            Some(_) => {
                let period = per.unwrap_or(Duration::from_secs(1));
                Limit::unchecked(name, amount.unwrap_or(MAX_LIMIT), Some(period))
            }
            None => Limit::unchecked(name, amount.unwrap_or(1), None),
        }
    }

    /// Returns the limit with the other settings, except settings that its kind cannot have.
    fn set(&self, limit: Limit) -> Limit {
        let mut limit = limit.mode(self.mode);
        let by_key = (self.key == KeyConfig::Route).then_some(Class::Route);
        limit = if_set(limit, self.class.or(by_key), Limit::class);
        limit = if_set(limit, self.wait(), Limit::wait_up_to);
        limit = if_set(limit, self.max_waiters, Limit::max_waiters);
        limit = if_set(limit, self.fallback, Limit::fallback);
        limit = if_set(limit, self.fallback_for, Limit::fallback_for);
        if self.fair.is_some() {
            limit = limit.made_fair();
        }
        limit = if_set(limit, self.adapt, Limit::adapted);
        if self.rate.is_some() {
            limit = if_set(limit, self.burst, Limit::burst);
            let unit = self
                .unit
                .as_deref()
                .filter(|unit| Unit::new(unit).is_some());
            if_set(limit, unit, Limit::unit)
        } else if self.reuse {
            limit.reuse()
        } else {
            limit
        }
    }

    /// Returns the longest wait of a request; `None` if the file sets none.
    pub fn wait(&self) -> Option<Duration> {
        Some(self.wait.as_ref()?.at_most)
    }

    pub(super) fn wait_header(&self) -> Option<&str> {
        self.wait.as_ref()?.header.as_deref()
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

    /// The value, and its field.
    fn amount(&self, path: &str, faults: &mut Faults) -> Option<(&'static str, u32)> {
        match (self.concurrent, self.rate) {
            (Some(_), Some(_)) => {
                let message = "is either `concurrent` or a `rate`: two limits can do both";
                faults.add(path, message);
                None
            }
            (None, None) => {
                faults.add(path, "has neither `concurrent` nor a `rate`");
                None
            }
            (Some(max), None) => Some(("concurrent", max)),
            (None, Some(max)) => {
                if self.per.is_none() {
                    let message = "is missing: a rate is a count in a period";
                    faults.add(format!("{path}.per"), message);
                }
                self.per.map(|_| ("rate", max))
            }
        }
    }

    /// Checks the settings of rates. No `burst`: the limit is not a rate.
    fn check_rate(&self, path: &str, burst: Option<u32>, faults: &mut Faults) {
        for (field, is_set) in [
            ("per", self.per.is_some()),
            ("burst", self.burst.is_some()),
            ("unit", self.unit.is_some()),
            ("cost", self.cost.is_some()),
            ("clamp_cost", self.clamp_cost),
        ] {
            if is_set && burst.is_none() {
                let message = "belongs to a `rate`, and there is none";
                faults.add(format!("{path}.{field}"), message);
            }
        }
        let Some(burst) = burst else { return };
        let unit = self.unit.as_deref();
        if unit.is_some_and(|unit| Unit::new(unit).is_none()) {
            // The invalid unit may be long, so the error does not repeat it.
            let message = format!(
                "must have 1 to {MAX_UNIT_LEN} characters: a letter, then letters, digits, `-`, `_` and `.`"
            );
            faults.add(format!("{path}.unit"), message);
        }
        if let Some(cost) = &self.cost {
            cost.check(&format!("{path}.cost"), burst, self.clamp_cost, faults);
        }
    }

    /// Checks the settings of slots, keys and tenants.
    fn check_slots(&self, path: &str, faults: &mut Faults) {
        if let Some(name) = self.wait_header() {
            check_name(name, format!("{path}.wait.header"), faults);
        }
        let mut fault = |field: &str, message: &str| faults.add(format!("{path}.{field}"), message);
        if self.rate.is_some() && self.reuse {
            fault("reuse", "a rate has no slots to be reused");
        }
        if self.rate.is_some() && self.outcome.is_some() {
            fault("outcome", "a rate has no slots to be paused");
        }
        match (self.outcome, self.adapt) {
            (Some(OutcomeConfig::SlowerThan(Duration::ZERO)), _) => {
                fault("outcome.slower_than", "must be above 0");
            }
            (Some(OutcomeConfig::SlowerThan(_)), None) => {
                fault(
                    "outcome.slower_than",
                    "is for a limit with `adapt`, and there is none",
                );
            }
            (None, Some(_)) if self.rate.is_none() => {
                fault("adapt", "needs an `outcome`, which the limit follows");
            }
            _ => {}
        }
        let by = self.fair.as_ref().and_then(|fair| fair.by.as_ref());
        if self.require_tenant && by.is_none() {
            let message = "belongs to `fair` with `by`, and there is none";
            fault("require_tenant", message);
        }
        if self.requires_key() && matches!(self.key, KeyConfig::Shared | KeyConfig::Route) {
            let message = "is true, and no request lacks a key of this limit";
            fault("require_key", message);
        }
        match self.pause_at_most {
            Some(_) if self.outcome.is_none() => {
                fault(
                    "pause_at_most",
                    "belongs to an `outcome`, and there is none",
                );
            }
            Some(time) => drop(faults.take(&format!("{path}.pause_at_most"), check_pause(time))),
            None => {}
        }
    }

    /// The callers' own values. Beside a fault of the limit's amount, they are checked alone.
    pub(super) fn own_values(
        &self,
        name: &str,
        limit: Option<&Limit>,
        plans: &BTreeMap<String, PlanConfig>,
        faults: &mut Faults,
    ) -> HashMap<Key, LimitValue> {
        let own = Own {
            path: format!("limits.{name}"),
            by_plan: &self.plans,
            field: "overrides",
            by_caller: &self.overrides,
        };
        let cost = self
            .cost
            .as_ref()
            .filter(|_| limit.is_some() && !self.clamp_cost);
        let plain = self.plain(name, None, None);
        let limit = limit.unwrap_or(&plain);
        let check = |path: &str, value: LimitValue, faults: &mut Faults| {
            let is_valid = faults.take(path, limit.check_own_value(value)).is_some();
            if is_valid
                && let Some(Rate { burst, .. }) = limit.to_rate(value)
                && cost.is_some_and(|cost| cost.is_above(burst))
            {
                let message =
                    format!("has a burst of {burst}, and a request costs more: none is admitted");
                faults.add(path, message);
            }
        };
        own.resolve(plans, &self.key, check, faults)
    }
}

/// The wait of a request.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct WaitTable {
    /// Longest wait of a request.
    #[serde(with = "humantime_serde")]
    #[cfg_attr(test, schemars(with = "schema::Time"))]
    at_most: Duration,
    /// The request header in which a caller may say a shorter wait in seconds, such as `2` or `0.25`.
    #[cfg_attr(test, schemars(regex(pattern = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")))]
    header: Option<String>,
}

fn wait<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<WaitTable>, D::Error> {
    let plain = |time: Serde<Duration>| {
        let (at_most, header) = (time.into_inner(), None);
        Ok(Some(WaitTable { at_most, header }))
    };
    word_or_table(deserializer, TIME_OR_TABLE, plain, |table| Ok(Some(table)))
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
    #[cfg_attr(test, schemars(range(min = 1, max = MAX_RATE)))]
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
