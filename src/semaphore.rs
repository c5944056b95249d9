//! A semaphore: one limit bound to one key.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use crate::{
    error::{AcquireError, ConfigError},
    keeper::Request,
    key::Key,
    limit::Limit,
    limiter::Limiter,
    permit::Permit,
    status::Usage,
};

/// A fair semaphore that all replicas share: one [`Limit`] for one [`Key`].
///
/// Permits are given in the order in which the store received the requests, across all replicas. A newcomer never
/// overtakes a waiter that is alive.
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
#[derive(Clone, Debug)]
pub struct Semaphore {
    limiter: Limiter,
    limit: Limit,
    number: usize,
    key: Key,
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
        let number = self.register(limit)?;
        Ok(Semaphore {
            limiter: self.clone(),
            limit: limit.clone(),
            number,
            key: key.into(),
        })
    }
}

impl Semaphore {
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
        Acquire(
            self.limiter
                .request(self.number, self.key.clone(), self.limit.wait()),
        )
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
        Acquire(
            self.limiter
                .request(self.number, self.key.clone(), Duration::ZERO),
        )
    }

    /// What all replicas together hold and wait for. Takes one round trip.
    ///
    /// # Errors
    ///
    /// If the store does not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn usage(&self) -> Result<Usage, AcquireError> {
        let usage = self.limiter.usage(self.number, self.key.clone()).await;
        usage.map_err(|kind| AcquireError::new(kind, self.limit.max()))
    }

    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }
}

/// Future of a [`Permit`], from [`Semaphore::acquire`]. It does nothing until it is polled.
#[must_use = "futures do nothing unless polled"]
pub struct Acquire(Request);

impl Acquire {
    pub(crate) fn new(request: Request) -> Self {
        Self(request)
    }

    /// The place in the line when it was joined: 1 at the head. `None` if it is not in line.
    pub fn place(&self) -> Option<u32> {
        self.0.place()
    }
}

impl Future for Acquire {
    type Output = Result<Permit, AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(cx).map_ok(Permit::new)
    }
}

impl fmt::Debug for Acquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquire").finish_non_exhaustive()
    }
}
