//! Looks under the keeper's lock for operators, a little at a time.

use std::sync::Arc;

use tokio::time::Instant;

use crate::{
    key::Key,
    leases::Lease,
    ledger::Seq,
    limit::{Limit, LimitId},
    status::Usage,
};

/// Queues and entries that one look passes, in up to 20 microseconds under the lock (measured in `operate/walk.rs`).
pub(crate) const LOOK: usize = 256;

/// Where the next look begins.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cursor {
    pub queue: u32,
    pub seq: Seq,
    /// Of the keys of rates, which come after all queues.
    pub standing: usize,
}

/// The receiver of all that a walk sees.
pub(crate) trait Visitor {
    /// Whether to see the entries of this queue.
    /// `ledger`: its name in the store; empty in memory.
    fn queue(&mut self, limit: LimitId, key: &Key, ledger: &str, usage: &dyn Fn() -> Usage)
    -> bool;

    /// An entry of the queue that was seen last.
    fn entry(&mut self, entry: EntryLook<'_>);

    /// A key of a rate. `look`: how it stands at a time.
    fn rate(&mut self, _: LimitId, _: &Key, _look: &dyn Fn(Instant) -> Option<RateLook>) {}
}

/// How a key of a rate stands.
pub(crate) struct RateLook {
    /// The rate's value for the key.
    pub max: u32,
    pub burst: u32,
    /// Units that the rate has at once.
    pub remaining: u32,
    /// Microseconds until the rate admits a request of one unit.
    pub next_us: u64,
    /// When the key was last charged here.
    pub at: Instant,
}

impl RateLook {
    /// Whether less than the burst is left.
    pub(crate) fn is_used(&self) -> bool {
        self.remaining < self.burst
    }
}

/// A limit, as it is under the keeper's lock.
pub(crate) struct LimitLook {
    pub limit: Arc<Limit>,
    /// Its value without overrides.
    pub declared_max: u32,
    pub is_paused: bool,
    /// Requests that a rate delays.
    pub delayed: usize,
}

/// A permit or a request, as it is under the keeper's lock.
pub(crate) struct EntryLook<'a> {
    pub lease: &'a Arc<Lease>,
    /// The number of its permit.
    pub tenure: u64,
    pub waits: bool,
    /// Since when it is held, or waits for this limit.
    pub since: Instant,
    /// The place at which a waiter joined the queue; 0 if it did not.
    pub place: u32,
}
