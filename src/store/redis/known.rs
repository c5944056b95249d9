//! The knowledge of a store that outlives its sessions.

use std::sync::atomic::AtomicBool;

use super::subscription::Subscription;

/// Names in the store, and what its sessions have learned of the server.
pub(super) struct Known {
    /// The channel of the wake-ups for this replica.
    pub(super) channel: String,
    pub(super) wake_prefix: String,
    /// Named by an exchange that has no other key, so that in a cluster it comes to the right node.
    pub(super) idle_key: Option<String>,
    pub(super) policy_was_read: AtomicBool,
    pub(super) subscription: Subscription,
}
