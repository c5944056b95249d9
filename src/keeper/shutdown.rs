//! The shutdown of a keeper: how long it waits for permits, and for the store to confirm their releases. The decisions
//! are made without IO, so that a simulation can take the same steps.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{core::Core, lock::Keeper};
use crate::{ledger::Seq, limit::MAX_WAIT, status::ShutdownReport};

/// Time without progress after which a shutdown gives up on releases, in `store_timeout`s. A release can take two: one
/// until an unanswered exchange can no longer run, and one for the next exchange.
const STALL_TIMEOUTS: u32 = 2;

/// A shutdown, as the core sees it: permits are given time first, then the store.
pub(super) struct Shutdown {
    deadline: Instant,
    refused: usize,
    lost: usize,
    /// Names of the slots that permits held at the beginning, and released in time.
    released: HashSet<Seq>,
    /// Confirmations by the store when last checked, and the deadline for further progress.
    progress: Option<((u64, usize, usize), Instant)>,
}

impl Shutdown {
    /// Begins a shutdown in which permits have this much time.
    pub fn begin(core: &mut Core, time: Duration, now: Instant) -> Self {
        Self {
            refused: core.close(now),
            released: core.held_by_permits(),
            lost: 0,
            deadline: now + time.min(MAX_WAIT),
            progress: None,
        }
    }

    /// Deadline for permits to be released; `None`: none is left.
    pub fn permits_have_until(&self, core: &Core) -> Option<Instant> {
        (!core.holds_nothing()).then_some(self.deadline)
    }

    /// The permits' time is over.
    pub fn lose_all(&mut self, core: &mut Core, now: Instant) {
        let held = core.held_by_permits();
        self.released.retain(|name| !held.contains(name));
        self.lost = core.lose_all(now);
    }

    /// Deadline for the store to confirm further releases; `None`: all are confirmed.
    pub fn store_has_until(&mut self, core: &Core, now: Instant) -> Option<Instant> {
        if core.is_quiet() {
            return None;
        }
        let store_timeout = core.settings().store_timeout;
        let confirmed = core.confirmed();
        let stalls_at = match self.progress {
            Some((before, stalls_at)) if before == confirmed => stalls_at,
            _ => now + STALL_TIMEOUTS * store_timeout,
        };
        self.progress = Some((confirmed, stalls_at));
        Some(stalls_at.min(self.deadline + store_timeout))
    }

    /// The fate of the permits, once the store's time is over too.
    pub fn report(mut self, core: &Core) -> ShutdownReport {
        let unconfirmed: HashSet<Seq> = core.unconfirmed().collect();
        self.released.retain(|name| !unconfirmed.contains(name));
        ShutdownReport {
            refused: self.refused,
            released: self.released.len(),
            lost: self.lost,
            unconfirmed: unconfirmed.len(),
        }
    }
}

impl Keeper {
    /// Shuts the keeper down. Permits have until the deadline. After that, or as soon as all are released, the store
    /// has [`STALL_TIMEOUTS`] for each step of progress, and until one `store_timeout` after the deadline in total, to
    /// confirm the releases.
    pub async fn shutdown(self: &Arc<Self>, deadline: Duration) -> ShutdownReport {
        let mut shutdown = self.with(|core, now| Shutdown::begin(core, deadline, now));
        wait_until(self, |core, _| shutdown.permits_have_until(core)).await;
        self.with(|core, now| shutdown.lose_all(core, now));
        wait_until(self, |core, now| shutdown.store_has_until(core, now)).await;
        self.peek(|core| shutdown.report(core))
    }
}

/// Waits for a deadline that may move, until there is none. Uses the driver's timer, since the caller's runtime may
/// have none. Without a driver the wait ends: leases expire.
async fn wait_until(
    keeper: &Arc<Keeper>,
    mut until: impl FnMut(&Core, Instant) -> Option<Instant>,
) {
    let Some(first) = keeper.peek(|core| until(core, Instant::now())) else {
        return;
    };
    let mut alarm = first;
    keeper.with(|core, _| core.set_alarm(Some(alarm)));
    let is_driven = keeper.start_driver().is_ok();
    keeper.watch_driver();
    loop {
        let changed = keeper.changed.notified();
        let now = Instant::now();
        let Some(until) = keeper
            .peek(|core| until(core, now))
            .filter(|until| is_driven && now < *until)
        else {
            break;
        };
        // The alarm fired, but there was progress since it was set.
        if alarm <= now {
            alarm = until;
            keeper.with(|core, _| core.set_alarm(Some(alarm)));
        }
        changed.await;
    }
    keeper.with(|core, _| core.set_alarm(None));
}
