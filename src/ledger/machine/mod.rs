//! The ledger in this process: the steps of `script/`, over ordered maps instead of a sorted set.
//!
//! This file has the order of the steps, and the others the steps themselves: `leases.rs` (release, renewal, adoption, expiry),
//! `queue.rs` (admission and promotion, in order of arrival or of shares), `pause.rs`, `pace.rs`, `reuse.rs` (the right to keep
//! slots), `claims.rs`; of fair ledgers, `shares.rs` has what tenants have paid and who is next, and `tenants.rs` who joins and
//! leaves a line, who crowds the queue, and how long shares are kept. `call.rs` is one call of the script: its time, and how much
//! it may do. `inspect.rs` is for tests and fuzz targets; operators read the store (`operators/src/ledger.rs`). Most tests are in
//! `ledger/tests/`, where each also runs the script.

mod call;
pub(super) mod claims;
#[cfg(any(test, turnstile_fuzzing))]
pub(super) mod inspect;
mod leases;
mod pace;
mod pause;
pub(super) mod queue;
mod reuse;
pub(super) mod shares;
mod tenants;

use std::{
    cmp::{max, min},
    collections::BTreeMap,
};

pub(crate) use self::call::Call;
use self::shares::Shares;
use super::{
    Ask, Batch, BatchReply, MemberId, PaceState, Promotion, ReplicaId, Seq, Standing, ramped,
};
use crate::small_map::SmallMap;

/// Holders and waiters of one limit key.
///
/// The limit applies to the weight of the holders; waiters are counted one by one.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Ledger {
    /// Each permit's place: in `holders` or in `queue`, never in both.
    places: SmallMap<MemberId, Place>,
    /// By deadline, in store milliseconds.
    holders: SmallMap<(u64, MemberId), ()>,
    /// Total weight of all holders.
    units: u32,
    /// By ticket.
    queue: BTreeMap<i64, Waiter>,
    /// A heartbeat stays for a while after the replica's death, as a sign that the queue may contain dead waiters.
    heartbeats: BTreeMap<ReplicaId, Heartbeat>,
    /// Until when each replica may keep freed slots, in store milliseconds.
    rights: BTreeMap<ReplicaId, u64>,
    /// Only the store's ledgers have one: in this process the queue pauses by its own clock.
    pause: Option<Pause>,
    /// Only for a fair ledger: the payments and lines of its tenants.
    shares: Option<Box<Shares>>,
    /// Only for a limit that finds its own value. The store forgets it after an hour, this process with the ledger.
    pace: Option<Box<PaceState>>,
    /// Within a batch: number of waiters at the head of the queue that `promote` has passed over.
    passed: usize,
    /// Within a batch: the next waiter needs more units than are free.
    blocked: bool,
    /// Within a batch: a newcomer was refused.
    refused: bool,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    id: MemberId,
    /// A waiter behind this one got a slot, or may have got one: this waiter's replica was not connected, or the waiter
    /// was [enqueued](Ledger::enqueue_by) ahead of others.
    was_passed: bool,
}

/// A pause that has not ended, or whose ramp has not.
#[derive(Clone, Copy, Debug)]
struct Pause {
    /// In store milliseconds.
    end_ms: u64,
    /// An operator has ended it. It stays for as long as it was to last, for replicas that ask whether it goes on: they would
    /// repeat a pause that the store has lost.
    was_ended: bool,
    /// Within a batch: its time.
    now_ms: u64,
}

/// Heartbeat of a replica with waiters.
#[derive(Clone, Copy, Debug)]
struct Heartbeat {
    /// Until when the replica calls again unless it has stopped, in store milliseconds.
    until_ms: u64,
    /// The replica subscribes to its wake-ups, so it is unreachable if nobody receives them.
    listens: bool,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Holds { until_ms: u64 },
    Waits { ticket: i64 },
}

/// The only operation of a batch: see [`Ledger::run_one`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Nothing,
    Release(Seq),
    Acquire(Ask),
}

impl Ledger {
    /// Runs one batch. No list of it names a permit twice.
    pub(crate) fn run(&mut self, call: &mut Call, batch: &Batch) -> BatchReply {
        let released = self.release(call, batch);
        let mut reply = self.begin(call, batch, batch.weighs(), released);
        self.close(call, batch, &mut reply);
        reply
    }

    /// Like [`run`](Self::run), for a batch with at most one operation, which saves the lists.
    pub(crate) fn run_one(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        operation: Operation,
    ) -> (Vec<Promotion>, Option<Standing>) {
        let released = match operation {
            Operation::Release(seq) => self.remove(call.own(seq)),
            Operation::Acquire(_) | Operation::Nothing => 0,
        };
        self.settle(call, batch, released);
        let promoted = self.hand_on(call, batch, false);
        let standing = match operation {
            Operation::Acquire(ask) => Some(self.acquire_one(call, batch, ask, &mut false)),
            Operation::Nothing | Operation::Release(_) => None,
        };
        self.end(call, batch);
        (promoted, standing)
    }

    /// The steps before the claims, after [`release`](Self::release). `weighs`: see [`Exchange::weighs`](super::Exchange::weighs).
    pub(super) fn begin(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        weighs: bool,
        released: u32,
    ) -> BatchReply {
        self.forget_shares(call.now_ms);
        self.pace(call, batch, released);
        self.pause(call, batch);
        let renewed = self.renew(call, batch);
        let places = self.positions_of(&renewed);
        let adopted = self.adopt(call, batch);
        let listed = self.list(call, batch);
        self.settle(call, batch, released);
        let promoted = self.hand_on(call, batch, weighs);
        let acquired = self.acquire(call, batch);
        BatchReply {
            renewed,
            places,
            adopted,
            acquired,
            listed,
            promoted,
            ..BatchReply::default()
        }
    }

    /// Expires leases and promotes waiters.
    #[inline]
    fn hand_on(&mut self, call: &mut Call, batch: &Batch, weighs: bool) -> Vec<Promotion> {
        self.expire(call);
        let was_full = self.free(batch) == 0;
        // Most queues are empty.
        let promoted = if self.queue.is_empty() {
            Vec::new()
        } else {
            self.promote(call, batch)
        };
        if was_full || self.blocked || weighs {
            self.bring_forward(call);
        }
        promoted
    }

    /// The steps after the claims. The reply shows the ledger's final state.
    pub(super) fn close(&mut self, call: &mut Call, batch: &Batch, reply: &mut BatchReply) {
        self.end(call, batch);
        self.keep_shares(call, batch);
        reply.in_use = self.in_use();
        reply.waiting = self.waiting();
        reply.head = self.head();
        reply.pacing = self.pacing(batch);
        let pause = self.running_pause();
        reply.pause_end_ms = pause.map(|pause| pause.end_ms);
        let asked = !self.queue.is_empty() && pause.is_none();
        let nearest = self.holders.first_key().filter(|_| asked);
        reply.nearest_ms = nearest.map(|&(until_ms, _)| until_ms);
    }

    /// The last steps of a batch.
    pub(crate) fn end(&mut self, call: &mut Call, batch: &Batch) {
        if self.is_empty() {
            self.clear();
        }
        self.heartbeat(call, batch);
        self.grant_rights(call, batch);
        (self.passed, self.blocked) = (0, false);
    }

    /// Number of units held.
    pub(crate) fn in_use(&self) -> u32 {
        self.units
    }

    pub(crate) fn waiting(&self) -> u32 {
        self.queue.len() as u32
    }

    /// Whether the ledger has neither holders nor waiters nor a pause.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty() && self.pause.is_none()
    }

    /// Whether nothing is known of it: neither permits nor a pause, nor replicas.
    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn is_gone(&self) -> bool {
        self.is_empty() && self.heartbeats.is_empty() && self.rights.is_empty()
    }

    /// Whether it is empty, and no tenant owes anything.
    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn is_forgotten(&self) -> bool {
        self.is_empty() && self.shares.is_none() && self.pace.is_none()
    }

    /// The limit in force.
    fn limit(&self, batch: &Batch) -> u32 {
        let whole = self.whole(batch);
        let ramped = |pause: Pause| ramped(whole, pause.end_ms, pause.now_ms);
        self.running_pause().map_or(whole, ramped)
    }

    /// The limit apart from a pause.
    fn whole(&self, batch: &Batch) -> u32 {
        let pacing = self.pacing(batch);
        pacing.map_or(batch.limit, |pacing| pacing.limit)
    }

    fn running_pause(&self) -> Option<Pause> {
        self.pause.filter(|pause| !pause.was_ended)
    }

    fn free(&self, batch: &Batch) -> u32 {
        self.limit(batch).saturating_sub(self.units)
    }

    /// Whether all units of a permit fit. A permit heavier than the limit, which was lowered in the meantime, enters
    /// alone, once the ramp after a pause is over.
    fn fits(&self, batch: &Batch, id: MemberId) -> bool {
        let needs = match self.units {
            0 => min(id.weight(), max(self.whole(batch), batch.whole)),
            _ => id.weight(),
        };
        (1..=self.free(batch)).contains(&needs)
    }

    /// Returns the number of members that the permit had.
    fn remove(&mut self, id: MemberId) -> u32 {
        let before = self.places.remove(&id);
        let members = match before {
            Some(Place::Holds { .. }) => id.weight(),
            Some(Place::Waits { .. }) => 1,
            None => 0,
        };
        self.leave(before, id);
        members
    }

    /// Frees a permit's former place.
    fn leave(&mut self, place: Option<Place>, id: MemberId) {
        match place {
            Some(Place::Holds { until_ms }) => {
                self.holders.remove(&(until_ms, id));
                self.units -= id.weight();
            }
            Some(Place::Waits { ticket }) => drop(self.queue.remove(&ticket)),
            None => {}
        }
    }

    /// Removes heartbeats and rights once the last permit has left.
    fn clear(&mut self) {
        // Clearing even an empty map has a cost.
        if !self.heartbeats.is_empty() {
            self.heartbeats.clear();
        }
        if !self.rights.is_empty() {
            self.rights.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Exchange;
    use crate::ledger::layout::FIRST_TICKET;

    #[test]
    fn works_while_time_stands_still() {
        let template = Exchange {
            replica: ReplicaId::from_bits(7),
            lease_ms: 1_000,
            respond_ms: 500,
            waiter_ttl_ms: 100,
            not_after_us: 0,
            batches: Vec::new(),
            claims: Vec::new(),
            refunds: Vec::new(),
            generation_query: None,
            expected: None,
        };
        let mut ledger = Ledger::default();
        let mut run = |release: &[Seq], acquire: &[Seq]| {
            let batch = Batch {
                limit: 1,
                max_waiters: 2,
                waits: true,
                release: release.to_vec(),
                acquire: acquire
                    .iter()
                    .map(|&seq| Ask {
                        seq,
                        wait: true,
                        payer: None,
                    })
                    .collect(),
                ..Batch::default()
            };
            let reply = ledger.run(&mut Call::new(&template, 0), &batch);
            let promoted: Vec<_> = reply.promoted.iter().map(|grant| grant.seq).collect();
            (reply.acquired, promoted, ledger.is_empty())
        };
        let held = Standing::Held { until_ms: 1_000 };
        let waiting = |place| Standing::Waiting {
            ticket: FIRST_TICKET + place,
        };
        let (acquired, ..) = run(&[], &[1, 2, 3, 4]);
        assert_eq!(
            acquired,
            [held, waiting(0), waiting(1), Standing::QueueFull]
        );
        assert_eq!(run(&[1], &[]), (vec![], vec![2], false));
        assert_eq!(run(&[3], &[]), (vec![], vec![], false));
        assert_eq!(run(&[2], &[]), (vec![], vec![], true));
        assert!(ledger.heartbeats.is_empty());
    }
}
