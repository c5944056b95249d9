//! A scope: a limit, and where the key of a request comes from.

use std::{fmt, future::Future, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};
use http::{HeaderName, Request, request::Parts};

use crate::{key::Key, limit::Limit};

/// A [`Limit`] together with the rule that finds a request's [`Key`].
///
/// It is made from a limit: by [`Limit::by_header`], [`Limit::by_key`] or [`Limit::by_key_async`]. A limit by itself
/// is a scope too: all requests share one key.
#[derive(Clone)]
pub struct Scope {
    limit: Limit,
    keys: Keys,
}

#[derive(Clone)]
enum Keys {
    Shared,
    Header(HeaderName),
    Head(Arc<Find<Option<Key>>>),
    Async(Arc<Find<KeyFuture>>),
}

type Find<K> = dyn Fn(&Parts) -> K + Send + Sync;
type KeyFuture = BoxFuture<'static, Option<Key>>;

/// The key of a request, or the way to it. `None`: the request is not limited.
pub(super) enum Found {
    Now(Option<Key>),
    Later(KeyFuture),
}

impl Limit {
    /// Counts each value of a request header by itself, such as an API key.
    ///
    /// Requests without the header share one key, the same as those whose header is empty. If the header is repeated
    /// its first value counts. Callers choose what they send: put the layer behind the one that checks the header, or
    /// a caller gets a new limit with each new value.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// const CHAT: Limit = Limit::concurrent("chat", 5);
    /// let layer = Limiter::in_memory().layer(CHAT.by_header("x-api-key"));
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. A [`HeaderName`] always is.
    #[track_caller]
    pub fn by_header(self, name: impl TryInto<HeaderName>) -> Scope {
        let Ok(name) = name.try_into() else {
            panic!("the key of limit `{}` is no valid header name", self.name());
        };
        Scope {
            limit: self,
            keys: Keys::Header(name),
        }
    }

    /// Counts requests by a key that a closure finds in the request head: method, URI, headers and extensions.
    ///
    /// `None` lets the request pass without a limit. For requests that have nothing to tell them apart, return
    /// [`Key::SHARED`] rather than `None`.
    ///
    /// By the peer's address, which axum leaves in the extensions (see `into_make_service_with_connect_info`):
    ///
    /// ```
    /// use std::net::SocketAddr;
    ///
    /// use axum::extract::ConnectInfo;
    /// use tower_turnstile::{Key, Limit, Limiter};
    ///
    /// let per_peer = Limit::concurrent("per-peer", 10).by_key(|head| {
    ///     let peer = head.extensions.get::<ConnectInfo<SocketAddr>>();
    ///     Some(peer.map_or(Key::SHARED, |peer| peer.0.into()))
    /// });
    /// let layer = Limiter::in_memory().layer(per_peer);
    /// ```
    ///
    /// By the route, which is known to layers inside an axum router (`Router::layer`, `Router::route_layer`):
    ///
    /// ```
    /// use axum::extract::MatchedPath;
    /// use tower_turnstile::Limit;
    ///
    /// let per_route = Limit::concurrent("per-route", 100)
    ///     .by_key(|head| Some(head.extensions.get::<MatchedPath>()?.as_str().to_owned()));
    /// ```
    ///
    /// Behind a proxy the peer is the proxy. The leftmost address in `X-Forwarded-For` is whatever the caller wrote
    /// there; count from the right by the number of proxies that you run.
    pub fn by_key<K: Into<Key>>(
        self,
        find: impl Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    ) -> Scope {
        Scope {
            limit: self,
            keys: Keys::Head(Arc::new(move |head| find(head).map(Into::into))),
        }
    }

    /// As [`by_key`](Self::by_key), with a future: a tenant looked up in a database, for example.
    ///
    /// The closure runs when the service is called. Its future owns what it needs of the request head. It has no
    /// time limit here; a slow one delays the request before it joins the line.
    ///
    /// ```
    /// use tower_turnstile::Limit;
    /// # async fn tenant_of(_token: String) -> Option<u64> { None }
    ///
    /// let per_tenant = Limit::concurrent("per-tenant", 20).by_key_async(|head| {
    ///     let token = head.headers.get("authorization").cloned();
    ///     async move { tenant_of(token?.to_str().ok()?.to_owned()).await }
    /// });
    /// ```
    pub fn by_key_async<K, F>(self, find: impl Fn(&Parts) -> F + Send + Sync + 'static) -> Scope
    where
        K: Into<Key>,
        F: Future<Output = Option<K>> + Send + 'static,
    {
        let find = move |head: &Parts| find(head).map(|key| key.map(Into::into)).boxed();
        Scope {
            limit: self,
            keys: Keys::Async(Arc::new(find)),
        }
    }
}

impl Scope {
    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Whether all requests share one key.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.keys, Keys::Shared)
    }

    /// Takes a request apart only for a closure, which is shown its head.
    pub(super) fn find<Q>(&self, request: Request<Q>) -> (Found, Request<Q>) {
        match &self.keys {
            Keys::Shared => (Found::Now(Some(Key::SHARED)), request),
            Keys::Header(name) => {
                let value = request.headers().get(name);
                let key = value.map_or(Key::SHARED, |value| Key::from(value.as_bytes()));
                (Found::Now(Some(key)), request)
            }
            Keys::Head(find) => {
                let (head, body) = request.into_parts();
                let found = Found::Now(find(&head));
                (found, Request::from_parts(head, body))
            }
            Keys::Async(find) => {
                let (head, body) = request.into_parts();
                let found = Found::Later(find(&head));
                (found, Request::from_parts(head, body))
            }
        }
    }
}

/// One key for all requests.
impl From<Limit> for Scope {
    fn from(limit: Limit) -> Self {
        Self {
            limit,
            keys: Keys::Shared,
        }
    }
}

/// One key for all requests.
impl From<&Limit> for Scope {
    fn from(limit: &Limit) -> Self {
        limit.clone().into()
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: &dyn fmt::Debug = match &self.keys {
            Keys::Shared => &"shared",
            Keys::Header(name) => name,
            Keys::Head(_) => &"by key",
            Keys::Async(_) => &"by key, async",
        };
        f.debug_struct("Scope")
            .field("limit", &self.limit)
            .field("keys", keys)
            .finish()
    }
}
