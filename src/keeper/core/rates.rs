//! Rates: what a claim is charged, in the store or, without one, in this process; and what a permit spends after that.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Core, Rates};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    keeper::{
        context::Availability,
        demand::{ClaimId, Leg, LimitId},
    },
    key::Key,
    leases::{Account, AccountId, Fee, Outcome, Paid, PaidBack},
    ledger::{Charge, Charged, Rate, Refund, Tat, WAIT_FOREVER_US},
    limit::{Fallback, Limit, MAX_LIMIT},
    status::Quota,
    telemetry::{Cost, Measure},
};

/// Keys whose state is kept in this process before those that are idle are looked for.
const PURGE_FROM: usize = 1_024;

impl Core {
    /// The fee of a leg, if its limit is a rate.
    pub(super) fn fee(&self, id: ClaimId, leg: &Leg, shadow: bool) -> Option<Fee> {
        let limit = self.limits[leg.limit.0].clone();
        let (max, rate) = self.rate_of(&limit, &leg.key, leg.max)?;
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
            id: AccountId(id.0, leg.limit),
            keeper: self.ctx.keeper(),
            limit,
            key: leg.key.clone(),
            max,
            own_max: leg.max,
            wait: leg.wait,
            clamps: leg.clamps,
            charge,
            paid,
            begins: self.ctx.now,
        })
    }

    /// The value of a limit for a key, and the rate, if it is one.
    fn rate_of(&self, limit: &Limit, key: &Key, own_max: Option<u32>) -> Option<(u32, Rate)> {
        let own_max = match self.overrides.is_empty() {
            true => own_max,
            false => self.overrides.for_key(limit, key).own_max(own_max),
        };
        let max = own_max.unwrap_or(limit.max()).clamp(1, MAX_LIMIT);
        Some((max, limit.to_rate(max)?.clamped()))
    }

    /// Charges in this process, as the limit's policy says. Returns how, and for how many microseconds the rate holds the
    /// request back.
    pub(super) fn charge_here(&self, fee: &Fee) -> Result<(Paid, u64), AcquireError> {
        let now_us = self.ctx.local_us();
        let limit = &self.limits[fee.number().0];
        let refuse = |kind| Err(self.refusal(fee.number(), kind));
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
        let most = match wait_us {
            WAIT_FOREVER_US => rate.most_at_once(),
            _ => rate.burst,
        };
        let state = self.rates.states.get(&(fee.number(), fee.key.clone()));
        match rate.charge(state.copied(), now_us, cost.min(most), wait_us) {
            Charged::Until { tat, start_us } => Ok((Paid::Here(rate, tat), start_us - now_us)),
            Charged::TooSoon { start_us } => Err(self.too_soon(fee, start_us - now_us)),
            Charged::Not => refuse(AcquireErrorKind::TooSoon),
        }
    }

    /// Counts a request that a rate has admitted.
    pub(super) fn note_charge(&mut self, fee: &Fee, waited: Duration) {
        self.ctx.note_admission(fee.number(), waited);
        let charged = Measure::Cost(Cost::Charged, fee.paid_cost().into());
        self.ctx.measure(fee.number(), charged);
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
            ..fee.limit.quota(fee.max)
        };
        let details = AcquireErrorDetails {
            max: fee.max,
            retry_after: rest,
            quotas: vec![quota],
            ..fee.limit.error_details()
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
            ..fee.limit.quota(fee.max)
        }
    }

    /// Refunds what was charged for a claim that was refused or dropped.
    pub(super) fn refund(&mut self, fee: &Fee) {
        let cost = fee.paid_cost();
        let paid = fee.paid;
        self.pay_back(fee, PaidBack { cost, paid });
    }

    /// Refunds a part of a charge.
    fn pay_back(&mut self, fee: &Fee, PaidBack { cost, paid }: PaidBack) {
        match paid {
            // While the store is down nothing can be refunded.
            Paid::InStore(_) if !self.store_is_up() => {}
            Paid::InStore(charged) => self.push_refund(fee.charge.key.clone(), cost, charged),
            Paid::Here(rate, charged) => {
                let now_us = self.ctx.local_us();
                let key = (fee.number(), fee.key.clone());
                if let Some(state) = self.rates.states.get_mut(&key) {
                    *state = rate.refund(*state, charged, cost, now_us);
                }
            }
            Paid::Not | Paid::Free => {}
        }
    }

    /// Has the store refund what it has charged.
    pub(super) fn push_refund(&mut self, key: Arc<str>, cost: u32, charged: Tat) {
        self.refunds.push(Refund {
            key,
            rate: charged.rate,
            cost,
            charged,
        });
    }
}

/// Accounts: what permits owe while they are held, and in the end.
impl Core {
    /// Something happens to the account of a permit: it spends, is charged, is settled or ends. Returns the kind of the cost,
    /// if it is one.
    pub(crate) fn change_account(
        &mut self,
        fee: &Fee,
        now: Instant,
        change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>,
    ) {
        self.ctx.now = now;
        if let Some((kind, cost)) = change(self.accounts.account_of(fee)) {
            self.ctx.measure(fee.number(), Measure::Cost(kind, cost));
        }
        self.follow_account(fee.id);
    }

    /// How a rate stands, as the latest charge of this permit has left it, and with what it has spent since.
    pub(crate) fn account_quota(&self, fee: &Fee) -> Option<Quota> {
        let account = self.accounts.get(fee.id);
        let paid = account.map_or(Some(fee.paid), Account::latest)?;
        let (rate, tat, now_us) = match paid {
            Paid::InStore(tat) => (tat.rate, tat, self.clock?.at(Instant::now())),
            Paid::Here(rate, tat) => (rate, tat, self.ctx.local_us()),
            Paid::Not | Paid::Free => return None,
        };
        let unsent = account.map_or(0, Account::unsent);
        let mut quota = self.quota_at(fee, rate, tat, now_us);
        quota.remaining = u64::from(quota.remaining).saturating_sub(unsent) as u32;
        Some(quota)
    }

    fn follow_account(&mut self, id: AccountId) {
        if !self.asks_store() {
            self.tell_here(id);
        }
        if let Some((fee, parts)) = self.accounts.note_change(id, self.ctx.now) {
            parts.into_iter().for_each(|part| self.pay_back(&fee, part));
        }
    }

    /// The next sum to be told, and whose it is.
    pub(super) fn tell_next(&mut self) -> Option<(AccountId, Charge)> {
        loop {
            let id = self.accounts.next()?;
            if let Some(fee) = self.tell(id) {
                return Some((id, fee.charge));
            }
        }
    }

    /// The next sum of an account, as a charge that no rate refuses, at the values that the limit has now.
    fn tell(&mut self, id: AccountId) -> Option<Fee> {
        let mut fee = self.accounts.get(id)?.fee().clone();
        let limit = &self.limits[fee.number().0];
        let (_, rate) = self.rate_of(limit, &fee.key, fee.own_max)?;
        let account = self.accounts.get_mut(id)?;
        fee.charge = Charge {
            rate,
            cost: account.tell(rate.most_at_once())?,
            wait_us: WAIT_FOREVER_US,
            shadow: false,
            ..fee.charge
        };
        Some(fee)
    }

    /// Without the store the rate of this process is told, as the limit's policy says.
    fn tell_here(&mut self, id: AccountId) {
        while let Some(fee) = self.tell(id) {
            let charged = self.charge_here(&fee);
            let paid = charged.map_or(Paid::Free, |(paid, _)| paid);
            match paid {
                Paid::Here(_, tat) => self.keep_rate(fee.number(), fee.key, tat),
                _ => {
                    let measure = Measure::Cost(Cost::Unsettled, fee.charge.cost.into());
                    self.ctx.measure(fee.number(), measure);
                }
            }
            if let Some(account) = self.accounts.get_mut(id) {
                account.on_outcome(Outcome::Told(paid));
            }
        }
    }

    /// The store is not asked any more.
    pub(super) fn tell_all_here(&mut self) {
        self.accounts.tell_all();
        while let Some(id) = self.accounts.next() {
            self.follow_account(id);
        }
    }

    /// What became of a sum that the store was told.
    pub(super) fn on_sum(&mut self, id: AccountId, outcome: Outcome) {
        if let Some(account) = self.accounts.get_mut(id) {
            let unsettled = account.on_outcome(outcome);
            if unsettled > 0 {
                let measure = Measure::Cost(Cost::Unsettled, unsettled);
                self.ctx.measure(id.1, measure);
            }
            self.follow_account(id);
        }
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
