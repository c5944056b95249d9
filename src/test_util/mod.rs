//! A store for tests of outages: it can be slow, go down, recover, and lose its data (feature `test-util`).
//!
//! A [`TestStore`] lives in this process and follows the rules of the store in Redis. Each connected limiter is a
//! separate replica with its own connection. So a test can check how a service behaves while its store is down, and how
//! two replicas interact.
//!
//! ```
//! use std::time::Duration;
//!
//! use tower_turnstile::{Fallback, Limit, Limiter, test_util::TestStore};
//!
//! const CHAT: Limit = Limit::concurrent("chat", 2).fallback(Fallback::Local(1));
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = TestStore::new();
//! let limiter = Limiter::builder().connect_to(&store).await?;
//! let chat = limiter.semaphore(&CHAT, "acme")?;
//! let other_replica = Limiter::builder().connect_to(&store).await?;
//!
//! let _first = chat.acquire().await?;
//! let second = other_replica.semaphore(&CHAT, "acme")?.acquire().await?;
//! assert!(chat.acquire().await.is_err()); // both slots are in use, one by each replica
//! second.release().await?;
//!
//! store.go_down();
//! // The replica counts by itself now: one slot is its own, and it is in use.
//! assert!(chat.acquire().await.is_err());
//! assert!(!limiter.status().store_up);
//!
//! store.come_back();
//! tokio::time::sleep(Duration::from_secs(5)).await; // it is probed in the background
//! assert!(limiter.status().store_up);
//! let _second = chat.acquire().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Paused time
//!
//! The store's clock and its delays use [`tokio::time`]. With paused time (`start_paused = true`, and Tokio's feature
//! `test-util`) leases, timeouts and outages of minutes pass at once. Run each limiter on the test's runtime in that
//! case, because the time of a [`dedicated_thread`](LimiterBuilder::dedicated_thread) is not paused.
//!
//! # The module
//!
//! | file | content |
//! | --- | --- |
//! | `server` | the store: ledgers, clock, connections, and exchanges in transit |
//! | `session` | a replica's connection to the store |

mod server;
mod session;

use std::{fmt, sync::Arc, time::Duration};

use self::{
    server::{MAX_DELAY, Server},
    session::Replica,
};
use crate::{
    builder::LimiterBuilder, error::ConfigError, limiter::Limiter, part::Parts, sync::locked,
};

/// An in-process store that a test can slow down, disconnect and make forget. Clones share everything.
///
/// See the [module's documentation](self) for an example.
#[derive(Clone, Default)]
pub struct TestStore(Arc<Server>);

impl TestStore {
    /// Creates an empty store that is up and answers at once.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cuts all connections, and refuses new ones until [`come_back`](Self::come_back). The data is kept.
    ///
    /// Messages and replies in transit are lost. To a limiter, the server seems stopped or unreachable. To simulate a
    /// server that accepts connections but never answers, use [`respond_after`](Self::respond_after) with more than the
    /// limiter's [`store_timeout`](LimiterBuilder::store_timeout).
    pub fn go_down(&self) {
        self.0.go_down();
    }

    /// Accepts connections again. A limiter notices at its next probe, within some seconds.
    pub fn come_back(&self) {
        locked(&self.0.state).is_down = false;
    }

    /// Returns whether connections have been refused since [`go_down`](Self::go_down).
    pub fn is_down(&self) -> bool {
        locked(&self.0.state).is_down
    }

    /// Sets how long the store takes to answer messages sent from now on. Default: no time.
    ///
    /// Half of the delay passes before the store executes a message, and half before the limiter receives the answer.
    /// As with a slow network, a message may still take effect after the limiter's timeout. Wake-ups for waiters
    /// are delayed by half as much.
    pub fn respond_after(&self, delay: Duration) {
        locked(&self.0.state).delay = delay.min(MAX_DELAY);
    }

    /// Loses all data but stays up: holders, waiters, and the state of rates.
    ///
    /// To simulate a server restarted without its data, call this between [`go_down`](Self::go_down) and
    /// [`come_back`](Self::come_back). Limiters restore permits that are still held once they find the loss: at their next
    /// connection, their next request, or when a permit is renewed. From then on newcomers under a strict limit
    /// ([`Fallback::Reject`](crate::Fallback::Reject), for example) wait for two store timeouts.
    pub fn forget(&self) {
        locked(&self.0.state).ledgers.clear();
    }
}

impl fmt::Debug for TestStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestStore")
            .field("down", &self.is_down())
            .finish_non_exhaustive()
    }
}

impl LimiterBuilder {
    /// Connects a limiter to a test's store. Each limiter is a separate replica.
    ///
    /// As with [`connect`](Self::connect), a store that is down is an error only if it is
    /// [required](Self::require_store).
    ///
    /// # Errors
    ///
    /// Fails if a setting is out of range, or if the caller is not on a Tokio runtime with timers.
    pub async fn connect_to(self, store: &TestStore) -> Result<Limiter, ConfigError> {
        self.connect_in(Parts::WHOLE, store).await
    }

    /// Like [`connect_to`](Self::connect_to), in parts, like a cluster.
    #[cfg(test)]
    #[cfg_attr(not(feature = "metrics"), allow(dead_code))]
    pub(crate) async fn connect_parts_to(self, store: &TestStore) -> Result<Limiter, ConfigError> {
        self.connect_in(Parts::CLUSTER, store).await
    }

    async fn connect_in(self, parts: Parts, store: &TestStore) -> Result<Limiter, ConfigError> {
        let (home, settings) = (self.home()?, self.settings(parts)?);
        let (server, id) = (store.0.clone(), settings.replica);
        let replica = Arc::new(Replica { server, id });
        let (limiter, _) = self.greeted(settings, replica, home).await?;
        Ok(limiter)
    }
}
