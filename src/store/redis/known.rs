//! Knowledge of a store that outlives its sessions.

use std::sync::{Arc, atomic::AtomicBool};

use super::{subscription::Subscription, target::StoreTarget};
use crate::ledger::ReplicaId;

/// Names in a part of the store, and facts about the server that its sessions have learned.
pub(super) struct Known {
    /// The channel of the wake-ups for this replica.
    pub(super) channel: String,
    /// The channel of messages to all replicas. Its subscribers are the connected replicas.
    pub(super) channel_of_all: String,
    pub(super) wake_prefix: String,
    /// Key of an exchange that has no other, so that a cluster routes it to the right node.
    pub(super) idle_key: Option<String>,
    pub(super) policy_was_read: AtomicBool,
    pub(super) subscription: Subscription,
}

impl Known {
    pub(super) fn new(
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
