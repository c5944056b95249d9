//! Permits that end at a bound: held for too long, or with an unread response (*idle*, unlike the idle slots of a
//! pool).

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
    /// Counted from the call of [`BoundedPermits::bound`].
    pub max_hold: Option<Duration>,
    /// Counted from the time set by [`Lease::set_unread`].
    pub idle: Option<Duration>,
}

/// Permits with bounds until their release, and when to check each.
#[derive(Default)]
pub(crate) struct BoundedPermits {
    permits: HashMap<Seq, BoundedPermit>,
    due: BTreeSet<(Instant, Seq)>,
}

struct BoundedPermit {
    lease: Arc<Lease>,
    until: Option<Instant>,
    idle: Option<Duration>,
    /// Its key in [`BoundedPermits::due`].
    due: Instant,
}

impl Bounds {
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl BoundedPermits {
    /// Bounds a permit, replacing its previous bounds.
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
        // Most layers have no bounds, and even an empty look-up takes time.
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

    /// Checks the first permit that is due; `None` if none is. A permit that has reached a bound is removed, and returned
    /// with the reason. A response records without a lock since when a frame has been unread; the keeper reads this only
    /// when the permit is due.
    pub(crate) fn check_next(
        &mut self,
        now: Instant,
    ) -> Option<Option<(Arc<Lease>, LostErrorKind)>> {
        let &(_, seq) = self.due.first().filter(|(at, _)| *at <= now)?;
        self.due.pop_first();
        let permit = self.permits.remove(&seq)?;
        let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_over(permit.until) {
            return Some(Some((permit.lease, LostErrorKind::HeldTooLong)));
        }
        if is_over(permit.idle_at(now)) {
            return Some(Some((permit.lease, LostErrorKind::Idle)));
        }
        self.add(permit, now);
        Some(None)
    }
}

impl BoundedPermit {
    /// When the permit will have been idle for too long, if no frame is requested from `now` on.
    fn idle_at(&self, now: Instant) -> Option<Instant> {
        let idle = self.idle?;
        Some(self.lease.unread_since().unwrap_or(now) + idle)
    }
}
