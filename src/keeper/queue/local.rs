//! Decisions of the ledger in this process: without a store on every request, otherwise during outages. A request that the store
//! cannot decide on goes to its limit's fallback ([`decider`](Queue::decider)). A pause limits this ledger too.

use std::time::Duration;

use super::{
    Decider, Queue,
    entries::entry::{Entry, State, WaitsIn},
};
use crate::{
    error::AcquireErrorKind,
    fallbacks::{Availability, FallbackInForce},
    keeper::context::Context,
    ledger::{Ask, Batch, Call, Operation, Payer, Seq, Standing, Want},
    telemetry::{Measure, Topic},
};

impl Queue {
    /// Starts the pool and, without a store, the ledger in this process. Called once.
    pub fn start(&mut self, ctx: &mut Context) {
        if !ctx.shared {
            self.keep_ledger(ctx);
        }
        self.make_pool(ctx);
    }

    /// Starts a ledger in this process, with the slots already held.
    fn keep_ledger(&mut self, ctx: &mut Context) {
        if self.here.get().is_none() {
            let held = self.entries.those(Entry::is_held);
            self.here.begin(held, &mut ctx.scratch);
            self.read_here();
        }
    }

    /// Ends the ledger in this process: those who wait there ask again.
    pub(super) fn end_ledger(&mut self, ctx: &mut Context) {
        self.here.end();
        let waits = |entry: &Entry| matches!(entry.state(), State::Waiting(WaitsIn::Here));
        for seq in self.entries.those(waits) {
            self.park(ctx, seq);
        }
    }

    /// The decision on requests while the store does not decide.
    pub fn decider(&self, ctx: &Context, availability: Availability) -> Decider {
        match availability {
            Availability::Up => return Decider::Ledger,
            Availability::Refused => {
                return Decider::Fallback(Err(AcquireErrorKind::Misconfigured));
            }
            Availability::Down => {}
        }
        match self.terms.fallback(ctx) {
            FallbackInForce::Local(_) if self.here.get().is_some() => Decider::Ledger,
            // In an outage too, a key without slots admits no request.
            _ if self.terms.max() == 0 => Decider::Fallback(Err(AcquireErrorKind::Full)),
            FallbackInForce::Reject => Decider::Fallback(Err(AcquireErrorKind::Unavailable)),
            FallbackInForce::Allow if self.pause.left(ctx.now).is_some() => {
                Decider::Fallback(Err(AcquireErrorKind::Paused))
            }
            FallbackInForce::Allow => Decider::Fallback(Ok(())),
            FallbackInForce::Local(_) => Decider::Ledger,
        }
    }

    /// Asks this process for the slot of a request for a single slot. Returns whether it was granted at once.
    pub fn ask_here(&mut self, ctx: &mut Context, seq: Seq, wait: Duration) -> bool {
        let answer = match self.decider(ctx, ctx.availability(self.terms.part)) {
            Decider::Fallback(verdict) => verdict.map(|()| Standing::Held { until_ms: 0 }),
            Decider::Ledger => {
                let wait = self.prepare_ledger(ctx, seq, wait);
                let payer = self.quote(ctx, seq);
                let standing = self.run_here(ctx, Operation::Acquire(Ask { seq, wait, payer }));
                // In a fair ledger, the turn of its tenant may come in the step in which it queues.
                if payer.is_some() && self.entries.get(seq).is_some_and(Entry::is_held) {
                    return true;
                }
                Ok(standing.unwrap_or(Standing::Absent))
            }
        };
        self.on_answer_here(ctx, seq, wait, answer);
        self.entries.get(seq).is_some_and(Entry::is_held)
    }

    /// Part of a claim on the ledger in this process: the ask, who pays, and its batch.
    pub fn draft_here(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        wait: Duration,
        batch: &mut Batch,
    ) -> (Want, Option<Payer>) {
        let waits = self.prepare_ledger(ctx, seq, wait);
        let is_shadow = self.entry(seq).is_some_and(Entry::is_shadow);
        (batch.limit, batch.whole) = self.limits_here(ctx);
        if ctx.asks_store(self.terms.part) {
            // This ledger serves one claim only and is empty, since many requests may fall back in one step: the slots held count
            // here. `whole` stays, so a permit that needs more than is left is not taken for one that is heavier than the limit.
            batch.limit = batch.limit.saturating_sub(self.entries.held().all);
        }
        batch.max_waiters = self.terms.limit().waiters();
        (batch.waits, batch.dues) = (waits, self.terms.empty_dues());
        let want = match waits {
            _ if is_shadow => Want::IfFree,
            true => Want::Wait,
            false => Want::Now,
        };
        (want, self.quote(ctx, seq))
    }

    /// Prepares the ledger to grant slots as they come free. Returns whether the request may wait there: beside a store
    /// that is up, the ledger serves one claim only.
    fn prepare_ledger(&mut self, ctx: &mut Context, seq: Seq, wait: Duration) -> bool {
        self.empty_pool(ctx);
        if ctx.asks_store(self.terms.part) {
            self.here.begin(Vec::new(), &mut ctx.scratch);
            return false;
        }
        self.keep_ledger(ctx);
        let entry = self.entries.get(seq);
        entry.is_some_and(|entry| entry.may_wait(wait, ctx.now))
    }

    /// A claim on the ledger in this process was decided on.
    pub fn after_claim(&mut self, ctx: &Context, call: &mut Call, batch: &Batch) {
        if ctx.asks_store(self.terms.part) {
            return self.here.end();
        }
        self.here.get_mut().end(call, batch);
        self.here.note_change();
        self.read_here();
    }

    /// The answer of this process to a request.
    pub fn on_answer_here(
        &mut self,
        ctx: &mut Context,
        seq: Seq,
        wait: Duration,
        answer: Result<Standing, AcquireErrorKind>,
    ) {
        let Some(entry) = self.entries.get_mut(seq) else {
            return;
        };
        let has_waited = entry.waits && !entry.may_wait(wait, ctx.now);
        let kind = match answer {
            Ok(Standing::Held { .. }) => {
                entry.forget_prepayment();
                self.admit(ctx, seq);
                // The request has fallen back alone: the store, which is up, adopts the slot.
                if ctx.asks_store(self.terms.part) {
                    self.ask_about(seq);
                    self.forget_fallen_back();
                }
                return;
            }
            Ok(Standing::Waiting { .. }) => {
                entry.place = self.snapshot.waiting();
                entry.begin(ctx.now);
                self.set(ctx, seq, State::Waiting(WaitsIn::Here));
                if self.terms.limit().is_fair() {
                    // Its turn may come before that of a waiter that needs more units than are free.
                    self.run_here(ctx, Operation::Nothing);
                }
                return;
            }
            // The claim did not reach this ledger.
            Ok(Standing::Absent | Standing::Adopted { .. }) => return,
            Ok(Standing::QueueFull) => AcquireErrorKind::QueueFull,
            Ok(Standing::Full) if has_waited => AcquireErrorKind::TimedOut,
            Ok(Standing::Full) => self.full_kind(ctx),
            Err(kind) => kind,
        };
        self.refuse(ctx, seq, kind);
    }

    /// Requests that fell back are no longer newcomers, or this queue would precede queues with real newcomers. The
    /// oldest are first in the list, and fall back first.
    pub fn forget_fallen_back(&mut self) {
        let is_idle = |entry: &Entry| matches!(entry.state(), State::Idle);
        (self.outbox).forget_first(|seq| self.entries.get(seq).is_some_and(is_idle));
    }
}

/// Pauses, which hold here too.
impl Queue {
    /// Starts a pause, unless the present one is longer.
    pub fn pause(&mut self, ctx: &mut Context, length: Duration) {
        let asks_store = ctx.asks_store(self.terms.part);
        let Some(started) = self.pause.start(length, ctx.now, ctx.shared, asks_store) else {
            return;
        };
        if started.is_new {
            ctx.measure(self.terms.limit_id, Measure::Paused(started.length));
            ctx.report(self.terms.limit_id, Topic::Paused, self.terms.id, 1);
        }
        self.outbox.want(ctx.shared);
        self.empty_pool(ctx);
    }

    /// Ends a pause, and its ramp, by an operator's order. Returns whether there was one.
    pub fn resume(&mut self, ctx: &mut Context) -> bool {
        let was_paused = self.pause.resume(ctx.now, ctx.shared);
        if was_paused {
            self.outbox.want(ctx.shared);
            self.here.note_change();
            self.run_here(ctx, Operation::Nothing);
        }
        was_paused
    }

    /// Called after every change of the queue, before the core lists it: opens or closes the pool by the ledger in this
    /// process, and sets the time for the next slot of that ledger after a pause, or for the end of the ramp.
    pub fn after_change(&mut self, ctx: &mut Context) {
        self.follow_ledger_here(ctx);
        if self.pause.is_any() {
            let ledger = self.here.get().filter(|ledger| ledger.waiting() > 0);
            let whole = self.terms.max_here(ctx);
            let rise =
                ledger.and_then(|ledger| self.pause.next_rise(whole, ledger.in_use(), ctx.now));
            self.pause.plan(rise);
        }
    }
}
