//! A semaphore: one limit bound to one key.
//!
//! Tests: `tests/semaphore/`, by theme.

mod tenant;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::try_join_all;
use smallvec::SmallVec;

use crate::{
    error::{AcquireError, AcquireErrorKind, ConfigError},
    keeper::{BoundPool, Demand, KeeperHandle, Leg, PermitRequest},
    key::Key,
    leases::Label,
    limit::{Limit, LimitId, LimitValue, Limits, check_together},
    limiter::Limiter,
    permit::Permit,
    status::{InLine, Usage},
};

/// A fair semaphore across all replicas: one [`Limit`] for one [`Key`].
///
/// Permits are granted in the order in which the store received the requests, across all replicas. No request overtakes a
/// live waiter, except briefly under [`Limit::reuse`]. Under a [fair](Limit::fair) limit this order holds for the requests
/// of one [tenant](Semaphore::tenant), and the tenants take turns by the slot-seconds that they have used.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tower_turnstile::{Limit, Limiter};
///
/// // A mutex is a limit of 1.
/// const NIGHTLY: Limit = Limit::concurrent("nightly", 1).wait_up_to(Duration::from_secs(60));
///
/// let limiter = Limiter::in_memory();
/// let nightly = limiter.semaphore(&NIGHTLY, "report")?;
/// let permit = nightly.acquire().await?;
/// assert!(nightly.try_acquire().await.is_err());
/// drop(permit);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Semaphore(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    keeper: Arc<KeeperHandle>,
    /// Acquired together; at least one.
    bounds: SmallVec<[Bound; 1]>,
    /// The label of its permits, for operators.
    label: Label,
}

/// A registered limit, bound to one key.
#[derive(Clone, Debug)]
struct Bound {
    limit: Limit,
    number: LimitId,
    key: Key,
    /// The key's own value of the limit, if any.
    value: Option<LimitValue>,
    /// The tenant under a fair limit. [`Key::SHARED`]: none.
    tenant: Key,
    share: u32,
    /// The cost of a request at a rate, and whether a cost above the burst counts as the burst.
    cost: u32,
    clamps: bool,
    /// The idle slots of the key, if the limit reuses slots.
    pool: Option<Arc<BoundPool>>,
}

impl Limiter {
    /// Creates a semaphore for a key, under one limit or a list of limits.
    ///
    /// [`Semaphore::and`] adds limits with other keys.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_turnstile::{Limit, Limiter};
    /// const JOBS: Limit = Limit::concurrent("jobs", 5);
    /// const STARTS: Limit = Limit::rate("job-starts", 60, Duration::from_secs(60));
    ///
    /// let jobs = Limiter::in_memory().semaphore([JOBS, STARTS], "acme")?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a value of a limit is out of range, if this limiter has another limit of the same name with different values, or
    /// if the list is empty, has more than [`Policy::MAX_SCOPES`](crate::Policy::MAX_SCOPES) limits, or has a limit twice.
    pub fn semaphore(
        &self,
        limits: impl Into<Limits>,
        key: impl Into<Key>,
    ) -> Result<Semaphore, ConfigError> {
        let semaphore = Semaphore(Arc::new(Inner {
            keeper: self.keeper().clone(),
            bounds: SmallVec::new(),
            label: Label::default(),
        }));
        semaphore.and(limits, key)
    }
}

impl Semaphore {
    /// Sets this key's value of the last limit, in place of the limit's own.
    ///
    /// All users of the key should set the same value. See [`Scope::values`](crate::Scope::values).
    ///
    /// ```
    /// # use tower_turnstile::{Limit, Limiter};
    /// const JOBS: Limit = Limit::concurrent("jobs", 5);
    ///
    /// let gold = Limiter::in_memory().semaphore(&JOBS, "acme")?.value(20)?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the value is out of range, such as 0 for a rate, or has a burst although the limit is not a rate.
    pub fn value(mut self, value: impl Into<LimitValue>) -> Result<Self, ConfigError> {
        let value = value.into();
        let bound = self.last();
        bound.limit.check_own_value(value)?;
        bound.value = Some(value);
        Ok(self)
    }

    /// Sets the cost of a request at the last limit, a rate. Default: 1.
    ///
    /// For a cost that is known before the work begins; [`Permit::budget`] adds what is known later.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_turnstile::{Limit, Limiter};
    /// const TOKENS: Limit = Limit::rate("tokens", 100_000, Duration::from_secs(60));
    ///
    /// let prompt = Limiter::in_memory().semaphore(&TOKENS, "acme")?.cost(1_500)?;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the limit is not a rate. A cost above its burst is refused as
    /// [`InvalidCost`](crate::AcquireErrorKind::InvalidCost) when a permit is acquired.
    pub fn cost(mut self, cost: u32) -> Result<Self, ConfigError> {
        let bound = self.last();
        if bound.limit.period().is_none() {
            let name = bound.limit.name();
            let message = format!("limit `{name}` is not a rate, so its requests have no cost");
            return Err(ConfigError::value(message));
        }
        bound.cost = cost;
        Ok(self)
    }

    /// With settings of a file for the last limit, which were checked: the cost of a request, whether a cost above the burst
    /// counts as the burst, and the key's own value.
    #[cfg(feature = "config")]
    pub(crate) fn with_file_settings(
        mut self,
        (cost, clamps): (u32, bool),
        value: Option<LimitValue>,
    ) -> Self {
        let bound = self.last();
        (bound.cost, bound.clamps, bound.value) = (cost, clamps, value);
        self
    }

    pub(crate) fn labelled(mut self, label: Label) -> Self {
        let inner = Arc::make_mut(&mut self.0);
        inner.label = label;
        // An idle slot acquired without the keeper would get no label.
        inner.bounds[0].pool = None;
        self
    }

    /// Adds a limit, or a list of limits: each permit holds a slot of all of them.
    ///
    /// A permit is acquired all or nothing: a request that one limit refuses does not count against the others. In a Redis
    /// Cluster the slots are acquired one after the other, and released if one limit refuses.
    ///
    /// ```
    /// # use tower_turnstile::{Key, Limit, Limiter};
    /// # use std::time::Duration;
    /// const TENANT: Limit = Limit::concurrent("tenant-jobs", 5);
    /// const STARTS: Limit = Limit::rate("job-starts", 60, Duration::from_secs(60));
    /// const ALL: Limit = Limit::concurrent("all-jobs", 100);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::in_memory();
    /// let jobs = limiter.semaphore([TENANT, STARTS], "acme")?.and(ALL, Key::SHARED)?;
    /// let permit = jobs.acquire().await?;
    /// # drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`Limiter::semaphore`], and an error if there are more than [`Policy::MAX_SCOPES`](crate::Policy::MAX_SCOPES)
    /// limits in total, or one of them twice.
    pub fn and(
        mut self,
        limits: impl Into<Limits>,
        key: impl Into<Key>,
    ) -> Result<Self, ConfigError> {
        let (limits, key) = (limits.into().0, key.into());
        check_together(&limits)?;
        let inner = Arc::make_mut(&mut self.0);
        for limit in &limits {
            let bound = Bound::new(&inner.keeper, limit, key.clone())?;
            inner.bounds.push(bound);
        }
        check_together(inner.bounds.iter().map(|bound| &bound.limit))?;
        if inner.bounds.len() > 1 {
            inner.bounds.iter_mut().for_each(|bound| bound.pool = None);
        }
        Ok(self)
    }

    fn last(&mut self) -> &mut Bound {
        let bounds = &mut Arc::make_mut(&mut self.0).bounds;
        bounds.last_mut().expect("at least one")
    }

    /// Acquires a permit, queueing for at most the limit's [`wait_up_to`](Limit::wait_up_to). Without this setting the wait
    /// is zero, unlike in Tokio's `Semaphore`: if no slot is free, the request is refused at once.
    ///
    /// # Errors
    ///
    /// Returns an [`AcquireError`], whose kind is the reason: all slots in use, the queue full, timed out, no store, shut
    /// down.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future leaves the queue, or releases the slot if it was just granted.
    ///
    /// # Fairness
    ///
    /// First come, first served, by the order in which the store receives the requests. Under a [fair](Limit::fair) limit,
    /// a free slot goes to the waiting [tenant](Self::tenant) that has used the fewest slot-seconds for its share, and
    /// requests of one tenant are served first come, first served.
    pub fn acquire(&self) -> Acquire {
        self.ask(true, 1)
    }

    /// Acquires a permit if a slot is free and the queue is empty. Takes one round trip.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe, like [`acquire`](Self::acquire).
    pub fn try_acquire(&self) -> Acquire {
        self.ask(false, 1)
    }

    /// Acquires a permit of `n` units, from 1 to 64, queueing for at most the limit's [`wait_up_to`](Limit::wait_up_to).
    ///
    /// The permit gets all its units at once, under each limit that has slots; a rate is charged for one request. While the
    /// head of the queue needs more units than are free, the free units lie idle: no request passes the head, since it
    /// could otherwise wait for ever. Under load, give heavy requests a limit of their own.
    ///
    /// If the limit is lowered below the weight of a waiting request, the request is admitted once nothing else is held, and
    /// then alone. Under [`Fallback::Local`](crate::Fallback::Local) with fewer units the same applies.
    ///
    /// ```
    /// # use tower_turnstile::{AcquireErrorKind, Limit, Limiter};
    /// const GPU: Limit = Limit::concurrent("gpu", 8);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let gpu = Limiter::in_memory().semaphore(&GPU, "a")?;
    /// let permit = gpu.acquire_many(3).await?;
    /// assert_eq!(permit.weight(), 3);
    /// assert_eq!(gpu.usage().await?.in_use, 3);
    ///
    /// let refused = gpu.acquire_many(9).await.unwrap_err();
    /// assert_eq!(refused.kind(), AcquireErrorKind::InvalidWeight);
    /// # drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the errors of [`acquire`](Self::acquire), and [`InvalidWeight`](crate::AcquireErrorKind::InvalidWeight) if
    /// `n` is 0, more than 64, or more than the value of a limit for this key (a value of 0 is reported as a full limit).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe, like [`acquire`](Self::acquire).
    ///
    /// # Fairness
    ///
    /// Like [`acquire`](Self::acquire), whatever the weights.
    pub fn acquire_many(&self, n: u32) -> Acquire {
        self.ask(true, n)
    }

    /// Acquires a permit of `n` units if `n` units are free and the queue is empty. Takes one round trip.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`acquire_many`](Self::acquire_many).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe, like [`acquire`](Self::acquire).
    pub fn try_acquire_many(&self, n: u32) -> Acquire {
        self.ask(false, n)
    }

    /// Returns the slots in use and the waiters of all replicas, under the first limit that is not a rate.
    /// Takes one round trip.
    ///
    /// A request under several limits waits in one queue at a time. While it waits for its caller's own slot, it does not
    /// count as a waiter for a shared slot: see [`usages`](Self::usages).
    ///
    /// # Errors
    ///
    /// Returns an error if the store does not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn usage(&self) -> Result<Usage, AcquireError> {
        let first = self.0.with_slots().next();
        self.0.usage_of(first.unwrap_or(&self.0.bounds[0])).await
    }

    /// Returns the slots in use and the waiters of all replicas, under each limit with slots, in order.
    ///
    /// Rates have no slots, and are left out. The calls are sent together, but the answers for different limits may
    /// describe different moments.
    ///
    /// ```
    /// # use tower_turnstile::{Key, Limit, Limiter};
    /// const TENANT: Limit = Limit::concurrent("tenant-jobs", 5);
    /// const ALL: Limit = Limit::concurrent("all-jobs", 100);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let jobs = Limiter::in_memory().semaphore(TENANT, "acme")?.and(ALL, Key::SHARED)?;
    /// let permit = jobs.acquire().await?;
    /// for (limit, usage) in jobs.usages().await? {
    ///     println!("{}: {} of {} in use", limit.name(), usage.in_use, usage.max);
    /// }
    /// # drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if the store does not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn usages(&self) -> Result<Vec<(&Limit, Usage)>, AcquireError> {
        let usages = (self.0.with_slots())
            .map(async |bound| Ok((&bound.limit, self.0.usage_of(bound).await?)));
        try_join_all(usages).await
    }

    /// Pauses a limit of the semaphore for its key, in all replicas: see [`Permit::pause`].
    ///
    /// # Errors
    ///
    /// [`UnknownLimit`](AcquireErrorKind::UnknownLimit) if the semaphore has no limit of this name, or the limit is a rate.
    pub fn pause(&self, limit: impl AsRef<str>, time: Duration) -> Result<(), AcquireError> {
        let limit = limit.as_ref();
        let is_meant = |bound: &&Bound| bound.limit.name() == limit;
        let unknown = || Limit::unknown(limit, AcquireErrorKind::UnknownLimit);
        let bound = self.0.with_slots().find(is_meant).ok_or_else(unknown)?;
        (self.0.keeper).pause_key(bound.number, (&bound.key, bound.value), time);
        Ok(())
    }

    /// Returns the limit with which the semaphore was created, or the first of several.
    pub fn limit(&self) -> &Limit {
        &self.0.bounds[0].limit
    }

    fn ask(&self, waits: bool, weight: u32) -> Acquire {
        Acquire(AcquireStage::New(self.0.clone(), waits, weight))
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore")
            .field("limit", self.limit())
            .finish_non_exhaustive()
    }
}

impl Inner {
    fn with_slots(&self) -> impl Iterator<Item = &Bound> {
        let bounds = self.bounds.iter();
        bounds.filter(|bound| bound.limit.period().is_none())
    }

    /// Adds whether all callers share the limit that refused.
    fn complete(&self, mut error: AcquireError) -> AcquireError {
        let mut bounds = self.bounds.iter();
        let refused = bounds.find(|bound| bound.limit.name() == error.limit_name());
        error.details.is_shared = refused.is_some_and(|bound| bound.key == Key::SHARED);
        error
    }

    async fn usage_of(&self, bound: &Bound) -> Result<Usage, AcquireError> {
        let key = (&bound.key, bound.value);
        let usage = self.keeper.usage(bound.number, key).await;
        usage.map_err(|kind| bound.limit.acquire_error(kind))
    }

    fn demand(&self, waits: bool, weight: u32) -> Demand {
        let leg = |bound: &Bound| Leg {
            limit: bound.number,
            key: bound.key.clone(),
            wait: if waits {
                bound.limit.wait()
            } else {
                Duration::ZERO
            },
            until: None,
            value: bound.value,
            weight,
            cost: bound.cost,
            clamps: bound.clamps,
            tenant: bound.tenant(),
            exempt: false,
            admitted: false,
        };
        match &self.bounds[..] {
            [bound] => Demand::One(leg(bound)),
            bounds => Demand::All(bounds.iter().map(leg).collect()),
        }
    }
}

impl Bound {
    fn new(keeper: &KeeperHandle, limit: &Limit, key: Key) -> Result<Self, ConfigError> {
        let (number, _) = keeper.register(limit)?;
        if limit.period().is_some() {
            keeper.unknown_rates.expect();
        }
        Ok(Self {
            limit: limit.clone().registered_at(keeper.replica()),
            number,
            pool: keeper.bind(number, &key),
            key,
            value: None,
            tenant: Key::SHARED,
            share: 1,
            cost: 1,
            clamps: false,
        })
    }
}

/// Future returned by [`Semaphore::acquire`], [`acquire_many`](Semaphore::acquire_many) and their `try_` forms.
///
/// The future does nothing until it is polled.
#[must_use = "futures do nothing unless polled"]
pub struct Acquire(AcquireStage);

enum AcquireStage {
    /// Not polled yet: whether the request may queue, and its units.
    New(Arc<Inner>, bool, u32),
    Requested(PermitRequest, Arc<Inner>),
    /// An idle slot of this process was taken.
    Taken,
}

impl Acquire {
    /// Returns the queue position: 1 at the head. `None` if the request has not queued.
    ///
    /// The first value is the position on arrival. For the first 64 requests of this process under a key, the store
    /// refreshes the position every [`waiter_ttl`](crate::LimiterBuilder::waiter_ttl), so the true position may be lower by
    /// now. In memory, and for further requests, the position is only bounded by the length of the queue.
    ///
    /// Under a [fair](Limit::fair) limit, requests of other tenants may be served first: the position is no promise.
    pub fn position(&self) -> Option<u32> {
        Some(self.in_line()?.position)
    }

    /// Returns the number of queued requests across all replicas, including this one, as last reported by the store. `None`
    /// if the request has not queued.
    ///
    /// While the request waits, the number is at most one [`poll_interval`](crate::LimiterBuilder::poll_interval) old.
    pub fn waiting(&self) -> Option<u32> {
        Some(self.in_line()?.waiting)
    }

    fn in_line(&self) -> Option<InLine> {
        match &self.0 {
            AcquireStage::New(..) | AcquireStage::Taken => None,
            AcquireStage::Requested(request, _) => request.in_line(),
        }
    }
}

impl Future for Acquire {
    type Output = Result<Permit, AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            self.0 = match &mut self.0 {
                AcquireStage::Requested(request, semaphore) => {
                    let answer = request.poll(cx).map_ok(Permit::new);
                    return answer.map_err(|error| semaphore.complete(error));
                }
                AcquireStage::New(semaphore, waits, weight) => {
                    let Inner { keeper, bounds, .. } = &**semaphore;
                    if *weight == 1
                        && let Some(pool) = &bounds[0].pool
                        && let Some(granted) = pool.take(keeper, bounds[0].value)
                    {
                        let permit = Permit::new(granted);
                        pool.record_take();
                        self.0 = AcquireStage::Taken;
                        return Poll::Ready(Ok(permit));
                    }
                    let request =
                        PermitRequest::new(keeper.clone(), semaphore.demand(*waits, *weight));
                    let request = request.labelled(semaphore.label.clone());
                    AcquireStage::Requested(request, semaphore.clone())
                }
                AcquireStage::Taken => panic!("`Acquire` polled after completion"),
            };
        }
    }
}

impl fmt::Debug for Acquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquire").finish_non_exhaustive()
    }
}
