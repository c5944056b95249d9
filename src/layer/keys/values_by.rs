//! Settings of a scope with values for single keys.
//!
//! Tests: `tests/layer/values.rs`, `corners.rs`.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::FutureExt;
use http::request::Parts;

use super::{
    scope::Scope,
    values::{Lookup, ValueCache, fresh, kept},
};
use crate::{key::Key, limit::LimitValue};

/// Values of the limit for single keys.
impl Scope {
    /// Sets the limit's value for some keys, from a table.
    ///
    /// Other keys have the limit's own value. The table takes precedence over [`values_by`](Self::values_by) and
    /// [`values_by_async`](Self::values_by_async).
    ///
    /// A value is a number, or for a rate a [`LimitValue`] with its own burst. A key with a value of 0 is always refused. A
    /// rate cannot have a value or a burst of 0: in the table, a 0 is an error when the layer is created; a 0 found [for a
    /// request](Self::values_by) counts as 1. A burst for a limit that is not a rate is an error in the table, and ignored
    /// for a request. If requests of a key have different values, as while a value changes, the latest applies within a
    /// process, and the largest between replicas. An IPv6 address counts by its network
    /// ([`ClientAddress::ipv6_prefix`](crate::ClientAddress::ipv6_prefix)): use the network's first address as the key.
    ///
    /// ```
    /// use tower_turnstile::Limit;
    ///
    /// let streams = Limit::concurrent("streams", 5).by_header("x-api-key").values([("gold", 20)]);
    /// ```
    pub fn values<K: Into<Key>, V: Into<LimitValue>>(
        mut self,
        table: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let table = table.into_iter();
        let table = table.map(|(key, value)| (key.into(), value.into()));
        self.values.table = Some(Arc::new(table.collect()));
        self
    }

    /// Sets the limit's value for a request, by a closure. `None`: the limit's own value.
    ///
    /// If the value comes from the request itself, return 0 for an invalid number, not `None`: otherwise a caller whose
    /// value is lower than the limit's own would gain by sending an invalid one.
    ///
    /// An outer layer can pass the value in the request's extensions:
    ///
    /// ```
    /// use tower_turnstile::Limit;
    ///
    /// /// Inserted by the layer that verifies the API key.
    /// #[derive(Clone)]
    /// struct Plan {
    ///     streams: u32,
    /// }
    ///
    /// let streams = Limit::concurrent("streams", 5)
    ///     .by_header("x-api-key")
    ///     .values_by(|head, _key| Some(head.extensions.get::<Plan>()?.streams));
    /// ```
    pub fn values_by<V: Into<LimitValue> + 'static>(
        mut self,
        find: impl Fn(&Parts, &Key) -> Option<V> + Send + Sync + 'static,
    ) -> Self {
        let find = move |head: &Parts, key: &Key| Lookup::Now(find(head, key).map(Into::into));
        self.values.rule = Some(Arc::new(find));
        self
    }

    /// Sets the limit's value for a key, by a cached lookup. `None`: the limit's own value.
    ///
    /// Use it for a customer's plan in a database, for example. Answers, including `None`, are cached for `ttl`, for the
    /// `capacity` most used keys; concurrent requests of a key share one lookup, which sees the first request's head.
    /// A lookup delays requests before they queue. While the database is away, answer with the last known value: `None` would
    /// be the limit's own value for a whole `ttl`. While the limit is [off](crate::Mode::Off) or paused by an operator, no
    /// value is looked up.
    ///
    /// On a Tokio runtime, the lookup is a task, in the request's tracing span but without its task-locals. Once the lookup
    /// has begun, its answer is cached even if the request is cancelled.
    ///
    /// A request waits for a lookup for 30 s at most: then it has the limit's own value, nothing is cached, its lookup is
    /// dropped, and the next request looks the key up. A shorter timeout in the lookup can answer with the last known value
    /// instead. Without a Tokio runtime with timers, a lookup is not bounded.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::Limit;
    ///
    /// /// Inserted by the layer that verifies the API key.
    /// #[derive(Clone)]
    /// struct Customer(String);
    /// # async fn plan_of(_customer: Customer) -> Option<u32> { None }
    ///
    /// let streams = Limit::concurrent("streams", 5)
    ///     .by_header("x-api-key")
    ///     .values_by_async(10_000, Duration::from_secs(60), |head, _key| {
    ///         let customer = head.extensions.get::<Customer>().cloned();
    ///         async move { plan_of(customer?).await }
    ///     });
    /// ```
    pub fn values_by_async<F, V: Into<LimitValue> + 'static>(
        mut self,
        capacity: usize,
        ttl: Duration,
        find: impl Fn(&Parts, &Key) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Option<V>> + Send + 'static,
    {
        let answers = Arc::new(ValueCache::new(capacity));
        let find = Arc::new(find);
        self.values.rule = Some(Arc::new(move |head, key| {
            if let Some(value) = fresh(&answers, ttl, key) {
                return Lookup::Now(value);
            }
            let asked_for = (head.clone(), key.clone());
            Lookup::Later(kept(answers.clone(), ttl, asked_for, find.clone()).boxed())
        }));
        self
    }
}
