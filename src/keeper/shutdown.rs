//! The shutdown of a keeper: how long it waits for permits, and for the store to confirm their releases.

use std::{collections::HashSet, mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{core::Core, lock::Keeper};
use crate::{ledger::Seq, limit::MAX_WAIT, status::ShutdownReport};

/// Time without progress after which a shutdown waits for no more releases, in `store_timeout`s. A release can take two: one
/// until an exchange that has no answer can no longer run, and one for the next.
const STALL_TIMEOUTS: u32 = 2;

impl Keeper {
    /// Shuts it down. Permits have until the deadline; then, or as soon as all are released, the store has to confirm the
    /// releases. It has [`STALL_TIMEOUTS`] for each step of progress, and one `store_timeout` after the deadline for all.
    pub async fn shutdown(self: &Arc<Self>, deadline: Duration) -> ShutdownReport {
        let (refused, mut released) =
            self.with(|core, now| (core.close(now), core.held_by_permits()));
        let deadline = Instant::now() + deadline.min(MAX_WAIT);
        wait_until(self, |core| match core.holds_nothing() {
            true => None,
            false => Some(deadline),
        })
        .await;
        let lost = self.with(|core, now| {
            let held = core.held_by_permits();
            released.retain(|name| !held.contains(name));
            core.lose_all(now)
        });
        let store_timeout = self.peek(|core| core.settings().store_timeout);
        let (mut progress, mut stalls_at) = (None, deadline);
        wait_until(self, |core| {
            if core.is_quiet() {
                return None;
            }
            let now_done = Some(core.confirmed());
            if mem::replace(&mut progress, now_done) != now_done {
                stalls_at = Instant::now() + STALL_TIMEOUTS * store_timeout;
            }
            Some(stalls_at.min(deadline + store_timeout))
        })
        .await;
        let unconfirmed: HashSet<Seq> = self.peek(|core| core.unconfirmed().collect());
        released.retain(|name| !unconfirmed.contains(name));
        ShutdownReport {
            refused,
            released: released.len(),
            lost,
            unconfirmed: unconfirmed.len(),
        }
    }
}

/// Waits until a moment that may move, or until there is none. By the driver's timer, since the caller's runtime may have
/// none. Without a driver nothing can be waited for: then leases have to end by themselves.
async fn wait_until(keeper: &Arc<Keeper>, mut until: impl FnMut(&Core) -> Option<Instant>) {
    let Some(first) = keeper.peek(&mut until) else {
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
            .peek(&mut until)
            .filter(|until| is_driven && now < *until)
        else {
            break;
        };
        // It has rung, and there was progress since it was set.
        if alarm <= now {
            alarm = until;
            keeper.with(|core, _| core.set_alarm(Some(alarm)));
        }
        changed.await;
    }
    keeper.with(|core, _| core.set_alarm(None));
}
