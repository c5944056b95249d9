//! Which server a new connection leads to.

use redis::{Client, ConnectionInfo, ProtocolVersion, RedisResult};

use crate::error::{ConfigError, ConfigErrorKind};

/// Where the store is, as its URL says. Cheap to clone.
#[derive(Clone)]
pub(crate) enum Target {
    /// One server, by its name.
    Server(Client),
}

impl Target {
    /// Reads the URL of a store. The error does not repeat it: it may hold a password.
    pub(crate) fn open(url: &str) -> Result<Self, ConfigError> {
        let scheme = url.split_once("://").map(|(scheme, _)| scheme);
        let fault = match scheme {
            Some("redis" | "valkey" | "unix" | "redis+unix" | "valkey+unix") => None,
            Some("rediss" | "valkeys") if cfg!(feature = "tls") => None,
            Some("rediss" | "valkeys") => Some("TLS to the store needs the feature `tls`"),
            _ => Some("the store's URL does not begin with `redis://` or another scheme of Redis"),
        };
        let fault = fault.map_or(Ok(()), Err);
        fault
            .and_then(|()| Client::open(url).map_err(|_| "the store's URL cannot be read"))
            .map(Self::from)
            .map_err(|fault| ConfigError::new(ConfigErrorKind::Url, fault))
    }

    /// A client for the server that is the right one now. Without a time limit of its own.
    pub(super) async fn client(&self) -> RedisResult<Client> {
        match self {
            Self::Server(client) => Ok(client.clone()),
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
fn prepared(info: ConnectionInfo) -> ConnectionInfo {
    let redis = info.redis_settings().clone();
    let tcp = info.tcp_settings().clone();
    info.set_redis_settings(redis.set_protocol(ProtocolVersion::RESP3))
        .set_tcp_settings(tcp.set_nodelay(true))
}
