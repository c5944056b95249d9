//! The queue: `promote`, `acquire`, and the heartbeats that distinguish live waiters from dead ones.

use std::cmp::{max, min};

use super::{
    Call, Heartbeat, Ledger, Place, Waiter,
    shares::{InTurn, Lined, Passed},
};
use crate::ledger::{
    Ask, Batch, MemberId, Promotion, ReplicaId, Standing,
    layout::{FIRST_TICKET, MAX_LEASE_MS, MAX_PASSED, MAX_PLACES, MAX_SEARCHED},
};

/// Whether a replica's waiters can be granted slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contact {
    Caller,
    Reachable,
    /// The replica has been silent for too long, or nobody receives its wake-ups: it has stopped, has lost its
    /// connection, or has crashed.
    Unreachable,
    /// The replica has been silent for the waiter TTL too, and its waiters are evicted.
    Dead,
}

/// A ledger's offer to a newcomer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Offer {
    Slot,
    Place,
    Refusal(Standing),
}

impl Ledger {
    /// A waiter whose replica is unreachable is passed over: it keeps its place, and a later waiter gets the slot. A
    /// waiter that needs more units than are free blocks the queue behind it, because it would otherwise starve.
    pub(super) fn promote(&mut self, call: &mut Call, batch: &Batch) -> Vec<Promotion> {
        let until_ms = call.promoted_end_ms();
        let (mut promoted, mut last_passed) = (Vec::new(), None);
        let mut passed_in_lines = self.has_lines(batch).then(Passed::new);
        while self.free(batch) > 0
            && self.passed < min(self.queue.len(), MAX_PASSED)
            && let Some((id, in_line)) =
                self.next_waiter(call, &mut passed_in_lines, &mut last_passed)
        {
            match self.contact_with(call, id.replica) {
                Contact::Dead => {
                    call.spend(1);
                    self.remove(id);
                    if let Some(waiter) = in_line {
                        self.leave_line(waiter);
                    }
                }
                Contact::Unreachable => {
                    last_passed = self.pass_over(id);
                    if let (Some(passed), Some(waiter)) = (&mut passed_in_lines, in_line) {
                        passed.insert(waiter.tenant, waiter);
                    }
                }
                Contact::Caller | Contact::Reachable if !self.fits(batch, id) => {
                    self.blocked = true;
                    break;
                }
                Contact::Caller => {
                    self.grant(call, id, in_line, until_ms);
                    let seq = id.seq;
                    promoted.push(Promotion { seq, until_ms });
                }
                Contact::Reachable => {
                    self.grant(call, id, in_line, until_ms);
                    call.wake(batch, id, until_ms);
                }
            }
        }
        promoted
    }

    /// The waiter whose turn it is, with its place in a line. `None`: the call may spend no more.
    fn next_waiter(
        &mut self,
        call: &mut Call,
        passed_in_lines: &mut Option<Passed>,
        last_passed: &mut Option<i64>,
    ) -> Option<(MemberId, Option<Lined>)> {
        if let Some(passed) = passed_in_lines {
            let next = self.next_by_share(call, passed);
            if next.is_some() || !call.may_spend() {
                return next.map(|waiter| (waiter.id, Some(waiter)));
            }
            // All other waiters in the lines were passed over, or have left.
            (*passed_in_lines, self.passed, *last_passed) = (None, 0, None);
        }
        let next = self.next_by_arrival(*last_passed)?;
        call.may_spend().then_some((next, None))
    }

    /// The first waiter of the tenant that has paid for the least.
    fn next_by_share(&mut self, call: &mut Call, passed: &Passed) -> Option<Lined> {
        while call.may_spend()
            && let Some(shares) = &mut self.shares
        {
            match shares.next(passed) {
                InTurn::Nobody => return None,
                InTurn::Ended(tenant) => shares.stop_waiting(tenant),
                InTurn::Waiter(waiter) if self.waits(waiter) => return Some(waiter),
                InTurn::Waiter(waiter) => self.leave_line(waiter),
            }
            call.spend(1);
        }
        None
    }

    fn grant(&mut self, call: &mut Call, id: MemberId, in_line: Option<Lined>, until_ms: u64) {
        call.spend(id.weight());
        // The charge counts it among those who wait.
        if let Some(waiter) = in_line {
            self.charge(waiter);
        }
        self.hold(id, until_ms);
    }

    /// The first waiter behind those that were passed over, the last of them with this ticket.
    fn next_by_arrival(&self, last_passed: Option<i64>) -> Option<MemberId> {
        let from = last_passed.map_or(i64::MIN, |ticket| ticket + 1);
        let first = self.queue.range(from..).next();
        first.map(|(_, waiter)| waiter.id)
    }

    /// Returns the ticket of the waiter.
    fn pass_over(&mut self, id: MemberId) -> Option<i64> {
        self.passed += 1;
        let ticket = self.standing(id)?.ticket()?;
        if let Some(waiter) = self.queue.get_mut(&ticket) {
            waiter.was_passed = true;
        }
        Some(ticket)
    }

    /// The ticket of the first waiter that was never passed over: no slot was granted past this ticket.
    pub(super) fn head(&self) -> Option<i64> {
        let mut first = self.queue.iter().take(MAX_SEARCHED);
        first
            .find(|(_, waiter)| !waiter.was_passed)
            .map(|(&ticket, _)| ticket)
    }

    /// Queue positions of the first waiters among `standings`.
    pub(super) fn positions_of(&self, standings: &[Standing]) -> Vec<u32> {
        let tickets = standings.iter().filter_map(Standing::ticket);
        let ahead = |ticket| self.queue.keys().take_while(move |other| **other < ticket);
        let place = |ticket| ahead(ticket).count() as u32 + 1;
        tickets.take(MAX_PLACES).map(place).collect()
    }

    pub(super) fn acquire(&mut self, call: &mut Call, batch: &Batch) -> Vec<Standing> {
        let mut swept = false;
        let acquire = |ask: &Ask| self.acquire_one(call, batch, *ask, &mut swept);
        batch.acquire.iter().map(acquire).collect()
    }

    pub(super) fn acquire_one(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        ask: Ask,
        swept: &mut bool,
    ) -> Standing {
        let id = call.own(ask.seq);
        if let Some(standing) = self.standing(id) {
            return standing;
        }
        match self.admit(call, batch, ask, swept) {
            Offer::Slot => self.hold(id, call.lease_end_ms()),
            Offer::Place => {
                let ticket = self.next_ticket(call);
                self.line_up(batch, ask, ticket, id);
                self.wait_with(ticket, id, false)
            }
            Offer::Refusal(refusal) => refusal,
        }
    }

    pub(crate) fn standing(&self, id: MemberId) -> Option<Standing> {
        let standing = |place: &Place| match *place {
            Place::Holds { until_ms } => Standing::Held { until_ms },
            Place::Waits { ticket } => Standing::Waiting { ticket },
        };
        self.places.get(&id).map(standing)
    }

    /// The offer to a newcomer. A full queue is swept, once.
    pub(super) fn admit(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        ask: Ask,
        swept: &mut bool,
    ) -> Offer {
        let fits = self.fits(batch, call.own(ask.seq));
        if self.queue.len() == self.passed && fits {
            return Offer::Slot;
        }
        if !ask.wait {
            self.refused = true;
            return Offer::Refusal(Standing::Full);
        }
        let room = batch.max_waiters as usize;
        if self.queue.len() >= room && !*swept {
            self.sweep(call);
            *swept = true;
        }
        if self.queue.len() >= room || self.is_crowded_by(batch, ask) {
            self.refused = true;
            return Offer::Refusal(Standing::QueueFull);
        }
        // Its tenant's turn may come before that of a waiter that needs more units than are free.
        call.more |= fits && batch.dues.is_some();
        Offer::Place
    }

    /// Evicts dead waiters from a full queue, if an ended heartbeat suggests that it has any. A queue longer than the
    /// budget is searched in part, at a position derived from the clock.
    fn sweep(&mut self, call: &mut Call) {
        let window = min(self.queue.len(), call.budget);
        let oldest_ms = call.oldest_heartbeat_ms();
        let mut heartbeats = self.heartbeats.values();
        if window == 0 || !heartbeats.any(|heartbeat| heartbeat.until_ms < oldest_ms) {
            return;
        }
        call.budget -= window;
        let start = call.now_us % (self.queue.len() - window + 1) as u64;
        let waiters = self.queue.values().skip(start as usize).take(window);
        let ids = waiters.map(|waiter| waiter.id);
        let is_dead = |id: &MemberId| self.contact_with(call, id.replica) == Contact::Dead;
        let dead: Vec<_> = ids.filter(is_dead).collect();
        for &id in &dead {
            self.remove(id);
        }
        if dead.is_empty() {
            self.heartbeats
                .retain(|_, heartbeat| heartbeat.until_ms >= oldest_ms);
        }
    }

    /// Tickets never decrease, so a ticket below the head's is known to have left the queue, or was passed over.
    pub(super) fn next_ticket(&self, call: &Call) -> i64 {
        let tail = self.queue.keys().next_back();
        let ticket = FIRST_TICKET + call.now_us as i64;
        tail.map_or(ticket, |&tail| max(tail + 1, ticket))
    }

    /// Enqueues a part of a claim by the claim's first ticket, in any ledger: ahead of waiters that came to the store
    /// later. Slots may have been granted past that place, so the waiter counts as passed over, unless a waiter ahead
    /// of it was not.
    pub(super) fn enqueue_by(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        ask: Ask,
        first: Option<i64>,
    ) -> Standing {
        let (id, last) = (call.own(ask.seq), self.next_ticket(call));
        let is_free = |ticket: &i64| !self.queue.contains_key(ticket);
        let ticket = (first.unwrap_or(last)..last).find(is_free).unwrap_or(last);
        self.line_up(batch, ask, ticket, id);
        if ticket == last {
            return self.wait_with(last, id, false);
        }
        let head = self.queue.first_key_value();
        let was_passed = head.is_none_or(|(&head, first)| first.was_passed || ticket < head);
        // The head may need more units than are free, and this waiter fewer.
        call.more |= self.fits(batch, id);
        self.wait_with(ticket, id, was_passed)
    }

    pub(super) fn wait_with(&mut self, ticket: i64, id: MemberId, was_passed: bool) -> Standing {
        self.places.insert(id, Place::Waits { ticket });
        self.queue.insert(ticket, Waiter { id, was_passed });
        Standing::Waiting { ticket }
    }

    /// Only a queue needs heartbeats. Long-ended ones are removed when a new one is added, so that they cannot
    /// accumulate.
    pub(super) fn heartbeat(&mut self, call: &Call, batch: &Batch) {
        if !batch.waits || self.queue.is_empty() {
            return;
        }
        // In the store the lowest bit of the time encodes whether the replica listens.
        let until_ms = call.now_ms + call.respond_ms;
        let until_ms = until_ms - (until_ms + u64::from(call.listens)) % 2;
        let heartbeat = Heartbeat {
            until_ms,
            listens: call.listens,
        };
        if self.heartbeats.insert(call.replica, heartbeat).is_none() {
            let kept_ms = call.now_ms.saturating_sub(MAX_LEASE_MS);
            self.heartbeats
                .retain(|_, heartbeat| heartbeat.until_ms >= kept_ms);
        }
    }

    fn contact_with(&self, call: &Call, replica: ReplicaId) -> Contact {
        if replica == call.replica {
            return Contact::Caller;
        }
        match self.heartbeats.get(&replica) {
            Some(heartbeat) if heartbeat.until_ms < call.oldest_heartbeat_ms() => Contact::Dead,
            Some(heartbeat) if heartbeat.until_ms < call.now_ms => Contact::Unreachable,
            Some(heartbeat) if heartbeat.listens && call.absent.contains(&replica) => {
                Contact::Unreachable
            }
            Some(_) => Contact::Reachable,
            None => Contact::Dead,
        }
    }
}
