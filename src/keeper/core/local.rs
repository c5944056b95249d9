//! Decisions of this process: on all requests in memory, and by the fallback of each limit where the store does not
//! decide.
//!
//! A request for one slot asks the ledger of its queue. Any other request is a claim on ledgers and rates of this
//! process: all or nothing, by the same steps as a claim in the store.

use std::{mem, time::Duration};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Core, LocalClaim, Next, Request, SlotLeg, Stage,
    accounting::{Accounting, is_enforced, rate_here, too_soon},
    queues::Queues,
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    fallbacks::{Availability, FallbackInForce},
    keeper::{
        context::Context,
        demand::RequestId,
        queue::{Decider, Queue},
    },
    key::Key,
    leases::{Fee, Paid, QueueId},
    ledger::{
        Batch, Call, Charge, Charged, ClaimAsk, ClaimedLedger, RateState, Standing, Stock, Tat,
    },
    limit::LimitId,
    part::Part,
    telemetry::Measure,
};

/// The ledgers and rates of this process.
struct Here<'a> {
    queues: &'a mut Queues,
    accounting: &'a mut Accounting,
    now_us: u64,
    asked: &'a [QueueId],
    batches: &'a [Batch],
    /// In this process no waiter is dead, so sweeping a queue changes nothing.
    swept: bool,
    charged: &'a [(LimitId, Key)],
}

impl Stock for Here<'_> {
    fn ledger(&mut self, batch: usize) -> ClaimedLedger<'_> {
        let queue = self.queues.without_listing(self.asked[batch]);
        ClaimedLedger {
            ledger: queue.here.get_mut(),
            batch: &self.batches[batch],
            swept: &mut self.swept,
        }
    }

    fn rate(&mut self, index: usize, _: &Charge) -> Option<&mut RateState> {
        self.accounting.rate(&self.charged[index])
    }

    fn set_rate(&mut self, index: usize, _: &Charge, state: RateState) {
        let key = self.charged[index].clone();
        self.accounting.set_rate(key, state, self.now_us);
    }
}

impl LocalClaim {
    fn clear(&mut self) {
        self.waived.clear();
        self.claim.charges.clear();
        self.claim.asks.clear();
        self.rates.clear();
        self.queues.clear();
    }

    fn ask(&mut self, SlotLeg { lease, wait, .. }: &SlotLeg, queue: &mut Queue, ctx: &mut Context) {
        let (batch, seq) = (self.queues.len(), lease.seq());
        self.queues.push(lease.queue);
        if self.batches.len() == batch {
            self.batches.push(Batch::default());
        }
        let (want, payer) = queue.draft_here(ctx, seq, *wait, &mut self.batches[batch]);
        self.claim.asks.push(ClaimAsk {
            batch,
            seq,
            want,
            payer,
        });
    }

    /// Runs the claim. The queues have to be listed again afterwards.
    fn run(&mut self, ctx: &mut Context, queues: &mut Queues, accounting: &mut Accounting) {
        let now_us = ctx.local_us();
        let mut call = Call::new(&ctx.scratch, 0);
        let mut here = Here {
            queues,
            accounting,
            now_us,
            asked: &self.queues,
            batches: &self.batches,
            swept: false,
            charged: &self.rates,
        };
        (self.claim).run(&mut call, now_us, &mut here, &mut self.reply);
        for (queue, batch) in self.queues.iter().zip(&self.batches) {
            let queue = queues.without_listing(*queue);
            queue.after_claim(ctx, &mut call, batch);
        }
    }
}

/// A leg that a request does not have yet, and the decision on it.
struct DecidedLeg {
    leg: SlotLeg,
    is_shadow: bool,
    answer: Result<Standing, AcquireErrorKind>,
}

impl Core {
    /// Asks this process for the slot of a request for a single slot. Returns whether it was granted at once.
    pub(super) fn ask_here(&mut self, id: RequestId) -> bool {
        let request = self.requests.get(id);
        let leg = request.and_then(|one| one.legs.first().cloned());
        let Some(SlotLeg { lease, wait, .. }) = leg else {
            return false;
        };
        let is_held = self.change(lease.queue, |queue, ctx| {
            queue.ask_here(ctx, lease.seq(), wait)
        });
        if is_held {
            // The request continues immediately.
            self.ctx.decided.pop_if(|decided| decided.request == id);
        }
        is_held
    }

    /// The next slots and charges of a request, and their part of the store.
    fn next_of(&self, id: RequestId) -> Option<(Next, Part)> {
        let request = self.requests.get(id)?;
        let next = request.next(&self.queues, &self.ctx);
        Some((next, request.part(&self.queues, &self.ctx)))
    }

    /// Advances a request as far as this process allows. Returns whether the request now has all that it wants.
    pub(super) fn decide_here(&mut self, id: RequestId) -> bool {
        let Some((next, part)) = self.next_of(id) else {
            return false;
        };
        let Some(legs) = self.claim_here(id, next, self.ctx.availability(part)) else {
            return false;
        };
        let has_all = self.settle_here(id, next, legs) && next == Next::All;
        if has_all {
            self.ctx.decided.retain(|decided| decided.request != id)
        } else {
            self.ctx.note_changed(id)
        }
        has_all
    }

    /// Lets the first request whose time to ask the store is up fall back.
    pub(super) fn end_asking(&mut self) -> bool {
        let (now, has_overdue) = (self.ctx.now, self.ctx.has_overdue);
        let timeout = self.ctx.settings.store_timeout;
        let ended = self.requests.end_asking(now, timeout, has_overdue);
        if let Some((id, since)) = ended {
            self.decide_alone(id, since);
        }
        ended.is_some()
    }

    /// A request has asked the store for as long as it may, mostly because others were ahead in this process: it falls
    /// back, alone. If no slot is free here, it keeps asking until its wait is over.
    fn decide_alone(&mut self, id: RequestId, since: Instant) {
        let Some((next, part)) = self.next_of(id) else {
            return;
        };
        if !self.ctx.asks_store(part) {
            self.leave_exchange_of(id);
            return self.ctx.note_changed(id);
        }
        let Some(legs) = self.claim_here(id, next, Availability::Down) else {
            return;
        };
        for one in &legs {
            self.queues.list(&mut self.ctx, one.leg.lease.queue);
        }
        let is_full = |one: &&DecidedLeg| one.answer == Ok(Standing::Full) && !one.is_shadow;
        if let Some(leg) = legs.iter().find(is_full).map(|one| &one.leg) {
            let lease = &leg.lease;
            let queue = &self.queues[lease.queue];
            let kind = if leg.wait.is_zero() {
                queue.full_kind(&self.ctx)
            } else {
                AcquireErrorKind::TimedOut
            };
            let entry = queue.entry(lease.seq());
            let until = entry.map(|entry| leg.ends(entry.turn_began_or(since)));
            return match until.filter(|until| *until > self.ctx.now) {
                Some(until) => self.requests.set_asking(id, since, until),
                None => self.refuse_leg(id, lease.seq(), kind),
            };
        }
        self.leave_exchange_of(id);
        self.settle_here(id, next, legs);
        self.ctx.note_changed(id);
    }

    /// Decides on the next slots and charges of a request, by the limits' fallbacks at this availability. `None`: a limit refuses
    /// the request.
    fn claim_here(
        &mut self,
        id: RequestId,
        next: Next,
        availability: Availability,
    ) -> Option<SmallVec<[DecidedLeg; 2]>> {
        self.local.clear();
        if let Some(error) = self.draft_charges(id, next, availability) {
            self.refuse_request(id, error);
            return None;
        }
        let (mut decided, mut refused) = (SmallVec::<[DecidedLeg; 2]>::new(), None);
        // First of all, so that no ledger is created in vain for a request that is refused.
        for leg in next.legs_in(self.requests.get(id)?) {
            let (seq, queue) = (leg.lease.seq(), &self.queues[leg.lease.queue]);
            let Some(entry) = queue.entry(seq).filter(|entry| entry.is_undecided()) else {
                continue;
            };
            let is_shadow = entry.is_shadow();
            let answer = match queue.decider(&self.ctx, availability) {
                Decider::Fallback(Err(kind)) if !is_shadow => {
                    refused = Some((seq, kind));
                    break;
                }
                Decider::Fallback(verdict) => verdict.map(|()| Standing::Held { until_ms: 0 }),
                Decider::Ledger => Ok(Standing::Absent),
            };
            let leg = leg.clone();
            decided.push(DecidedLeg {
                leg,
                is_shadow,
                answer,
            });
        }
        if let Some((seq, kind)) = refused {
            self.refuse_leg(id, seq, kind);
            return None;
        }
        let is_open = |one: &DecidedLeg| one.answer == Ok(Standing::Absent);
        for DecidedLeg { leg, .. } in decided.iter().filter(|one| is_open(one)) {
            let queue = self.queues.without_listing(leg.lease.queue);
            self.local.ask(leg, queue, &mut self.ctx);
        }
        (self.local).run(&mut self.ctx, &mut self.queues, &mut self.accounting);
        let open = decided.iter_mut().filter(|one| is_open(one));
        for (one, standing) in open.zip(&self.local.reply.standings) {
            one.answer = Ok(*standing);
        }
        Some(decided)
    }

    /// Returns the error of a fallback that refuses the request.
    fn draft_charges(
        &mut self,
        id: RequestId,
        next: Next,
        availability: Availability,
    ) -> Option<AcquireError> {
        let mut refusal = None;
        for (number, fee) in self.pending_fees(id, next) {
            let usual = (fee.max, fee.charge.rate);
            match rate_here(&self.ctx, &fee, usual, availability) {
                Ok(Some(rate)) => {
                    let cost = fee.charge.cost.min(rate.most_charged());
                    let mut charge = fee.charge_at(self.ctx.now);
                    (charge.rate, charge.cost) = (rate, cost);
                    self.local.claim.charges.push(charge);
                    self.local.rates.push((fee.limit_id(), fee.key));
                }
                Ok(None) => self.local.waived.push((number, None)),
                Err(kind) if is_enforced(&self.ctx, &fee) => {
                    let error = self.ctx.registry.limit(fee.limit_id()).acquire_error(kind);
                    refusal = Some(harsher(refusal, error));
                }
                Err(kind) => self.local.waived.push((number, Some(kind))),
            }
        }
        refusal
    }

    /// Applies the decisions of the rates and ledgers. Returns whether the request has the slots.
    fn settle_here(&mut self, id: RequestId, next: Next, legs: SmallVec<[DecidedLeg; 2]>) -> bool {
        let mut goes_on = self.settle_charges(id, next);
        let mut has_all = goes_on;
        for DecidedLeg { leg, answer, .. } in legs {
            let SlotLeg { lease, wait, .. } = leg;
            // The queue may be gone, if the request was refused.
            if self.queues.has(lease.queue) {
                self.change(lease.queue, |queue, ctx| {
                    if goes_on {
                        queue.on_answer_here(ctx, lease.seq(), wait, answer);
                    }
                });
            }
            has_all &= matches!(answer, Ok(Standing::Held { .. }));
            goes_on &= !matches!(answer, Ok(Standing::Waiting { .. }));
        }
        has_all
    }

    /// Applies the decisions of the rates. Returns whether the request may have its slots: it is neither refused nor
    /// asleep.
    fn settle_charges(&mut self, id: RequestId, next: Next) -> bool {
        for (number, bypassed) in mem::take(&mut self.local.waived) {
            match bypassed {
                None => self.pay(id, number, Paid::Free, 0),
                Some(kind) => self.bypass_fee(id, number, kind),
            }
        }
        let charged = mem::take(&mut self.local.reply.charged);
        if !charged.is_empty() {
            self.charged(id, next, &charged, self.ctx.local_us(), Paid::Here);
        }
        self.local.reply.charged = charged;
        let request = self.requests.get(id);
        request.is_some_and(|one| matches!(one.stage(), Stage::Open))
    }

    /// Withdraws a request from the store: it continues without the exchange it is in, whose results are released.
    fn leave_exchange_of(&mut self, id: RequestId) {
        self.requests.stop_asking(id);
        let Some((_, part)) = self.next_of(id) else {
            return;
        };
        self.links[part].unsent.forget(id);
        self.requests.open(id);
        let Some(request) = self.requests.get_mut(id) else {
            return;
        };
        request.ticket = None;
        for SlotLeg { lease, .. } in request.legs.clone() {
            self.change(lease.queue, |queue, ctx| {
                queue.leave_exchange(ctx, lease.seq())
            });
        }
    }
}

/// Requests that rates refuse, or hold back.
impl Core {
    /// A fee was charged; the rate lets the request continue after `rest_us`.
    fn pay(&mut self, id: RequestId, number: usize, paid: Paid, rest_us: u64) {
        let begins = self.ctx.now + Duration::from_micros(rest_us);
        let request = self.requests.get_mut(id);
        if let Some(notes) = request.and_then(|request| request.notes.as_mut()) {
            let fee = &mut notes.fees[number];
            (fee.paid, fee.begins) = (paid, begins);
            self.accounting.standings.note(fee, paid, self.ctx.now);
        }
    }

    /// The rate is not enforced: the request continues.
    fn bypass_fee(&mut self, id: RequestId, number: usize, kind: AcquireErrorKind) {
        let request = self.requests.get_mut(id);
        if let Some(notes) = request.and_then(|request| request.notes.as_mut()) {
            let fee = &mut notes.fees[number];
            (fee.paid, fee.begins) = (Paid::Free, self.ctx.now);
            let (limit, id) = (fee.limit.clone(), fee.limit_id());
            notes.bypassed.push((limit, kind));
            self.ctx.measure(id, Measure::RefusedInShadow(kind));
        }
    }

    /// The rates have charged, or refused to charge, the fees of a request, at this time by their clock.
    pub(super) fn charged(
        &mut self,
        id: RequestId,
        next: Next,
        charged: &[Charged],
        now_us: u64,
        paid: fn(Tat) -> Paid,
    ) {
        let mut refusal = None;
        let rest_us = |start_us: u64| start_us.saturating_sub(now_us);
        for ((number, fee), charged) in self.pending_fees(id, next).iter().zip(charged) {
            match *charged {
                Charged::Until { tat, start_us } => {
                    self.pay(id, *number, paid(tat), rest_us(start_us));
                }
                Charged::TooSoon { start_us } if is_enforced(&self.ctx, fee) => {
                    refusal = Some(harsher(refusal, too_soon(fee, rest_us(start_us))));
                }
                Charged::TooSoon { .. } => {
                    self.bypass_fee(id, *number, AcquireErrorKind::TooSoon);
                }
                Charged::Not => {}
            }
        }
        if let Some(error) = refusal {
            return self.refuse_request(id, error);
        }
        self.sleep(id);
        self.wake_bypassed(id);
    }

    /// Holds a request back until all its rates let it continue.
    fn sleep(&mut self, id: RequestId) {
        let now = self.ctx.now;
        let Some(request) = self.requests.get(id).filter(|one| !one.owes()) else {
            return;
        };
        let last = request.fees().iter().max_by_key(|fee| fee.begins);
        let ahead = last.filter(|fee| fee.begins > now);
        if let Some((begins, limit)) = ahead.map(|fee| (fee.begins, fee.limit_id())) {
            self.requests.sleep(id, begins, limit);
            self.ctx.measure(limit, Measure::Waiting(1.0));
        }
    }

    /// A rate that delays a request may have been disabled since the request was sent.
    fn wake_bypassed(&mut self, id: RequestId) {
        let request = self.requests.get(id);
        let asleep = request.filter(|one| matches!(one.stage(), Stage::Sleeping(_)));
        let fees = asleep.into_iter().flat_map(Request::fees);
        let bypassed = fees.filter(|fee| fee.begins > self.ctx.now && !is_enforced(&self.ctx, fee));
        let limits: Vec<_> = bypassed.map(Fee::limit_id).collect();
        for limit in limits {
            self.release_sleepers(limit);
        }
    }

    /// The store cannot charge the request.
    pub(super) fn refuse_unpaid(&mut self, id: RequestId) {
        let kind = AcquireErrorKind::Misconfigured;
        let Some(request) = self.requests.get(id) else {
            return;
        };
        let fees = self.pending_fees(id, request.next(&self.queues, &self.ctx));
        if let Some((_, fee)) = fees.iter().find(|(_, fee)| is_enforced(&self.ctx, fee)) {
            let error = self.ctx.registry.limit(fee.limit_id()).acquire_error(kind);
            return self.refuse_request(id, error);
        }
        for (number, _) in fees {
            self.bypass_fee(id, number, kind);
        }
    }

    /// The charges that a request asks for next, with their numbers.
    fn pending_fees(&self, id: RequestId, next: Next) -> SmallVec<[(usize, Fee); 2]> {
        let request = self.requests.get(id);
        let fees = request.into_iter().flat_map(|one| next.fees_in(one));
        fees.map(|(number, fee)| (number, fee.clone())).collect()
    }

    /// A rate no longer delays requests: sleeping requests continue and are refunded. Later spending counts.
    pub(super) fn release_sleepers(&mut self, limit: LimitId) {
        let now = self.ctx.now;
        let waits = |fee: &Fee| fee.limit_id() == limit && fee.begins > now;
        let mut released = Vec::new();
        // Newest first: a rate with a small burst can only undo its latest reserved start.
        for (id, _) in self.requests.sleepers().rev().collect::<Vec<_>>() {
            let fees = self.requests.get(id).map_or(&[][..], Request::fees);
            let Some(number) = fees.iter().position(waits) else {
                continue;
            };
            let charged = fees[number].clone();
            self.bypass_fee(id, number, AcquireErrorKind::TooSoon);
            self.end_sleep(id);
            self.accounting.refund(&charged, &self.ctx, &mut self.links);
            released.push(id);
        }
        for id in released.into_iter().rev() {
            self.sleep(id);
            self.ctx.note_changed(id);
        }
    }

    /// Refuses the requests delayed by rates of this process whose fallback has ended.
    pub(super) fn refuse_sleepers(&mut self) {
        let is_over = |fee: &&Fee| {
            let fallback = || self.ctx.fallback(fee.limit_id(), fee.part, None);
            matches!(fee.paid, Paid::Here(_))
                && self.ctx.availability(fee.part) != Availability::Up
                && fallback() == FallbackInForce::Reject
        };
        let sleepers = self.requests.sleepers().rev();
        let over = sleepers.filter_map(|(id, _)| {
            let fee = self.requests.get(id)?.fees().iter().find(is_over)?;
            Some((id, fee.limit_id()))
        });
        for (id, limit) in over.collect::<Vec<_>>() {
            let kind = AcquireErrorKind::Unavailable;
            let mut error = self.ctx.registry.limit(limit).acquire_error(kind);
            if let Some(request) = self.requests.get(id) {
                error.details.waited = request.waited(self.ctx.now);
            }
            self.refuse_request(id, error);
        }
    }

    /// Continues the first request whose sleep is over.
    pub(super) fn wake_sleeper(&mut self) -> bool {
        let overslept = self.requests.overslept(self.ctx.now);
        if let Some(id) = overslept {
            self.end_sleep(id);
            self.ctx.note_changed(id);
        }
        overslept.is_some()
    }
}

/// The refusal that lasts longer, with the quotas of both.
fn harsher(one: Option<AcquireError>, other: AcquireError) -> AcquireError {
    let Some(one) = one else {
        return other;
    };
    let (mut harsher, milder) = if other.retry_after() > one.retry_after() {
        (other, one)
    } else {
        (one, other)
    };
    harsher.details.quotas.extend(milder.details.quotas);
    harsher
}
