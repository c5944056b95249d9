//! One exchange, judged by what the ledger had before and after it.

use super::{
    Bounds, Broken, Id, PROMOTED, State, Steps,
    message::{Message, replica},
};
use crate::ledger::{BatchReply, PermitId, ReplicaId, Wake};

pub(super) struct Verdict<'a> {
    pub(super) message: &'a Message,
    pub(super) bounds: &'a Bounds,
    pub(super) before: &'a State,
    pub(super) after: &'a State,
}

impl Verdict<'_> {
    pub(super) fn of_ledger(&self) -> Broken {
        let holders = || self.after.holders.iter();
        self.of_leavers()
            .or_else(|| holders().find_map(|(id, until)| self.of_holder(*id, *until)))
            .or_else(|| self.of_line())
    }

    fn of_leavers(&self) -> Broken {
        let left = |id: Id| !self.after.stands(id) && !self.released(id);
        let mut holders = self.before.holders.iter();
        if holders.any(|(id, until)| *until > 0 && left(*id)) {
            return Some(("G6", "a lease that runs was taken away"));
        }
        let forgotten = self
            .before
            .line
            .iter()
            .any(|id| left(*id) && self.lives(*id));
        forgotten.then_some(("G4", "a live waiter was forgotten"))
    }

    fn of_holder(&self, id: Id, until: Steps) -> Broken {
        if self.before.line.contains(&id) {
            if until > PROMOTED {
                return Some(("G4", "a waiter was granted more than it may sleep through"));
            }
            let earlier = self
                .before
                .arrivals
                .iter()
                .take_while(|other| **other != id);
            let mut passed = earlier.filter(|other| self.after.line.contains(other));
            let overtaken = passed.any(|other| self.lives(*other));
            return overtaken.then_some(("G3", "a waiter was overtaken by another"));
        }
        if self.before.stands(id) {
            return None;
        }
        if !self.asked(id) {
            return Some(("G6", "somebody holds who did not ask in time"));
        }
        let overtaken = self.after.line.iter().any(|other| self.lives(*other));
        overtaken.then_some(("G3", "a waiter was overtaken by a newcomer"))
    }

    fn of_line(&self) -> Broken {
        let line = &self.after.line;
        let uninvited = |id: &Id| !self.before.stands(*id) && !self.asked(*id);
        if line.iter().any(uninvited) {
            return Some(("G6", "somebody waits who did not ask in time"));
        }
        let free = self.after.holders.len() < self.bounds.limit as usize;
        if free && line.iter().any(|id| self.lives(*id)) {
            return Some(("G4", "a slot is free while a live waiter stands in line"));
        }
        let room = line.len() <= self.bounds.max_waiters as usize;
        (!room).then_some(("G4", "the line is too long"))
    }

    /// Each waiter that was granted a slot is told so, once.
    pub(super) fn of_replies(&self, reply: &BatchReply, wakes: &[(ReplicaId, Wake)]) -> Broken {
        let own = reply.promoted.iter().map(|grant| PermitId {
            replica: replica(self.message.client),
            seq: grant.seq,
        });
        let others = wakes.iter().flat_map(|(replica, wake)| {
            let id = |&seq| PermitId {
                replica: *replica,
                seq,
            };
            wake.seqs.iter().map(id)
        });
        let mut told: Vec<Id> = own.chain(others).map(Id::of).collect();
        let granted = self.after.holders.iter().map(|(id, _)| *id);
        let mut granted: Vec<Id> = granted.filter(|id| self.before.line.contains(id)).collect();
        told.sort_unstable();
        granted.sort_unstable();
        (told != granted).then_some(("G4", "a grant was not told, or something else was"))
    }

    /// The one who asks is alive.
    fn lives(&self, id: Id) -> bool {
        id.client == self.message.client || self.before.is_alive(id)
    }

    fn released(&self, id: Id) -> bool {
        id.client == self.message.client && self.message.release.contains(&id.seq)
    }

    fn asked(&self, id: Id) -> bool {
        let message = self.message;
        let own = id.client == message.client && message.acquire == Some(id.seq);
        own && !message.is_stale(self.bounds)
    }
}
