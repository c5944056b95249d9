//! A permit's states, and all changes of them: no other file writes one. Each change of a state that is counted or listed
//! goes through [`Queue::set`].
//!
//! | state | how an entry gets there | how it leaves |
//! | --- | --- | --- |
//! | [`Parked`](State::Parked) | a leg of a claim is submitted, or its slot cannot be kept | sent, begun here, refused |
//! | [`Listed`](State::Listed) | submitted; renamed after a failure, a loss or an outage | sent, or decided here |
//! | [`Sent`](State::Sent) | its exchange is sent | answered, failed, woken by another replica |
//! | [`Waiting`](State::Waiting) | the store has enqueued it | granted, lost by the store, timed out, store down |
//! | [`WaitingHere`](State::WaitingHere) | the ledger in this process has enqueued it | granted, timed out, store back |
//! | [`Checking`](State::Checking) | granted with a lease that ends soon | renewed, or lost by the store |
//! | [`Held`](State::Held) | granted by the store, this process or the fallback | released, lost |
//! | [`Refused`](State::Refused), [`Passed`](State::Passed) | decided | collected by its request |
//! | [`Leaving`](State::Leaving) | given up while an exchange may still enter it | that exchange is over |
//!
//! An entry in any state may be given up; then it goes, or is `Leaving`.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Outbox, Queue, Release, Seen, Waiters};
use crate::{
    error::AcquireErrorKind,
    keeper::{
        context::{Context, earliest},
        demand::{ClaimId, LimitId},
        effects::StoredWaker,
    },
    leases::Lease,
    ledger::{Call, One, Seq, Standing},
    telemetry::Measure,
};

/// Leases after which a release is not repeated any more. A waiter that outlives even this is released when it is
/// promoted and nobody here knows it.
pub(in crate::keeper) const FORGET_AFTER: u32 = 10;

/// One permit or request of this process.
pub(super) struct Entry {
    pub lease: Arc<Lease>,
    pub in_store: InStore,
    /// When the request came; for a leg of a claim, when its turn began.
    pub asked: Instant,
    /// Zero: it does not wait.
    pub wait: Duration,
    /// The place at which it joined the queue; 0 if it did not.
    pub place: u32,
    pub waker: Option<StoredWaker>,
    state: State,
    /// Set until the claim is granted.
    leg: Option<Leg>,
}

#[derive(Clone, Copy)]
pub(super) enum State {
    /// A leg of a claim whose turn has not come.
    Parked,
    /// To be sent. It has `store_timeout` from `since`, also if it was sent before and the exchange failed.
    Listed {
        since: Instant,
    },
    /// Sent at `at`, and not answered.
    Sent {
        since: Instant,
        at: Instant,
    },
    /// In the store's queue.
    Waiting {
        ticket: i64,
        seen: Seen,
    },
    /// In the queue of the ledger in this process.
    WaitingHere,
    /// Granted by the store, perhaps so long ago that the lease is about to end: renewed before it is used. An answer to
    /// what was sent before `since` does not contradict the grant.
    Checking {
        since: Instant,
    },
    Held(Hold),
    Refused(AcquireErrorKind),
    /// It would have been refused, and goes on without a slot.
    Passed(AcquireErrorKind),
    /// Given up while an exchange is in flight that may put it into the store's ledger.
    Leaving,
}

/// A slot that is held.
#[derive(Clone, Copy)]
pub(super) struct Hold {
    /// When to renew it, or to find that it is over. `None`: it needs no renewal.
    pub look_at: Option<Instant>,
    /// When this process learned of it: an answer to what was sent before does not contradict it.
    pub since: Instant,
    pub holder: Holder,
}

/// The holder of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// A request that has not collected it.
    Request,
    /// The same, and the slot came from the pool.
    Reuser,
    /// A permit with this slot only. The slot may be in use, or idle in the pool.
    Permit,
    /// A permit with several slots.
    Part,
}

/// What the store's ledger may have of a name. Every combination occurs: answers are late, come in any order, or do not
/// come, so these do not follow from the state, nor from each other.
#[derive(Clone, Copy, Default)]
pub(super) struct InStore {
    /// It is in the store's ledger, by the latest answer.
    pub present: bool,
    /// An exchange that puts it there is in flight.
    pub entering: bool,
    /// A renewal is to be sent or in flight.
    pub renewing: bool,
    /// Unanswered exchanges may put it there until this store time; 0 if there are none.
    pub not_after_us: u64,
}

/// What makes an entry a leg of a claim.
#[derive(Clone, Copy)]
struct Leg {
    claim: ClaimId,
    /// Its limit is in shadow mode: a refusal lets it pass.
    shadow: bool,
    /// It has had its turn, so its time to wait runs.
    begun: bool,
}

impl Entry {
    fn new(lease: Arc<Lease>, wait: Duration, now: Instant, leg: Option<Leg>) -> Self {
        Self {
            lease,
            in_store: InStore::default(),
            asked: now,
            wait,
            place: 0,
            waker: None,
            state: match leg {
                Some(_) => State::Parked,
                None => State::Listed { since: now },
            },
            leg,
        }
    }

    pub(super) fn state(&self) -> &State {
        &self.state
    }

    /// The claim that it is a leg of.
    pub(super) fn claim(&self) -> Option<ClaimId> {
        self.leg.map(|leg| leg.claim)
    }

    /// Whether its limit is in shadow mode, as a leg of a claim.
    pub(super) fn is_shadow(&self) -> bool {
        self.leg.is_some_and(|leg| leg.shadow)
    }

    pub(super) fn wait_until(&self) -> Instant {
        self.asked + self.wait
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self.state, State::Held(_))
    }

    pub(super) fn holder(&self) -> Option<Holder> {
        match self.state {
            State::Held(hold) => Some(hold.holder),
            _ => None,
        }
    }

    /// Whether it still asks for a slot.
    pub(super) fn is_pending(&self) -> bool {
        match self.state {
            State::Parked
            | State::Listed { .. }
            | State::Sent { .. }
            | State::Waiting { .. }
            | State::WaitingHere
            | State::Checking { .. } => true,
            State::Held(_) | State::Refused(_) | State::Passed(_) | State::Leaving => false,
        }
    }

    /// It is the turn of this leg: its time to wait begins, unless it has begun before.
    pub(super) fn begin(&mut self, now: Instant) {
        if let Some(leg) = &mut self.leg
            && !std::mem::replace(&mut leg.begun, true)
        {
            self.asked = now;
        }
    }

    /// Its exchange is sent. Returns whether it was to be sent.
    pub(super) fn send(&mut self, now: Instant) -> Option<Instant> {
        let State::Listed { since } = self.state else {
            return None;
        };
        self.state = State::Sent { since, at: now };
        self.in_store.entering = true;
        Some(since)
    }

    /// Its exchange ran too late, and has not asked for it: it is to be sent once more, under the same name.
    pub(super) fn unsend(&mut self) {
        if let State::Sent { since, .. } = self.state {
            self.state = State::Listed { since };
        }
    }

    /// Its exchange is over. It may have run, or may run until `not_after_us`, if there was no answer.
    pub(super) fn exchange_over(&mut self, not_after_us: u64) {
        self.in_store.entering = false;
        self.in_store.not_after_us = self.in_store.not_after_us.max(not_after_us);
    }

    /// Gives a held slot to this holder. Returns the one before.
    pub(super) fn hand_over(&mut self, holder: Holder) -> Option<Holder> {
        let State::Held(hold) = &mut self.state else {
            return None;
        };
        Some(std::mem::replace(&mut hold.holder, holder))
    }

    /// Gives it to the permit of its claim, which is granted.
    pub(super) fn join_permit(&mut self) {
        self.leg = None;
        self.hand_over(Holder::Part);
    }
}

impl Queue {
    /// Makes an entry for a request for a single slot, or for a leg of a claim.
    pub(super) fn enter(
        &mut self,
        ctx: &mut Context,
        wait: Duration,
        claim: Option<(ClaimId, bool)>,
    ) -> Arc<Lease> {
        let lease = ctx.new_lease(self.id, self.pool.clone());
        let leg = claim.map(|(claim, shadow)| Leg {
            claim,
            shadow,
            begun: false,
        });
        let entry = Entry::new(lease.clone(), wait, ctx.now, leg);
        count(ctx, self.number, &entry.state);
        self.entries.insert(lease.seq(), entry);
        lease
    }

    /// Changes an entry's state, and everything that is counted or listed by it.
    fn set(&mut self, ctx: &mut Context, seq: Seq, state: State) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        unlist(entry, ctx, &mut self.waiters, self.young_from);
        uncount(ctx, self.number, &entry.state);
        entry.state = state;
        count(ctx, self.number, &state);
        match state {
            State::Waiting { ticket, .. } => {
                let waiters = self.waiters.get_or_insert_default();
                waiters.by_ticket.insert((ticket, seq));
                ctx.expiries.insert((entry.wait_until(), self.id, seq));
            }
            State::WaitingHere => {
                ctx.expiries.insert((entry.wait_until(), self.id, seq));
            }
            // Its slot is there: only the store's word is missing, and that has its own time limit.
            State::Listed { .. } | State::Sent { .. } | State::Checking { .. } => {}
            State::Held(_) | State::Refused(_) | State::Passed(_) | State::Parked => {
                ctx.wake(entry.waker.take());
                ctx.moved.extend(entry.claim());
            }
            State::Leaving => {}
        }
        if let State::Held(Hold {
            look_at: Some(at), ..
        }) = state
        {
            self.list(ctx, seq, at);
        }
    }

    /// A parked leg is sent.
    pub(super) fn send_leg(&mut self, ctx: &mut Context, seq: Seq) {
        let now = ctx.now;
        self.set(ctx, seq, State::Listed { since: now });
        if let Some(entry) = self.entries.get_mut(&seq) {
            entry.send(now);
        }
    }

    /// It is the turn of a parked leg, while the store does not decide.
    pub(super) fn list_leg(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq) {
            entry.begin(ctx.now);
        }
        let since = ctx.now;
        self.set(ctx, seq, State::Listed { since });
    }

    /// The store has enqueued it, or says that it still waits.
    pub(super) fn wait_in_store(&mut self, ctx: &mut Context, seq: Seq, ticket: i64, seen: Seen) {
        self.set(ctx, seq, State::Waiting { ticket, seen });
    }

    /// The ledger in this process has enqueued it.
    pub(super) fn wait_here(&mut self, ctx: &mut Context, seq: Seq) {
        self.set(ctx, seq, State::WaitingHere);
    }

    /// The store had not granted it by this moment.
    pub(super) fn saw_waiting(&mut self, seq: Seq, at: impl FnOnce(Seen) -> Seen) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && let State::Waiting { seen, .. } = &mut entry.state
        {
            *seen = at(*seen);
        }
    }

    /// The store has granted it, with a lease that may be about to end.
    pub(super) fn check(&mut self, ctx: &mut Context, seq: Seq) {
        let since = ctx.now;
        self.set(ctx, seq, State::Checking { since });
        self.renew(seq);
    }

    /// The store, or this process, has granted it.
    pub(super) fn hold(&mut self, ctx: &mut Context, seq: Seq, look_at: Option<Instant>) {
        let hold = Hold {
            look_at,
            since: ctx.now,
            holder: Holder::Request,
        };
        self.set(ctx, seq, State::Held(hold));
    }

    /// A ledger has refused it.
    pub(super) fn refused(&mut self, ctx: &mut Context, seq: Seq, kind: AcquireErrorKind) {
        let passes = self.entries.get(&seq).is_some_and(Entry::is_shadow);
        match passes {
            true => self.set(ctx, seq, State::Passed(kind)),
            false => self.set(ctx, seq, State::Refused(kind)),
        }
    }

    /// It is not the turn of a leg: the store has not asked for its slot.
    pub(super) fn unsend_leg(&mut self, ctx: &mut Context, seq: Seq) {
        self.set(ctx, seq, State::Parked);
    }

    /// Takes an entry out of the queue. No ledger is told.
    fn remove(&mut self, ctx: &mut Context, seq: Seq) -> Option<Entry> {
        let entry = self.entries.get(&seq)?;
        unlist(entry, ctx, &mut self.waiters, self.young_from);
        uncount(ctx, self.number, &entry.state);
        self.entries.remove(&seq)
    }

    /// Sets a timer for a held permit. Those that came lately share one: to list each of them would cost as much as the
    /// rest of a short life.
    fn list(&mut self, ctx: &mut Context, seq: Seq, at: Instant) {
        if seq < self.young_from {
            ctx.renewals.insert((at, self.id, seq));
        } else {
            self.young_at = earliest(self.young_at, Some(at));
        }
    }

    /// Gives all held permits timers of their own.
    pub(super) fn list_young(&mut self, ctx: &mut Context) {
        for (seq, entry) in self.entries.since(self.young_from) {
            if let State::Held(hold) = entry.state
                && let Some(at) = hold.look_at
            {
                ctx.renewals.insert((at, self.id, *seq));
            }
        }
        self.young_from = ctx.seq_bound();
    }

    /// Has a held permit renewed at that time, or found to be over.
    pub(super) fn look_at(&mut self, ctx: &mut Context, seq: Seq, at: Instant) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && let State::Held(hold) = &mut entry.state
        {
            let old = hold.look_at.replace(at);
            if seq < self.young_from
                && let Some(old) = old
            {
                ctx.renewals.remove(&(old, self.id, seq));
            }
            self.list(ctx, seq, at);
        }
    }

    /// Looks at a held permit now: while it was in flight, nothing was asked of it.
    pub(super) fn look_now(&mut self, ctx: &mut Context, seq: Seq) {
        let is_renewed = |entry: &Entry| match entry.state {
            State::Held(hold) => hold.look_at.is_some(),
            _ => false,
        };
        if self.entries.get(&seq).is_some_and(is_renewed) {
            self.look_at(ctx, seq, ctx.now);
        }
    }

    pub(super) fn outbox(&mut self) -> &mut Outbox {
        self.outbox.get_or_insert_default()
    }

    /// Asks the store for an entry: a held one is renewed, of a waiting one the place is told.
    pub(super) fn renew(&mut self, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && !std::mem::replace(&mut entry.in_store.renewing, true)
        {
            self.outbox().renew.push_back(seq);
        }
    }

    /// Releases a name that no entry has.
    pub(super) fn release_ghost(&mut self, ctx: &Context, seq: Seq) {
        self.push_release(ctx, seq, 0);
    }

    fn push_release(&mut self, ctx: &Context, seq: Seq, not_after_us: u64) {
        let forget_at = ctx.now + FORGET_AFTER * ctx.settings.lease;
        self.outbox().release.push(Release {
            seq,
            not_after_us,
            forget_at,
        });
    }

    /// Releases a name if the store may know it, unless an exchange that will tell is in flight.
    pub(super) fn retire(&mut self, ctx: &Context, seq: Seq) {
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
            self.push_release(ctx, seq, not_after_us);
        }
    }

    /// Gives a request a new name, to ask with from the start, in the time that it has left.
    pub(super) fn rename(&mut self, ctx: &mut Context, seq: Seq) -> Option<Seq> {
        self.list_anew(ctx, seq, false)
    }

    /// The same, with all the time that a request has.
    pub(super) fn start_over(&mut self, ctx: &mut Context, seq: Seq) -> Option<Seq> {
        self.list_anew(ctx, seq, true)
    }

    fn list_anew(&mut self, ctx: &mut Context, seq: Seq, starts_over: bool) -> Option<Seq> {
        self.retire(ctx, seq);
        let mut entry = self.remove(ctx, seq)?;
        let new = ctx.next_seq();
        entry.lease.rename(new);
        let since = match entry.state {
            State::Listed { since } | State::Sent { since, .. } if !starts_over => since,
            _ => ctx.now,
        };
        entry.state = State::Listed { since };
        // An answer that is still to come is about the old name, and says nothing of this one.
        entry.in_store = InStore::default();
        count(ctx, self.number, &entry.state);
        self.entries.insert(new, entry);
        Some(new)
    }

    /// Puts a leg of a claim aside, under a new name, until it is its turn.
    pub(super) fn park(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(new) = self.rename(ctx, seq) {
            self.set(ctx, new, State::Parked);
        }
    }

    /// Puts a leg aside whose slot cannot be kept: one before it was lost, or it was lost itself.
    pub(in crate::keeper) fn park_leg(&mut self, ctx: &mut Context, seq: Seq) {
        self.release_here(ctx, seq);
        self.park(ctx, seq);
    }

    /// Admits a request that the store does not decide on.
    pub(super) fn admit(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq) {
            ctx.record(|history, now| history.admitted(&self.ledger, seq, now));
            entry.lease.hold(None);
            self.hold(ctx, seq, None);
        }
    }

    /// Refuses a request, and releases what any ledger may have of it.
    pub(in crate::keeper) fn refuse(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        kind: AcquireErrorKind,
    ) {
        self.refused(ctx, seq, kind);
        self.retire(ctx, seq);
        self.release_here(ctx, seq);
    }

    /// Lets a request go on without a slot, since its limit is not enforced any more.
    pub(super) fn pass(&mut self, ctx: &mut Context, seq: Seq, kind: AcquireErrorKind) {
        self.set(ctx, seq, State::Passed(kind));
        self.retire(ctx, seq);
        self.release_here(ctx, seq);
    }

    /// Refuses all requests that have not taken their permits, but for legs of claims. Returns how many.
    pub(in crate::keeper) fn refuse_waiting(
        &mut self,
        ctx: &mut Context,
        kind: AcquireErrorKind,
    ) -> usize {
        let undecided = self.those(|entry| {
            let is_uncollected = matches!(entry.holder(), Some(Holder::Request | Holder::Reuser));
            entry.leg.is_none() && (entry.is_pending() || is_uncollected)
        });
        for seq in &undecided {
            self.refuse(ctx, *seq, kind);
        }
        undecided.len()
    }

    /// Drops an entry whose user has gone: now, or when the exchange that may put it into the store is answered.
    pub(in crate::keeper) fn give_up(&mut self, ctx: &mut Context, seq: Seq) {
        self.leave(ctx, seq, true);
    }

    /// The same for a slot that was not used: nothing is learned from it of how long slots are held.
    pub(in crate::keeper) fn give_up_unused(&mut self, ctx: &mut Context, seq: Seq) {
        self.leave(ctx, seq, false);
    }

    fn leave(&mut self, ctx: &mut Context, seq: Seq, was_used: bool) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        if !matches!(entry.state, State::Leaving) {
            ctx.record(|history, now| history.given_up(&self.ledger, seq, now));
        }
        if let Some(Holder::Permit | Holder::Part) = entry.holder()
            && was_used
        {
            ctx.note_hold(self.number, entry.lease.tenure_lasts(ctx.now));
        }
        ctx.effects.drop_waker(entry.waker.take());
        if entry.in_store.entering {
            self.set(ctx, seq, State::Leaving);
        } else {
            self.retire(ctx, seq);
            self.remove(ctx, seq);
        }
        self.release_here(ctx, seq);
    }

    pub(super) fn release_here(&mut self, ctx: &mut Context, seq: Seq) {
        if self.local.is_some() {
            self.run_here(ctx, One::Release(seq));
        }
    }

    /// Runs a step of the ledger in this process, and admits those that it promotes. Its clock stands still, so that no
    /// lease ends there.
    pub(super) fn run_here(&mut self, ctx: &mut Context, one: One) -> Option<Standing> {
        let limit = self.local_limit(ctx);
        let ledger = self.local.as_mut()?;
        let mut call = Call::new(&ctx.local, 0);
        // One batch for all, or it would cost more to make and drop it than to run it.
        let batch = &mut ctx.local.batches[0];
        (batch.limit, batch.max_waiters) = (limit, self.limit.waiters());
        batch.waits = matches!(one, One::Acquire(ask) if ask.wait);
        let batch = &ctx.local.batches[0];
        let (mut promoted, standing) = ledger.run_one(&mut call, batch, one);
        // A call does no more than the store's script would. A limit that was raised may admit more.
        while call.more {
            call = Call::new(&ctx.local, 0);
            let (others, _) = ledger.run_one(&mut call, batch, One::Nothing);
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

/// Takes an entry out of everything that it is listed in by its state. The timers of the queue stay until the next answer.
fn unlist(entry: &Entry, ctx: &mut Context, waiters: &mut Option<Box<Waiters>>, young_from: Seq) {
    let (queue, seq) = (entry.lease.queue, entry.lease.seq());
    match entry.state {
        State::Waiting { ticket, .. } => {
            if let Some(waiters) = waiters {
                waiters.by_ticket.remove(&(ticket, seq));
            }
            ctx.expiries.remove(&(entry.wait_until(), queue, seq));
        }
        State::WaitingHere => {
            ctx.expiries.remove(&(entry.wait_until(), queue, seq));
        }
        State::Held(Hold {
            look_at: Some(at), ..
        }) if seq < young_from => {
            ctx.renewals.remove(&(at, queue, seq));
        }
        _ => {}
    }
}

/// What an entry counts as, by its state.
enum Class {
    Held,
    Waiting,
    Neither,
}

impl State {
    fn class(&self) -> Class {
        match self {
            Self::Held(_) => Class::Held,
            Self::Listed { .. }
            | Self::Sent { .. }
            | Self::Waiting { .. }
            | Self::WaitingHere
            | Self::Checking { .. } => Class::Waiting,
            Self::Parked | Self::Refused(_) | Self::Passed(_) | Self::Leaving => Class::Neither,
        }
    }
}

fn count(ctx: &mut Context, number: LimitId, state: &State) {
    match state.class() {
        Class::Held => {
            ctx.counts.held += 1;
            ctx.measure(number, Measure::Held(1.0));
        }
        Class::Waiting => {
            ctx.counts.waiting += 1;
            ctx.measure(number, Measure::Waiting(1.0));
        }
        Class::Neither => {}
    }
}

fn uncount(ctx: &mut Context, number: LimitId, state: &State) {
    match state.class() {
        Class::Held => {
            ctx.counts.held -= 1;
            ctx.measure(number, Measure::Held(-1.0));
        }
        Class::Waiting => {
            ctx.counts.waiting -= 1;
            ctx.measure(number, Measure::Waiting(-1.0));
        }
        Class::Neither => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue of a busy key has many entries, and each is moved with its neighbours.
    #[test]
    fn an_entry_is_no_larger_than_it_was() {
        assert!(size_of::<Entry>() <= 152, "{}", size_of::<Entry>());
    }
}
