//! Permits that end by themselves: held for too long, or with a response that nobody reads (*idle*; a pool's idle slots are
//! something else).

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::Lease;
use crate::{error::LostErrorKind, ledger::Seq};

/// Bounds that end a permit while its lease is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// From the moment at which it is bound.
    pub max_hold: Option<Duration>,
    /// From the moment that [`Lease::set_unread`] says.
    pub idle: Option<Duration>,
}

/// The permits that have bounds, until they are released, and when to check which.
#[derive(Default)]
pub(crate) struct BoundedPermits {
    permits: HashMap<Seq, BoundedPermit>,
    due: BTreeSet<(Instant, Seq)>,
}

struct BoundedPermit {
    lease: Arc<Lease>,
    until: Option<Instant>,
    idle: Option<Duration>,
    /// Its place in [`BoundedPermits::due`].
    due: Instant,
}

impl Bounds {
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl BoundedPermits {
    /// Bounds a permit, in place of the bounds that it has.
    pub(crate) fn bound(&mut self, lease: &Arc<Lease>, bounds: Bounds, now: Instant) {
        self.forget(lease.seq());
        let permit = BoundedPermit {
            lease: lease.clone(),
            until: bounds.max_hold.map(|max_hold| now + max_hold),
            idle: bounds.idle,
            due: now,
        };
        self.add(permit, now);
    }

    pub(crate) fn forget(&mut self, seq: Seq) {
        // Most layers have no bounds, and a look-up costs something even then.
        if self.permits.is_empty() {
            return;
        }
        if let Some(permit) = self.permits.remove(&seq) {
            self.due.remove(&(permit.due, seq));
        }
    }

    fn add(&mut self, mut permit: BoundedPermit, now: Instant) {
        let ends = permit.until.into_iter().chain(permit.idle_at(now));
        let Some(due) = ends.min() else {
            return;
        };
        let seq = permit.lease.seq();
        permit.due = due;
        self.due.insert((due, seq));
        self.permits.insert(seq, permit);
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Removes one that is over, and says why it is. A response notes without a lock since when a frame lies unread, which
    /// is only looked at when its permit is due.
    pub(crate) fn pop_over(&mut self, now: Instant) -> Option<(Arc<Lease>, LostErrorKind)> {
        while let Some(&(at, seq)) = self.due.first()
            && at <= now
        {
            self.due.pop_first();
            let Some(permit) = self.permits.remove(&seq) else {
                continue;
            };
            let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
            if is_over(permit.until) {
                return Some((permit.lease, LostErrorKind::HeldTooLong));
            }
            if is_over(permit.idle_at(now)) {
                return Some((permit.lease, LostErrorKind::Idle));
            }
            self.add(permit, now);
        }
        None
    }
}

impl BoundedPermit {
    /// When it will have been idle for too long, if no frame is asked for from `now` on.
    fn idle_at(&self, now: Instant) -> Option<Instant> {
        let idle = self.idle?;
        Some(self.lease.unread_since().unwrap_or(now) + idle)
    }
}
