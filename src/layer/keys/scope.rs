//! A scope: a limit and the source of its keys.
//!
//! Tests: `tests/layer/scopes.rs`.

use std::{
    fmt,
    future::Future,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use http::{HeaderName, request::Parts, response};

use super::{
    address::ClientAddress,
    deadline::CallDeadline,
    tenants::Tenants,
    values::{Lookup, Values},
};
use crate::{
    error::ConfigError,
    keeper::Leg,
    key::Key,
    layer::response::{Outcome, check_pause},
    limit::{Adapt, Limit, LimitId},
};

/// A [`Limit`] with the rules that find the [`Key`], value, cost and wait of a request.
///
/// Create a scope from a limit, with [`Limit::by_header`], [`Limit::by_client_address`], [`Limit::by_key`],
/// or [`Limit::by_key_async`]. A limit alone is also a scope (`Scope::from(limit)`), in which all requests share one key. With
/// [`fair_by_header`](Self::fair_by_header) or [`fair_by_key`](Self::fair_by_key), the slots of a key are shared fairly among
/// tenants.
/// Several scopes make a [`Policy`](crate::layer::Policy). See [Keys and policies](crate::guide::keys).
#[derive(Clone)]
#[must_use = "a scope does nothing until it is put into a layer"]
pub struct Scope {
    limit: Limit,
    keys: KeySource,
    pub(super) values: Values,
    cost: Option<Arc<Find<u32>>>,
    clamps_cost: bool,
    weight: Option<Arc<Find<u32>>>,
    wait: Option<Arc<Find<Option<Duration>>>>,
    /// Whether a request without a key is refused.
    requires_key: bool,
    judges: Vec<Arc<Judge>>,
    pause_at_most: Duration,
    pub(super) tenants: Tenants,
}

#[derive(Clone)]
enum KeySource {
    Shared,
    Header(HeaderName),
    /// And whether a client without an address was reported.
    Address(ClientAddress, Arc<AtomicBool>),
    Head(Arc<Find<Option<Key>>>),
    Async(Arc<Find<KeyFuture>>),
}

/// The longest pause by default: a year in a header costs one call a minute.
const PAUSE_AT_MOST: Duration = Duration::from_secs(60);

type Judge = dyn Fn(&response::Parts) -> Outcome + Send + Sync;
type Find<K> = dyn Fn(&Parts) -> K + Send + Sync;
type KeyFuture = BoxFuture<'static, Option<Key>>;

impl Limit {
    /// Limits each value of a request header separately, such as an API key.
    ///
    /// Requests without the header, or with an empty one, share one key, unless [`Scope::require_key`] refuses them. If the
    /// header is repeated, its first value counts. Callers choose their headers: put the layer behind authentication, or a
    /// caller gets a new limit with each new value.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// const CHAT: Limit = Limit::concurrent("chat", 5);
    /// let layer = Limiter::in_memory().layer(CHAT.by_header("x-api-key"))?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. A [`HeaderName`] always is.
    #[track_caller]
    pub fn by_header(self, name: impl TryInto<HeaderName>) -> Scope {
        let name = header_name(name, "key", &self);
        Scope::new(self, KeySource::Header(name))
    }

    /// Limits each key separately; a closure finds the key in the request head.
    ///
    /// If the closure returns `None`, the request is not under this limit: it is counted (`turnstile_unkeyed_total`) and
    /// logged at debug level. [`Scope::require_key`] refuses such requests instead. For requests that cannot be
    /// distinguished, return [`Key::SHARED`] rather than `None`.
    ///
    /// A path can be written in several ways (`/%61cme` is `/acme`): take keys from verified values. The key may have any type
    /// that converts into a [`Key`]: a `String`, a number, an address, 16 bytes. A closure that returns a reference does not
    /// compile ("lifetime may not live long enough"): return `Key::from(text)` for a `&str`, and clone other values.
    ///
    /// To limit by an id that the authentication has put into the extensions:
    ///
    /// ```
    /// use tower_turnstile::Limit;
    ///
    /// #[derive(Clone)]
    /// struct Account(u64);
    ///
    /// let per_account = Limit::concurrent("per-account", 10)
    ///     .by_key(|head| Some(head.extensions.get::<Account>()?.0))
    ///     .require_key();
    /// ```
    ///
    /// To limit by the route, which layers inside an axum router know (`Router::layer`, `Router::route_layer`):
    ///
    /// ```
    /// use axum::extract::MatchedPath;
    /// use tower_turnstile::{Key, Limit};
    ///
    /// let per_route = Limit::concurrent("per-route", 100)
    ///     .by_key(|head| Some(Key::from(head.extensions.get::<MatchedPath>()?.as_str())));
    /// ```
    ///
    /// To limit by the client's address, use [`by_client_address`](Self::by_client_address): behind a proxy the peer is the
    /// proxy, and an IPv6 client has many addresses.
    pub fn by_key<K: Into<Key>>(
        self,
        find: impl Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    ) -> Scope {
        let find = move |head: &Parts| find(head).map(Into::into);
        Scope::new(self, KeySource::Head(Arc::new(find)))
    }

    /// Limits each key separately; a future looks the key up, such as a tenant in a database.
    ///
    /// Otherwise like [`by_key`](Self::by_key). The closure runs when the service is called. Its future owns the parts of
    /// the request head that it needs. A failed lookup has to return a key or `None`. The lookup has no timeout; a slow
    /// lookup delays the request before it queues. While the limit is [off](crate::Mode::Off), nothing is looked up.
    ///
    /// ```
    /// use tower_turnstile::Limit;
    /// # async fn tenant_of(_token: String) -> Option<u64> { None }
    ///
    /// let per_tenant = Limit::concurrent("per-tenant", 20)
    ///     .by_key_async(|head| {
    ///         let token = head.headers.get("authorization").cloned();
    ///         async move { tenant_of(token?.to_str().ok()?.to_owned()).await }
    ///     })
    ///     .require_key();
    /// ```
    pub fn by_key_async<K, F>(self, find: impl Fn(&Parts) -> F + Send + Sync + 'static) -> Scope
    where
        K: Into<Key>,
        F: Future<Output = Option<K>> + Send + 'static,
    {
        let find = move |head: &Parts| find(head).map(|key| key.map(Into::into)).boxed();
        Scope::new(self, KeySource::Async(Arc::new(find)))
    }

    /// Limits each client address separately.
    ///
    /// See [`ClientAddress`] for addresses behind proxies, and for requests without an address.
    ///
    /// ```
    /// use tower_turnstile::{ClientAddress, Limit, Limiter};
    ///
    /// const SEARCH: Limit = Limit::concurrent("search", 5);
    /// let layer = Limiter::in_memory().layer(SEARCH.by_client_address(ClientAddress::forwarded_for(1)))?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// More than 32 proxies ([`ClientAddress::MAX_PROXIES`]), or an IPv6 prefix that is not 1 to 128 bits long, are an error
    /// when the layer is created.
    pub fn by_client_address(self, address: ClientAddress) -> Scope {
        Scope::new(self, KeySource::Address(address, Arc::default()))
    }
}

impl Scope {
    fn new(limit: Limit, keys: KeySource) -> Self {
        Self {
            limit,
            keys,
            values: Values::default(),
            cost: None,
            clamps_cost: false,
            weight: None,
            wait: None,
            requires_key: false,
            judges: Vec::new(),
            pause_at_most: PAUSE_AT_MOST,
            tenants: Tenants::default(),
        }
    }

    /// Refuses requests without a key, with 400.
    ///
    /// By default, such requests are not under this limit ([`Limit::by_key`]), or share one key ([`Limit::by_header`],
    /// [`Limit::by_client_address`]). If the middleware that provides the key is missing or runs later, no request has a
    /// key, and the limit would be disabled without an error. With this setting these requests are refused
    /// ([`RefusalKind::NoKey`]). A limit that all requests share always has a key.
    ///
    /// The status is always 400, regardless of [`limited_status`] and [`unavailable_status`], and there is no
    /// `Retry-After`, since the same request would be refused again. [`refuse_with`] can answer differently. A limit in
    /// [`Mode::Shadow`] or [`Mode::Off`] refuses no request.
    ///
    /// ```
    /// use tower_turnstile::{Key, Limit};
    ///
    /// /// Inserted by the authentication middleware.
    /// #[derive(Clone)]
    /// struct Tenant(String);
    ///
    /// let chats = Limit::concurrent("chats", 5)
    ///     .by_key(|head| Some(Key::from(&head.extensions.get::<Tenant>()?.0)))
    ///     .require_key();
    /// ```
    ///
    /// [`limited_status`]: crate::layer::LimitLayer::limited_status
    /// [`unavailable_status`]: crate::layer::LimitLayer::unavailable_status
    /// [`refuse_with`]: crate::layer::LimitLayer::refuse_with
    /// [`RefusalKind::NoKey`]: crate::layer::RefusalKind::NoKey
    /// [`Mode::Shadow`]: crate::Mode::Shadow
    /// [`Mode::Off`]: crate::Mode::Off
    pub fn require_key(mut self) -> Self {
        self.requires_key = true;
        self
    }

    /// Sets the cost of a request at a rate. Default: 1.
    ///
    /// A request that costs 0 is free, and is admitted even if the rate is in debt: leave the cost at 1 if a debt should hold
    /// it back. A request whose cost exceeds the rate's burst could never be admitted: it is refused with 400
    /// ([`RefusalKind::InvalidCost`](crate::layer::RefusalKind::InvalidCost)), unless [`clamp_cost`](Self::clamp_cost) is
    /// set. The cost does not affect slots: see [`weight_by`](Self::weight_by).
    ///
    /// For a cost that is known only later, such as the tokens of a language model, see [`Budget::spend`](crate::Budget::spend).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::Limit;
    ///
    /// let opens = Limit::rate("opens", 60, Duration::from_secs(60))
    ///     .by_header("x-api-key")
    ///     .cost_by(|head| if head.uri.path().starts_with("/batch") { 10 } else { 1 });
    /// ```
    pub fn cost_by(mut self, cost: impl Fn(&Parts) -> u32 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Reduces a cost above a rate's burst to the burst, on arrival and for [`Budget::charge`](crate::Budget::charge).
    pub fn clamp_cost(mut self) -> Self {
        self.clamps_cost = true;
        self
    }

    /// Sets the number of units that a request takes of this scope's limit, from 1 to 64. Default: 1. Under several limits,
    /// each scope has its own weight.
    ///
    /// A request takes all its units or none, like [`Semaphore::acquire_many`](crate::Semaphore::acquire_many): while the
    /// head of the queue needs more units than are free, the free units lie idle, since no request passes the head. Only for
    /// limits with slots: a rate has a [cost](Self::cost_by). A permit of several units takes no part in [`Limit::reuse`].
    ///
    /// A request of 0 or more than 64 units, or of more units than the limit has, is refused with 400
    /// ([`RefusalKind::InvalidWeight`](crate::layer::RefusalKind::InvalidWeight)). Clamp values that come from clients.
    ///
    /// ```
    /// use tower_turnstile::Limit;
    ///
    /// let gpu = Limit::concurrent("gpu", 8)
    ///     .by_header("x-api-key")
    ///     .weight_by(|head| if head.uri.path().ends_with("/large") { 4 } else { 1 });
    /// ```
    pub fn weight_by(mut self, weight: impl Fn(&Parts) -> u32 + Send + Sync + 'static) -> Self {
        self.weight = Some(Arc::new(weight));
        self
    }

    /// Lets a request shorten its wait for this limit. `None`: it waits as long as the limit allows
    /// ([`Limit::wait_up_to`](crate::Limit::wait_up_to)).
    ///
    /// A caller that is refused in time can still turn elsewhere. It cannot lengthen its wait: the limit's applies if it is shorter.
    /// A request with a wait of zero is refused unless it can start at once.
    ///
    /// A gRPC call never waits for a slot or a start longer than its `grpc-timeout`, less a round trip to the store, with or without
    /// this setting. The timeout counts from the call's arrival at the outermost layer of this crate, through all layers, limits and
    /// lookups.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::Limit;
    ///
    /// #[derive(Clone)]
    /// struct Batch;
    ///
    /// let chat = Limit::concurrent("chat", 5)
    ///     .wait_up_to(Duration::from_secs(30))
    ///     .by_header("x-api-key")
    ///     .wait_by(|head| head.extensions.get::<Batch>().is_none().then_some(Duration::from_secs(2)));
    /// ```
    pub fn wait_by(
        mut self,
        wait: impl Fn(&Parts) -> Option<Duration> + Send + Sync + 'static,
    ) -> Self {
        self.wait = Some(Arc::new(wait));
        self
    }

    /// Judges each response: pauses the key of its request, in all replicas, if it says that the service is overloaded, and tells an
    /// [adaptive](Self::adapt) limit.
    ///
    /// For a layer in front of an upstream, as a client or in a gateway. Without a pause, every replica sends its requests
    /// to an upstream that has just answered 429 with `Retry-After`, and each of them is refused. During a pause no request
    /// of the key gets a slot: those that may wait keep their places in the queue, and the others are refused
    /// ([`RefusalKind::Paused`](crate::layer::RefusalKind::Paused), 503, with the rest of the pause as `Retry-After`). Requests in
    /// progress go on. In the five seconds after the pause, the limit rises from 0 to its value: if all waiting requests
    /// proceeded at once, a token bucket would refuse nearly all of them again.
    ///
    /// [`overload`](crate::layer::overload) is the usual judgement; a closure can read other fields. A scope may have several, of
    /// which the gravest counts for each response. A response that is a
    /// [`Refusal`](crate::layer::Refusal) of this crate is not judged, or nested layers would pause each other. The longest of
    /// several pauses applies. Only a limit with slots can be paused.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter, layer};
    ///
    /// const PARTNER: Limit = Limit::concurrent("partner", 200);
    /// let layer = Limiter::in_memory().layer(PARTNER.by_header("x-account").outcome_by(layer::overload))?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    pub fn outcome_by(
        mut self,
        judge: impl Fn(&response::Parts) -> Outcome + Send + Sync + 'static,
    ) -> Self {
        self.judges.push(Arc::new(judge));
        self
    }

    /// Makes the limit adaptive: it finds its own value within these bounds, shared by all replicas, for each key.
    ///
    /// The limit begins at its declared value. It grows by one with each accepted request while it is nearly used up, and shrinks
    /// by a tenth when the upstream is overloaded, as [`outcome_by`](Self::outcome_by) or [`Slot::report`](crate::Slot::report) tells it. [Adaptive
    /// limits](crate::guide::adaptive) describes the rule, and for which upstreams it fails.
    ///
    /// A good floor is at least a quarter of the usual value. A request that weighs more than the floor may have to wait until the
    /// limit has grown. An operator's override replaces the value, and freezes it.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter, layer};
    ///
    /// const PARTNER: Limit = Limit::concurrent("partner", 40);
    /// let partner = PARTNER.by_header("x-account").outcome_by(layer::overload).adapt(5..=400);
    /// let layer = Limiter::in_memory().layer(partner)?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// It is an error when the layer is created if the floor is 0, the ceiling is above [`Limit::MAX`], the declared value or a
    /// key's own value is out of bounds, or if the limit is a rate or [reuses](Limit::reuse) slots. A semaphore of the same limit
    /// takes it from the limiter ([`Limiter::limit`](crate::Limiter::limit)), since two limits of one name must not differ.
    pub fn adapt(mut self, bounds: RangeInclusive<u32>) -> Self {
        let (floor, ceiling) = bounds.into_inner();
        self.limit = self.limit.adapted(Adapt { floor, ceiling });
        self
    }

    /// Sets the longest pause that a response can cause, from 1 ms to 1 hour ([`Limit::MAX_PAUSE`]).
    /// Default: 60 seconds.
    ///
    /// A longer time costs fewer calls to an upstream that is down for long, and makes a mistaken header cost more.
    pub fn pause_at_most(mut self, time: Duration) -> Self {
        self.pause_at_most = time;
        self
    }

    /// The gravest outcome of a response, by all judges. `None`: the limit heeds none.
    pub(in crate::layer) fn outcome(&self, head: &response::Parts) -> Option<Outcome> {
        match self.judges.iter().map(|judge| judge(head)).max()? {
            Outcome::Pause(time) => Some(Outcome::Pause(time.min(self.pause_at_most))),
            other => self.limit.adapt().map(|_| other),
        }
    }

    pub(in crate::layer) fn judges(&self) -> bool {
        !self.judges.is_empty()
    }

    /// Returns the limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Checks the values that the setters cannot refuse.
    pub(in crate::layer) fn validate(&self) -> Result<(), ConfigError> {
        check_pause(self.pause_at_most)?;
        if let KeySource::Address(address, _) = &self.keys {
            address.check()?;
        }
        for (is_set, what) in [
            (self.judges(), "paused"),
            (self.weight.is_some(), "weighed: set a cost"),
        ] {
            if is_set && self.limit.period().is_some() {
                let name = self.limit.name();
                return Err(ConfigError::value(format!(
                    "limit `{name}` is a rate, which has no slots to be {what}"
                )));
            }
        }
        self.tenants.validate(&self.limit)?;
        let mut values = self.values.table.iter().flat_map(|table| table.values());
        values.try_for_each(|value| self.limit.check_own_value(*value))
    }

    pub(super) fn made_fair(mut self) -> Self {
        self.limit = self.limit.made_fair();
        self
    }

    /// Whether a request without a tenant is refused.
    pub(in crate::layer) fn requires_tenant(&self) -> bool {
        self.tenants.is_required
    }

    /// Whether a request without a key is refused.
    pub(in crate::layer) fn requires_key(&self) -> bool {
        self.requires_key
    }

    pub(in crate::layer) fn may_lack_key(&self) -> bool {
        match &self.keys {
            KeySource::Shared => false,
            KeySource::Header(_) | KeySource::Address(..) => self.requires_key,
            KeySource::Head(_) | KeySource::Async(_) => true,
        }
    }

    pub(in crate::layer) fn is_shared(&self) -> bool {
        matches!(self.keys, KeySource::Shared)
    }

    /// The demand of a request on the limit with this number. `None`: the request has no key. Nothing is looked up while
    /// the limit `is_off`, and no value while it `is_paused`. `admitted`: by another layer of this limiter.
    pub(in crate::layer) fn find(
        &self,
        number: LimitId,
        head: &Parts,
        is_off: impl Fn() -> bool,
        is_paused: impl Fn() -> bool,
        admitted: bool,
    ) -> Lookup<Leg> {
        let (exempt, most) = (true, self.limit.wait());
        let find_wait = || self.wait.as_ref()?(head);
        let leg = |key| Leg {
            limit: number,
            key,
            wait: find_wait().map_or(most, |wait| wait.min(most)),
            until: head.extensions.get().map(|CallDeadline(until)| *until),
            value: None,
            weight: self.weight.as_ref().map_or(1, |weight| weight(head)),
            cost: self.cost.as_ref().map_or(1, |cost| cost(head)),
            clamps: self.clamps_cost,
            tenant: (self.limit.is_fair()).then(|| self.tenants.find(head)),
            exempt: false,
            admitted,
        };
        let key = match &self.keys {
            KeySource::Shared => Some(Key::SHARED),
            KeySource::Header(name) => {
                let value = head.headers.get(name).filter(|value| !value.is_empty());
                self.or_shared(value.map(Key::from))
            }
            KeySource::Address(address, is_reported) => {
                let address = address.find(head).map(|found| address.key_of(found));
                if address.is_none() && !self.requires_key && !is_reported.swap(true, Relaxed) {
                    tracing::warn!(
                        limit = self.limit.name(),
                        "a client has no address, and shares a key with all others like it: does the service insert \
                         `PeerAddress`, and do all requests come through the proxies?"
                    );
                }
                self.or_shared(address)
            }
            KeySource::Head(find) => find(head),
            KeySource::Async(_) if is_off() => {
                let leg = leg(Key::SHARED);
                return Lookup::Now(Some(Leg { exempt, ..leg }));
            }
            KeySource::Async(find) => {
                let is_paused = is_paused();
                return self.find_later(find(head), leg(Key::SHARED), head, is_paused);
            }
        };
        let Some(key) = key else {
            return Lookup::Now(None);
        };
        let value = self.values.find(Some(head), &key);
        let leg = leg(key);
        match value {
            Lookup::Now(value) => Lookup::Now(Some(Leg { value, ..leg })),
            Lookup::Later(_) if is_off() => Lookup::Now(Some(Leg { exempt, ..leg })),
            // Refused, whatever its value; if the pause ends meanwhile, the limit's own applies.
            Lookup::Later(_) if is_paused() => Lookup::Now(Some(leg)),
            Lookup::Later(value) => {
                Lookup::Later(value.map(move |value| Some(Leg { value, ..leg })).boxed())
            }
        }
    }

    /// Requests without a key share one, unless a key is required.
    fn or_shared(&self, key: Option<Key>) -> Option<Key> {
        key.or((!self.requires_key).then_some(Key::SHARED))
    }

    /// The head is no longer available once the key is known, so keep a copy if a value has to be found in it. `is_paused`:
    /// no value is looked up.
    fn find_later(&self, key: KeyFuture, leg: Leg, head: &Parts, is_paused: bool) -> Lookup<Leg> {
        let values = self.values.clone();
        let head = values.rule.is_some().then(|| head.clone());
        let find = async move {
            let key = key.await?;
            let value = match values.find(head.as_ref(), &key) {
                Lookup::Now(value) => value,
                Lookup::Later(_) if is_paused => None,
                Lookup::Later(value) => value.await,
            };
            Some(Leg { key, value, ..leg })
        };
        Lookup::Later(find.boxed())
    }
}

/// # Panics
///
/// If the name is not a valid header name.
#[track_caller]
pub(super) fn header_name(name: impl TryInto<HeaderName>, what: &str, limit: &Limit) -> HeaderName {
    let limit = limit.name();
    let Ok(name) = name.try_into() else {
        panic!("the {what} of limit `{limit}` is not a valid header name");
    };
    name
}

impl From<Limit> for Scope {
    fn from(limit: Limit) -> Self {
        Self::new(limit, KeySource::Shared)
    }
}

/// One key for all requests.
impl From<&Limit> for Scope {
    fn from(limit: &Limit) -> Self {
        limit.clone().into()
    }
}

impl From<&Scope> for Scope {
    fn from(scope: &Scope) -> Self {
        scope.clone()
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: &dyn fmt::Debug = match &self.keys {
            KeySource::Shared => &"shared",
            KeySource::Header(name) => name,
            KeySource::Address(..) => &"by client address",
            KeySource::Head(_) => &"by key",
            KeySource::Async(_) => &"by key, async",
        };
        f.debug_struct("Scope")
            .field("limit", &self.limit)
            .field("keys", keys)
            .finish()
    }
}
