//! The limiter: an application's one connection to its limits.
//!
//! Tests: `tests/semaphore/`, by theme.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    error::ConfigError,
    keeper::Keepers,
    limit::Limit,
    status::{ShutdownReport, Status},
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
        self.0.update(&[limit])
    }

    pub(crate) fn keepers(&self) -> &Arc<Keepers> {
        &self.0
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}
