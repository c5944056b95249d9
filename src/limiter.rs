//! The limiter: a process's connection to its store.
//!
//! Tests: `tests/semaphore/`, by theme.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    error::ConfigError,
    keeper::KeeperHandle,
    limit::Limit,
    operable::Identity,
    status::{ShutdownReport, Status},
};

/// Enforces [`Limit`]s through one store. Cheap to clone; clones share everything.
///
/// A limiter runs one background task, with one connection to its store, however many permits and waiters there are. The
/// first use starts the task, on the runtime of the caller (or the [builder's](crate::LimiterBuilder::runtime)). When this
/// runtime ends, the next use starts the task again, on the runtime of the new caller.
///
/// Call [`shutdown`](Self::shutdown) before the process ends: slots that are not released by then stay taken until their
/// leases end. If the last limiter is dropped without it while releases are pending, the log has a warning.
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
    keeper: Arc<KeeperHandle>,
    identity: Identity,
}

impl Limiter {
    pub(crate) fn new(keeper: Arc<KeeperHandle>, identity: Identity) -> Self {
        Self { keeper, identity }
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether operators may ask this replica, and revoke its permits.
    pub(crate) fn is_operable(&self) -> bool {
        self.identity.operable
    }

    /// Returns this process's permits and waiting requests, without a round trip.
    pub fn status(&self) -> Status {
        self.keeper.status()
    }

    /// Refuses newcomers, and releases all slots after `grace` at the latest.
    ///
    /// During `grace`, queued requests keep their places and may be served, admitted requests go on (also to inner layers, and
    /// with [further charges](crate::Budget::charge)), and permits may be released. The remaining requests are then refused,
    /// and the remaining permits marked as lost and released. The store confirms every release; with the last confirmation, all slots of this process are free for other replicas.
    /// `shutdown` waits for confirmations until one [`store_timeout`](crate::LimiterBuilder::store_timeout) after `grace`,
    /// but stops after two `store_timeout`s without a new confirmation, and
    /// [reports](ShutdownReport::unconfirmed) the slots whose release was not confirmed. Unconfirmed releases are retried
    /// for as long as the process lives.
    ///
    /// A permit that is only under rates has no slot: `shutdown` waits for it only once it has been charged, or has spent
    /// something, after its admission.
    ///
    /// If it is called again meanwhile, the later call's `grace` counts. A `grace` above 24 hours counts as 24 hours.
    ///
    /// See [Shutting down](crate::guide::shutdown) for how to combine it with a server's graceful shutdown.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the limiter closed; call `shutdown` again to continue.
    pub async fn shutdown(&self, grace: Duration) -> ShutdownReport {
        self.keeper.shutdown(grace).await
    }

    /// Changes the values of the limit with this name while it is in use.
    ///
    /// The new values apply from the next call to the store on. If the limit grows, waiters are admitted at once; if the
    /// limit shrinks, no permit is lost. Switching to [`Mode::Shadow`](crate::Mode::Shadow) or
    /// [`Mode::Off`](crate::Mode::Off) admits all waiters.
    ///
    /// When a rate changes, a key's use stays the same in units and drains at the new rate: see [Keys and
    /// policies](crate::guide::keys#trying-and-changing-a-limit).
    ///
    /// An [adaptive](crate::Scope::adapt) limit keeps its bounds. Layers and semaphores keep their waits;
    /// [`limit`](Self::limit) returns the longer of the known and the new one. Update the other replicas too. While they differ,
    /// the largest value of a concurrency limit applies, and each replica charges a rate by its own value.
    ///
    /// Layers and semaphores created afterwards may pass the limit with its first values or its new values, or the result
    /// of [`limit`](Self::limit).
    ///
    /// # Errors
    ///
    /// Returns an error if a value is out of range, or if a fixed setting would change: whether the limit is a rate, whether
    /// it is [fair](Limit::fair), or its class.
    pub fn update(&self, limit: &Limit) -> Result<(), ConfigError> {
        let mut limit = limit.clone();
        if let Some(known) = self.keeper.updated(limit.name()) {
            let wait = known.wait().max(limit.wait());
            limit = limit.wait_up_to(wait);
            // Only a scope or a file sets them.
            if let Some(bounds) = known.adapt() {
                limit = limit.adapted(bounds);
            }
        }
        self.keeper.update(&[&limit])
    }

    /// Returns the limit with this name and its current values, for another [`Semaphore`](crate::Semaphore) or layer.
    ///
    /// A semaphore or layer created from the result always has the limit's latest values, even after an
    /// [`update`](Self::update) in between. An operator's override is not included. Returns `None` if no semaphore, layer
    /// or update has used the name yet.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// let limiter = Limiter::in_memory();
    /// let _layer = limiter.layer(Limit::concurrent("chat", 5))?;
    /// limiter.update(&Limit::concurrent("chat", 8))?;
    /// let chat = limiter.limit("chat").expect("the layer has it");
    /// assert_eq!(chat.max(), 8);
    ///
    /// limiter.update(&Limit::concurrent("chat", 9))?;
    /// let semaphore = limiter.semaphore(&chat, "acme")?; // under 9 permits
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    pub fn limit(&self, name: &str) -> Option<Limit> {
        let limit = self.keeper.updated(name)?;
        Some(limit.registered_at(self.keeper.replica()))
    }

    pub(crate) fn keeper(&self) -> &Arc<KeeperHandle> {
        &self.keeper
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}
