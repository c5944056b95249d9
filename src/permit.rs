//! A permit: one slot, held until it is dropped.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::keeper::{Granted, Lease, Shared};

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
    shared: Arc<Shared>,
    lease: Arc<Lease>,
    waited: Duration,
    place: u32,
}

impl Permit {
    pub(crate) fn new(granted: Granted) -> Self {
        let Granted {
            shared,
            lease,
            waited,
            place,
        } = granted;
        Self {
            shared,
            lease,
            waited,
            place,
        }
    }

    /// What tells of a loss without holding the slot.
    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Sees to it that the leases are looked after.
    pub(crate) fn attend(&self) {
        // Without a runtime nobody does; the deadline holds all the same.
        let _ = self.shared.start_driver();
    }

    /// Completes when the permit is lost. It never completes for a permit of an in-memory limiter, unless the limiter
    /// is shut down.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) {
        self.lease.lost(|| self.attend()).await;
    }

    /// Whether the permit is lost. Once over, it stays over.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Until when the permit is certainly held, unless it is renewed before; `None` if it needs no renewal (in memory,
    /// or admitted while the store was down), or is lost.
    pub fn deadline(&self) -> Option<Instant> {
        self.lease.deadline()
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
        self.shared.release(&self.lease);
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
