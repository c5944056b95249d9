//! A permit: one slot, held until it is dropped.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    keeper::{Bounds, Granted, Keepers, Leases, Taken},
    limit::Limit,
    status::Quota,
};

/// One slot of a limit. Dropping it gives the slot back.
///
/// Dropping never blocks, spawns or panics, inside or outside a runtime. The slot is free one round trip later; if
/// this process dies first, or its runtime is gone, when the lease ends.
///
/// # Losing a permit
///
/// While a permit is held its lease in the store is renewed in the background. If that fails for as long as a lease,
/// because the store is gone, or the process stood still, the permit is *lost*: its slot may be given to somebody
/// else. The deadline is conservative, so that a permit counts as held only while its lease is certainly alive. A
/// lost permit stays lost. Permits are an advisory cap, not mutual exclusion for the correctness of data.
#[must_use = "dropping a permit gives its slot back at once"]
pub struct Permit {
    keepers: Arc<Keepers>,
    leases: Leases,
    waited: Duration,
    place: u32,
    passed: Vec<(Arc<Limit>, AcquireErrorKind)>,
    quotas: Vec<Quota>,
}

impl Permit {
    pub(crate) fn new(granted: Granted) -> Self {
        let Granted {
            keepers,
            taken,
            quotas,
        } = granted;
        let Taken {
            leases,
            waited,
            place,
            passed,
            ..
        } = taken;
        Self {
            keepers,
            leases,
            waited,
            place,
            passed,
            quotas,
        }
    }

    /// What tells of a loss without holding the slots.
    pub(crate) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// How its limits stood when it was given, if that was asked for.
    pub(crate) fn quotas(&self) -> &[Quota] {
        &self.quotas
    }

    /// Limits that would have refused it, and only look on.
    pub(crate) fn passed(&self) -> &[(Arc<Limit>, AcquireErrorKind)] {
        &self.passed
    }

    /// Has the permit taken back when it is over.
    pub(crate) fn bound(&self, bounds: Bounds) {
        self.keepers.bound(&self.leases, bounds);
    }

    /// As [`Lease::set_unread`].
    pub(crate) fn set_unread(&self, since: Option<Instant>) {
        self.leases.set_unread(since);
    }

    /// Whether the permit is over, and why.
    pub(crate) fn over(&self) -> Option<LostErrorKind> {
        self.leases.over()
    }

    /// Completes when the permit is over for a reason that `counts`.
    pub(crate) async fn ended(&self, counts: impl Fn(LostErrorKind) -> bool) -> LostErrorKind {
        self.leases.ended(|| self.attend(), counts).await
    }

    /// Sees to it that the leases are looked after.
    pub(crate) fn attend(&self) {
        self.keepers.attend(&self.leases);
    }

    /// Completes when the permit is lost. It never completes for a permit of an in-memory limiter, unless the limiter
    /// is shut down.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) {
        self.ended(|_| true).await;
    }

    /// Whether the permit is lost. Once over, it stays over.
    pub fn is_lost(&self) -> bool {
        self.leases.is_lost()
    }

    /// Until when the permit is certainly held, unless it is renewed before; `None` if it needs no renewal (in memory,
    /// or admitted while the store was down), or is lost.
    pub fn deadline(&self) -> Option<Instant> {
        let deadlines = self.leases.all().iter().map(|lease| lease.deadline());
        let earliest = deadlines.flatten().min();
        earliest.filter(|_| !self.is_lost())
    }

    /// How long it took to get the permit.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The place in the line when it was joined: 1 at the head, 0 if there was no need to wait.
    pub fn place(&self) -> u32 {
        self.place
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.leases.end() {
            self.keepers.release(&self.leases);
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("waited", &self.waited)
            .field("place", &self.place)
            .field("lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}
