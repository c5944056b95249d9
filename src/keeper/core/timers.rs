//! Time passes: renewals, polls, ends of waits, bounds on permits. One sleep for all of them.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Bounded, BoundedPermit, Bounds, Core};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    keeper::{
        context::earliest,
        effects::{Effect, Report},
    },
    leases::Lease,
    ledger::Seq,
    telemetry::Measure,
};

impl Core {
    /// Does what is due.
    pub(crate) fn on_time(&mut self, now: Instant) {
        self.ctx.now = now;
        self.alarm.take_if(|at| *at <= now);
        while let Some(overdue) = self.ctx.confirmations.take_overdue(now) {
            self.ctx.effects.push(Effect::GiveUpOn(overdue));
        }
        self.end_overrides();
        self.wake_sleepers();
        self.accounts.on_time(now);
        while let Some(&(at, index, seq)) = self.ctx.expiries.first()
            && at <= now
        {
            self.ctx.expiries.pop_first();
            let queue = &mut self.queues[index.0].queue;
            queue.refuse(&mut self.ctx, seq, AcquireErrorKind::TimedOut);
            self.relist(index);
            // A claim that has waited for long enough gives others its slots before their waits end.
            self.advance_moved();
        }
        self.end_bounded();
        self.reconnect();
        while let Some(&(at, index)) = self.due.first()
            && at <= now
        {
            self.queues[index.0].queue.on_time(&mut self.ctx);
            self.relist(index);
        }
        self.renew_due();
        self.advance_moved();
    }

    /// Waiters and holders need a new connection, if nothing else has made one.
    fn reconnect(&mut self) {
        let now = self.ctx.now;
        let is_due = |at: &mut Instant| *at <= now;
        let due = self.connection.reconnect_at.take_if(is_due).is_some();
        if due && self.store_is_up() && !self.queues.is_empty() {
            self.clock = None;
            self.connection.is_wanted = true;
        }
    }

    /// Renews the permits that are due, queue by queue.
    fn renew_due(&mut self) {
        let mut due = Vec::new();
        while let Some(&(at, index, seq)) = self.ctx.renewals.first()
            && at <= self.ctx.now
        {
            self.ctx.renewals.pop_first();
            due.push((index, seq));
        }
        due.sort_unstable();
        for of_a_queue in due.chunk_by(|one, other| one.0 == other.0) {
            let index = of_a_queue[0].0;
            let seqs = of_a_queue.iter().map(|(_, seq)| *seq);
            // It may have been dropped for another one.
            if let Some(member) = self.queues.get_mut(index.0) {
                member.queue.renew_due(&mut self.ctx, seqs);
                self.relist(index);
            }
        }
    }

    /// The driver has not run in time, and may not be replaced: the fallback of each limit decides on requests, and what is
    /// due by time is done.
    pub(crate) fn on_stall(&mut self, now: Instant) {
        self.ctx.now = now;
        if self.ctx.shared && self.store_is_up() {
            self.note_stall();
            self.abandon_exchanges();
        }
        self.on_time(now);
    }

    /// Takes back permits whose bounds are over.
    fn end_bounded(&mut self) {
        while let Some((lease, kind)) = self.bounded.next_over(self.ctx.now) {
            self.ctx.end_lease(&lease, kind);
            let seq = lease.seq();
            let member = self.queues.get_mut(lease.queue.0);
            // If the slot was lost before, only the response is left to end.
            if let Some(member) = member.filter(|member| member.queue.contains(seq)) {
                let (queue, ctx) = (&mut member.queue, &mut self.ctx);
                let limit = queue.limit().clone();
                ctx.report(Report::Ended { limit, kind });
                ctx.measure(queue.number(), Measure::Expired(kind));
                queue.give_up(ctx, seq);
                self.relist(lease.queue);
            }
        }
    }
}

impl Bounded {
    pub(super) fn bound(&mut self, lease: &Arc<Lease>, bounds: Bounds, now: Instant) {
        self.forget(lease.seq());
        let watch = BoundedPermit {
            lease: lease.clone(),
            until: bounds.max_hold.map(|max_hold| now + max_hold),
            idle: bounds.idle,
            due: now,
        };
        self.watch(watch, now);
    }

    pub(super) fn forget(&mut self, seq: Seq) {
        // Most layers have no bounds, and a look-up costs something even then.
        if self.permits.is_empty() {
            return;
        }
        if let Some(watch) = self.permits.remove(&seq) {
            self.due.remove(&(watch.due, seq));
        }
    }

    fn watch(&mut self, mut watch: BoundedPermit, now: Instant) {
        let Some(due) = earliest(watch.until, watch.idle_at(now)) else {
            return;
        };
        let seq = watch.lease.seq();
        watch.due = due;
        self.due.insert((due, seq));
        self.permits.insert(seq, watch);
    }

    /// One that is over, and why. Frames are counted without a lock: only here is it seen whether there were any.
    fn next_over(&mut self, now: Instant) -> Option<(Arc<Lease>, LostErrorKind)> {
        while let Some(&(at, seq)) = self.due.first()
            && at <= now
        {
            self.due.pop_first();
            let Some(watch) = self.permits.remove(&seq) else {
                continue;
            };
            let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
            if is_over(watch.until) {
                return Some((watch.lease, LostErrorKind::HeldTooLong));
            }
            if is_over(watch.idle_at(now)) {
                return Some((watch.lease, LostErrorKind::Idle));
            }
            self.watch(watch, now);
        }
        None
    }
}

impl BoundedPermit {
    /// When it will have been idle for too long, if no frame is asked for from `now` on.
    fn idle_at(&self, now: Instant) -> Option<Instant> {
        let idle = self.idle?;
        Some(self.lease.unread_since().unwrap_or(now) + idle)
    }
}
