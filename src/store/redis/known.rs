//! Knowledge of a store that outlives its sessions.

use std::sync::atomic::AtomicBool;

use super::subscription::Subscription;

/// Names in the store, and facts about the server that its sessions have learned.
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
