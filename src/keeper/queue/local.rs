//! The ledger in this process. In memory it decides on every request; with a store it is a fallback while that is down.
//! A request that the store cannot decide on goes to the fallback of its limit here ([`decider`](Queue::decider)).

use std::time::Duration;

use super::{
    Alone, Decider, Newcomer, Outcome, Queue,
    permit::entry::{Entry, State},
};
use crate::{
    error::AcquireErrorKind,
    keeper::context::{Availability, Context},
    ledger::{Ask, Batch, Call, Ledger, Operation, Seq, Standing, Want, weight_of},
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

    /// What decides on requests while the store does not.
    pub fn decider(&self, availability: Availability) -> Decider {
        match (availability, self.limit.current_fallback()) {
            (Availability::Up, _) => Decider::Ledger,
            (Availability::Refused, _) => Decider::Fallback(Err(AcquireErrorKind::Misconfigured)),
            _ if self.ledger_here.is_some() => Decider::Ledger,
            // In an outage too, a key without slots admits no request.
            _ if self.max() == 0 => Decider::Fallback(Err(AcquireErrorKind::Full)),
            (_, Fallback::Reject) => Decider::Fallback(Err(AcquireErrorKind::Unavailable)),
            (_, Fallback::Allow) => Decider::Fallback(Ok(())),
            (_, Fallback::Local(_)) => Decider::Ledger,
        }
    }

    /// Asks this process for the slot of a request that wants no more.
    pub fn ask_here(&mut self, ctx: &mut Context, seq: Seq, wait: Duration) -> Outcome {
        match self.decider(ctx.availability) {
            Decider::Fallback(verdict) => self.follow_verdict(ctx, seq, verdict),
            Decider::Ledger => {
                let wait_here = self.prepare_ledger(ctx, seq, wait);
                let ask = Ask {
                    seq,
                    wait: wait_here,
                };
                let standing = self.run_here(ctx, Operation::Acquire(ask));
                let standing = standing.unwrap_or(Standing::Absent);
                self.on_answer_here(ctx, seq, wait, standing)
            }
        }
    }

    /// Whether its limit is in shadow mode for the request, if it does not have this slot.
    pub fn asks_here(&self, seq: Seq) -> Option<bool> {
        let entry = self.entries.get(&seq)?;
        matches!(entry.state(), State::Idle).then(|| entry.is_shadow())
    }

    /// Part of a claim on the ledger in this process: what it asks for, and its batch.
    pub fn draft_here(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        wait: Duration,
        batch: &mut Batch,
    ) -> Want {
        let waits = self.prepare_ledger(ctx, seq, wait);
        let is_shadow = self.entries.get(&seq).is_some_and(Entry::is_shadow);
        (batch.limit, batch.max_waiters) = (self.local_max(ctx), self.limit.waiters());
        batch.waits = waits;
        match waits {
            _ if is_shadow => Want::IfFree,
            true => Want::Wait,
            false => Want::Now,
        }
    }

    /// From now on the ledger that is about to decide grants the slots that come free. Returns whether the request may
    /// wait there.
    fn prepare_ledger(&mut self, ctx: &mut Context, seq: Seq, wait: Duration) -> bool {
        self.keep_ledger(ctx);
        self.empty_pool(ctx);
        let entry = self.entries.get(&seq);
        entry.is_some_and(|entry| entry.may_wait(wait, ctx.now))
    }

    /// The ledger in this process. A claim on it was drafted, and so there is one.
    pub fn ledger_here(&mut self) -> &mut Ledger {
        self.ledger_here.get_or_insert_default()
    }

    /// A claim on the ledger in this process was decided on.
    pub fn after_claim(&mut self, call: &mut Call, batch: &Batch) {
        self.ledger_here().end(call, batch);
        self.read_local();
        self.recheck_right = true;
    }

    /// The ledger in this process has answered a request.
    pub fn on_answer_here(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        wait: Duration,
        standing: Standing,
    ) -> Outcome {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return Outcome::Waits;
        };
        let has_waited = entry.waits && !entry.may_wait(wait, ctx.now);
        let verdict = match standing {
            Standing::Held { .. } => Ok(()),
            Standing::Waiting { .. } => {
                entry.place = self.snapshot.waiting;
                entry.begin(ctx.now);
                self.wait_here(ctx, seq);
                return Outcome::Waits;
            }
            Standing::QueueFull => Err(AcquireErrorKind::QueueFull),
            Standing::Full if has_waited => Err(AcquireErrorKind::TimedOut),
            Standing::Full => Err(AcquireErrorKind::Full),
            // Its claim did not reach this ledger.
            Standing::Absent | Standing::Stale | Standing::Adopted { .. } => return Outcome::Waits,
        };
        self.follow_verdict(ctx, seq, verdict)
    }

    /// This process has decided on a request.
    pub fn follow_verdict(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        verdict: Result<(), AcquireErrorKind>,
    ) -> Outcome {
        match verdict {
            Ok(()) => {
                self.admit(ctx, seq);
                Outcome::Held
            }
            Err(kind) if self.entries.get(&seq).is_some_and(Entry::is_shadow) => {
                Outcome::Bypassed(kind)
            }
            Err(kind) => Outcome::Refused(kind),
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
        let verdict = match self.decider(Availability::Down) {
            Decider::Fallback(Err(kind)) => Alone::Refused(kind),
            Decider::Fallback(Ok(())) => Alone::Admitted,
            Decider::Ledger if self.has_slot_here(ctx, weight_of(seq)) => Alone::Admitted,
            Decider::Ledger if wait_until > ctx.now => Alone::Waits(wait_until),
            Decider::Ledger if wait.is_zero() => Alone::Refused(AcquireErrorKind::Full),
            Decider::Ledger => Alone::Refused(AcquireErrorKind::TimedOut),
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
