//! Rates: what a claim is charged, in the store or, without one, in this process.

use std::{sync::Arc, time::Duration};

use super::{Core, Rates};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    keeper::{
        context::Availability,
        demand::{Fee, Leg, LimitId, Paid},
    },
    key::Key,
    ledger::{Charge, Charged, Rate, Refund, Tat},
    limit::{Fallback, Limit, MAX_LIMIT},
    status::Quota,
};

/// Keys whose state is kept in this process before those that are idle are looked for.
const PURGE_FROM: usize = 1_024;

impl Core {
    /// The fee of a leg, if its limit is a rate.
    pub(super) fn fee(&self, leg: &Leg, limit: &Limit, shadow: bool) -> Option<Fee> {
        let max = leg.max.unwrap_or(limit.max()).clamp(1, MAX_LIMIT);
        let rate = limit.to_rate(max)?.clamped();
        let wait_us = leg.wait.as_micros() as u64;
        let charge = Charge {
            // A digest, which only a store needs.
            key: match self.ctx.shared {
                true => {
                    let ledger = self.ctx.settings.ledger_name(&leg.key, limit.name());
                    (ledger + ":rate").into()
                }
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

    /// Charges in this process, as the limit's policy says. Returns how, and for how many microseconds the rate holds the
    /// request back.
    pub(super) fn charge_here(&self, fee: &Fee) -> Result<(Paid, u64), AcquireError> {
        let now_us = self.ctx.local_us();
        let limit = &self.limits[fee.limit.0];
        let refuse = |kind| Err(self.refusal(fee.limit, kind));
        let rate = match (self.ctx.availability, limit.current_fallback()) {
            (Availability::Refused, _) => return refuse(AcquireErrorKind::Misconfigured),
            (Availability::Down, Fallback::Reject) => {
                return refuse(AcquireErrorKind::Unavailable);
            }
            (Availability::Down, Fallback::Allow) => return Ok((Paid::Free, 0)),
            (Availability::Down, Fallback::Local(count)) if count != limit.max() => {
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
            Charged::Until { tat, start_us } => Ok((Paid::Here(rate, tat), start_us - now_us)),
            Charged::TooSoon { start_us } => Err(self.too_soon(fee, start_us - now_us)),
            Charged::Not => refuse(AcquireErrorKind::TooSoon),
        }
    }

    /// Keeps the state of a rate in this process.
    pub(super) fn keep_rate(&mut self, limit: LimitId, key: Key, tat: Tat) {
        self.rates.set((limit, key), tat, self.ctx.local_us());
    }

    /// The refusal of a rate that admits the request this much later.
    pub(super) fn too_soon(&self, fee: &Fee, rest_us: u64) -> AcquireError {
        let rest = Some(Duration::from_micros(rest_us));
        let quota = Quota {
            reset: rest,
            ..self.limits[fee.limit.0].quota(fee.max)
        };
        let details = AcquireErrorDetails {
            max: fee.max,
            retry_after: rest,
            quotas: vec![quota],
            ..self.limits[fee.limit.0].error_details()
        };
        AcquireError::new(AcquireErrorKind::TooSoon, details)
    }

    /// How a rate stands after a charge.
    pub(super) fn quota_of(&self, fee: &Fee) -> Option<Quota> {
        let (rate, tat, now_us) = self.state_of(fee)?;
        Some(self.quota_at(fee, rate, tat, now_us))
    }

    /// How a rate will stand after the charge is refunded.
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
            Paid::Here(rate, tat) => Some((rate, tat, self.ctx.local_us())),
            Paid::Not | Paid::Free => None,
        }
    }

    fn quota_at(&self, fee: &Fee, rate: Rate, tat: Tat, now_us: u64) -> Quota {
        let next_us = rate.next_at_us(tat, now_us) - now_us;
        Quota {
            remaining: rate.remaining(tat, now_us),
            reset: (next_us > 0).then(|| Duration::from_micros(next_us)),
            ..self.limits[fee.limit.0].quota(fee.max)
        }
    }

    /// Refunds what was charged for a claim that was refused or dropped.
    pub(super) fn refund(&mut self, fee: Fee) {
        match fee.paid {
            // While the store is down nothing can be refunded.
            Paid::InStore(_) if !self.store_is_up() => {}
            Paid::InStore(tat) => self.push_refund(&fee.charge, tat),
            Paid::Here(rate, charged) => {
                let cost = fee.charge.cost.min(rate.burst);
                let now_us = self.ctx.local_us();
                if let Some(state) = self.rates.states.get_mut(&(fee.limit, fee.key)) {
                    *state = rate.refund(*state, charged, cost, now_us);
                }
            }
            Paid::Not | Paid::Free => {}
        }
    }

    /// Has the store refund what it has charged.
    pub(super) fn push_refund(&mut self, charge: &Charge, charged: Tat) {
        let Charge {
            key, rate, cost, ..
        } = charge.clone();
        self.refunds.push(Refund {
            key,
            rate,
            cost,
            charged,
        });
    }
}

/// Of two refusals the one that lasts longer, with how both limits stand.
pub(super) fn harsher(one: Option<AcquireError>, other: AcquireError) -> AcquireError {
    let Some(one) = one else {
        return other;
    };
    let (mut harsher, milder) = match other.retry_after() > one.retry_after() {
        true => (other, one),
        false => (one, other),
    };
    harsher.details.quotas.extend(milder.details.quotas);
    harsher
}

impl Rates {
    fn set(&mut self, key: (LimitId, Key), state: Tat, now_us: u64) {
        self.states.insert(key, state);
        if self.states.len() >= self.purge_at.max(PURGE_FROM) {
            self.states.retain(|_, state| state.us >= now_us);
            self.purge_at = 2 * self.states.len();
        }
    }
}
