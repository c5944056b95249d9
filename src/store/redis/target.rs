//! Which server a new connection leads to.

use redis::{Client, ConnectionInfo, ProtocolVersion, RedisResult};

#[cfg(feature = "cluster")]
use super::cluster::Cluster;
use crate::{
    error::{ConfigError, ConfigErrorKind},
    keeper::Part,
};

/// Where the store is, as its URL says.
pub(crate) enum Target {
    /// One server, by its name.
    Server(Client),
    /// The node of a cluster that has what is asked for.
    #[cfg(feature = "cluster")]
    Cluster(Cluster),
}

impl Target {
    /// Reads the URL of a store. The error does not repeat it: it may hold a password.
    pub(crate) fn open(url: &str) -> Result<Self, ConfigError> {
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        let (kind, way) = scheme.split_once('+').unwrap_or((scheme, ""));
        let opened = match (kind, way) {
            ("rediss" | "valkeys", _) if !cfg!(feature = "tls") => {
                Err("TLS to the store needs the feature `tls`")
            }
            ("redis" | "rediss" | "valkey" | "valkeys", "cluster") => Self::open_cluster(url),
            ("redis" | "rediss" | "valkey" | "valkeys" | "unix", "")
            | ("redis" | "valkey", "unix") => match Client::open(url) {
                Ok(client) => Ok(client.into()),
                Err(_) => Err("the store's URL cannot be read"),
            },
            _ => Err("the store's URL does not begin with `redis://` or another scheme of Redis"),
        };
        opened.map_err(|fault| ConfigError::new(ConfigErrorKind::Url, fault))
    }

    #[cfg(feature = "cluster")]
    fn open_cluster(url: &str) -> Result<Self, &'static str> {
        Cluster::open(url).map(Self::Cluster)
    }

    #[cfg(not(feature = "cluster"))]
    fn open_cluster(_: &str) -> Result<Self, &'static str> {
        Err("a cluster for a store needs the feature `cluster`")
    }

    /// The parts of a cluster; a single server is one whole.
    pub(crate) fn parts(self) -> Vec<(Option<Part>, Self)> {
        match self {
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => {
                let own = |part| (Some(part), Self::Cluster(cluster.for_part(part)));
                Part::all().map(own).collect()
            }
            whole => vec![(None, whole)],
        }
    }

    /// Which part of a cluster this is.
    pub(super) fn part(&self) -> Option<Part> {
        match self {
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => Some(cluster.part()),
            _ => None,
        }
    }

    /// A client for the server that is the right one now. Without a time limit of its own.
    pub(super) async fn client(&self) -> RedisResult<Client> {
        match self {
            Self::Server(client) => Ok(client.clone()),
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => cluster.client(),
        }
    }

    /// How often to ask for a client before giving up on a connection.
    pub(super) fn attempts(&self) -> usize {
        match self {
            Self::Server(_) => 1,
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => cluster.attempts(),
        }
    }
}

impl From<Client> for Target {
    fn from(client: Client) -> Self {
        let info = prepared(client.get_connection_info().clone());
        Self::Server(Client::open(info).unwrap_or(client))
    }
}

/// With what every connection of the store needs: RESP3, whose pushes carry wake-ups, and no delays.
pub(super) fn prepared(info: ConnectionInfo) -> ConnectionInfo {
    let redis = info.redis_settings().clone();
    let tcp = info.tcp_settings().clone();
    info.set_redis_settings(redis.set_protocol(ProtocolVersion::RESP3))
        .set_tcp_settings(tcp.set_nodelay(true))
}
