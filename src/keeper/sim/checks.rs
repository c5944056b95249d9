//! The checks after each exchange, against the ledgers themselves: G1 to G4.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{agenda::Sent, kinds::Kind, replica::Replica, world::World};
use crate::{
    leases::{Lease, RIGHT},
    ledger::{
        Batch, Exchange, Ledger, MemberId, PaceState, ReplicaId, Reply, Seq, Standing, TenantId,
        weight_of,
    },
};

/// A wake-up takes up to 2 ms in a fault-free world, and another one if it overtook the answer that grants the right.
const LONGEST_RECALL: Duration = Duration::from_millis(3);
/// The store's clock advances once more for each exchange.
const CLOCK_RUNS_AHEAD: Duration = Duration::from_millis(1);

/// The ledgers after the latest change.
pub(super) type Picture = BTreeMap<String, Snapshot>;

/// A ledger at one moment, including expired entries not yet swept.
#[derive(Default)]
pub(super) struct Snapshot {
    /// With the ends of their leases, in store milliseconds.
    pub holders: BTreeMap<MemberId, u64>,
    /// By ticket, with the end of their replicas' heartbeats.
    pub waiters: BTreeMap<i64, (MemberId, u64)>,
    /// Replicas with waiters that subscribe to wake-ups.
    listeners: BTreeSet<ReplicaId>,
    pause_end_ms: Option<u64>,
    /// Of a limit that finds its own value.
    pace: Option<PaceState>,
    /// Tenants of the waiters of a fair ledger, and the tickets of their places in the lines.
    ///
    /// A name that was given up before its acquire was answered may keep its place. If the acquire runs once more, the
    /// name waits with another ticket, and may be granted a slot in the old place, which is released at once.
    pub lines: BTreeMap<MemberId, (TenantId, i64)>,
}

impl Snapshot {
    pub fn of(ledger: &Ledger) -> Self {
        let mut listeners = BTreeSet::new();
        let mut waiter = |(ticket, id): (i64, MemberId)| {
            let (alive_ms, listens) = ledger.heartbeat_of(id.replica).unwrap_or_default();
            if listens {
                listeners.insert(id.replica);
            }
            (ticket, (id, alive_ms))
        };
        Self {
            holders: ledger.holders().collect(),
            waiters: ledger.waiters().map(&mut waiter).collect(),
            listeners,
            pause_end_ms: ledger.pause_end_ms(),
            pace: ledger.pace_of(),
            lines: ledger
                .lines()
                .rev()
                .map(|(tenant, ticket, id)| (id, (tenant, ticket)))
                .collect(),
        }
    }

    /// Holders whose lease has not ended.
    pub fn holding(&self, now_ms: u64) -> impl Iterator<Item = MemberId> {
        let holders = self.holders.iter();
        holders
            .filter(move |(_, until_ms)| **until_ms > now_ms)
            .map(|(id, _)| *id)
    }

    /// The total weight of these holders.
    pub fn units(&self, now_ms: u64) -> u32 {
        self.holding(now_ms).map(MemberId::weight).sum()
    }

    pub fn holds(&self, id: MemberId, now_ms: u64) -> bool {
        self.holders
            .get(&id)
            .is_some_and(|until_ms| *until_ms > now_ms)
    }

    /// The limit by which a batch is decided on, apart from a pause.
    fn limit(&self, batch: &Batch) -> u32 {
        let start = PaceState::new(batch.limit);
        let state = self.pace.as_ref().unwrap_or(&start);
        let results = batch.results.as_ref();
        results.map_or(batch.limit, |results| state.pacing(results).limit)
    }

    /// What a pause leaves of a limit: nothing, and after its end as many units as have come free, one after the other over
    /// five seconds, of which the first comes at once.
    fn in_force(&self, limit: u32, now_ms: u64) -> u32 {
        let Some(end_ms) = self.pause_end_ms else {
            return limit;
        };
        let comes_ms = |unit: u32| end_ms as f64 + 5_000.0 * f64::from(unit) / f64::from(limit);
        let came = (0..limit).filter(|unit| comes_ms(*unit) < now_ms as f64);
        came.count() as u32
    }

    pub fn has(&self, id: MemberId) -> bool {
        self.holders.contains_key(&id) || self.waiters.values().any(|(waiter, _)| *waiter == id)
    }

    /// Waiters whose replica is alive.
    pub fn waiting(&self, now_ms: u64) -> impl Iterator<Item = (i64, MemberId)> {
        let waiters = self.waiters.iter();
        waiters
            .filter(move |(_, (_, alive_ms))| *alive_ms >= now_ms)
            .map(|(ticket, (id, _))| (*ticket, *id))
    }

    fn ticket(&self, id: MemberId) -> Option<i64> {
        let mut waiters = self.waiters.iter();
        waiters
            .find(|(_, (waiter, _))| *waiter == id)
            .map(|(ticket, _)| *ticket)
    }
}

impl World {
    pub fn now_ms(&self) -> u64 {
        match self.kind {
            // Without a store nothing expires.
            Kind::Memory => 0,
            _ => self.store_us() / 1_000,
        }
    }

    /// Checks the changes made by an exchange, and the knowledge of the clients affected.
    pub fn check(&mut self, exchange: &Exchange, more: bool) {
        self.totals.exchanges += 1;
        self.note_moves(exchange);
        for batch in &exchange.batches {
            let after = self.ledgers.get(&batch.key);
            let after = after.map(Snapshot::of).unwrap_or_default();
            let before = self.picture.remove(&*batch.key).unwrap_or_default();
            let largest = self.largest.entry(batch.key.to_string()).or_default();
            *largest = (*largest).max(after.limit(batch));
            self.check_cap(exchange, batch, &before, &after);
            self.check_order(exchange, batch, &before, &after);
            self.check_use(exchange, batch, more, &after);
            self.check_promotions(exchange, batch, &before, &after);
            self.check_shares(exchange, batch, &before, &after);
            self.granted.extend(after.holders.keys());
            self.picture.insert(batch.key.to_string(), after);
        }
        self.picture
            .retain(|_, ledger| !(ledger.holders.is_empty() && ledger.waiters.is_empty()));
        if self.looks_closely(self.totals.exchanges, 32) {
            self.check_clients();
            self.check_circles();
            self.check_names();
        }
    }

    /// Notes tickets of claims, which tell when the claim arrived, and not when it joined this queue.
    fn note_moves(&mut self, exchange: &Exchange) {
        let (replica, now_us) = (exchange.replica, self.store_us() as i64);
        let moved = exchange
            .claims
            .iter()
            .filter(|claim| claim.ticket.is_some());
        for ask in moved.flat_map(|claim| &claim.asks) {
            let id = MemberId {
                replica,
                seq: ask.seq,
            };
            self.moved.entry(id).or_insert(now_us);
        }
    }

    /// G1: no slot is granted past the limit of the granting replica, nor past what a pause leaves of it, except to a
    /// permit that weighs more than the limit, and is alone.
    /// Only a holder that was admitted without the store, or lost by it, returns regardless.
    pub fn check_cap(
        &mut self,
        run: &Exchange,
        batch: &Batch,
        before: &Snapshot,
        after: &Snapshot,
    ) {
        let now_ms = self.now_ms();
        let whole = after.limit(batch);
        let (held, limit) = (after.units(now_ms), after.in_force(whole, now_ms));
        for id in after.holding(now_ms) {
            if before.holders.contains_key(&id) {
                continue;
            }
            if is_adopted(run, batch, id) {
                let is_new = !self.granted.contains(&id);
                if !self.excuses.may_be_adopted(id, is_new, self.now) {
                    self.fail(&format!("G1: {id:?} was adopted, and nobody had lost it"));
                }
            } else if held > limit && (held > id.weight() || limit == 0 || limit < whole) {
                self.fail(&format!(
                    "G1: {id:?} was given a slot: {held} units of {limit}"
                ));
            }
        }
        let ordinary = || {
            let holding = after.holding(now_ms);
            holding.filter(|id| !self.excuses.is_excused(*id))
        };
        let units = ordinary().map(MemberId::weight).sum::<u32>();
        let largest = self.largest[&*batch.key];
        if units > largest && ordinary().count() > 1 {
            self.fail(&format!("G1: {units} units of {largest} without excuse"));
        }
    }

    /// G3: no slot is granted past a waiter with a lower ticket that could be granted one, before and after; in a fair
    /// ledger, past one of the same tenant, nor to a newcomer past any.
    pub fn check_order(&self, run: &Exchange, batch: &Batch, before: &Snapshot, after: &Snapshot) {
        let now_ms = self.now_ms();
        let waited: BTreeSet<_> = before.waiting(now_ms).collect();
        let still = after.waiting(now_ms).filter(|one| waited.contains(one));
        let still = still.filter(|(_, id)| self.is_reachable(*id, (run, batch), before));
        let still: Vec<_> = still.collect();
        for id in after.holding(now_ms) {
            if before.holders.contains_key(&id) || is_adopted(run, batch, id) {
                continue;
            }
            let (ticket, place) = (before.ticket(id), before.lines.get(&id));
            let is_before = |(other, waiter): &&(i64, MemberId)| match ticket {
                // In one step of a process it may join the queue, and then be the next.
                None => !(self.is_fair() && self.kind == Kind::Memory),
                Some(_) if self.is_fair() => place
                    .zip(before.lines.get(waiter))
                    .is_some_and(|(place, other)| place.0 == other.0 && place.1 > other.1),
                Some(ticket) => ticket > *other,
            };
            if let Some((first, waiter)) = still.iter().find(is_before) {
                self.fail(&format!(
                    "G3: {id:?} with ticket {ticket:?}, {place:?}, overtook {waiter:?} with ticket {first}, {:?}",
                    before.lines.get(waiter),
                ));
            }
        }
    }

    /// In a cluster an exchange is about one key, in the part to which it is sent.
    pub fn check_keys(&self, sent: &Sent) {
        let exchange = &sent.exchange;
        let charges = exchange.claims.iter().flat_map(|claim| &claim.charges);
        let batches = exchange.batches.iter().map(|batch| &*batch.key);
        let keys = batches.chain(charges.map(|charge| &*charge.key));
        let keys: BTreeSet<_> = keys
            .chain(exchange.refunds.iter().map(|refund| &*refund.key))
            .collect();
        let is_elsewhere = |key: &&str| self.part_of_ledger(key) != sent.id.part;
        if self.parts.is_cluster() && (keys.len() > 1 || keys.iter().any(is_elsewhere)) {
            self.fail(&format!("{} is about {keys:?}", sent.id.number));
        }
    }

    /// Whether a waiter could be granted a slot: it calls, its wake-up would be received, or it polls.
    pub fn is_reachable(
        &self,
        id: MemberId,
        (run, batch): (&Exchange, &Batch),
        ledger: &Snapshot,
    ) -> bool {
        let owner = id.replica;
        let is_absent = || {
            let part = self.part_of_ledger(&batch.key);
            self.absent.contains(&(part, owner))
        };
        owner == run.replica || !ledger.listeners.contains(&owner) || !is_absent()
    }

    /// G4: after an exchange fewer units are free than the first waiter needs, by the limit of the calling replica.
    pub fn check_use(&self, run: &Exchange, batch: &Batch, more: bool, after: &Snapshot) {
        let now_ms = self.now_ms();
        let whole = after.limit(batch);
        let limit = after.in_force(whole, now_ms);
        let in_use = after.units(now_ms);
        let may_exceed = in_use == 0 && limit > 0 && limit == whole;
        let fits = |id: MemberId| in_use + id.weight() <= limit || may_exceed;
        // The caller is alive. One of its waiters may block the queue even if an older copy has restored it.
        let is_alive = |id: MemberId, alive_ms| alive_ms >= now_ms || id.replica == run.replica;
        let mut waiters = after.waiters.values();
        let first = waiters.find(|(id, alive_ms)| {
            is_alive(*id, *alive_ms) && self.is_reachable(*id, (run, batch), after)
        });
        // In a fair ledger the one whose turn it is may be any.
        let are_light = || after.waiters.values().all(|(id, _)| fits(*id));
        if let Some((id, _)) =
            first.filter(|(id, _)| !more && fits(*id) && (!self.is_fair() || are_light()))
        {
            self.fail(&format!(
                "G4: {in_use} of {limit} units are in use, and {id:?} waits"
            ));
        }
    }

    /// Ledgers of an exchange, before it runs, in which a released slot may not serve the next request: there are
    /// waiters; or more is held than the limit, because the limit was different or holders return; or the store has
    /// lost the slot.
    pub fn crowded(&self, exchange: &Exchange) -> BTreeSet<String> {
        let now_ms = self.now_ms();
        let is_crowded = |batch: &&Batch| {
            self.picture.get(&*batch.key).is_some_and(|ledger| {
                let adopted = batch.adopt.iter().map(|seq| weight_of(*seq)).sum::<u32>();
                let held = ledger.units(now_ms) + adopted;
                let id = |seq: &Seq| MemberId {
                    replica: exchange.replica,
                    seq: *seq,
                };
                let mut released = batch.release.iter().map(id);
                !ledger.waiters.is_empty()
                    || ledger.pause_end_ms.is_some()
                    || held > ledger.limit(batch)
                    || batch.results.is_some_and(|results| results.overloaded > 0)
                    || released.any(|id| !ledger.holds(id, now_ms))
            })
        };
        let crowded = exchange.batches.iter().filter(is_crowded);
        crowded.map(|batch| batch.key.to_string()).collect()
    }

    /// G4: no request is refused, or made to wait, for a slot that is idle in its own process.
    pub fn check_idle(
        &self,
        sent: &Sent,
        run: &Exchange,
        reply: &Reply,
        crowded: &BTreeSet<String>,
    ) {
        let mut unserved = BTreeSet::new();
        let has_none = |standing: &Standing| {
            use Standing::{Full, QueueFull, Waiting};
            matches!(standing, Full | QueueFull | Waiting { .. })
        };
        for (batch, answer) in run.batches.iter().zip(&reply.batches) {
            if answer
                .iter()
                .any(|answer| answer.acquired.iter().any(has_none))
            {
                unserved.insert(&batch.key);
            }
        }
        for (claim, answer) in run.claims.iter().zip(&reply.claims) {
            let standings = answer.iter().flat_map(|answer| &answer.standings);
            for (ask, standing) in claim.asks.iter().zip(standings) {
                if has_none(standing) {
                    unserved.insert(&run.batches[ask.batch].key);
                }
            }
        }
        let now_ms = self.now_ms();
        for batch in &run.batches {
            let key = &*batch.key;
            let (Some(ledger), Some(idle)) = (self.picture.get(key), sent.idle.get(key)) else {
                continue;
            };
            let idle = idle.iter().find(|id| ledger.holds(**id, now_ms));
            if let Some(idle) = idle
                && unserved.contains(&batch.key)
                && !crowded.contains(key)
            {
                self.fail(&format!("G4: nobody gets {idle:?}, which lies idle"));
            }
        }
    }

    /// G4: requests never deadlock. A waiting request proceeds once a holder of its slot does.
    pub fn check_circles(&self) {
        let now_ms = self.now_ms();
        let mut stuck = BTreeMap::new();
        for (number, replica) in self.replicas.iter().enumerate() {
            let waiting = replica.core.waiting_requests(replica.id);
            stuck.extend(waiting.map(|claim| ((number, claim.id), claim)));
        }
        loop {
            let held = stuck.values().flat_map(|claim| &claim.holds);
            let held: BTreeSet<MemberId> = held.copied().collect();
            let before = stuck.len();
            stuck.retain(|_, claim| {
                let Some(ledger) = self.picture.get(&claim.waits_for) else {
                    return false;
                };
                // A key without slots and holders is no deadlock.
                let in_use = ledger.units(now_ms);
                let next = ledger.waiters.values().next();
                let needed = next.map_or(1, |(id, _)| id.weight());
                let full = in_use > 0 && in_use + needed > claim.limit.max(1);
                full && ledger.holding(now_ms).all(|id| held.contains(&id))
            });
            if stuck.len() == before {
                break;
            }
        }
        if !stuck.is_empty() {
            self.fail(&format!("G4: requests wait for each other: {stuck:?}"));
        }
    }
}

impl World {
    /// G3: a kept slot may be reused past waiters of other replicas until its replica learns of them, and never for
    /// longer than the right lasts.
    pub fn check_reuse(&mut self, replica: usize, lease: &Lease) {
        let Replica { id, core, .. } = &self.replicas[replica];
        let (replica, seq) = (*id, lease.seq());
        self.excuses.note_reuse(MemberId { replica, seq }, self.now);
        if self.faults.failover > 0.0 || self.faults.step > 0.0 {
            // The waiters may have come back, or their arrival is unknown.
            return;
        }
        let longest = match self.mix {
            "clean" => LONGEST_RECALL,
            _ => RIGHT + CLOCK_RUNS_AHEAD,
        };
        let (now_ms, store_us) = (self.now_ms(), self.store_us() as i64);
        let ledger = self.picture.get(&core.ledger_of(lease));
        let waiting = ledger.into_iter().flat_map(|ledger| ledger.waiting(now_ms));
        for (ticket, waiter) in waiting.filter(|(_, waiter)| waiter.replica != replica) {
            let came = self.moved.get(&waiter).copied();
            let waited = store_us - came.unwrap_or(ticket + (1 << 52));
            if waited > longest.as_micros() as i64 {
                self.fail(&format!(
                    "G3: a kept slot went past {waiter:?}, who waits for {waited} us"
                ));
            }
        }
    }
}

fn is_adopted(run: &Exchange, batch: &Batch, id: MemberId) -> bool {
    id.replica == run.replica && batch.adopt.contains(&id.seq)
}
