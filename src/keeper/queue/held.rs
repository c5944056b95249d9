//! A slot that is held: renewed when it is due, lost at the end of its lease, parked while its request goes on without it.

use super::{
    Queue, Use,
    dues::add_report,
    entries::entry::{Entry, Holder},
};
use crate::{
    error::LostErrorKind,
    keeper::context::{Context, Decision},
    ledger::{Operation, Seq},
};

impl Queue {
    /// Parks a slot that was lost, or that follows a lost leg.
    pub fn park_slot(&mut self, ctx: &mut Context, seq: Seq) {
        let debt = self.debt_of(ctx, seq);
        self.release_here(ctx, seq, debt);
        self.park(ctx, seq);
    }

    /// Renews a held slot that is due, or that was not renewed while its exchange was in flight; or ends the slot if it
    /// has expired. Without a store, its tenant pays. If a request still has it, that is told of any change.
    pub(super) fn look_after(&mut self, ctx: &mut Context, seq: Seq) {
        // Its request may have left an exchange, and have waited for the end of it.
        self.entries.tell_request(ctx, seq, Decision::Changed);
        let Some(entry) = self.entries.get(seq) else {
            return;
        };
        let entering = entry.presence.is_entering();
        let awaits_answer = |holder| entering && holder != Holder::Permit;
        // Nothing to do: the permit is gone, or its request still awaits an answer.
        if entry.holder().is_none_or(awaits_answer) {
            return;
        }
        if let Some(time) = self.pays_every(ctx) {
            let report = self.take_report(ctx, seq);
            if report.is_some() {
                add_report(self.batch_here(ctx), report);
                self.run_batch_here(ctx, Operation::Nothing);
            }
            return self.set_due(seq, ctx.now + time);
        }
        if entry.lease.is_over(ctx.now) {
            return self.lose(ctx, seq, LostErrorKind::Lost);
        }
        // Without a deadline, it was admitted without the store, which is adopting it.
        let deadline = entry.lease.deadline();
        let deadline = deadline.unwrap_or(ctx.now + ctx.settings.lease);
        if !entering {
            self.ask_about(seq);
        }
        self.set_due(seq, deadline);
    }

    /// Ends a held slot that is lost. If no permit has it yet, its request goes on once the slot's fate is known.
    pub fn lose(&mut self, ctx: &mut Context, seq: Seq, kind: LostErrorKind) {
        let Some(entry) = self.entries.get(seq) else {
            return;
        };
        match entry.holder() {
            Some(Holder::Permit) => {
                ctx.record(|history, now| history.lost(&self.terms.ledger, seq, now));
                let lease = entry.lease.clone();
                ctx.end_lease(&lease, kind);
                // Slots enter and leave the pool without the keeper's lock, but not once their lease has ended.
                if self.kept.pool().is_some_and(|pool| pool.remove(&lease)) {
                    return self.release(ctx, seq, Use::Idle);
                }
                if kind == LostErrorKind::Lost {
                    ctx.note_lost_lease(&lease);
                }
                self.release(ctx, seq, Use::Held);
            }
            Some(Holder::Request | Holder::Reuser) if !entry.presence.is_entering() => {
                self.park_slot(ctx, seq);
            }
            _ => {}
        }
    }

    /// Loses all held slots, at a shutdown.
    pub fn lose_all(&mut self, ctx: &mut Context) {
        for seq in self.entries.those(Entry::is_held) {
            self.lose(ctx, seq, LostErrorKind::ShutDown);
        }
    }
}
