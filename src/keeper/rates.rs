//! Rates: what a claim is charged, in the store or, without one, in this process.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Core,
    claim::{Claim, Stage},
    demand::Leg,
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    ledger::{Charge, Charged, Rate, Refund, Tat},
    limit::{Limit, MAX_LIMIT, OnUnavailable},
    status::Quota,
    telemetry::Measure,
};

/// Keys whose state is kept in this process before those that are idle are looked for.
const PURGE_FROM: usize = 1_024;

/// What a claim is charged at one rate.
pub(super) struct Fee {
    /// The number of its keeper.
    pub(super) keeper: usize,
    /// The limit's number.
    pub(super) limit: usize,
    key: Key,
    /// The limit's value for the key.
    max: u32,
    pub(super) charge: Charge,
    pub(super) paid: Paid,
    /// From when on it lets the claim go on.
    begins: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Paid {
    Not,
    InStore(Tat),
    Here(Rate, Tat),
    /// There is nothing to give back.
    Free,
}

/// The rates of this process.
#[derive(Default)]
pub(super) struct Rates {
    states: HashMap<(usize, Key), Tat>,
    purge_at: usize,
}

impl Core {
    /// What a leg costs, if its limit is a rate.
    pub(super) fn fee(&self, leg: &Leg, limit: &Limit, shadow: bool) -> Option<Fee> {
        let max = leg.max.unwrap_or(limit.max()).clamp(1, MAX_LIMIT);
        let rate = limit.to_rate(max)?.clamped();
        let wait_us = leg.wait.as_micros() as u64;
        let charge = Charge {
            // A digest, which only a store needs.
            key: match self.ctx.shared {
                true => self.ctx.settings.rate_name(&leg.key, limit.name()).into(),
                false => Arc::default(),
            },
            rate,
            cost: leg.cost.min(rate.burst),
            wait_us: if shadow {
                0
            } else {
                wait_us.min(rate.time_of(limit.waiters()))
            },
            shadow,
        };
        let paid = if leg.cost == 0 { Paid::Free } else { Paid::Not };
        Some(Fee {
            keeper: self.ctx.keeper(),
            limit: leg.limit,
            key: leg.key.clone(),
            max,
            charge,
            paid,
            begins: self.ctx.now,
        })
    }

    pub(super) fn owes(&self, id: u64) -> bool {
        let owed = |claim: &Claim| claim.fees.iter().any(|fee| fee.paid == Paid::Not);
        self.claims.get(&id).is_some_and(owed)
    }

    /// Charges a claim in this process, as the limits' policies say; all that it owes, or nothing.
    pub(super) fn pay_here(&mut self, id: u64) {
        let now_us = self.local_us(self.ctx.now);
        let (mut paid, mut passed, mut refusal) = (Vec::new(), Vec::new(), None);
        let fees = self.claims[&id].fees.iter().enumerate();
        for (number, fee) in fees.filter(|(_, fee)| fee.paid == Paid::Not) {
            match self.charge_here(fee, now_us) {
                Ok((how, start_us)) => paid.push((number, how, start_us - now_us)),
                Err(error) if fee.charge.shadow => passed.push((number, error.kind())),
                Err(error) => refusal = Some(harsher(refusal, error)),
            }
        }
        if let Some(error) = refusal {
            return self.refuse_claim(id, error);
        }
        for (number, kind) in passed {
            self.pass_fee(id, number, kind);
        }
        for (number, how, rest_us) in paid {
            self.pay(id, number, how, rest_us);
        }
        self.sleep(id);
    }

    fn charge_here(&self, fee: &Fee, now_us: u64) -> Result<(Paid, u64), AcquireError> {
        let limit = &self.limits[fee.limit];
        let refuse = |kind| Err(self.refusal(fee.limit, kind));
        let rate = match (self.ctx.down, limit.policy()) {
            (Some(true), _) => return refuse(AcquireErrorKind::Misconfigured),
            (Some(false), OnUnavailable::Reject) => return refuse(AcquireErrorKind::Unavailable),
            (Some(false), OnUnavailable::Allow) => return Ok((Paid::Free, now_us)),
            (Some(false), OnUnavailable::Local(count)) if count != limit.max() => {
                limit.to_rate(count).map(Rate::clamped)
            }
            _ => None,
        };
        let Charge {
            rate: usual,
            cost,
            wait_us,
            ..
        } = fee.charge;
        let rate = rate.unwrap_or(usual);
        let state = self.rates.states.get(&(fee.limit, fee.key.clone()));
        match rate.charge(state.copied(), now_us, cost.min(rate.burst), wait_us) {
            Charged::Until { tat, start_us } => Ok((Paid::Here(rate, tat), start_us)),
            Charged::TooSoon { start_us } => Err(self.too_soon(fee, start_us - now_us)),
            Charged::Not => refuse(AcquireErrorKind::TooSoon),
        }
    }

    /// The store cannot charge it.
    pub(super) fn refuse_unpaid(&mut self, id: u64) {
        let kind = AcquireErrorKind::Misconfigured;
        let unpaid = |fee: &Fee| fee.paid == Paid::Not;
        let fees = self
            .claims
            .get(&id)
            .into_iter()
            .flat_map(|claim| &claim.fees);
        let enforced = fees.clone().find(|fee| unpaid(fee) && !fee.charge.shadow);
        if let Some(fee) = enforced {
            let error = self.refusal(fee.limit, kind);
            return self.refuse_claim(id, error);
        }
        let fees = fees.enumerate().filter(|(_, fee)| unpaid(fee));
        for number in fees.map(|(number, _)| number).collect::<Vec<_>>() {
            self.pass_fee(id, number, kind);
        }
    }

    /// The refusal of a rate that lets the request go on so much later.
    pub(super) fn too_soon(&self, fee: &Fee, rest_us: u64) -> AcquireError {
        let rest = Some(Duration::from_micros(rest_us));
        let quota = Quota {
            reset: rest,
            ..self.limits[fee.limit].quota(fee.max)
        };
        AcquireError {
            limit: fee.max,
            retry_after: rest,
            quotas: vec![quota],
            ..self.refusal(fee.limit, AcquireErrorKind::TooSoon)
        }
    }

    /// How a rate stands after a charge.
    pub(super) fn quota_of(&self, fee: &Fee) -> Option<Quota> {
        let (rate, tat, now_us) = self.state_of(fee)?;
        Some(self.quota_at(fee, rate, tat, now_us))
    }

    /// How a rate will stand when what was charged is given back.
    pub(super) fn quota_without(&self, fee: &Fee) -> Option<Quota> {
        let (rate, tat, now_us) = self.state_of(fee)?;
        let cost = fee.charge.cost.min(rate.burst);
        let refunded = rate.refund(tat, tat, cost, now_us);
        Some(self.quota_at(fee, rate, refunded, now_us))
    }

    /// As the charge left it, and the time by the clock that it was charged by.
    fn state_of(&self, fee: &Fee) -> Option<(Rate, Tat, u64)> {
        match fee.paid {
            Paid::InStore(tat) => Some((fee.charge.rate, tat, self.clock?.at(self.ctx.now))),
            Paid::Here(rate, tat) => Some((rate, tat, self.local_us(self.ctx.now))),
            Paid::Not | Paid::Free => None,
        }
    }

    fn quota_at(&self, fee: &Fee, rate: Rate, tat: Tat, now_us: u64) -> Quota {
        let next_us = rate.next_at_us(tat, now_us) - now_us;
        Quota {
            remaining: rate.remaining(tat, now_us),
            reset: (next_us > 0).then(|| Duration::from_micros(next_us)),
            ..self.limits[fee.limit].quota(fee.max)
        }
    }

    /// It was charged, and the rate lets it go on so much later.
    pub(super) fn pay(&mut self, id: u64, number: usize, paid: Paid, rest_us: u64) {
        let Some(claim) = self.claims.get_mut(&id) else {
            return;
        };
        let fee = &mut claim.fees[number];
        fee.paid = paid;
        fee.begins = self.ctx.now + Duration::from_micros(rest_us);
        if let Paid::Here(_, tat) = paid {
            self.rates.set(
                (fee.limit, fee.key.clone()),
                tat,
                self.local_us(self.ctx.now),
            );
        }
    }

    /// The rate only looks on.
    pub(super) fn pass_fee(&mut self, id: u64, number: usize, kind: AcquireErrorKind) {
        if let Some(claim) = self.claims.get_mut(&id) {
            let fee = &mut claim.fees[number];
            fee.paid = Paid::Free;
            claim.passed.push((self.limits[fee.limit].clone(), kind));
            self.ctx.note_pass(fee.limit, kind);
        }
    }

    /// As [`refund`](Self::refund), for a request that had been granted here. Tells how the rate stands then.
    pub(super) fn refund_at(&mut self, fee: Fee, now: Instant) -> Option<Quota> {
        self.ctx.now = now;
        let quota = self.quota_without(&fee);
        self.refund(fee);
        quota
    }

    /// Gives back what was charged for a claim that was refused or given up.
    pub(super) fn refund(&mut self, fee: Fee) {
        let Charge {
            key, rate, cost, ..
        } = fee.charge;
        match fee.paid {
            Paid::InStore(charged) => {
                if self.store_is_up() {
                    self.refunds.push(Refund {
                        key,
                        rate,
                        cost,
                        charged,
                    });
                }
            }
            Paid::Here(rate, charged) => {
                let cost = cost.min(rate.burst);
                let now_us = self.local_us(self.ctx.now);
                if let Some(state) = self.rates.states.get_mut(&(fee.limit, fee.key)) {
                    *state = rate.refund(*state, charged, cost, now_us);
                }
            }
            Paid::Not | Paid::Free => {}
        }
    }

    /// Leaves a claim alone until all its rates let it go on.
    pub(super) fn sleep(&mut self, id: u64) {
        let Some(claim) = self.claims.get_mut(&id) else {
            return;
        };
        let last = claim.fees.iter().max_by_key(|fee| fee.begins);
        if let Some(fee) = last.filter(|fee| fee.begins > self.ctx.now) {
            self.ctx.measure(fee.limit, Measure::Waiting(1.0));
            self.sleepers.insert((fee.begins, id), fee.limit);
            claim.stage = Stage::Sleeping(fee.begins);
        }
    }

    /// It does not sleep any more.
    pub(super) fn rouse(&mut self, until: Instant, id: u64) {
        if let Some(limit) = self.sleepers.remove(&(until, id)) {
            self.ctx.measure(limit, Measure::Waiting(-1.0));
        }
    }

    /// A rate does not make anybody wait any more: those who do go on, and are not charged.
    pub(super) fn let_sleepers_go(&mut self, limit: usize) {
        let now = self.ctx.now;
        for (at, id) in self.sleepers.keys().copied().collect::<Vec<_>>() {
            let waits = |fee: &mut Fee| fee.limit == limit && fee.begins > now;
            let Some(claim) = self.claims.get_mut(&id) else {
                continue;
            };
            let Some(fee) = claim.fees.extract_if(.., waits).next() else {
                continue;
            };
            let kind = AcquireErrorKind::TooSoon;
            claim.passed.push((self.limits[limit].clone(), kind));
            claim.stage = Stage::Open;
            self.rouse(at, id);
            self.refund(fee);
            self.sleep(id);
            self.advance(id);
        }
    }

    pub(super) fn wake_sleepers(&mut self, now: Instant) {
        while let Some((&(at, id), _)) = self.sleepers.first_key_value()
            && at <= now
        {
            self.rouse(at, id);
            if let Some(claim) = self.claims.get_mut(&id) {
                claim.stage = Stage::Open;
                self.advance(id);
            }
        }
    }

    fn local_us(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.ctx.epoch).as_micros() as u64
    }
}

/// Of two refusals the one that lasts longer, with how both limits stand.
pub(super) fn harsher(one: Option<AcquireError>, other: AcquireError) -> AcquireError {
    let Some(one) = one else {
        return other;
    };
    let (mut harsher, milder) = match other.retry_after > one.retry_after {
        true => (other, one),
        false => (one, other),
    };
    harsher.quotas.extend(milder.quotas);
    harsher
}

impl Rates {
    fn set(&mut self, key: (usize, Key), state: Tat, now_us: u64) {
        self.states.insert(key, state);
        if self.states.len() >= self.purge_at.max(PURGE_FROM) {
            self.states.retain(|_, state| state.us >= now_us);
            self.purge_at = 2 * self.states.len();
        }
    }
}
