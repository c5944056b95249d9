//! Fair limits: the slots of a key are shared among tenants.
//!
//! Tests: `tests/semaphore/tenants.rs`, `tests/layer/tenants.rs`.

use super::limit::Limit;
use crate::{error::ConfigError, ranges::MAX_SHARE};

/// Fair shares among tenants.
impl Limit {
    /// The largest share of a tenant: 1,000. See [`Scope::shares`](crate::Scope::shares).
    pub const MAX_SHARE: u32 = MAX_SHARE;

    /// Shares the slots of a key fairly among tenants. Default: off, first come, first served.
    ///
    /// Without it, the backlog of one tenant stands in front of everybody. With it, each free slot goes to the waiting
    /// tenant that has used the least so far, in **slot-seconds**: a slot held for ten seconds counts as much as ten slots
    /// held for one. A tenant with a [share](crate::Scope::shares) of 3 gets three times the slot-seconds of a tenant with
    /// a share of 1, while both wait. Requests of one tenant are served first come, first served.
    ///
    /// Only the order of waiting requests changes, so the limit needs a [wait](Self::wait_up_to). While nobody waits, a
    /// request gets a free slot at once, whatever its tenant has used. No slot is kept free for a tenant.
    ///
    /// The layer finds a request's tenant by [`Scope::fair_by_header`](crate::Scope::fair_by_header) or
    /// [`Scope::fair_by_key`](crate::Scope::fair_by_key), which imply this setting; a semaphore has one tenant,
    /// [`Semaphore::tenant`](crate::Semaphore::tenant). All requests without a tenant are one tenant.
    /// [Tenants](crate::guide::tenants) explains the rule and its limits.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Key, Limit, Limiter, Scope};
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60)).fair();
    ///
    /// let limiter = Limiter::in_memory();
    /// let layer = limiter.layer(Scope::from(GPU).fair_by_header("x-tenant"))?;
    /// let nightly = limiter.semaphore(&GPU, Key::SHARED)?.tenant("acme")?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// A fair limit without a wait, or with [`reuse`](Self::reuse), is an error when a layer or semaphore is created. The
    /// setting cannot change while the limit is in use.
    ///
    /// # Panics
    ///
    /// If the limit is a rate, which has no slots. In a `const` or `static` the panic is a compile error:
    ///
    /// ```compile_fail,E0080
    /// # use std::time::Duration;
    /// # use tower_turnstile::Limit;
    /// const OPENS: Limit = Limit::rate("opens", 60, Duration::from_secs(60)).fair();
    /// # let _ = OPENS;
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn fair(self) -> Self {
        assert!(self.refill.is_none(), "a rate has no slots to be shared");
        self.made_fair()
    }

    /// Like [`fair`](Self::fair), but the check of the limit refuses a rate, by an error with the limit's name.
    ///
    /// A limit that is fair already stays the limit that the limiter has returned.
    pub(crate) const fn made_fair(mut self) -> Self {
        if self.fair {
            return self;
        }
        self.fair = true;
        self.changed()
    }

    pub(crate) fn is_fair(&self) -> bool {
        self.fair
    }

    /// Whether a tenant may have this share.
    pub(crate) fn check_share(&self, share: u32) -> Result<(), ConfigError> {
        if (1..=MAX_SHARE).contains(&share) {
            Ok(())
        } else {
            Err(ConfigError::value(format!(
                "a tenant of limit `{}` has a share of {share}: it must be 1 to {MAX_SHARE}",
                self.name
            )))
        }
    }

    /// Whether the limit is fair, and a tenant may have this share.
    pub(crate) fn check_tenants(&self, share: u32) -> Result<(), ConfigError> {
        if self.fair {
            self.check_share(share)
        } else {
            Err(ConfigError::value(format!(
                "limit `{}` is not fair, so its tenants have no shares",
                self.name
            )))
        }
    }

    /// The wait of a limit that a limiter has returned was checked before: one use of it need not wait.
    pub(super) fn fairness_fault(&self) -> Option<String> {
        let fault = if !self.fair {
            return None;
        } else if self.refill.is_some() {
            "a rate has no slots to be shared among tenants"
        } else if self.reuse {
            "a reused slot would pass over the other tenants"
        } else if self.wait.is_zero() && !self.is_registered() {
            "set a wait, since tenants share by the order in which their requests wait"
        } else {
            return None;
        };
        Some(format!("limit `{}` is fair: {fault}", self.name))
    }
}
