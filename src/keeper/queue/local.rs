//! The ledger in this process. In memory it decides on every request; with a store it is a fallback while that is down.
//! A request that the store cannot decide on goes to the fallback of its limit here ([`fall_back`](Queue::fall_back)).

use super::{Queue, permit::entry::Entry};
use crate::{
    error::AcquireErrorKind,
    keeper::context::{Availability, Context},
    ledger::{Ask, Batch, Call, Ledger, Operation, Seq, Standing},
    limit::Fallback,
};

impl Queue {
    /// Starts the ledger in this process if there is no store, and the pool. To be called once.
    pub fn start(&mut self, ctx: &mut Context) {
        if !ctx.shared {
            self.keep_ledger(ctx);
        }
        self.make_pool(ctx);
    }

    /// Starts a ledger in this process, with those that hold slots already.
    fn keep_ledger(&mut self, ctx: &mut Context) {
        if self.ledger_here.is_none() {
            let batch = Batch {
                limit: self.local_max(ctx),
                max_waiters: self.limit.waiters(),
                adopt: self.those(Entry::is_held),
                ..Batch::default()
            };
            let mut ledger = Box::new(Ledger::default());
            ledger.run(&mut Call::new(&ctx.scratch, 0), &batch);
            self.ledger_here = Some(ledger);
            self.read_local();
            self.recheck_right = true;
        }
    }

    pub(super) fn acquire_here(&mut self, ctx: &mut Context, seq: Seq) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        let ask = Ask {
            seq,
            wait: entry.wait_until() > ctx.now,
        };
        let has_waited = !entry.wait.is_zero() && !ask.wait;
        // From now on the ledger that is about to decide grants the slots that come free.
        self.empty_pool(ctx);
        match self.run_here(ctx, Operation::Acquire(ask)) {
            Some(Standing::Held { .. }) => self.admit(ctx, seq),
            Some(Standing::Waiting { .. }) => {
                if let Some(entry) = self.entries.get_mut(&seq) {
                    entry.place = self.snapshot.waiting;
                }
                self.wait_here(ctx, seq);
            }
            Some(Standing::QueueFull) => {
                self.mark_refused(ctx, seq, AcquireErrorKind::QueueFull);
            }
            _ if has_waited => self.mark_refused(ctx, seq, AcquireErrorKind::TimedOut),
            _ => self.mark_refused(ctx, seq, AcquireErrorKind::Full),
        }
    }

    /// Decides on a request by the limit's fallback, since the store cannot be asked.
    pub(super) fn fall_back(&mut self, ctx: &mut Context, seq: Seq, availability: Availability) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        if entry.in_store.entering || !entry.is_undecided() {
            return;
        }
        if availability == Availability::Refused {
            return self.refuse(ctx, seq, AcquireErrorKind::Misconfigured);
        }
        match self.limit.current_fallback() {
            // In an outage too, a key without slots admits no request.
            _ if self.max() == 0 => self.refuse(ctx, seq, AcquireErrorKind::Full),
            Fallback::Reject => self.refuse(ctx, seq, AcquireErrorKind::Unavailable),
            Fallback::Allow => {
                if let Some(new) = self.rename(ctx, seq) {
                    self.admit(ctx, new);
                }
            }
            Fallback::Local(_) => {
                self.keep_ledger(ctx);
                if let Some(new) = self.rename(ctx, seq) {
                    self.acquire_here(ctx, new);
                }
            }
        }
    }
}
