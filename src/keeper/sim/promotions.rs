//! Promotions: a waiter that is granted a slot has it for a short lease only, and a replica that runs confirms that in
//! time.

use std::{collections::BTreeMap, time::Duration};

use super::{LATEST, checks::Snapshot, world::World};
use crate::ledger::{Batch, Exchange, MemberId, ReplicaId};

#[derive(Default)]
pub(super) struct Promotions {
    /// Promotions that were not confirmed, and since when.
    unconfirmed: BTreeMap<MemberId, Duration>,
    /// Until when something troubled each replica.
    troubled: BTreeMap<ReplicaId, Duration>,
    /// Until when the store was in trouble.
    store_troubled: Duration,
    pub confirmed: u64,
}

impl Promotions {
    /// The store has lost data, or its clock was stepped.
    pub fn forget(&mut self) {
        self.unconfirmed.clear();
    }

    pub fn trouble_store(&mut self, until: Duration) {
        self.store_troubled = self.store_troubled.max(until);
    }

    pub fn trouble(&mut self, replica: ReplicaId, until: Duration) {
        let known = self.troubled.entry(replica).or_default();
        *known = (*known).max(until);
    }

    /// Whether anything happened to this replica, or to the store, since then or shortly before.
    fn is_excused(&self, replica: ReplicaId, since: Duration) -> bool {
        let troubled = self.troubled.get(&replica).copied().unwrap_or_default();
        troubled.max(self.store_troubled) + LATEST > since
    }
}

impl World {
    /// G4: no promotion of a replica that runs, and whose exchanges are answered, ends before it is confirmed.
    pub fn check_promotions(
        &mut self,
        run: &Exchange,
        batch: &Batch,
        before: &Snapshot,
        after: &Snapshot,
    ) {
        let now_ms = self.now_ms();
        for (id, until_ms) in &before.holders {
            let Some(&since) = self.promotions.unconfirmed.get(id) else {
                continue;
            };
            let extended = after.holders.get(id).map(|after_ms| after_ms > until_ms);
            if extended == Some(false) {
                continue;
            }
            self.promotions.unconfirmed.remove(id);
            self.promotions.confirmed += u64::from(extended.is_some());
            let released = id.replica == run.replica && batch.release.contains(&id.seq);
            let ended = extended.is_none() && !released && *until_ms <= now_ms;
            let lives = self.replicas.iter().any(|replica| replica.id == id.replica);
            if ended && lives && !self.promotions.is_excused(id.replica, since) {
                self.fail(&format!(
                    "G4: {id:?} was promoted at {since:?}, and it ended"
                ));
            }
        }
        for (id, _) in before.waiters.values() {
            if after.holders.contains_key(id) {
                self.promotions.unconfirmed.insert(*id, self.now);
            }
        }
    }
}
