//! Claims that the store has not answered in time. Each falls back by itself; a request for a single slot does so in its queue
//! (`Queue::end_asking`).

use std::sync::Arc;

use tokio::time::Instant;

use super::{ClaimStage, ClaimState, Core};
use crate::{
    error::AcquireErrorKind,
    keeper::{
        context::Availability,
        demand::ClaimId,
        queue::{Alone, LegState},
    },
    leases::Lease,
};

impl Core {
    /// A claim has asked for as long as it may, mostly since others were before it in this process: it alone falls back. If the
    /// fallback of a limit has no slot for it, it goes on asking for as long as it may wait there.
    pub(super) fn end_asking_claim(&mut self, id: ClaimId) {
        let Some(claim) = self.claims.get(&id) else {
            return;
        };
        if !matches!(claim.stage, ClaimStage::Unsent | ClaimStage::Sent(_)) {
            // One of its slots was lost, and may come back.
            return self.stop_asking(id);
        }
        if !self.store_is_up() {
            return self.leave_exchange(id);
        }
        match self.legs_alone(id) {
            LegsAlone::Wait(until) => {
                if let Some(asking) = self
                    .claims
                    .get_mut(&id)
                    .and_then(|claim| claim.asking.as_mut())
                {
                    asking.until = until;
                    self.asking_claims.insert((until, id));
                }
            }
            LegsAlone::Refused(leg, kind) => {
                let error = self.leg_error(id, leg, kind);
                self.refuse_claim(id, error);
            }
            LegsAlone::Decided { admitted, bypassed } => {
                self.take_back(id);
                if self.owes(id) {
                    self.pay_as(id, Availability::Down);
                }
                // It may be refused now, or sleep.
                let is_open = |claim: &ClaimState| matches!(claim.stage, ClaimStage::Open);
                if !self.claims.get(&id).is_some_and(is_open) {
                    return;
                }
                for lease in admitted {
                    self.queues
                        .change(&mut self.ctx, lease.queue, |queue, ctx| {
                            queue.admit_alone(ctx, lease.seq())
                        });
                }
                for lease in bypassed {
                    let legs = &self.claims[&id].legs;
                    if let Some(leg) = legs.iter().position(|leg| Arc::ptr_eq(leg, &lease)) {
                        self.bypass_leg(id, leg, AcquireErrorKind::Full);
                    }
                }
                self.advance(id);
            }
        }
    }

    /// What the fallbacks say of the legs that a claim does not have yet.
    fn legs_alone(&mut self, id: ClaimId) -> LegsAlone {
        let legs = self.claims[&id].legs.clone();
        let (mut admitted, mut bypassed) = (Vec::new(), Vec::new());
        for (number, lease) in legs.into_iter().enumerate() {
            let queue = &self.queues[lease.queue];
            let (seq, is_shadow) = (lease.seq(), queue.is_shadow(lease.seq()));
            let state = queue.leg_state(seq, self.ctx.now);
            let Some(LegState::Parked | LegState::Undecided) = state else {
                continue;
            };
            let verdict = self
                .queues
                .change(&mut self.ctx, lease.queue, |queue, ctx| {
                    queue.verdict_alone(ctx, seq)
                });
            match verdict {
                Some(Alone::Admitted) => admitted.push(lease),
                Some(_) if is_shadow => bypassed.push(lease),
                Some(Alone::Waits(until)) => return LegsAlone::Wait(until),
                Some(Alone::Refused(kind)) => return LegsAlone::Refused(number, kind),
                None => {}
            }
        }
        LegsAlone::Decided { admitted, bypassed }
    }

    /// The store is down, and the exchange of a claim is still in flight: the claim goes on without it.
    fn leave_exchange(&mut self, id: ClaimId) {
        self.take_back(id);
        self.advance(id);
    }

    /// A claim is sent no more, and goes on without the exchange that it is in. What that brings is given back.
    fn take_back(&mut self, id: ClaimId) {
        self.stop_asking(id);
        self.unsent_claims.remove(&id);
        self.held_back.remove(&id);
        let Some(claim) = self.claims.get_mut(&id) else {
            return;
        };
        (claim.stage, claim.ticket) = (ClaimStage::Open, None);
        for lease in claim.legs.clone() {
            self.queues
                .change(&mut self.ctx, lease.queue, |queue, ctx| {
                    queue.leave_exchange(ctx, lease.seq())
                });
        }
    }
}

/// The outcome for a claim of which the store knows nothing yet.
enum LegsAlone {
    Decided {
        admitted: Vec<Arc<Lease>>,
        bypassed: Vec<Arc<Lease>>,
    },
    /// One of its limits has no slot here, and the claim may wait for it until then.
    Wait(Instant),
    Refused(usize, AcquireErrorKind),
}
