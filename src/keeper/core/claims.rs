//! Claims: requests for slots under several limits and charges at rates, all or nothing.
//!
//! Its legs are entries of their queues and go the same way as a request for a single slot. They are acquired in one
//! order on all replicas, narrow limits first, so that claims never deadlock. A leg whose turn has not come is *parked*. A
//! claim that has to wait for one leg keeps those before it: giving them back to queue for them again could go on for ever.
//!
//! Rates come first, and are charged once. The charge is refunded if the claim is refused after all.

use std::{cmp::Ordering, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Asking, ClaimStage, ClaimState, Core, ExchangeId, rates::harsher};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{
        context::Availability,
        demand::{ClaimId, Leg, Notes, Taken},
        queue::LegState,
    },
    leases::{Fee, Label, Lease, Leases, Paid},
    limit::{LimitId, MAX_WEIGHT, Mode},
    status::{InLine, Quota},
    telemetry::Measure,
};

/// How far a claim has come.
enum Progress {
    Complete,
    /// It is this leg's turn.
    Turn(usize),
    /// The store, or a queue, decides next.
    Waits,
    Refused(usize, AcquireErrorKind),
    Bypassed(usize, AcquireErrorKind),
    /// A leg before this one was lost, or this one itself.
    Stray(usize),
}

impl Core {
    /// Asks for all of it. The claim is there until [`collect_claim`](Self::collect_claim) or
    /// [`drop_claim`](Self::drop_claim).
    pub(super) fn submit_claim(&mut self, legs: &[Leg], label: &Label) -> ClaimId {
        let id = ClaimId(self.ctx.next_name(1));
        let (mut ordered, mut fees, mut refusal) = (Vec::new(), Vec::new(), None);
        let mut exempt = Vec::new();
        for leg in legs {
            let limit = self.ctx.limits[leg.limit.0].clone();
            let shadow = match limit.current_mode() {
                Mode::Off => {
                    exempt.extend(limit.period().map(|_| limit.clone()));
                    continue;
                }
                mode => mode == Mode::Shadow,
            };
            if let Some(fee) = self.fee(id, leg, shadow) {
                refusal = refusal.or(fee.too_dear(leg.cost));
                fees.push(fee);
                continue;
            }
            let class = limit.class_of(&leg.key);
            let queue = self.queues.find_or_make(&mut self.ctx, leg.limit, &leg.key);
            let lease = self.queues.change(&mut self.ctx, queue, |queue, ctx| {
                queue.set_own_value(ctx, leg.value);
                let wait = match queue.max() {
                    // It would wait for nothing.
                    0 => Duration::ZERO,
                    _ if shadow => Duration::ZERO,
                    _ => leg.wait,
                };
                // A limit that is not enforced refuses no weight.
                let weight = leg.weight.clamp(1, MAX_WEIGHT);
                queue.submit_leg(ctx, wait, weight, (id, shadow))
            });
            lease.set_label(label.clone());
            ordered.push((class, lease));
        }
        ordered.sort_by(|(class, lease), (other, other_lease)| {
            class
                .cmp(other)
                .then_with(|| self.by_ledger_order(lease, other_lease))
        });
        let claim = ClaimState {
            legs: ordered.into_iter().map(|(_, lease)| lease).collect(),
            fees,
            exempt,
            stage: ClaimStage::Open,
            asked: self.ctx.now,
            asking: None,
            ticket: None,
            bypassed: Vec::new(),
            waker: None,
        };
        self.claims.insert(id, claim);
        if let Some(error) = refusal {
            self.refuse_claim(id, error);
        }
        self.advance(id);
        id
    }

    /// The same on all replicas: by the names of ledgers. In memory there are no names and no other replicas.
    fn by_ledger_order(&self, one: &Lease, other: &Lease) -> Ordering {
        let (one, other) = (&self.queues[one.queue], &self.queues[other.queue]);
        (one.ledger_name().cmp(other.ledger_name()))
            .then_with(|| one.limit_id().cmp(&other.limit_id()))
            .then_with(|| one.key().cmp(other.key()))
    }

    /// Takes all claims further of which a leg was decided on. To be called at the end of each step: what one claim does
    /// may move others.
    #[inline]
    pub(super) fn advance_claims(&mut self) {
        // Mostly there are none.
        while !self.ctx.claims_to_advance.is_empty()
            && let Some(id) = self.ctx.claims_to_advance.pop_first()
        {
            self.advance(id);
        }
    }

    /// Takes a claim as far as it gets without an answer of the store.
    pub(super) fn advance(&mut self, id: ClaimId) {
        while let Some(claim) = self.claims.get_mut(&id)
            && let ClaimStage::Open = claim.stage
        {
            match self.progress(id) {
                Progress::Waits => return,
                Progress::Refused(leg, kind) => {
                    let error = self.leg_error(id, leg, kind);
                    return self.refuse_claim(id, error);
                }
                Progress::Bypassed(leg, kind) => self.bypass_leg(id, leg, kind),
                Progress::Stray(leg) => self.park_leg(id, leg),
                Progress::Complete if !self.owes(id) => return self.grant_claim(id),
                Progress::Complete | Progress::Turn(_) if self.asks_store() => {
                    return self.mark_unsent(id);
                }
                _ if self.owes(id) => self.pay_here(id),
                Progress::Complete => {}
                Progress::Turn(leg) => self.begin_leg(id, leg),
            }
        }
    }

    /// Claims that were to be sent go on from where their legs are.
    pub(super) fn reopen_all(&mut self, claims: impl IntoIterator<Item = ClaimId>) {
        for id in claims {
            if !self.store_is_up() {
                self.stop_asking(id);
            }
            if let Some(claim) = self.claims.get_mut(&id)
                && let ClaimStage::Unsent | ClaimStage::Sent(_) = claim.stage
            {
                claim.stage = ClaimStage::Open;
                self.advance(id);
            }
        }
    }

    /// After an exchange was answered or failed: its claims go on from where their legs are, but for those that have gone on
    /// without it.
    pub(super) fn reopen_sent(
        &mut self,
        exchange: ExchangeId,
        claims: impl IntoIterator<Item = ClaimId>,
    ) {
        for id in claims {
            if self.is_sent_in(id, exchange) {
                self.reopen_all([id]);
            }
        }
    }

    /// Whether an exchange is about this claim.
    pub(super) fn is_sent_in(&self, id: ClaimId, exchange: ExchangeId) -> bool {
        let claim = self.claims.get(&id);
        claim.is_some_and(|claim| matches!(claim.stage, ClaimStage::Sent(sent) if sent == exchange))
    }

    fn progress(&self, id: ClaimId) -> Progress {
        let mut turn = None;
        for (number, lease) in self.claims[&id].legs.iter().enumerate() {
            let queue = &self.queues[lease.queue];
            let Some(state) = queue.leg_state(lease.seq(), self.ctx.now) else {
                continue;
            };
            match state {
                LegState::Held { over, busy } if turn.is_some() || over => {
                    // The exchange that may bring it back into the store has to be answered first.
                    return match busy {
                        true => Progress::Waits,
                        false => Progress::Stray(number),
                    };
                }
                LegState::Held { .. } => {}
                LegState::Parked => turn = turn.or(Some(number)),
                LegState::Refused(kind) => return Progress::Refused(number, kind),
                LegState::Bypassed(kind) => return Progress::Bypassed(number, kind),
                LegState::Undecided => return Progress::Waits,
            }
        }
        turn.map_or(Progress::Complete, Progress::Turn)
    }

    fn mark_unsent(&mut self, id: ClaimId) {
        if let Some(claim) = self.claims.get_mut(&id) {
            claim.stage = ClaimStage::Unsent;
            self.unsent_claims.insert(id);
            if claim.asking.is_none() {
                let since = self.ctx.now;
                let until = since + self.ctx.settings.store_timeout;
                claim.asking = Some(Asking { since, until });
                self.asking_claims.insert((until, id));
            }
        }
    }

    /// The store is not asked for it any more, or has answered.
    pub(super) fn stop_asking(&mut self, id: ClaimId) {
        let claim = self.claims.get_mut(&id);
        if let Some(asking) = claim.and_then(|claim| claim.asking.take()) {
            self.asking_claims.remove(&(asking.until, id));
        }
    }

    /// Without the store legs are acquired one after the other: no other step comes between.
    fn begin_leg(&mut self, id: ClaimId, leg: usize) {
        let lease = self.claims[&id].legs[leg].clone();
        self.queues
            .change(&mut self.ctx, lease.queue, |queue, ctx| {
                queue.begin_leg(ctx, lease.seq())
            });
    }

    fn park_leg(&mut self, id: ClaimId, leg: usize) {
        let lease = self.claims[&id].legs[leg].clone();
        self.queues
            .change(&mut self.ctx, lease.queue, |queue, ctx| {
                queue.park_leg(ctx, lease.seq())
            });
    }

    pub(super) fn bypass_leg(&mut self, id: ClaimId, leg: usize, kind: AcquireErrorKind) {
        let Some(claim) = self.claims.get_mut(&id) else {
            return;
        };
        let lease = claim.legs.remove(leg);
        let bypassed = &mut claim.bypassed;
        self.queues
            .change(&mut self.ctx, lease.queue, |queue, ctx| {
                bypassed.push((queue.limit().clone(), kind));
                ctx.note_bypass(queue.limit_id(), kind);
                queue.give_up(ctx, lease.seq());
            });
    }

    fn grant_claim(&mut self, id: ClaimId) {
        self.stop_asking(id);
        if let Some(claim) = self.claims.get_mut(&id) {
            claim.stage = ClaimStage::Granted;
            self.ctx.effects.wake(claim.waker.take());
        }
    }

    /// Gives back what it has, and refunds what it was charged.
    pub(super) fn refuse_claim(&mut self, id: ClaimId, mut error: AcquireError) {
        if let Some(mut claim) = self.claims.remove(&id) {
            let refused = error.details.limit_name.clone();
            let slots = self.slots_of(&claim);
            let rates = claim.fees.iter().filter_map(|fee| self.quota_without(fee));
            let others = slots.chain(rates);
            let others = others.filter(|quota| quota.limit_name != refused);
            error.details.quotas.extend(others.collect::<Vec<_>>());
            self.keep_refusal(&claim, &error);
            self.let_go(id, &mut claim);
            self.ctx.effects.wake(claim.waker.take());
            claim.stage = ClaimStage::Refused(error);
            self.claims.insert(id, claim);
        }
    }

    /// Keeps the refusal of a claim that still has its legs and fees.
    fn keep_refusal(&mut self, claim: &ClaimState, error: &AcquireError) {
        let Some(limit) = self.limit_id(error.limit_name()) else {
            return;
        };
        let queues = &self.queues;
        let about = || {
            let queues = claim.legs.iter().map(|lease| &queues[lease.queue]);
            let mut keys = queues.filter(|queue| queue.limit_id() == limit);
            let mut fees = claim.fees.iter().filter(|fee| fee.limit_id() == limit);
            let key = keys.next().map(|queue| queue.key());
            let key = key.or_else(|| fees.next().map(|fee| &fee.key));
            (key, claim.legs.first().map(|lease| &**lease))
        };
        self.refusals.keep(limit, error, self.ctx.now, about);
    }

    fn let_go(&mut self, id: ClaimId, claim: &mut ClaimState) {
        if let ClaimStage::Sleeping(until) = claim.stage {
            self.end_sleep(until, id);
        }
        if let Some(asking) = claim.asking.take() {
            self.asking_claims.remove(&(asking.until, id));
        }
        for lease in claim.legs.drain(..) {
            self.queues
                .change(&mut self.ctx, lease.queue, |queue, ctx| {
                    queue.give_up(ctx, lease.seq())
                });
        }
        for fee in claim.fees.drain(..) {
            self.refund(&fee);
        }
    }

    /// The answer, once there is one. A refused claim is gone then; of a granted one the permit has its slots.
    pub(super) fn collect_claim(&mut self, id: ClaimId) -> Option<Result<Taken, AcquireError>> {
        let claim = self.claims.get_mut(&id)?;
        if let ClaimStage::Granted = claim.stage {
            // If its request did not collect it in time, a leg may be lost.
            claim.stage = ClaimStage::Open;
            self.advance(id);
        }
        let claim = self.claims.get_mut(&id)?;
        if !matches!(claim.stage, ClaimStage::Granted | ClaimStage::Refused(_)) {
            return None;
        }
        let claim = self.claims.remove(&id)?;
        self.ctx.effects.drop_waker(claim.waker);
        if let ClaimStage::Refused(error) = claim.stage {
            return Some(Err(error));
        }
        let waited = self.ctx.now.saturating_duration_since(claim.asked);
        for fee in &claim.fees {
            self.note_charge(fee, waited);
        }
        let mut place = 0;
        for (index, lease) in claim.legs.iter().enumerate() {
            let queue = self.queues.without_listing(lease.queue);
            self.ctx.note_admission(queue.limit_id(), waited);
            place = place.max(queue.take_as_leg(&mut self.ctx, lease));
            if index > 0 {
                queue.set_companion(&mut self.ctx, lease.seq());
            }
        }
        let has_notes =
            !claim.bypassed.is_empty() || !claim.fees.is_empty() || !claim.exempt.is_empty();
        let notes = Notes {
            bypassed: claim.bypassed,
            fees: claim.fees,
            exempt: claim.exempt,
            quotas: Vec::new(),
        };
        Some(Ok(Taken {
            leases: Leases::many(claim.legs),
            waited,
            place,
            notes: has_notes.then(|| Box::new(notes)),
        }))
    }

    /// Drops a claim that is no longer wanted.
    pub(super) fn drop_claim(&mut self, id: ClaimId) {
        if let Some(mut claim) = self.claims.remove(&id) {
            self.let_go(id, &mut claim);
            self.ctx.effects.drop_waker(claim.waker);
        }
    }

    /// Refuses all that are not collected yet. Returns how many.
    pub(super) fn refuse_claims(&mut self, kind: AcquireErrorKind) -> usize {
        let undecided = |claim: &ClaimState| !matches!(claim.stage, ClaimStage::Refused(_));
        let claims = self.claims.iter().filter(|(_, claim)| undecided(claim));
        let ids: Vec<ClaimId> = claims.map(|(id, _)| *id).collect();
        // From the end, so that the times that rates have reserved for them can be taken back.
        for id in ids.iter().rev() {
            let error = self.claim_error(*id, kind);
            self.refuse_claim(*id, error);
        }
        ids.len()
    }

    /// Refuses those that have a part under this limit, which an operator has paused, and are not collected yet.
    pub(super) fn pause_claims(&mut self, limit: LimitId, until: Instant) {
        let of_limit = |lease: &Arc<Lease>| self.queues[lease.queue].limit_id() == limit;
        let concerned = |claim: &ClaimState| {
            let is_open = !matches!(claim.stage, ClaimStage::Refused(_));
            let is_owed = |fee: &Fee| fee.limit_id() == limit;
            is_open && (claim.legs.iter().any(of_limit) || claim.fees.iter().any(is_owed))
        };
        let claims = self.claims.iter().filter(|(_, claim)| concerned(claim));
        let ids: Vec<ClaimId> = claims.map(|(id, _)| *id).collect();
        for id in ids.iter().rev() {
            let asked = self.claims[id].asked;
            let waited = self.ctx.now.saturating_duration_since(asked);
            let mut error = self.paused_error(limit, until);
            error.details.waited = waited;
            self.refuse_claim(*id, error);
        }
    }

    /// The place of the leg that waits, when it joined its queue.
    pub(super) fn in_line_of_claim(&self, id: ClaimId) -> Option<InLine> {
        let claim = self.claims.get(&id)?;
        claim.legs.iter().find_map(|lease| self.in_line_of(lease))
    }

    /// How its limits stand, as far as that is known.
    pub(super) fn quotas_of(&self, claim: &ClaimState) -> Vec<Quota> {
        let slots = self.slots_of(claim);
        let rates = claim.fees.iter().filter_map(|fee| self.quota_of(fee));
        slots.chain(rates).collect()
    }

    fn slots_of(&self, claim: &ClaimState) -> impl Iterator<Item = Quota> {
        let legs = claim.legs.iter();
        legs.filter_map(|lease| self.queues[lease.queue].quota(&self.ctx))
    }

    /// A refusal that no limit is to blame for. It names the one that the claim waits for, or else its first.
    fn claim_error(&self, id: ClaimId, kind: AcquireErrorKind) -> AcquireError {
        let claim = &self.claims[&id];
        let mut legs = claim.legs.iter();
        if let Some(leg) = legs.position(|lease| self.in_line_of(lease).is_some()) {
            return self.leg_error(id, leg, kind);
        }
        let first = claim.legs.first();
        let first = first.map(|lease| self.queues[lease.queue].limit_id());
        let limit = first
            .or(claim.fees.first().map(Fee::limit_id))
            .unwrap_or(LimitId(0));
        let waited = self.ctx.now.saturating_duration_since(claim.asked);
        let mut error = self.refusal(limit, kind);
        error.details.waited = waited;
        error
    }

    /// A refusal by the limit of one leg.
    pub(super) fn leg_error(
        &self,
        id: ClaimId,
        leg: usize,
        kind: AcquireErrorKind,
    ) -> AcquireError {
        let claim = &self.claims[&id];
        let waited = self.ctx.now.saturating_duration_since(claim.asked);
        let lease = &claim.legs[leg];
        let queue = &self.queues[lease.queue];
        queue.error(&self.ctx, lease.seq(), kind, waited)
    }
}

/// Charges at rates.
impl Core {
    /// Charges a claim in this process, as the limits' fallbacks say; all that it owes, or nothing.
    fn pay_here(&mut self, id: ClaimId) {
        self.pay_as(id, self.ctx.availability);
    }

    pub(super) fn pay_as(&mut self, id: ClaimId, availability: Availability) {
        let (mut paid, mut bypassed, mut refusal) = (Vec::new(), Vec::new(), None);
        let fees = self.claims[&id].fees.clone().into_iter().enumerate();
        for (number, fee) in fees.filter(|(_, fee)| fee.paid == Paid::Not) {
            match self.charge_here(&fee, availability) {
                Ok((how, rest_us, after)) => paid.push((number, fee, how, rest_us, after)),
                Err(error) if !self.is_enforced(&fee) => bypassed.push((number, error.kind())),
                Err(error) => refusal = Some(harsher(refusal, error)),
            }
        }
        if let Some(error) = refusal {
            return self.refuse_claim(id, error);
        }
        for (number, kind) in bypassed {
            self.bypass_fee(id, number, kind);
        }
        for (number, fee, how, rest_us, after) in paid {
            if let Some(after) = after {
                self.keep_rate(fee.limit_id(), fee.key, after);
            }
            self.pay(id, number, how, rest_us);
        }
        self.settle_fees(id, None);
    }

    /// The rates have refused a claim, or have charged it.
    pub(super) fn settle_fees(&mut self, id: ClaimId, refusal: Option<AcquireError>) {
        match refusal {
            Some(error) => self.refuse_claim(id, error),
            None => {
                self.sleep(id);
                self.wake_bypassed(id);
            }
        }
    }

    /// A rate that a claim sleeps for may not be enforced any more since the claim was sent.
    fn wake_bypassed(&mut self, id: ClaimId) {
        let Some(claim) = self.claims.get(&id) else {
            return;
        };
        if let ClaimStage::Sleeping(_) = claim.stage {
            let ahead = claim.fees.iter().filter(|fee| fee.begins > self.ctx.now);
            let bypassed = ahead.filter(|fee| !self.is_enforced(fee));
            let limits: Vec<_> = bypassed.map(Fee::limit_id).collect();
            for limit in limits {
                self.release_sleepers(limit);
            }
        }
    }

    /// The store cannot charge the claim.
    pub(super) fn refuse_unpaid(&mut self, id: ClaimId) {
        let kind = AcquireErrorKind::Misconfigured;
        let unpaid = |fee: &Fee| fee.paid == Paid::Not;
        let claim = self.claims.get(&id).into_iter();
        let fees = claim.flat_map(|claim| &claim.fees);
        let enforced = fees
            .clone()
            .find(|fee| unpaid(fee) && self.is_enforced(fee));
        if let Some(fee) = enforced {
            let error = self.refusal(fee.limit_id(), kind);
            return self.refuse_claim(id, error);
        }
        let fees = fees.enumerate().filter(|(_, fee)| unpaid(fee));
        for number in fees.map(|(number, _)| number).collect::<Vec<_>>() {
            self.bypass_fee(id, number, kind);
        }
    }

    /// Leaves a claim alone until all its rates let it go on.
    fn sleep(&mut self, id: ClaimId) {
        let Some(claim) = self.claims.get_mut(&id) else {
            return;
        };
        let last = claim.fees.iter().max_by_key(|fee| fee.begins);
        if let Some(fee) = last.filter(|fee| fee.begins > self.ctx.now) {
            self.ctx.measure(fee.limit_id(), Measure::Waiting(1.0));
            self.sleepers.insert((fee.begins, id), fee.limit_id());
            claim.stage = ClaimStage::Sleeping(fee.begins);
        }
    }

    fn end_sleep(&mut self, until: Instant, id: ClaimId) {
        if let Some(limit) = self.sleepers.remove(&(until, id)) {
            self.ctx.measure(limit, Measure::Waiting(-1.0));
        }
    }

    /// A rate does not make requests wait any more: those that do go on, and are refunded. Later spending counts.
    pub(super) fn release_sleepers(&mut self, limit: LimitId) {
        let now = self.ctx.now;
        let waits = |fee: &&mut Fee| fee.limit_id() == limit && fee.begins > now;
        let mut released = Vec::new();
        // The last one first: of starts that are ahead a rate with a small burst can only undo the last.
        for (at, id) in self.sleepers.keys().rev().copied().collect::<Vec<_>>() {
            let Some(claim) = self.claims.get_mut(&id) else {
                continue;
            };
            let Some(fee) = claim.fees.iter_mut().find(waits) else {
                continue;
            };
            let charged = fee.clone();
            (fee.paid, fee.begins) = (Paid::Free, now);
            let kind = AcquireErrorKind::TooSoon;
            claim
                .bypassed
                .push((self.ctx.limits[limit.0].clone(), kind));
            claim.stage = ClaimStage::Open;
            self.ctx.note_bypass(limit, kind);
            self.end_sleep(at, id);
            self.refund(&charged);
            released.push(id);
        }
        for id in released.into_iter().rev() {
            self.sleep(id);
            self.advance(id);
        }
    }

    /// Claims that their rates let go on by now.
    pub(super) fn wake_sleepers(&mut self) {
        while let Some((&(at, id), _)) = self.sleepers.first_key_value()
            && at <= self.ctx.now
        {
            self.end_sleep(at, id);
            if let Some(claim) = self.claims.get_mut(&id) {
                claim.stage = ClaimStage::Open;
                self.advance(id);
            }
        }
    }
}
