//! Revokes permits by an order to the replicas that hold them. A deletion in the store would not do: replicas would
//! adopt the permits again.
//!
//! A permit's response ends with an error; a task with a permit is notified. The slot is released once they are gone,
//! so a revoked permit never runs beside its successor.
//!
//! Tests: `tests/operate/revoking.rs`.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use super::{
    answer::PermitState,
    walk::{Walk, Which, walk},
};
use crate::{
    keeper::Keepers,
    key::Key,
    leases::Lease,
    ledger::{MemberId, ReplicaId},
    limit::LimitId,
    operable::{EntryLook, Visitor},
    permit_id::PermitId,
    status::Usage,
};

/// How long a replica waits for revoked permits to end before it answers.
const PATIENCE: Duration = Duration::from_millis(250);
const FIRST_LOOK: Duration = Duration::from_millis(1);

/// A held permit to revoke.
pub(super) struct HeldPermit {
    pub lease: Arc<Lease>,
    pub id: PermitId,
    pub limit: LimitId,
    pub key: Key,
    pub since: Instant,
}

/// Carries out an order, and returns the state of each permit, running ones first.
pub(super) async fn revoke(
    keepers: &Keepers,
    selector: PermitSelector,
) -> Vec<(HeldPermit, PermitState)> {
    let held = holders(keepers, selector).await;
    for one in &held {
        one.lease.revoke(one.id.tenure());
        one.lease.wake_watchers();
    }
    let mut remaining: HashSet<PermitId> = held.iter().map(|one| one.id).collect();
    let ended = async {
        let mut pause = FIRST_LOOK;
        while !remaining.is_empty() {
            sleep(pause).await;
            pause *= 2;
            let still = holders(keepers, PermitSelector::Among(remaining.clone())).await;
            remaining = still.into_iter().map(|one| one.id).collect();
        }
    };
    // After the timeout, permits seen in the last look are still running.
    let _ = timeout(PATIENCE, ended).await;
    let of = |one: HeldPermit| {
        let state = match remaining.contains(&one.id) {
            true => PermitState::Held,
            false => PermitState::Ended,
        };
        (one, state)
    };
    let mut revoked: Vec<_> = held.into_iter().map(of).collect();
    revoked.sort_by_key(|(_, state)| *state);
    revoked
}

async fn holders(keepers: &Keepers, selector: PermitSelector) -> Vec<HeldPermit> {
    let mut holders = Holders {
        selector,
        replica: ReplicaId::from_bits(0),
        queue: (LimitId(0), Key::SHARED),
        held: Vec::new(),
    };
    walk(keepers, &mut holders).await;
    holders.held
}

/// The permits selected by an order in this process.
pub(super) enum PermitSelector {
    Among(HashSet<PermitId>),
    OfKey(Which),
    Everybody,
}

/// Held permits of all limits.
struct Holders {
    selector: PermitSelector,
    replica: ReplicaId,
    /// The current queue.
    queue: (LimitId, Key),
    held: Vec<HeldPermit>,
}

impl Visitor for Holders {
    fn queue(&mut self, limit: LimitId, key: &Key, ledger: &str, _: &dyn Fn() -> Usage) -> bool {
        let counts = match &self.selector {
            PermitSelector::OfKey(which) => which.counts(limit, key, ledger),
            PermitSelector::Among(_) | PermitSelector::Everybody => true,
        };
        if counts {
            self.queue = (limit, key.clone());
        }
        counts
    }

    fn entry(&mut self, entry: EntryLook<'_>) {
        let (replica, seq) = (self.replica, entry.lease.seq());
        let id = PermitId::new(MemberId { replica, seq }, entry.tenure);
        let is_meant = !matches!(&self.selector, PermitSelector::Among(ids) if !ids.contains(&id));
        if entry.waits || !is_meant {
            return;
        }
        let (limit, key) = self.queue.clone();
        self.held.push(HeldPermit {
            lease: entry.lease.clone(),
            id,
            limit,
            key,
            since: entry.since,
        });
    }
}

impl Walk for Holders {
    fn enter(&mut self, replica: ReplicaId) {
        self.replica = replica;
    }
}
