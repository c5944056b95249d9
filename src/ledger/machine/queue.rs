//! The queue: `promote`, `acquire`, and the heartbeats that tell live waiters from dead ones.

use std::cmp::{max, min};

use super::{Call, Ledger, MAX_LEASE_MS, Place};
use crate::ledger::{Ask, Batch, PermitId, Promotion, ReplicaId, Standing};

/// Added to the time of enqueueing in us, it gives a ticket: negative until the year 2112.
pub(super) const FIRST_TICKET: i64 = -(1 << 52);

/// What a ledger can offer a newcomer.
#[derive(Clone, Copy, Debug)]
pub(in crate::ledger) enum Prospect {
    Slot,
    Place,
    Refusal(Standing),
}

impl Ledger {
    pub(super) fn promote(&mut self, call: &mut Call, batch: &Batch) -> Vec<Promotion> {
        let until_ms = call.promoted_end_ms();
        let mut promoted = Vec::new();
        while self.free(batch) > 0
            && let Some((_, &id)) = self.queue.first_key_value()
            && call.spend()
        {
            if !self.is_alive(call, id.replica) {
                self.remove(id);
                continue;
            }
            self.hold(id, until_ms);
            if id.replica == call.replica {
                let seq = id.seq;
                promoted.push(Promotion { seq, until_ms });
            } else {
                call.wake(batch, id, until_ms);
            }
        }
        promoted
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
        if call.is_stale() {
            return Standing::Stale;
        }
        match self.prospect(call, batch, ask.wait, swept) {
            Prospect::Slot => self.hold(id, call.lease_end_ms()),
            Prospect::Place => self.enqueue(call, id),
            Prospect::Refusal(refusal) => refusal,
        }
    }

    pub(in crate::ledger) fn standing(&self, id: PermitId) -> Option<Standing> {
        let standing = |place: &Place| match *place {
            Place::Holds { until_ms } => Standing::Held { until_ms },
            Place::Waits { ticket } => Standing::Waiting { ticket },
        };
        self.places.get(&id).map(standing)
    }

    /// What a newcomer can get. A queue that is full is swept, once.
    pub(in crate::ledger) fn prospect(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        wait: bool,
        swept: &mut bool,
    ) -> Prospect {
        if self.queue.is_empty() && self.free(batch) > 0 {
            return Prospect::Slot;
        }
        if !wait {
            self.refused = true;
            return Prospect::Refusal(Standing::Full);
        }
        let room = batch.max_waiters as usize;
        if self.queue.len() >= room && !*swept {
            self.sweep(call);
            *swept = true;
        }
        if self.queue.len() >= room {
            self.refused = true;
            return Prospect::Refusal(Standing::LineFull);
        }
        Prospect::Place
    }

    /// Evicts dead waiters from a full queue, if a heartbeat that has ended suggests that there are some. A queue
    /// longer than the budget is searched in part, from a place that the clock chooses.
    fn sweep(&mut self, call: &mut Call) {
        let window = min(self.queue.len(), call.budget);
        let mut heartbeats = self.heartbeats.values();
        if window == 0 || !heartbeats.any(|&until_ms| until_ms < call.now_ms) {
            return;
        }
        call.budget -= window;
        let start = call.now_us % (self.queue.len() - window + 1) as u64;
        let ids = self.queue.values().skip(start as usize).take(window);
        let is_dead = |id: &PermitId| !self.is_alive(call, id.replica);
        let dead: Vec<_> = ids.copied().filter(is_dead).collect();
        for &id in &dead {
            self.remove(id);
        }
        if dead.is_empty() {
            self.heartbeats
                .retain(|_, until_ms| *until_ms >= call.now_ms);
        }
    }

    /// Tickets never go back, so a ticket below that of the head is known to have left the queue.
    pub(in crate::ledger) fn enqueue(&mut self, call: &Call, id: PermitId) -> Standing {
        let tail = self.queue.keys().next_back();
        let ticket = FIRST_TICKET + call.now_us as i64;
        let ticket = tail.map_or(ticket, |&tail| max(tail + 1, ticket));
        self.places.insert(id, Place::Waits { ticket });
        self.queue.insert(ticket, id);
        Standing::Waiting { ticket }
    }

    /// Heartbeats matter to a queue only. One that ended long ago is removed when another comes, so that they cannot
    /// pile up.
    pub(super) fn heartbeat(&mut self, call: &Call, batch: &Batch) {
        if !batch.waits || self.queue.is_empty() {
            return;
        }
        let until_ms = call.now_ms + call.alive_ms;
        if self.heartbeats.insert(call.replica, until_ms).is_none() {
            let kept_ms = call.now_ms.saturating_sub(MAX_LEASE_MS);
            self.heartbeats.retain(|_, until_ms| *until_ms >= kept_ms);
        }
    }

    /// The caller is alive.
    fn is_alive(&self, call: &Call, replica: ReplicaId) -> bool {
        let heartbeat = || self.heartbeats.get(&replica);
        replica == call.replica || heartbeat().is_some_and(|&until_ms| until_ms >= call.now_ms)
    }
}
