//! A claim: a request for slots under several limits and times at rates, all or nothing.
//!
//! Its legs are entries of their lines and go the same way as a request for a single slot. They are taken in one order
//! on all replicas, narrow limits first, so that claims never wait for each other in a circle. A leg whose turn has not
//! come is *parked*. A claim that has to wait for one leg keeps those before it: giving them back to queue for them
//! again could go on for ever.
//!
//! Rates come first, and are charged once. What was charged is given back if the claim is refused after all.

use std::{cmp::Ordering, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Core, Lease,
    demand::{Leases, Leg, Notes, Taken},
    effects::StoredWaker,
    rates::Fee,
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    limit::{Limit, Mode},
    status::Quota,
};

pub(super) struct Claim {
    /// In the order in which they are taken.
    pub(super) legs: Vec<Arc<Lease>>,
    pub(super) fees: Vec<Fee>,
    pub(super) stage: Stage,
    pub(super) asked: Instant,
    /// When it began to ask the store that it asks now.
    pub(super) asking_since: Option<Instant>,
    /// Limits that would have refused it, and only look on.
    pub(super) passed: Vec<(Arc<Limit>, AcquireErrorKind)>,
    pub(super) waker: Option<StoredWaker>,
}

pub(super) enum Stage {
    /// What comes next depends on its legs.
    Open,
    /// On the list of those to be sent.
    Listed,
    Sent,
    /// A rate lets it go on then.
    Sleeping(Instant),
    Granted,
    Refused(AcquireError),
}

impl Core {
    /// Asks for all of it. The claim is there until [`collect_claim`](Self::collect_claim) or
    /// [`drop_claim`](Self::drop_claim).
    pub(super) fn submit_claim(&mut self, legs: &[Leg], now: Instant) -> u64 {
        let id = self.ctx.next_seq();
        let (mut ordered, mut fees) = (Vec::new(), Vec::new());
        for leg in legs {
            let limit = self.limits[leg.limit].clone();
            let shadow = match limit.current_mode() {
                Mode::Off => continue,
                mode => mode == Mode::Shadow,
            };
            if let Some(fee) = self.fee(leg, &limit, shadow) {
                fees.push(fee);
                continue;
            }
            let class = limit.class_of(&leg.key);
            let line = self.line(leg.limit, &leg.key, now);
            self.lines[line].set_own_max(&mut self.ctx, leg.max);
            let wait = match leg.max {
                // It would wait for nothing.
                Some(0) => Duration::ZERO,
                _ if shadow => Duration::ZERO,
                _ => leg.wait,
            };
            let lease = self.enter(line, wait, now, |entry| {
                (entry.claim, entry.shadow) = (Some(id), shadow);
            });
            ordered.push((class, lease));
        }
        ordered.sort_by(|(class, lease), (other, other_lease)| {
            class
                .cmp(other)
                .then_with(|| self.by_ledger_order(lease, other_lease))
        });
        let legs = ordered.into_iter().map(|(_, lease)| lease).collect();
        let claim = Claim {
            legs,
            fees,
            stage: Stage::Open,
            asked: now,
            asking_since: None,
            passed: Vec::new(),
            waker: None,
        };
        let lines: Vec<usize> = claim.legs.iter().map(|lease| lease.line).collect();
        self.claims.insert(id, claim);
        self.advance(id);
        // A value of its own may have changed one.
        for index in lines {
            if self.lines.contains(index) {
                self.settle(index);
            }
        }
        id
    }

    /// The same on all replicas: by the names of ledgers. In memory there are no names and no other replicas.
    fn by_ledger_order(&self, one: &Lease, other: &Lease) -> Ordering {
        let (one, other) = (&self.lines[one.line], &self.lines[other.line]);
        one.ledger
            .cmp(&other.ledger)
            .then_with(|| one.key.cmp(&other.key))
    }

    /// The answer to a claim, once there is one. It is gone then; the permit has its slots.
    pub(super) fn collect_claim(
        &mut self,
        id: u64,
        now: Instant,
    ) -> Option<Result<Taken, AcquireError>> {
        let claim = self.claims.get_mut(&id)?;
        if let Stage::Granted = claim.stage {
            // If nobody came for it in time, a leg may be lost.
            claim.stage = Stage::Open;
            self.advance(id);
        }
        let claim = self.claims.get_mut(&id)?;
        if !matches!(claim.stage, Stage::Granted | Stage::Refused(_)) {
            return None;
        }
        let claim = self.claims.remove(&id)?;
        self.ctx.effects.drop_waker(claim.waker);
        if let Stage::Refused(error) = claim.stage {
            return Some(Err(error));
        }
        let waited = now.saturating_duration_since(claim.asked);
        for fee in &claim.fees {
            self.ctx.note_admission(fee.limit, waited);
        }
        let mut place = 0;
        for lease in &claim.legs {
            let line = &mut self.lines[lease.line];
            self.ctx.note_admission(line.key.0, waited);
            if let Some(entry) = line.entries.get_mut(&lease.seq()) {
                (entry.taken, entry.claim) = (true, None);
                lease.begin_tenure(now);
                let taken = self.ctx.history.taken(&line.ledger, lease.seq(), now);
                self.ctx.record(taken);
                place = place.max(entry.place);
            }
        }
        let has_notes = !claim.passed.is_empty() || !claim.fees.is_empty();
        let notes = Notes {
            passed: claim.passed,
            fees: claim.fees,
            quotas: Vec::new(),
        };
        Some(Ok(Taken {
            leases: Leases::many(claim.legs),
            waited,
            place,
            notes: has_notes.then(|| Box::new(notes)),
        }))
    }

    /// Nobody waits for it any more.
    pub(super) fn drop_claim(&mut self, id: u64) {
        if let Some(mut claim) = self.claims.remove(&id) {
            self.let_go(id, &mut claim);
            self.ctx.effects.drop_waker(claim.waker);
        }
    }

    /// The place of the leg that waits, when it joined its line.
    pub(super) fn place_of_claim(&self, id: u64) -> Option<u32> {
        let claim = self.claims.get(&id)?;
        claim.legs.iter().find_map(|lease| self.place_of(lease))
    }

    /// How its limits stand, as far as was heard.
    pub(super) fn quotas_of(&self, claim: &Claim) -> Vec<Quota> {
        let slots = self.slots_of(claim);
        let rates = claim.fees.iter().filter_map(|fee| self.quota_of(fee));
        slots.chain(rates).collect()
    }

    fn slots_of(&self, claim: &Claim) -> impl Iterator<Item = Quota> {
        let legs = claim.legs.iter();
        legs.filter_map(|lease| self.lines[lease.line].quota(&self.ctx))
    }

    /// Gives back what it has, and what it was charged.
    pub(super) fn refuse_claim(&mut self, id: u64, mut error: AcquireError) {
        if let Some(mut claim) = self.claims.remove(&id) {
            let refused = error.limit_name.clone();
            let slots = self.slots_of(&claim);
            let rates = claim.fees.iter().filter_map(|fee| self.quota_without(fee));
            let others = slots.chain(rates);
            let others = others.filter(|quota| quota.limit_name != refused);
            error.quotas.extend(others.collect::<Vec<_>>());
            self.let_go(id, &mut claim);
            self.ctx.wake(claim.waker.take());
            claim.stage = Stage::Refused(error);
            self.claims.insert(id, claim);
        }
    }

    pub(super) fn grant_claim(&mut self, id: u64) {
        if let Some(claim) = self.claims.get_mut(&id) {
            claim.stage = Stage::Granted;
            self.ctx.wake(claim.waker.take());
        }
    }

    fn let_go(&mut self, id: u64, claim: &mut Claim) {
        if let Stage::Sleeping(until) = claim.stage {
            self.rouse(until, id);
        }
        for lease in claim.legs.drain(..) {
            self.lines[lease.line].give_up(&mut self.ctx, lease.seq());
            self.settle(lease.line);
        }
        for fee in claim.fees.drain(..) {
            self.refund(fee);
        }
    }

    /// Refuses all that nobody has collected yet. Returns how many.
    pub(super) fn refuse_claims(&mut self, kind: AcquireErrorKind) -> usize {
        let undecided = |claim: &Claim| !matches!(claim.stage, Stage::Refused(_));
        let claims = self.claims.iter().filter(|(_, claim)| undecided(claim));
        let ids: Vec<u64> = claims.map(|(id, _)| *id).collect();
        // From the end of the line, so that the times that rates have reserved for them can be taken back.
        for id in ids.iter().rev() {
            let error = self.claim_error(*id, kind);
            self.refuse_claim(*id, error);
        }
        ids.len()
    }

    /// A refusal that no limit is to blame for. It names the one that the claim waits for, or else its first.
    fn claim_error(&self, id: u64, kind: AcquireErrorKind) -> AcquireError {
        let claim = &self.claims[&id];
        let mut legs = claim.legs.iter();
        if let Some(leg) = legs.position(|lease| self.place_of(lease).is_some()) {
            return self.leg_error(id, leg, kind);
        }
        let first = claim.legs.first().map(|lease| self.lines[lease.line].key.0);
        let limit = first
            .or(claim.fees.first().map(|fee| fee.limit))
            .unwrap_or(0);
        let waited = self.ctx.now.saturating_duration_since(claim.asked);
        AcquireError {
            waited,
            ..self.refusal(limit, kind)
        }
    }

    /// A refusal by the limit of one leg.
    pub(super) fn leg_error(&self, id: u64, leg: usize, kind: AcquireErrorKind) -> AcquireError {
        let claim = &self.claims[&id];
        let waited = self.ctx.now.saturating_duration_since(claim.asked);
        let lease = &claim.legs[leg];
        let place = self.entry(lease).map_or(0, |entry| entry.place);
        self.lines[lease.line].error(&self.ctx, kind, place, waited)
    }
}
