//! The ledger in this process. In memory it decides on every request; with a store it is a fallback while that is down.
//! A request that the store cannot decide on goes to the fallback of its limit here ([`fall_back`](Queue::fall_back)).

use super::{Queue, permit::entry::Entry};
use crate::{
    error::AcquireErrorKind,
    keeper::context::{Availability, Context},
    ledger::{Ask, Batch, Call, Ledger, Operation, Seq, Standing, weight_of},
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

    /// A request for a single slot has asked for as long as it may, and the store has not answered it.
    pub fn end_asking(&mut self, ctx: &mut Context, seq: Seq) {
        match ctx.availability {
            Availability::Up => self.fall_back_alone(ctx, seq),
            down => {
                if let Some(new) = self.rename(ctx, seq) {
                    self.fall_back(ctx, new, down);
                }
            }
        }
    }

    /// Decides on one request by the limit's fallback while the store is up: it has waited for its turn in this process, which
    /// says nothing about the store. If the fallback has no slot for it, it goes on asking for as long as it may wait.
    fn fall_back_alone(&mut self, ctx: &mut Context, seq: Seq) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        let (may_wait, has_waited) = (entry.wait_until() > ctx.now, !entry.wait.is_zero());
        match self.verdict_alone(ctx, seq) {
            Ok(()) => self.admit_alone(ctx, seq),
            Err(AcquireErrorKind::Full) if may_wait && self.max() > 0 => {
                self.mark_overdue(ctx, seq)
            }
            Err(AcquireErrorKind::Full) if has_waited && self.max() > 0 => {
                self.refuse(ctx, seq, AcquireErrorKind::TimedOut);
            }
            Err(kind) => self.refuse(ctx, seq, kind),
        }
    }

    /// What the limit's fallback says of one request, while the store is up.
    pub fn verdict_alone(&mut self, ctx: &mut Context, seq: Seq) -> Result<(), AcquireErrorKind> {
        match self.limit.current_fallback() {
            _ if self.max() == 0 => Err(AcquireErrorKind::Full),
            Fallback::Reject => Err(AcquireErrorKind::Unavailable),
            Fallback::Allow => Ok(()),
            Fallback::Local(_) => {
                self.empty_pool(ctx);
                let held = self.entries.iter().filter(|(_, entry)| entry.is_held());
                let units: u32 = held.map(|(seq, _)| weight_of(*seq)).sum();
                match units + weight_of(seq) <= self.local_max(ctx) {
                    true => Ok(()),
                    false => Err(AcquireErrorKind::Full),
                }
            }
        }
    }

    /// Admits a request by its fallback while the store is up, and has the store adopt it.
    pub fn admit_alone(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(new) = self.rename(ctx, seq) {
            self.admit(ctx, new);
            self.renew(new);
        }
    }
}
