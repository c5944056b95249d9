//! The tenant of a request under a fair limit, and its share.
//!
//! Tests: `tests/layer/tenants.rs`.

use std::{collections::HashMap, sync::Arc};

use http::request::Parts;

use crate::{error::ConfigError, keeper::Tenant, key::Key, limit::Limit, ranges::MAX_SHARE};

/// Share of a tenant that has none of its own.
const SHARE: u32 = 1;

/// The sources of a request's tenant and of its share. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Tenants {
    /// `None`: all requests are one tenant.
    pub(super) source: Option<Arc<FindTenant>>,
    pub(super) table: Option<Arc<HashMap<Key, u32>>>,
    pub(super) by: Option<Arc<FindShare>>,
    /// Whether a request without a tenant is refused.
    pub(super) is_required: bool,
}

type FindTenant = dyn Fn(&Parts) -> Option<Key> + Send + Sync;
type FindShare = dyn Fn(&Parts, &Key) -> Option<u32> + Send + Sync;

impl Tenants {
    /// Checks the settings that the setters cannot refuse. Errors do not contain tenants.
    pub(in crate::layer) fn validate(&self, limit: &Limit) -> Result<(), ConfigError> {
        let name = limit.name();
        let has_settings = self.is_required || self.table.is_some() || self.by.is_some();
        let fault = |message| Err(ConfigError::value(message));
        if self.source.is_none() && has_settings {
            return fault(format!(
                "limit `{name}` has shares, or requires a tenant, and no request has one: set `fair_by_header` \
                 or `fair_by_key`"
            ));
        }
        for (tenant, &share) in self.table.iter().flat_map(|table| table.iter()) {
            limit.check_share(share)?;
            if *tenant == Key::SHARED && share != SHARE {
                return fault(format!(
                    "limit `{name}` has a share for an empty tenant: requests without a tenant have a share of {SHARE}"
                ));
            }
        }
        Ok(())
    }

    #[inline(never)] // most limits are not fair
    pub(in crate::layer) fn find(&self, head: &Parts) -> Tenant {
        let found = self.source.as_ref().and_then(|find| find(head));
        // An empty header, or a closure's empty text, is no tenant.
        match found.filter(|name| *name != Key::SHARED) {
            Some(name) => Tenant {
                share: self.share_of(head, &name),
                name,
            },
            None => Tenant {
                name: Key::SHARED,
                share: SHARE,
            },
        }
    }

    fn share_of(&self, head: &Parts, tenant: &Key) -> u32 {
        let listed = self.table.as_ref().and_then(|table| table.get(tenant));
        let found = listed.copied().or_else(|| self.by.as_ref()?(head, tenant));
        found.map_or(SHARE, |share| share.clamp(1, MAX_SHARE))
    }
}
