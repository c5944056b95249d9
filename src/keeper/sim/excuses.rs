//! Excuses from a guarantee, for whom and for how long, and the overshoot of limits meanwhile.
//!
//! | event | excuse | until |
//! | --- | --- | --- |
//! | the store forgets, or an older copy takes over, or its clock is stepped forward | G1, G2 for the holders at the time: they may be missing, and return past the limit | G2: a lease later, or two store timeouts after their replica heard of the loss; G1: they end |
//! | a fallback admits a permit without the store | G1 for that permit | it ends |
//! | an older copy takes over | G6 for names that the copy restores | they have waited, and a lease |
//! | an exchange runs once more after its answer | G6 for the names that it admits | they have waited, and a lease |
//! | a replica is without the store, or a ledger of it, for ten leases, and forgets releases | G6 for these names in the ledgers | the same |
//! | an exchange from before a step back runs late | the same: its end is too late by the step | the same |
//! | the clock is stepped back | adds its length to G4, G5, G6 | |
//! | a replica that subscribes to its wake-ups has no connection, as the store can see | G3, G4 for its waiters: they may be passed over | it is connected |
//!
//! Nothing else is excused.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{LONGEST_HOLD, LONGEST_STALL, PATIENCE, STORE_TIMEOUT, checks::Snapshot, world::World};
use crate::{
    ledger::{Exchange, MemberId, ReplicaId, Seq},
    part::Part,
};

#[derive(Default)]
pub(super) struct Excuses {
    /// Permits that may be held past the limit, and since when.
    excused: BTreeMap<MemberId, Duration>,
    /// Permits that the store may lack, and until when; with their part of the store.
    missing: BTreeMap<MemberId, (Duration, Part)>,
    /// Names that may be in a ledger though their keeper has released them.
    revived: BTreeSet<MemberId>,
    /// Total by which the store's clock was stepped back.
    pub stepped_back: Duration,
    pub over: Overshoot,
    over_since: BTreeMap<String, Duration>,
}

/// Units held by clients, less the limit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Overshoot {
    pub peak: u32,
    pub longest: Duration,
}

impl Excuses {
    pub fn is_excused(&self, id: MemberId) -> bool {
        self.excused.contains_key(&id)
    }

    pub fn may_be_missing(&self, id: MemberId, now: Duration) -> bool {
        self.missing
            .get(&id)
            .is_some_and(|(until, _)| *until >= now)
    }

    pub fn is_revived(&self, id: MemberId) -> bool {
        self.revived.contains(&id)
    }

    /// Whether a holder may be adopted: the store has lost it, or never knew it because a fallback admitted it.
    pub fn may_be_adopted(&mut self, id: MemberId, is_new: bool, now: Duration) -> bool {
        if is_new {
            self.note_admission(id, now);
        }
        self.is_excused(id)
    }

    /// A fallback has admitted a permit.
    pub fn note_admission(&mut self, id: MemberId, now: Duration) {
        self.excused.entry(id).or_insert(now);
    }

    /// A slot whose grant the store has reported since then serves another permit.
    pub fn note_reuse(&mut self, id: MemberId, now: Duration) {
        self.excused.entry(id).and_modify(|since| *since = now);
    }

    /// An exchange runs after its sender is done with it: names that it admits may outlive their requests.
    pub fn note_revival(&mut self, exchange: &Exchange) {
        let batches = exchange.batches.iter();
        let single = batches.flat_map(|batch| {
            let asks = batch.acquire.iter().map(|ask| ask.seq);
            asks.chain(batch.adopt.iter().copied())
        });
        let claims = exchange.claims.iter().flat_map(|claim| &claim.asks);
        let seqs = single.chain(claims.map(|ask| ask.seq));
        let replica = exchange.replica;
        self.revived
            .extend(seqs.map(|seq| MemberId { replica, seq }));
    }

    /// Its release has failed until it was forgotten.
    pub fn note_given_up(&mut self, id: MemberId) {
        self.revived.insert(id);
    }

    /// Since when a permit was excused that should have ended by now.
    pub fn is_overdue(&self, id: MemberId, now: Duration, lease: Duration) -> Option<Duration> {
        let since = *self.excused.get(&id)?;
        let longest = PATIENCE + LONGEST_HOLD + LONGEST_STALL + lease;
        (since + longest < now).then_some(since)
    }

    /// Current overshoot of each ledger's limit.
    pub fn measure(&mut self, overs: &BTreeMap<String, u32>, now: Duration) {
        let is_over = |key: &str| overs.get(key).is_some_and(|over| *over > 0);
        for (key, since) in &self.over_since {
            if !is_over(key) {
                self.over.longest = self.over.longest.max(now - *since);
            }
        }
        self.over_since.retain(|key, _| is_over(key));
        for (key, over) in overs.iter().filter(|(_, over)| **over > 0) {
            self.over.peak = self.over.peak.max(*over);
            self.over_since.entry(key.clone()).or_insert(now);
        }
    }
}

impl World {
    /// A replica has heard that this part of the store has lost all data. Unless other faults delay it, its permits are
    /// soon back.
    pub fn returns_soon(&mut self, replica: usize, part: Part) {
        let (of, until) = (self.replicas[replica].id, self.now + 2 * STORE_TIMEOUT);
        if self.mix == "data loss" {
            let missing = self.excuses.missing.iter_mut();
            let its = missing.filter(|(id, (before, lost))| {
                id.replica == of && *lost == part && *before > until
            });
            for (_, one) in its {
                one.0 = until;
                self.totals.returned += 1;
            }
        }
    }

    /// Compares the ledgers with their earlier state. A step of the clock shortens all leases.
    pub fn data_was_lost(&mut self, stepped: bool) {
        let ledgers = self.ledgers.iter();
        let after: BTreeMap<_, _> = ledgers
            .map(|(key, ledger)| (key.clone(), Snapshot::of(ledger)))
            .collect();
        self.promotions.forget();
        self.used.begin_anew();
        let before = std::mem::take(&mut self.picture);
        let until = self.now + self.longest_lease();
        self.excuses
            .missing
            .values_mut()
            .for_each(|one| one.0 = until);
        for (key, ledger) in &before {
            for (id, until_ms) in &ledger.holders {
                let copy = after.get(key).and_then(|copy| copy.holders.get(id));
                if stepped || copy.is_none_or(|copy| copy < until_ms) {
                    self.excuses.excused.entry(*id).or_insert(self.now);
                    let part = self.part_of_ledger(key);
                    self.excuses.missing.insert(*id, (until, part));
                }
            }
        }
        for (key, ledger) in &after {
            let (before, waiters) = (before.get(key), ledger.waiters.values().map(|(id, _)| id));
            let names = ledger.holders.keys().chain(waiters);
            // A release that was acknowledged before is not repeated.
            let gone = |id: &MemberId| before.is_none_or(|before| !before.has(*id));
            let revived = names
                .filter(|id| gone(id) || !self.is_known(key, **id))
                .copied();
            let revived: Vec<_> = revived.collect();
            self.excuses.revived.extend(revived);
        }
        self.picture = after;
    }

    /// Its keeper was without the store until it forgot releases.
    pub fn excuse_names_of(&mut self, replica: usize) {
        let of = self.replicas[replica].id;
        let mut unknown: Vec<MemberId> = Vec::new();
        for (key, ledger) in &self.picture {
            let waiters = ledger.waiters.values().map(|(id, _)| id);
            let names = ledger.holders.keys().chain(waiters);
            unknown.extend(names.filter(|id| id.replica == of && !self.is_known(key, **id)));
        }
        self.excuses.revived.extend(unknown);
    }

    /// Whether its keeper knows a name of this ledger.
    pub fn is_known(&self, ledger: &str, id: MemberId) -> bool {
        let of = |id: ReplicaId| self.replicas.iter().find(|replica| replica.id == id);
        of(id.replica).is_some_and(|replica| replica.core.knows(ledger, id.seq as Seq))
    }
}
