//! The shutdown of a keeper: how long it waits for requests and permits, and for the store to confirm releases. The decisions
//! are made without IO, so that a simulation can take the same steps.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{context::earliest, core::Core, lock::Keeper};
use crate::{ledger::Seq, limit::MAX_WAIT, status::ShutdownReport};

/// Time without progress after which a shutdown gives up on releases, in `store_timeout`s. A release can take two: one
/// until an unanswered exchange can no longer run, and one for the next exchange.
const STALL_TIMEOUTS: u32 = 2;

/// A shutdown, as the core sees it: requests and permits are given time first, then the store.
pub(super) struct Shutdown {
    refused: usize,
    /// Names of the slots that permits held at the beginning, or at the end of the grace.
    held: HashSet<Seq>,
    /// Confirmations by the store when last checked, and the deadline for further progress.
    progress: Option<((u64, usize, usize), Instant)>,
}

impl Shutdown {
    /// Begins a shutdown with this grace.
    pub fn begin(core: &mut Core, grace: Duration) -> Self {
        core.close(core.now() + grace.min(MAX_WAIT));
        Self {
            refused: 0,
            held: core.held_by_permits(),
            progress: None,
        }
    }

    /// Deadline for requests to be served and permits to be released; `None`: none is left.
    pub fn grace_lasts_until(&self, core: &Core) -> Option<Instant> {
        let until = core.context().ending.grace_ends_at();
        until.filter(|_| !core.is_served())
    }

    /// Refuses the requests, and loses the slots, that are left.
    pub fn end_grace(&mut self, core: &mut Core) {
        self.held.extend(core.held_by_permits());
        self.refused = core.end_grace();
    }

    /// Deadline for the store to confirm further releases; `None`: all are confirmed.
    pub fn store_has_until(&mut self, core: &Core, now: Instant) -> Option<Instant> {
        if core.is_quiet() {
            return None;
        }
        let store_timeout = core.context().settings.store_timeout;
        let confirmed = core.confirmed();
        let stalls_at = match self.progress {
            Some((before, stalls_at)) if before == confirmed => stalls_at,
            _ => now + STALL_TIMEOUTS * store_timeout,
        };
        self.progress = Some((confirmed, stalls_at));
        let grace_ended_at = core.context().ending.grace_ends_at().unwrap_or(now);
        Some(stalls_at.min(grace_ended_at + store_timeout))
    }

    /// The fate of the permits, once the store's time is over too.
    pub fn report(self, core: &Core) -> ShutdownReport {
        let unconfirmed: HashSet<Seq> = core.unconfirmed().collect();
        let ending = &core.context().ending;
        let (mut lost, mut released) = (0, 0);
        for name in self.held {
            lost += usize::from(ending.has_lost(name));
            released += usize::from(!ending.has_lost(name) && !unconfirmed.contains(&name));
        }
        ShutdownReport {
            refused: self.refused,
            released,
            lost,
            unconfirmed: unconfirmed.len(),
        }
    }
}

impl Keeper {
    /// Shuts the keeper down. Requests that wait, and permits, have the grace. After that, or as soon as all are gone, the
    /// store has [`STALL_TIMEOUTS`] for each step of progress, and until one `store_timeout` after the grace in total, to
    /// confirm the releases.
    pub async fn shutdown(self: &Arc<Self>, grace: Duration) -> ShutdownReport {
        let mut shutdown = self.with(|core| Shutdown::begin(core, grace));
        wait_until(self, |core, _| shutdown.grace_lasts_until(core)).await;
        self.with(|core| shutdown.end_grace(core));
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
    let set_alarm = |at| keeper.with(|core| core.context_mut().ending.set_alarm(at));
    keeper.with(|core| {
        let ending = &mut core.context_mut().ending;
        ending.set_alarm(earliest(ending.alarm(), Some(first)));
    });
    keeper.watch_driver();
    loop {
        // The driver may end meanwhile, with its runtime. Only if it did: a start is a step, and wakes all waiting calls.
        let is_driven = keeper.peek(|core| core.context().driven) || keeper.start_driver().is_ok();
        let changed = keeper.changed.notified();
        let now = Instant::now();
        let (until, alarm) = keeper.peek(|core| (until(core, now), core.context().ending.alarm()));
        let Some(until) = until.filter(|until| is_driven && now < *until) else {
            break;
        };
        // An earlier alarm, perhaps of another call, also wakes this one, which then sets its own.
        if alarm.is_none_or(|alarm| alarm > until) {
            set_alarm(Some(until));
        }
        changed.await;
    }
    set_alarm(None);
}
