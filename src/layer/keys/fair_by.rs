//! Settings of a scope with tenants.
//!
//! Tests: `tests/layer/tenants.rs`.

use std::sync::Arc;

use http::{HeaderName, request::Parts};

use super::scope::{Scope, header_name};
use crate::key::Key;

/// Fair shares among tenants, which are found in the request head.
impl Scope {
    /// Shares the slots of each key fairly among the tenants that a request header names.
    ///
    /// Makes the limit [fair](crate::Limit::fair). Requests without the header, or with an empty one, are one tenant with a share
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
    /// let layer = Limiter::in_memory().layer(GPU.by_header("x-region").fair_by_header("x-customer"))?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. A [`HeaderName`] always is.
    #[track_caller]
    pub fn fair_by_header(self, name: impl TryInto<HeaderName>) -> Self {
        let name = header_name(name, "tenant", self.limit());
        self.fair_by_key(move |head| head.headers.get(&name).map(Key::from))
    }

    /// Shares the slots of each key fairly among tenants; a closure finds the tenant in the request head.
    ///
    /// Makes the limit [fair](crate::Limit::fair). If the closure returns `None` or an empty text, the request has no tenant. All
    /// requests without a tenant are one tenant with a share of 1, unless [`require_tenant`](Self::require_tenant) refuses
    /// them.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Key, Limit, Scope};
    ///
    /// /// Inserted by the authentication middleware.
    /// #[derive(Clone)]
    /// struct Account(String);
    ///
    /// // All requests share one key.
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let gpu = Scope::from(GPU).fair_by_key(|head| Some(Key::from(&head.extensions.get::<Account>()?.0)));
    /// ```
    pub fn fair_by_key<K: Into<Key>>(
        self,
        find: impl Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    ) -> Self {
        let mut scope = self.made_fair();
        scope.tenants.source = Some(Arc::new(move |head| find(head).map(Into::into)));
        scope
    }

    /// Sets the shares of some tenants, from 1 to 1,000 ([`Limit::MAX_SHARE`](crate::Limit::MAX_SHARE)), from a table. Default: 1.
    ///
    /// While two tenants wait, their slot-seconds are in proportion to their shares. A share is not a reserve: it keeps no
    /// slot free. The table takes precedence over [`shares_by`](Self::shares_by). A share out of range is an error when the
    /// layer is created, and so are shares for a limit whose requests have no tenants.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Limit, Scope};
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let gpu = Scope::from(GPU).fair_by_header("x-tenant").shares([("acme", 3), ("internal", 10)]);
    /// ```
    pub fn shares<K: Into<Key>>(mut self, table: impl IntoIterator<Item = (K, u32)>) -> Self {
        let table = table.into_iter().map(|(key, share)| (key.into(), share));
        self.tenants.table = Some(Arc::new(table.collect()));
        self
    }

    /// Sets the share of a request's tenant, by a closure. `None`: a share of 1.
    ///
    /// A share below 1 counts as 1, and one above 1,000 ([`Limit::MAX_SHARE`](crate::Limit::MAX_SHARE)) as 1,000. All requests of a tenant should
    /// find the same share; while they differ, each grant is paid for by the share of its own request. The closure is not
    /// called for requests without a tenant.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Limit, Scope};
    ///
    /// /// Inserted by the layer that verifies the API key.
    /// #[derive(Clone)]
    /// struct Plan {
    ///     share: u32,
    /// }
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let gpu = Scope::from(GPU)
    ///     .fair_by_header("x-tenant")
    ///     .shares_by(|head, _tenant| Some(head.extensions.get::<Plan>()?.share));
    /// ```
    pub fn shares_by(
        mut self,
        find: impl Fn(&Parts, &Key) -> Option<u32> + Send + Sync + 'static,
    ) -> Self {
        self.tenants.by = Some(Arc::new(find));
        self
    }

    /// Refuses requests without a tenant, with 400 ([`RefusalKind::NoKey`](crate::layer::RefusalKind::NoKey)).
    ///
    /// By default, all such requests are one tenant with a share of 1. If the middleware that provides the tenant is
    /// missing or runs later, no request has a tenant, and the limit would serve them first come, first served without an
    /// error. Otherwise like [`require_key`](Self::require_key), which refuses requests without a key: a limit in
    /// [`Mode::Shadow`](crate::Mode::Shadow) or [`Mode::Off`](crate::Mode::Off) refuses no request.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::{Limit, Scope};
    ///
    /// const GPU: Limit = Limit::concurrent("gpu", 8).wait_up_to(Duration::from_secs(60));
    /// let gpu = Scope::from(GPU).fair_by_header("x-tenant").require_tenant();
    /// ```
    pub fn require_tenant(mut self) -> Self {
        self.tenants.is_required = true;
        self
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::ready,
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        time::Duration,
    };

    use futures_util::FutureExt;
    use http::Request;

    use super::*;
    use crate::{
        keeper::{Leg, Tenant},
        layer::keys::Lookup,
        limit::{Limit, LimitId},
    };

    const GPU: Limit = Limit::concurrent("gpu", 1).wait_up_to(Duration::from_secs(1));

    fn leg(scope: &Scope, request: Request<()>) -> Leg {
        let (head, ()) = request.into_parts();
        let found = match scope.find(LimitId(0), &head, || false, || false, false) {
            Lookup::Now(leg) => leg,
            Lookup::Later(leg) => leg.now_or_never().expect("the lookup is ready"),
        };
        found.expect("a key")
    }

    fn tenant(scope: &Scope, request: Request<()>) -> Option<Tenant> {
        leg(scope, request).tenant
    }

    fn of(name: impl Into<Key>, share: u32) -> Option<Tenant> {
        let name = name.into();
        Some(Tenant { name, share })
    }

    fn none() -> Option<Tenant> {
        of(Key::SHARED, 1)
    }

    fn by(values: &[&[u8]]) -> Request<()> {
        let request = Request::get("/path?query");
        let add = |request: http::request::Builder, value: &&[u8]| {
            let value = http::HeaderValue::from_bytes(value).unwrap();
            request.header("x-tenant", value)
        };
        values.iter().fold(request, add).body(()).unwrap()
    }

    #[test]
    fn a_limit_that_is_not_fair_has_no_tenants() {
        assert_eq!(tenant(&GPU.into(), by(&[b"acme"])), None);
        assert_eq!(tenant(&GPU.by_header("x-key"), by(&[b"acme"])), None);
    }

    #[test]
    fn without_a_source_all_requests_are_one_tenant() {
        assert_eq!(tenant(&GPU.fair().into(), by(&[b"acme"])), none());
        let keyed = GPU.fair().by_header("x-tenant");
        let leg = leg(&keyed, by(&[b"acme"]));
        assert_eq!((leg.key, leg.tenant), (Key::from("acme"), none()));
    }

    #[test]
    fn the_first_value_of_a_header_counts() {
        let scope = Scope::from(GPU).fair_by_header("X-Tenant");
        for (values, expected) in [
            (&[&b"acme"[..]][..], of("acme", 1)),
            (&[b"acme", b"other"], of("acme", 1)),
            (&[b"\xff"], of(*b"\xff", 1)),
            (&[b"", b"acme"], none()),
            (&[b""], none()),
            (&[], none()),
        ] {
            assert_eq!(tenant(&scope, by(values)), expected, "{values:?}");
        }
    }

    #[test]
    fn a_closure_finds_a_text_or_any_key() {
        let path = Scope::from(GPU).fair_by_key(|head| head.uri.query().map(Key::from));
        assert_eq!(tenant(&path, by(&[])), of("query", 1));
        let nobody = Scope::from(GPU).fair_by_key(|_| None::<Key>);
        assert_eq!(tenant(&nobody, by(&[])), none());
        let empty = Scope::from(GPU).fair_by_key(|_| Some(""));
        assert_eq!(tenant(&empty.shares([("acme", 3)]), by(&[])), none());
        let number = Scope::from(GPU).fair_by_key(|head| Some(head.uri.path().len()));
        assert_eq!(tenant(&number, by(&[])), of(5, 1));
    }

    #[test]
    fn each_key_has_tenants() {
        let scopes = [
            GPU.by_key(|head| head.uri.query().map(Key::from)),
            GPU.by_key_async(|_| ready(Some("query"))),
        ];
        for scope in scopes {
            let scope = scope.fair_by_header("x-tenant").shares([("acme", 3)]);
            let leg = leg(&scope, by(&[b"acme"]));
            assert_eq!((leg.key, leg.tenant), (Key::from("query"), of("acme", 3)));
        }
    }

    #[test]
    fn a_share_is_in_the_table_or_found_by_the_closure() {
        let asked = Arc::new(AtomicU32::new(0));
        let count = asked.clone();
        let scope = Scope::from(GPU)
            .fair_by_header("x-tenant")
            .shares([("acme", 3)]);
        let scope = scope.shares_by(move |head, tenant| {
            count.fetch_add(1, Ordering::SeqCst);
            (*tenant == Key::from("gold")).then(|| head.uri.path().len() as u32)
        });
        assert_eq!(tenant(&scope, by(&[b"acme"])), of("acme", 3));
        assert_eq!(tenant(&scope, by(&[])), none());
        assert_eq!(asked.load(Ordering::SeqCst), 0);
        assert_eq!(tenant(&scope, by(&[b"gold"])), of("gold", 5));
        assert_eq!(tenant(&scope, by(&[b"other"])), of("other", 1));
    }

    #[test]
    fn a_share_of_a_closure_is_brought_into_the_range() {
        for (found, share) in [
            (0, 1),
            (1, 1),
            (2, 2),
            (1_000, 1_000),
            (1_001, 1_000),
            (u32::MAX, 1_000),
        ] {
            let scope = Scope::from(GPU).fair_by_header("x-tenant");
            let scope = scope.shares_by(move |_, _| Some(found));
            assert_eq!(tenant(&scope, by(&[b"acme"])), of("acme", share));
            assert_eq!(tenant(&scope, by(&[b""])), none());
        }
    }
}
