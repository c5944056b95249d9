//! Settings of a scope with tenants.
//!
//! Tests: `tests/layer/tenants.rs`.

use std::sync::Arc;

use http::{HeaderName, request::Parts};

use super::{scope::Scope, tenants::Source};
use crate::{key::Key, limit::Limit};

/// Fair shares among tenants, which are found in the request head.
impl Limit {
    /// Shares the slots fairly among the tenants that a request header names.
    ///
    /// All requests share one key: for tenants within each key, see [`Scope::fair_by_header`]. Otherwise like it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let layer = Limiter::in_memory().layer(GPU.fair_by_header("x-tenant").shares([("acme", 3)]));
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. A [`HeaderName`] always is.
    #[track_caller]
    pub fn fair_by_header(self, name: impl TryInto<HeaderName>) -> Scope {
        Scope::from(self).fair_by_header(name)
    }

    /// Shares the slots fairly among tenants; a closure borrows the tenant from the request head.
    ///
    /// All requests share one key: for tenants within each key, see [`Scope::fair_by_str`]. Otherwise like it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::Limit;
    ///
    /// /// Inserted by the authentication middleware.
    /// #[derive(Clone)]
    /// struct Account(String);
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let gpu = GPU.fair_by_str(|head| Some(&head.extensions.get::<Account>()?.0));
    /// ```
    pub fn fair_by_str(
        self,
        find: impl Fn(&Parts) -> Option<&str> + Send + Sync + 'static,
    ) -> Scope {
        Scope::from(self).fair_by_str(find)
    }

    /// Shares the slots fairly among tenants; a closure finds the tenant in the request head.
    ///
    /// All requests share one key: for tenants within each key, see [`Scope::fair_by_key`]. Otherwise like it.
    pub fn fair_by_key<K: Into<Key>>(
        self,
        find: impl Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    ) -> Scope {
        Scope::from(self).fair_by_key(find)
    }
}

/// Fair shares among tenants, which are found in the request head.
impl Scope {
    /// Shares the slots of each key fairly among the tenants that a request header names.
    ///
    /// Makes the limit [fair](Limit::fair). Requests without the header, or with an empty one, are one tenant with a share
    /// of 1, unless [`require_tenant`](Self::require_tenant) refuses them. If the header is repeated, its first value
    /// counts. Callers choose their headers, and a caller with a new tenant for each request would be ahead of everybody:
    /// put the layer behind authentication. [Tenants](crate::guide::tenants) has more.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// // Each region has 8 slots, which its customers share.
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let layer = Limiter::in_memory().layer(GPU.by_header("x-region").fair_by_header("x-customer"));
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. A [`HeaderName`] always is.
    #[track_caller]
    pub fn fair_by_header(self, name: impl TryInto<HeaderName>) -> Self {
        let Ok(name) = name.try_into() else {
            panic!(
                "the tenant of limit `{}` is not a valid header name",
                self.limit().name()
            );
        };
        self.fair_by(Source::Header(name))
    }

    /// Shares the slots of each key fairly among tenants; a closure borrows the tenant from the request head.
    ///
    /// Makes the limit [fair](Limit::fair). If the closure returns `None` or an empty text, the request has no tenant. All
    /// requests without a tenant are one tenant with a share of 1, unless [`require_tenant`](Self::require_tenant) refuses
    /// them.
    pub fn fair_by_str(
        self,
        find: impl Fn(&Parts) -> Option<&str> + Send + Sync + 'static,
    ) -> Self {
        self.fair_by_key(move |head| find(head).map(Key::from))
    }

    /// Shares the slots of each key fairly among tenants; a closure finds the tenant in the request head.
    ///
    /// For a tenant of another type than text, such as a number. Otherwise like [`fair_by_str`](Self::fair_by_str).
    pub fn fair_by_key<K: Into<Key>>(
        self,
        find: impl Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    ) -> Self {
        let find = move |head: &Parts| find(head).map(Into::into);
        self.fair_by(Source::Head(Arc::new(find)))
    }

    /// Sets the shares of some tenants, from 1 to 1,000 ([`Limit::MAX_SHARE`]), from a table. Default: 1.
    ///
    /// While two tenants wait, their slot-seconds are in proportion to their shares. A share is not a reserve: it keeps no
    /// slot free. The table takes precedence over [`shares_by`](Self::shares_by). A share out of range is an error when the
    /// layer is created, and so are shares for a limit whose requests have no tenants.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::Limit;
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let gpu = GPU.fair_by_header("x-tenant").shares([("acme", 3), ("internal", 10)]);
    /// ```
    pub fn shares<K: Into<Key>>(mut self, table: impl IntoIterator<Item = (K, u32)>) -> Self {
        self.tenants_mut().table(table);
        self
    }

    /// Sets the share of a request's tenant, by a closure. `None`: a share of 1.
    ///
    /// A share below 1 counts as 1, and one above 1,000 ([`Limit::MAX_SHARE`]) as 1,000. All requests of a tenant should
    /// find the same share; while they differ, each grant is paid for by the share of its own request. The closure is not
    /// called for requests without a tenant.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::Limit;
    ///
    /// /// Inserted by the layer that verifies the API key.
    /// #[derive(Clone)]
    /// struct Plan {
    ///     share: u32,
    /// }
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let gpu = GPU
    ///     .fair_by_header("x-tenant")
    ///     .shares_by(|head, _tenant| Some(head.extensions.get::<Plan>()?.share));
    /// ```
    pub fn shares_by(
        mut self,
        find: impl Fn(&Parts, &Key) -> Option<u32> + Send + Sync + 'static,
    ) -> Self {
        self.tenants_mut().shares_by(find);
        self
    }

    /// Refuses requests without a tenant, with 400 ([`RefusalKind::NoKey`](super::RefusalKind::NoKey)).
    ///
    /// By default, all such requests are one tenant with a share of 1. If the middleware that provides the tenant is
    /// missing or runs later, no request has a tenant, and the limit would serve them first come, first served without an
    /// error. Otherwise like [`require_key`](Self::require_key), which refuses requests without a key: a limit in
    /// [`Mode::Shadow`](crate::Mode::Shadow) or [`Mode::Off`](crate::Mode::Off) refuses no request.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::Limit;
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let gpu = GPU.fair_by_header("x-tenant").require_tenant();
    /// ```
    pub fn require_tenant(mut self) -> Self {
        self.tenants_mut().require();
        self
    }

    fn fair_by(self, source: Source) -> Self {
        let mut scope = self.made_fair();
        scope.tenants_mut().by(source);
        scope
    }
}
