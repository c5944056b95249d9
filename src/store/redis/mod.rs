//! The store in Redis 6.2 or later, or Valkey.
//!
//! One connection carries the exchanges of a process and the wake-ups for it: it speaks RESP3, and subscribes to the
//! process's own channel before the first exchange is sent on it. After an error it is dropped; the next
//! exchange makes a new one, and so finds the server that the name now leads to. Where the server's output buffer for
//! subscribers is too small for that, connections do not subscribe: see `subscription.rs`.
//!
//! In a cluster each part of it has a store of its own: see `cluster.rs`.
//!
//! | file | what |
//! | --- | --- |
//! | `target`, `cluster`, `sentinel` | which server a connection has to lead to |
//! | `session` | what the keeper's driver polls: makes a connection, runs exchanges on it, and replaces it |
//! | `link` | one connection |
//! | `subscription` | whether connections subscribe to wake-ups |
//! | `events` | what the store reports by itself |
//! | `control` | a connection beside the exchanges: single commands, and messages to and from operators |
//! | `codec` | exchanges, replies and wake-ups on the wire |
//! | `opening`, `stranger` | how far a new connection is, and what a server is that does not answer as Redis does |
//! | `error`, `socket`, `known`, `locked` | errors, streams, names and what is known of the server, locks |
//!
//! The permissions that a user of the store needs are listed in `src/guide/redis.md`, which tests read. `script|load` is not
//! used. In a cluster `asking` is needed while keys move from node to node.

#[cfg(feature = "cluster")]
mod cluster;
pub(crate) mod codec;
#[cfg(feature = "operate")]
pub(crate) mod control;
mod error;
mod events;
mod known;
mod link;
mod locked;
mod opening;
#[cfg(feature = "sentinel")]
mod sentinel;
mod session;
mod socket;
mod stranger;
mod subscription;
mod target;

use std::sync::{Arc, atomic::AtomicBool};

pub(crate) use self::target::StoreTarget;
use self::{known::Known, session::RedisSession, subscription::Subscription};
use super::{Session, Store};
use crate::ledger::ReplicaId;

/// Ledgers in one Redis server.
pub(crate) struct RedisStore {
    target: StoreTarget,
    known: Arc<Known>,
}

impl RedisStore {
    pub(crate) fn new(target: StoreTarget, namespace: &str, replica: ReplicaId) -> Self {
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
        RedisSession::new(self.known.clone(), self.target.dialer())
    }
}

impl Store for RedisStore {
    fn open(&self) -> Box<dyn Session> {
        Box::new(self.session())
    }
}

#[cfg(test)]
mod tests;
