//! The tenant of a semaphore, under a fair limit.
//!
//! Tests: `tests/semaphore/tenants.rs`.

use std::sync::Arc;

use super::{Bound, Semaphore};
use crate::{error::ConfigError, keeper::Tenant, key::Key};

/// Tenants of fair limits.
impl Semaphore {
    /// Sets the tenant of this semaphore's requests under the last limit, which is [fair](crate::Limit::fair).
    ///
    /// Default: none. All requests without a tenant, from layers too, are one tenant with a share of 1. An empty tenant is
    /// none.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Key, Limit, Limiter};
    ///
    /// const JOBS: Limit = Limit::concurrent("jobs", 4).wait_up_to(Duration::from_secs(60)).fair();
    ///
    /// let acme = Limiter::in_memory().semaphore(&JOBS, Key::SHARED).tenant("acme").share(3);
    /// ```
    ///
    /// # Panics
    ///
    /// If the limit is not fair. [`try_tenant`](Self::try_tenant) returns this fault as an error.
    #[must_use]
    #[track_caller]
    pub fn tenant(self, tenant: impl Into<Key>) -> Self {
        match self.try_tenant(tenant) {
            Ok(semaphore) => semaphore,
            Err(error) => panic!("{error}"),
        }
    }

    /// Fallible version of [`tenant`](Self::tenant).
    ///
    /// # Errors
    ///
    /// If the limit is not fair.
    pub fn try_tenant(mut self, tenant: impl Into<Key>) -> Result<Self, ConfigError> {
        self.fair_bound()?.tenant = tenant.into();
        Ok(self)
    }

    /// Sets the share of this semaphore's [tenant](Self::tenant) under the last limit, from 1 to 1,000
    /// ([`Limit::MAX_SHARE`](crate::Limit::MAX_SHARE)). Default: 1.
    ///
    /// All users of the tenant should set the same share. See [`Scope::shares`](crate::Scope::shares). Requests without a
    /// tenant keep a share of 1.
    ///
    /// # Panics
    ///
    /// If the limit is not fair, or the share is out of range. [`try_share`](Self::try_share) returns these faults as
    /// errors.
    #[must_use]
    #[track_caller]
    pub fn share(self, share: u32) -> Self {
        match self.try_share(share) {
            Ok(semaphore) => semaphore,
            Err(error) => panic!("{error}"),
        }
    }

    /// Fallible version of [`share`](Self::share).
    ///
    /// # Errors
    ///
    /// If the limit is not fair, or the share is out of range.
    pub fn try_share(mut self, share: u32) -> Result<Self, ConfigError> {
        let bound = self.fair_bound()?;
        bound.limit.check_share(share)?;
        bound.share = share;
        Ok(self)
    }

    /// The last limit, if it is fair.
    fn fair_bound(&mut self) -> Result<&mut Bound, ConfigError> {
        let inner = Arc::make_mut(&mut self.0);
        let bound = inner.others.last_mut().unwrap_or(&mut inner.first);
        if !bound.limit.is_fair() {
            return Err(ConfigError::value(format!(
                "limit `{}` is not fair, so its requests have no tenant: set `fair`",
                bound.limit.name()
            )));
        }
        Ok(bound)
    }
}

impl Bound {
    /// Who pays for a slot. `None`: the limit is not fair.
    pub(super) fn payer(&self) -> Option<Tenant> {
        let has_tenant = self.tenant != Key::SHARED;
        self.limit.is_fair().then(|| Tenant {
            name: self.tenant.clone(),
            share: if has_tenant { self.share } else { 1 },
        })
    }
}
