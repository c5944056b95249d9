//! Rates: charges of requests, in the store or in this process; and costs of permits after admission.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Core, Rates, Request, Stage};
#[cfg(feature = "operate")]
use crate::operable::{RateLook, Standing};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    keeper::{
        context::Availability,
        demand::{Leg, RequestId},
    },
    key::Key,
    leases::{Account, AccountId, Fee, Paid, PaidBack, ReportOutcome},
    ledger::{Charge, Charged, Rate, RateState, Refund, Tat, WAIT_FOREVER_US},
    limit::{Fallback, Limit, LimitId, LimitValue, MAX_LIMIT, Mode},
    status::{Quota, QuotaReader},
    telemetry::{Cost, Measure},
};

/// Number of keys in this process at which purging of idle keys starts.
const PURGE_FROM: usize = 1_024;

impl Core {
    /// The fee of a request's leg, if its limit is a rate.
    pub(super) fn fee(&self, request: u64, leg: &Leg, shadow: bool) -> Option<Fee> {
        let limit = self.ctx.limits[leg.limit.0].clone();
        let (max, rate) = self.rate_of(&limit, &leg.key, leg.value)?;
        let wait_us = leg.wait.as_micros() as u64;
        let charge = Charge {
            // A digest, needed only by a store.
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
            id: AccountId(request, leg.limit),
            keeper: self.ctx.keeper(),
            limit,
            key: leg.key.clone(),
            max,
            own_value: leg.value,
            wait: leg.wait,
            clamps: leg.clamps,
            charge,
            paid,
            begins: self.ctx.now,
        })
    }

    /// The value of a limit for a key, and the rate, if the limit is one.
    fn rate_of(
        &self,
        limit: &Limit,
        key: &Key,
        own_value: Option<LimitValue>,
    ) -> Option<(u32, Rate)> {
        let own_value = match self.ctx.overrides.is_empty() {
            true => own_value,
            false => self.ctx.overrides.for_key(limit, key).own_value(own_value),
        };
        let mut value = own_value.unwrap_or(limit.max().into());
        value.max = value.max.clamp(1, MAX_LIMIT);
        Some((value.max, limit.to_rate(value)?.clamped()))
    }

    /// The rate charged by this process, as set by the limit's fallback. `None`: no charge.
    pub(super) fn rate_here(
        &self,
        number: LimitId,
        usual: Rate,
        availability: Availability,
    ) -> Result<Option<Rate>, AcquireErrorKind> {
        let limit = &self.ctx.limits[number.0];
        match (availability, limit.current_fallback()) {
            (Availability::Refused, _) => Err(AcquireErrorKind::Misconfigured),
            (Availability::Down, Fallback::Reject) => Err(AcquireErrorKind::Unavailable),
            (Availability::Down, Fallback::Allow) => Ok(None),
            (Availability::Down, Fallback::Local(count)) if count != limit.max() => {
                Ok(limit.to_rate(count).map(Rate::clamped))
            }
            _ => Ok(Some(usual)),
        }
    }

    /// Counts a request admitted by a rate.
    pub(super) fn note_charge(&mut self, fee: &Fee, waited: Duration) {
        self.ctx.note_admission(fee.limit_id(), waited);
        self.note_cost(fee.limit_id(), Cost::Charged, fee.paid_cost().into());
    }

    fn note_cost(&mut self, limit: LimitId, kind: Cost, cost: u64) {
        if cost > 0 {
            self.ctx.measure(limit, Measure::Cost(kind, cost));
        }
    }

    /// The refusal by a rate that would admit the request after `rest_us`.
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

    /// The state of a rate after a charge.
    pub(super) fn quota_of(&self, fee: &Fee) -> Option<Quota> {
        let (rate, tat, now_us) = self.state_of(fee.paid)?;
        Some(self.quota_at(fee, rate, tat, now_us))
    }

    /// The state of a rate after a refund of the charge.
    pub(super) fn quota_without(&self, fee: &Fee) -> Option<Quota> {
        let (rate, tat, now_us) = self.state_of(fee.paid)?;
        let cost = fee.charge.cost.min(rate.burst);
        Some(self.quota_at(fee, rate, tat.without(cost), now_us))
    }

    /// The state as left by the charge, and the time by the charging clock.
    fn state_of(&self, paid: Paid) -> Option<(Rate, Tat, u64)> {
        match paid {
            Paid::InStore(tat) => Some((tat.rate, tat, self.clock?.at(self.ctx.now))),
            Paid::Here(tat) => Some((tat.rate, tat, self.ctx.local_us())),
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

    /// Refunds the charge of a refused or dropped request.
    pub(super) fn refund(&mut self, fee: &Fee) {
        let cost = fee.paid_cost();
        let paid = fee.paid;
        self.pay_back(fee, PaidBack { cost, paid });
    }

    /// Refunds part of a charge.
    fn pay_back(&mut self, fee: &Fee, PaidBack { cost, paid }: PaidBack) {
        match paid {
            // While the store is down it cannot refund.
            Paid::InStore(_) if !self.store_is_up() => {}
            Paid::InStore(charged) => {
                self.push_refund(fee.charge.key.clone(), cost, charged);
                self.standings.refund(fee, paid, |tat| tat.without(cost));
            }
            Paid::Here(charged) => {
                let now_us = self.ctx.local_us();
                let key = (fee.limit_id(), fee.key.clone());
                if let Some(state) = self.rates.states.get_mut(&key) {
                    *state = state.refund(charged, cost, now_us);
                    self.standings.refund(fee, paid, |tat| tat.without(cost));
                }
            }
            Paid::Not | Paid::Free => {}
        }
    }

    /// Refunds the charges of a claim that lost its request.
    pub(super) fn refund_unclaimed(&mut self, charges: &[Charge], charged: &[Charged]) {
        for (charge, charged) in charges.iter().zip(charged) {
            if let Charged::Until { tat, .. } = *charged {
                self.push_refund(charge.key.clone(), charge.cost, tat);
            }
        }
    }

    /// Enqueues a refund in the store.
    fn push_refund(&mut self, key: Arc<str>, cost: u32, charged: Tat) {
        self.refunds.push(Refund { key, cost, charged });
    }
}

/// Pending and completed charges of a request.
impl Core {
    /// Whether a request has pending charges.
    pub(super) fn owes(&self, id: RequestId) -> bool {
        let fees = self.request(id).map_or(&[][..], Request::fees);
        fees.iter().any(|fee| fee.paid == Paid::Not)
    }

    /// Whether the rate was enforced when the request arrived, and is now.
    pub(super) fn is_enforced(&self, fee: &Fee) -> bool {
        !fee.charge.shadow && self.ctx.limits[fee.limit_id().0].current_mode() == Mode::Enforce
    }

    /// A fee was charged; the rate lets the request continue after `rest_us`.
    pub(super) fn pay(&mut self, id: RequestId, number: usize, paid: Paid, rest_us: u64) {
        let begins = self.ctx.now + Duration::from_micros(rest_us);
        let Some(request) = self.request_mut(id) else {
            return;
        };
        let fee = &mut request.fees_mut()[number];
        (fee.paid, fee.begins) = (paid, begins);
        let fee = fee.clone();
        self.standings.note(&fee, paid, self.ctx.now);
    }

    /// The rate is not enforced: the request continues.
    pub(super) fn bypass_fee(&mut self, id: RequestId, number: usize, kind: AcquireErrorKind) {
        let request = self.request_mut(id);
        if let Some(notes) = request.and_then(|request| request.notes.as_mut()) {
            let fee = &mut notes.fees[number];
            fee.paid = Paid::Free;
            let (limit, id) = (fee.limit.clone(), fee.limit_id());
            notes.bypassed.push((limit, kind));
            self.ctx.note_bypass(id, kind);
        }
    }
}

/// Requests held back by rates.
impl Core {
    /// Holds a request back until all its rates let it continue.
    pub(super) fn sleep(&mut self, id: RequestId) {
        let now = self.ctx.now;
        let Some(request) = self.request_mut(id) else {
            return;
        };
        let last = request.fees().iter().max_by_key(|fee| fee.begins);
        let ahead = last.filter(|fee| fee.begins > now);
        if let Some((begins, limit)) = ahead.map(|fee| (fee.begins, fee.limit_id())) {
            request.stage = Stage::Sleeping(begins);
            self.ctx.measure(limit, Measure::Waiting(1.0));
            self.sleepers.insert((begins, id), limit);
        }
    }

    pub(super) fn end_sleep(&mut self, until: Instant, id: RequestId) {
        if let Some(limit) = self.sleepers.remove(&(until, id)) {
            self.ctx.measure(limit, Measure::Waiting(-1.0));
        }
    }

    /// The rates have charged, or refused to charge, the fees of a request, at this time by their clock.
    pub(super) fn charged(
        &mut self,
        id: RequestId,
        charged: &[Charged],
        now_us: u64,
        paid: fn(Tat) -> Paid,
    ) {
        let mut refusal = None;
        let fees = self
            .request(id)
            .map_or_else(Vec::new, |one| one.fees().to_vec());
        let owed = fees.iter().enumerate();
        let owed = owed.filter(|(_, fee)| fee.paid == Paid::Not);
        for ((number, fee), charged) in owed.zip(charged) {
            match *charged {
                Charged::Until { tat, start_us } => {
                    let rest_us = start_us.saturating_sub(now_us);
                    self.pay(id, number, paid(tat), rest_us);
                }
                Charged::TooSoon { start_us } => {
                    if !self.is_enforced(fee) {
                        self.bypass_fee(id, number, AcquireErrorKind::TooSoon);
                    } else {
                        let rest_us = start_us.saturating_sub(now_us);
                        refusal = Some(harsher(refusal, self.too_soon(fee, rest_us)));
                    }
                }
                Charged::Not => {}
            }
        }
        self.settle_fees(id, refusal);
    }

    /// Refuses a request, or continues it, after its fees were decided on.
    pub(super) fn settle_fees(&mut self, id: RequestId, refusal: Option<AcquireError>) {
        match refusal {
            Some(error) => self.refuse_request(id, error),
            None => {
                self.sleep(id);
                self.wake_bypassed(id);
            }
        }
    }

    /// A rate that delays a request may have been disabled since the request was sent.
    fn wake_bypassed(&mut self, id: RequestId) {
        let Some(request) = self.request(id) else {
            return;
        };
        if let Stage::Sleeping(_) = request.stage {
            let ahead = request
                .fees()
                .iter()
                .filter(|fee| fee.begins > self.ctx.now);
            let bypassed = ahead.filter(|fee| !self.is_enforced(fee));
            let limits: Vec<_> = bypassed.map(Fee::limit_id).collect();
            for limit in limits {
                self.release_sleepers(limit);
            }
        }
    }

    /// The store cannot charge the request.
    pub(super) fn refuse_unpaid(&mut self, id: RequestId) {
        let kind = AcquireErrorKind::Misconfigured;
        let unpaid = |fee: &Fee| fee.paid == Paid::Not;
        let request = self.request(id).into_iter();
        let fees = request.flat_map(Request::fees);
        let enforced = fees
            .clone()
            .find(|fee| unpaid(fee) && self.is_enforced(fee));
        if let Some(fee) = enforced {
            let error = self.refusal(fee.limit_id(), kind);
            return self.refuse_request(id, error);
        }
        let fees = fees.enumerate().filter(|(_, fee)| unpaid(fee));
        for number in fees.map(|(number, _)| number).collect::<Vec<_>>() {
            self.bypass_fee(id, number, kind);
        }
    }

    /// A rate no longer delays requests: sleeping requests continue and are refunded. Later spending counts.
    pub(super) fn release_sleepers(&mut self, limit: LimitId) {
        let now = self.ctx.now;
        let waits = |fee: &&mut Fee| fee.limit_id() == limit && fee.begins > now;
        let mut released = Vec::new();
        // Newest first: a rate with a small burst can only undo its latest reserved start.
        for (at, id) in self.sleepers.keys().rev().copied().collect::<Vec<_>>() {
            let bypassed = self.ctx.limits[limit.0].clone();
            let Some(request) = self.request_mut(id) else {
                continue;
            };
            let Some(fee) = request.fees_mut().iter_mut().find(waits) else {
                continue;
            };
            let charged = fee.clone();
            (fee.paid, fee.begins) = (Paid::Free, now);
            let kind = AcquireErrorKind::TooSoon;
            let notes = request.notes.get_or_insert_default();
            notes.bypassed.push((bypassed, kind));
            request.stage = Stage::Open;
            self.ctx.note_bypass(limit, kind);
            self.end_sleep(at, id);
            self.refund(&charged);
            released.push(id);
        }
        for id in released.into_iter().rev() {
            self.sleep(id);
            self.note_changed(id);
        }
    }

    /// Continues the requests whose sleep is over.
    pub(super) fn wake_sleepers(&mut self) {
        while let Some((&(at, id), _)) = self.sleepers.first_key_value()
            && at <= self.ctx.now
        {
            self.end_sleep(at, id);
            if let Some(request) = self.request_mut(id) {
                request.stage = Stage::Open;
                self.note_changed(id);
            }
        }
    }
}

/// Accounts: what permits owe while they are held and at their end.
impl Core {
    /// Changes the account of a permit: it spends, is charged, is settled or ends. `change` returns a cost to measure.
    pub fn change_account(
        &mut self,
        fee: &Fee,
        now: Instant,
        change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>,
    ) {
        self.ctx.now = now;
        if let Some((kind, cost)) = change(self.accounts.account_of(fee)) {
            self.note_cost(fee.limit_id(), kind, cost);
        }
        self.follow_account(fee.id);
    }

    /// The state of a rate after this permit's latest charge, including its spending since.
    pub fn account_quota(&mut self, fee: &Fee, reader: QuotaReader, now: Instant) -> Option<Quota> {
        self.ctx.now = now;
        let account = self.accounts.get(fee.id);
        let refused_until = account.and_then(Account::refused_until);
        if let Some(until) = refused_until.filter(|until| *until > now)
            && reader == QuotaReader::Client
        {
            return Some(Quota {
                reset: Some(until - now),
                ..fee.limit.quota(fee.max)
            });
        }
        let paid = account.map_or(Some(fee.paid), Account::latest)?;
        let (rate, tat, now_us) = self.state_of(paid)?;
        let unsent = account.map_or(0, Account::unsent);
        let mut quota = self.quota_at(fee, rate, tat, now_us);
        quota.remaining = u64::from(quota.remaining).saturating_sub(unsent) as u32;
        Some(quota)
    }

    fn follow_account(&mut self, id: AccountId) {
        if !self.asks_store() {
            self.report_here(id);
        }
        if let Some((fee, parts)) = self.accounts.note_change(id, self.ctx.now) {
            parts.into_iter().for_each(|part| self.pay_back(&fee, part));
        }
    }

    /// The next report, and its account.
    pub(super) fn next_report(&mut self) -> Option<(AccountId, Charge)> {
        loop {
            let id = self.accounts.next()?;
            if let Some(fee) = self.report(id) {
                return Some((id, fee.charge));
            }
        }
    }

    /// The next sum of an account, as a charge that no rate refuses, at the limit's current values.
    fn report(&mut self, id: AccountId) -> Option<Fee> {
        let mut fee = self.accounts.get(id)?.fee().clone();
        let rate = self.rate_now(&fee)?;
        let account = self.accounts.get_mut(id)?;
        fee.charge = Charge {
            rate,
            cost: account.report(rate.most_at_once())?,
            wait_us: WAIT_FOREVER_US,
            shadow: false,
            ..fee.charge
        };
        Some(fee)
    }

    /// The rate at the limit's current values.
    fn rate_now(&self, fee: &Fee) -> Option<Rate> {
        let limit = &self.ctx.limits[fee.limit_id().0];
        Some(self.rate_of(limit, &fee.key, fee.own_value)?.1)
    }

    /// Without the store, the rate of this process is charged, as set by the limit's fallback.
    fn report_here(&mut self, id: AccountId) {
        let account = self.accounts.get(id).filter(|account| account.unsent() > 0);
        let Some(fee) = account.map(|account| account.fee().clone()) else {
            return;
        };
        let usual = self.rate_now(&fee);
        let availability = self.ctx.availability;
        let rate =
            usual.and_then(|usual| self.rate_here(fee.limit_id(), usual, availability).ok()?);
        let most = rate.map_or(u32::MAX, |rate| rate.most_at_once());
        while let Some(sum) = self.accounts.get_mut(id).and_then(|one| one.report(most)) {
            let paid = rate.map_or(Paid::Free, |rate| self.spend_here(&fee, rate, sum));
            if paid == Paid::Free {
                self.note_cost(fee.limit_id(), Cost::Unsettled, sum.into());
            }
            if let Some(account) = self.accounts.get_mut(id) {
                account.on_outcome(ReportOutcome::Charged(paid));
            }
            self.note_debt(fee.limit_id(), paid, sum);
        }
    }

    /// The store is no longer asked: all reports are charged here.
    pub(super) fn report_all_here(&mut self) {
        self.accounts.report_all();
        while let Some(id) = self.accounts.next() {
            self.follow_account(id);
        }
    }

    /// The outcome of a report to the store.
    pub(super) fn on_report(&mut self, id: AccountId, outcome: ReportOutcome) {
        let Some(account) = self.accounts.get_mut(id) else {
            return;
        };
        let sum = account.in_flight();
        let unsettled = account.on_outcome(outcome);
        if let ReportOutcome::Charged(paid) = outcome {
            self.standings.note(account.fee(), paid, self.ctx.now);
            self.note_debt(id.1, paid, sum);
        }
        self.note_cost(id.1, Cost::Unsettled, unsettled);
        self.follow_account(id);
    }

    /// Records the part of a sum that is debt, which makes newcomers wait.
    fn note_debt(&mut self, limit: LimitId, paid: Paid, sum: u32) {
        if let Some((rate, tat, now_us)) = self.state_of(paid) {
            let debt = rate.debt(tat, now_us).min(sum.into());
            self.note_cost(limit, Cost::Debt, debt);
        }
    }
}

/// The view of operators.
#[cfg(feature = "operate")]
impl Core {
    /// The current state of a key of a rate, by its latest charge here.
    pub fn rate_look(&self, standing: &Standing, now: Instant) -> Option<RateLook> {
        let limit = &self.ctx.limits[standing.limit.0];
        let (max, usual) = self.rate_of(limit, &standing.key, standing.own_value)?;
        let (rate, tat, now_us) = match standing.paid {
            Paid::InStore(tat) => (usual, tat, self.clock.as_ref()?.at(now)),
            Paid::Here(tat) => (tat.rate, tat, self.ctx.local_us_at(now)),
            Paid::Not | Paid::Free => return None,
        };
        Some(RateLook {
            max,
            burst: rate.burst,
            remaining: rate.remaining(tat, now_us),
            next_us: rate.next_at_us(tat, now_us) - now_us,
            at: standing.at,
        })
    }
}

/// The refusal that lasts longer, with the quotas of both.
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
    pub(super) fn set(&mut self, key: (LimitId, Key), state: RateState, now_us: u64) {
        self.states.insert(key, state);
        if self.states.len() >= self.purge_at.max(PURGE_FROM) {
            self.states.retain(|_, state| state.us >= now_us);
            self.purge_at = 2 * self.states.len();
        }
    }
}
