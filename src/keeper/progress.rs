//! How a claim goes on: from leg to leg, each in its line.

use super::{Core, claim::Stage, entry::State};
use crate::error::AcquireErrorKind;

/// How far a claim has come.
enum Progress {
    Complete,
    /// It is this leg's turn.
    Turn(usize),
    /// The store, or a line, has the next word.
    Waits,
    Refused(usize, AcquireErrorKind),
    Passed(usize, AcquireErrorKind),
    /// A leg before this one was lost, or this one itself.
    Stray(usize),
}

impl Core {
    /// Takes a claim as far as it gets without new word from the store.
    pub(super) fn advance(&mut self, id: u64) {
        while let Some(claim) = self.claims.get_mut(&id)
            && let Stage::Open = claim.stage
        {
            match self.progress(id) {
                Progress::Waits => return,
                Progress::Refused(leg, kind) => return self.refuse_leg(id, leg, kind),
                Progress::Passed(leg, kind) => self.pass_leg(id, leg, kind),
                Progress::Stray(leg) => self.park_leg(id, leg),
                Progress::Complete if !self.owes(id) => return self.grant_claim(id),
                Progress::Complete | Progress::Turn(_) if self.asks_store() => {
                    return self.list_claim(id);
                }
                _ if self.owes(id) => self.pay_here(id),
                Progress::Complete => {}
                Progress::Turn(leg) => self.begin_leg_here(id, leg),
            }
        }
    }

    /// After an exchange was answered or given up: its claims go on.
    pub(super) fn reopen_all(&mut self, claims: &[u64]) {
        claims.iter().for_each(|id| self.reopen(*id));
    }

    /// Takes a claim that was to be sent, or was, on from where its legs are.
    pub(super) fn reopen(&mut self, id: u64) {
        if let Some(claim) = self.claims.get_mut(&id)
            && let Stage::Listed | Stage::Sent = claim.stage
        {
            claim.stage = Stage::Open;
            self.advance(id);
        }
    }

    fn progress(&self, id: u64) -> Progress {
        let mut turn = None;
        for (number, lease) in self.claims[&id].legs.iter().enumerate() {
            let Some(entry) = self.lines[lease.line].entries.get(&lease.seq()) else {
                continue;
            };
            match entry.state {
                State::Held { .. } if turn.is_some() || entry.lease.is_over(self.ctx.now) => {
                    // What may bring it back into the store has to be answered first.
                    return if entry.open {
                        Progress::Waits
                    } else {
                        Progress::Stray(number)
                    };
                }
                State::Held { .. } => {}
                State::Parked => turn = turn.or(Some(number)),
                State::Refused(kind) => return Progress::Refused(number, kind),
                State::Passed(kind) => return Progress::Passed(number, kind),
                _ => return Progress::Waits,
            }
        }
        turn.map_or(Progress::Complete, Progress::Turn)
    }

    fn list_claim(&mut self, id: u64) {
        if let Some(claim) = self.claims.get_mut(&id) {
            claim.stage = Stage::Listed;
            self.asking.insert(id);
        }
    }

    /// Without the store legs are taken one after the other: nobody sees anything of it before the lock is free.
    fn begin_leg_here(&mut self, id: u64, leg: usize) {
        let lease = self.claims[&id].legs[leg].clone();
        let line = &mut self.lines[lease.line];
        if let Some(entry) = line.entries.get_mut(&lease.seq()) {
            entry.begin(self.ctx.now);
            line.set(&mut self.ctx, lease.seq(), State::Asking(None));
            match self.ctx.down {
                Some(refused) if line.local.is_none() => {
                    line.decide_without_store(&mut self.ctx, lease.seq(), refused);
                }
                _ => line.acquire_here(&mut self.ctx, lease.seq()),
            }
        }
        self.settle(lease.line);
    }

    fn park_leg(&mut self, id: u64, leg: usize) {
        let lease = self.claims[&id].legs[leg].clone();
        let line = &mut self.lines[lease.line];
        line.release_here(&mut self.ctx, lease.seq());
        line.park(&mut self.ctx, lease.seq());
        self.settle(lease.line);
    }

    fn pass_leg(&mut self, id: u64, leg: usize, kind: AcquireErrorKind) {
        let Some(claim) = self.claims.get_mut(&id) else {
            return;
        };
        let lease = claim.legs.remove(leg);
        let line = &mut self.lines[lease.line];
        claim.passed.push((line.limit.clone(), kind));
        self.ctx.note_pass(line.key.0, kind);
        line.give_up(&mut self.ctx, lease.seq());
        self.settle(lease.line);
    }

    fn refuse_leg(&mut self, id: u64, leg: usize, kind: AcquireErrorKind) {
        let error = self.leg_error(id, leg, kind);
        self.refuse_claim(id, error);
    }
}
