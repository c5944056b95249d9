//! The store in Redis 6.2 or later, or Valkey.
//!
//! One connection carries a process's exchanges and its wake-ups. The connection speaks RESP3, and subscribes to the
//! process's own channel and to the channel of all replicas before its first exchange. After an error the connection is
//! dropped; the next hello reconnects, to whichever server the name resolves to by then. Connections do not
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
//! | `error`, `socket`, `known` | errors, streams, names and facts about the server |
//!
//! The permissions for the store's user are listed in `src/guide/redis.md`, which tests read. `script|load` is not
//! used. A cluster also needs `asking`, while keys migrate between nodes.

mod cluster;
pub(crate) mod codec;
#[cfg(feature = "operate")]
pub(crate) mod control;
mod error;
mod events;
mod known;
mod link;
mod lookup;
mod sentinel;
mod session;
mod socket;
mod subscription;
mod target;

use std::sync::Arc;

pub use self::target::StoreTarget;
use self::{known::Known, session::RedisSession};
use super::{Session, Store};
use crate::{ledger::ReplicaId, part::Part};

/// Ledgers in a Redis server, or in the parts of a cluster.
pub(crate) struct RedisStore {
    /// By part.
    parts: Vec<(StoreTarget, Arc<Known>)>,
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

impl Store for RedisStore {
    fn open(&self, part: Part) -> Box<dyn Session> {
        Box::new(self.session(part))
    }

    fn address(&self) -> String {
        let (target, _) = &self.parts[0];
        target.address()
    }
}

#[cfg(test)]
mod tests;
