//! The ledger in this process. In memory it decides on every request; with a store it is a fallback while that is down.
//! A request that the store cannot decide on goes to the fallback of its limit here ([`fall_back`](Queue::fall_back)).

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Alone, Newcomer, Outcome, Queue,
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

    /// Asks for a slot, while the store does not decide: of the ledger in this process, or by the limit's fallback.
    pub fn begin_leg(&mut self, ctx: &mut Context, seq: Seq, wait: Duration) -> Outcome {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return Outcome::Waits;
        };
        entry.begin(ctx.now);
        let (wait_until, is_shadow) = (entry.asked + wait, entry.is_shadow());
        let begun = match ctx.availability {
            Availability::Up => self.acquire_here(ctx, seq, wait_until),
            Availability::Refused => Err(AcquireErrorKind::Misconfigured),
            Availability::Down if self.ledger_here.is_some() => {
                self.acquire_here(ctx, seq, wait_until)
            }
            Availability::Down => self.fall_back(ctx, seq, wait_until),
        };
        match begun {
            Ok(true) => Outcome::Held,
            Ok(false) => Outcome::Waits,
            Err(kind) if is_shadow => Outcome::Bypassed(kind),
            Err(kind) => Outcome::Refused(kind),
        }
    }

    /// Returns whether it has its slot, or waits for it.
    fn acquire_here(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        wait_until: Instant,
    ) -> Result<bool, AcquireErrorKind> {
        let Some(entry) = self.entries.get(&seq) else {
            return Ok(false);
        };
        let ask = Ask {
            seq,
            wait: wait_until > ctx.now,
        };
        let has_waited = entry.waits && !ask.wait;
        // From now on the ledger that is about to decide grants the slots that come free.
        self.empty_pool(ctx);
        match self.run_here(ctx, Operation::Acquire(ask)) {
            Some(Standing::Held { .. }) => {
                self.admit(ctx, seq);
                return Ok(true);
            }
            Some(Standing::Waiting { .. }) => {
                if let Some(entry) = self.entries.get_mut(&seq) {
                    entry.place = self.snapshot.waiting;
                }
                self.wait_here(ctx, seq);
            }
            Some(Standing::QueueFull) => return Err(AcquireErrorKind::QueueFull),
            _ if has_waited => return Err(AcquireErrorKind::TimedOut),
            _ => return Err(AcquireErrorKind::Full),
        }
        Ok(false)
    }

    /// Decides on a request by the limit's fallback, since the store cannot be asked.
    fn fall_back(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        wait_until: Instant,
    ) -> Result<bool, AcquireErrorKind> {
        match self.limit.current_fallback() {
            // In an outage too, a key without slots admits no request.
            _ if self.max() == 0 => Err(AcquireErrorKind::Full),
            Fallback::Reject => Err(AcquireErrorKind::Unavailable),
            Fallback::Allow => {
                self.admit(ctx, seq);
                Ok(true)
            }
            Fallback::Local(_) => {
                self.keep_ledger(ctx);
                self.acquire_here(ctx, seq, wait_until)
            }
        }
    }

    /// Requests that have fallen back are newcomers no more, or this queue would go before those that still are. The oldest
    /// stand first, and fall back first.
    pub fn forget_fallen_back(&mut self) {
        let Some(outbox) = &mut self.outbox else {
            return;
        };
        let entries = &self.entries;
        let is_unsent = |newcomer: &Newcomer| {
            let entry = entries.get(&newcomer.seq);
            entry.is_some_and(|entry| matches!(entry.state(), State::Idle))
        };
        while outbox
            .acquire
            .front()
            .is_some_and(|first| !is_unsent(first))
        {
            outbox.acquire.pop_front();
        }
    }

    /// What the limit's fallback says of one request, while the store is up. Idle slots go back to the store.
    pub fn verdict_alone(&mut self, ctx: &mut Context, seq: Seq, wait: Duration) -> Option<Alone> {
        let wait_until = self.entries.get(&seq)?.asked + wait;
        let is_shadow = self.entries.get(&seq)?.is_shadow();
        let verdict = match self.limit.current_fallback() {
            _ if self.max() == 0 => Alone::Refused(AcquireErrorKind::Full),
            Fallback::Reject => Alone::Refused(AcquireErrorKind::Unavailable),
            Fallback::Allow => Alone::Admitted,
            Fallback::Local(_) if self.has_slot_here(ctx, weight_of(seq)) => Alone::Admitted,
            Fallback::Local(_) if wait_until > ctx.now => Alone::Waits(wait_until),
            Fallback::Local(_) if wait.is_zero() => Alone::Refused(AcquireErrorKind::Full),
            Fallback::Local(_) => Alone::Refused(AcquireErrorKind::TimedOut),
        };
        Some(match verdict {
            Alone::Waits(_) | Alone::Refused(_) if is_shadow => Alone::Bypassed,
            verdict => verdict,
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
        self.admit(ctx, seq);
        self.renew(seq);
    }
}
