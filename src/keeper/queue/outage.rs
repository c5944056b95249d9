//! Failures: an exchange without an answer, a permit that is lost, a store that is down. A request is then retried, refused, or
//! decided on by the fallback.
//!
//! While the store is down only probes are sent to it. A limit's waiters move to where its fallback says; its holders
//! keep their own deadlines. When the store is back, waiters queue there under new names, and what was admitted meanwhile is
//! adopted.

use super::{
    PendingBatch, Queue,
    permit::entry::{Entry, Holder, State},
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    keeper::{
        context::{Availability, Context},
        effects::Effect,
    },
    ledger::{Ask, Batch, Seq, number_of},
};

/// Failures. The availability decides what becomes of the requests of the exchange: `Up` if the connection failed and the store may
/// be fine, so that they retry.
impl Queue {
    /// A batch has no answer, or failed. It may have run, or may run until `not_after_us`; with 0 it certainly has not
    /// admitted anything.
    pub fn on_failure(
        &mut self,
        ctx: &mut Context,
        batch: &Batch,
        pending: &mut PendingBatch,
        not_after_us: u64,
        availability: Availability,
    ) {
        let retry = availability == Availability::Up;
        let pause = ctx.settings.poll_interval;
        if !retry {
            ctx.dismiss(&mut pending.inquiries);
        } else if !pending.inquiries.is_empty() {
            // They change nothing, and can be retried.
            self.outbox().inquiries.append(&mut pending.inquiries);
        }
        self.empty_pool(ctx);
        for release in pending.releases.drain(..) {
            match retry {
                true => self.outbox().release.push(release),
                false => self.repeat_release(ctx, release, pause),
            }
        }
        for seq in &batch.adopt {
            if let Some(entry) = self.entries.get_mut(seq) {
                entry.exchange_over(not_after_us);
                ctx.claims_to_advance.extend(entry.claim());
            }
            self.set_due_now(ctx, *seq);
        }
        for seq in batch.renew.iter().chain(&batch.adopt) {
            let Some(entry) = self.entries.get_mut(seq) else {
                continue;
            };
            (entry.in_store.renewing, entry.in_store.renew_again) = (false, false);
            match entry.state() {
                State::Leaving => self.give_up(ctx, *seq),
                State::Held(_) if retry => self.renew(*seq),
                State::Held(_) => self.set_due(ctx, *seq, ctx.now + pause),
                _ => {}
            }
        }
        let mut again = Vec::new();
        for Ask { seq, .. } in &batch.acquire {
            let Some(entry) = self.entries.get_mut(seq) else {
                continue;
            };
            entry.exchange_over(not_after_us);
            match entry.state() {
                State::Leaving => self.give_up(ctx, *seq),
                State::Refused(_) | State::Bypassed(_) => self.release_in_store(ctx, *seq),
                State::Sent { .. } if retry => again.extend(self.rename(ctx, *seq)),
                // It was woken before its answer came, and goes on checking its grant while the store may be fine.
                State::Checking { .. } if retry => {}
                State::Sent { .. } | State::Checking { .. } => {
                    self.fall_back(ctx, *seq, availability);
                }
                _ => self.set_due_now(ctx, *seq),
            }
        }
        self.requeue(again);
        if availability == Availability::Refused {
            self.leave_store(ctx, availability);
        }
        if let Some(waiters) = &mut self.waiters
            && !waiters.by_ticket.is_empty()
        {
            waiters.poll_at = Some(ctx.now + pause);
        }
    }

    /// A leg of a claim, or a request that was sent as one, has no answer. A request that goes on under another name is
    /// returned, to be [retried](Self::requeue) with others.
    #[must_use]
    pub fn on_leg_failure(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        not_after_us: u64,
        availability: Availability,
    ) -> Option<Seq> {
        let retry = availability == Availability::Up;
        let entry = self.entries.get_mut(&seq)?;
        entry.exchange_over(not_after_us);
        match entry.state() {
            State::Leaving => self.give_up(ctx, seq),
            State::Refused(_) | State::Bypassed(_) => self.release_in_store(ctx, seq),
            State::Sent { .. } if availability == Availability::Refused => {
                self.refuse(ctx, seq, AcquireErrorKind::Misconfigured);
            }
            State::Sent { .. } if entry.claim().is_some() => self.park(ctx, seq),
            State::Sent { .. } if retry => return self.rename(ctx, seq),
            State::Sent { .. } | State::Checking { .. } if !retry => {
                self.fall_back(ctx, seq, availability);
            }
            _ => self.set_due_now(ctx, seq),
        }
        None
    }

    /// An exchange that had a batch for this queue is over, without an answer.
    pub fn after_failure(&mut self) {
        self.in_flight -= 1;
    }

    /// The driver has ended: requests and watchers of leases are woken to find that out, and inquiries are dismissed.
    pub fn on_abandoned(&mut self, ctx: &mut Context) {
        for entry in self.entries.values_mut() {
            ctx.effects.wake(entry.waker.take());
            ctx.effects.push(Effect::Tell(entry.lease.clone()));
        }
        if let Some(outbox) = &mut self.outbox {
            ctx.dismiss(&mut outbox.inquiries);
        }
    }
}

/// Requests that ask once more, and permits that are lost.
impl Queue {
    /// Asks the store under a new name, at the end of its queue; or falls back, if the store is down.
    pub(super) fn ask_again(&mut self, ctx: &mut Context, seq: Seq) {
        let is_leg = |entry: &Entry| entry.claim().is_some();
        if self.entries.get(&seq).is_some_and(is_leg) {
            return self.park(ctx, seq);
        }
        let Some(new) = self.start_over(ctx, seq) else {
            return;
        };
        match ctx.availability {
            Availability::Up => self.ask_for(new),
            down => self.fall_back(ctx, new, down),
        }
    }

    /// Retries requests that the store has not run: they came too late, or it had no memory for them.
    pub fn resend(&mut self, ctx: &mut Context, seqs: Vec<Seq>) {
        match ctx.availability {
            Availability::Up => self.requeue(seqs),
            down => {
                for seq in seqs {
                    self.fall_back(ctx, seq, down);
                }
            }
        }
    }

    /// Parks a leg that is in flight, under a new name. What its exchange brings is released.
    pub fn leave_exchange(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(State::Sent { .. }) = self.entries.get(&seq).map(Entry::state) {
            self.park(ctx, seq);
        }
    }

    /// Parks a leg whose slot cannot be kept: it was lost, or that of a leg before it was.
    pub fn park_leg(&mut self, ctx: &mut Context, seq: Seq) {
        self.release_here(ctx, seq);
        self.park(ctx, seq);
    }

    /// Ends a held slot that is lost. If no permit has it yet, its request goes on, once its fate is known.
    pub fn lose(&mut self, ctx: &mut Context, seq: Seq) {
        self.lose_by(ctx, seq, LostErrorKind::Lost);
    }

    fn lose_by(&mut self, ctx: &mut Context, seq: Seq, kind: LostErrorKind) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        match entry.holder() {
            Some(Holder::Permit | Holder::JointPermit | Holder::Companion | Holder::Leg) => {
                ctx.record(|history, now| history.lost(&self.ledger, seq, now));
                let lease = entry.lease.clone();
                ctx.end_lease(&lease, kind);
                // A slot comes and goes without the keeper's lock, but not once its lease is over.
                if self.pool().is_some_and(|pool| pool.remove(&lease)) {
                    return self.give_up_idle(ctx, seq);
                }
                if kind == LostErrorKind::Lost {
                    ctx.note_lost_lease(&lease);
                }
                self.give_up(ctx, seq);
            }
            Some(Holder::Request | Holder::Reuser) if !entry.in_store.entering => {
                self.release_here(ctx, seq);
                self.ask_again(ctx, seq);
            }
            _ => {}
        }
    }

    /// Loses all held slots, at a shutdown. Returns how many permits that concerns.
    pub fn lose_all(&mut self, ctx: &mut Context) -> usize {
        let mut lost = 0;
        for seq in self.names() {
            if let Some(entry) = self.entries.get(&seq).filter(|entry| entry.is_held()) {
                let is_alone = entry.holder() != Some(Holder::Companion);
                let is_permit = entry.holder().is_some_and(Holder::is_permit);
                lost += usize::from(is_permit && is_alone);
                self.lose_by(ctx, seq, LostErrorKind::ShutDown);
            }
        }
        lost
    }
}

/// The store is down, or back.
impl Queue {
    /// Has the fallback decide on all waiters. Those that the store refuses are refused here too.
    pub fn leave_store(&mut self, ctx: &mut Context, availability: Availability) {
        self.empty_pool(ctx);
        let refused = availability == Availability::Refused;
        if refused {
            self.ledger_here = None;
        }
        let mut waiters: Vec<Seq> = self.waiters().map(|(_, seq)| *seq).collect();
        waiters.extend(self.those(|entry| match entry.state() {
            State::Checking { .. } => true,
            State::WaitingHere => refused,
            _ => false,
        }));
        if let Some(outbox) = &mut self.outbox {
            ctx.dismiss(&mut outbox.inquiries);
            waiters.extend(outbox.acquire.drain(..));
        }
        for seq in waiters {
            self.fall_back(ctx, seq, availability);
        }
    }

    /// Moves waiters back to the store.
    pub fn return_to_store(&mut self, ctx: &mut Context) {
        self.ledger_here = None;
        self.introduce(ctx);
        let mut waiters = self.those(|entry| matches!(entry.state(), State::WaitingHere));
        // In the order in which they came.
        waiters.sort_by_key(|&seq| number_of(seq));
        for seq in waiters {
            self.ask_again(ctx, seq);
        }
    }
}
