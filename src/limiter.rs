//! The limiter: a process's connection to its store.
//!
//! Tests: `tests/semaphore/`, by theme.

use std::{fmt, sync::Arc, time::Duration};

#[cfg(feature = "operate")]
use crate::operate::Identity;
use crate::{
    error::ConfigError,
    keeper::Keepers,
    limit::Limit,
    status::{ShutdownReport, Status},
};

/// Enforces [`Limit`]s through one store. Cheap to clone; clones share everything.
///
/// A limiter runs one background task, with one connection to its store, however many permits are held or queued for.
/// The task is started at first use, on the runtime of the caller (or the [builder's](crate::LimiterBuilder::runtime)).
/// When that runtime ends, the next use starts it again, on the runtime of that caller.
///
/// Call [`shutdown`](Self::shutdown) before the process ends: slots that it has not released by then stay taken until their
/// leases end.
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
pub struct Limiter {
    keepers: Arc<Keepers>,
    #[cfg(feature = "operate")]
    identity: Identity,
}

impl Limiter {
    pub(crate) fn new(keepers: Arc<Keepers>) -> Self {
        Self {
            keepers,
            #[cfg(feature = "operate")]
            identity: Identity::default(),
        }
    }

    /// Sets what operators see it as.
    #[cfg(feature = "operate")]
    pub(crate) fn identified(self, identity: Identity) -> Self {
        Self { identity, ..self }
    }

    #[cfg(feature = "operate")]
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether operators may ask this replica, and revoke its permits.
    pub(crate) fn is_operable(&self) -> bool {
        #[cfg(feature = "operate")]
        let is_operable = self.identity.operable;
        #[cfg(not(feature = "operate"))]
        let is_operable = false;
        is_operable
    }

    /// Returns what this process holds and waits for, without a round trip.
    pub fn status(&self) -> Status {
        self.keepers.status()
    }

    /// Refuses new and queued requests, and releases all slots, at the latest at the deadline.
    ///
    /// Permits in use have until `deadline` to be released; the rest is marked as lost and released. Then the store has to
    /// confirm every release, and with the last confirmation the slots of this process are free for other replicas.
    /// `shutdown` waits for confirmations until one [`store_timeout`](crate::LimiterBuilder::store_timeout) after the deadline,
    /// but no longer than two of them without a new one, and [reports](ShutdownReport::unconfirmed) the slots whose release
    /// was not confirmed. Their releases are still retried for as long as the process lives.
    ///
    /// See [Shutting down](crate::guide::shutdown) for its order against a server's graceful shutdown.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the limiter closed; call it again to go on.
    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        self.keepers.shutdown(deadline).await
    }

    /// Changes the values of the limit of this name while it is in use.
    ///
    /// They apply from the next call to the store on. If the limit grows, waiters are admitted at once; if it shrinks, no
    /// permit is lost. Switching it to [`Mode::Shadow`](crate::Mode::Shadow) or [`Mode::Off`](crate::Mode::Off) admits its
    /// waiters.
    ///
    /// A key's use of a rate is kept as a time: after the rate is raised, that time takes as long to pass as
    /// before, at most the time of the old burst.
    ///
    /// The wait is not changed: each layer and semaphore keeps its own. Update the other replicas too; while they differ,
    /// the largest value applies.
    ///
    /// Layers and semaphores that are created afterwards name the limit by its first values, by these, or by
    /// [`limit`](Self::limit).
    ///
    /// # Errors
    ///
    /// If a value is out of range, or a limit of slots would become a rate or the other way round.
    pub fn update(&self, limit: &Limit) -> Result<(), ConfigError> {
        self.keepers.update(&[limit])
    }

    /// Returns the limit of this name with its current values, for another [`Semaphore`](crate::Semaphore) or layer.
    ///
    /// These always have the limit's latest values, even if it is updated between this call and their creation. An
    /// operator's override is not included. `None`: no semaphore, layer or update has named it yet.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// let limiter = Limiter::in_memory();
    /// let _layer = limiter.layer(Limit::concurrent("chat", 5));
    /// limiter.update(&Limit::concurrent("chat", 8))?;
    /// let chat = limiter.limit("chat").expect("the layer has it");
    /// assert_eq!(chat.max(), 8);
    ///
    /// limiter.update(&Limit::concurrent("chat", 9))?;
    /// let semaphore = limiter.semaphore(&chat, "acme"); // under 9 permits
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    pub fn limit(&self, name: &str) -> Option<Limit> {
        let limit = self.keepers.updated(name)?;
        Some(limit.registered_at(self.keepers.replica()))
    }

    pub(crate) fn keepers(&self) -> &Arc<Keepers> {
        &self.keepers
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}
