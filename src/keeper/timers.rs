//! Time passes: renewals, polls, ends of waits. One sleep for all of them.

use tokio::time::Instant;

use super::{
    Core, Ctx,
    entry::State,
    line::{Line, earliest},
    outage::Breaker,
};
use crate::{error::AcquireErrorKind, ledger::Seq};

/// Leases due within this part of a lease are renewed together.
const RENEW_TOGETHER: u32 = 20;

impl Core {
    /// When to call [`on_time`](Self::on_time) next.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let line = self.due.first().map(|(at, _)| *at);
        let expiry = self.ctx.expiries.first().map(|(at, ..)| *at);
        let sleeper = self.sleepers.first_key_value().map(|((at, _), _)| *at);
        let probe = match self.breaker {
            Breaker::Down { probe_at, .. } if self.in_flight.is_empty() => Some(probe_at),
            _ => None,
        };
        let bound = self.bounded.next_due();
        let due = [line, expiry, sleeper, bound, probe];
        due.into_iter().flatten().min()
    }

    /// Does what is due.
    pub(crate) fn on_time(&mut self, now: Instant) {
        self.ctx.now = now;
        self.wake_sleepers(now);
        while let Some(&(at, index, seq)) = self.ctx.expiries.first()
            && at <= now
        {
            self.lines[index].refuse(&mut self.ctx, seq, AcquireErrorKind::TimedOut);
            self.settle(index);
        }
        self.end_bounded(now);
        while let Some(&(at, index)) = self.due.first()
            && at <= now
        {
            self.lines[index].on_time(&mut self.ctx, now);
            self.settle(index);
        }
    }
}

impl Line {
    fn on_time(&mut self, ctx: &mut Ctx, now: Instant) {
        let due = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        if due(&mut self.timers.lease) {
            self.look_after_leases(ctx, now);
        }
        if due(&mut self.timers.roll_call) {
            self.call_roll();
        }
        self.work.touch |= due(&mut self.timers.poll);
        self.work.touch |= due(&mut self.timers.handover);
        if due(&mut self.timers.pool) {
            self.tend_pool(ctx, now);
        }
        if due(&mut self.timers.release) {
            self.work.release.append(&mut self.later);
        }
    }

    /// Nothing is asked of a permit while an answer about it is awaited. There is one now, or there will be none.
    pub(super) fn look_after(&mut self, seq: Seq) {
        if let Some(State::Held { renew_at }) = self.entries.get(&seq).map(|entry| entry.state) {
            self.timers.lease = earliest(self.timers.lease, renew_at);
        }
    }

    /// Renews what is due, ends what is over, and sets the timer for the rest.
    fn look_after_leases(&mut self, ctx: &mut Ctx, now: Instant) {
        let soon = now + ctx.settings.lease / RENEW_TOGETHER;
        let (mut over, mut renew, mut next) = (Vec::new(), Vec::new(), None);
        for (seq, entry) in &self.entries {
            let State::Held {
                renew_at: Some(renew_at),
            } = entry.state
            else {
                continue;
            };
            // What is not wanted, or will be told by an answer, is no concern of this.
            if !entry.wanted || (entry.open && !entry.taken) {
                continue;
            }
            let deadline = entry.lease.deadline();
            if entry.lease.is_over(now) {
                over.push(*seq);
            } else if entry.renewing || entry.open {
                next = earliest(next, deadline);
            } else if renew_at <= soon {
                renew.push(*seq);
                next = earliest(next, deadline);
            } else {
                next = earliest(next, Some(renew_at));
            }
        }
        if !over.is_empty() {
            tracing::warn!(
                limit = self.limit.name(),
                count = over.len(),
                "permits were lost: not renewed in time"
            );
        }
        over.into_iter().for_each(|seq| self.lose(ctx, seq));
        renew.into_iter().for_each(|seq| self.renew(seq));
        self.timers.lease = next;
    }
}
