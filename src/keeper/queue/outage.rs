//! Failures and the doubts that follow: an unanswered exchange, a lost ledger, a store that is down. Affected requests
//! are retried, refused, or decided on by the fallback.
//!
//! While the store is down, only probes are sent to it. A limit's waiters follow its fallback; its holders keep their
//! own deadlines. When the store is back, waiters queue there under new names, and permits admitted meanwhile are
//! adopted.

use std::time::Duration;

use super::{
    Doubt, PendingBatch, Queue, Use,
    entries::entry::{Entry, State, WaitsIn},
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    fallbacks::Availability,
    keeper::{
        context::{Context, Decision},
        effects::Effect,
    },
    leases::{Lease, StoreMoment},
    ledger::{Ask, Batch, BatchReply, Seq, Standing, weight_of},
    telemetry::{Adopted, Measure, Topic},
};

/// Time for holders to be restored in a store that has lost them, before waiters ask it for slots.
const HOLDERS_FIRST: Duration = Duration::from_millis(100);

/// Doubts about what the store knows. About the *names* of an exchange without an answer: they are asked for again, and nobody
/// waits ([`unanswered`](Self::unanswered)). About *waiters*: they are asked for by name, and nobody waits. About *holders*:
/// those of this moment are asked for, and newcomers wait until they are confirmed.
impl Queue {
    /// Asks for every waiter by name, since messages may be missing: at once, or soon, unless an answer shows first that it is
    /// gone (`after_answer`). Soon, because holders of other replicas get there first if the store has lost its data. Grants
    /// being checked are asked for at once.
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
            Doubt::Missing => self.outbox.set_tells_loss(true),
            Doubt::Told => {
                self.outbox.set_tells_loss(false);
                if (ctx.returns).has_just_begun(self.terms.id, ctx.now) {
                    return;
                }
                (ctx.returns).begin_of_key(self.terms.part, self.terms.id, ctx.now);
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

    /// Permits have returned: a batch with the whole limit serves the requests that have queued meanwhile, here or at other
    /// replicas. A loss that was found here, without a permit to restore, is no longer reported to other replicas.
    pub fn on_returned(&mut self) {
        if !self.entries.is_introducing() {
            self.outbox.set_tells_loss(false);
        }
        (self.outbox).want(self.entries.waiting() > 0 || self.snapshot.waiting() > 0);
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
        let interval = ctx.settings.poll_interval;
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
        let again_at = (!retry).then(|| ctx.now + interval);
        self.releases.unanswered(&mut pending.releases, again_at);
        for seq in &batch.adopt {
            if let Some(entry) = self.entries.get_mut(*seq) {
                entry.presence.enter_unanswered(not_after_us);
            }
            self.entries.tell_request(ctx, *seq, Decision::Changed);
        }
        for seq in &batch.renew {
            if let Some(entry) = self.entries.get_mut(*seq) {
                entry.presence.renewal_over();
            }
        }
        for seq in batch.renew.iter().chain(&batch.adopt) {
            if !retry {
                self.entries.end_doubt(ctx, *seq);
            }
            let Some(entry) = self.entries.get_mut(*seq) else {
                continue;
            };
            match entry.state() {
                State::Leaving => self.release(ctx, *seq, Use::Held),
                State::Held(_) if retry => self.look_after(ctx, *seq),
                State::Checking { .. } if retry => self.ask_about(*seq),
                State::Held(_) => {
                    // No later than the lease's end, so that the holder is notified in time.
                    let end = entry.lease.deadline();
                    let due = end.map_or(ctx.now + interval, |end| end.min(ctx.now + interval));
                    self.set_due(*seq, due);
                }
                _ => {}
            }
        }
        for Ask { seq, .. } in &batch.acquire {
            self.entry_unanswered(ctx, *seq, not_after_us, availability);
        }
        if availability == Availability::Refused {
            self.leave_store(ctx, availability);
        }
        if self.entries.waiting() > 0 {
            self.polls.unanswered(ctx.now + interval);
        }
    }

    /// An entry got no answer, or its ledger cannot be used.
    pub fn entry_unanswered(
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

    /// A request continues without the exchange it is in. Slots that the exchange still acquires are released.
    pub fn leave_exchange(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(State::Sent { .. }) = self.entries.get(seq).map(Entry::state) {
            self.park(ctx, seq);
        }
    }
}

/// Losses of the ledger.
impl Queue {
    /// Whether the ledger has fewer permits than this process alone: it has lost some. Waiters count too, except for a short
    /// time after a silence of this process, in which they may be evicted. One may be missing, because its grant may have
    /// ended. `seen_before`: moment of the answer before this one.
    pub fn lacks_own(
        &mut self,
        ctx: &Context,
        batch: &Batch,
        pending: &PendingBatch,
        answer: &BatchReply,
        seen_before: StoreMoment,
    ) -> bool {
        let settings = &ctx.settings;
        let is_late = ctx.now > seen_before.sent + settings.poll_interval + settings.store_timeout;
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
        let own = || pending.own_held + pending.own_waiting + asks.map(units).sum::<u32>();
        answer.in_use < pending.own_held + answer.granted_units(batch)
            || are_there && answer.in_use + answer.waiting + 1 < own()
    }

    /// Counts adopted permits, before their leases are extended: a permit without a deadline was never granted by the
    /// store.
    pub(super) fn report_adopted(&self, ctx: &mut Context, batch: &Batch, standings: &[Standing]) {
        let (mut restored, mut by_fallback) = (0, 0);
        for (seq, standing) in batch.adopt.iter().zip(standings) {
            // Its lease may have ended meanwhile. One that a fallback has admitted has no deadline, and ends only at its bounds.
            let has_run_out = |lease: &Lease| {
                lease.is_over(ctx.now) && lease.end_reason() == Some(LostErrorKind::Lost)
            };
            let was_granted =
                |entry: &Entry| entry.lease.deadline().is_some() || has_run_out(&entry.lease);
            match (standing, self.entries.get(*seq)) {
                (Standing::Adopted { .. }, Some(entry)) if was_granted(entry) => restored += 1,
                (Standing::Adopted { .. }, Some(_)) => by_fallback += 1,
                _ => {}
            }
        }
        if restored > 0 {
            ctx.effects.push(Effect::LostAdopted);
        }
        let (limit, key) = (self.terms.limit_id, self.terms.id);
        for (why, count) in [(Adopted::Lost, restored), (Adopted::Fallback, by_fallback)] {
            if count > 0 {
                ctx.measure(limit, Measure::Adopted(why, count));
                ctx.report(limit, Topic::Adopted(why), key, count);
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
            State::Waiting(WaitsIn::Here) => refused,
            State::Waiting(WaitsIn::InStore { .. }) | State::Checking { .. } => true,
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
        self.introduce(ctx, Doubt::OfStore);
        self.releases.repeat_all();
        self.end_ledger(ctx);
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
