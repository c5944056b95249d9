//! The queue's part in fair shares: who pays for a newcomer, and what permits of this process owe. A grant to a waiter is
//! paid in advance by the mean hold of the limit; renewals report longer holds while others wait, and the release
//! settles the rest, or refunds unused time. A hold begins when this process learns of the grant.

use std::time::Duration;

use super::{
    Queue,
    entries::entry::{Debt, Payment, State, WaitsIn, cost_us},
};
use crate::{
    keeper::context::Context,
    ledger::{Batch, Left, MemberId, Payer, Report, Seq, weight_of},
};

/// Time paid in advance while no hold is known.
const FIRST_HOLD: Duration = Duration::from_secs(1);
/// Permits pay for at most this part of a lease in advance, and then report as often.
const PART_OF_LEASE: u32 = 3;

impl Queue {
    /// The payer of a newcomer, and the price of a usual hold, which it pays in advance if it is granted from the queue.
    #[inline]
    pub(super) fn quote(&mut self, ctx: &Context, seq: Seq) -> Option<Payer> {
        let is_fair = self.terms.limit().is_fair();
        is_fair.then(|| self.quote_if_fair(ctx, seq))?
    }

    fn quote_if_fair(&mut self, ctx: &Context, seq: Seq) -> Option<Payer> {
        let time = ctx.registry.mean_hold(self.terms.limit_id);
        let time = (time.unwrap_or(FIRST_HOLD)).min(ctx.settings.lease / PART_OF_LEASE);
        let max = self.terms.max();
        let paying = self.entries.get_mut(seq)?.paying_mut()?;
        if let Payment::Quoted { .. } = paying.paid {
            // It was sent with this price, by which a departure finds it in its line.
            return paying.payer();
        }
        let (tenant, own) = (paying.tenant, paying.share);
        let share = ctx.registry.share_of(self.terms.limit_id, tenant, own);
        let cost_us = cost_us(time, seq, share, max);
        paying.paid = Payment::Quoted { cost_us };
        paying.payer()
    }

    /// Reports the debt of a held permit if anyone waits; the debt then counts as paid. Time without waiters is free. A permit that
    /// has paid ahead owes nothing yet. A permit that was granted without waiting begins to pay when it first finds others waiting.
    pub(super) fn take_report(&mut self, ctx: &Context, seq: Seq) -> Option<Report> {
        let owed = self.owed(ctx, seq);
        let entry = self.entries.get_mut(seq)?;
        if !entry.is_held() {
            return None;
        }
        let is_ahead = owed.as_ref().is_some_and(|report| report.us < 0);
        let paying = entry.paying_mut().filter(|_| !is_ahead)?;
        let anyone_waits = self.snapshot.waiting() > 0;
        if anyone_waits || paying.paid != Payment::Nothing {
            paying.paid = Payment::Until(ctx.now);
        }
        owed.filter(|_| anyone_waits)
    }

    /// The debt of a held permit by now; negative if more was paid.
    fn owed(&self, ctx: &Context, seq: Seq) -> Option<Report> {
        let entry = self.entries.get(seq)?;
        let paying = entry.paying()?;
        let (tenant, own) = (paying.tenant, paying.share);
        let share = ctx.registry.share_of(self.terms.limit_id, tenant, own);
        let cost_us = |time| cost_us(time, seq, share, self.terms.max());
        let since = |at| cost_us(ctx.now.saturating_duration_since(at)) as i64;
        let us = match (entry.state(), paying.paid) {
            // Granted, and not used yet.
            (State::Checking { .. }, Payment::Quoted { cost_us }) => -(cost_us as i64),
            (State::Held(_), Payment::Since { at, cost_us }) => since(at) - cost_us as i64,
            (State::Held(_), Payment::Until(until)) => since(until),
            _ => return None,
        };
        (us != 0).then_some(Report {
            tenant,
            us,
            most_us: entry.held().map_or(0, |hold| since(hold.since) as u64),
        })
    }

    /// The debt that a release settles. A waiter's place ends; a permit pays the rest if others wait, or gets a refund of
    /// unused time.
    #[inline]
    pub(super) fn debt_of(&self, ctx: &Context, seq: Seq) -> Option<Debt> {
        let is_fair = self.terms.limit().is_fair();
        is_fair.then(|| self.debt_if_fair(ctx, seq))?
    }

    fn debt_if_fair(&self, ctx: &Context, seq: Seq) -> Option<Debt> {
        let entry = self.entries.get(seq)?;
        let ticket = match *entry.state() {
            State::Waiting(WaitsIn::InStore { ticket, .. }) => ticket,
            // Given up before the store had answered that it waits.
            State::Leaving => entry.ticket()?.get(),
            State::Waiting(WaitsIn::Here) => {
                let replica = ctx.settings.replica;
                let standing = self.here.get()?.standing(MemberId { replica, seq })?;
                standing.ticket()?
            }
            _ => {
                let report = self.owed(ctx, seq)?;
                let is_due = report.us < 0 || self.snapshot.waiting() > 0;
                return is_due.then_some(Debt::Settled(report));
            }
        };
        let payer = entry.paying()?.payer()?;
        Some(Debt::Left { payer, ticket })
    }

    /// Held permits of the ledger in this process pay at these times.
    pub(super) fn pays_every(&self, ctx: &Context) -> Option<Duration> {
        (self.terms.limit().is_fair() && !ctx.shared).then(|| ctx.settings.lease / PART_OF_LEASE)
    }
}

/// Adds the report of a held permit to the dues of a batch.
pub(super) fn add_report(batch: &mut Batch, report: Option<Report>) {
    if let (Some(dues), Some(report)) = (&mut batch.dues, report) {
        add(&mut dues.reports, report);
    }
}

/// Adds the debt of a release to the dues of a batch.
pub(super) fn add_debt(batch: &mut Batch, seq: Seq, debt: Option<Debt>) {
    let (Some(dues), Some(debt)) = (&mut batch.dues, debt) else {
        return;
    };
    match debt {
        Debt::Left { payer, ticket } => dues.left.push(Left { payer, ticket, seq }),
        Debt::Settled(report) => {
            dues.settled_units += weight_of(seq);
            add(&mut dues.settled, report);
        }
    }
}

fn add(reports: &mut Vec<Report>, report: Report) {
    match reports.iter_mut().find(|sum| sum.tenant == report.tenant) {
        Some(sum) => {
            sum.us += report.us;
            sum.most_us = sum.most_us.max(report.most_us);
        }
        None => reports.push(report),
    }
}
