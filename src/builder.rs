//! The builder: a limiter's settings, and how it finds its store.
//!
//! Tests: `tests/semaphore/main.rs`; the ranges of settings: `tests/config/faults.rs`.

#[cfg(feature = "redis")]
use std::sync::Arc;
use std::{fmt, time::Duration};

use tokio::runtime::Handle;

#[cfg(feature = "redis")]
use crate::store::redis::{RedisStore, Target};
use crate::{
    error::{ConfigError, ConfigErrorKind},
    home::{Home, Place},
    keeper::{Keeper, Keepers, Settings},
    ledger::{MAX_LEASE_MS, ReplicaId},
    limiter::Limiter,
    part::Part,
};
#[cfg(any(feature = "redis", feature = "test-util"))]
use crate::{keeper::ConnectError, store::StoreErrorKind};

const MAX_LEASE: Duration = Duration::from_millis(MAX_LEASE_MS);
/// The URL of the store in this process.
const MEMORY: &str = "memory:";
const MAX_NAMESPACE_LEN: usize = 64;

/// Settings of a [`Limiter`].
///
/// | setting | default | relation |
/// | --- | --- | --- |
/// | [`lease`](Self::lease) | 30 s | more than 3 x `store_timeout`, at most 1 h |
/// | [`store_timeout`](Self::store_timeout) | 500 ms | less than `lease` / 3 |
/// | [`poll_interval`](Self::poll_interval) | 1 s | |
/// | [`waiter_ttl`](Self::waiter_ttl) | 5 s | at least 3 x `poll_interval`, at most 1 h |
/// | [`namespace`](Self::namespace) | `turnstile` | |
/// | [`runtime`](Self::runtime), [`dedicated_thread`](Self::dedicated_thread) | the caller's runtime | |
#[derive(Clone)]
#[must_use = "a builder does nothing until it connects"]
pub struct LimiterBuilder {
    namespace: String,
    lease: Duration,
    store_timeout: Duration,
    poll_interval: Duration,
    waiter_ttl: Duration,
    place: Place,
}

impl Default for LimiterBuilder {
    fn default() -> Self {
        Self {
            namespace: "turnstile".to_owned(),
            lease: Duration::from_secs(30),
            store_timeout: Duration::from_millis(500),
            poll_interval: Duration::from_secs(1),
            waiter_ttl: Duration::from_secs(5),
            place: Place::default(),
        }
    }
}

impl fmt::Debug for LimiterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            namespace,
            lease,
            store_timeout,
            poll_interval,
            waiter_ttl,
            place,
        } = self;
        f.debug_struct("LimiterBuilder")
            .field("namespace", &shown_namespace(namespace))
            .field("lease", lease)
            .field("store_timeout", store_timeout)
            .field("poll_interval", poll_interval)
            .field("waiter_ttl", waiter_ttl)
            .field("place", place)
            .finish()
    }
}

impl Limiter {
    /// A limiter whose ledger is in this process: the same rules and the same fairness without a store, for one
    /// replica and for tests.
    ///
    /// # Panics
    ///
    /// If the system has no randomness to give.
    pub fn in_memory() -> Self {
        Self::builder()
            .in_memory()
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// A limiter on the store at this URL, with the default settings.
    ///
    /// # Errors
    ///
    /// As [`LimiterBuilder::connect`].
    pub async fn connect(url: &str) -> Result<Self, ConfigError> {
        Self::builder().connect(url).await
    }

    /// A limiter with settings of its own.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder::default()
    }
}

impl LimiterBuilder {
    /// How long a slot stays taken after its replica crashed or was cut off. Held permits are renewed every third of
    /// it. Default: 30 s.
    ///
    /// Longer: fewer renewals, and permits survive longer outages of the store. Shorter: slots of a crashed replica
    /// are back sooner.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long a request waits for the store's answer before the limit's
    /// [`fallback`](crate::Limit::fallback) decides. Default: 500 ms. A connection is made anew within it, so it
    /// should be five round trips or more.
    pub fn store_timeout(mut self, store_timeout: Duration) -> Self {
        self.store_timeout = store_timeout;
        self
    }

    /// How often a replica asks how far its lines are, in case a wake-up was lost; one question for all waiters.
    /// Default: 1 s.
    pub fn poll_interval(mut self, poll_interval: Duration) -> Self {
        self.poll_interval = poll_interval;
        self
    }

    /// How long a replica's waiters keep their places when nothing is heard of it, and the longest first lease of a
    /// waiter that is granted a slot. Default: 5 s.
    ///
    /// Longer: places survive longer silences. Shorter: the waiters of a crashed replica are in nobody's way sooner:
    /// within twice this time, if `store_timeout` is at most a third of it.
    pub fn waiter_ttl(mut self, waiter_ttl: Duration) -> Self {
        self.waiter_ttl = waiter_ttl;
        self
    }

    /// What the names of all keys and channels in the store begin with; replicas of one service share it. 1 to 64
    /// letters, digits, `-`, `_`, `.` or `:`. Default: `turnstile`.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// The runtime of the limiter's task and of its connections to the store; it needs timers and IO ([`enable_all`]).
    /// Default: the one that first uses the limiter (not the one that it was connected on), and another one if that ends,
    /// or does not run the task in time.
    ///
    /// The task is never moved away from a runtime that is given here. While that does not run it, each limit's
    /// [`fallback`](crate::Limit::fallback) applies, as if the store were down.
    ///
    /// [`enable_all`]: tokio::runtime::Builder::enable_all
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.place = Place::Runtime(runtime);
        self
    }

    /// Runs the limiter's task on a thread of its own, with a runtime of its own, in place of the caller's. The thread
    /// (`turnstile`) ends when the last [`Limiter`] and the last permit are gone.
    ///
    /// For a service with one runtime for each core, for runtimes that come and go or are not always driven, and wherever
    /// handlers may block a thread: nothing that they do delays the renewal of leases then. On the other hand each
    /// round trip to the store wakes a thread more, so that a request takes longer under low load. Replaces
    /// [`runtime`](Self::runtime).
    pub fn dedicated_thread(mut self) -> Self {
        self.place = Place::Thread;
        self
    }

    /// A limiter whose ledger is in this process.
    ///
    /// # Errors
    ///
    /// If a setting is out of range.
    pub fn in_memory(self) -> Result<Limiter, ConfigError> {
        let settings = self.settings(None)?;
        let keeper = Keeper::new(settings, None, &self.home()?);
        Ok(Limiter::new(Keepers::new(vec![keeper])))
    }

    /// A limiter on the store at this URL: `redis://` (or `valkey://`), `rediss://` for TLS (feature `tls`), `memory:`
    /// for none.
    ///
    /// With the feature `sentinel` the URL may name a service that Redis Sentinel watches over, and up to 16 of its
    /// sentinels: `redis+sentinel://[user:password@]host[:26379],host2[:port]/service[/db]`, or `rediss+sentinel://` for
    /// TLS to the sentinels and to the server. The user is the server's; the sentinels' own is given by
    /// `?sentinel_username=..&sentinel_password=..`. A failover needs no restart: each new connection asks all sentinels
    /// at once, and uses only a server that says of itself that it is a primary. It goes on at the latest a second (the
    /// longest pause between two attempts) and a `store_timeout` after the sentinels have told of the new primary
    /// (`+switch-master`). What the new primary has not heard of is put back by those who hold it. Set
    /// `min-replicas-to-write` to 1 on the servers, so that a primary that is cut off from its replicas grants nothing.
    ///
    /// With the feature `cluster` it may name up to 16 nodes of a Redis Cluster:
    /// `redis+cluster://[user:password@]host[:port],host2[:port]`, or `rediss+cluster://`. Keys are spread over sixteen hash
    /// slots, each with a connection of its own, so a node that is gone concerns its own keys only. Slots may move while
    /// they are in use. A request under several limits takes them one after the other, rates first; if one refuses, what
    /// it took of the others is given back. So it takes a round trip for each, and others may see for a moment what it
    /// gives back. The nodes' clocks should agree (NTP): where a slot has moved to a node whose clock is ahead, leases end
    /// earlier by as much, as if the clock had been stepped.
    ///
    /// For TLS, the authorities that the system trusts are trusted; the environment variable `SSL_CERT_FILE` names
    /// others. A certificate that is not trusted, or for another name, is an error of the configuration and not an
    /// outage. Servers that sentinels name by address have certificates for these addresses, or the sentinels are told
    /// to `announce-hostnames`.
    ///
    /// A store that cannot be reached is not an error but a warning in the log, so that a service can start while its
    /// store is down: each limit's [`fallback`](crate::Limit::fallback) applies until it is there.
    ///
    /// # Errors
    ///
    /// If a setting is out of range, the URL cannot be used, the store refuses the credentials or the namespace, or there is
    /// no Tokio runtime with timers and IO (with [`dedicated_thread`](Self::dedicated_thread) none is needed). A command
    /// that the store's user may not run shows at the first request: it is refused, whatever the policy.
    pub async fn connect(self, url: &str) -> Result<Limiter, ConfigError> {
        if url == MEMORY {
            return self.in_memory();
        }
        #[cfg(feature = "redis")]
        return self.on_target(Target::open(url)?).await;
        #[cfg(not(feature = "redis"))]
        return check_url(url).and_then(|()| self.in_memory());
    }

    /// As [`connect`](Self::connect), with a client of the [`redis`] crate: for TLS with an authority of one's own, or
    /// with a certificate that the server asks for. A linger time in its TCP settings does not apply.
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
    /// As [`connect`](Self::connect), but for the URL.
    #[cfg(feature = "redis")]
    pub async fn connect_client(self, client: redis::Client) -> Result<Limiter, ConfigError> {
        self.on_target(client.into()).await
    }

    #[cfg(feature = "redis")]
    async fn on_target(self, target: Target) -> Result<Limiter, ConfigError> {
        let (home, mut keepers) = (self.home()?, Vec::new());
        for (part, target) in target.parts() {
            let settings = self.settings(part)?;
            let store = RedisStore::new(target, &settings.namespace, settings.replica);
            let keeper = Keeper::new(settings, Some(Arc::new(store)), &home);
            keepers.push(keeper);
        }
        // The other parts connect when they have something to send.
        keepers[0].greet().await.map_err(refused)?;
        Ok(Limiter::new(Keepers::new(keepers)))
    }

    pub(crate) fn home(&self) -> Result<Home, ConfigError> {
        self.place.open().map_err(|error| {
            let message = format!("the thread of the limiter cannot be started: {error}");
            ConfigError::new(ConfigErrorKind::Runtime, message)
        })
    }

    /// All faults of the settings, by their names.
    pub(crate) fn faults(&self) -> Vec<(&'static str, String)> {
        let Self {
            namespace,
            lease,
            store_timeout,
            poll_interval,
            waiter_ttl,
            ..
        } = self;
        let mut faults = Vec::new();
        for (name, length) in [
            ("lease", lease),
            ("store_timeout", store_timeout),
            ("poll_interval", poll_interval),
            ("waiter_ttl", waiter_ttl),
        ] {
            if *length < Duration::from_millis(1) || *length > MAX_LEASE {
                let fault = format!("{name} is {length:?}: it must be 1 ms to {MAX_LEASE:?}");
                faults.push((name, fault));
            }
        }
        let in_range = faults.is_empty();
        if in_range && *lease <= 3 * *store_timeout {
            let fault = format!(
                "lease is {lease:?}: it must be more than 3 x store_timeout ({store_timeout:?})"
            );
            faults.push(("lease", fault));
        }
        if in_range && *waiter_ttl < 3 * *poll_interval {
            let fault = format!(
                "waiter_ttl is {waiter_ttl:?}: it must be at least 3 x poll_interval ({poll_interval:?})"
            );
            faults.push(("waiter_ttl", fault));
        }
        if !is_namespace(namespace) {
            let fault = format!(
                "namespace must be 1 to {MAX_NAMESPACE_LEN} letters, digits, `-`, `_`, `.` or `:`"
            );
            faults.push(("namespace", fault));
        }
        faults
    }

    pub(crate) fn settings(&self, part: Option<Part>) -> Result<Settings, ConfigError> {
        let fail = |message: String| Err(ConfigError::value(message));
        if let Some((_, fault)) = self.faults().into_iter().next() {
            return fail(fault);
        }
        let mut random = [0; 20];
        if let Err(error) = getrandom::fill(&mut random) {
            return fail(format!("no randomness: {error}"));
        }
        let bits = random[..12]
            .iter()
            .fold(0u128, |bits, byte| bits << 8 | u128::from(*byte));
        let seed = random[12..]
            .iter()
            .fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
        Ok(Settings {
            replica: ReplicaId::from_bits(bits),
            namespace: self.namespace.clone(),
            part,
            lease: self.lease,
            store_timeout: self.store_timeout,
            poll_interval: self.poll_interval,
            waiter_ttl: self.waiter_ttl,
            seed,
        })
    }
}

fn is_namespace(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    (1..=MAX_NAMESPACE_LEN).contains(&text.len()) && text.bytes().all(allowed)
}

/// For `Debug`: an invalid namespace may be a URL in the wrong place.
pub(crate) fn shown_namespace(text: &str) -> &str {
    if is_namespace(text) { text } else { ".." }
}

/// Checks that a URL names a store. The error does not repeat the URL.
#[cfg_attr(not(feature = "config"), allow(dead_code))]
pub(crate) fn check_url(url: &str) -> Result<(), ConfigError> {
    if url == MEMORY {
        return Ok(());
    }
    #[cfg(feature = "redis")]
    return Target::open(url).map(drop);
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
