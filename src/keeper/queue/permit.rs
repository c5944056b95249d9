//! Changes of an entry: entered, sent, granted, refused, released; and steps of the ledger in this process, which grant
//! permits (`run_here`). Names are put into the outbox here too.

use std::{num::NonZero, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    FORGET_AFTER, Newcomer, Queue, Release, Use,
    dues::add_debt,
    entries::entry::{Debt, Entry, HeldSlot, Holder, Paying, Requester, State, WaitsIn},
};
use crate::{
    error::AcquireErrorKind,
    keeper::{
        context::{Context, Decision},
        demand::Tenant,
    },
    leases::Lease,
    ledger::{Batch, Operation, Seq, Standing, weight_of},
    telemetry::Measure,
};

impl Queue {
    /// Creates an entry for a request. Its name is not sent until its turn begins.
    pub fn enter(
        &mut self,
        ctx: &mut Context,
        wait: Duration,
        weight: u32,
        request: Requester,
        tenant: Option<&Tenant>,
    ) -> Arc<Lease> {
        // The pool is for slots of one unit.
        let pool = self.kept.pool().cloned().filter(|_| weight == 1);
        let lease = ctx.new_lease(self.terms.id, weight, pool, request.shadow);
        let mut entry = Entry::new(lease.clone(), wait, ctx.now, Some(request));
        if self.terms.limit().is_fair() {
            entry.set_paying(Paying::new(tenant));
        }
        self.entries.insert(ctx, entry);
        lease
    }

    /// Changes an entry's state, and when the queue looks after it next. Timers stay when a state ends: those of waiters until
    /// the next answer, that of held permits until it is due.
    pub(super) fn set(&mut self, ctx: &mut Context, seq: Seq, state: State) {
        if self.entries.set(ctx, seq, state) {
            match state {
                State::Waiting(WaitsIn::InStore { .. }) => self.polls.begin(),
                State::Held(HeldSlot { due: Some(at), .. }) => self.renewals.note(at),
                _ => {}
            }
        }
    }

    /// Sends an entry from the outbox, if it is still to be sent. Returns whether it may wait, and the ticket of the place
    /// that it has lost.
    pub(super) fn send_listed(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
    ) -> Option<(bool, Option<NonZero<i64>>)> {
        let entry = self.entries.get_mut(seq)?;
        if !matches!(entry.state(), State::Idle) {
            return None;
        }
        let (waits, ticket) = (entry.waits, entry.ticket());
        if entry.is_alone() {
            self.entries.send_alone(seq, ctx.now);
        } else {
            self.send_leg(ctx, seq, false);
        }
        Some((waits, ticket))
    }

    /// Sends an entry of a request for several slots or charges.
    pub(super) fn send_leg(&mut self, ctx: &mut Context, seq: Seq, is_covered: bool) {
        self.set(ctx, seq, State::Sent { at: ctx.now });
        let Some(entry) = self.entries.get_mut(seq) else {
            return;
        };
        entry.presence.enter_sent();
        if let Some(requester) = entry.requester.filter(|_| !is_covered) {
            let (since, number) = (entry.turn_began_or(ctx.now), requester.id.number);
            self.kept.precede(Newcomer { seq, since, number });
        }
    }

    /// The store has granted the slot, with a lease that may be about to end.
    pub(super) fn check_grant(&mut self, ctx: &mut Context, seq: Seq) {
        self.set(ctx, seq, State::Checking { since: ctx.now });
        self.ask_about(seq);
    }

    /// The store has granted the slot, or this process has; in the latter case nothing is `due`.
    pub(super) fn hold(&mut self, ctx: &mut Context, seq: Seq, due: Option<Instant>) {
        let mut hold = HeldSlot {
            due,
            since: ctx.now,
            holder: Holder::Request,
            in_store: due.is_some(),
        };
        if self.terms.limit().is_fair()
            && let Some(entry) = self.entries.get_mut(seq)
        {
            entry.begin_paying(ctx.now);
            hold.due = due.or(self.pays_every(ctx).map(|time| ctx.now + time));
        }
        self.set(ctx, seq, State::Held(hold));
    }

    /// A ledger has refused the slot, and so the request.
    pub fn refuse(&mut self, ctx: &mut Context, seq: Seq, kind: AcquireErrorKind) {
        let decision = if self.entry(seq).is_some_and(Entry::is_shadow) {
            Decision::Bypassed(kind)
        } else {
            Decision::Refused(kind)
        };
        self.entries.tell_request(ctx, seq, decision);
    }

    /// Schedules the renewal, or the end, of a held permit.
    pub(super) fn set_due(&mut self, seq: Seq, at: Instant) {
        if self.entries.set_due(seq, at) {
            self.renewals.note(at);
        }
    }

    /// Puts an entry aside until its request asks again, under a new name, since the fate of the old one is unknown. If
    /// an exchange in flight may still enter the old name into the store, it is released when the exchange is over.
    pub(super) fn park(&mut self, ctx: &mut Context, seq: Seq) {
        let debt = self.debt_of(ctx, seq);
        self.release_in_store(ctx, seq, debt);
        let Some(entry) = self.entries.remove(ctx, seq) else {
            return;
        };
        if entry.presence.is_entering() {
            ctx.record(|history, now| history.given_up(&self.terms.ledger, seq, now));
            let lease = ctx.lease_named(self.terms.id, seq);
            let old = Entry::new(lease, Duration::ZERO, ctx.now, None);
            self.entries.keep_old_name(ctx, old, &entry);
        }
        let name = ctx.next_name(weight_of(seq));
        self.entries.rename(ctx, entry, name);
    }

    /// Admits a request that the store does not decide on.
    pub(super) fn admit(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(seq) {
            ctx.record(|history, now| history.admitted(&self.terms.ledger, seq, now));
            entry.lease.hold(None);
            self.hold(ctx, seq, None);
        }
    }

    /// Drops an entry whose user has gone: now, or once the exchange that may enter it into the store is answered.
    pub fn release(&mut self, ctx: &mut Context, seq: Seq, use_of_slot: Use) {
        if use_of_slot == Use::Idle {
            // The pool has subtracted it from the gauge, and so will its removal.
            ctx.measure(self.terms.limit_id, Measure::Held(1.0));
        }
        let debt = self.debt_of(ctx, seq);
        let Some(entry) = self.entries.get_mut(seq) else {
            return;
        };
        if !matches!(entry.state(), State::Leaving) {
            ctx.record(|history, now| history.given_up(&self.terms.ledger, seq, now));
        }
        if entry.holder() == Some(Holder::Permit) && use_of_slot != Use::Idle {
            let held = entry.lease.tenure_lasts(ctx.now);
            ctx.note_end(self.terms.limit_id, &entry.lease, held);
            if use_of_slot == Use::Held {
                (ctx.registry).note_hold(self.terms.limit_id, held, weight_of(seq));
            }
        }
        if entry.presence.is_entering() {
            self.set(ctx, seq, State::Leaving);
            if let Some(entry) = self.entries.get_mut(seq) {
                entry.requester = None;
                entry.forget_ticket();
            }
        } else {
            self.release_in_store(ctx, seq, debt);
            self.entries.remove(ctx, seq);
            if !ctx.confirmations.is_empty() && !self.is_releasing(seq) {
                ctx.confirm(seq);
            }
        }
        self.release_here(ctx, seq, debt);
    }

    pub(super) fn release_here(&mut self, ctx: &mut Context, seq: Seq, debt: Option<Debt>) {
        if self.here.get().is_some() {
            add_debt(self.batch_here(ctx), seq, debt);
            self.run_batch_here(ctx, Operation::Release(seq));
        }
    }

    /// Runs a step of the ledger in this process, if there is one, and admits the requests that it promotes.
    pub(super) fn run_here(&mut self, ctx: &mut Context, operation: Operation) -> Option<Standing> {
        self.batch_here(ctx);
        self.run_batch_here(ctx, operation)
    }

    /// The batch of the next step. One is reused, since building and dropping one costs more than the step.
    #[inline]
    pub(super) fn batch_here<'a>(&self, ctx: &'a mut Context) -> &'a mut Batch {
        let limits = self.limits_here(ctx);
        let batch = &mut ctx.scratch.batches[0];
        (batch.limit, batch.whole) = limits;
        batch.max_waiters = self.terms.limit().waiters();
        if batch.dues.is_some() != self.terms.limit().is_fair() {
            batch.dues = self.terms.empty_dues();
        }
        batch
    }

    pub(super) fn run_batch_here(
        &mut self,
        ctx: &mut Context,
        operation: Operation,
    ) -> Option<Standing> {
        let (promoted, standing) = self.here.run(&mut ctx.scratch, operation)?;
        self.read_here();
        for promotion in promoted {
            self.admit(ctx, promotion.seq);
        }
        standing
    }

    /// Hands a held slot of a request to its permit: the only one (`alone`), or one of several. Returns the place in which it joined
    /// the queue. `None`: it is alone, and has been lost.
    pub fn take(
        &mut self,
        ctx: &mut Context,
        lease: &Arc<Lease>,
        waited: Duration,
        alone: bool,
    ) -> Option<u32> {
        let seq = lease.seq();
        let entry = self.entries.get_mut(seq);
        let is_lost = |entry: &Entry| !entry.is_held() || lease.is_over(ctx.now);
        if alone && entry.as_deref().is_none_or(is_lost) {
            return None;
        }
        ctx.measure(self.terms.limit_id, Measure::Admitted(waited));
        let Some(entry) = entry else {
            return Some(0);
        };
        entry.requester = None;
        if let Some(Holder::Request) = entry.hand_over(Holder::Permit) {
            ctx.record(|history, now| history.taken(&self.terms.ledger, seq, now));
            lease.begin_tenure(ctx.now);
            entry.forget_ticket();
            lease.set_reusable(alone && (entry.presence.is_present() || !ctx.shared));
        }
        Some(entry.place)
    }
}

/// Filling the outbox.
impl Queue {
    /// Asks the store for a slot, ahead of later newcomers. The turn of a leg begins.
    pub fn ask_store(&mut self, ctx: &Context, newcomer: Newcomer) {
        if let Some(entry) = self.entries.get_mut(newcomer.seq) {
            entry.begin(ctx.now);
            if entry.is_alone() {
                self.kept.precede(newcomer);
            }
        }
        self.outbox.ask(newcomer);
    }

    /// Asks the store about an entry: a held one is renewed, and a waiting one gets its ticket.
    pub(super) fn ask_about(&mut self, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(seq)
            && entry.presence.list_renewal()
        {
            self.outbox.by_name(seq);
        }
    }

    /// Releases a name that an exchange may enter until then.
    pub(super) fn push_release(
        &mut self,
        ctx: &Context,
        seq: Seq,
        not_after_us: u64,
        debt: Option<Debt>,
    ) {
        let forget_at = ctx.now + FORGET_AFTER * ctx.settings.lease;
        (self.releases).push(Release::new(seq, not_after_us, forget_at, debt));
    }

    /// Releases a name if the store may know it. If its exchange is in flight, the answer decides.
    fn release_in_store(&mut self, ctx: &Context, seq: Seq, debt: Option<Debt>) {
        let Some(entry) = self.entries.get_mut(seq) else {
            return;
        };
        if let Some(not_after_us) = entry.presence.leave() {
            self.push_release(ctx, seq, not_after_us, debt);
        }
    }
}
