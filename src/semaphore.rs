//! A semaphore: one limit bound to one key.
//!
//! Tests: `tests/semaphore/`, by theme.

use std::{
    fmt,
    future::Future,
    iter,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use crate::{
    error::{AcquireError, ConfigError},
    keeper::{BoundPool, Demand, Keepers, Leg, LimitId, Request},
    key::Key,
    limit::{Limit, check_together},
    limiter::Limiter,
    permit::Permit,
    status::Usage,
};

/// A fair semaphore that all replicas share: one [`Limit`] for one [`Key`].
///
/// Permits are given in the order in which the store received the requests, across all replicas. A newcomer never
/// overtakes a waiter that is alive, but for a moment under [`Limit::reuse`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tower_turnstile::{Limit, Limiter};
///
/// // A mutex is a limit of 1.
/// static NIGHTLY: Limit = Limit::concurrent("nightly", 1).wait_up_to(Duration::from_secs(60));
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
}

/// A limit of a limiter, for one key.
#[derive(Clone, Debug)]
struct Bound {
    limit: Limit,
    number: LimitId,
    key: Key,
    /// The limit's value for this key, if it has one of its own.
    max: Option<u32>,
    /// The idle slots of its key, if the limit reuses them.
    pool: Option<Arc<BoundPool>>,
}

impl Limiter {
    /// Binds a limit to a key.
    ///
    /// # Panics
    ///
    /// If a value of the limit is out of range, or this limiter knows another limit of the same name and different
    /// values. [`Limiter::try_semaphore`] returns that as an error.
    pub fn semaphore(&self, limit: &Limit, key: impl Into<Key>) -> Semaphore {
        self.try_semaphore(limit, key)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`semaphore`](Self::semaphore), for limits from a configuration.
    ///
    /// # Errors
    ///
    /// If a value of the limit is out of range, or in conflict with another limit of the same name.
    pub fn try_semaphore(
        &self,
        limit: &Limit,
        key: impl Into<Key>,
    ) -> Result<Semaphore, ConfigError> {
        Ok(Semaphore(Arc::new(Inner {
            keepers: self.keepers().clone(),
            first: Bound::new(self.keepers(), limit, key.into())?,
            others: Vec::new(),
        })))
    }
}

impl Semaphore {
    /// This key's own value of the limit that was named last, in place of the limit's: see
    /// [`Scope::values`](crate::Scope::values). All who use the key should say the same.
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
    /// If the value is out of range, such as 0 of a rate. [`try_value`](Self::try_value) returns that as an error.
    #[must_use]
    #[track_caller]
    pub fn value(self, max: u32) -> Self {
        match self.try_value(max) {
            Ok(semaphore) => semaphore,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`value`](Self::value), for values from elsewhere.
    ///
    /// # Errors
    ///
    /// Whatever makes [`value`](Self::value) panic.
    pub fn try_value(mut self, max: u32) -> Result<Self, ConfigError> {
        let Inner { first, others, .. } = Arc::make_mut(&mut self.0);
        let bound = others.last_mut().unwrap_or(first);
        bound.limit.check_value(max)?;
        bound.max = Some(max);
        Ok(self)
    }

    /// Another limit for the same permits: each then holds a slot under all of them, or has none. What a refusal by
    /// one would have taken of the others stays untouched; in a Redis Cluster, which is asked for one after the other, it
    /// is given back.
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
    /// let jobs = limiter.semaphore(&TENANT, "acme").and(&STARTS, "acme").and(&ALL, Key::SHARED);
    /// let permit = jobs.acquire().await?;
    /// # drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// As [`Limiter::semaphore`], and if there are more than [`MAX_SCOPES`](crate::MAX_SCOPES) or one limit comes twice.
    #[must_use]
    #[track_caller]
    pub fn and(self, limit: &Limit, key: impl Into<Key>) -> Self {
        match self.try_and(limit, key) {
            Ok(both) => both,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`and`](Self::and), for limits from a configuration.
    ///
    /// # Errors
    ///
    /// As [`Limiter::try_semaphore`], and if there are more than [`MAX_SCOPES`](crate::MAX_SCOPES) or one limit comes twice.
    pub fn try_and(mut self, limit: &Limit, key: impl Into<Key>) -> Result<Self, ConfigError> {
        let inner = Arc::make_mut(&mut self.0);
        let mut bound = Bound::new(&inner.keepers, limit, key.into())?;
        check_together(inner.all().map(|bound| &bound.limit).chain([limit]))?;
        (bound.pool, inner.first.pool) = (None, None);
        inner.others.push(bound);
        Ok(self)
    }

    /// Acquires a permit, waiting in line for as long as the limit's [`wait_up_to`](Limit::wait_up_to).
    ///
    /// # Errors
    ///
    /// [`AcquireError`], whose kind says why: no slot, no room in the line, none in time, no store, shut down.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in the line, or the slot if it was just granted.
    ///
    /// # Fairness
    ///
    /// First come, first served, by the order in which the store receives the requests.
    pub fn acquire(&self) -> Acquire {
        self.ask(true)
    }

    /// Acquires a permit if a slot is free and nobody waits for it. Takes one round trip.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub fn try_acquire(&self) -> Acquire {
        self.ask(false)
    }

    /// What all replicas together hold and wait for, under the first limit. Takes one round trip.
    ///
    /// # Errors
    ///
    /// If the store does not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn usage(&self) -> Result<Usage, AcquireError> {
        let Bound {
            limit, number, key, ..
        } = &self.0.first;
        let usage = self.0.keepers.usage(*number, key.clone()).await;
        usage.map_err(|kind| limit.acquire_error(kind))
    }

    /// The limit; of several the first.
    pub fn limit(&self) -> &Limit {
        &self.0.first.limit
    }

    fn ask(&self, waits: bool) -> Acquire {
        Acquire(Stage::New(self.0.clone(), waits))
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
        error.is_shared = refused.is_some_and(|bound| bound.key == Key::SHARED);
        error
    }

    fn demand(&self, waits: bool) -> Demand {
        let leg = |bound: &Bound| Leg {
            limit: bound.number,
            key: bound.key.clone(),
            wait: if waits {
                bound.limit.wait()
            } else {
                Duration::ZERO
            },
            max: bound.max,
            cost: 1,
        };
        match &self.others[..] {
            [] => Demand::One(leg(&self.first)),
            _ => Demand::All(self.all().map(leg).collect()),
        }
    }
}

impl Bound {
    fn new(keepers: &Keepers, limit: &Limit, key: Key) -> Result<Self, ConfigError> {
        let number = keepers.register(limit)?;
        Ok(Self {
            limit: limit.clone(),
            number,
            pool: keepers.bind(number, &key),
            key,
            max: None,
        })
    }
}

/// Future of a [`Permit`], from [`Semaphore::acquire`]. It does nothing until it is polled.
#[must_use = "futures do nothing unless polled"]
pub struct Acquire(Stage);

enum Stage {
    /// Not polled yet. Whether it may queue.
    New(Arc<Inner>, bool),
    Requested(Request, Arc<Inner>),
}

impl Acquire {
    /// The place in the line when it was joined: 1 at the head. `None` if it is not in line.
    pub fn place(&self) -> Option<u32> {
        match &self.0 {
            Stage::New(..) => None,
            Stage::Requested(request, _) => request.place(),
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
                Stage::New(semaphore, waits) => {
                    let Inner { keepers, first, .. } = &**semaphore;
                    if let Some(pool) = &first.pool
                        && let Some(granted) = pool.take(keepers, first.max)
                    {
                        let permit = Permit::new(granted);
                        pool.record_take();
                        return Poll::Ready(Ok(permit));
                    }
                    let request = Request::new(keepers.clone(), semaphore.demand(*waits));
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
