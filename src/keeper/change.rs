//! What can happen to an entry of a line: granted, refused, given up, lost, asked again.

use tokio::time::Instant;

use super::{
    Ctx,
    clock::local_deadline,
    entry::{Entry, Seen, State},
    line::Line,
    work::Queue,
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    ledger::Seq,
    telemetry::Measure,
};

impl Line {
    /// Changes an entry's state, and everything that is counted or listed by it.
    pub(super) fn set(&mut self, ctx: &mut Ctx, seq: Seq, state: State) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        unlist(entry, ctx, &mut self.queue, self.young_from);
        ctx.uncount(self.key.0, entry.state);
        let state = match state {
            State::Refused(kind) if entry.shadow => State::Passed(kind),
            state => state,
        };
        entry.state = state;
        ctx.count(self.key.0, state);
        let line = entry.lease.line;
        match state {
            State::Waiting { ticket, .. } => {
                let queue = self.queue.get_or_insert_default();
                queue.waiters.insert((ticket, seq));
                ctx.expiries.insert((entry.wait_until(), line, seq));
            }
            State::WaitingHere => drop(ctx.expiries.insert((entry.wait_until(), line, seq))),
            // Its slot is there: only the store's word is missing, and that has its own time limit.
            State::Asking(_) | State::Checking => {}
            State::Held { .. } | State::Refused(_) | State::Passed(_) | State::Parked => {
                ctx.wake(entry.waker.take());
                ctx.moved.extend(entry.claim);
            }
        }
        if let State::Held { look_at: Some(at) } = state {
            self.list(ctx, line, seq, at);
        }
    }

    /// Takes an entry out of the line, without a word to any ledger.
    pub(super) fn remove(&mut self, ctx: &mut Ctx, seq: Seq) -> Option<Entry> {
        let entry = self.entries.get(&seq)?;
        unlist(entry, ctx, &mut self.queue, self.young_from);
        ctx.uncount(self.key.0, entry.state);
        self.entries.remove(&seq)
    }

    /// Puts a name on the release list if the store may know it, unless an answer that will tell is still to come.
    pub(super) fn retire(&mut self, ctx: &Ctx, seq: Seq) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        if !entry.open && (entry.in_store || entry.not_after_us > 0) {
            let release = ctx.release(seq, entry.not_after_us);
            self.work.get_or_insert_default().release.push(release);
            (entry.in_store, entry.not_after_us) = (false, 0);
        }
    }

    /// Gives a request that is not under way a new name, to ask with from the start.
    pub(super) fn rename(&mut self, ctx: &mut Ctx, seq: Seq) -> Option<Seq> {
        self.retire(ctx, seq);
        let mut entry = self.remove(ctx, seq)?;
        let new = ctx.next_seq();
        entry.lease.rename(new);
        (entry.state, entry.renewing) = (State::Asking(None), false);
        // An answer that is still to come is about the old name, and says nothing new: the store has told of it.
        (entry.open, entry.alone) = (false, false);
        ctx.count(self.key.0, entry.state);
        self.entries.insert(new, entry);
        Some(new)
    }

    /// Puts a leg of a claim aside, under a new name, until it is its turn.
    pub(super) fn park(&mut self, ctx: &mut Ctx, seq: Seq) {
        if let Some(new) = self.rename(ctx, seq) {
            self.set(ctx, new, State::Parked);
        }
    }

    /// Asks the store under a new name, at the end of the line; or the policy, if the store is down.
    pub(super) fn ask_again(&mut self, ctx: &mut Ctx, seq: Seq) {
        match self.entries.get_mut(&seq) {
            Some(entry) if !entry.wanted => {
                entry.open = false;
                return self.give_up(ctx, seq);
            }
            Some(entry) if entry.claim.is_some() => return self.park(ctx, seq),
            _ => {}
        }
        let Some(new) = self.rename(ctx, seq) else {
            return;
        };
        if let Some(entry) = self.entries.get_mut(&new) {
            entry.since = ctx.now;
        }
        match ctx.down {
            Some(refused) => self.decide_without_store(ctx, new, refused),
            None => self.work.get_or_insert_default().acquire.push_back(new),
        }
    }

    /// The store says that a slot is held, `counted` from then, `until_ms`.
    pub(super) fn granted(
        &mut self,
        ctx: &mut Ctx,
        seq: Seq,
        counted: Seen,
        until_ms: u64,
        now: Instant,
    ) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            // Given up in the meantime, or a ghost of an exchange that ran late.
            let release = ctx.release(seq, 0);
            self.work.get_or_insert_default().release.push(release);
            return;
        };
        entry.in_store = true;
        if !entry.wanted {
            return self.give_up(ctx, seq);
        }
        let until = local_deadline(counted.sent, counted.store_us, until_ms, ctx.settings.lease);
        let renew_at = ctx.renew_at(counted.sent, until);
        match entry.state {
            State::Refused(_) | State::Passed(_) => self.retire(ctx, seq),
            State::Held { .. } if !entry.lease.extend(until, now) => self.lose(ctx, seq),
            State::Held { .. } => {
                ctx.record(ctx.history.held(&self.ledger, seq, until, until_ms, now));
                self.look_at(ctx, seq, renew_at);
            }
            // There must be time to renew it.
            _ if until <= now + ctx.settings.store_timeout => {
                entry.since = now;
                self.set(ctx, seq, State::Checking);
                self.renew(seq);
            }
            _ => {
                ctx.record(ctx.history.held(&self.ledger, seq, until, until_ms, now));
                entry.lease.hold(Some(until));
                entry.since = now;
                let look_at = Some(renew_at);
                self.set(ctx, seq, State::Held { look_at });
            }
        }
    }

    /// Admits a request without the store's word.
    pub(super) fn admit(&mut self, ctx: &mut Ctx, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq) {
            ctx.record(ctx.history.admitted(&self.ledger, seq, ctx.now));
            entry.lease.hold(None);
            entry.since = ctx.now;
            self.set(ctx, seq, State::Held { look_at: None });
        }
    }

    /// Refuses a request, and takes back what any ledger may have of it.
    pub(super) fn refuse(&mut self, ctx: &mut Ctx, seq: Seq, kind: AcquireErrorKind) {
        self.set(ctx, seq, State::Refused(kind));
        self.retire(ctx, seq);
        self.release_here(ctx, seq);
    }

    /// Its user is gone: an entry leaves now, or when the exchange that may put it into the store is answered.
    pub(super) fn give_up(&mut self, ctx: &mut Ctx, seq: Seq) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        if entry.wanted {
            ctx.record(ctx.history.given_up(&self.ledger, seq, ctx.now));
        }
        if entry.taken && entry.wanted && entry.is_held() {
            ctx.note_hold(self.key.0, entry.lease.tenure_lasts(ctx.now));
        }
        ctx.effects.drop_waker(entry.waker.take());
        if entry.open {
            entry.wanted = false;
        } else {
            self.retire(ctx, seq);
            self.remove(ctx, seq);
        }
        self.release_here(ctx, seq);
    }

    /// A held permit is over. If nobody has taken it yet, its request goes on, once it is known where it stands.
    pub(super) fn lose(&mut self, ctx: &mut Ctx, seq: Seq) {
        match self.entries.get(&seq) {
            Some(entry) if entry.taken => {
                ctx.record(ctx.history.lost(&self.ledger, seq, ctx.now));
                ctx.end_lease(&entry.lease, LostErrorKind::Lost);
                ctx.counts.lost += 1;
                ctx.measure(self.key.0, Measure::Lost);
                self.give_up(ctx, seq);
            }
            Some(entry) if !entry.open => {
                self.release_here(ctx, seq);
                self.ask_again(ctx, seq);
            }
            _ => {}
        }
    }
}

/// Takes an entry out of everything that it is listed in by its state. The line is looked after as before until the
/// next answer.
fn unlist(entry: &Entry, ctx: &mut Ctx, queue: &mut Option<Box<Queue>>, young_from: Seq) {
    let (line, seq) = (entry.lease.line, entry.lease.seq());
    match entry.state {
        State::Waiting { ticket, .. } => {
            if let Some(queue) = queue {
                queue.waiters.remove(&(ticket, seq));
            }
            ctx.expiries.remove(&(entry.wait_until(), line, seq));
        }
        State::WaitingHere => drop(ctx.expiries.remove(&(entry.wait_until(), line, seq))),
        State::Held { look_at: Some(at) } if seq < young_from => {
            ctx.leases.remove(&(at, line, seq));
        }
        _ => {}
    }
}
