//! The core's timers: the driver sleeps until the first of them. Also the due work, and how much of it a step does.

use tokio::time::Instant;

use super::Core;
use crate::{
    error::LostErrorKind,
    fallbacks::Strict,
    keeper::{context::earliest, effects::Effect, queue::Use},
};

/// Units of due work in one step, which take about a millisecond: timers, and entries that queues look at for them.
const MAX_DUE: usize = 1_000;
/// The timers of all queues, each of which has names of its own.
const IN_QUEUE: &str = "queue";

impl Core {
    /// When to call [`on_time`](Self::on_time) next.
    pub fn next_due(&self) -> Option<Instant> {
        let mut due = None;
        self.each_timer(|_, at| due = earliest(due, at));
        due
    }

    /// The name of a timer that is due at this time.
    pub fn timer_at(&self, due: Instant) -> Option<&'static str> {
        let mut found = None;
        self.each_timer(|name, at| found = found.or((at == Some(due)).then_some(name)));
        if let Some(IN_QUEUE) = found {
            let queue = self.queues.overdue(due)?;
            return self.queues[queue].next_due().map(|(_, name)| name);
        }
        found
    }

    /// Visits each timer by name.
    fn each_timer(&self, mut see: impl FnMut(&'static str, Option<Instant>)) {
        see(IN_QUEUE, self.queues.next_due());
        see("request", self.requests.next_due());
        see("bound", self.bounded.next_due());
        see("spending", self.accounting.accounts.next_due());
        see("override", self.ctx.registry.overrides().next_end());
        see("log", self.ctx.reports.next_due());
        see("shutdown", self.ctx.ending.alarm());
        if !self.ctx.shared {
            return;
        }
        see("confirmation", self.ctx.confirmations.next_due());
        see("fallback", self.ctx.registry.fallbacks.next_end());
        see("return", self.ctx.returns.next_end());
        for link in self.links.iter() {
            see("connection", link.next_due(self));
        }
    }

    /// Does what is due. Returns whether it may be too much for one step: then [`next_due`](Self::next_due) has still
    /// passed, and the next step continues.
    pub fn on_time(&mut self) -> bool {
        let now = self.ctx.now;
        self.ctx.driven = true;
        self.ctx.ending.on_time(now);
        self.end_trouble();
        self.end_terms();
        self.check_returns();
        self.reconnect();
        let mut left = MAX_DUE;
        while left > 0
            && let Some(units) = self.follow_timer()
        {
            left = left.saturating_sub(units);
        }
        self.follow_decisions();
        if self.ctx.reports.next_due().is_some_and(|due| due <= now) {
            self.ctx.log_reports();
        }
        self.ctx.has_overdue = left == 0;
        left == 0
    }

    /// Does the next work that is due, and returns its units.
    fn follow_timer(&mut self) -> Option<usize> {
        let now = self.ctx.now;
        if let Some(overdue) = self.ctx.confirmations.take_overdue(now) {
            self.ctx.effects.push(Effect::GiveUpOn(overdue));
            return Some(1);
        }
        if self.wake_sleeper() || self.accounting.accounts.on_time(now) {
            return Some(1);
        }
        if self.time_out() || self.end_asking() || self.end_bounded() {
            // A request that has waited long enough releases its slots to others before their waits end.
            self.follow_decisions();
            return Some(1);
        }
        let queue = self.queues.overdue(now)?;
        Some(self.change(queue, |queue, ctx| queue.on_time(ctx)))
    }

    /// A connection has ended, and no exchange has reconnected since. Waiters and holders need a connection, and so do the
    /// count of the replicas, which divide a limit among themselves, and the end of a return: a hello establishes it.
    fn reconnect(&mut self) {
        let now = self.ctx.now;
        let counts = || self.ctx.registry.has_divided();
        for link in self.links.iter_mut() {
            let is_due = link.connection.ends_pause(now);
            let mut queues = self.queues.iter();
            let mut has_queues = || queues.any(|queue| queue.terms().part == link.part);
            let returns = || self.ctx.returns.is_any_in(link.part, Strict::Divides);
            if is_due && link.is_up() && (counts() || has_queues() || returns()) {
                link.connection.want();
            }
        }
    }

    /// Revokes the first permit to be checked, if it has reached a bound.
    fn end_bounded(&mut self) -> bool {
        let (lease, kind) = match self.bounded.check_next(self.ctx.now) {
            None => return false,
            Some(None) => return true,
            Some(Some(ended)) => ended,
        };
        let (seq, was_lost) = (lease.seq(), lease.is_over(self.ctx.now));
        let queue = self.queues.get(lease.queue);
        let is_held = queue.is_some_and(|queue| queue.entry(seq).is_some());
        // If the slot was lost before, unnoticed, only the response remains to be ended.
        if is_held && was_lost {
            self.change(lease.queue, |queue, ctx| {
                queue.lose(ctx, seq, LostErrorKind::Lost)
            });
        }
        self.ctx.end_lease(&lease, kind);
        if is_held && !was_lost {
            self.change(lease.queue, |queue, ctx| queue.release(ctx, seq, Use::Held));
        }
        true
    }
}
