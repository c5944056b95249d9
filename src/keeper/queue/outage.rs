//! Failures and the doubts that follow: an unanswered exchange, a lost permit or ledger, a store that is down. Affected requests
//! are retried, refused, or decided on by the fallback.
//!
//! While the store is down, only probes are sent to it. A limit's waiters follow its fallback; its holders keep their
//! own deadlines. When the store is back, waiters queue there under new names, and permits admitted meanwhile are
//! adopted.

use std::time::Duration;

use super::{
    Doubt, PendingBatch, Queue, Use,
    dues::add_report,
    entries::entry::{Entry, Holder, Line, State},
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    fallbacks::Availability,
    keeper::{
        context::{Context, Decision},
        effects::Effect,
    },
    leases::StoreMoment,
    ledger::{Ask, Batch, BatchReply, Operation, Seq, Standing, weight_of},
    telemetry::{Adopted, Measure, Topic},
};

/// Time for holders to be restored in a store that has lost them, before waiters ask it for slots.
const HOLDERS_FIRST: Duration = Duration::from_millis(100);

/// Doubts about what the store knows. About the *names* of an exchange without an answer: they are asked for again, and nobody
/// waits ([`unanswered`](Self::unanswered)). About *waiters*: they are asked for by name, and nobody waits. About *holders*:
/// those of this moment are asked for, and newcomers wait until they are confirmed.
impl Queue {
    /// Asks for every waiter by name, since messages may be missing: at once, or soon. Soon, because holders of other replicas
    /// get there first if the store has lost its data. Grants being checked are asked for at once.
    pub fn call_roll(&mut self, ctx: &Context, at_once: bool) {
        if !at_once {
            let soon = HOLDERS_FIRST.min(ctx.settings.poll_interval);
            self.polls.call_roll_by(ctx.now + soon);
        }
        for seq in self.entries.those(|entry| match entry.state() {
            State::Waiting(_) => at_once,
            State::Checking { .. } => true,
            _ => false,
        }) {
            self.ask_about(seq);
        }
    }

    /// Introduces the queue to the store: asks for all holders of this moment, and holds back newcomers until their
    /// confirmation, however many exchanges that takes. If one of these is not answered, its names are asked for again; only
    /// another introduction asks for more. Holders are adopted only if the store does not know them: a late `adopt` could
    /// restore a permit that was released meanwhile. Waiters follow.
    pub fn introduce(&mut self, ctx: &mut Context, why: Doubt) {
        match why {
            Doubt::Missing => self.outbox.tell_loss(true),
            Doubt::Told => {
                self.outbox.tell_loss(false);
                if (ctx.returns).has_just_begun(self.terms.id, ctx.now) {
                    return;
                }
                ctx.returns
                    .begin_of_key(self.terms.part, self.terms.id, ctx.now);
            }
            Doubt::OfStore => {}
        }
        for seq in self.entries.those(Entry::is_held) {
            if self.entries.introduce(seq) {
                self.outbox.by_name(seq);
            }
        }
        self.outbox.ask_for_holders();
        self.polls.distrust_absence(ctx.now);
        self.outbox.want(self.pause.send_again(true));
        self.call_roll(ctx, false);
    }

    /// Permits have returned: newcomers of this replica, or of others, are admitted.
    pub fn ask_again(&mut self) {
        self.outbox
            .want(self.entries.waiting() > 0 || self.snapshot.waiting() > 0);
    }
}

/// Failed exchanges. The availability decides on their requests: with `Up`, the connection failed and the store may be
/// fine, so they retry.
impl Queue {
    /// A batch failed or got no answer. It may have run, or may run until `not_after_us`; with 0 it has certainly
    /// admitted nothing.
    pub fn unanswered(
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
            ctx.drop_inquiries(&mut pending.inquiries);
        } else {
            // Inquiries change nothing, so they can be retried.
            for inquiry in pending.inquiries.drain(..) {
                self.outbox.inquire(inquiry);
            }
        }
        self.empty_pool(ctx);
        if batch.pause_ms.is_some() {
            self.outbox.want(self.pause.send_again(batch.asks_pause));
        }
        self.outbox.again(batch.tells, batch.asks_holders);
        let again_at = (!retry).then(|| ctx.now + pause);
        self.releases.unanswered(&mut pending.releases, again_at);
        for seq in &batch.adopt {
            if let Some(entry) = self.entries.get_mut(*seq) {
                entry.presence.enter_unanswered(not_after_us);
            }
            self.entries.report(ctx, *seq, Decision::Changed);
        }
        for seq in &batch.renew {
            if let Some(entry) = self.entries.get_mut(*seq) {
                entry.presence.renewal_over();
            }
        }
        for seq in batch.renew.iter().chain(&batch.adopt) {
            if !retry {
                self.entries.confirm(ctx, *seq);
            }
            let Some(entry) = self.entries.get_mut(*seq) else {
                continue;
            };
            match entry.state() {
                State::Leaving => self.release(ctx, *seq, Use::Held),
                State::Held(_) if retry => self.look_after(ctx, *seq),
                State::Held(_) => {
                    // No later than the lease's end, so that the holder is notified in time.
                    let end = entry.lease.deadline();
                    let due = end.map_or(ctx.now + pause, |end| end.min(ctx.now + pause));
                    self.set_due(*seq, due);
                }
                _ => {}
            }
        }
        for Ask { seq, .. } in &batch.acquire {
            self.ask_unanswered(ctx, *seq, not_after_us, availability);
        }
        if availability == Availability::Refused {
            self.leave_store(ctx, availability);
        }
        if self.entries.waiting() > 0 {
            self.polls.unanswered(ctx.now + pause);
        }
    }

    /// An entry got no answer, or its ledger cannot be used.
    pub fn ask_unanswered(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        not_after_us: u64,
        availability: Availability,
    ) {
        let Some(entry) = self.entries.get_mut(seq) else {
            return;
        };
        entry.presence.enter_unanswered(not_after_us);
        match entry.state() {
            State::Leaving => self.release(ctx, seq, Use::Held),
            State::Sent { .. } | State::Checking { .. }
                if availability == Availability::Refused =>
            {
                self.refuse(ctx, seq, AcquireErrorKind::Misconfigured);
            }
            // Woken before its answer came: it keeps checking its grant while the store may be fine.
            State::Checking { .. } if availability == Availability::Up => {}
            State::Sent { .. } | State::Checking { .. } => self.park(ctx, seq),
            _ => self.look_after(ctx, seq),
        }
    }

    /// The driver has ended: watchers of leases are woken to notice, and inquiries are dismissed.
    pub fn on_abandoned(&mut self, ctx: &mut Context) {
        for entry in self.entries.all().values() {
            ctx.effects.push(Effect::Tell(entry.lease.clone()));
        }
        ctx.drop_inquiries(&mut self.outbox.take_inquiries());
    }
}

/// Entries whose requests ask again, and lost permits.
impl Queue {
    /// A request continues without the exchange it is in. Slots that the exchange still acquires are released.
    pub fn leave_exchange(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(State::Sent { .. }) = self.entries.get(seq).map(Entry::state) {
            self.park(ctx, seq);
        }
    }

    /// Parks a slot that was lost, or that follows a lost leg.
    pub fn park_slot(&mut self, ctx: &mut Context, seq: Seq) {
        let debt = self.debt_of(ctx, seq);
        self.release_here(ctx, seq, debt);
        self.park(ctx, seq);
    }

    /// Renews a held slot that is due, or that was not renewed while its exchange was in flight; or ends the slot if it
    /// has expired. Without a store, its tenant pays. If a request still has it, that is told of any change.
    pub(super) fn look_after(&mut self, ctx: &mut Context, seq: Seq) {
        // Its request may have left an exchange, and have waited for the end of it.
        self.entries.report(ctx, seq, Decision::Changed);
        let Some(entry) = self.entries.get(seq) else {
            return;
        };
        let entering = entry.presence.is_entering();
        match entry.holder() {
            // Nothing to do: the permit is gone, or its request still awaits an answer.
            None => return,
            Some(Holder::Request | Holder::Reuser) if entering => return,
            Some(_) => {}
        }
        if let Some(time) = self.pays_every(ctx) {
            let report = self.take_report(ctx, seq);
            if report.is_some() {
                add_report(self.batch_here(ctx), report);
                self.run_batch_here(ctx, Operation::Nothing);
            }
            return self.set_due(seq, ctx.now + time);
        }
        if entry.lease.is_over(ctx.now) {
            return self.lose(ctx, seq, LostErrorKind::Lost);
        }
        // Without a deadline, it was admitted without the store, which is adopting it.
        let deadline = entry.lease.deadline();
        let deadline = deadline.unwrap_or(ctx.now + ctx.settings.lease);
        if !entering {
            self.ask_about(seq);
        }
        self.set_due(seq, deadline);
    }

    /// Ends a held slot that is lost. If no permit has it yet, its request goes on once the slot's fate is known.
    pub fn lose(&mut self, ctx: &mut Context, seq: Seq, kind: LostErrorKind) {
        let Some(entry) = self.entries.get(seq) else {
            return;
        };
        match entry.holder() {
            Some(Holder::Permit) => {
                ctx.record(|history, now| history.lost(&self.terms.ledger, seq, now));
                let lease = entry.lease.clone();
                ctx.end_lease(&lease, kind);
                // Slots enter and leave the pool without the keeper's lock, but not once their lease has ended.
                if self.pool().is_some_and(|pool| pool.remove(&lease)) {
                    return self.release(ctx, seq, Use::Idle);
                }
                if kind == LostErrorKind::Lost {
                    ctx.note_lost_lease(&lease);
                }
                self.release(ctx, seq, Use::Held);
            }
            Some(Holder::Request | Holder::Reuser) if !entry.presence.is_entering() => {
                self.park_slot(ctx, seq);
            }
            _ => {}
        }
    }

    /// Loses all held slots, at a shutdown. Returns the number of slots that permits had.
    pub fn lose_all(&mut self, ctx: &mut Context) {
        for seq in self.entries.those(Entry::is_held) {
            self.lose(ctx, seq, LostErrorKind::ShutDown);
        }
    }
}

/// Losses of the ledger.
impl Queue {
    /// Whether the ledger has fewer permits than this process alone: it has lost some. Waiters count too, except for a short
    /// time after a silence of this process, in which they may be evicted. One may be missing, because its grant may have
    /// ended. `seen`: moment of the last answer.
    pub fn lacks_own(
        &mut self,
        ctx: &Context,
        batch: &Batch,
        pending: &PendingBatch,
        answer: &BatchReply,
        seen: StoreMoment,
    ) -> bool {
        let settings = &ctx.settings;
        let is_late = ctx.now > seen.sent + settings.poll_interval + settings.store_timeout;
        if is_late {
            self.polls.distrust_absence(ctx.now);
        }
        let are_there = !is_late && self.polls.are_in_place(ctx.now, settings.waiter_ttl);
        let asks = batch.acquire.iter().zip(&answer.acquired);
        let units = |(ask, standing): (&Ask, &Standing)| match standing {
            Standing::Held { .. } => weight_of(ask.seq),
            Standing::Waiting { .. } => 1,
            _ => 0,
        };
        let own = || pending.held + pending.waiting + asks.map(units).sum::<u32>();
        answer.in_use < pending.held + answer.granted_units(batch)
            || are_there && answer.in_use + answer.waiting + 1 < own()
    }

    /// Counts adopted permits, before their leases are extended: a permit without a deadline was never granted by the
    /// store.
    pub(super) fn report_adopted(&self, ctx: &mut Context, batch: &Batch, standings: &[Standing]) {
        let (mut lost, mut by_fallback) = (0, 0);
        for (seq, standing) in batch.adopt.iter().zip(standings) {
            let was_granted = |entry: &Entry| entry.lease.deadline().is_some();
            match (standing, self.entries.get(*seq)) {
                (Standing::Adopted { .. }, Some(entry)) if was_granted(entry) => lost += 1,
                (Standing::Adopted { .. }, Some(_)) => by_fallback += 1,
                _ => {}
            }
        }
        if lost > 0 {
            ctx.effects.push(Effect::LostAdopted);
        }
        for (why, count) in [(Adopted::Lost, lost), (Adopted::Fallback, by_fallback)] {
            if count > 0 {
                ctx.measure(self.terms.limit_id, Measure::Adopted(why, count));
                ctx.report(
                    self.terms.limit_id,
                    Topic::Adopted(why),
                    self.terms.id,
                    count,
                );
            }
        }
    }
}

/// The store goes down, or is back.
impl Queue {
    /// Parks all entries that ask the store: the fallback decides on them, or the store's refusal applies.
    pub fn leave_store(&mut self, ctx: &mut Context, availability: Availability) {
        self.empty_pool(ctx);
        self.terms.pace.freeze();
        self.releases.forget(ctx.now);
        let refused = availability == Availability::Refused;
        if refused {
            self.here.end();
        }
        let mut leaving = self.entries.those(|entry| match entry.state() {
            State::Waiting(Line::Here) => refused,
            State::Waiting(Line::InStore { .. }) | State::Checking { .. } => true,
            _ => false,
        });
        ctx.drop_inquiries(&mut self.outbox.take_inquiries());
        let is_idle = |entry: &Entry| matches!(entry.state(), State::Idle);
        let newcomers = self.outbox.take_newcomers().into_iter().map(|one| one.seq);
        leaving.extend(newcomers.filter(|seq| self.entry(*seq).is_some_and(is_idle)));
        for seq in leaving {
            if refused {
                self.refuse(ctx, seq, AcquireErrorKind::Misconfigured)
            } else {
                self.park(ctx, seq)
            }
        }
    }

    /// Moves waiters back to the store.
    pub fn rejoin_store(&mut self, ctx: &mut Context) {
        self.here.end();
        self.introduce(ctx, Doubt::OfStore);
        self.releases.repeat_all();
        for seq in self
            .entries
            .those(|entry| matches!(entry.state(), State::Waiting(Line::Here)))
        {
            self.park(ctx, seq);
        }
        if self.terms.limit().is_fair() {
            // Permits admitted here have paid here only: the store must not refund that.
            for seq in self.entries.those(Entry::is_held) {
                if let Some(entry) = self.entries.get_mut(seq) {
                    entry.pays_from(ctx.now);
                }
            }
        }
    }
}
