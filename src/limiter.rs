//! The limiter: an application's one connection to its limits.

#[cfg(feature = "config")]
use std::collections::HashMap;
use std::{fmt, sync::Arc, time::Duration};

use crate::{
    error::{AcquireErrorKind, ConfigError},
    keeper::{BoundPool, Demand, Granted, Keepers, Request},
    key::Key,
    limit::Limit,
    status::{ShutdownReport, Status, Usage},
    telemetry::LimitMeter,
};

/// Hands out permits under [`Limit`]s, through one store. Cheap to clone; clones share everything.
///
/// A limiter runs one task, with one connection to its store, however many permits are held or waited for. The task
/// is started at first use, on the runtime of the caller (or on the [builder's](crate::LimiterBuilder::runtime)). When that
/// runtime ends, the next use starts it again, on the runtime of that caller.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_turnstile::ConfigError> {
/// use std::time::Duration;
/// use tower_turnstile::Limiter;
///
/// let limiter = Limiter::builder()
///     .namespace("shop")
///     .lease(Duration::from_secs(10))
///     .connect("memory:") // or "redis://127.0.0.1"
///     .await?;
/// assert!(limiter.status().store_up);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Limiter(Arc<Keepers>);

impl Limiter {
    pub(crate) fn new(keepers: Arc<Keepers>) -> Self {
        Self(keepers)
    }

    /// What this process holds and waits for now. No round trip.
    pub fn status(&self) -> Status {
        self.0.status()
    }

    /// Refuses newcomers and waiters, waits up to `deadline` for permits to come back, and marks the rest as lost and
    /// releases them. Then every slot of this process is free for other replicas, if the store could be told.
    ///
    /// # Cancel safety
    ///
    /// A dropped future leaves the limiter closed; call it again to go on.
    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        self.0.shutdown(deadline).await
    }

    /// Gives the limit of this name new values while it is in use. They hold from the next exchange with the store on:
    /// if there are more slots than before, waiters get them at once; if there are fewer, nobody loses one. A limit
    /// that is switched to [`Mode::Shadow`](crate::Mode::Shadow) or [`Mode::Off`](crate::Mode::Off) lets its waiters
    /// go on.
    ///
    /// What a key has used up of a rate is kept as a time: when the rate is raised, it takes as long as before until that
    /// has passed, which is at most the time of the old burst.
    ///
    /// The wait is not part of it: each layer and semaphore keeps its own. Other replicas have to be told too; while
    /// they differ, the largest value holds.
    ///
    /// # Errors
    ///
    /// If a value is out of range, or a limit of slots would become a rate or the other way round.
    pub fn update(&self, limit: &Limit) -> Result<(), ConfigError> {
        self.update_all(&[limit])
    }

    /// All of them or none.
    pub(crate) fn update_all(&self, limits: &[&Limit]) -> Result<(), ConfigError> {
        self.0.update(limits)
    }

    /// Gives single keys of a limit new values at once; those that are not listed have the limit's.
    #[cfg(feature = "config")]
    pub(crate) fn set_values(&self, limit_name: &str, values: &HashMap<Key, u32>) {
        self.0.set_values(limit_name, values);
    }

    /// Whether [`register`](Self::register) would take it.
    #[cfg(feature = "config")]
    pub(crate) fn check(&self, limit: &Limit) -> Result<(), ConfigError> {
        self.0.check(limit)
    }

    /// Checks a limit and makes it known under its name; returns its number.
    pub(crate) fn register(&self, limit: &Limit) -> Result<usize, ConfigError> {
        self.0.register(limit)
    }

    /// What is measured of the limit with this number.
    pub(crate) fn meter(&self, limit: usize) -> Arc<LimitMeter> {
        self.0.meter(limit)
    }

    /// The pool of a key, if its limit has one.
    pub(crate) fn bind(&self, limit: usize, key: &Key) -> Option<Arc<BoundPool>> {
        self.0.bind(limit, key)
    }

    /// A slot that lies idle there, if there is one that may be used now.
    pub(crate) fn take_from(&self, pool: &BoundPool, own_max: Option<u32>) -> Option<Granted> {
        pool.take(&self.0, own_max)
    }

    /// Asks for a permit.
    pub(crate) fn request(&self, demand: Demand) -> Request {
        self.0.request(demand)
    }

    pub(crate) async fn usage(&self, limit: usize, key: Key) -> Result<Usage, AcquireErrorKind> {
        self.0.usage(limit, key).await
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}
