//! Fair shares among the tenants of a limit.
//!
//! Tests: `tests/config/tenants.rs`.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::{
    error::Faults,
    header_key::{self, HeaderKey},
    key::{CallerKey, KeyConfig},
    plan::{Own, PlanConfig},
};
#[cfg(test)]
use super::{key::KeyTable, schema};
use crate::{key::Key, layer::Scope, ranges::MAX_SHARE};

/// Fair shares among tenants: `fair = true`, or `fair = { by = { header = "x-tenant" }, shares = { acme = 3 } }`.
///
/// See [`Limit::fair`](crate::Limit::fair).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FairConfig {
    /// Selects the requests of one tenant, in the form of a [key](super::LimitConfig::key): headers, or the client's
    /// address.
    ///
    /// `None` (`fair = true`): all requests are one tenant, and semaphores in code may name others.
    pub by: Option<KeyConfig>,
    /// Shares for the tenants of a plan, by the plan's name. See [`Scope::shares`](crate::Scope::shares). Default: 1.
    pub plans: BTreeMap<String, u32>,
    /// Shares for single tenants, which take precedence over plans.
    pub shares: BTreeMap<CallerKey, u32>,
}

/// The tenants of a request, and their shares, checked.
#[derive(Debug)]
pub(super) struct CheckedFair {
    /// `None`: no request has a tenant.
    pub by: Option<KeyConfig>,
    shares: HashMap<Key, u32>,
}

impl FairConfig {
    /// Adds the faults of the table at this path.
    pub(super) fn checked(
        &self,
        path: &str,
        plans: &BTreeMap<String, PlanConfig>,
        faults: &mut Faults,
    ) -> CheckedFair {
        let shares = match &self.by {
            Some(KeyConfig::Shared | KeyConfig::Route) => {
                let message = "must be a header, several headers, or the client's address";
                faults.add(format!("{path}.by"), message);
                HashMap::new()
            }
            Some(by) => {
                by.check(&format!("{path}.by"), faults);
                self.resolved(path, by, plans, faults)
            }
            None if self.plans.is_empty() && self.shares.is_empty() => HashMap::new(),
            None => {
                let message = "is missing: no request has a tenant with a share";
                faults.add(format!("{path}.by"), message);
                HashMap::new()
            }
        };
        CheckedFair {
            by: self.by.clone(),
            shares,
        }
    }

    fn resolved(
        &self,
        path: &str,
        by: &KeyConfig,
        plans: &BTreeMap<String, PlanConfig>,
        faults: &mut Faults,
    ) -> HashMap<Key, u32> {
        let own = Own {
            path: path.to_owned(),
            by_plan: &self.plans,
            field: "shares",
            by_caller: &self.shares,
        };
        let check = |path: &str, share: u32, faults: &mut Faults| {
            if !(1..=MAX_SHARE).contains(&share) {
                let message = format!("is {share}: it must be 1 to {MAX_SHARE}");
                faults.add(path, message);
            }
        };
        let shares = own.resolve(plans, by, check, faults);
        if shares.contains_key(&Key::SHARED) {
            let message = "has an empty tenant: requests without a tenant have a share of 1";
            faults.add(format!("{path}.shares"), message);
        }
        shares
    }
}

impl CheckedFair {
    /// The key of a tenant, written as in the file, and its share. An empty tenant is none.
    pub(super) fn tenant_of(&self, tenant: &str) -> Result<(Key, u32), &'static str> {
        let key = match &self.by {
            _ if tenant.is_empty() => Key::SHARED,
            None => Key::from(tenant),
            Some(by) => by.of(&CallerKey::from(tenant))?,
        };
        let share = self.shares.get(&key).copied();
        Ok((key, share.unwrap_or(1)))
    }

    pub(super) fn apply(&self, scope: Scope) -> Scope {
        let by_headers = |scope: Scope, headers: Vec<HeaderKey>| {
            scope.fair_by_key(move |head| header_key::find(&headers, &head.headers).map(Key::from))
        };
        let scope = match &self.by {
            // `checked` has refused keys other than headers and addresses.
            None | Some(KeyConfig::Shared | KeyConfig::Route) => return scope,
            Some(KeyConfig::Header(name)) => scope.fair_by_header(name.as_str()),
            Some(KeyConfig::Bearer(name)) => {
                by_headers(scope, vec![HeaderKey::Bearer(name.clone())])
            }
            Some(KeyConfig::AnyOf(headers)) => by_headers(scope, headers.clone()),
            Some(KeyConfig::ClientAddress(config)) => {
                let address = config.address();
                scope.fair_by_key(move |head| {
                    let found = address.find(head)?;
                    Some(address.key_of(found))
                })
            }
        };
        scope.shares(self.shares.clone())
    }
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct FairTable {
    /// Selects the requests of one tenant, in the form of a key: headers, or the client's address.
    #[cfg_attr(test, schemars(with = "schema::WordOrTable<TenantWord, KeyTable>"))]
    by: KeyConfig,
    /// Shares for the tenants of a plan, by the plan's name. Default: 1.
    #[serde(default)]
    #[cfg_attr(test, schemars(with = "BTreeMap<String, schema::Share>"))]
    plans: BTreeMap<String, u32>,
    /// Shares for single tenants, which take precedence over plans.
    #[serde(default)]
    #[cfg_attr(test, schemars(with = "BTreeMap<String, schema::Share>"))]
    shares: BTreeMap<CallerKey, u32>,
}

#[cfg(test)]
#[derive(schemars::JsonSchema)]
#[schemars(rename_all = "kebab-case")]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) enum TenantWord {
    /// Each address of a peer.
    ClientAddress,
}

/// Reads `true`, `false` or a table.
pub(super) fn fair<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<FairConfig>, D::Error> {
    deserializer.deserialize_any(BoolOrTable)
}

struct BoolOrTable;

impl<'de> Visitor<'de> for BoolOrTable {
    type Value = Option<FairConfig>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a boolean or a table")
    }

    fn visit_bool<E>(self, is_fair: bool) -> Result<Self::Value, E> {
        Ok(is_fair.then(FairConfig::default))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        let table = FairTable::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Some(FairConfig {
            by: Some(table.by),
            plans: table.plans,
            shares: table.shares,
        }))
    }
}
