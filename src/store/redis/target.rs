//! Which server a new connection leads to.
//!
//! Tests: `tests.rs`.

use std::future::pending;
use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, atomic::AtomicBool},
};

use redis::{Client, ConnectionInfo, RedisError, RedisResult, aio::MultiplexedConnection};

#[cfg(feature = "cluster")]
use super::cluster::{Cluster, PartDialer};
#[cfg(feature = "sentinel")]
use super::sentinel::{PrimaryDialer, Sentinels, check_primary};
use super::{parameters, socket};
use crate::{
    error::{ConfigError, ConfigErrorKind},
    part::{Part, Parts},
};

/// Where the store is, read from its URL. Cheap to clone.
#[derive(Clone)]
pub struct StoreTarget(Location);

#[derive(Clone)]
enum Location {
    /// One server, by name.
    Server(Arc<Client>),
    /// The primary named by sentinels.
    #[cfg(feature = "sentinel")]
    Sentinel(Arc<Sentinels>),
    /// The node of a cluster that owns the part's hash slot.
    #[cfg(feature = "cluster")]
    Cluster(Cluster),
}

/// Makes the connections of one session.
pub(super) enum Dialer {
    Server(Arc<Client>),
    #[cfg(feature = "sentinel")]
    Sentinel(Box<PrimaryDialer>),
    #[cfg(feature = "cluster")]
    Cluster(Box<PartDialer>),
}

impl StoreTarget {
    /// Parses the URL of a store. The error does not repeat the URL, which may contain a password.
    pub fn open(url: &str) -> Result<Self, ConfigError> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let (server, way) = scheme.split_once('+').unwrap_or((scheme, ""));
        let target = match (server, way) {
            (_, "" | "sentinel" | "cluster") if server != "unix" && splits_password(rest) => {
                Err("the user or the password in the store's URL is not percent-encoded")
            }
            ("rediss" | "valkeys", _) if cfg!(not(feature = "tls")) => {
                Err("TLS to the store needs the feature `tls`")
            }
            ("redis" | "valkey", "" | "unix") | ("unix" | "rediss" | "valkeys", "") => {
                let client = Client::open(url).map_err(|_| "the store's URL cannot be read");
                client.map(Self::from)
            }
            ("redis" | "valkey", "sentinel") => Self::sentinel("redis", rest),
            ("rediss" | "valkeys", "sentinel") => Self::sentinel("rediss", rest),
            ("redis" | "valkey", "cluster") => Self::cluster("redis", rest),
            ("rediss" | "valkeys", "cluster") => Self::cluster("rediss", rest),
            _ => Err("the store's URL does not begin with `redis://` or another scheme of Redis"),
        };
        let known: &[&str] = match (server, way) {
            ("unix", _) | (_, "unix") => &["user", "pass", "protocol"],
            (_, "sentinel") => &["sentinel_username", "sentinel_password", "protocol"],
            _ => &["protocol"],
        };
        let refused = |fault: Cow<'_, str>| ConfigError::new(ConfigErrorKind::Url, fault);
        let target = target.map_err(|fault| refused(fault.into()))?;
        match parameters::database(url, known).map_err(|fault| refused(fault.into()))? {
            Some(db) => target
                .on_database(db)
                .map_err(|fault| refused(fault.into())),
            None => Ok(target),
        }
    }

    /// With the database that a parameter of the URL names.
    fn on_database(self, db: i64) -> Result<Self, &'static str> {
        if ![0, db].contains(&self.db()) {
            return Err("the store's URL names two databases");
        }
        let with_db = |info: &ConnectionInfo| {
            let settings = info.redis_settings().clone().set_db(db);
            info.clone().set_redis_settings(settings)
        };
        match self.0 {
            Location::Server(client) => {
                let client = Client::open(with_db(client.get_connection_info()));
                let client = client.map_err(|_| "the store's URL cannot be read")?;
                Ok(Self(Location::Server(Arc::new(client))))
            }
            #[cfg(feature = "sentinel")]
            Location::Sentinel(mut sentinels) => {
                if let Some(only) = Arc::get_mut(&mut sentinels) {
                    only.server = with_db(&only.server);
                }
                Ok(Self(Location::Sentinel(sentinels)))
            }
            #[cfg(feature = "cluster")]
            Location::Cluster(cluster) if db == 0 => Ok(Self(Location::Cluster(cluster))),
            #[cfg(feature = "cluster")]
            Location::Cluster(_) => Err("a cluster has no databases to choose from"),
        }
    }

    #[cfg(feature = "sentinel")]
    fn sentinel(scheme: &str, rest: &str) -> Result<Self, &'static str> {
        Sentinels::open(scheme, rest).map(|sentinels| Self(Location::Sentinel(Arc::new(sentinels))))
    }

    #[cfg(not(feature = "sentinel"))]
    fn sentinel(_scheme: &str, _rest: &str) -> Result<Self, &'static str> {
        Err("to find the store by sentinels needs the feature `sentinel`")
    }

    #[cfg(feature = "cluster")]
    fn cluster(scheme: &str, rest: &str) -> Result<Self, &'static str> {
        Cluster::open(scheme, rest).map(|cluster| Self(Location::Cluster(cluster)))
    }

    #[cfg(not(feature = "cluster"))]
    fn cluster(_scheme: &str, _rest: &str) -> Result<Self, &'static str> {
        Err("a cluster as the store needs the feature `cluster`")
    }

    /// The parts of a cluster; any other store is one whole.
    pub fn parts(self) -> Vec<Self> {
        match self.0 {
            #[cfg(feature = "cluster")]
            Location::Cluster(cluster) => {
                let of = |part| Self(Location::Cluster(cluster.for_part(part)));
                Part::all().map(of).collect()
            }
            _ => vec![self],
        }
    }

    /// The parts that the names of ledgers depend on.
    pub(crate) fn layout(&self) -> Parts {
        match self.part() {
            Some(_) => Parts::CLUSTER,
            None => Parts::WHOLE,
        }
    }

    /// The cluster part of this target.
    pub(crate) fn part(&self) -> Option<Part> {
        match &self.0 {
            #[cfg(feature = "cluster")]
            Location::Cluster(cluster) => Some(cluster.part()),
            _ => None,
        }
    }

    /// Whether a warning of small output buffers was logged; shared by all parts of a cluster.
    pub(super) fn warned(&self) -> Arc<AtomicBool> {
        match &self.0 {
            #[cfg(feature = "cluster")]
            Location::Cluster(cluster) => cluster.warned(),
            _ => Arc::default(),
        }
    }

    /// The database number.
    pub(crate) fn db(&self) -> i64 {
        match &self.0 {
            Location::Server(client) => client.get_connection_info().redis_settings().db(),
            #[cfg(feature = "sentinel")]
            Location::Sentinel(sentinels) => sentinels.db(),
            #[cfg(feature = "cluster")]
            Location::Cluster(_) => 0,
        }
    }

    /// Where the store is: a server, or all sentinels or nodes of the URL. Without a user and a password.
    pub(crate) fn address(&self) -> String {
        match &self.0 {
            Location::Server(client) => socket::address_of(client.get_connection_info()),
            #[cfg(feature = "sentinel")]
            Location::Sentinel(sentinels) => sentinels.address(),
            #[cfg(feature = "cluster")]
            Location::Cluster(cluster) => cluster.address(),
        }
    }

    pub(super) fn dialer(&self) -> Dialer {
        match &self.0 {
            Location::Server(client) => Dialer::Server(client.clone()),
            #[cfg(feature = "sentinel")]
            Location::Sentinel(sentinels) => {
                Dialer::Sentinel(Box::new(PrimaryDialer::new(sentinels.clone())))
            }
            #[cfg(feature = "cluster")]
            Location::Cluster(cluster) => Dialer::Cluster(Box::new(cluster.dialer())),
        }
    }
}

impl fmt::Debug for StoreTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StoreTarget").field(&self.address()).finish()
    }
}

/// Whether a password was cut at a `/`, `?` or `#`: its beginning would be taken for a host, which is no secret.
fn splits_password(rest: &str) -> bool {
    let host_ends = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (after, _) = rest[host_ends..]
        .split_once("sentinel_")
        .unwrap_or((&rest[host_ends..], ""));
    after.contains('@')
}

impl Dialer {
    /// Connects to the right server at this moment, without a time limit of its own. `open` opens a connection, which must
    /// pass the [`check`](Self::check).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the next attempt goes on from what this one has found.
    pub(super) async fn connect<T, F>(&self, open: impl Fn(Client) -> F) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        match self {
            Self::Server(client) => open(Client::clone(client)).await,
            #[cfg(feature = "sentinel")]
            Self::Sentinel(dialer) => dialer.connect(open).await,
            #[cfg(feature = "cluster")]
            Self::Cluster(dialer) => dialer.connect(open).await,
        }
    }

    /// The address of the last attempt to connect.
    pub(super) fn address(&self) -> String {
        match self {
            Self::Server(client) => socket::address_of(client.get_connection_info()),
            #[cfg(feature = "sentinel")]
            Self::Sentinel(dialer) => dialer.address(),
            #[cfg(feature = "cluster")]
            Self::Cluster(dialer) => dialer.address(),
        }
    }

    /// Checks that a connection leads to the wanted server, in cases in which only the server itself can tell. One
    /// round trip.
    pub(super) async fn check(&self, connection: MultiplexedConnection) -> RedisResult<()> {
        match self {
            #[cfg(feature = "sentinel")]
            Self::Sentinel(_) => check_primary(connection).await,
            _ => {
                drop(connection);
                Ok(())
            }
        }
    }

    /// Notes that the server of the last connection could not do its work: the next connection leads elsewhere, if
    /// possible.
    pub(super) fn search_again(&self) {
        #[cfg(feature = "cluster")]
        if let Self::Cluster(dialer) = self {
            dialer.search_again();
        }
    }

    /// The error that the latest attempt to connect found before it ran out of time.
    pub(super) fn fault(&self) -> Option<RedisError> {
        match self {
            #[cfg(feature = "sentinel")]
            Self::Sentinel(dialer) => dialer.fault(),
            _ => None,
        }
    }

    /// Whether another server has replaced the last one, according to a notice.
    pub(super) fn has_switched(&self) -> bool {
        match self {
            #[cfg(feature = "sentinel")]
            Self::Sentinel(dialer) => dialer.has_switched(),
            _ => false,
        }
    }

    /// Completes at the notice of such a replacement.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn switched(&self) {
        match self {
            #[cfg(feature = "sentinel")]
            Self::Sentinel(dialer) => dialer.switched().await,
            _ => pending().await,
        }
    }

    /// Drops the dialer's own connections.
    pub(super) fn disconnect(&self) {
        match self {
            #[cfg(feature = "sentinel")]
            Self::Sentinel(dialer) => dialer.disconnect(),
            #[cfg(feature = "cluster")]
            Self::Cluster(dialer) => dialer.disconnect(),
            Self::Server(_) => {}
        }
    }
}

impl From<Client> for StoreTarget {
    fn from(client: Client) -> Self {
        let info = socket::prepared(client.get_connection_info().clone());
        Self(Location::Server(Arc::new(
            Client::open(info).unwrap_or(client),
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_no_user_and_no_password() {
        for (url, expected) in [
            ("redis://user:canary@redis.shop/2", "redis.shop:6379/2"),
            ("redis://:canary@[::1]:7000/0?protocol=resp3", "[::1]:7000"),
            (
                "unix:///run/redis.sock?user=canary&pass=canary",
                "/run/redis.sock",
            ),
            ("unix:///run/redis.sock?db=3", "/run/redis.sock?db=3"),
            #[cfg(feature = "tls")]
            (
                "rediss://user:canary@redis.shop/2#insecure",
                "redis.shop:6379/2",
            ),
            #[cfg(feature = "sentinel")]
            (
                "redis+sentinel://user:canary@one,[::2]:2/main/3?sentinel_password=canary",
                "one:26379,[::2]:2",
            ),
            #[cfg(feature = "cluster")]
            ("redis+cluster://user:canary@one:1,two:2", "one:1,two:2"),
        ] {
            let target = StoreTarget::open(url).expect(url);
            assert_eq!(target.address(), expected, "{url}");
        }
        for url in [
            "redis://default:1234#canary@db:6379",
            "redis://default:1234?canary@db",
            "valkey://default:12/canary@db",
            "redis+sentinel://user:12/34@one/main",
            "redis+cluster://user:p@12/canary@one",
        ] {
            let fault = StoreTarget::open(url).expect_err(url).to_string();
            assert!(fault.contains("not percent-encoded"), "{url}: {fault}");
        }
        let spaced = "redis+sentinel://one/main?sentinel_password=a@b";
        assert!(!splits_password(spaced.split_once("://").unwrap().1));
        // As a hostile node may name another.
        assert_eq!(socket::host_and_port("canary\n", 1), "?:1");
    }
}
