//! Timers of a queue: leases that are renewed or end, polls, releases that are repeated.

use tokio::time::Instant;

use super::{
    Queue,
    permit::{Entry, Holder, State},
};
use crate::{
    keeper::{context::Context, effects::Report},
    ledger::Seq,
};

/// Permits of one ledger that are due within this part of a lease are renewed together: it costs more to look at a ledger
/// than to renew one more permit of it. With half of the time between two renewals, permits that began at any times go
/// together after the second. With nearly all of it, each would be renewed whenever another is.
const TOGETHER: u32 = 6;
/// Permits that are looked at for that.
const COMPANIONS: usize = 128;

impl Queue {
    /// Does what is due, but for renewals of single permits.
    pub(in crate::keeper) fn on_time(&mut self, ctx: &mut Context) {
        let now = ctx.now;
        let due = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        if due(&mut self.young_at) {
            self.list_young(ctx);
        }
        if let Some(waiters) = &mut self.waiters {
            self.touch |= due(&mut waiters.poll_at);
            self.touch |= due(&mut waiters.handover_at);
            if due(&mut waiters.roll_call_at) {
                self.call_roll();
            }
        }
        if due(&mut self.tend_at) {
            self.tend_pool(ctx);
        }
        if let Some(outbox) = &mut self.outbox
            && due(&mut outbox.later_at)
        {
            outbox.release.append(&mut outbox.later);
        }
    }

    /// Renews these permits, or ends them if they are over; and with them others that are due before long.
    pub(in crate::keeper) fn renew_due(
        &mut self,
        ctx: &mut Context,
        due: impl Iterator<Item = Seq>,
    ) {
        let before = ctx.counts.lost;
        due.for_each(|seq| self.renew_or_end(ctx, seq));
        let soon = ctx.now + ctx.settings.lease / TOGETHER;
        let is_due = |entry: &Entry| match entry.state() {
            State::Held(hold) => hold.look_at.is_some_and(|at| at <= soon),
            _ => false,
        };
        let companions = self.entries.iter().take(COMPANIONS);
        let companions = companions.filter(|(_, entry)| is_due(entry));
        for seq in companions.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            self.renew_or_end(ctx, seq);
        }
        let count = ctx.counts.lost - before;
        if count > 0 {
            let limit = self.limit.clone();
            ctx.report(Report::Lost { limit, count });
        }
    }

    fn renew_or_end(&mut self, ctx: &mut Context, seq: Seq) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        let (holder, entering) = (entry.holder(), entry.in_store.entering);
        match holder {
            // Nothing is to be done for one that is gone, or whose request still has an answer to come.
            None => return,
            Some(Holder::Request | Holder::Reuser) if entering => return,
            Some(_) => {}
        }
        if entry.lease.is_over(ctx.now) {
            return self.lose(ctx, seq);
        }
        // One without a deadline was admitted without the store, which is being told of it.
        let deadline = entry.lease.deadline();
        let deadline = deadline.unwrap_or(ctx.now + ctx.settings.lease);
        if !entering {
            self.renew(seq);
        }
        self.look_at(ctx, seq, deadline);
    }
}
