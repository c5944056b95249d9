//! Fair shares among the tenants of a limit.
//!
//! Tests: `tests/config/tenants.rs`.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Deserializer};

use super::{
    error::Faults,
    key::{CallerKey, KeyConfig},
    plan::{Own, PlanConfig},
    word_or_table::word_or_table,
};
#[cfg(test)]
use super::{key::KeyTable, schema};
use crate::{key::Key, layer::Scope, ranges::MAX_SHARE};

/// Fair shares among tenants: `fair = true`, or `fair = { by = { header = "x-tenant" }, shares = { acme = 3 } }`.
///
/// See [`Limit::fair`](crate::Limit::fair).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct FairConfig {
    /// Selects the requests of one tenant, in the form of a key: headers, or the client's address.
    // `None` (`fair = true`): all requests are one tenant, and semaphores in code may name others.
    #[serde(deserialize_with = "source")]
    #[cfg_attr(
        test,
        schemars(with = "schema::WordOrTable<schema::TenantWord, KeyTable>")
    )]
    pub(super) by: Option<KeyConfig>,
    /// Shares for the tenants of a plan, by the plan's name. Default: 1.
    #[serde(default)]
    #[cfg_attr(test, schemars(with = "BTreeMap<String, schema::Share>"))]
    pub(super) plans: BTreeMap<String, u32>,
    /// Shares for single tenants, which take precedence over plans.
    #[serde(default)]
    #[cfg_attr(test, schemars(with = "BTreeMap<String, schema::Share>"))]
    pub(super) shares: BTreeMap<CallerKey, u32>,
}

impl FairConfig {
    /// Returns the shares of tenants. Adds the faults of the table at this path.
    pub(super) fn own_shares(
        &self,
        path: &str,
        plans: &BTreeMap<String, PlanConfig>,
        faults: &mut Faults,
    ) -> HashMap<Key, u32> {
        let Some(by) = &self.by else {
            return HashMap::new();
        };
        let by_path = format!("{path}.by");
        if matches!(by, KeyConfig::Shared | KeyConfig::Route) {
            let message = "must be a header, several headers, or the client's address";
            faults.add(by_path, message);
            return HashMap::new();
        }
        by.check(&by_path, faults);
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

    /// The key of a tenant, written as in the file. An empty tenant is none.
    pub(super) fn tenant_of(&self, tenant: &str) -> Result<Key, &'static str> {
        match &self.by {
            _ if tenant.is_empty() => Ok(Key::SHARED),
            None => Ok(Key::from(tenant)),
            Some(by) => by.of(&CallerKey::from(tenant)),
        }
    }

    pub(super) fn apply(&self, shares: HashMap<Key, u32>, scope: Scope) -> Scope {
        match self.by.clone() {
            None => scope,
            // Faster than `find`, which parses the name for each request.
            Some(KeyConfig::Header(name)) => scope.fair_by_header(name).shares(shares),
            Some(by) => scope.fair_by_key(move |head| by.find(head)).shares(shares),
        }
    }
}

/// Reads the source of tenants, which a table must have.
fn source<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<KeyConfig>, D::Error> {
    KeyConfig::deserialize(deserializer).map(Some)
}

/// Reads `true`, `false` or a table.
pub(super) fn fair<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<FairConfig>, D::Error> {
    word_or_table(
        deserializer,
        "a boolean or a table",
        |is_fair: bool| Ok(is_fair.then(FairConfig::default)),
        |table: FairConfig| Ok(Some(table)),
    )
}
