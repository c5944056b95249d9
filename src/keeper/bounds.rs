//! Bounds on permits: how long one is held at most, and how long its response may lie unread.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{Core, Lease, effects::Report, line::earliest};
use crate::{error::LostErrorKind, ledger::Seq, telemetry::Measure};

/// What ends a permit while its lease is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// From the moment at which it is bound.
    pub(crate) max_hold: Option<Duration>,
    /// From the moment that the lease is told by [`Lease::set_unread`].
    pub(crate) idle: Option<Duration>,
}

impl Bounds {
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// The permits that have bounds, until they are given back, and when to look at which.
#[derive(Default)]
pub(super) struct Bounded {
    permits: HashMap<Seq, Watch>,
    due: BTreeSet<(Instant, Seq)>,
}

struct Watch {
    lease: Arc<Lease>,
    until: Option<Instant>,
    idle: Option<Duration>,
    due: Instant,
}

impl Core {
    /// Bounds a permit that its request has got. The bounds go when it is [released](Self::release).
    pub(crate) fn bound(&mut self, lease: &Arc<Lease>, bounds: Bounds, now: Instant) {
        self.bounded.forget(lease.seq());
        // The keeper has to see its end.
        lease.set_reusable(false);
        let watch = Watch {
            lease: lease.clone(),
            until: bounds.max_hold.map(|max_hold| now + max_hold),
            idle: bounds.idle,
            due: now,
        };
        self.bounded.watch(watch, now);
    }

    /// Takes back what is over.
    pub(super) fn end_bounded(&mut self, now: Instant) {
        while let Some((lease, kind)) = self.bounded.next_over(now) {
            self.ctx.end_lease(&lease, kind);
            let seq = lease.seq();
            let line = self.lines.get_mut(lease.line);
            // If the slot was lost before, only the response is left to end.
            if let Some(line) = line.filter(|line| line.entries.contains_key(&seq)) {
                let limit = line.limit.clone();
                self.ctx.effects.report(Report::Ended { limit, kind });
                self.ctx.measure(line.key.0, Measure::Expired(kind));
                line.give_up(&mut self.ctx, seq);
                self.settle(lease.line);
            }
        }
    }
}

impl Bounded {
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    pub(super) fn forget(&mut self, seq: Seq) {
        // Most layers have no bounds, and a look-up costs something even then.
        if self.permits.is_empty() {
            return;
        }
        if let Some(watch) = self.permits.remove(&seq) {
            self.due.remove(&(watch.due, seq));
        }
    }

    fn watch(&mut self, mut watch: Watch, now: Instant) {
        let Some(due) = earliest(watch.until, watch.idle_at(now)) else {
            return;
        };
        let seq = watch.lease.seq();
        watch.due = due;
        self.due.insert((due, seq));
        self.permits.insert(seq, watch);
    }

    /// One that is over, and why. Frames are counted without a lock: only here is it seen whether there were any.
    fn next_over(&mut self, now: Instant) -> Option<(Arc<Lease>, LostErrorKind)> {
        while let Some(&(at, seq)) = self.due.first()
            && at <= now
        {
            self.due.pop_first();
            let Some(watch) = self.permits.remove(&seq) else {
                continue;
            };
            let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
            if is_over(watch.until) {
                return Some((watch.lease, LostErrorKind::HeldTooLong));
            }
            if is_over(watch.idle_at(now)) {
                return Some((watch.lease, LostErrorKind::Idle));
            }
            self.watch(watch, now);
        }
        None
    }
}

impl Watch {
    /// When it will have been idle for too long, if nobody asks for a frame from `now` on.
    fn idle_at(&self, now: Instant) -> Option<Instant> {
        let idle = self.idle?;
        Some(self.lease.unread_since().unwrap_or(now) + idle)
    }
}
