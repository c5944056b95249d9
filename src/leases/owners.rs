//! Owners: which permit of a lease is current, and how many owners it has.

use crate::sync::{AtomicU64, Ordering};

/// The number of the current tenure, and the number of its permit's owners, in one word.
///
/// # Why the orderings are enough
///
/// - `join` and `leave` are read-modify-writes, so that no owner is counted twice or missed, and exactly one `leave`
///   finds itself the last. As with `Arc`, `leave` releases and acquires: other owners' use of the permit happens
///   before the last owner's release of it.
/// - Both fields share one word, so that `join` cannot slip in between the last `leave` and the next tenure: it fails
///   at zero owners, and afterwards because the number differs.
/// - `next` needs no read-modify-write: at zero owners no other thread writes (`join` fails, and no owner remains to
///   `leave`). It releases and `tenure` acquires, so that an operator who sees the next number also sees that the
///   earlier permit's time is over ([`Lease::tenure_since`](crate::leases::Lease)): an order for one permit never
///   applies to the other.
/// - For everything else `next` might be relaxed. A thread that has observed the *next* permit in any way also sees its
///   number: it took the lease out of the pool, under whose lock `next` was called, or it has acquired a release by
///   such a thread. A watcher of the earlier permit that sees the lease end has acquired that end from
///   [`crate::leases::Lease::end`].
pub(crate) struct Owners(AtomicU64);

/// The lower bits count owners, the others tenures.
const TENURE: u64 = 1 << 24;

impl Owners {
    /// One owner, in the first tenure.
    pub(crate) fn one() -> Self {
        Self(AtomicU64::new(1))
    }

    /// The number of the current tenure.
    pub(crate) fn tenure(&self) -> u64 {
        self.0.load(Ordering::Acquire) / TENURE
    }

    /// Adds an owner, if this tenure is the current one and has an owner.
    pub(crate) fn join(&self, tenure: u64) -> bool {
        let one_more = |now: u64| {
            let owners = now % TENURE;
            let may = now / TENURE == tenure && (1..TENURE - 1).contains(&owners);
            may.then_some(now + 1)
        };
        let joined = self
            .0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more);
        joined.is_ok()
    }

    /// Removes an owner. Returns whether it was the last.
    pub(crate) fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) % TENURE == 1
    }

    /// Begins the next tenure, with one owner. The current tenure has no owner left.
    pub(crate) fn next(&self) {
        self.follow(self.tenure());
    }

    /// Begins the tenure after this one, with one owner. No permit has the current tenure.
    pub(crate) fn follow(&self, tenure: u64) {
        // At a million per second the number wraps around after days: no watcher is that old.
        let next = tenure.wrapping_add(1).wrapping_mul(TENURE) | 1;
        self.0.store(next, Ordering::Release);
    }
}
