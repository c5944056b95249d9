//! A store for tests of outages: it can be slow, down, back up, and forgetful (feature `test-util`).
//!
//! A [`TestStore`] lives in this process and follows the rules of the store in Redis. Each limiter that connects to it is a
//! replica with a connection of its own, so a test can check what a service does while its store is down, and what two
//! replicas do together.
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
//! let chat = limiter.semaphore(&CHAT, "acme");
//! let other_replica = Limiter::builder().connect_to(&store).await?;
//!
//! let _first = chat.acquire().await?;
//! let second = other_replica.semaphore(&CHAT, "acme").acquire().await?;
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
//! The store's clock and its delays are those of [`tokio::time`]. With paused time (`start_paused = true`, and Tokio's
//! feature `test-util`) leases, timeouts and outages of minutes pass at once. Each limiter runs on the runtime of the
//! test then: not on a [`dedicated_thread`](LimiterBuilder::dedicated_thread), whose time is not paused.
//!
//! # The module
//!
//! | file | what |
//! | --- | --- |
//! | `server` | the store: ledgers, clock, connections, and exchanges that have not arrived |
//! | `session` | a replica's connection to it |

mod server;
mod session;

use std::{fmt, sync::Arc, time::Duration};

use self::{server::Server, session::Replica};
use crate::{
    builder::{LimiterBuilder, refused},
    error::ConfigError,
    keeper::{Keeper, Keepers},
    limiter::Limiter,
};

/// A store in this process that a test can slow down, cut off and make forget. Clones share everything.
///
/// See the [module's documentation](self) for an example.
#[derive(Clone, Default)]
pub struct TestStore(Arc<Server>);

impl TestStore {
    /// Creates a store that is up, answers at once, and holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cuts all connections, and refuses new ones until [`come_back`](Self::come_back). The data is kept.
    ///
    /// Messages that have not arrived are lost, and so are the replies under way. To a limiter this is a server that was
    /// stopped or cannot be reached. For one that takes connections and never answers, use
    /// [`respond_after`](Self::respond_after) with more than the limiter's
    /// [`store_timeout`](LimiterBuilder::store_timeout).
    pub fn go_down(&self) {
        self.0.go_down();
    }

    /// Takes connections again. A limiter notices at its next probe, within some seconds.
    pub fn come_back(&self) {
        self.0.come_back();
    }

    /// Whether connections are refused since [`go_down`](Self::go_down).
    pub fn is_down(&self) -> bool {
        self.0.is_down()
    }

    /// Sets how long the store takes to answer what is sent from now on. Default: no time at all.
    ///
    /// Half of the delay passes before the store does what it is asked, and half before the limiter knows: as with a slow
    /// network, a request whose limiter has given up may still take effect. Wake-ups for waiters are late by half of it.
    pub fn respond_after(&self, delay: Duration) {
        self.0.respond_after(delay);
    }

    /// Loses all data, and stays up: who holds, who waits, and what rates have given.
    ///
    /// A server that was restarted without its data has gone down first: call this between [`go_down`](Self::go_down)
    /// and [`come_back`](Self::come_back). Permits that are still held are put back when their limiter renews them.
    pub fn forget(&self) {
        self.0.forget();
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
    /// Connects a limiter to a store of a test. Each one is another replica.
    ///
    /// That the store is down is no error, as with [`connect`](Self::connect).
    ///
    /// # Errors
    ///
    /// If a setting is out of range, or there is no Tokio runtime with timers.
    pub async fn connect_to(self, store: &TestStore) -> Result<Limiter, ConfigError> {
        let (home, settings) = (self.home()?, self.settings(None)?);
        let replica = Replica::new(store.0.clone(), settings.replica);
        let keeper = Keeper::new(settings, Some(Arc::new(replica)), &home);
        keeper.greet().await.map_err(refused)?;
        Ok(Limiter::new(Keepers::new(vec![keeper])))
    }

    /// As [`connect_to`](Self::connect_to), with a keeper for each part, as for a cluster.
    #[cfg(test)]
    #[cfg_attr(not(all(feature = "metrics", feature = "operate")), allow(dead_code))]
    pub(crate) async fn connect_parts_to(self, store: &TestStore) -> Result<Limiter, ConfigError> {
        let (home, mut keepers) = (self.home()?, Vec::new());
        let news = Arc::default();
        for part in crate::part::Part::all() {
            let mut settings = self.settings(Some(part))?;
            settings.news = Arc::clone(&news);
            let replica = Replica::new(store.0.clone(), settings.replica);
            let keeper = Keeper::new(settings, Some(Arc::new(replica)), &home);
            keeper.greet().await.map_err(refused)?;
            keepers.push(keeper);
        }
        Ok(Limiter::new(Keepers::new(keepers)))
    }
}
