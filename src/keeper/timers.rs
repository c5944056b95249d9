//! Time passes: renewals, polls, ends of waits. One sleep for all of them.

use tokio::time::Instant;

use super::{
    Core, Ctx,
    effects::Report,
    entry::{Entry, State},
    line::{Line, earliest},
};
use crate::{error::AcquireErrorKind, ledger::Seq};

/// Permits of one ledger that are due within this part of a lease are renewed together: it costs more to look at a ledger
/// than to renew one more permit of it. With half of the time between two renewals, permits that began at any times go
/// together after the second. With nearly all of it, each would be renewed whenever another is.
const TOGETHER: u32 = 6;
/// So many of its permits are looked at for that.
const COMPANIONS: usize = 128;

impl Core {
    /// When to call [`on_time`](Self::on_time) next.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let line = self.due.first().map(|(at, _)| *at);
        let lease = self.ctx.leases.first().map(|(at, ..)| *at);
        let expiry = self.ctx.expiries.first().map(|(at, ..)| *at);
        let sleeper = self.sleepers.first_key_value().map(|((at, _), _)| *at);
        let probe = self
            .breaker
            .probe_at()
            .filter(|_| self.in_flight.is_empty());
        let bound = self.bounded.next_due();
        let connection = self.connection.next_due();
        let alarm = self.alarm;
        let due = [
            line, lease, expiry, sleeper, bound, probe, connection, alarm,
        ];
        due.into_iter().flatten().min()
    }

    /// Does what is due.
    pub(crate) fn on_time(&mut self, now: Instant) {
        self.ctx.now = now;
        self.alarm.take_if(|at| *at <= now);
        self.wake_sleepers(now);
        while let Some(&(at, index, seq)) = self.ctx.expiries.first()
            && at <= now
        {
            self.ctx.expiries.pop_first();
            self.lines[index].refuse(&mut self.ctx, seq, AcquireErrorKind::TimedOut);
            self.settle(index);
        }
        self.end_bounded(now);
        self.reconnect(now);
        while let Some(&(at, index)) = self.due.first()
            && at <= now
        {
            self.lines[index].on_time(&mut self.ctx, now);
            self.settle(index);
        }
        self.look_after_leases(now);
    }

    /// Those that are due, line by line.
    fn look_after_leases(&mut self, now: Instant) {
        let mut due = Vec::new();
        while let Some(&(at, index, seq)) = self.ctx.leases.first()
            && at <= now
        {
            self.ctx.leases.pop_first();
            due.push((index, seq));
        }
        due.sort_unstable();
        for of_a_line in due.chunk_by(|one, other| one.0 == other.0) {
            let index = of_a_line[0].0;
            let seqs = of_a_line.iter().map(|(_, seq)| *seq);
            // What becomes of a claim may have emptied it.
            if let Some(line) = self.lines.get_mut(index) {
                line.look_after_leases(&mut self.ctx, seqs, now);
                self.settle(index);
            }
        }
    }
}

impl Line {
    fn on_time(&mut self, ctx: &mut Ctx, now: Instant) {
        let due = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        if due(&mut self.young) {
            self.list_young(ctx);
        }
        if let Some(queue) = &mut self.queue {
            self.touch |= due(&mut queue.poll);
            self.touch |= due(&mut queue.handover);
            if due(&mut queue.roll_call) {
                self.call_roll();
            }
        }
        if let Some(upkeep) = &mut self.upkeep
            && due(&mut upkeep.tend_at)
        {
            self.tend_pool(ctx, now);
        }
        if let Some(work) = &mut self.work
            && due(&mut work.later_at)
        {
            work.release.append(&mut work.later);
        }
    }

    /// A held permit is looked after then.
    pub(super) fn look_at(&mut self, ctx: &mut Ctx, seq: Seq, at: Instant) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && let State::Held { look_at } = &mut entry.state
        {
            let (line, old) = (entry.lease.line, look_at.replace(at));
            if seq < self.young_from
                && let Some(old) = old
            {
                ctx.leases.remove(&(old, line, seq));
            }
            self.list(ctx, line, seq, at);
        }
    }

    /// Sees to it that a held permit is looked after. Those that came lately share a timer: to list each of them would
    /// cost as much as the rest of a short life.
    pub(super) fn list(&mut self, ctx: &mut Ctx, line: usize, seq: Seq, at: Instant) {
        if seq < self.young_from {
            ctx.leases.insert((at, line, seq));
        } else {
            self.young = earliest(self.young, Some(at));
        }
    }

    fn list_young(&mut self, ctx: &mut Ctx) {
        for (seq, entry) in self.entries.since(self.young_from) {
            if let State::Held { look_at: Some(at) } = entry.state {
                ctx.leases.insert((at, entry.lease.line, *seq));
            }
        }
        self.young_from = ctx.last_seq + 1;
    }

    /// Nothing is asked of a permit while an answer about it is awaited. There is one now, or there will be none.
    pub(super) fn look_after(&mut self, ctx: &mut Ctx, seq: Seq) {
        let state = self.entries.get(&seq).map(|entry| entry.state);
        if let Some(State::Held { look_at: Some(_) }) = state {
            self.look_at(ctx, seq, ctx.now);
        }
    }

    /// Renews these, or ends them if they are over; and with them others that are due before long.
    fn look_after_leases(&mut self, ctx: &mut Ctx, due: impl Iterator<Item = Seq>, now: Instant) {
        let before = ctx.counts.lost;
        due.for_each(|seq| self.look_after_lease(ctx, seq, now));
        let soon = now + ctx.settings.lease / TOGETHER;
        let is_due =
            |entry: &Entry| matches!(entry.state, State::Held { look_at: Some(at) } if at <= soon);
        let companions = self.entries.iter().take(COMPANIONS);
        let companions = companions.filter(|(_, entry)| is_due(entry));
        for seq in companions.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            self.look_after_lease(ctx, seq, now);
        }
        let count = ctx.counts.lost - before;
        if count > 0 {
            let limit = self.limit.clone();
            ctx.effects.report(Report::Lost { limit, count });
        }
    }

    fn look_after_lease(&mut self, ctx: &mut Ctx, seq: Seq, now: Instant) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        // What is not wanted, or will be told by an answer, is no concern of this.
        if !entry.wanted || (entry.open && !entry.taken) {
            return;
        }
        if entry.lease.is_over(now) {
            return self.lose(ctx, seq);
        }
        // One without a deadline was admitted without the store, which is being told of it.
        let deadline = entry.lease.deadline();
        let deadline = deadline.unwrap_or(now + ctx.settings.lease);
        if !entry.open {
            self.renew(seq);
        }
        self.look_at(ctx, seq, deadline);
    }
}
