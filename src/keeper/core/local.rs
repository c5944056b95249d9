//! Requests on which this process decides: all of them in memory; with a store those that it does not decide on, by the
//! fallback of each limit.
//!
//! A request for one slot asks the ledger of its queue. What else a request may be is a claim on ledgers and rates of this
//! process: all or nothing, by the same steps as a claim in the store.

use std::mem;

use smallvec::SmallVec;

use super::{Core, Legs, Rates, SlotLeg, Stage, queues::Queues, rates::harsher};
use crate::{
    error::AcquireErrorKind,
    keeper::{
        context::Availability,
        demand::RequestId,
        queue::{Decider, Outcome},
    },
    key::Key,
    leases::{Fee, Paid, QueueId},
    ledger::{
        Batch, Call, Charge, Charged, Claim, ClaimAsk, ClaimReply, ClaimedLedger, RateState, Seq,
        Stock,
    },
    limit::LimitId,
};

/// The claim that is decided on. It is cleared and not freed.
#[derive(Default)]
pub(super) struct LocalClaim {
    claim: Claim,
    reply: ClaimReply,
    /// By charge.
    rates: Vec<(LimitId, Key)>,
    /// By ask: the queue, and the batch.
    queues: Vec<QueueId>,
    batches: Vec<Batch>,
    swept: bool,
}

/// The ledgers and the rates of this process.
struct Here<'a> {
    queues: &'a mut Queues,
    rates: &'a mut Rates,
    now_us: u64,
    asked: &'a [QueueId],
    batches: &'a [Batch],
    /// No waiter of this process is dead, so sweeping a queue changes nothing.
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
        self.claim.charges.clear();
        self.claim.asks.clear();
        self.rates.clear();
        self.queues.clear();
    }

    fn charge(&mut self, fee: &Fee, charge: Charge) {
        self.claim.charges.push(charge);
        self.rates.push((fee.limit_id(), fee.key.clone()));
    }
}

/// What comes of a leg that a request does not have yet.
struct Part {
    leg: SlotLeg,
    /// The index of an ask, or what the fallback says.
    decided: Decided,
}

enum Decided {
    ByLedger(usize),
    ByFallback(Result<(), AcquireErrorKind>),
}

impl Core {
    /// Asks this process for the slot of a request that wants no more. Returns whether it has it now.
    pub(super) fn begin_slot(&mut self, id: RequestId) -> bool {
        let leg = self.request(id).and_then(|one| one.legs.first().cloned());
        let Some(SlotLeg { lease, wait }) = leg else {
            return false;
        };
        let outcome = self
            .queues
            .change(&mut self.ctx, lease.queue, |queue, ctx| {
                queue.ask_here(ctx, lease.seq(), wait)
            });
        self.forget_decisions_on(id);
        self.follow_outcome(id, lease.seq(), outcome)
    }

    /// Takes a request as far as this process lets it go.
    pub(super) fn decide_here(&mut self, id: RequestId) {
        if !self.draft_charges(id, self.ctx.availability) {
            return;
        }
        let Some(parts) = self.draft_asks(id) else {
            return;
        };
        self.run_local_claim();
        self.settle_here(id);
        // It may be refused now, or sleep.
        let is_open = { self.request(id) }.is_some_and(|one| matches!(one.stage, Stage::Open));
        let waits = self.local.reply.ticket().is_some();
        for Part { leg, decided } in parts.into_iter().filter(|_| is_open) {
            let seq = leg.lease.seq();
            let standing = match decided {
                Decided::ByLedger(ask) => Ok(self.local.reply.standings[ask]),
                Decided::ByFallback(verdict) => Err(verdict),
            };
            let outcome =
                self.queues.change(
                    &mut self.ctx,
                    leg.lease.queue,
                    |queue, ctx| match standing {
                        Ok(standing) => queue.on_answer_here(ctx, seq, leg.wait, standing),
                        Err(verdict) => queue.follow_verdict(ctx, seq, verdict),
                    },
                );
            let ends = match outcome {
                // The claim did not get any further; or it was refused by another leg.
                Outcome::Waits => waits,
                Outcome::Refused(_) => true,
                _ => false,
            };
            self.follow_outcome(id, seq, outcome);
            if ends {
                break;
            }
        }
        self.forget_decisions_on(id);
    }

    /// Charges a request in this process, as the limits' fallbacks say at this availability: all that it owes, or nothing.
    pub(super) fn charge_here(&mut self, id: RequestId, availability: Availability) {
        if self.draft_charges(id, availability) {
            self.run_local_claim();
            self.settle_here(id);
        }
    }

    /// Charges a sum to a rate in this process, however much it owes already.
    pub(super) fn spend_here(&mut self, fee: &Fee, charge: Charge) -> Charged {
        self.local.clear();
        self.local.charge(fee, charge);
        self.run_local_claim();
        self.local.reply.charged[0]
    }

    /// Returns whether the request may go on: no fallback refuses it.
    fn draft_charges(&mut self, id: RequestId, availability: Availability) -> bool {
        self.local.clear();
        let mut refusal = None;
        let fees = self.request(id).map(|one| one.fees().to_vec());
        let fees = fees.into_iter().flatten().enumerate();
        for (number, fee) in fees.filter(|(_, fee)| fee.paid == Paid::Not) {
            match self.rate_here(fee.limit_id(), fee.charge.rate, availability) {
                Ok(None) => self.pay(id, number, Paid::Free, 0),
                Ok(Some(rate)) => {
                    let cost = fee.charge.cost.min(rate.burst);
                    let charge = fee.charge.clone();
                    self.local.charge(
                        &fee,
                        Charge {
                            rate,
                            cost,
                            ..charge
                        },
                    );
                }
                Err(kind) if self.is_enforced(&fee) => {
                    let error = self.refusal(fee.limit_id(), kind);
                    refusal = Some(harsher(refusal, error));
                }
                Err(kind) => self.bypass_fee(id, number, kind),
            }
        }
        let may_go_on = refusal.is_none();
        if let Some(error) = refusal {
            self.refuse_request(id, error);
        }
        may_go_on
    }

    /// The legs that the request does not have yet, unless a fallback refuses it.
    fn draft_asks(&mut self, id: RequestId) -> Option<SmallVec<[Part; 2]>> {
        let legs = self
            .request(id)
            .map_or_else(Legs::new, |one| one.legs.clone());
        let mut parts = SmallVec::new();
        for (number, leg) in legs.into_iter().enumerate() {
            let (seq, queue_id) = (leg.lease.seq(), leg.lease.queue);
            let queue = self.queues.without_listing(queue_id);
            let Some(is_shadow) = queue.asks_here(seq) else {
                continue;
            };
            let decided = match queue.decider(self.ctx.availability) {
                Decider::Fallback(Err(kind)) if !is_shadow => {
                    self.refuse_leg(id, number, kind);
                    return None;
                }
                Decider::Fallback(verdict) => Decided::ByFallback(verdict),
                Decider::Ledger => {
                    let batch = self.local.queues.len();
                    if self.local.batches.len() == batch {
                        self.local.batches.push(Batch::default());
                    }
                    let of_leg = &mut self.local.batches[batch];
                    let want = queue.draft_here(&mut self.ctx, seq, leg.wait, of_leg);
                    self.local.queues.push(queue_id);
                    self.local.claim.asks.push(ClaimAsk { batch, seq, want });
                    Decided::ByLedger(batch)
                }
            };
            parts.push(Part { leg, decided });
        }
        Some(parts)
    }

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
            queues.change(ctx, *queue, |queue, _| queue.after_claim(&mut call, batch));
        }
    }

    /// What the rates of the claim say.
    fn settle_here(&mut self, id: RequestId) {
        let charged = mem::take(&mut self.local.reply.charged);
        if !charged.is_empty() {
            self.charged(id, &charged, self.ctx.local_us(), Paid::Here);
        }
        self.local.reply.charged = charged;
    }

    /// Returns whether it has this slot now.
    fn follow_outcome(&mut self, id: RequestId, seq: Seq, outcome: Outcome) -> bool {
        let legs = self.request(id).map_or(&[][..], |one| &one.legs);
        let leg = legs.iter().position(|leg| leg.lease.seq() == seq);
        match (outcome, leg) {
            (Outcome::Held, _) => return true,
            (Outcome::Refused(kind), Some(leg)) => self.refuse_leg(id, leg, kind),
            (Outcome::Bypassed(kind), Some(leg)) => self.bypass_leg(id, leg, kind),
            _ => {}
        }
        false
    }

    /// The request goes on from here.
    fn forget_decisions_on(&mut self, id: RequestId) {
        self.ctx.decided.retain(|decided| decided.request != id);
    }
}
