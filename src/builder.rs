//! The builder: the settings of a limiter, and connecting to its store.
//!
//! Tests: `tests/semaphore/main.rs`; the ranges of settings: `tests/config/faults.rs`.

#[cfg(any(feature = "redis", feature = "test-util"))]
use std::sync::Arc;
use std::{fmt, time::Duration};

use tokio::runtime::Handle;

#[cfg(feature = "redis")]
use crate::store::redis::{RedisStore, StoreTarget};
use crate::{
    error::{ConfigError, ConfigErrorKind},
    home::{Home, HomeChoice},
    keeper::{Keeper, KeeperHandle, Settings},
    ledger::{MAX_LEASE_MS, ReplicaId},
    limiter::Limiter,
    operable::Identity,
    part::Parts,
};
#[cfg(any(feature = "redis", feature = "test-util"))]
use crate::{
    keeper::ConnectError,
    store::{Store, StoreErrorKind},
};

const MAX_LEASE: Duration = Duration::from_millis(MAX_LEASE_MS);
/// The URL of the store in this process.
const MEMORY: &str = "memory:";
const MAX_NAMESPACE_LEN: usize = 64;

/// Configures a [`Limiter`].
///
/// The defaults suit most services. All replicas of a service should use the same settings.
///
/// | setting | default | relation |
/// | --- | --- | --- |
/// | [`lease`](Self::lease) | 30 s | more than 3 x `store_timeout`, at most 1 h |
/// | [`store_timeout`](Self::store_timeout) | 500 ms | less than `lease` / 3 |
/// | [`poll_interval`](Self::poll_interval) | 1 s | |
/// | [`waiter_ttl`](Self::waiter_ttl) | 5 s | at least 3 x `poll_interval`, at most 1 h |
/// | [`namespace`](Self::namespace) | `turnstile` | |
/// | [`runtime`](Self::runtime), [`dedicated_thread`](Self::dedicated_thread) | the runtime that first uses the limiter | |
/// | [`require_store`](Self::require_store) | a store that cannot be reached is a warning | |
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it connects"]
pub struct LimiterBuilder {
    namespace: Namespace,
    lease: Duration,
    store_timeout: Duration,
    poll_interval: Duration,
    waiter_ttl: Duration,
    place: HomeChoice,
    requires_store: bool,
    pub(crate) identity: Identity,
}

impl Default for LimiterBuilder {
    fn default() -> Self {
        Self {
            namespace: Namespace("turnstile".to_owned()),
            lease: Duration::from_secs(30),
            store_timeout: Duration::from_millis(500),
            poll_interval: Duration::from_secs(1),
            waiter_ttl: Duration::from_secs(5),
            place: HomeChoice::default(),
            requires_store: false,
            identity: Identity::default(),
        }
    }
}

/// Prefix of the keys in the store. `Debug` hides an invalid one, which may be a URL in the wrong place.
#[derive(Clone)]
struct Namespace(String);

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = if is_namespace(&self.0) { &self.0 } else { ".." };
        shown.fmt(f)
    }
}

impl Limiter {
    /// Creates a limiter without a store, with the same rules within this process.
    ///
    /// For services with one replica, and for [tests](crate::guide::testing).
    ///
    /// # Panics
    ///
    /// If the system's random number generator fails.
    pub fn in_memory() -> Self {
        Self::builder()
            .in_memory()
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Connects to the store at this URL, with the default settings.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`LimiterBuilder::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, ConfigError> {
        Self::builder().connect(url).await
    }

    /// Returns a builder for a limiter with other settings.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder::default()
    }
}

impl LimiterBuilder {
    /// Sets the length of a lease. Default: 30 s.
    ///
    /// After a replica has crashed or was cut off, its slots stay taken until their leases end. The leases of held permits
    /// are renewed every third of this time, however long a request runs.
    ///
    /// Longer: fewer renewals, and permits survive longer outages of the store. Shorter: slots of a crashed replica
    /// return sooner.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the longest time that a request waits for the store. Default: 500 ms.
    ///
    /// After this time the limit's [`fallback`](crate::Limit::fallback) decides, and a longer pause of the store counts as
    /// an outage. Reconnecting has to fit into this time. It takes four round trips, five with TLS 1.3 and six with TLS 1.2.
    /// With Sentinel, and in a cluster at the first connection to most parts and if a hash slot has moved, it takes three to six more
    /// to find the server; if they exceed this time, the fallback decides until the next attempt, which goes on with the server
    /// that was found.
    pub fn store_timeout(mut self, store_timeout: Duration) -> Self {
        self.store_timeout = store_timeout;
        self
    }

    /// Sets the interval between polls for queued requests, in case a wake-up was lost. Default: 1 s.
    ///
    /// One poll covers all waiters of the process under one key, and keys that are due together go in one call. A
    /// replica that stops without losing its connection delays the waiters of the others by this interval and
    /// `store_timeout`.
    pub fn poll_interval(mut self, poll_interval: Duration) -> Self {
        self.poll_interval = poll_interval;
        self
    }

    /// Sets how long the store keeps the queue positions of a replica that sends nothing. Default: 5 s.
    ///
    /// The time counts from when the replica should have called, a poll interval and a store timeout after its last call.
    /// From then on its waiters are passed over, so they delay no other replica. Longer: positions survive longer pauses of
    /// a replica. Shorter: the queue has fewer waiters that nobody serves.
    pub fn waiter_ttl(mut self, waiter_ttl: Duration) -> Self {
        self.waiter_ttl = waiter_ttl;
        self
    }

    /// Sets the prefix of all keys and channels in the store. Default: `turnstile`.
    ///
    /// All replicas of a service share a namespace; services that share a server each have their own. A namespace has 1 to
    /// 64 letters, digits, `-`, `_`, `.` or `:`.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Namespace(namespace.into());
        self
    }

    /// Sets the runtime of the limiter's background task and connections.
    ///
    /// The runtime needs timers and IO ([`enable_all`]). Default: the runtime that first uses the limiter (not the runtime
    /// on which it was connected), and the next runtime that uses it when the first one has ended. What answers operators runs on
    /// the runtime on which it was connected, as long as that one lives.
    ///
    /// If the runtime lacks timers or IO, or does not run the task for half of `store_timeout` while requests wait or permits
    /// are held, the task moves to a thread of its own, as with [`dedicated_thread`](Self::dedicated_thread), with a
    /// warning. After the end of a given runtime requests are refused, and permits end with their leases.
    ///
    /// [`enable_all`]: tokio::runtime::Builder::enable_all
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.place = HomeChoice::Runtime(runtime);
        self
    }

    /// Runs the background task on a thread and a runtime of its own.
    ///
    /// Use it for services with one runtime per core, for runtimes that come and go or are not always driven, and where
    /// handlers may block a thread: none of this then delays the renewal of leases. The cost is one more thread to wake for
    /// each round trip, so a request takes longer under low load.
    ///
    /// The thread (`turnstile`) ends when the last [`Limiter`] and the last permit are gone. Replaces
    /// [`runtime`](Self::runtime).
    pub fn dedicated_thread(mut self) -> Self {
        self.place = HomeChoice::Thread;
        self
    }

    /// Creates a limiter without a store: see [`Limiter::in_memory`].
    ///
    /// # Errors
    ///
    /// If a setting is out of range.
    pub fn in_memory(self) -> Result<Limiter, ConfigError> {
        let settings = self.settings(Parts::WHOLE)?;
        let keeper = Keeper::new(settings, None, self.home()?);
        Ok(Limiter::new(KeeperHandle::new(keeper), self.identity))
    }

    /// Makes connecting fail if the store cannot be reached, with [`ConfigErrorKind::Unreachable`]. Default: a warning is
    /// logged.
    ///
    /// For jobs that should not start without their limits, and for configuration checks: a service should also start while
    /// its store is down. The store may fail at any later time, so each limit still needs a
    /// [`fallback`](crate::Limit::fallback). In a cluster only one node is checked. `memory:` names no store, so connecting
    /// succeeds.
    ///
    /// ```no_run
    /// # use tower_turnstile::Limiter;
    /// # async fn example() -> Result<(), tower_turnstile::ConfigError> {
    /// let limiter = Limiter::builder().require_store().connect("redis://127.0.0.1").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn require_store(mut self) -> Self {
        self.requires_store = true;
        self
    }

    /// Connects to the store at this URL.
    ///
    /// | URL | store | feature |
    /// | --- | --- | --- |
    /// | `redis://[user:password@]host[:port][/db]`, `valkey://`, `unix://` | a server | `redis` |
    /// | `rediss://`, `valkeys://` | a server, with TLS | `tls` |
    /// | `redis+sentinel://[user:password@]host[:26379],host2[:port]/service[/db]` | a service of Redis Sentinel, by up to 16 sentinels | `redis` |
    /// | `redis+cluster://[user:password@]host[:port],host2[:port]` | a Redis Cluster, by up to 16 of its nodes | `redis` |
    /// | `rediss+sentinel://`, `rediss+cluster://` | as above, with TLS | `tls` |
    /// | `memory:` | none | |
    ///
    /// With Sentinel, the URL names the server's user; add the user of the sentinels as
    /// `?sentinel_username=..&sentinel_password=..`. If sentinels name servers by address, certificates must be valid for
    /// these addresses, or the sentinels must set `announce-hostnames`. A database at `unix://` is the parameter `db=1`;
    /// unknown parameters are refused, and so is a user without a password. [Running Redis](crate::guide::redis) describes
    /// failovers, clusters, certificates and permissions.
    ///
    /// If the store does not answer within [`store_timeout`](Self::store_timeout), the limiter logs a warning and returns
    /// no error, so that a service can start while its store is down: each limit's [`fallback`](crate::Limit::fallback)
    /// applies until the store is up. [`require_store`](Self::require_store) makes this an error.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the limiter and its connection. Nothing is left in the store.
    ///
    /// # Errors
    ///
    /// Returns an error if a setting is out of range, the URL cannot be used, the store refuses the credentials or the
    /// namespace, or there is no Tokio runtime with timers and IO (not needed with
    /// [`dedicated_thread`](Self::dedicated_thread), except by a limiter for operators, which panics). If the store's user may
    /// not run a command, the first request that needs the command is refused, whatever the fallback.
    pub async fn connect(self, url: impl AsRef<str>) -> Result<Limiter, ConfigError> {
        let url = url.as_ref();
        if url == MEMORY {
            return self.in_memory();
        }
        #[cfg(feature = "redis")]
        return self.on_target(StoreTarget::open(url)?).await;
        #[cfg(not(feature = "redis"))]
        return check_url(url).and_then(|()| self.in_memory());
    }

    /// Connects with a client of the [`redis`] crate.
    ///
    /// For TLS with your own certificate authority, or with a client certificate. A linger time in the client's TCP
    /// settings does not apply.
    ///
    #[cfg_attr(feature = "tls", doc = "```no_run")]
    #[cfg_attr(not(feature = "tls"), doc = "```ignore")]
    /// use redis::{Client, TlsCertificates};
    /// use tower_turnstile::Limiter;
    ///
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let certificates = TlsCertificates {
    ///     client_tls: None, // or the service's own certificate and key
    ///     root_cert: Some(std::fs::read("/etc/redis/ca.pem")?),
    /// };
    /// let client = Client::build_with_tls("rediss://redis.internal", certificates)?;
    /// let limiter = Limiter::builder().connect_client(client).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the errors of [`connect`](Self::connect), except for errors in the URL.
    #[cfg(feature = "redis")]
    pub async fn connect_client(self, client: redis::Client) -> Result<Limiter, ConfigError> {
        self.on_target(client.into()).await
    }

    #[cfg(feature = "redis")]
    async fn on_target(self, target: StoreTarget) -> Result<Limiter, ConfigError> {
        let home = self.home()?;
        let settings = self.settings(target.layout())?;
        let store = RedisStore::new(target.clone(), &settings.namespace, settings.replica);
        let runtime = home.runtime();
        let (limiter, is_reached) = self.greeted(settings, Arc::new(store), home).await?;
        #[cfg(feature = "operate")]
        if limiter.is_operable() {
            let store = (&target, self.store_timeout);
            crate::operate::listen(&limiter, store, &self.namespace.0, runtime, is_reached).await;
        }
        Ok(limiter)
    }

    /// A limiter that has greeted its store, and whether the store has answered.
    #[cfg(any(feature = "redis", feature = "test-util"))]
    pub(crate) async fn greeted(
        &self,
        settings: Settings,
        store: Arc<dyn Store>,
        home: Home,
    ) -> Result<(Limiter, bool), ConfigError> {
        let keeper = Keeper::new(settings, Some(store), home);
        // Dropped with this future, or with an error, it ends the driver that looks out for the store.
        let limiter = Limiter::new(KeeperHandle::new(keeper.clone()), self.identity.clone());
        match keeper.greet().await.map_err(refused)? {
            Some(error) if self.requires_store => Err(ConfigError::unreachable(error)),
            unreached => Ok((limiter, unreached.is_none())),
        }
    }

    pub(crate) fn home(&self) -> Result<Home, ConfigError> {
        self.place.open().map_err(|error| {
            let message = format!("the thread of the limiter cannot be started: {error}");
            ConfigError::new(ConfigErrorKind::Runtime, message)
        })
    }

    /// All faults of the settings, with the setting's name.
    pub(crate) fn faults(&self) -> Vec<(&'static str, String)> {
        let mut faults = Vec::new();
        for (name, length) in [
            ("lease", self.lease),
            ("store_timeout", self.store_timeout),
            ("poll_interval", self.poll_interval),
            ("waiter_ttl", self.waiter_ttl),
        ] {
            if !(Duration::from_millis(1)..=MAX_LEASE).contains(&length) {
                let fault = format!("{name} is {length:?}: it must be 1 ms to {MAX_LEASE:?}");
                faults.push((name, fault));
            }
        }
        let in_range = faults.is_empty();
        let (lease, store_timeout) = (self.lease, self.store_timeout);
        if in_range && lease <= 3 * store_timeout {
            let fault = format!(
                "lease is {lease:?}: it must be more than 3 x store_timeout ({store_timeout:?})"
            );
            faults.push(("lease", fault));
        }
        let (waiter_ttl, poll_interval) = (self.waiter_ttl, self.poll_interval);
        if in_range && waiter_ttl < 3 * poll_interval {
            let fault = format!(
                "waiter_ttl is {waiter_ttl:?}: it must be at least 3 x poll_interval ({poll_interval:?})"
            );
            faults.push(("waiter_ttl", fault));
        }
        faults.extend(self.identity.fault().map(|fault| ("replica_label", fault)));
        if !is_namespace(&self.namespace.0) {
            let fault = format!(
                "namespace must be 1 to {MAX_NAMESPACE_LEN} letters, digits, `-`, `_`, `.` or `:`"
            );
            faults.push(("namespace", fault));
        }
        faults
    }

    pub(crate) fn settings(&self, parts: Parts) -> Result<Settings, ConfigError> {
        if let Some((_, fault)) = self.faults().into_iter().next() {
            return Err(ConfigError::value(fault));
        }
        let random = || {
            getrandom::u64().map_err(|error| ConfigError::value(format!("no randomness: {error}")))
        };
        // 96 bits.
        let bits = u128::from(random()?) << 32 | u128::from(random()? >> 32);
        Ok(Settings {
            replica: ReplicaId::from_bits(bits),
            namespace: self.namespace.0.clone(),
            parts,
            lease: self.lease,
            store_timeout: self.store_timeout,
            poll_interval: self.poll_interval,
            waiter_ttl: self.waiter_ttl,
            seed: random()?,
        })
    }
}

fn is_namespace(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    (1..=MAX_NAMESPACE_LEN).contains(&text.len()) && text.bytes().all(allowed)
}

/// Checks that a URL names a store. The error does not repeat the URL.
#[cfg_attr(not(feature = "config"), allow(dead_code))]
pub(crate) fn check_url(url: &str) -> Result<(), ConfigError> {
    if url == MEMORY {
        return Ok(());
    }
    #[cfg(feature = "redis")]
    return StoreTarget::open(url).map(drop);
    #[cfg(not(feature = "redis"))]
    return Err(ConfigError::new(
        ConfigErrorKind::Url,
        "the store's URL is not `memory:`, and the feature `redis` is off",
    ));
}

/// The error of a store that refused the first exchange, or of a missing runtime.
#[cfg(any(feature = "redis", feature = "test-util"))]
pub(crate) fn refused(error: ConnectError) -> ConfigError {
    let error = match error {
        ConnectError::Store(error) => error,
        ConnectError::NoRuntime => {
            let message = "there is no Tokio runtime with timers and IO to connect on";
            return ConfigError::new(ConfigErrorKind::Runtime, message);
        }
    };
    let kind = match error.kind {
        StoreErrorKind::Credentials => ConfigErrorKind::Credentials,
        StoreErrorKind::Permission => ConfigErrorKind::Permission,
        StoreErrorKind::Misconfigured | StoreErrorKind::Outage => ConfigErrorKind::Store,
    };
    ConfigError::new(
        kind,
        format!("the store refuses to work: {}", error.message),
    )
}
