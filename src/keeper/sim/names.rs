//! Checks of names in the ledgers, over some time: G4, G6.

use std::{collections::BTreeMap, time::Duration};

use super::{LATEST, LEASE, POLL, STORE_TIMEOUT, WAITER_TTL, client::Client, world::World};
use crate::ledger::MemberId;

impl World {
    /// G4: a granted client learns of its slot in time. G6: no name unknown to its keeper stays in a ledger.
    pub fn check_names(&mut self) {
        let (now_ms, now) = (self.now_ms(), self.local());
        let (mut strangers, mut ungreeted) = (BTreeMap::new(), BTreeMap::new());
        let (mut given_up_at, mut given_up) = (BTreeMap::new(), Vec::new());
        for (key, ledger) in &self.picture {
            let holding = ledger.holding(now_ms).map(|id| (id, true));
            let waiters = ledger.waiters.values().map(|(id, _)| (*id, false));
            for (id, holds) in holding.chain(waiters) {
                let mut replicas = self.replicas.iter();
                let Some(number) = replicas.position(|replica| replica.id == id.replica) else {
                    continue;
                };
                let replica = &self.replicas[number];
                let stalls = replica.stalled_until + STORE_TIMEOUT > self.now;
                if stalls || self.has_given_up_releases(number) {
                    continue;
                }
                let expected = replica.core.expects(key, id.seq);
                if !expected && let Some(release) = replica.core.release_of(key, id.seq) {
                    given_up_at.insert(id, release.forget_at());
                } else if !expected {
                    if self.given_up_at.get(&id).is_some_and(|at| *at <= now) {
                        given_up.push(id);
                    }
                    if holds || !self.excuses.is_revived(id) {
                        let since = self.strangers.get(&id).copied().unwrap_or(self.now);
                        strangers.insert(id, since);
                    }
                } else if holds && self.is_awaited(number, id) {
                    let since = self.ungreeted.get(&id).copied().unwrap_or(self.now);
                    ungreeted.insert(id, since);
                }
            }
        }
        (self.strangers, self.ungreeted) = (strangers, ungreeted);
        self.given_up_at.append(&mut given_up_at);
        given_up
            .into_iter()
            .for_each(|id| self.excuses.note_given_up(id));
        self.check_strangers();
        self.check_ungreeted();
    }

    /// Whether a client has polled for its answer, and waits for this slot alone.
    fn is_awaited(&self, replica: usize, id: MemberId) -> bool {
        let core = &self.replicas[replica].core;
        let awaits = |client: &Client| {
            let names = client.asked.map(|asked| core.names_of(asked));
            client.replica == replica
                && client.holds.is_none()
                && client.looks_at <= self.now
                && names.is_some_and(|names| names == [id.seq])
        };
        self.clients.iter().any(awaits)
    }

    fn check_strangers(&self) {
        let usual = 2 * STORE_TIMEOUT + POLL;
        for (id, since) in &self.strangers {
            let time = if self.excuses.is_revived(*id) {
                usual + LATEST + self.longest_lease() + self.excuses.stepped_back
            } else {
                usual
            };
            if *since + time < self.now {
                self.fail(&format!("G6: {id:?} is a ghost since {since:?}"));
            }
        }
    }

    fn check_ungreeted(&self) {
        if self.faults.trouble_the_store() {
            return;
        }
        // Up to three delays: an answer from before the grant, or so soon after it that the waiter is not asked for
        // yet, postpones the poll; the poll itself; and the question that it causes. In a crowd a poll comes after the
        // renewals of all others.
        let crowd = self.crowd.as_ref();
        let way = crowd.map_or(Duration::ZERO, |crowd| crowd.way + LEASE / 9);
        let round_trips = Duration::from_millis(25) + 3 * (self.faults.slow + way);
        // A waiter with a later ticket than the head's seems to be still queued: only a roll call can tell.
        let asked = if self.excuses.stepped_back.is_zero() {
            POLL + POLL / 10
        } else {
            WAITER_TTL + POLL + POLL / 10
        };
        let late = |(_, since): &(_, &Duration)| **since + asked + round_trips < self.now;
        if let Some((id, since)) = self.ungreeted.iter().find(late) {
            self.fail(&format!(
                "G4: {id:?} was granted a slot at {since:?} and has not heard of it"
            ));
        }
    }
}
