//! The store in Redis 6.2 or later, or Valkey.
//!
//! One connection carries the exchanges of a process and the wake-ups for it: it speaks RESP3, and subscribes to the
//! process's own channel before the first exchange is sent on it. After an error it is not used again; the next
//! exchange makes a new one, and so finds the server that the name now leads to. Where the server's output buffer for
//! subscribers is too small for that, connections do not subscribe: see `subscription.rs`.
//!
//! In a cluster each part of it has a store of its own: see `cluster.rs`.
//!
//! # Permissions
//!
//! A user of the store needs no more than this (here for the namespace `turnstile`):
//!
//! ```text
//! ACL SETUSER turnstile on >password resetkeys resetchannels -@all
//!     ~turnstile:* &turnstile:wake:*
//!     +subscribe +publish +evalsha +eval +time
//!     +zadd +zrem +zrange +zcard +zcount +zscore +zmscore +zremrangebyrank +zremrangebyscore
//!     +pttl +pexpire +get +set
//! ```
//!
//! Without `publish`, waiters learn of their slots when they ask, once a poll interval, and kept slots are not called back
//! before the right ends. With `config|get` a `maxmemory-policy` that may evict permits is noticed at the start.
//! `script|load` is not used. In a cluster `asking` is needed while keys move from node to node.

#[cfg(feature = "cluster")]
mod cluster;
pub(crate) mod codec;
mod connection;
mod error;
mod events;
#[cfg(feature = "sentinel")]
mod sentinel;
mod session;
mod socket;
mod subscription;
mod target;

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, atomic::AtomicBool};

use redis::{Cmd, ErrorKind, RedisResult, Script, ServerErrorKind, Value};

pub(crate) use self::target::Target;
use self::{
    codec::{decode, encode},
    connection::{Connector, Link},
    error::store_error,
    session::RedisSession,
    subscription::Subscription,
};
use super::{Session, Store, StoreError};
use crate::ledger::{EXCHANGE_LUA, Exchange, ReplicaId, Reply};

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(EXCHANGE_LUA));

/// Ledgers in one Redis server.
pub(crate) struct RedisStore {
    target: Target,
    known: Arc<Known>,
}

/// What outlives a session.
struct Known {
    /// The channel of the wake-ups for this replica.
    channel: String,
    wake_prefix: String,
    /// Named by an exchange that has no other key, so that in a cluster it comes to the right node.
    idle_key: Option<String>,
    policy_was_read: AtomicBool,
    subscription: Subscription,
}

/// A session, for its exchanges.
struct Inner {
    known: Arc<Known>,
    connector: Connector,
}

impl RedisStore {
    pub(crate) fn new(target: Target, namespace: &str, replica: ReplicaId) -> Self {
        let wake_prefix = format!("{namespace}:wake:");
        let known = Known {
            channel: wake_prefix.clone() + &replica.text(),
            wake_prefix,
            idle_key: target.part().map(|part| part.prefix(namespace)),
            policy_was_read: AtomicBool::new(false),
            subscription: Subscription::new(target.warned()),
        };
        Self {
            target,
            known: Arc::new(known),
        }
    }

    fn session(&self) -> RedisSession {
        let known = self.known.clone();
        let connector = Connector::new(known.clone(), self.target.route());
        RedisSession::new(Inner { known, connector })
    }
}

impl Store for RedisStore {
    fn open(&self) -> Box<dyn Session> {
        Box::new(self.session())
    }
}

impl Inner {
    async fn exchange(&self, exchange: &Exchange) -> Result<Reply, StoreError> {
        #[cfg(feature = "cluster")]
        if let target::Route::Cluster(path) = self.connector.route() {
            return self.exchange_in(path, exchange).await;
        }
        let link = self.connector.link().await?;
        let outcome = self.run(&link, exchange).await;
        self.read(&link, exchange, outcome)
    }

    async fn run(&self, link: &Link, exchange: &Exchange) -> RedisResult<Value> {
        let mut connection = link.connection();
        let command = match link.is_first() {
            true => self.by_text(exchange),
            false => self.encode("EVALSHA", SCRIPT.get_hash(), exchange),
        };
        match command.query_async(&mut connection).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                self.by_text(exchange).query_async(&mut connection).await
            }
            outcome => outcome,
        }
    }

    fn read(
        &self,
        link: &Link,
        exchange: &Exchange,
        outcome: RedisResult<Value>,
    ) -> Result<Reply, StoreError> {
        let value = outcome.map_err(|error| store_error(&error));
        let reply = value.and_then(|value| decode(exchange, value));
        if reply.is_err() {
            // Whatever is wrong with this server, the next connection may lead to another.
            self.connector.forget(link);
        }
        reply
    }

    fn by_text(&self, exchange: &Exchange) -> Cmd {
        self.encode("EVAL", EXCHANGE_LUA, exchange)
    }

    fn encode(&self, command: &str, script: &str, exchange: &Exchange) -> Cmd {
        let Known {
            wake_prefix,
            idle_key,
            ..
        } = &*self.known;
        encode(command, script, wake_prefix, idle_key.as_deref(), exchange)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
