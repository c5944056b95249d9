//! The store in Redis 6.2 or later, or Valkey.
//!
//! One connection carries the exchanges of a process and the wake-ups for it: it speaks RESP3, and subscribes to the
//! process's own channel before the first exchange is sent on it. After an error it is not used again; the next
//! exchange makes a new one, and so finds the server that the name now leads to.
//!
//! # Permissions
//!
//! A user of the store needs no more than this (here for the namespace `turnstile`):
//!
//! ```text
//! ACL SETUSER turnstile on >password resetkeys resetchannels -@all
//!     ~turnstile:* &turnstile:wake:*
//!     +subscribe +publish +evalsha +eval +time
//!     +zadd +zrem +zrange +zcount +zscore +zmscore +zremrangebyrank +zremrangebyscore
//!     +pttl +pexpire +get +set
//! ```
//!
//! Without `publish`, waiters learn of their slots when they ask, once a poll interval. With `config|get` a
//! `maxmemory-policy` that may evict permits is noticed at the start. `script|load` is not used.

pub(crate) mod codec;
mod connection;
mod target;
mod wake;

use std::{
    error::Error,
    io,
    sync::{Arc, LazyLock},
};

use futures_util::future::{BoxFuture, FutureExt};
use redis::{ErrorKind, RedisError, Script, ServerErrorKind, Value};
use tokio::sync::mpsc;

pub(crate) use self::target::Target;
use self::{
    codec::{decode, encode},
    connection::{Connector, Link},
};
use super::{Event, Store, StoreError, StoreErrorKind};
use crate::ledger::{EXCHANGE_LUA, Exchange, ReplicaId, Reply};

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(EXCHANGE_LUA));

/// Ledgers in one Redis server.
pub(crate) struct RedisStore {
    inner: Arc<Inner>,
}

struct Inner {
    connector: Connector,
    wake_prefix: String,
}

impl RedisStore {
    pub(crate) fn new(target: Target, namespace: &str, replica: ReplicaId) -> Self {
        let wake_prefix = format!("{namespace}:wake:");
        let channel = wake_prefix.clone() + &replica.text();
        let connector = Connector::new(target, channel);
        Self {
            inner: Arc::new(Inner {
                connector,
                wake_prefix,
            }),
        }
    }
}

impl Store for RedisStore {
    fn exchange(&self, exchange: Arc<Exchange>) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let inner = self.inner.clone();
        async move {
            let link = inner.connector.link().await?;
            let outcome = inner.run(&link, &exchange).await;
            if outcome.is_err() {
                // Whatever is wrong with this server, the next connection may lead to another.
                inner.connector.forget(&link);
            }
            outcome
        }
        .boxed()
    }

    fn listen(&self, events: mpsc::Sender<Event>) {
        self.inner.connector.listen(events);
    }

    fn disconnect(&self) {
        self.inner.connector.disconnect();
    }
}

impl Inner {
    async fn run(&self, link: &Link, exchange: &Exchange) -> Result<Reply, StoreError> {
        let mut connection = link.connection();
        let by_text = || encode("EVAL", EXCHANGE_LUA, &self.wake_prefix, exchange);
        let by_digest = || encode("EVALSHA", SCRIPT.get_hash(), &self.wake_prefix, exchange);
        let command = if link.is_first() {
            by_text()
        } else {
            by_digest()
        };
        let mut outcome = command.query_async::<Value>(&mut connection).await;
        if let Err(error) = &outcome
            && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
        {
            outcome = by_text().query_async(&mut connection).await;
        }
        decode(exchange, outcome.map_err(|error| store_error(&error))?)
    }
}

fn store_error(error: &RedisError) -> StoreError {
    let (kind, message) = match error.kind() {
        ErrorKind::Server(_) | ErrorKind::Extension => {
            let code = error.code().unwrap_or_default();
            let words = format!("{code} {}", error.detail().unwrap_or_default());
            (StoreErrorKind::of_server(&words), words)
        }
        ErrorKind::Io => (kind_of_io(error), error.to_string()),
        ErrorKind::AuthenticationFailed => (StoreErrorKind::Credentials, error.to_string()),
        _ => (StoreErrorKind::Misconfigured, error.to_string()),
    };
    StoreError { kind, message }
}

/// Most faults of a connection pass. A failed TLS handshake does not, nor do the rights of a socket's file.
fn kind_of_io(error: &RedisError) -> StoreErrorKind {
    let source = error.source();
    let source = source.and_then(|source| source.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    let Some(source) = source.and_then(|source| source.downcast_ref::<io::Error>()) else {
        return StoreErrorKind::Outage;
    };
    match source.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => StoreErrorKind::Misconfigured,
        io::ErrorKind::PermissionDenied => StoreErrorKind::Permission,
        _ => StoreErrorKind::Outage,
    }
}

#[cfg(test)]
mod tests;
