//! Bounded inspections under the keeper's lock, for operators.

use std::sync::Arc;

use tokio::time::Instant;

use crate::{
    key::Key,
    leases::Lease,
    ledger::{PacePast, Seq, TenantId},
    limit::{Adapt, Limit, LimitId},
    permit_id::PermitId,
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

/// Selects the queues to look at.
pub(crate) enum Which {
    All,
    Of {
        limit: LimitId,
        name: String,
        /// The digest of one key, and its text.
        key: Option<(u128, String)>,
    },
}

impl Which {
    /// Whether only one key is selected.
    pub(crate) fn is_one(&self) -> bool {
        matches!(self, Self::Of { key: Some(_), .. })
    }

    /// `ledger`: the name of the queue's ledger. Rates do not have one, nor do queues in memory.
    pub(crate) fn counts(&self, of: LimitId, of_key: &Key, ledger: &str) -> bool {
        let Self::Of { limit, name, key } = self else {
            return true;
        };
        let is_key = || match key {
            None => true,
            Some((digest, _)) if ledger.is_empty() => *digest == of_key.digest(name),
            Some((_, text)) => ledger.contains(text),
        };
        of == *limit && is_key()
    }
}

/// What a look has copied. Entries belong to the queue before them.
pub(crate) enum Seen {
    Queue(QueueLook),
    Entry(EntryLook),
}

/// A queue, or the key of a rate.
#[derive(Clone)]
pub(crate) struct QueueLook {
    pub limit: LimitId,
    pub key: Key,
    /// The limit's value for this key.
    pub max: u32,
    /// For a rate, if the key is known.
    pub budget: Option<RateLook>,
    pub pause: Option<PauseLook>,
    /// Only of an adaptive limit.
    pub pace: Option<PaceLook>,
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

/// What an adaptive limit has found for a key.
#[derive(Clone, Copy)]
pub(crate) struct PaceLook {
    pub bounds: Adapt,
    /// The value with which the key begins.
    pub declared: u32,
    pub cuts: u64,
    /// Overloads that this process has counted.
    pub overloaded: u64,
    /// `None`: only the store knows.
    pub past: Option<PacePast>,
}

impl PaceLook {
    /// As it begins.
    pub(crate) fn new(bounds: Adapt, declared: u32) -> Self {
        Self {
            bounds,
            declared,
            cuts: 0,
            overloaded: 0,
            past: None,
        }
    }
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

/// A permit or a request.
pub(crate) struct EntryLook {
    pub lease: Arc<Lease>,
    pub id: PermitId,
    pub waits: bool,
    /// Since when the permit has been held, or the request has waited for this limit.
    pub since: Instant,
    /// The place at which a waiter joined the queue; 0 if it never queued.
    pub place: u32,
    /// Of a fair limit.
    pub tenant: Option<TenantLook>,
}

/// The tenant of an entry.
#[derive(Clone)]
pub(crate) struct TenantLook {
    pub id: TenantId,
    /// Empty: no tenant of its own.
    pub name: Key,
    /// As the request says.
    pub share: u32,
}
