//! The store in Redis 6.2 or later, or Valkey.
//!
//! One connection carries a process's exchanges and its wake-ups. The connection speaks RESP3, and subscribes to the
//! process's own channel and to the channel of all replicas before its first exchange. After an error the connection is
//! dropped; the next exchange reconnects, to whichever server the name resolves to by then. Connections do not
//! subscribe for a while after two of them have ended within a minute: see `subscription.rs`.
//!
//! In a cluster each part has its own store: see `cluster.rs`.
//!
//! | file | content |
//! | --- | --- |
//! | `target`, `cluster`, `sentinel` | which server a connection has to lead to |
//! | `session` | polled by the keeper's driver: connects, runs exchanges, replaces the connection |
//! | `link` | one connection |
//! | `subscription` | whether connections subscribe to wake-ups |
//! | `events` | the store's own reports |
//! | `control` | a connection beside the exchanges: single commands, and messages to and from operators |
//! | `codec` | exchanges, replies and wake-ups on the wire |
//! | `lookup` | addresses of hosts |
//! | `error`, `socket` | errors, streams |
//!
//! The permissions for the store's user are listed in `src/guide/redis.md`, which tests read. `script|load` is not
//! used. A cluster also needs `asking`, while keys migrate between nodes.

mod cluster;
pub(crate) mod codec;
#[cfg(feature = "operate")]
pub(crate) mod control;
mod error;
mod events;
mod link;
mod lookup;
mod sentinel;
mod session;
mod socket;
mod subscription;
mod target;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool};

pub use self::target::StoreTarget;
use self::{session::RedisSession, subscription::Subscription};
use super::{Session, Store};
use crate::{ledger::ReplicaId, part::Part};

/// Ledgers in a Redis server, or in the parts of a cluster.
pub(crate) struct RedisStore {
    /// By part.
    parts: Vec<(StoreTarget, Arc<Known>)>,
}

/// Names in a part of the store, and facts about the server that its sessions have learned.
struct Known {
    /// The channel of the wake-ups for this replica.
    channel: String,
    /// The channel of messages to all replicas. Its subscribers are the connected replicas.
    channel_of_all: String,
    wake_prefix: String,
    /// Key of an exchange that has no other, so that a cluster routes it to the right node.
    idle_key: Option<String>,
    policy_was_read: AtomicBool,
    subscription: Subscription,
}

impl RedisStore {
    pub(crate) fn new(target: StoreTarget, namespace: &str, replica: ReplicaId) -> Self {
        let warned = Arc::default();
        let parts = target.parts().into_iter().map(|target| {
            let known = Known::new(&target, namespace, replica, &warned);
            (target, Arc::new(known))
        });
        Self {
            parts: parts.collect(),
        }
    }

    fn session(&self, part: Part) -> RedisSession {
        let (target, known) = &self.parts[part.number()];
        RedisSession::new(known.clone(), target.dialer())
    }
}

impl Known {
    fn new(
        target: &StoreTarget,
        namespace: &str,
        replica: ReplicaId,
        warned: &Arc<AtomicBool>,
    ) -> Self {
        // Each part has its own channel: a message reaches subscribers at all nodes of a cluster, and those of all databases
        // of a server.
        let tag = target
            .part()
            .map_or(String::new(), |part| format!("{}:", part.tag()));
        let db = Some(target.db()).filter(|db| *db != 0);
        let db = db.map_or(String::new(), |db| format!("{db}:"));
        let wake_prefix = format!("{namespace}:wake:{db}{tag}");
        Self {
            channel: wake_prefix.clone() + &replica.text(),
            channel_of_all: wake_prefix.clone() + "all",
            wake_prefix,
            idle_key: target.part().map(|part| part.prefix(namespace)),
            policy_was_read: AtomicBool::new(false),
            subscription: Subscription::new(warned.clone()),
        }
    }
}

impl Store for RedisStore {
    fn open(&self, part: Part) -> Box<dyn Session> {
        Box::new(self.session(part))
    }

    fn address(&self) -> String {
        let (target, _) = &self.parts[0];
        target.address()
    }
}

/// Locks a mutex, poisoned or not.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
