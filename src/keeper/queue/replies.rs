//! Answers of the store, exchanges without an answer, wake-ups; and held permits that are due: renewed, or at their end.

use std::time::Duration;

use super::{
    PendingBatch, Queue, Release, Snapshot, StoreMoment,
    permit::entry::{Entry, HeldSlot, Holder, State},
};
use crate::{
    error::AcquireErrorKind,
    keeper::{
        context::{Availability, Context, RENEWALS_PER_LEASE, earliest},
        effects::{Effect, LogEvent},
    },
    leases::local_deadline,
    ledger::{Ask, Batch, BatchReply, Seq, Standing, Wake},
    telemetry::Measure,
};

/// Permits of one ledger that are due within this part of a lease are renewed together: it costs more to look at a ledger
/// than to renew one more permit of it. With half of the time between two renewals, permits that began at any times go
/// together after the second. With nearly all of it, each would be renewed whenever another is.
const TOGETHER: u32 = 2 * RENEWALS_PER_LEASE;
/// Permits of which it is checked whether they are due so soon.
const MAX_CHECKED: usize = 128;

/// Answers.
impl Queue {
    /// The store has answered a batch, at this moment.
    pub fn on_answer(
        &mut self,
        ctx: &mut Context,
        batch: &Batch,
        pending: &mut PendingBatch,
        answer: BatchReply,
        at: StoreMoment,
    ) {
        let BatchReply {
            in_use,
            waiting,
            head,
            ..
        } = answer;
        let lost_before = ctx.counts.lost;
        self.remember_waiting(head);
        self.snapshot = Snapshot {
            in_use,
            waiting,
            head,
            seen: at,
        };
        pending.nearest_ms = answer.nearest_ms;
        self.follow_right(ctx, batch, at);
        for release in pending.releases.drain(..) {
            if release.not_after_us >= at.store_us {
                let rest = Duration::from_micros(release.not_after_us - at.store_us);
                self.repeat_release(ctx, release, rest + Duration::from_millis(1));
            } else {
                ctx.confirm(release.seq);
            }
        }
        for inquiry in pending.inquiries.drain(..) {
            ctx.effects.push(Effect::Answer(inquiry, self.usage()));
        }
        for (seq, standing) in batch.renew.iter().zip(answer.renewed) {
            self.renewed(ctx, *seq, standing, at);
        }
        let was_adopted = |standing: &&Standing| matches!(standing, Standing::Adopted { .. });
        let count = answer.adopted.iter().filter(was_adopted).count();
        if count > 0 {
            ctx.measure(self.limit_id, Measure::Adopted(count as u64));
            let limit = self.limit.clone();
            ctx.log(LogEvent::Adopted {
                limit,
                count,
                in_use,
            });
        }
        for (seq, standing) in batch.adopt.iter().zip(answer.adopted) {
            self.adopted(ctx, *seq, standing, at);
        }
        let mut stale = Vec::new();
        let queued = answer
            .acquired
            .iter()
            .filter(|standing| matches!(standing, Standing::Waiting { .. }))
            .count();
        let mut place = waiting - (queued as u32).min(waiting);
        for (ask, standing) in batch.acquire.iter().zip(answer.acquired) {
            place += u32::from(matches!(standing, Standing::Waiting { .. }));
            if self.acquired(ctx, ask.seq, standing, place, at) {
                stale.push(ask.seq);
            }
        }
        for seq in stale.into_iter().rev() {
            self.resend(ctx, seq);
        }
        for promotion in answer.promoted {
            self.granted(ctx, promotion.seq, at, promotion.until_ms);
        }
        self.log_losses(ctx, lost_before);
    }

    /// Logs how many permits were lost since there were so many.
    fn log_losses(&self, ctx: &mut Context, before: u64) {
        let count = ctx.counts.lost - before;
        if count > 0 {
            let limit = self.limit.clone();
            ctx.log(LogEvent::Lost { limit, count });
        }
    }

    /// The store says that a slot is held, `counted` from then, `until_ms`.
    fn granted(&mut self, ctx: &mut Context, seq: Seq, counted: StoreMoment, until_ms: u64) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            // Given up in the meantime, or put there by an exchange that ran late.
            return self.release_ghost(ctx, seq);
        };
        entry.in_store.present = true;
        if let State::Leaving = entry.state() {
            return self.give_up(ctx, seq);
        }
        let now = ctx.now;
        let until = local_deadline(counted.sent, counted.store_us, until_ms, ctx.settings.lease);
        let renew_at = ctx.renew_at(counted.sent, until);
        match entry.state() {
            State::Refused(_) | State::Passed(_) => self.retire(ctx, seq),
            State::Held(_) if !entry.lease.extend(until, now) => self.lose(ctx, seq),
            State::Held(_) => {
                ctx.record(|history, now| history.held(&self.ledger, seq, until, until_ms, now));
                self.set_due(ctx, seq, renew_at);
            }
            // There must be time to renew it.
            _ if until <= now + ctx.settings.store_timeout => self.check_grant(ctx, seq),
            _ => {
                ctx.record(|history, now| history.held(&self.ledger, seq, until, until_ms, now));
                entry.lease.hold(Some(until));
                self.hold(ctx, seq, Some(renew_at));
            }
        }
    }

    fn renewed(&mut self, ctx: &mut Context, seq: Seq, standing: Standing, at: StoreMoment) {
        if let Some(entry) = self.entries.get_mut(&seq) {
            entry.in_store.renewing = false;
            if std::mem::take(&mut entry.in_store.renew_again) {
                self.renew(seq);
            }
        }
        if let Standing::Held { until_ms } = standing {
            return self.granted(ctx, seq, at, until_ms);
        }
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        match (*entry.state(), standing) {
            // The answer is older than the grant.
            (State::Held(HeldSlot { since, .. }), _) if at.sent < since => {
                self.set_due_now(ctx, seq)
            }
            (State::Checking { since }, _) if at.sent < since => self.renew(seq),
            // The store has lost it, or has gone back to an older copy.
            (State::Held(_), _) => self.outbox().adopt.push_back(seq),
            (State::Waiting { .. } | State::Checking { .. }, Standing::Waiting { ticket }) => {
                self.wait_in_store(ctx, seq, ticket, at);
            }
            (State::Waiting { .. } | State::Checking { .. }, _) => {
                entry.in_store.present = false;
                self.ask_again(ctx, seq);
            }
            _ => {}
        }
    }

    fn adopted(&mut self, ctx: &mut Context, seq: Seq, standing: Standing, at: StoreMoment) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        entry.exchange_over(0);
        ctx.moved.extend(entry.claim());
        match (standing, entry.state()) {
            (Standing::Held { until_ms } | Standing::Adopted { until_ms }, _) => {
                self.granted(ctx, seq, at, until_ms);
            }
            (_, State::Leaving) => self.give_up(ctx, seq),
            _ => {
                self.set_due_now(ctx, seq);
                self.outbox().adopt.push_back(seq);
            }
        }
    }

    /// A request was answered. Returns whether it came too late and has to be [resent](Self::resend).
    fn acquired(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        standing: Standing,
        place: u32,
        at: StoreMoment,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return false;
        };
        entry.exchange_over(0);
        entry.in_store.present |=
            matches!(standing, Standing::Held { .. } | Standing::Waiting { .. });
        let State::Sent { .. } = entry.state() else {
            self.answered_late(ctx, seq);
            return false;
        };
        match standing {
            Standing::Held { until_ms } => self.granted(ctx, seq, at, until_ms),
            Standing::Waiting { ticket } => {
                entry.place = place;
                entry.begin(ctx.now);
                self.wait_in_store(ctx, seq, ticket, at);
            }
            Standing::Full => self.refused(ctx, seq, AcquireErrorKind::Full),
            Standing::QueueFull => self.refused(ctx, seq, AcquireErrorKind::QueueFull),
            // It is not its turn, or its claim came too late.
            _ if entry.claim().is_some() => self.unsend_leg(ctx, seq),
            Standing::Stale | Standing::Absent | Standing::Adopted { .. } => {
                entry.unsend();
                return true;
            }
        }
        false
    }

    /// A request was answered that was decided on before: it was given up or refused, or a wake-up came first. A late
    /// 'waiting' changes nothing.
    fn answered_late(&mut self, ctx: &mut Context, seq: Seq) {
        match self.entries.get(&seq).map(Entry::state) {
            Some(State::Leaving) => self.give_up(ctx, seq),
            Some(State::Refused(_) | State::Passed(_)) => self.retire(ctx, seq),
            _ => self.set_due_now(ctx, seq),
        }
    }

    /// Takes a leg out of the snapshot, before the legs of an exchange's claims get their standings.
    pub fn uncount_leg(&mut self, standing: &Standing) {
        let queued = u32::from(matches!(standing, Standing::Waiting { .. }));
        self.snapshot.waiting = self.snapshot.waiting.saturating_sub(queued);
    }

    /// As [`acquired`](Self::acquired), for a leg of a claim.
    pub fn on_leg_answer(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        standing: Standing,
        at: StoreMoment,
    ) -> bool {
        self.snapshot.waiting += u32::from(matches!(standing, Standing::Waiting { .. }));
        let place = self.snapshot.waiting;
        self.acquired(ctx, seq, standing, place, at)
    }

    /// Waiters that a new head has passed still waited when the old head was seen: notes that.
    fn remember_waiting(&mut self, head: Option<i64>) {
        for (ticket, seq) in self.waiters_before(head.unwrap_or(0)) {
            let snapshot = self.snapshot;
            self.saw_waiting(seq, |seen| snapshot.seen_waiting(ticket, seen));
        }
    }

    /// All that an exchange has about this queue is done. Looks for waiters that have left the store's queue, and sets
    /// the timers of those that have not.
    pub fn after_answer(&mut self, ctx: &mut Context, pending: &PendingBatch, at: StoreMoment) {
        self.in_flight -= 1;
        let head = self.snapshot.head;
        // Grants go in the order of tickets: one below the head's has left, or was passed over while this process had no
        // connection. The store has to be asked which, though not in each exchange.
        let pause = ctx.settings.poll_interval / 10;
        for (_, seq) in self.waiters_before(head.unwrap_or(0)) {
            match self.entries.get(&seq).map(Entry::state) {
                Some(State::Waiting { seen, .. }) if at.sent < seen.sent + pause => {}
                _ => self.renew(seq),
            }
        }
        let Some(waiters) = &mut self.waiters else {
            return;
        };
        let Some((first, _)) = waiters.by_ticket.first() else {
            self.waiters = None;
            return;
        };
        // Leases are renewed long before they end, so a replica has crashed. The replica of the head asks first; if that is
        // the one that has crashed, the others do.
        let turn = if head == Some(*first) {
            Duration::ZERO
        } else {
            ctx.settings.poll_interval / 10
        };
        waiters.handover_at = pending.nearest_ms.map(|nearest_ms| {
            let rest = nearest_ms.saturating_sub(at.store_us / 1_000) + 1;
            ctx.now + Duration::from_millis(rest) + turn
        });
        waiters.poll_at = Some(ctx.now + ctx.jittered(ctx.settings.poll_interval));
        let next = Some(ctx.now + ctx.settings.waiter_ttl);
        waiters.roll_call_at = waiters.roll_call_at.or(next);
    }
}

/// Wake-ups.
impl Queue {
    /// Another replica's exchange has promoted a waiter.
    pub fn on_wake(&mut self, ctx: &mut Context, seq: Seq, wake: &Wake) {
        let seen = match self.entries.get(&seq).map(Entry::state) {
            Some(State::Waiting { ticket, seen }) => {
                Some(self.snapshot.seen_waiting(*ticket, *seen))
            }
            Some(State::Sent { at, .. }) => Some(StoreMoment {
                store_us: 0,
                sent: *at,
            }),
            Some(State::Held(_) | State::Checking { .. }) => return,
            _ => None,
        };
        let counted_from = |sent| StoreMoment {
            store_us: wake.granted_us,
            sent,
        };
        match seen {
            Some(seen) if wake.granted_us >= seen.store_us => {
                self.granted(ctx, seq, counted_from(seen.sent), wake.until_ms);
            }
            // The grant is older than that: ask.
            Some(_) => self.renew(seq),
            None => self.granted(ctx, seq, counted_from(ctx.now), wake.until_ms),
        }
    }
}

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
                ctx.moved.extend(entry.claim());
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
                State::Refused(_) | State::Passed(_) => self.retire(ctx, *seq),
                State::Sent { .. } if retry => again.extend(self.rename(ctx, *seq)),
                // It was woken before its answer came, and goes on checking its grant while the store may be fine.
                State::Checking { .. } if retry => {}
                State::Sent { .. } | State::Checking { .. } => {
                    self.fall_back(ctx, *seq, availability);
                }
                _ => self.set_due_now(ctx, *seq),
            }
        }
        for seq in again.into_iter().rev() {
            self.ask_first(seq);
        }
        if availability == Availability::Refused {
            self.leave_store(ctx, availability);
        }
        if let Some(waiters) = &mut self.waiters
            && !waiters.by_ticket.is_empty()
        {
            waiters.poll_at = Some(ctx.now + pause);
        }
    }

    /// A leg of a claim, or a request that was sent as one, has no answer: the store is asked under another name, or not at
    /// all.
    pub fn on_leg_failure(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        not_after_us: u64,
        availability: Availability,
    ) {
        let retry = availability == Availability::Up;
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        entry.exchange_over(not_after_us);
        match entry.state() {
            State::Leaving => self.give_up(ctx, seq),
            State::Refused(_) | State::Passed(_) => self.retire(ctx, seq),
            State::Sent { .. } if availability == Availability::Refused => {
                self.refuse(ctx, seq, AcquireErrorKind::Misconfigured);
            }
            State::Sent { .. } if entry.claim().is_some() => self.park(ctx, seq),
            State::Sent { .. } if retry => {
                if let Some(new) = self.rename(ctx, seq) {
                    self.ask_first(new);
                }
            }
            State::Sent { .. } | State::Checking { .. } if !retry => {
                self.fall_back(ctx, seq, availability);
            }
            _ => self.set_due_now(ctx, seq),
        }
    }

    /// Releases a name once more after a pause.
    fn repeat_release(&mut self, ctx: &Context, release: Release, pause: Duration) {
        let at = ctx.now + pause.min(ctx.settings.poll_interval);
        let outbox = self.outbox();
        outbox.later.push(release);
        outbox.later_at = earliest(outbox.later_at, Some(at));
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

/// Held permits that are due.
impl Queue {
    /// Renews these permits, or ends them if they are over; and with them others that are due before long.
    pub fn renew_due(&mut self, ctx: &mut Context, due: impl Iterator<Item = Seq>) {
        let before = ctx.counts.lost;
        due.for_each(|seq| self.renew_or_end(ctx, seq));
        let soon = ctx.now + ctx.settings.lease / TOGETHER;
        let is_due = |entry: &Entry| match entry.state() {
            State::Held(hold) => hold.due.is_some_and(|at| at <= soon),
            _ => false,
        };
        let others = self.entries.iter().take(MAX_CHECKED);
        let others = others.filter(|(_, entry)| is_due(entry));
        for seq in others.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            self.renew_or_end(ctx, seq);
        }
        self.log_losses(ctx, before);
    }

    fn renew_or_end(&mut self, ctx: &mut Context, seq: Seq) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        let (holder, entering) = (entry.holder(), entry.in_store.entering);
        match holder {
            // Nothing is to be done for one that is gone, or whose request still has an answer to come.
            None => return,
            Some(Holder::Request | Holder::Reuser) if entering => return,
            Some(_) => {}
        }
        if entry.lease.is_over(ctx.now) {
            return self.lose(ctx, seq);
        }
        // One without a deadline was admitted without the store, where it is being adopted.
        let deadline = entry.lease.deadline();
        let deadline = deadline.unwrap_or(ctx.now + ctx.settings.lease);
        if !entering {
            self.renew(seq);
        }
        self.set_due(ctx, seq, deadline);
    }
}
