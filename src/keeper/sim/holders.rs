//! Checks of holders from their own view: G1, G2.

use std::{collections::BTreeMap, sync::Arc};

use super::{kinds::Kind, replica::Replica, world::World};
use crate::{leases::Lease, ledger::MemberId};

/// Units held in one ledger.
#[derive(Default)]
struct Held {
    all: u32,
    without_excuse: u32,
    /// Permits without an excuse.
    permits: u32,
}

impl World {
    /// G2: a client that believes it holds a slot does, and an ended permit stays ended. G1: the holders do not exceed
    /// the limit.
    pub fn check_clients(&mut self) {
        let now = self.local();
        let mut held: BTreeMap<String, Held> = BTreeMap::new();
        for number in 0..self.clients.len() {
            let client = &self.clients[number];
            let replica = &self.replicas[client.replica];
            let is_same = client.life == replica.life;
            let Some(leases) = client.holds.clone().filter(|_| is_same) else {
                continue;
            };
            let over = |lease: &Arc<Lease>| lease.is_over(now);
            if leases.all().iter().any(over) {
                self.clients[number].over = true;
                continue;
            }
            if client.over {
                self.fail(&format!(
                    "G2: client {number}'s permit was over and came back"
                ));
            }
            let replica = client.replica;
            for lease in leases.all() {
                let Replica { id, core, .. } = &self.replicas[replica];
                let id = MemberId {
                    replica: *id,
                    seq: lease.seq(),
                };
                let key = core.ledger_of(lease);
                self.check_holder(number, id, &key, lease);
                let held = held.entry(key).or_default();
                held.all += id.weight();
                if !self.excuses.is_excused(id) {
                    held.without_excuse += id.weight();
                    held.permits += 1;
                }
            }
        }
        self.check_held(&held);
    }

    fn check_holder(&mut self, client: usize, id: MemberId, key: &str, lease: &Lease) {
        if lease.deadline().is_none() && self.kind != Kind::Memory {
            // Admitted by a fallback.
            return self.excuses.note_admission(id, self.now);
        }
        let now_ms = self.now_ms();
        let ledger = self.picture.get(key);
        let holds = ledger.is_some_and(|ledger| ledger.holds(id, now_ms));
        if !holds && !self.excuses.may_be_missing(id, self.now) {
            self.fail(&format!(
                "G2: client {client} believes to hold {id:?}, the store does not"
            ));
        }
        if let Some(since) = self.excuses.is_overdue(id, self.now, self.longest_lease()) {
            self.fail(&format!("G1: {id:?}, excused since {since:?}, holds on"));
        }
    }

    /// Only excused holders may exceed the limit: the store lost them, or a fallback admitted them.
    fn check_held(&mut self, held: &BTreeMap<String, Held>) {
        let mut overs = BTreeMap::new();
        for (key, held) in held {
            let Some(largest) = self.largest.get(key).copied() else {
                // The store does not know it yet.
                continue;
            };
            if held.without_excuse > largest && held.permits > 1 {
                let count = held.without_excuse;
                self.fail(&format!("G1: clients hold {count} units of {largest}"));
            }
            overs.insert(key.clone(), held.all.saturating_sub(largest));
        }
        self.excuses.measure(&overs, self.now);
        self.totals.over = self.excuses.over;
    }
}
