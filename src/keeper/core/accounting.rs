//! Accounting: what rates charge and give back, and what permits owe them while they are held and at their end.
//!
//! A rate is charged in the store, or in this process if the limit's fallback says so. Each charge keeps the state that
//! it has left, and is refunded where it was made.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::link::Link;
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    fallbacks::{Availability, FallbackInForce},
    keeper::{context::Context, demand::Leg, registry::Registry},
    key::Key,
    leases::{Account, AccountId, Accounts, Fee, Paid, PaidBack, ReportOutcome},
    ledger::{Charge, Charged, Rate, RateState, Refund, Tat, WAIT_FOREVER_US},
    limit::{LimitId, LimitValue, Mode},
    operable::{RateLook, Standings, TenantStanding},
    part::{Part, Parts},
    status::Quota,
    telemetry::Cost,
};

/// Number of keys in this process at which purging of idle keys starts.
const PURGE_FROM: usize = 1_024;

pub(super) struct Accounting {
    /// The costs of permits.
    pub accounts: Accounts,
    /// The last charges.
    pub standings: Standings,
    /// The rates of this process, used without a store or while it is down.
    rates: HashMap<(LimitId, Key), RateState>,
    purge_at: usize,
}

/// The state of a rate after a charge, at a moment of the clock by which it was charged.
#[derive(Clone, Copy)]
pub(super) struct Level {
    rate: Rate,
    tat: Tat,
    now_us: u64,
}

impl Level {
    /// Now, after the charge of a request. `None`: nothing was charged, or the store's time is unknown.
    pub fn of(fee: &Fee, ctx: &Context, links: &[Link]) -> Option<Self> {
        Self::after(fee.paid, ctx.now, ctx, &links[fee.part])
    }

    fn after(paid: Paid, at: Instant, ctx: &Context, link: &Link) -> Option<Self> {
        let (tat, now_us) = match paid {
            Paid::InStore(tat) => (tat, link.connection.store_us(at)?),
            Paid::Here(tat) => (tat, ctx.local_us_at(at)),
            Paid::Not | Paid::Free => return None,
        };
        let rate = tat.rate;
        Some(Self { rate, tat, now_us })
    }

    pub fn quota(self, fee: &Fee) -> Quota {
        let next_us = self.next_us();
        Quota {
            remaining: self.remaining(),
            reset: (next_us > 0).then(|| Duration::from_micros(next_us)),
            ..fee.limit.quota(fee.max)
        }
    }

    /// Once the charge is refunded.
    pub fn quota_without(self, fee: &Fee) -> Quota {
        let tat = self.tat.without(fee.paid_cost());
        Self { tat, ..self }.quota(fee)
    }

    fn remaining(self) -> u32 {
        self.rate.remaining(self.tat, self.now_us)
    }

    fn next_us(self) -> u64 {
        self.rate.next_at_us(self.tat, self.now_us) - self.now_us
    }

    /// The current state of a key, for operators, by its latest charge here.
    pub fn look(
        standing: &TenantStanding,
        ctx: &Context,
        links: &[Link],
        now: Instant,
    ) -> Option<RateLook> {
        let TenantStanding { limit, key, .. } = standing;
        let (max, usual) = rate_of(&ctx.registry, *limit, key, standing.own_value)?;
        let part = (ctx.settings).part_of(key, ctx.registry.limit(*limit).name());
        let mut level = Self::after(standing.paid, now, ctx, &links[part])?;
        if let Paid::InStore(_) = standing.paid {
            level.rate = usual;
        }
        Some(RateLook {
            max,
            burst: level.rate.burst,
            remaining: level.remaining(),
            next_us: level.next_us(),
            at: standing.at,
        })
    }
}

/// The fee of a request's leg, if its limit is a rate.
pub(super) fn fee_of(ctx: &Context, request: u64, leg: &Leg, shadow: bool) -> Option<Fee> {
    let limit = ctx.registry.limit(leg.limit).clone();
    let (max, rate) = rate_of(&ctx.registry, leg.limit, &leg.key, leg.value)?;
    let wait_us = leg.wait.as_micros() as u64;
    let cost = leg.cost.min(rate.burst);
    // The time in which the longest queue of such requests is served.
    let waiters = u64::from(limit.waiters());
    let longest_us = rate.time_of(cost.max(1)).saturating_mul(waiters);
    let charge = Charge {
        // A digest, needed only by a store.
        key: if ctx.shared {
            (ctx.settings.ledger_name(&leg.key, limit.name()) + ":rate").into()
        } else {
            Default::default()
        },
        rate,
        cost,
        wait_us: if shadow { 0 } else { wait_us.min(longest_us) },
        shadow,
    };
    let paid = if leg.cost == 0 { Paid::Free } else { Paid::Not };
    Some(Fee {
        id: AccountId(request, leg.limit),
        part: ctx.settings.part_of(&leg.key, limit.name()),
        limit,
        key: leg.key.clone(),
        max,
        own_value: leg.value,
        wait: leg.wait,
        until: leg.until,
        clamps: leg.clamps,
        charge,
        paid,
        begins: ctx.now,
    })
}

/// The value of a limit for a key, and the rate, if the limit is one.
fn rate_of(
    registry: &Registry,
    id: LimitId,
    key: &Key,
    own: Option<LimitValue>,
) -> Option<(u32, Rate)> {
    let limit = registry.limit(id);
    let own = registry.own_value(limit, key, own);
    let mut value = own.unwrap_or(limit.max().into());
    value.max = value.max.clamp(1, limit.most());
    Some((value.max, limit.to_rate(value)?.clamped()))
}

/// The rate charged by this process in place of the usual one, which has this value, as set by the limit's fallback.
/// `None`: no charge.
pub(super) fn rate_here(
    ctx: &Context,
    fee: &Fee,
    (max, usual): (u32, Rate),
    availability: Availability,
) -> Result<Option<Rate>, AcquireErrorKind> {
    match availability {
        Availability::Up => return Ok(Some(usual)),
        Availability::Refused => return Err(AcquireErrorKind::Misconfigured),
        Availability::Down => {}
    }
    let limit = ctx.registry.limit(fee.limit_id());
    // A rate keeps its count and period in lowest terms, so its count is not the value.
    let own = LimitValue::new(max).burst(usual.burst);
    let is_own = limit.to_rate(limit.max()).map(Rate::clamped) != Some(usual);
    match ctx.fallback(fee.limit_id(), fee.part, is_own.then_some(own)) {
        FallbackInForce::Reject => Err(AcquireErrorKind::Unavailable),
        FallbackInForce::Allow => Ok(None),
        FallbackInForce::Local(value) => Ok(limit.to_rate(value).map(Rate::clamped)),
    }
}

/// Whether the rate was enforced when the request arrived, and is now.
pub(super) fn is_enforced(ctx: &Context, fee: &Fee) -> bool {
    !fee.charge.shadow && ctx.registry.limit(fee.limit_id()).current_mode() == Mode::Enforce
}

/// The refusal by a rate that would admit the request after `rest_us`.
pub(super) fn too_soon(fee: &Fee, rest_us: u64) -> AcquireError {
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

/// Rates of this process, and refunds.
impl Accounting {
    pub fn new(parts: Parts) -> Self {
        Self {
            accounts: Accounts::new(parts),
            standings: Standings::default(),
            rates: HashMap::new(),
            purge_at: PURGE_FROM,
        }
    }

    pub fn rate(&mut self, key: &(LimitId, Key)) -> Option<&mut RateState> {
        self.rates.get_mut(key)
    }

    pub fn set_rate(&mut self, key: (LimitId, Key), state: RateState, now_us: u64) {
        self.rates.insert(key, state);
        if self.rates.len() >= self.purge_at {
            self.rates.retain(|_, state| state.us >= now_us);
            self.purge_at = PURGE_FROM.max(2 * self.rates.len());
        }
    }

    /// Charges a cost to a rate in this process, whatever its debt.
    fn charge_here(&mut self, fee: &Fee, rate: Rate, cost: u32, ctx: &Context) -> Paid {
        let (key, now_us) = ((fee.limit_id(), fee.key.clone()), ctx.local_us());
        let before = self.rates.get(&key).copied();
        let (charged, after) = rate.charge(before, now_us, cost, WAIT_FOREVER_US);
        let Charged::Until { tat, .. } = charged else {
            return Paid::Free;
        };
        self.set_rate(key, after, now_us);
        self.standings.note(fee, Paid::Here(tat), ctx.now);
        Paid::Here(tat)
    }

    /// Refunds the charge of a refused or dropped request.
    pub fn refund(&mut self, fee: &Fee, ctx: &Context, links: &mut [Link]) {
        let (cost, paid) = (fee.paid_cost(), fee.paid);
        self.pay_back(fee, PaidBack { cost, paid }, ctx, links);
    }

    /// Refunds part of a charge.
    fn pay_back(&mut self, fee: &Fee, part: PaidBack, ctx: &Context, links: &mut [Link]) {
        let PaidBack { cost, paid } = part;
        match paid {
            // While the store is down it cannot refund.
            Paid::InStore(charged) if ctx.asks_store(fee.part) => {
                let key = fee.charge.key.clone();
                let refund = Refund { key, cost, charged };
                links[fee.part].refunds.push(refund);
            }
            Paid::Here(charged) => {
                let Some(state) = self.rates.get_mut(&(fee.limit_id(), fee.key.clone())) else {
                    return;
                };
                *state = state.refund(charged, cost, ctx.local_us());
            }
            Paid::InStore(_) | Paid::Not | Paid::Free => return,
        }
        self.standings.refund(fee, paid, |tat| tat.without(cost));
    }
}

/// Accounts. Each change of one is [followed](Self::follow).
impl Accounting {
    pub fn follow(&mut self, id: AccountId, ctx: &mut Context, links: &mut [Link]) {
        let part = self.accounts.get(id).map(|account| account.fee().part);
        if part.is_some_and(|part| !ctx.asks_store(part)) {
            self.report_here(id, ctx, links);
        }
        if let Some((fee, parts)) = self.accounts.note_change(id, ctx.now) {
            for part in parts {
                self.pay_back(&fee, part, ctx, links);
            }
        }
    }

    /// The state of a rate after this permit's latest charge, including its spending since.
    pub fn quota(&self, fee: &Fee, ctx: &Context, links: &[Link]) -> Option<Quota> {
        let account = self.accounts.get(fee.id);
        let paid = account.map_or(Some(fee.paid), Account::latest)?;
        let level = Level::after(paid, ctx.now, ctx, &links[fee.part])?;
        let unsent = account.map_or(0, Account::unsent);
        let mut quota = level.quota(fee);
        quota.remaining = u64::from(quota.remaining).saturating_sub(unsent) as u32;
        Some(quota)
    }

    /// The next report to this part of the store, and its account: a charge that no rate refuses, at the limit's current
    /// values.
    pub fn next_report(&mut self, part: Part, registry: &Registry) -> Option<(AccountId, Charge)> {
        loop {
            let id = self.accounts.next(part)?;
            let Some(account) = self.accounts.get_mut(id) else {
                continue;
            };
            let fee = account.fee();
            let key = fee.charge.key.clone();
            if let Some((_, rate)) = rate_of(registry, id.1, &fee.key, fee.own_value)
                && let Some(cost) = account.report(rate.most_at_once())
            {
                let charge = Charge {
                    rate,
                    cost,
                    wait_us: WAIT_FOREVER_US,
                    shadow: false,
                    key,
                };
                return Some((id, charge));
            }
        }
    }

    /// Without the store, the rate of this process is charged, as set by the limit's fallback.
    fn report_here(&mut self, id: AccountId, ctx: &mut Context, links: &[Link]) {
        let account = self.accounts.get(id).filter(|account| account.unsent() > 0);
        let Some(fee) = account.map(|account| account.fee().clone()) else {
            return;
        };
        let usual = rate_of(&ctx.registry, id.1, &fee.key, fee.own_value);
        let availability = ctx.availability(fee.part);
        let rate = usual.and_then(|usual| rate_here(ctx, &fee, usual, availability).ok()?);
        let most = rate.map_or(u32::MAX, |rate| rate.most_at_once());
        while let Some(sum) = self.accounts.get_mut(id).and_then(|one| one.report(most)) {
            let paid = rate.map_or(Paid::Free, |rate| self.charge_here(&fee, rate, sum, ctx));
            if paid == Paid::Free {
                ctx.note_cost(id.1, Cost::Unsettled, sum.into());
            }
            if let Some(account) = self.accounts.get_mut(id) {
                account.on_outcome(ReportOutcome::Charged(paid));
            }
            note_debt(&fee, paid, sum, ctx, links);
        }
    }

    /// The store is no longer asked: all reports are charged here.
    pub fn report_all_here(&mut self, part: Part, ctx: &mut Context, links: &mut [Link]) {
        self.accounts.report_all();
        while let Some(id) = self.accounts.next(part) {
            self.follow(id, ctx, links);
        }
    }

    /// The outcome of a report to the store.
    pub fn on_report(
        &mut self,
        id: AccountId,
        outcome: ReportOutcome,
        ctx: &mut Context,
        links: &mut [Link],
    ) {
        let Some(account) = self.accounts.get_mut(id) else {
            return;
        };
        let sum = account.in_flight();
        let unsettled = account.on_outcome(outcome);
        if let ReportOutcome::Charged(paid) = outcome {
            self.standings.note(account.fee(), paid, ctx.now);
            note_debt(account.fee(), paid, sum, ctx, links);
        }
        ctx.note_cost(id.1, Cost::Unsettled, unsettled);
        self.follow(id, ctx, links);
    }
}

/// Records the part of a sum that is debt, which makes newcomers wait.
fn note_debt(fee: &Fee, paid: Paid, sum: u32, ctx: &mut Context, links: &[Link]) {
    if let Some(level) = Level::after(paid, ctx.now, ctx, &links[fee.part]) {
        let debt = level.rate.debt(level.tat, level.now_us).min(sum.into());
        ctx.note_cost(fee.limit_id(), Cost::Debt, debt);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        keeper::tests::{leg, settings},
        limit::{Fallback, Limit},
        telemetry::LimitMeter,
    };
    use std::sync::Arc;

    /// Five at once, and one more every 100 ms.
    const RATE: Limit = Limit::rate("rate", 10, Duration::from_secs(1)).burst(5);

    struct Scene {
        accounting: Accounting,
        ctx: Context,
        links: [Link; 1],
    }

    impl Scene {
        fn new(limit: &Limit) -> Self {
            let (settings, now) = (settings(0), Instant::now());
            let links = [Link::new(Part::default(), &settings, now)];
            let accounting = Accounting::new(settings.parts);
            let mut ctx = Context::new(settings, true, now);
            let meter = Arc::new(LimitMeter::new("test", limit.name()));
            ctx.registry.add(limit, meter, now);
            Self {
                accounting,
                ctx,
                links,
            }
        }

        /// The fee of a request, charged in this process.
        fn charge(&mut self, cost: u32) -> Fee {
            let leg = Leg {
                cost,
                ..leg(0, Duration::ZERO)
            };
            let mut fee = fee_of(&self.ctx, 1, &leg, false).expect("a rate");
            let rate = fee.charge.rate;
            fee.paid = self.accounting.charge_here(&fee, rate, cost, &self.ctx);
            fee
        }

        fn refund(&mut self, fee: &Fee) {
            self.accounting.refund(fee, &self.ctx, &mut self.links);
        }

        fn level(&self, fee: &Fee) -> Level {
            Level::of(fee, &self.ctx, &self.links).expect("charged")
        }
    }

    #[test]
    fn a_level_tells_what_is_left_and_what_a_refund_would_leave() {
        let mut scene = Scene::new(&RATE);
        for (cost, left, without, reset_ms) in
            [(3, 2, 5, None), (1, 1, 2, None), (4, 0, 1, Some(400))]
        {
            let fee = scene.charge(cost);
            let level = scene.level(&fee);
            let (now, before) = (level.quota(&fee), level.quota_without(&fee));
            assert_eq!((now.remaining, before.remaining), (left, without));
            assert_eq!(now.reset, reset_ms.map(Duration::from_millis));
            assert_eq!(now.max, 10);
        }
        let fee = scene.charge(1);
        scene.ctx.now += Duration::from_millis(700);
        assert_eq!(scene.level(&fee).quota(&fee).remaining, 3);
        let unpaid = Fee {
            paid: Paid::Free,
            ..fee
        };
        assert!(Level::of(&unpaid, &scene.ctx, &scene.links).is_none());
    }

    #[test]
    fn a_charge_is_refunded_where_it_was_made() {
        let mut scene = Scene::new(&RATE);
        let fee = scene.charge(3);
        scene.refund(&fee);
        let again = scene.charge(5);
        assert_eq!(
            scene.level(&again).quota(&again).reset,
            Some(Duration::from_millis(100))
        );
        let Paid::Here(tat) = fee.paid else {
            panic!("charged elsewhere");
        };
        let paid = Paid::InStore(tat);
        let in_store = Fee { paid, ..fee };
        scene.refund(&in_store);
        let costs = scene.links[0].refunds.iter().map(|refund| refund.cost);
        assert_eq!(costs.collect::<Vec<_>>(), [3]);
        let (part, now) = (Part::default(), scene.ctx.now);
        let registry = &mut scene.ctx.registry;
        registry.set_availability(part, Availability::Down, now);
        scene.refund(&in_store);
        assert_eq!(scene.links[0].refunds.len(), 1, "it cannot refund now");
    }

    #[test]
    fn the_fallback_sets_the_rate_of_this_process() {
        use Availability::{Down, Refused, Up};
        for (fallback, availability, every_us) in [
            (Fallback::Reject, Up, Ok(Some(100_000))),
            (Fallback::Reject, Down, Err(AcquireErrorKind::Unavailable)),
            (Fallback::Allow, Down, Ok(None)),
            (Fallback::Local(2), Down, Ok(Some(500_000))),
            (
                Fallback::Allow,
                Refused,
                Err(AcquireErrorKind::Misconfigured),
            ),
        ] {
            let mut scene = Scene::new(&RATE.fallback(fallback));
            let fee = scene.charge(1);
            let (part, now) = (Part::default(), scene.ctx.now);
            let registry = &mut scene.ctx.registry;
            registry.set_availability(part, availability, now);
            let rate = rate_here(&scene.ctx, &fee, (10, fee.charge.rate), availability);
            let one_every = rate.map(|rate| rate.map(|rate| rate.time_of(1)));
            assert_eq!(one_every, every_us, "{availability:?}");
        }
    }

    #[test]
    fn rates_of_idle_keys_are_purged() {
        let mut scene = Scene::new(&RATE);
        let rate = scene.charge(1).charge.rate;
        let (_, state) = rate.charge(None, 0, 1, WAIT_FOREVER_US);
        let now_us = state.us + 1;
        let (_, busy) = rate.charge(None, now_us, 1, WAIT_FOREVER_US);
        let set = |scene: &mut Scene, key: usize, state| {
            let key = (LimitId(0), Key::from(key as u64));
            scene.accounting.set_rate(key, state, now_us);
        };
        set(&mut scene, 0, busy);
        (1..PURGE_FROM - 2).for_each(|key| set(&mut scene, key, state));
        assert_eq!(scene.accounting.rates.len(), PURGE_FROM - 1);
        set(&mut scene, PURGE_FROM, state);
        assert_eq!(scene.accounting.rates.len(), 1, "of the busy one");
    }

    #[test]
    fn a_refusal_tells_when_to_come_back() {
        let mut scene = Scene::new(&RATE);
        let fee = scene.charge(2);
        let error = too_soon(&fee, 150_000);
        assert_eq!(error.kind(), AcquireErrorKind::TooSoon);
        assert_eq!(error.retry_after(), Some(Duration::from_millis(150)));
        assert_eq!(error.details.quotas[0].remaining, 0);
    }
}
