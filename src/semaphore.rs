//! A semaphore: one limit bound to one key.
//!
//! Tests: `tests/semaphore/`, by theme.

#[cfg(feature = "operate")]
use std::borrow::Cow;
use std::{
    fmt,
    future::Future,
    iter,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::try_join_all;

use crate::{
    error::{AcquireError, ConfigError},
    keeper::{BoundPool, Demand, Keepers, Leg, Request},
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
/// live waiter, except for a moment under [`Limit::reuse`].
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
/// let nightly = limiter.semaphore(&NIGHTLY, "report");
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
    keepers: Arc<Keepers>,
    first: Bound,
    /// Acquired together with it.
    others: Vec<Bound>,
    /// Of its permits, for operators.
    label: Label,
}

/// A limit of a limiter, for one key.
#[derive(Clone, Debug)]
struct Bound {
    limit: Limit,
    number: LimitId,
    key: Key,
    /// The limit's value for this key, if it has one of its own.
    value: Option<LimitValue>,
    /// The idle slots of its key, if the limit reuses them.
    pool: Option<Arc<BoundPool>>,
}

impl Limiter {
    /// Creates a semaphore of a limit, or of a list of limits, for a key.
    ///
    /// [`Semaphore::and`] adds limits with other keys.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_turnstile::{Limit, Limiter};
    /// const JOBS: Limit = Limit::concurrent("jobs", 5);
    /// const STARTS: Limit = Limit::rate("job-starts", 60, Duration::from_secs(60));
    ///
    /// let jobs = Limiter::in_memory().semaphore([JOBS, STARTS], "acme");
    /// ```
    ///
    /// # Panics
    ///
    /// If a value of a limit is out of range, or this limiter has another limit of the same name with different values; if
    /// the list is empty, has more than [`MAX_SCOPES`](crate::MAX_SCOPES) limits, or a limit twice.
    /// [`Limiter::try_semaphore`] returns that as an error.
    #[track_caller]
    pub fn semaphore(&self, limits: impl Into<Limits>, key: impl Into<Key>) -> Semaphore {
        match self.try_semaphore(limits, key) {
            Ok(semaphore) => semaphore,
            Err(error) => panic!("{error}"),
        }
    }

    /// Fallible version of [`semaphore`](Self::semaphore), for limits from a configuration.
    ///
    /// # Errors
    ///
    /// If [`semaphore`](Self::semaphore) would panic.
    pub fn try_semaphore(
        &self,
        limits: impl Into<Limits>,
        key: impl Into<Key>,
    ) -> Result<Semaphore, ConfigError> {
        let (limits, key) = (limits.into().0, key.into());
        let Some((first, others)) = limits.split_first() else {
            return Err(check_together([]).expect_err("there is none"));
        };
        let semaphore = Semaphore(Arc::new(Inner {
            keepers: self.keepers().clone(),
            first: Bound::new(self.keepers(), first, key.clone())?,
            others: Vec::new(),
            label: Label::default(),
        }));
        let mut others = others.iter();
        others.try_fold(semaphore, |all, limit| all.with(limit, key.clone()))
    }
}

impl Semaphore {
    /// Sets the value of the last limit for this key, instead of the limit's own.
    ///
    /// All users of the key should set the same one. See [`Scope::values`](crate::Scope::values).
    ///
    /// ```
    /// # use tower_turnstile::{Limit, Limiter};
    /// const JOBS: Limit = Limit::concurrent("jobs", 5);
    ///
    /// let gold = Limiter::in_memory().semaphore(&JOBS, "acme").value(20);
    /// ```
    ///
    /// # Panics
    ///
    /// If the value is out of range, such as 0 for a rate, or has a burst and the limit is no rate. [`try_value`](Self::try_value) returns that as an error.
    #[must_use]
    #[track_caller]
    pub fn value(self, value: impl Into<LimitValue>) -> Self {
        match self.try_value(value) {
            Ok(semaphore) => semaphore,
            Err(error) => panic!("{error}"),
        }
    }

    /// Fallible version of [`value`](Self::value).
    ///
    /// # Errors
    ///
    /// If the value is out of range, such as 0 for a rate, or has a burst and the limit is no rate.
    pub fn try_value(mut self, value: impl Into<LimitValue>) -> Result<Self, ConfigError> {
        let value = value.into();
        let Inner { first, others, .. } = Arc::make_mut(&mut self.0);
        let bound = others.last_mut().unwrap_or(first);
        bound.limit.check_value(value)?;
        bound.value = Some(value);
        Ok(self)
    }

    /// Labels its permits and queued requests, for [operators](crate::operate). Default: no label.
    ///
    /// Say what the work is, such as the name of the job: do not put secrets into it. What is longer than 128 bytes is cut
    /// off.
    ///
    /// ```
    /// # use tower_turnstile::{Limit, Limiter};
    /// const JOBS: Limit = Limit::concurrent("jobs", 5);
    ///
    /// let jobs = Limiter::in_memory().semaphore(&JOBS, "acme").label("nightly report");
    /// ```
    #[cfg(feature = "operate")]
    #[must_use]
    pub fn label(mut self, label: impl Into<Cow<'static, str>>) -> Self {
        let inner = Arc::make_mut(&mut self.0);
        inner.label = label.into().into();
        // An idle slot that is taken without the keeper would get no label.
        inner.first.pool = None;
        self
    }

    /// Adds a limit, or a list of limits: each permit holds a slot of all of them.
    ///
    /// They are acquired all or nothing: what one limit refuses is not counted by the others. In a Redis Cluster they are
    /// acquired one after the other, and released if one refuses.
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
    /// let jobs = limiter.semaphore([TENANT, STARTS], "acme").and(ALL, Key::SHARED);
    /// let permit = jobs.acquire().await?;
    /// # drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// As [`Limiter::semaphore`] does, and if there are more than [`MAX_SCOPES`](crate::MAX_SCOPES) limits, or one twice.
    #[must_use]
    #[track_caller]
    pub fn and(self, limits: impl Into<Limits>, key: impl Into<Key>) -> Self {
        match self.try_and(limits, key) {
            Ok(both) => both,
            Err(error) => panic!("{error}"),
        }
    }

    /// Fallible version of [`and`](Self::and), for limits from a configuration.
    ///
    /// # Errors
    ///
    /// Those of [`Limiter::try_semaphore`], and if there are more than [`MAX_SCOPES`](crate::MAX_SCOPES) limits, or one twice.
    pub fn try_and(
        self,
        limits: impl Into<Limits>,
        key: impl Into<Key>,
    ) -> Result<Self, ConfigError> {
        let (limits, key) = (limits.into().0, key.into());
        let mut limits = limits.iter();
        limits.try_fold(self, |all, limit| all.with(limit, key.clone()))
    }

    fn with(mut self, limit: &Limit, key: Key) -> Result<Self, ConfigError> {
        let inner = Arc::make_mut(&mut self.0);
        let mut bound = Bound::new(&inner.keepers, limit, key)?;
        check_together(inner.all().map(|bound| &bound.limit).chain([limit]))?;
        (bound.pool, inner.first.pool) = (None, None);
        inner.others.push(bound);
        Ok(self)
    }

    /// Acquires a permit, queueing for at most the limit's [`wait_up_to`](Limit::wait_up_to).
    ///
    /// # Errors
    ///
    /// [`AcquireError`], whose kind is the reason: all slots in use, the queue full, timed out, no store, shut down.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future gives up the queue position, or releases the slot if it was just granted.
    ///
    /// # Fairness
    ///
    /// First come, first served, by the order in which the store receives the requests.
    pub fn acquire(&self) -> Acquire {
        self.ask(true, 1)
    }

    /// Acquires a permit if a slot is free and the queue is empty. Takes one round trip.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe, like [`acquire`](Self::acquire).
    pub fn try_acquire(&self) -> Acquire {
        self.ask(false, 1)
    }

    /// Acquires a permit of `n` units, from 1 to 64, queueing for at most the limit's [`wait_up_to`](Limit::wait_up_to).
    ///
    /// The permit gets all its units at once, under each limit that has slots; a rate is charged for one request. While a
    /// permit waits that needs more units than are free, those that are free lie idle: nothing passes it, or it would wait
    /// for ever. Under load a limit of its own for heavy requests avoids that.
    ///
    /// See [Weights](crate::guide::keys#weights) for limits that are lowered.
    ///
    /// ```
    /// # use tower_turnstile::{AcquireErrorKind, Limit, Limiter};
    /// const GPU: Limit = Limit::concurrent("gpu", 8);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let gpu = Limiter::in_memory().semaphore(&GPU, "a");
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
    /// Those of [`acquire`](Self::acquire), and [`InvalidWeight`](crate::AcquireErrorKind::InvalidWeight) if `n` is 0, more
    /// than 64, or more than the value of a limit for this key, unless that is 0: then the limit is full.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe, like [`acquire`](Self::acquire).
    ///
    /// # Fairness
    ///
    /// First come, first served, whatever the weights.
    pub fn acquire_many(&self, n: u32) -> Acquire {
        self.ask(true, n)
    }

    /// Acquires a permit of `n` units if as many are free and the queue is empty. Takes one round trip.
    ///
    /// # Errors
    ///
    /// Those of [`acquire_many`](Self::acquire_many).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe, like [`acquire`](Self::acquire).
    pub fn try_acquire_many(&self, n: u32) -> Acquire {
        self.ask(false, n)
    }

    /// Returns what all replicas hold and wait for, under the first limit. Takes one round trip.
    ///
    /// A request under several limits waits in one queue at a time. While it waits for its caller's own slot, it is not
    /// among those that wait for a shared one: see [`usages`](Self::usages).
    ///
    /// # Errors
    ///
    /// If the store does not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn usage(&self) -> Result<Usage, AcquireError> {
        self.0.usage_of(&self.0.first).await
    }

    /// Returns what all replicas hold and wait for, under each limit that has slots, in order.
    ///
    /// Rates hold nothing, and are left out. The calls are sent together, but the answers for different limits may be of
    /// different moments.
    ///
    /// ```
    /// # use tower_turnstile::{Key, Limit, Limiter};
    /// const TENANT: Limit = Limit::concurrent("tenant-jobs", 5);
    /// const ALL: Limit = Limit::concurrent("all-jobs", 100);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let jobs = Limiter::in_memory().semaphore(TENANT, "acme").and(ALL, Key::SHARED);
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
    /// If the store does not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn usages(&self) -> Result<Vec<(&Limit, Usage)>, AcquireError> {
        let with_slots = self.0.all().filter(|bound| bound.limit.period().is_none());
        let usages =
            with_slots.map(async |bound| Ok((&bound.limit, self.0.usage_of(bound).await?)));
        try_join_all(usages).await
    }

    /// Returns the limit, as the semaphore was created with it; of several the first.
    pub fn limit(&self) -> &Limit {
        &self.0.first.limit
    }

    fn ask(&self, waits: bool, weight: u32) -> Acquire {
        Acquire(Stage::New(self.0.clone(), waits, weight))
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
    fn all(&self) -> impl Iterator<Item = &Bound> {
        iter::once(&self.first).chain(&self.others)
    }

    /// Adds whether the limit that has refused is shared by all callers.
    fn complete(&self, mut error: AcquireError) -> AcquireError {
        let mut all = self.all();
        let refused = all.find(|bound| bound.limit.name() == error.limit_name());
        error.details.is_shared = refused.is_some_and(|bound| bound.key == Key::SHARED);
        error
    }

    async fn usage_of(&self, bound: &Bound) -> Result<Usage, AcquireError> {
        let usage = self.keepers.usage(bound.number, bound.key.clone()).await;
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
            value: bound.value,
            weight,
            cost: 1,
            clamps: false,
        };
        match &self.others[..] {
            [] => Demand::One(leg(&self.first)),
            _ => Demand::All(self.all().map(leg).collect()),
        }
    }
}

impl Bound {
    fn new(keepers: &Keepers, limit: &Limit, key: Key) -> Result<Self, ConfigError> {
        let (number, _) = keepers.register(limit)?;
        if limit.period().is_some() {
            keepers.unknown_rates.expect();
        }
        Ok(Self {
            limit: limit.clone().registered_at(keepers.replica()),
            number,
            pool: keepers.bind(number, &key),
            key,
            value: None,
        })
    }
}

/// Future returned by [`Semaphore::acquire`], [`acquire_many`](Semaphore::acquire_many) and their `try_` forms.
///
/// It does nothing until it is polled.
#[must_use = "futures do nothing unless polled"]
pub struct Acquire(Stage);

enum Stage {
    /// Not polled yet. Whether it may queue, and its units.
    New(Arc<Inner>, bool, u32),
    Requested(Request, Arc<Inner>),
}

impl Acquire {
    /// Returns the queue position: 1 at the head. `None` if the request has not queued.
    ///
    /// At first it is the position on arrival. The store is asked for it again every
    /// [`waiter_ttl`](crate::LimiterBuilder::waiter_ttl), and for the first 64 requests of this process under a key: it may
    /// be lower by now. In memory, and for further requests, only what the length of the queue says is known.
    pub fn position(&self) -> Option<u32> {
        Some(self.in_line()?.position)
    }

    /// Returns the queued requests across all replicas, this one among them, as last reported by the store. `None` if the
    /// request has not queued.
    ///
    /// While it waits, that is at most one [`poll_interval`](crate::LimiterBuilder::poll_interval) old.
    pub fn waiting(&self) -> Option<u32> {
        Some(self.in_line()?.waiting)
    }

    fn in_line(&self) -> Option<InLine> {
        match &self.0 {
            Stage::New(..) => None,
            Stage::Requested(request, _) => request.in_line(),
        }
    }
}

impl Future for Acquire {
    type Output = Result<Permit, AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            self.0 = match &mut self.0 {
                Stage::Requested(request, semaphore) => {
                    let answer = request.poll(cx).map_ok(Permit::new);
                    return answer.map_err(|error| semaphore.complete(error));
                }
                Stage::New(semaphore, waits, weight) => {
                    let Inner { keepers, first, .. } = &**semaphore;
                    if *weight == 1
                        && let Some(pool) = &first.pool
                        && let Some(granted) = pool.take(keepers, first.value)
                    {
                        let permit = Permit::new(granted);
                        pool.record_take();
                        return Poll::Ready(Ok(permit));
                    }
                    let request = Request::new(keepers.clone(), semaphore.demand(*waits, *weight));
                    let request = request.labelled(semaphore.label.clone());
                    Stage::Requested(request, semaphore.clone())
                }
            };
        }
    }
}

impl fmt::Debug for Acquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquire").finish_non_exhaustive()
    }
}
