//! Checks one exchange by comparing the ledger before and after it.

use super::{
    Bounds, Broken, Id, PROMPT, State, Steps,
    fairness::FairCheck,
    message::{Message, replica},
};
use crate::ledger::{BatchReply, MemberId, ReplicaId, Wake};

pub(super) struct Check<'a> {
    pub(super) message: &'a Message,
    pub(super) bounds: &'a Bounds,
    pub(super) before: &'a State,
    pub(super) after: &'a State,
}

impl Check<'_> {
    pub(super) fn of_ledger(&self, fair: &FairCheck) -> Broken {
        let holders = || self.after.holders.iter();
        self.of_leavers()
            .or_else(|| holders().find_map(|(id, until)| self.of_holder(*id, *until, fair)))
            .or_else(|| self.of_queue(fair))
    }

    fn of_leavers(&self) -> Broken {
        let left = |id: Id| !self.after.stands(id) && !self.released(id);
        let mut holders = self.before.holders.iter();
        if holders.any(|(id, until)| *until > 0 && left(*id)) {
            return Some(("G6", "a lease that runs was taken away"));
        }
        let forgotten = self
            .before
            .queue
            .iter()
            .any(|id| left(*id) && self.lives(*id));
        forgotten.then_some(("G4", "a live waiter was forgotten"))
    }

    fn of_holder(&self, id: Id, until: Steps, fair: &FairCheck) -> Broken {
        let is_new = !self.before.holders.iter().any(|(held, _)| *held == id);
        if is_new && self.exceeds(self.after.in_use(), self.after.weight(id)) {
            return Some(("G3", "a slot was granted that a pause forbids"));
        }
        if self.before.queue.contains(&id) {
            if until > PROMPT {
                return Some(("G4", "a waiter was granted more than it may sleep through"));
            }
            let others = self.before.queue.iter();
            let mut stay = others.filter(|other| self.after.queue.contains(other));
            let overtaken = stay.find_map(|other| {
                let may_be_granted = self.may_be_granted(*other);
                fair.is_overtaken(*other, id).filter(|_| may_be_granted)
            });
            return overtaken.map(|how| ("G3", how));
        }
        if self.before.stands(id) {
            return None;
        }
        if !self.asked(id) {
            return Some(("G6", "a permit holds that did not ask in time"));
        }
        let overtaken = self
            .after
            .queue
            .iter()
            .any(|other| self.may_be_granted(*other));
        overtaken.then_some(("G3", "a waiter was overtaken by a newcomer"))
    }

    fn of_queue(&self, fair: &FairCheck) -> Broken {
        let queue = &self.after.queue;
        let uninvited = |id: &Id| !self.before.stands(*id) && !self.asked(*id);
        if queue.iter().any(uninvited) {
            return Some(("G6", "a permit waits that did not ask in time"));
        }
        let live = queue.iter().filter(|id| self.may_be_granted(**id));
        let live: Vec<Id> = live.copied().collect();
        let next = fair.next_of(&live, |id| self.fits(id));
        if next.is_some_and(|id| self.fits(id)) {
            return Some(("G4", "as much is free as the next live waiter needs"));
        }
        let room = queue.len() <= self.bounds.max_waiters as usize;
        (!room).then_some(("G4", "the queue is too long"))
    }

    /// Each grant is reported once, by the reply or by a wake-up.
    pub(super) fn of_replies(&self, reply: &BatchReply, wakes: &[(ReplicaId, Wake)]) -> Broken {
        let own = reply.promoted.iter().map(|grant| MemberId {
            replica: replica(self.message.client),
            seq: grant.seq,
        });
        let others = wakes.iter().flat_map(|(replica, wake)| {
            let id = |&seq| MemberId {
                replica: *replica,
                seq,
            };
            wake.seqs.iter().map(id)
        });
        let mut reported: Vec<Id> = own.chain(others).map(Id::of).collect();
        let granted = self.after.holders.iter().map(|(id, _)| *id);
        let mut granted: Vec<Id> = granted
            .filter(|id| self.before.queue.contains(id))
            .collect();
        reported.sort_unstable();
        granted.sort_unstable();
        (reported != granted).then_some(("G4", "the reported grants are not those of the ledger"))
    }

    /// A permit heavier than the limit must be alone, and waits for the end of a ramp.
    fn fits(&self, id: Id) -> bool {
        let weight = self.after.weight(id);
        !self.exceeds(self.after.in_use() + weight, weight)
    }

    /// Whether a permit of this weight may not be among those in use.
    fn exceeds(&self, in_use: u32, weight: u32) -> bool {
        let limit = self.after.limit(self.bounds);
        let is_heavier = in_use == weight && limit == self.bounds.limit;
        in_use > limit && !is_heavier
    }

    /// The calling client counts as alive.
    pub(super) fn lives(&self, id: Id) -> bool {
        id.client == self.message.client || self.before.is_alive(id)
    }

    fn may_be_granted(&self, id: Id) -> bool {
        id.client == self.message.client || self.before.is_reachable(id)
    }

    pub(super) fn released(&self, id: Id) -> bool {
        id.client == self.message.client && self.message.release.contains(&id.seq)
    }

    fn asked(&self, id: Id) -> bool {
        let message = self.message;
        id.client == message.client && message.acquire == Some(id.seq)
    }
}
