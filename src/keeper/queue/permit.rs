//! Changes of an entry: queued, granted, refused, given up. Changes of its state that are counted or listed are
//! made here ([`Queue::set`]).

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Entry, Outbox, Queue, Release, State, Waiters};
use crate::{
    error::AcquireErrorKind,
    keeper::context::{Context, earliest},
    leases::Lease,
    ledger::{Batch, Call, Ledger, One, Seq, Standing},
    limit::Fallback,
    telemetry::Measure,
};

/// Leases after which a release is not repeated any more. A waiter that outlives even this is released when it is
/// promoted and nobody here knows it.
pub(in crate::keeper) const FORGET_AFTER: u32 = 10;

impl Queue {
    /// Makes an entry in this state.
    pub(super) fn enter(
        &mut self,
        ctx: &mut Context,
        wait: Duration,
        prepare: impl FnOnce(&mut Entry),
    ) -> Arc<Lease> {
        let lease = ctx.new_lease(self.index, self.pool.clone());
        let mut entry = Entry::new(lease.clone(), wait, ctx.now);
        prepare(&mut entry);
        count(ctx, self.number, entry.state);
        self.entries.insert(lease.seq(), entry);
        lease
    }

    /// Changes an entry's state, and everything that is counted or listed by it.
    pub(super) fn set(&mut self, ctx: &mut Context, seq: Seq, state: State) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        unlist(entry, ctx, &mut self.waiters, self.young_from);
        uncount(ctx, self.number, entry.state);
        let state = match state {
            State::Refused(kind) if entry.shadow => State::Passed(kind),
            state => state,
        };
        entry.state = state;
        count(ctx, self.number, state);
        match state {
            State::Waiting { ticket, .. } => {
                let waiters = self.waiters.get_or_insert_default();
                waiters.by_ticket.insert((ticket, seq));
                ctx.expiries.insert((entry.wait_until(), self.index, seq));
            }
            State::WaitingHere => {
                ctx.expiries.insert((entry.wait_until(), self.index, seq));
            }
            // Its slot is there: only the store's word is missing, and that has its own time limit.
            State::Asking(_) | State::Checking => {}
            State::Held { .. } | State::Refused(_) | State::Passed(_) | State::Parked => {
                ctx.wake(entry.waker.take());
                ctx.moved.extend(entry.claim);
            }
        }
        if let State::Held { look_at: Some(at) } = state {
            self.list(ctx, seq, at);
        }
    }

    /// Takes an entry out of the queue. No ledger is told.
    fn remove(&mut self, ctx: &mut Context, seq: Seq) -> Option<Entry> {
        let entry = self.entries.get(&seq)?;
        unlist(entry, ctx, &mut self.waiters, self.young_from);
        uncount(ctx, self.number, entry.state);
        ctx.counts.companions -= usize::from(entry.companion);
        self.entries.remove(&seq)
    }

    /// Sets a timer for a held permit. Those that came lately share one: to list each of them would cost as much as the
    /// rest of a short life.
    fn list(&mut self, ctx: &mut Context, seq: Seq, at: Instant) {
        if seq < self.young_from {
            ctx.renewals.insert((at, self.index, seq));
        } else {
            self.young_at = earliest(self.young_at, Some(at));
        }
    }

    /// Gives all held permits timers of their own.
    pub(super) fn list_young(&mut self, ctx: &mut Context) {
        for (seq, entry) in self.entries.since(self.young_from) {
            if let State::Held { look_at: Some(at) } = entry.state {
                ctx.renewals.insert((at, self.index, *seq));
            }
        }
        self.young_from = ctx.seq_bound();
    }

    /// Has a held permit renewed at that time, or found to be over.
    pub(super) fn look_at(&mut self, ctx: &mut Context, seq: Seq, at: Instant) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && let State::Held { look_at } = &mut entry.state
        {
            let old = look_at.replace(at);
            if seq < self.young_from
                && let Some(old) = old
            {
                ctx.renewals.remove(&(old, self.index, seq));
            }
            self.list(ctx, seq, at);
        }
    }

    /// Looks at a held permit now: while it was in flight, nothing was asked of it.
    pub(super) fn look_now(&mut self, ctx: &mut Context, seq: Seq) {
        let state = self.entries.get(&seq).map(|entry| entry.state);
        if let Some(State::Held { look_at: Some(_) }) = state {
            self.look_at(ctx, seq, ctx.now);
        }
    }

    pub(super) fn outbox(&mut self) -> &mut Outbox {
        self.outbox.get_or_insert_default()
    }

    /// Asks the store for an entry: a held one is renewed, of a waiting one the place is told.
    pub(super) fn renew(&mut self, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && !std::mem::replace(&mut entry.renewing, true)
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
        if !entry.open && (entry.in_store || entry.not_after_us > 0) {
            let not_after_us = entry.not_after_us;
            (entry.in_store, entry.not_after_us) = (false, 0);
            self.push_release(ctx, seq, not_after_us);
        }
    }

    /// Gives a request that is not in flight a new name, to ask with from the start.
    pub(super) fn rename(&mut self, ctx: &mut Context, seq: Seq) -> Option<Seq> {
        self.retire(ctx, seq);
        let mut entry = self.remove(ctx, seq)?;
        let new = ctx.next_seq();
        entry.lease.rename(new);
        (entry.state, entry.renewing) = (State::Asking(None), false);
        // An answer that is still to come is about the old name, and says nothing new.
        (entry.open, entry.alone, entry.companion) = (false, false, false);
        count(ctx, self.number, entry.state);
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
            entry.since = ctx.now;
            self.set(ctx, seq, State::Held { look_at: None });
        }
    }

    /// Refuses a request, and releases what any ledger may have of it.
    pub(in crate::keeper) fn refuse(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        kind: AcquireErrorKind,
    ) {
        self.set(ctx, seq, State::Refused(kind));
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
            entry.wanted && !entry.taken && entry.claim.is_none() && !entry.is_decided()
        });
        for seq in &undecided {
            self.refuse(ctx, *seq, kind);
        }
        undecided.len()
    }

    /// Drops an entry whose user has gone: now, or when the exchange that may put it into the store is answered.
    pub(in crate::keeper) fn give_up(&mut self, ctx: &mut Context, seq: Seq) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        if entry.wanted {
            ctx.record(|history, now| history.given_up(&self.ledger, seq, now));
        }
        if entry.taken && entry.wanted && entry.is_held() {
            ctx.note_hold(self.number, entry.lease.tenure_lasts(ctx.now));
        }
        ctx.effects.drop_waker(entry.waker.take());
        if entry.open {
            entry.wanted = false;
        } else {
            self.retire(ctx, seq);
            self.remove(ctx, seq);
            if !ctx.confirmations.is_empty() && !self.is_releasing(seq) {
                ctx.confirm(seq);
            }
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

    /// Starts a ledger in this process, with those that hold slots already.
    pub(super) fn keep_ledger(&mut self, ctx: &mut Context) {
        if self.local.is_none() {
            let batch = Batch {
                limit: self.local_limit(ctx),
                max_waiters: self.limit.waiters(),
                adopt: self.those(Entry::is_held),
                ..Batch::default()
            };
            let mut ledger = Box::new(Ledger::default());
            ledger.run(&mut Call::new(&ctx.local, 0), &batch);
            self.local = Some(ledger);
            self.read_local();
            self.recheck_right = true;
        }
    }

    /// Takes over what the ledger in this process says.
    fn read_local(&mut self) {
        if let Some(ledger) = &self.local {
            let numbers = (self.used_of(ledger), ledger.waiting());
            (self.snapshot.in_use, self.snapshot.waiting) = numbers;
        }
    }

    /// How many slots the ledger in this process has.
    fn local_limit(&self, ctx: &Context) -> u32 {
        match self.limit.current_fallback() {
            // The key's own value counts here too, unless there are fewer for all keys.
            Fallback::Local(limit) if ctx.shared => match self.own_max {
                Some(own) if limit == self.limit.max() => own,
                Some(own) => own.min(limit),
                None => limit,
            },
            _ => self.max(),
        }
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
        State::Held { look_at: Some(at) } if seq < young_from => {
            ctx.renewals.remove(&(at, queue, seq));
        }
        _ => {}
    }
}

fn count(ctx: &mut Context, number: usize, state: State) {
    match state {
        State::Held { .. } => {
            ctx.counts.held += 1;
            ctx.measure(number, Measure::Held(1.0));
        }
        State::Refused(_) | State::Passed(_) | State::Parked => {}
        _ => {
            ctx.counts.waiting += 1;
            ctx.measure(number, Measure::Waiting(1.0));
        }
    }
}

fn uncount(ctx: &mut Context, number: usize, state: State) {
    match state {
        State::Held { .. } => {
            ctx.counts.held -= 1;
            ctx.measure(number, Measure::Held(-1.0));
        }
        State::Refused(_) | State::Passed(_) | State::Parked => {}
        _ => {
            ctx.counts.waiting -= 1;
            ctx.measure(number, Measure::Waiting(-1.0));
        }
    }
}
