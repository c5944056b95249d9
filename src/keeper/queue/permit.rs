//! Changes of a permit: entered, queued, granted, refused, released; and steps of the ledger in this process, which
//! grant permits (`run_here`). Only this file changes a state. Counts and lists by state change with it: in
//! [`Queue::set`], and for an entry that is added, removed or renamed in `enter`, `remove` and `give_new_name`. Names are
//! put into the outbox here too.

pub(super) mod entry;

use std::{mem, num::NonZero, sync::Arc, time::Duration};

use tokio::time::Instant;

use self::entry::{Due, Entry, HeldSlot, Holder, InStore, Line, Paying, Requester, State};
use super::{
    FORGET_AFTER, HeldUnits, Newcomer, Outbox, Queue, Release, Waiters,
    dues::{add_due, add_report, count_tenant},
};
use crate::{
    error::AcquireErrorKind,
    keeper::{
        context::{Context, Decided, Decision, earliest},
        demand::{Taken, Tenant},
    },
    leases::{Lease, Leases, StoreMoment, Tenure},
    ledger::{Batch, Call, Dues, Operation, Seq, Standing, weight_of},
    limit::LimitId,
    telemetry::Measure,
};

/// How the slot of a removed entry was used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Held,
    Unused,
    /// Idle in the pool: no permit has it, and the end of the last one was counted.
    Idle,
}

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
        let pool = self.pool().cloned().filter(|_| weight == 1);
        let lease = ctx.new_lease(self.id, weight, pool, request.shadow);
        let mut entry = Entry::new(lease.clone(), wait, ctx.now, Some(request));
        if self.limit.is_fair() {
            entry.set_paying(Paying::new(tenant));
        }
        self.insert(ctx, entry);
        lease
    }

    fn insert(&mut self, ctx: &mut Context, entry: Entry) {
        count(ctx, &mut self.held, self.limit_id, &entry, true);
        if self.limit.is_fair() {
            count_tenant(ctx, self.limit_id, &entry, false, entry.is_counted());
        }
        self.entries.insert(entry.lease.seq(), entry);
    }

    /// Changes an entry's state, and all counts and indexes that depend on it.
    fn set(&mut self, ctx: &mut Context, seq: Seq, state: State) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        unindex(entry, &mut self.waiters);
        count(ctx, &mut self.held, self.limit_id, entry, false);
        let was_counted = self.limit.is_fair() && entry.is_counted();
        entry.state = state;
        count(ctx, &mut self.held, self.limit_id, entry, true);
        if self.limit.is_fair() {
            count_tenant(ctx, self.limit_id, entry, was_counted, entry.is_counted());
        }
        if let State::Waiting(Line::InStore { ticket, .. }) = state {
            let waiters = self.waiters.get_or_insert_default();
            waiters.by_ticket.insert((ticket, seq));
        }
        if !matches!(state, State::Sent { .. } | State::Leaving) {
            report(ctx, entry, Decision::Changed);
        }
        if let State::Held(HeldSlot { due: Some(at), .. }) = state {
            self.note_due(at);
        }
    }

    /// Sends an entry from the outbox, if it is still to be sent. Returns whether it may wait, and the ticket of the place
    /// that it has lost.
    pub(super) fn send_listed(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
    ) -> Option<(bool, Option<NonZero<i64>>)> {
        let entry = self.entries.get_mut(&seq)?;
        if !matches!(entry.state, State::Idle) {
            return None;
        }
        let (waits, ticket) = (entry.waits, entry.ticket());
        if entry.is_plain() {
            // Affects no count or list.
            entry.state = State::Sent { at: ctx.now };
            entry.in_store.entering = true;
        } else {
            self.send_leg(ctx, seq, false);
        }
        Some((waits, ticket))
    }

    /// Sends an entry of a request for several slots or charges.
    pub(super) fn send_leg(&mut self, ctx: &mut Context, seq: Seq, has_room: bool) {
        self.set(ctx, seq, State::Sent { at: ctx.now });
        if !has_room {
            self.note_asking(seq);
        }
        if let Some(entry) = self.entries.get_mut(&seq) {
            entry.in_store.entering = true;
        }
    }

    /// The store has enqueued the request, or confirms that it still waits.
    pub(super) fn wait_in_store(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        ticket: i64,
        seen: StoreMoment,
    ) {
        let line = Line::InStore { ticket, seen };
        self.set(ctx, seq, State::Waiting(line));
    }

    /// The ledger in this process has enqueued the request.
    pub(super) fn wait_here(&mut self, ctx: &mut Context, seq: Seq) {
        self.set(ctx, seq, State::Waiting(Line::Here));
    }

    /// The store had not granted the slot when the snapshot was taken.
    pub(super) fn saw_waiting(&mut self, seq: Seq) {
        let snapshot = self.snapshot;
        if let Some(entry) = self.entries.get_mut(&seq)
            && let State::Waiting(Line::InStore { ticket, seen }) = &mut entry.state
        {
            *seen = snapshot.seen_waiting(*ticket, *seen);
        }
    }

    /// The store has granted the slot, with a lease that may be about to end.
    pub(super) fn check_grant(&mut self, ctx: &mut Context, seq: Seq) {
        let since = ctx.now;
        if let Some(entry) = self.entries.get_mut(&seq)
            && let State::Waiting(Line::InStore { ticket, .. }) = entry.state
        {
            entry.set_ticket(ticket);
        }
        self.set(ctx, seq, State::Checking { since });
        self.renew(seq);
    }

    /// The store has granted the slot, or this process has; in the latter case nothing is `due`.
    pub(super) fn hold(&mut self, ctx: &mut Context, seq: Seq, due: Option<Instant>) {
        let mut hold = HeldSlot {
            due,
            since: ctx.now,
            holder: Holder::Request,
            in_store: due.is_some(),
        };
        if self.limit.is_fair()
            && let Some(entry) = self.entries.get_mut(&seq)
        {
            entry.begin_paying(ctx.now);
            hold.due = due.or(self.pays_every(ctx).map(|time| ctx.now + time));
        }
        self.set(ctx, seq, State::Held(hold));
    }

    /// A ledger has refused the slot, and so the request.
    pub fn refuse(&mut self, ctx: &mut Context, seq: Seq, kind: AcquireErrorKind) {
        if let Some(entry) = self.entries.get(&seq) {
            let decision = if entry.is_shadow() {
                Decision::Bypassed(kind)
            } else {
                Decision::Refused(kind)
            };
            report(ctx, entry, decision);
        }
    }

    /// The limit is no longer enforced: the request goes on without this slot.
    pub(super) fn bypass(&mut self, ctx: &mut Context, seq: Seq, kind: AcquireErrorKind) {
        if let Some(entry) = self.entries.get(&seq) {
            report(ctx, entry, Decision::Bypassed(kind));
        }
    }

    /// Reports a change to the request.
    pub(super) fn note_change(&self, ctx: &mut Context, seq: Seq) {
        if let Some(entry) = self.entries.get(&seq) {
            report(ctx, entry, Decision::Changed);
        }
    }

    /// The store did not enter the name, and no longer can: the request asks again under the same name.
    pub(super) fn park_unasked(&mut self, ctx: &mut Context, seq: Seq) {
        self.set(ctx, seq, State::Idle);
    }

    /// Removes an entry from the queue. Nothing is sent to a ledger.
    #[inline]
    fn remove(&mut self, ctx: &mut Context, seq: Seq) -> Option<Entry> {
        let entry = self.entries.get(&seq)?;
        unindex(entry, &mut self.waiters);
        count(ctx, &mut self.held, self.limit_id, entry, false);
        if self.limit.is_fair() {
            count_tenant(ctx, self.limit_id, entry, entry.is_counted(), false);
        }
        self.entries.remove(&seq)
    }

    /// Schedules the renewal, or the end, of a held permit.
    pub(super) fn set_due(&mut self, seq: Seq, at: Instant) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && let State::Held(hold) = &mut entry.state
        {
            hold.due = Some(at);
            self.note_due(at);
        }
    }

    /// The queue's time is the earliest at which a permit is due. If it is due already, the scan goes on first.
    fn note_due(&mut self, at: Instant) {
        let next = match &mut self.scan {
            Some(scan) => &mut scan.next,
            None => &mut self.renew_at,
        };
        *next = earliest(*next, Some(at));
    }

    /// Puts an entry aside until its request asks again, under a new name, since the fate of the old one is unknown. If
    /// an exchange in flight may still enter the old name into the store, it is released when the exchange is over.
    pub(super) fn park(&mut self, ctx: &mut Context, seq: Seq) {
        let due = self.due_of(ctx, seq);
        self.release_in_store(ctx, seq, due);
        let Some(mut entry) = self.remove(ctx, seq) else {
            return;
        };
        if entry.in_store.entering {
            ctx.record(|history, now| history.given_up(&self.ledger, seq, now));
            let mut ghost =
                Entry::new(ctx.lease_named(self.id, seq), Duration::ZERO, ctx.now, None);
            (ghost.state, ghost.in_store) = (State::Leaving, entry.in_store);
            if let Some(paying) = entry.paying() {
                ghost.set_paying(paying.clone());
            }
            self.insert(ctx, ghost);
        }
        entry.lease.rename(ctx.next_name(weight_of(seq)));
        entry.state = State::Idle;
        // A pending answer is about the old name, and proves nothing about this one.
        entry.in_store = InStore::default();
        entry.owes_nothing();
        report(ctx, &entry, Decision::Changed);
        self.insert(ctx, entry);
    }

    /// Admits a request that the store does not decide on.
    pub(super) fn admit(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq) {
            ctx.record(|history, now| history.admitted(&self.ledger, seq, now));
            entry.lease.hold(None);
            self.hold(ctx, seq, None);
        }
    }

    /// Drops an entry whose user has gone: now, or once the exchange that may enter it into the store is answered.
    pub fn release_slot(&mut self, ctx: &mut Context, seq: Seq) {
        self.leave(ctx, seq, Use::Held);
    }

    /// As [`release_slot`](Self::release_slot) for an unused slot, which does not count as a hold time.
    pub fn cancel_slot(&mut self, ctx: &mut Context, seq: Seq) {
        self.leave(ctx, seq, Use::Unused);
    }

    /// As [`release_slot`](Self::release_slot) for an idle slot that was taken out of the pool.
    pub(super) fn release_idle_slot(&mut self, ctx: &mut Context, seq: Seq) {
        ctx.measure(self.limit_id, Measure::Held(1.0));
        self.leave(ctx, seq, Use::Idle);
    }

    fn leave(&mut self, ctx: &mut Context, seq: Seq, use_of_slot: Use) {
        let due = self.due_of(ctx, seq);
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        if !matches!(entry.state, State::Leaving) {
            ctx.record(|history, now| history.given_up(&self.ledger, seq, now));
        }
        if entry.holder() == Some(Holder::Permit) && use_of_slot != Use::Idle {
            let held = entry.lease.tenure_lasts(ctx.now);
            ctx.note_end(self.limit_id, &entry.lease, held);
            if use_of_slot == Use::Held {
                ctx.note_hold(self.limit_id, held, weight_of(seq));
            }
        }
        if entry.in_store.entering {
            self.set(ctx, seq, State::Leaving);
            if let Some(entry) = self.entries.get_mut(&seq) {
                entry.leave_request();
                entry.forget_ticket();
            }
        } else {
            self.release_in_store(ctx, seq, due);
            self.remove(ctx, seq);
            if !ctx.confirmations.is_empty() && !self.is_releasing(seq) {
                ctx.confirm(seq);
            }
        }
        self.release_here(ctx, seq, due);
    }

    pub(super) fn release_here(&mut self, ctx: &mut Context, seq: Seq, due: Option<Due>) {
        if self.ledger_here.is_some() {
            add_due(self.batch_here(ctx), seq, due);
            self.run_batch_here(ctx, Operation::Release(seq));
        }
    }

    /// A permit of the ledger in this process has been held for a while.
    pub(super) fn pay_here(&mut self, ctx: &mut Context, seq: Seq, again_in: Duration) {
        let report = self.report_of(ctx, seq);
        if report.is_some() {
            add_report(self.batch_here(ctx), report);
            self.run_batch_here(ctx, Operation::Nothing);
        }
        self.set_due(seq, ctx.now + again_in);
    }

    /// Runs a step of the ledger in this process, if there is one, and admits the requests that it promotes. Its clock
    /// stands still, so no lease ends there.
    pub(super) fn run_here(&mut self, ctx: &mut Context, operation: Operation) -> Option<Standing> {
        self.batch_here(ctx);
        self.run_batch_here(ctx, operation)
    }

    /// The batch of the next step. One is reused, since building and dropping one costs more than the step.
    #[inline]
    fn batch_here<'a>(&self, ctx: &'a mut Context) -> &'a mut Batch {
        let whole = self.local_max_without_pause(ctx);
        let limit = self.in_force(whole, ctx.now);
        let batch = &mut ctx.scratch.batches[0];
        (batch.limit, batch.whole) = (limit, whole);
        batch.max_waiters = self.limit.waiters();
        if batch.dues.is_some() != self.limit.is_fair() {
            batch.dues = self.no_dues();
        }
        batch
    }

    fn run_batch_here(&mut self, ctx: &mut Context, operation: Operation) -> Option<Standing> {
        let ledger = self.ledger_here.as_mut()?;
        let mut call = Call::new(&ctx.scratch, 0);
        let batch = &mut ctx.scratch.batches[0];
        batch.waits = matches!(operation, Operation::Acquire(ask) if ask.wait);
        let (mut promoted, standing) = ledger.run_one(&mut call, batch, operation);
        if let Some(dues) = &mut batch.dues {
            **dues = Dues::default();
        }
        let batch = &ctx.scratch.batches[0];
        // A call does no more than the store's script would. A raised limit may admit more.
        while call.more {
            call = Call::new(&ctx.scratch, 0);
            let (others, _) = ledger.run_one(&mut call, batch, Operation::Nothing);
            promoted.extend(others);
        }
        self.read_local();
        self.recheck_right = true;
        for promotion in promoted {
            self.admit(ctx, promotion.seq);
        }
        standing
    }
}

/// Holders of slots.
impl Queue {
    /// Gives a held slot to its request, which wanted no other.
    pub fn take(
        &mut self,
        ctx: &mut Context,
        lease: &Arc<Lease>,
        waited: Duration,
    ) -> Option<Taken> {
        let seq = lease.seq();
        let entry = self.entries.get_mut(&seq)?;
        if !entry.is_held() || lease.is_over(ctx.now) {
            return None;
        }
        entry.leave_request();
        if let Some(Holder::Request) = entry.hand_over(Holder::Permit) {
            ctx.record(|history, now| history.taken(&self.ledger, seq, now));
            lease.begin_tenure(ctx.now);
            lease.set_reusable(entry.in_store.present || !ctx.shared);
        }
        ctx.note_admission(self.limit_id, waited);
        Some(Taken {
            leases: Leases::One(Tenure::of(lease.clone())),
            waited,
            place: entry.place,
            notes: None,
        })
    }

    /// Gives a slot to its request, as one of several. Returns its initial place in the queue.
    pub fn take_as_leg(&mut self, ctx: &mut Context, lease: &Arc<Lease>) -> u32 {
        let seq = lease.seq();
        let Some(entry) = self.entries.get_mut(&seq) else {
            return 0;
        };
        entry.leave_request();
        entry.hand_over(Holder::Permit);
        lease.begin_tenure(ctx.now);
        ctx.record(|history, now| history.taken(&self.ledger, seq, now));
        entry.place
    }
}

/// State changes that affect no count or list.
impl Entry {
    /// Gives a held slot to this holder. Returns the previous one.
    pub fn hand_over(&mut self, holder: Holder) -> Option<Holder> {
        let State::Held(hold) = &mut self.state else {
            return None;
        };
        Some(std::mem::replace(&mut hold.holder, holder))
    }
}

/// Filling the outbox.
impl Queue {
    pub(super) fn outbox(&mut self) -> &mut Outbox {
        self.outbox.get_or_insert_default()
    }

    /// Asks the store for a slot, ahead of later newcomers. The turn of a leg begins.
    pub fn ask_store(&mut self, ctx: &Context, newcomer: Newcomer) {
        if let Some(entry) = self.entries.get_mut(&newcomer.seq) {
            entry.begin(ctx.now);
            if entry.is_plain() {
                self.note_asking(newcomer.seq);
            }
        }
        let acquire = &mut self.outbox().acquire;
        let place = acquire.partition_point(|other| other.order() <= newcomer.order());
        acquire.insert(place, newcomer);
    }

    /// Takes a newcomer out of the outbox, if it was not sent: its request asks for another slot first.
    pub fn unlist(&mut self, newcomer: Newcomer) {
        let Some(outbox) = &mut self.outbox else {
            return;
        };
        let acquire = &mut outbox.acquire;
        let first = acquire.partition_point(|other| other.order() < newcomer.order());
        let mut of_request =
            (acquire.range(first..)).take_while(|other| other.order() == newcomer.order());
        if let Some(number) = of_request.position(|other| other.seq == newcomer.seq) {
            acquire.remove(first + number);
        }
    }

    /// A slot that comes free goes to this request, until the store has answered it.
    fn note_asking(&mut self, seq: Seq) {
        if let Some(pooled) = &mut self.pooled {
            if !mem::replace(&mut pooled.withholds, true) {
                pooled.pool.withhold();
            }
            pooled.asking.push_back(seq);
        }
    }

    /// Asks the store about an entry: a held one is renewed, and a waiting one gets its ticket.
    pub(super) fn renew(&mut self, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && !std::mem::replace(&mut entry.in_store.renewing, true)
        {
            self.outbox().renew.push_back(seq);
        }
    }

    /// Releases a name that no entry has.
    pub(super) fn release_ghost(&mut self, ctx: &Context, seq: Seq) {
        self.push_release(ctx, seq, 0, None);
    }

    fn push_release(&mut self, ctx: &Context, seq: Seq, not_after_us: u64, due: Option<Due>) {
        let forget_at = ctx.now + FORGET_AFTER * ctx.settings.lease;
        let releases = &mut self.outbox().release;
        // Mostly the only one of its key, and many keys may wait for a slow store.
        if releases.is_empty() {
            releases.reserve_exact(1);
        }
        releases.push(Release {
            seq,
            not_after_us,
            forget_at,
            due: due.map(Box::new),
        });
    }

    /// Releases a name if the store may know it. If its exchange is in flight, the answer decides.
    fn release_in_store(&mut self, ctx: &Context, seq: Seq, due: Option<Due>) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        let InStore {
            present,
            entering,
            not_after_us,
            ..
        } = entry.in_store;
        if !entering && (present || not_after_us > 0) {
            (entry.in_store.present, entry.in_store.not_after_us) = (false, 0);
            self.push_release(ctx, seq, not_after_us, due);
        }
    }
}

/// Removes an entry from the indexes of its state. The queue's timers stay: those of waiters until the next answer, that
/// of held permits until it is due.
fn unindex(entry: &Entry, waiters: &mut Option<Box<Waiters>>) {
    if let State::Waiting(Line::InStore { ticket, .. }) = entry.state
        && let Some(waiters) = waiters
    {
        waiters.by_ticket.remove(&(ticket, entry.lease.seq()));
        waiters.places.remove(&entry.lease.seq());
    }
}

/// Reports a decision on an entry to the core.
fn report(ctx: &mut Context, entry: &Entry, decision: Decision) {
    if let Some(request) = entry.request() {
        let seq = entry.lease.seq();
        ctx.decided.push(Decided {
            request,
            seq,
            decision,
        });
    }
}

/// Adds an entry to the counts of its state, or removes it.
fn count(ctx: &mut Context, held: &mut HeldUnits, limit_id: LimitId, entry: &Entry, is_in: bool) {
    if !entry.is_counted() {
        return;
    }
    let (count, measure, units): (_, fn(f64) -> Measure, _) = match &entry.state {
        State::Held(hold) => {
            let units = weight_of(entry.lease.seq());
            let in_store = if hold.in_store { units } else { 0 };
            if is_in {
                held.all += units;
                held.in_store += in_store;
            } else {
                held.all -= units;
                held.in_store -= in_store;
            }
            (&mut ctx.counts.held, Measure::Held, units)
        }
        _ => (&mut ctx.counts.waiting, Measure::Waiting, 1),
    };
    if is_in {
        *count += 1
    } else {
        *count -= 1
    }
    let sign = if is_in { 1.0 } else { -1.0 };
    ctx.measure(limit_id, measure(sign * f64::from(units)));
}
