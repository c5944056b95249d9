//! Which server a new connection leads to.
//!
//! Tests: `tests.rs`.

use std::{fmt, future::pending, sync::Arc};

use redis::{Client, Cmd, RedisError, RedisResult, Value, aio::MultiplexedConnection};

use super::{
    cluster::{Cluster, PartDialer},
    sentinel::{PrimaryDialer, Sentinels, check_primary},
    socket,
};
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
    Sentinel(Arc<Sentinels>),
    /// The node of a cluster that owns the part's hash slot.
    Cluster(Cluster),
}

/// Maximum number of nodes tried for one command: a cluster in transition may redirect several times.
pub(super) const MAX_REDIRECTS: usize = 8;
/// The fault of a command that was redirected as often.
pub(super) const NODES_DISAGREE: &str = "the cluster's nodes do not agree on who has a key";

/// Makes the connections of one session.
pub(super) enum Dialer {
    Server(Arc<Client>),
    Sentinel(Box<PrimaryDialer>),
    Cluster(Box<PartDialer>),
}

impl StoreTarget {
    /// Parses the URL of a store. The error does not repeat the URL, which may contain a password.
    pub fn open(url: &str) -> Result<Self, ConfigError> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let (server, way) = scheme.split_once('+').unwrap_or((scheme, ""));
        // Of one server.
        let scheme = match server {
            "valkey" => "redis",
            "valkeys" => "rediss",
            other => other,
        };
        let location = match (scheme, way) {
            (_, "" | "sentinel" | "cluster") if scheme != "unix" && splits_password(rest) => {
                Err("the user or the password in the store's URL is not percent-encoded")
            }
            ("rediss", _) if cfg!(not(feature = "tls")) => {
                Err("TLS to the store needs the feature `tls`")
            }
            ("redis", "" | "unix") | ("unix" | "rediss", "") => {
                let client = Client::open(url).map_err(|_| "the store's URL cannot be read");
                client.and_then(|client| {
                    socket::check_login(client.get_connection_info())?;
                    Ok(Self::from(client).0)
                })
            }
            ("redis" | "rediss", "sentinel") => Sentinels::open(scheme, rest)
                .map(|sentinels| Location::Sentinel(Arc::new(sentinels))),
            ("redis" | "rediss", "cluster") => Cluster::open(scheme, rest).map(Location::Cluster),
            _ => Err("the store's URL does not begin with `redis://` or another scheme of Redis"),
        };
        let known: &[&str] = match (scheme, way) {
            ("unix", _) | (_, "unix") => &["db", "user", "pass", "protocol"],
            (_, "sentinel") => &["sentinel_username", "sentinel_password", "protocol"],
            _ => &["protocol"],
        };
        let location = location.map_err(refused)?;
        check_parameters(url, known).map_err(refused)?;
        Ok(Self(location))
    }

    /// The parts of a cluster; any other store is one whole.
    pub fn parts(self) -> Vec<Self> {
        match self.0 {
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
            Location::Cluster(cluster) => Some(cluster.part),
            _ => None,
        }
    }

    /// The database number.
    pub(crate) fn db(&self) -> i64 {
        match &self.0 {
            Location::Server(client) => client.get_connection_info().redis_settings().db(),
            Location::Sentinel(sentinels) => sentinels.server.redis_settings().db(),
            Location::Cluster(_) => 0,
        }
    }

    /// Where the store is: a server, or all sentinels or nodes of the URL. Without a user and a password.
    pub(crate) fn address(&self) -> String {
        match &self.0 {
            Location::Server(client) => socket::address_of(client.get_connection_info()),
            Location::Sentinel(sentinels) => sentinels.address(),
            Location::Cluster(cluster) => cluster.address(),
        }
    }

    pub(super) fn dialer(&self) -> Dialer {
        match &self.0 {
            Location::Server(client) => Dialer::Server(client.clone()),
            Location::Sentinel(sentinels) => {
                Dialer::Sentinel(Box::new(PrimaryDialer::new(sentinels.clone())))
            }
            Location::Cluster(cluster) => Dialer::Cluster(Box::new(cluster.dialer())),
        }
    }
}

impl fmt::Debug for StoreTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StoreTarget").field(&self.address()).finish()
    }
}

fn refused(fault: impl Into<String>) -> ConfigError {
    ConfigError::new(ConfigErrorKind::Url, fault)
}

/// Refuses unknown parameters: ignored ones could lead to another database. The error repeats none of them, because any
/// text may be a part of a password.
fn check_parameters(url: &str, known: &[&str]) -> Result<(), String> {
    let before_fragment = url.split('#').next().unwrap_or_default();
    let (_, query) = before_fragment.split_once('?').unwrap_or_default();
    let parameters = query.split('&').filter(|each| !each.is_empty());
    let mut names = parameters.map(|each| each.split('=').next().unwrap_or_default());
    if names.all(|name| known.contains(&name)) {
        return Ok(());
    }
    let known = known.join("`, `");
    Err(format!(
        "the store's URL has an unknown parameter: known are `{known}`; the database of a server is a path, such as `/1`"
    ))
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
            Self::Sentinel(dialer) => dialer.connect(open).await,
            Self::Cluster(dialer) => dialer.connect(open).await,
        }
    }

    /// Follows a redirect in a cluster: see [`PartDialer::follow`].
    pub(super) async fn follow(
        &self,
        outcome: RedisResult<Value>,
        from: &Client,
        command: impl Fn(bool) -> Cmd,
        forget: impl FnOnce() -> bool,
    ) -> Option<RedisResult<Value>> {
        match self {
            Self::Cluster(dialer) => dialer.follow(outcome, from, command, forget).await,
            _ => Some(outcome),
        }
    }

    /// The address of the last attempt to connect.
    pub(super) fn address(&self) -> String {
        match self {
            Self::Server(client) => socket::address_of(client.get_connection_info()),
            Self::Sentinel(dialer) => dialer.address(),
            Self::Cluster(dialer) => dialer.address(),
        }
    }

    /// Checks that a connection leads to the wanted server, in cases in which only the server itself can tell. One
    /// round trip.
    pub(super) async fn check(&self, connection: MultiplexedConnection) -> RedisResult<()> {
        match self {
            Self::Sentinel(_) => check_primary(connection).await,
            _ => Ok(()),
        }
    }

    /// Notes that the server of the last connection could not do its work: the next connection leads elsewhere, if
    /// possible.
    pub(super) fn search_again(&self) {
        if let Self::Cluster(dialer) = self {
            dialer.search_again();
        }
    }

    /// The error that the latest attempt to connect found before it ran out of time.
    pub(super) fn fault(&self) -> Option<RedisError> {
        match self {
            Self::Sentinel(dialer) => dialer.fault(),
            _ => None,
        }
    }

    /// Whether another server has replaced the last one, according to a notice.
    pub(super) fn has_switched(&self) -> bool {
        match self {
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
            Self::Sentinel(dialer) => dialer.switched().await,
            _ => pending().await,
        }
    }

    /// Drops the dialer's own connections.
    pub(super) fn disconnect(&self) {
        match self {
            Self::Sentinel(dialer) => dialer.disconnect(),
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
    fn unknown_parameters_are_refused_and_secrets_are_not_repeated() {
        let check = |url| check_parameters(url, &["protocol"]);
        assert_eq!(check("redis://host"), Ok(()));
        assert_eq!(check("redis://host?protocol=resp3#x"), Ok(()));
        for url in [
            "redis://host?ssl=true",
            "redis://host?db=1",
            "redis://host?protocol=resp3&password=canary",
            "redis://host?canary",
        ] {
            let fault = check(url).expect_err(url);
            let expected = "unknown parameter: known are `protocol`; the database";
            assert!(
                fault.contains(expected) && !fault.contains("canary"),
                "{fault}"
            );
        }
    }

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
            (
                "redis+sentinel://user:canary@one,[::2]:2/main/3?sentinel_password=canary",
                "one:26379,[::2]:2",
            ),
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
