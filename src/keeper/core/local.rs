//! Decisions of this process: on all requests in memory, and by the fallback of each limit where the store does not
//! decide.
//!
//! A request for one slot asks the ledger of its queue. Any other request is a claim on ledgers and rates of this
//! process: all or nothing, by the same steps as a claim in the store.

use std::mem;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{Asking, Core, Legs, Rates, SlotLeg, Stage, queues::Queues, rates::harsher};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{context::Availability, demand::RequestId, queue::Decider},
    key::Key,
    leases::{Fee, Lease, Paid, QueueId},
    ledger::{
        Batch, Call, Charge, Charged, Claim, ClaimAsk, ClaimReply, ClaimedLedger, Rate, RateState,
        Seq, Standing, Stock, WAIT_FOREVER_US, Want,
    },
    limit::LimitId,
};

/// The claim being decided on. Cleared but never freed.
#[derive(Default)]
pub(super) struct LocalClaim {
    claim: Claim,
    reply: ClaimReply,
    /// By charge.
    rates: Vec<(LimitId, Key)>,
    /// For each ask: the part of the request, the queue, and the batch.
    parts: Vec<usize>,
    queues: Vec<QueueId>,
    batches: Vec<Batch>,
    swept: bool,
    /// Fees that no local rate charges: their numbers, and the refusals that do not count.
    waived: Vec<(usize, Option<AcquireErrorKind>)>,
}

/// The ledgers and rates of this process.
struct Here<'a> {
    queues: &'a mut Queues,
    rates: &'a mut Rates,
    now_us: u64,
    asked: &'a [QueueId],
    batches: &'a [Batch],
    /// In this process no waiter is dead, so sweeping a queue changes nothing.
    swept: &'a mut bool,
    charged: &'a [(LimitId, Key)],
}

impl Stock for Here<'_> {
    fn ledger(&mut self, batch: usize) -> ClaimedLedger<'_> {
        ClaimedLedger {
            ledger: self.queues.without_listing(self.asked[batch]).ledger_here(),
            batch: &self.batches[batch],
            swept: self.swept,
        }
    }

    fn rate(&mut self, index: usize, _: &Charge) -> Option<&mut RateState> {
        self.rates.states.get_mut(&self.charged[index])
    }

    fn set_rate(&mut self, index: usize, _: &Charge, state: RateState) {
        self.rates
            .set(self.charged[index].clone(), state, self.now_us);
    }
}

impl LocalClaim {
    fn clear(&mut self) {
        self.waived.clear();
        self.claim.charges.clear();
        self.claim.asks.clear();
        self.rates.clear();
        self.parts.clear();
        self.queues.clear();
    }

    fn charge(&mut self, fee: &Fee, charge: Charge) {
        self.claim.charges.push(charge);
        self.rates.push((fee.limit_id(), fee.key.clone()));
    }

    /// The batch of the next ask, for this queue.
    fn next_batch(&mut self, queue: QueueId, part: usize) -> &mut Batch {
        self.queues.push(queue);
        self.parts.push(part);
        if self.batches.len() < self.queues.len() {
            self.batches.push(Batch::default());
        }
        &mut self.batches[self.queues.len() - 1]
    }

    fn ask(&mut self, seq: Seq, want: Want) {
        let batch = self.claim.asks.len();
        self.claim.asks.push(ClaimAsk { batch, seq, want });
    }
}

/// A leg that a request does not have yet, and the decision on it.
struct Part {
    leg: SlotLeg,
    is_shadow: bool,
    answer: Result<Standing, AcquireErrorKind>,
}

impl Core {
    /// Asks this process for the slot of a request for a single slot. Returns whether it was granted at once.
    pub(super) fn begin_slot(&mut self, id: RequestId) -> bool {
        let leg = self.request(id).and_then(|one| one.legs.first().cloned());
        let Some(SlotLeg { lease, wait }) = leg else {
            return false;
        };
        let is_held = self
            .queues
            .change(&mut self.ctx, lease.queue, |queue, ctx| {
                queue.ask_here(ctx, lease.seq(), wait)
            });
        if is_held {
            // The request continues immediately.
            self.ctx.decided.pop_if(|decided| decided.request == id);
        }
        is_held
    }

    /// Advances a request as far as this process allows.
    pub(super) fn decide_here(&mut self, id: RequestId) {
        let Some(parts) = self.claim_here(id, self.ctx.availability) else {
            return;
        };
        let (mut goes_on, before) = (self.settle_here(id), self.ctx.decided.len());
        let mut has_all = goes_on;
        for part in parts {
            let SlotLeg { lease, wait } = part.leg;
            // It may be gone, if the request was refused.
            self.queues
                .change_if_there(&mut self.ctx, lease.queue, |queue, ctx| {
                    if goes_on {
                        queue.on_answer_here(ctx, lease.seq(), wait, part.answer);
                    }
                });
            has_all &= matches!(part.answer, Ok(Standing::Held { .. }));
            goes_on &= !matches!(part.answer, Ok(Standing::Waiting { .. }));
        }
        match has_all {
            // Nothing else was decided meanwhile.
            true => {
                self.ctx.decided.truncate(before);
                self.grant(id);
            }
            false => self.note_changed(id),
        }
    }

    /// A request has asked the store for as long as it may, mostly because others were ahead in this process: it falls
    /// back, alone. If no slot is free here, it keeps asking until its wait is over.
    pub(super) fn decide_alone(&mut self, id: RequestId, since: Instant) {
        let Some(parts) = self.claim_here(id, Availability::Down) else {
            return;
        };
        for part in &parts {
            self.queues
                .change(&mut self.ctx, part.leg.lease.queue, |_, _| ());
        }
        let is_full = |part: &&Part| part.answer == Ok(Standing::Full) && !part.is_shadow;
        if let Some(SlotLeg { lease, wait }) = parts.iter().find(is_full).map(|part| &part.leg) {
            let queue = &self.queues[lease.queue];
            return match queue.may_ask_until(&self.ctx, lease.seq(), *wait) {
                Some(until) => self.go_on_asking(id, Asking { since, until }),
                None if wait.is_zero() => self.refuse_by(id, lease, AcquireErrorKind::Full),
                None => self.refuse_by(id, lease, AcquireErrorKind::TimedOut),
            };
        }
        self.take_back(id);
        let goes_on = self.settle_here(id);
        for part in parts {
            let lease = part.leg.lease;
            self.queues
                .change_if_there(&mut self.ctx, lease.queue, |queue, ctx| {
                    if goes_on {
                        queue.on_answer_alone(ctx, lease.seq(), part.answer);
                    }
                });
        }
        self.note_changed(id);
    }

    fn refuse_by(&mut self, id: RequestId, lease: &Lease, kind: AcquireErrorKind) {
        let legs = self.request(id).map_or(&[][..], |one| &one.legs);
        if let Some(leg) = legs.iter().position(|leg| leg.lease.seq() == lease.seq()) {
            self.refuse_leg(id, leg, kind);
        }
    }

    /// Charges a cost to a rate in this process, whatever its debt.
    pub(super) fn spend_here(&mut self, fee: &Fee, rate: Rate, cost: u32) -> Paid {
        self.local.clear();
        let charge = Charge {
            rate,
            cost,
            wait_us: WAIT_FOREVER_US,
            shadow: false,
            key: fee.charge.key.clone(),
        };
        self.local.charge(fee, charge);
        self.run_local_claim();
        let Charged::Until { tat, .. } = self.local.reply.charged[0] else {
            return Paid::Free;
        };
        self.standings.note(fee, Paid::Here(tat), self.ctx.now);
        Paid::Here(tat)
    }

    /// Decides on everything that a request does not have yet, by the limits' fallbacks at this availability. `None`: a
    /// limit refuses the request.
    fn claim_here(
        &mut self,
        id: RequestId,
        availability: Availability,
    ) -> Option<SmallVec<[Part; 2]>> {
        self.local.clear();
        if let Some(error) = self.draft_charges(id, availability) {
            self.refuse_request(id, error);
            return None;
        }
        let legs = self
            .request(id)
            .map_or_else(Legs::new, |one| one.legs.clone());
        let mut refusals = legs.iter().filter_map(|leg| {
            let queue = &self.queues[leg.lease.queue];
            let asks = queue.asks_here(leg.lease.seq());
            match queue.decider(availability) {
                Decider::Fallback(Err(kind)) if asks == Some(false) => Some((&leg.lease, kind)),
                _ => None,
            }
        });
        // Checked first, so that no ledger is created in vain.
        if let Some((lease, kind)) = refusals.next() {
            self.refuse_by(id, lease, kind);
            return None;
        }
        let mut parts: SmallVec<[Part; 2]> = SmallVec::new();
        for leg in legs {
            let (seq, queue) = (leg.lease.seq(), leg.lease.queue);
            let of_leg = self.queues.without_listing(queue);
            let Some(is_shadow) = of_leg.asks_here(seq) else {
                continue;
            };
            let answer = match of_leg.decider(availability) {
                Decider::Fallback(verdict) => verdict.map(|()| Standing::Held { until_ms: 0 }),
                Decider::Ledger => {
                    let batch = self.local.next_batch(queue, parts.len());
                    let want = of_leg.draft_here(&mut self.ctx, seq, leg.wait, batch);
                    self.local.ask(seq, want);
                    Ok(Standing::Absent)
                }
            };
            parts.push(Part {
                leg,
                is_shadow,
                answer,
            });
        }
        self.run_local_claim();
        for (part, standing) in self.local.parts.iter().zip(&self.local.reply.standings) {
            parts[*part].answer = Ok(*standing);
        }
        Some(parts)
    }

    /// Returns the error of a fallback that refuses the request.
    fn draft_charges(&mut self, id: RequestId, availability: Availability) -> Option<AcquireError> {
        let mut refusal = None;
        let fees = self.request(id).map(|one| one.fees().to_vec());
        let fees = fees.into_iter().flatten().enumerate();
        for (number, fee) in fees.filter(|(_, fee)| fee.paid == Paid::Not) {
            match self.rate_here(fee.limit_id(), fee.charge.rate, availability) {
                Ok(Some(rate)) => {
                    let (cost, charge) = (fee.charge.cost.min(rate.burst), fee.charge.clone());
                    self.local.charge(
                        &fee,
                        Charge {
                            rate,
                            cost,
                            ..charge
                        },
                    );
                }
                Ok(None) => self.local.waived.push((number, None)),
                Err(kind) if self.is_enforced(&fee) => {
                    let error = self.refusal(fee.limit_id(), kind);
                    refusal = Some(harsher(refusal, error));
                }
                Err(kind) => self.local.waived.push((number, Some(kind))),
            }
        }
        refusal
    }

    /// Runs the claim. The queues have to be listed again afterwards.
    fn run_local_claim(&mut self) {
        let Self {
            ctx,
            queues,
            rates,
            local,
            ..
        } = self;
        let now_us = ctx.local_us();
        let mut call = Call::new(&ctx.scratch, 0);
        let mut here = Here {
            queues,
            rates,
            now_us,
            asked: &local.queues,
            batches: &local.batches,
            swept: &mut local.swept,
            charged: &local.rates,
        };
        local
            .claim
            .run(&mut call, now_us, &mut here, &mut local.reply);
        for (queue, batch) in local.queues.iter().zip(&local.batches) {
            let queue = queues.without_listing(*queue);
            queue.after_claim(ctx, &mut call, batch);
        }
    }

    /// Applies the decisions of the rates. Returns whether the request may have its slots: it is neither refused nor
    /// asleep.
    fn settle_here(&mut self, id: RequestId) -> bool {
        for (number, bypassed) in mem::take(&mut self.local.waived) {
            match bypassed {
                None => self.pay(id, number, Paid::Free, 0),
                Some(kind) => self.bypass_fee(id, number, kind),
            }
        }
        let charged = mem::take(&mut self.local.reply.charged);
        if !charged.is_empty() {
            self.charged(id, &charged, self.ctx.local_us(), Paid::Here);
        }
        self.local.reply.charged = charged;
        self.request(id)
            .is_some_and(|one| matches!(one.stage, Stage::Open))
    }
}
