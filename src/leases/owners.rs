//! Owners: which permit of a lease is the current one, and how many own it.

use crate::sync::{AtomicU64, Ordering};

/// The number of the current tenure, and how many own its permit, in one word.
///
/// # Why the orderings are enough
///
/// - `join` and `leave` are read-modify-writes, so that no owner is counted twice or forgotten, and exactly one `leave`
///   sees itself to be the last. As with `Arc`, `leave` releases and acquires: what other owners did with the permit
///   happens before what the last one does to give it back.
/// - Both fields are in one word, so that `join` cannot pass between the last `leave` and the next tenure: it fails at
///   zero owners, and from then on at the number.
/// - `next` needs no read-modify-write: at zero owners nobody else writes (`join` fails, and nobody is left to `leave`).
///   It releases and `tenure` acquires, so that an operator who sees the next number sees too that the time of the earlier
///   permit is over ([`Lease::tenure_since`](crate::leases::Lease)): an order for the one is never for the other.
/// - For all others it might be relaxed. A thread that has seen the *next* permit in any way (it took the lease out of the pool, whose lock
///   `next` was called under, or it has acquired what a thread that did so has released) sees its number too. A watcher of
///   the earlier permit that sees the lease end has acquired that from [`crate::leases::Lease::end`].
pub(crate) struct Owners(AtomicU64);

/// Owners are counted in the lower bits, tenures in the others.
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

    /// Takes an owner away. Returns whether it was the last.
    pub(crate) fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) % TENURE == 1
    }

    /// Begins the next tenure, with one owner. The current one has none.
    pub(crate) fn next(&self) {
        self.follow(self.tenure());
    }

    /// Begins the tenure after this one, with one owner. No permit has the current one.
    pub(crate) fn follow(&self, tenure: u64) {
        // At some million a second it comes round in days: no watcher is that old.
        let next = tenure.wrapping_add(1).wrapping_mul(TENURE) | 1;
        self.0.store(next, Ordering::Release);
    }
}
