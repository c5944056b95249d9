//! A configuration whose values are all checked: limits, callers' values, routes.
//!
//! Tests: `tests/config/faults.rs`, `cuts.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{
    cost::CostConfig,
    error::{ConfigFileError, Faults, unknown},
    key::{CallerKey, KeyConfig},
    limit::{LimitConfig, OutcomeConfig},
    optional::if_set,
    plan::check_plans,
    route::RouteConfig,
    routes::Routes,
    sections::Config,
};
use crate::{
    key::Key,
    layer::{OnLost, Scope, overload, slower_than},
    limit::{Limit, LimitValue, MAX_SCOPES},
    reason::AMBIGUOUS_PATH,
};

#[derive(Debug)]
pub(super) struct Checked {
    pub(super) limits: BTreeMap<String, CheckedLimit>,
    pub(super) routes: Routes,
}

#[derive(Clone, Debug)]
pub(super) struct CheckedLimit {
    pub(super) limit: Limit,
    /// Its section.
    pub(super) config: LimitConfig,
    /// Callers' own values.
    pub(super) values: HashMap<Key, LimitValue>,
    /// Tenants' own shares.
    pub(super) shares: HashMap<Key, u32>,
}

impl Checked {
    pub(super) fn new(config: &Config) -> Result<Self, ConfigFileError> {
        let mut faults = Faults::default();
        config.store.check(&mut faults);
        check_plans(&config.plans, &mut faults);
        let mut limits = BTreeMap::new();
        for (name, limit) in &config.limits {
            if let Some(limit) = check_limit(config, name, limit, &mut faults) {
                limits.insert(name.clone(), limit);
            }
        }
        for (index, route) in config.routes.iter().enumerate() {
            route.check(&format!("routes[{index}]"), &mut faults);
        }
        check_names(config, &mut faults);
        check_weights(config, &limits, &mut faults);
        check_ends(config, &limits, &mut faults);
        let routes = Routes::new(&config.routes, &mut faults);
        if faults.is_empty() {
            check_use(config, &mut faults);
        }
        faults.into_result()?;
        Ok(Self { limits, routes })
    }
}

impl CheckedLimit {
    /// The key of a caller, written as in the file; an empty caller has no key.
    pub(super) fn key_of(&self, caller: &str) -> Result<Key, &'static str> {
        match (&self.config.key, caller) {
            (_, "") if self.config.requires_key() => Err("is required, and the caller has none"),
            (_, "") => Ok(Key::SHARED),
            (KeyConfig::Shared, _) => Err("all requests share this limit: it has no callers"),
            (key, caller) => key.of(&CallerKey::from(caller)),
        }
    }

    /// A tenant, written as in the file, and its share; an empty tenant is none.
    pub(super) fn tenant_of(&self, tenant: &str) -> Result<(Key, u32), &'static str> {
        let key = match &self.config.fair {
            None => return Err("is not set, so the limit has no tenants"),
            Some(_) if tenant.is_empty() && self.config.require_tenant => {
                return Err("requires a tenant, and there is none");
            }
            Some(fair) => fair.tenant_of(tenant)?,
        };
        let share = self.shares.get(&key).copied();
        Ok((key, share.unwrap_or(1)))
    }

    /// The cost of a request that does not say its own, and whether a cost above the burst counts as the burst.
    pub(super) fn cost(&self) -> (u32, bool) {
        let cost = self.config.cost.as_ref().and_then(CostConfig::fixed);
        (cost.unwrap_or(1), self.config.clamp_cost)
    }

    /// The scope of this limit on a route, with the rule for a request's key.
    pub(super) fn scope(&self, route: &RouteConfig) -> Scope {
        let (limit, config) = (self.limit.clone(), &self.config);
        let scope = match &config.key {
            KeyConfig::Shared => limit.into(),
            KeyConfig::Header(name) => limit.by_header(name.as_str()),
            KeyConfig::Route => {
                let key = Key::from(route.key_name());
                limit.by_key(move |_| Some(key.clone()))
            }
            KeyConfig::ClientAddress(config) => limit.by_client_address(config.address()),
            key @ (KeyConfig::Bearer(_) | KeyConfig::AnyOf(_)) => {
                // Requests without a key share one, as under `by_header`, unless they are refused.
                let shared = (!config.requires_key()).then_some(Key::SHARED);
                let key = key.clone();
                limit.by_key(move |head| key.find(head).or_else(|| shared.clone()))
            }
        };
        let mut scope = scope.values(self.values.clone());
        let has_slots = self.limit.period().is_none();
        if let Some(weight) = route.weight.filter(|_| has_slots) {
            scope = scope.weight_by(move |_| weight);
        }
        if let Some(cost) = &config.cost {
            scope = cost.apply(scope);
        }
        scope = if_set(scope, config.wait_header(), Scope::wait_by_header);
        if config.clamp_cost {
            scope = scope.clamp_cost();
        }
        if let Some(judge) = config.outcome {
            scope = scope.outcome_by(overload);
            if let OutcomeConfig::SlowerThan(target) = judge {
                scope = scope.outcome_by(slower_than(target));
            }
        }
        scope = if_set(scope, config.pause_at_most, Scope::pause_at_most);
        if let Some(fair) = &config.fair {
            scope = fair.apply(self.shares.clone(), scope);
        }
        if config.require_tenant {
            scope = scope.require_tenant();
        }
        if config.requires_key() {
            scope.require_key()
        } else {
            scope
        }
    }
}

fn check_limit(
    config: &Config,
    name: &str,
    limit: &LimitConfig,
    faults: &mut Faults,
) -> Option<CheckedLimit> {
    if name == AMBIGUOUS_PATH {
        let message =
            "is the name of the limit that refuses requests with an ambiguous path: choose another";
        faults.add(format!("limits.{name}"), message);
    }
    let checked = limit.limit(name, faults);
    limit.key.check(&format!("limits.{name}.key"), faults);
    let values = limit.own_values(name, checked.as_ref(), &config.plans, faults);
    let shares = limit.fair.as_ref().map(|fair| {
        let path = format!("limits.{name}.fair");
        fair.own_shares(&path, &config.plans, faults)
    });
    Some(CheckedLimit {
        limit: checked?,
        config: limit.clone(),
        values,
        shares: shares.unwrap_or_default(),
    })
}

/// Checks the limits that routes name, and the routes that limits name.
fn check_names(config: &Config, faults: &mut Faults) {
    let mut routes = BTreeMap::new();
    for (index, route) in config.routes.iter().enumerate() {
        let path = format!("routes[{index}]");
        let mut seen = BTreeSet::new();
        for (number, name) in route.limits.iter().enumerate() {
            let path = format!("{path}.limits[{number}]");
            if !config.limits.contains_key(name) {
                let other = format!("there is no limit `{name}`");
                faults.add(path, unknown("limit", name, config.limits.keys(), &other));
            } else if !seen.insert(name) {
                faults.add(path, format!("`{name}` is in the list already"));
            }
        }
        let count = seen.len();
        if count > MAX_SCOPES {
            let message =
                format!("a request can be under at most {MAX_SCOPES} limits, not {count}");
            faults.add(format!("{path}.limits"), message);
        }
        // Two routes without a name have the same pattern here, which is another fault.
        let (is_named, other) = (route.name.is_some(), routes.get(route.key_name()));
        if other.is_some_and(|other_is_named| is_named || *other_is_named) {
            let field = if is_named { "name" } else { "match[0]" };
            faults.add(format!("{path}.{field}"), "is the name of another route");
        }
        routes.insert(route.key_name(), is_named);
    }
    for (name, limit) in &config.limits {
        if limit.key != KeyConfig::Route {
            continue;
        }
        for route in limit.overrides.keys().map(CallerKey::as_str) {
            if !routes.contains_key(route) {
                // The name may be a caller's key in the wrong place.
                let other = "has a key that is not the name of a route";
                let message = unknown("route", route, routes.keys(), other);
                faults.add(format!("limits.{name}.overrides"), message);
            }
        }
    }
}

/// A weight that applies to no limit, or that is too large for any request to be admitted, is a fault.
fn check_weights(config: &Config, limits: &BTreeMap<String, CheckedLimit>, faults: &mut Faults) {
    for (index, route) in config.routes.iter().enumerate() {
        let Some(weight) = route.weight else { continue };
        let (path, mut counts) = (format!("routes[{index}].weight"), false);
        for name in &route.limits {
            // A limit that is missing or has a faulty value is another fault.
            let limit = limits.get(name).map(|checked| &checked.config);
            counts |= limit.is_none_or(|limit| limit.concurrent.is_some());
            let Some((limit, max)) = limit.and_then(|limit| Some((limit, limit.concurrent?)))
            else {
                continue;
            };
            let own = limit.plans.values().chain(limit.overrides.values());
            let most = own.fold(max, |most, value| most.max(value.max));
            if weight > most {
                let message =
                    format!("is more than limit `{name}` has for any request, which is {most}");
                faults.add(&path, message);
            } else if let Some(floor) = limit
                .adapt
                .map(|adapt| adapt.floor)
                .filter(|floor| weight > *floor)
            {
                let message = format!("is more than the floor of limit `{name}`, which is {floor}");
                faults.add(&path, message);
            }
        }
        if !counts {
            faults.add(path, "is for concurrent limits, and the route has none");
        }
    }
}

/// Settings that end a response together with its slot are a fault on a route without slots.
fn check_ends(config: &Config, limits: &BTreeMap<String, CheckedLimit>, faults: &mut Faults) {
    for (index, route) in config.routes.iter().enumerate() {
        let mut limits = route.limits.iter().map(|name| limits.get(name));
        // A limit that is missing or has a faulty value is another fault.
        if limits.any(|limit| limit.is_none_or(|limit| limit.config.concurrent.is_some())) {
            continue;
        }
        for (field, is_set) in [
            ("max_hold", route.max_hold.is_some()),
            ("idle", route.idle.is_some()),
            ("on_lost", route.on_lost == OnLost::Abort),
        ] {
            if is_set {
                let path = format!("routes[{index}].{field}");
                faults.add(path, "is for concurrent limits, and the route has none");
            }
        }
    }
}

/// The rest of a truncated file may parse, and limit less. So a file without limits, or a limit without a route, is a fault
/// unless the file declares it.
fn check_use(config: &Config, faults: &mut Faults) {
    let used = config.routes.iter().flat_map(|route| &route.limits);
    let used: BTreeSet<_> = used.collect();
    match (used.is_empty(), config.unlimited) {
        (true, false) => {
            let message = "none has a limit, so the layer would let all requests pass: if that is intended, for example because \
                           the limits are for code, set `unlimited = true`";
            return faults.add("routes", message);
        }
        (false, true) => faults.add("unlimited", "is true, and there are routes with limits"),
        (true, true) | (false, false) => {}
    }
    for (name, limit) in &config.limits {
        let path = format!("limits.{name}");
        match (used.contains(name), limit.unrouted) {
            (false, false) => {
                faults.add(
                    path,
                    "no route has it: if it is for code, set `unrouted = true`",
                );
            }
            (true, true) => faults.add(path + ".unrouted", "is true, and a route has it"),
            (true, false) | (false, true) => {}
        }
    }
}
