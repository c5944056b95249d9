//! Revokes permits by an order to the replicas that hold them. A deletion in the store would not do: replicas would
//! adopt the permits again.
//!
//! A permit's response ends with an error; a task with a permit is notified. The slot is released once they are gone,
//! so a revoked permit never runs beside its successor.
//!
//! Tests: `operators/tests/operate/revoking.rs`.

use std::{collections::HashSet, time::Duration};

use tokio::time::{sleep, timeout};

use super::{
    rows::PermitState,
    walk::{SeenPermit, walk},
};
use crate::{keeper::KeeperHandle, operable::Which, permit_id::PermitId};

/// How long a replica waits for revoked permits to end before it answers.
const PATIENCE: Duration = Duration::from_millis(250);
const FIRST_LOOK: Duration = Duration::from_millis(1);

/// Revokes the selected permits in this process, or only some of them, and returns the state of each, running ones
/// first.
pub(super) async fn revoke(
    keeper: &KeeperHandle,
    which: &Which,
    only: Option<PermitId>,
) -> Vec<(SeenPermit, PermitState)> {
    let is_meant = |id| only.is_none_or(|only| only == id);
    let held = holders(keeper, which, is_meant).await;
    for SeenPermit { entry, .. } in &held {
        entry.lease.revoke(entry.id.tenure());
        entry.lease.wake_watchers();
    }
    let mut remaining: HashSet<PermitId> = held.iter().map(|one| one.entry.id).collect();
    let ended = async {
        let mut pause = FIRST_LOOK;
        while !remaining.is_empty() {
            sleep(pause).await;
            pause *= 2;
            let still = holders(keeper, which, |id| remaining.contains(&id)).await;
            remaining = still.into_iter().map(|one| one.entry.id).collect();
        }
    };
    // After the timeout, permits seen in the last look are still running.
    let _ = timeout(PATIENCE, ended).await;
    let of = |one: SeenPermit| {
        let state = if remaining.contains(&one.entry.id) {
            PermitState::Held
        } else {
            PermitState::Ended
        };
        (one, state)
    };
    let mut revoked: Vec<_> = held.into_iter().map(of).collect();
    revoked.sort_by_key(|(_, state)| *state);
    revoked
}

async fn holders(
    keeper: &KeeperHandle,
    which: &Which,
    is_meant: impl Fn(PermitId) -> bool,
) -> Vec<SeenPermit> {
    let mut held = Vec::new();
    walk(keeper, which, |queue, entry| {
        let entry = entry.filter(|entry| !entry.waits && is_meant(entry.id));
        held.extend(entry.map(|entry| SeenPermit::new(queue, entry)));
    })
    .await;
    held
}
