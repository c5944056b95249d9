//! Bounded inspections under the keeper's lock, for operators.

use std::sync::Arc;

use tokio::time::Instant;

use crate::{
    key::Key,
    leases::Lease,
    ledger::{Seq, TenantId},
    limit::{Limit, LimitId},
};

/// Queues and entries per look, which takes up to 20 microseconds under the lock (measured in `operate/walk.rs`).
pub(crate) const LOOK: usize = 256;

/// Where the next look continues.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cursor {
    pub queue: u32,
    pub seq: Seq,
    /// Position among the keys of rates, which come after all queues.
    pub standing: usize,
}

/// The receiver of everything that a walk visits.
pub(crate) trait Visitor {
    /// Visits a queue. Returns whether to visit its entries.
    fn queue(&mut self, queue: QueueLook<'_>) -> bool;

    /// Visits an entry of the latest queue.
    fn entry(&mut self, entry: EntryLook<'_>);

    /// Visits a key of a rate. `look`: the key's state at a given time.
    fn rate(&mut self, _: LimitId, _: &Key, _look: &dyn Fn(Instant) -> Option<RateLook>) {}
}

/// A queue as seen under the keeper's lock.
pub(crate) struct QueueLook<'a> {
    pub limit: LimitId,
    pub key: &'a Key,
    /// The queue's name in the store; empty in memory.
    pub ledger: &'a str,
    /// The limit's value for this key.
    pub max: u32,
    pub pause: Option<PauseLook>,
    /// Whether newcomers wait because permits return to the store: only if the limit is enforced.
    pub recovering: bool,
}

/// A pause of a key for an overloaded upstream.
#[derive(Clone, Copy)]
pub(crate) struct PauseLook {
    /// Its end, before the ramp.
    pub end: Instant,
    /// Started by this process.
    pub own: bool,
}

/// The state of a key of a rate.
#[derive(Clone, Copy)]
pub(crate) struct RateLook {
    /// The rate's value for the key.
    pub max: u32,
    pub burst: u32,
    /// Units available at once.
    pub remaining: u32,
    /// Microseconds until the rate admits a request of one unit.
    pub next_us: u64,
    /// When the key was last charged here.
    pub at: Instant,
}

impl RateLook {
    /// Whether fewer units than the burst are available.
    pub(crate) fn is_used(&self) -> bool {
        self.remaining < self.burst
    }
}

/// A limit as seen under the keeper's lock.
pub(crate) struct LimitLook {
    pub limit: Arc<Limit>,
    /// The limit's value without overrides.
    pub declared_max: u32,
    pub is_paused: bool,
    /// Number of requests that a rate delays.
    pub delayed: usize,
}

/// A permit or a request as seen under the keeper's lock.
pub(crate) struct EntryLook<'a> {
    pub lease: &'a Arc<Lease>,
    /// The number of its permit.
    pub tenure: u64,
    pub waits: bool,
    /// Since when the permit has been held, or the request has waited for this limit.
    pub since: Instant,
    /// The place at which a waiter joined the queue; 0 if it never queued.
    pub place: u32,
    /// Of a fair limit.
    pub tenant: Option<TenantLook<'a>>,
}

/// The tenant of an entry.
pub(crate) struct TenantLook<'a> {
    pub id: TenantId,
    /// Empty: no tenant of its own.
    pub name: &'a Key,
    /// As the request says.
    pub share: u32,
}
