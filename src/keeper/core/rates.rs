//! Rates: charges of requests, in the store or in this process; and costs of permits after admission.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Core, LocalClaim, Rates, Request, queues::Queues};
use crate::operable::{RateLook, TenantStanding};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    fallbacks::{Availability, FallbackInForce},
    keeper::demand::{Leg, RequestId},
    key::Key,
    leases::{Account, AccountId, Fee, Paid, PaidBack, QueueId, ReportOutcome},
    ledger::{
        Batch, Call, Charge, Charged, ClaimAsk, ClaimedLedger, Payer, Rate, RateState, Refund, Seq,
        Stock, Tat, WAIT_FOREVER_US, Want,
    },
    limit::{Limit, LimitId, LimitValue, MAX_LIMIT, Mode},
    part::Part,
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
        let cost = leg.cost.min(rate.burst);
        // The time in which the longest queue of such requests is served.
        let waiters = u64::from(limit.waiters());
        let longest_us = rate.time_of(cost.max(1)).saturating_mul(waiters);
        let charge = Charge {
            // A digest, needed only by a store.
            key: if self.ctx.shared {
                let ledger = self.ctx.settings.ledger_name(&leg.key, limit.name());
                (ledger + ":rate").into()
            } else {
                Arc::default()
            },
            rate,
            cost,
            wait_us: if shadow { 0 } else { wait_us.min(longest_us) },
            shadow,
        };
        let paid = if leg.cost == 0 { Paid::Free } else { Paid::Not };
        Some(Fee {
            id: AccountId(request, leg.limit),
            part: self.ctx.settings.part_of(&leg.key, limit.name()),
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
        let own_value = if self.ctx.overrides.is_empty() {
            own_value
        } else {
            self.ctx.overrides.for_key(limit, key).own_value(own_value)
        };
        let mut value = own_value.unwrap_or(limit.max().into());
        value.max = value.max.clamp(1, MAX_LIMIT);
        Some((value.max, limit.to_rate(value)?.clamped()))
    }

    /// The rate charged by this process in place of the usual one, which has this value, as set by the limit's fallback.
    /// `None`: no charge.
    pub(super) fn rate_here(
        &self,
        fee: &Fee,
        (max, usual): (u32, Rate),
        availability: Availability,
    ) -> Result<Option<Rate>, AcquireErrorKind> {
        match availability {
            Availability::Up => return Ok(Some(usual)),
            Availability::Refused => return Err(AcquireErrorKind::Misconfigured),
            Availability::Down => {}
        }
        let limit = &self.ctx.limits[fee.limit_id().0];
        // A rate keeps its count and period in lowest terms, so its count is not the value.
        let own = LimitValue::new(max).burst(usual.burst);
        let is_own = limit.to_rate(limit.max()).map(Rate::clamped) != Some(usual);
        match self
            .ctx
            .fallback(fee.limit_id(), fee.part, is_own.then_some(own))
        {
            FallbackInForce::Reject => Err(AcquireErrorKind::Unavailable),
            FallbackInForce::Allow => Ok(None),
            FallbackInForce::Local(value) => Ok(limit.to_rate(value).map(Rate::clamped)),
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
            remaining: fee.charge.rate.left_of(fee.charge.cost, rest_us),
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
        let (rate, tat, now_us) = self.state_of(fee.part, fee.paid)?;
        Some(self.quota_at(fee, rate, tat, now_us))
    }

    /// The state of a rate after a refund of the charge.
    pub(super) fn quota_without(&self, fee: &Fee) -> Option<Quota> {
        let (rate, tat, now_us) = self.state_of(fee.part, fee.paid)?;
        Some(self.quota_at(fee, rate, tat.without(fee.paid_cost()), now_us))
    }

    /// The state as left by the charge, and the time by the charging clock.
    fn state_of(&self, part: Part, paid: Paid) -> Option<(Rate, Tat, u64)> {
        match paid {
            Paid::InStore(tat) => Some((tat.rate, tat, self.store_us(part, self.ctx.now)?)),
            Paid::Here(tat) => Some((tat.rate, tat, self.ctx.local_us())),
            Paid::Not | Paid::Free => None,
        }
    }

    /// The store's time at this moment.
    fn store_us(&self, part: Part, at: Instant) -> Option<u64> {
        Some(self.links[part.number()].clock?.at(at))
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
            Paid::InStore(_) if !self.ctx.asks_store(fee.part) => {}
            Paid::InStore(charged) => {
                let key = fee.charge.key.clone();
                self.link(fee.part)
                    .refunds
                    .push(Refund { key, cost, charged });
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
    pub(super) fn refund_unclaimed(&mut self, part: Part, charges: &[Charge], charged: &[Charged]) {
        let refunds = charges.iter().zip(charged).filter_map(|(charge, charged)| {
            let Charged::Until { tat, .. } = *charged else {
                return None;
            };
            Some(Refund {
                key: charge.key.clone(),
                cost: charge.cost,
                charged: tat,
            })
        });
        self.link(part).refunds.extend(refunds);
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
    pub(super) fn end_sleep(&mut self, until: Instant, id: RequestId) {
        if let Some(limit) = self.sleepers.remove(&(until, id)) {
            self.ctx.measure(limit, Measure::Waiting(-1.0));
        }
    }
}

/// The ledgers and rates of this process.
struct Here<'a> {
    queues: &'a mut Queues,
    rates: &'a mut Rates,
    now_us: u64,
    asked: &'a [QueueId],
    batches: &'a [Batch],
    /// In this process no waiter is dead, so sweeping a queue changes nothing.
    swept: bool,
    charged: &'a [(LimitId, Key)],
}

impl Stock for Here<'_> {
    fn ledger(&mut self, batch: usize) -> ClaimedLedger<'_> {
        ClaimedLedger {
            ledger: self.queues.without_listing(self.asked[batch]).ledger_here(),
            batch: &self.batches[batch],
            swept: &mut self.swept,
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
    pub fn clear(&mut self) {
        self.waived.clear();
        self.claim.charges.clear();
        self.claim.asks.clear();
        self.rates.clear();
        self.leg_of_ask.clear();
        self.queues.clear();
    }

    pub fn charge(&mut self, fee: &Fee, charge: Charge) {
        self.claim.charges.push(charge);
        self.rates.push((fee.limit_id(), fee.key.clone()));
    }

    /// The batch of the next ask, for this queue and this leg.
    pub fn next_batch(&mut self, queue: QueueId, leg: usize) -> &mut Batch {
        self.queues.push(queue);
        self.leg_of_ask.push(leg);
        if self.batches.len() < self.queues.len() {
            self.batches.push(Batch::default());
        }
        &mut self.batches[self.queues.len() - 1]
    }

    pub fn ask(&mut self, seq: Seq, want: Want, payer: Option<Payer>) {
        let batch = self.claim.asks.len();
        self.claim.asks.push(ClaimAsk {
            batch,
            seq,
            want,
            payer,
        });
    }
}

/// Claims on ledgers and rates of this process.
impl Core {
    /// Runs the claim. The queues have to be listed again afterwards.
    pub(super) fn run_local_claim(&mut self) {
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
            swept: false,
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

    /// Charges a cost to a rate in this process, whatever its debt.
    fn spend_here(&mut self, fee: &Fee, rate: Rate, cost: u32) -> Paid {
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
        let (rate, tat, now_us) = self.state_of(fee.part, paid)?;
        let unsent = account.map_or(0, Account::unsent);
        let mut quota = self.quota_at(fee, rate, tat, now_us);
        quota.remaining = u64::from(quota.remaining).saturating_sub(unsent) as u32;
        Some(quota)
    }

    fn follow_account(&mut self, id: AccountId) {
        let part = self.accounts.get(id).map(|account| account.fee().part);
        if part.is_some_and(|part| !self.ctx.asks_store(part)) {
            self.report_here(id);
        }
        if let Some((fee, parts)) = self.accounts.note_change(id, self.ctx.now) {
            parts.into_iter().for_each(|part| self.pay_back(&fee, part));
        }
    }

    /// The next report to this part of the store, and its account.
    pub(super) fn next_report(&mut self, part: Part) -> Option<(AccountId, Charge)> {
        loop {
            let id = self.accounts.next(part)?;
            if let Some(fee) = self.report(id) {
                return Some((id, fee.charge));
            }
        }
    }

    /// The next sum of an account, as a charge that no rate refuses, at the limit's current values.
    fn report(&mut self, id: AccountId) -> Option<Fee> {
        let mut fee = self.accounts.get(id)?.fee().clone();
        let (_, rate) = self.rate_now(&fee)?;
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

    /// The value and the rate at the limit's current values.
    fn rate_now(&self, fee: &Fee) -> Option<(u32, Rate)> {
        let limit = &self.ctx.limits[fee.limit_id().0];
        self.rate_of(limit, &fee.key, fee.own_value)
    }

    /// Without the store, the rate of this process is charged, as set by the limit's fallback.
    fn report_here(&mut self, id: AccountId) {
        let account = self.accounts.get(id).filter(|account| account.unsent() > 0);
        let Some(fee) = account.map(|account| account.fee().clone()) else {
            return;
        };
        let usual = self.rate_now(&fee);
        let availability = self.ctx.availability(fee.part);
        let rate = usual.and_then(|usual| self.rate_here(&fee, usual, availability).ok()?);
        let most = rate.map_or(u32::MAX, |rate| rate.most_at_once());
        while let Some(sum) = self.accounts.get_mut(id).and_then(|one| one.report(most)) {
            let paid = rate.map_or(Paid::Free, |rate| self.spend_here(&fee, rate, sum));
            if paid == Paid::Free {
                self.note_cost(fee.limit_id(), Cost::Unsettled, sum.into());
            }
            if let Some(account) = self.accounts.get_mut(id) {
                account.on_outcome(ReportOutcome::Charged(paid));
            }
            self.note_debt(&fee, paid, sum);
        }
    }

    /// The store is no longer asked: all reports are charged here.
    pub(super) fn report_all_here(&mut self, part: Part) {
        self.accounts.report_all();
        while let Some(id) = self.accounts.next(part) {
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
            let fee = account.fee().clone();
            self.standings.note(&fee, paid, self.ctx.now);
            self.note_debt(&fee, paid, sum);
        }
        self.note_cost(id.1, Cost::Unsettled, unsettled);
        self.follow_account(id);
    }

    /// Records the part of a sum that is debt, which makes newcomers wait.
    fn note_debt(&mut self, fee: &Fee, paid: Paid, sum: u32) {
        if let Some((rate, tat, now_us)) = self.state_of(fee.part, paid) {
            let debt = rate.debt(tat, now_us).min(sum.into());
            self.note_cost(fee.limit_id(), Cost::Debt, debt);
        }
    }
}

/// The view of operators.
impl Core {
    /// The current state of a key of a rate, by its latest charge here.
    pub fn rate_look(&self, standing: &TenantStanding, now: Instant) -> Option<RateLook> {
        let limit = &self.ctx.limits[standing.limit.0];
        let (max, usual) = self.rate_of(limit, &standing.key, standing.own_value)?;
        let (rate, tat, now_us) = match standing.paid {
            Paid::InStore(tat) => {
                let part = self.ctx.settings.part_of(&standing.key, limit.name());
                (usual, tat, self.store_us(part, now)?)
            }
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
    let (mut harsher, milder) = if other.retry_after() > one.retry_after() {
        (other, one)
    } else {
        (one, other)
    };
    harsher.details.quotas.extend(milder.details.quotas);
    harsher
}

impl Rates {
    fn set(&mut self, key: (LimitId, Key), state: RateState, now_us: u64) {
        self.states.insert(key, state);
        if self.states.len() >= self.purge_at.max(PURGE_FROM) {
            self.states.retain(|_, state| state.us >= now_us);
            self.purge_at = 2 * self.states.len();
        }
    }
}
