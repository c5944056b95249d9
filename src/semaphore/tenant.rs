//! The tenant of a semaphore, under a fair limit.
//!
//! Tests: `tests/semaphore/tenants.rs`.

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
    /// let acme = Limiter::in_memory().semaphore(&JOBS, Key::SHARED)?.tenant("acme")?.share(3)?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the limit is not fair.
    pub fn tenant(mut self, tenant: impl Into<Key>) -> Result<Self, ConfigError> {
        self.fair_bound()?.tenant = tenant.into();
        Ok(self)
    }

    /// Sets the share of this semaphore's [tenant](Self::tenant) under the last limit, from 1 to 1,000
    /// ([`Limit::MAX_SHARE`](crate::Limit::MAX_SHARE)). Default: 1.
    ///
    /// All users of the tenant should set the same share. See [`Scope::shares`](crate::Scope::shares). Requests without a
    /// tenant keep a share of 1.
    ///
    /// # Errors
    ///
    /// If the limit is not fair, or the share is out of range.
    pub fn share(mut self, share: u32) -> Result<Self, ConfigError> {
        let bound = self.fair_bound()?;
        bound.limit.check_share(share)?;
        bound.share = share;
        Ok(self)
    }

    /// The last limit, if it is fair.
    fn fair_bound(&mut self) -> Result<&mut Bound, ConfigError> {
        let bound = self.last();
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
    /// The tenant that pays for a slot. `None`: the limit is not fair.
    pub(super) fn tenant(&self) -> Option<Tenant> {
        let has_tenant = self.tenant != Key::SHARED;
        self.limit.is_fair().then(|| Tenant {
            name: self.tenant.clone(),
            share: if has_tenant { self.share } else { 1 },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{keeper::Demand, limit::Limit, limiter::Limiter};

    const JOBS: Limit = Limit::concurrent("jobs", 1)
        .wait_up_to(Duration::from_secs(1))
        .fair();

    fn payers(semaphore: &Semaphore) -> Vec<Option<Tenant>> {
        let legs = match semaphore.0.demand(true, 1) {
            Demand::One(leg) => vec![leg],
            Demand::All(legs) => legs,
        };
        legs.into_iter().map(|leg| leg.tenant).collect()
    }

    fn of(name: impl Into<Key>, share: u32) -> Option<Tenant> {
        let name = name.into();
        Some(Tenant { name, share })
    }

    #[test]
    fn a_request_has_its_tenant_and_share_in_any_order() {
        let limiter = Limiter::in_memory();
        let jobs = || limiter.semaphore(&JOBS, "key").unwrap();
        assert_eq!(payers(&jobs()), [of(Key::SHARED, 1)]);
        assert_eq!(payers(&jobs().tenant("acme").unwrap()), [of("acme", 1)]);
        assert_eq!(
            payers(&jobs().tenant("acme").unwrap().share(3).unwrap()),
            [of("acme", 3)]
        );
        assert_eq!(
            payers(&jobs().share(1_000).unwrap().tenant("acme").unwrap()),
            [of("acme", 1_000)]
        );
        // Requests without a tenant are one tenant, which has one share.
        assert_eq!(payers(&jobs().share(3).unwrap()), [of(Key::SHARED, 1)]);
        assert_eq!(
            payers(&jobs().tenant("").unwrap().share(3).unwrap()),
            [of(Key::SHARED, 1)]
        );
    }

    #[test]
    fn a_tenant_is_of_the_last_limit() {
        let limiter = Limiter::in_memory();
        let each = Limit::concurrent("each", 1);
        let more = Limit::concurrent("more", 1)
            .wait_up_to(Duration::from_secs(1))
            .fair();
        let both = limiter
            .semaphore(&each, "key")
            .unwrap()
            .and(&JOBS, Key::SHARED)
            .unwrap()
            .tenant("acme")
            .unwrap();
        assert_eq!(payers(&both), [None, of("acme", 1)]);
        let three = both
            .clone()
            .and(&more, Key::SHARED)
            .unwrap()
            .tenant("other")
            .unwrap()
            .share(2)
            .unwrap();
        assert_eq!(payers(&three), [None, of("acme", 1), of("other", 2)]);
        assert_eq!(payers(&both), [None, of("acme", 1)]);
    }
}
