//! The ledger in this process. In memory it decides on every request; with a store it is a fallback while that is down.
//! A request that the store cannot decide on goes to the fallback of its limit here ([`fall_back`](Queue::fall_back)).

use super::{
    Alone, Queue,
    permit::entry::{Entry, State},
};
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
        self.forget_fallen_back();
    }

    /// Requests that have fallen back are newcomers no more, or this queue would go before those that still are. The oldest
    /// stand first, and fall back first.
    fn forget_fallen_back(&mut self) {
        let Some(outbox) = &mut self.outbox else {
            return;
        };
        let entries = &self.entries;
        let is_unsent = |seq: &Seq| {
            let entry = entries.get(seq);
            entry.is_some_and(|entry| matches!(entry.state(), State::Unsent { .. }))
        };
        while outbox.acquire.front().is_some_and(|seq| !is_unsent(seq)) {
            outbox.acquire.pop_front();
        }
    }

    /// Decides on one request by the limit's fallback while the store is up: it has waited for its turn in this process, which
    /// says nothing about the store.
    fn fall_back_alone(&mut self, ctx: &mut Context, seq: Seq) {
        match self.verdict_alone(ctx, seq) {
            Some(Alone::Admitted) => self.admit_alone(ctx, seq),
            Some(Alone::Waits(_)) => self.mark_overdue(ctx, seq),
            Some(Alone::Refused(kind)) => self.refuse(ctx, seq, kind),
            None => {}
        }
    }

    /// What the limit's fallback says of one request, while the store is up. Idle slots go back to the store.
    pub fn verdict_alone(&mut self, ctx: &mut Context, seq: Seq) -> Option<Alone> {
        let entry = self.entries.get(&seq)?;
        let (wait, wait_until) = (entry.wait, entry.wait_until());
        Some(match self.limit.current_fallback() {
            _ if self.max() == 0 => Alone::Refused(AcquireErrorKind::Full),
            Fallback::Reject => Alone::Refused(AcquireErrorKind::Unavailable),
            Fallback::Allow => Alone::Admitted,
            Fallback::Local(_) if self.has_slot_here(ctx, weight_of(seq)) => Alone::Admitted,
            Fallback::Local(_) if wait_until > ctx.now => Alone::Waits(wait_until),
            Fallback::Local(_) if wait.is_zero() => Alone::Refused(AcquireErrorKind::Full),
            Fallback::Local(_) => Alone::Refused(AcquireErrorKind::TimedOut),
        })
    }

    /// Whether this process holds so few slots that its own limit leaves room for this weight.
    fn has_slot_here(&mut self, ctx: &mut Context, weight: u32) -> bool {
        self.empty_pool(ctx);
        let held = self.entries.iter().filter(|(_, entry)| entry.is_held());
        let units: u32 = held.map(|(seq, _)| weight_of(*seq)).sum();
        units + weight <= self.local_max(ctx)
    }

    /// Admits a request by its fallback while the store is up, and has the store adopt it.
    pub fn admit_alone(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(new) = self.rename(ctx, seq) {
            self.admit(ctx, new);
            self.renew(new);
        }
    }
}
