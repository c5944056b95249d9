//! Charges of a permit at a rate while it is held: further charges before the work, spending during the work, and the
//! settlement at the end.
//!
//! Tests: `tests/semaphore/charges.rs`.

use std::{
    fmt,
    future::{Future, poll_fn, ready},
};

use futures_util::future::Either;

use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{Demand, Leg, PermitRequest, Taken},
    key::Key,
    leases::{Account, Fee, Settled},
    limit::Limit,
    permit::{Permit, Share, WeakShare},
    status::Quota,
    telemetry::{Cost, UnknownRates},
};

/// The budget of a permit at a rate: charges it before the work, spends during the work, and settles at the end.
///
/// A [rate](crate::Limit::rate) charges a permit when it is acquired. For work whose cost is known only later, such as the
/// tokens of a language model, a budget charges the known part in advance, adds up spending, and settles the difference to
/// the true cost: see [Token budgets](crate::guide::tokens).
///
/// Created by [`Permit::budget`], [`Slot::budget`](crate::Slot::budget) and [`Hold::budget`](crate::Hold::budget), which
/// fail if the permit has no rate of that name. A budget does not own its permit: once the permit is released, its methods
/// have no effect.
///
/// A rate of the semaphore or the layer that does not apply to this permit has a budget too, which charges nothing and
/// never refuses. A rate does not apply if its [mode](crate::Mode) is off, or if the request has no key for it
/// ([`Scope::require_key`](crate::Scope::require_key) refuses such requests on arrival). In a layer of a configuration,
/// every rate of the file has a budget, whether the request's route has the rate or not.
///
/// ```
/// # use std::time::Duration;
/// # use tower_turnstile::{AcquireErrorKind, Limit, Limiter};
/// const TOKENS: Limit = Limit::rate("tokens", 100_000, Duration::from_secs(60)).burst(20_000);
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let permit = Limiter::in_memory().semaphore(&TOKENS, "acme")?.acquire().await?;
/// let budget = permit.budget(&TOKENS)?;
/// budget.charge(1_500).await?; // the prompt
/// budget.spend(300); // while the answer comes
/// budget.settle(1_790); // as the answer says in the end
///
/// let refused = budget.charge(20_001).await.unwrap_err();
/// assert_eq!(refused.kind(), AcquireErrorKind::InvalidCost);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Budget(Option<PermitRate>);

/// A rate that charges a permit.
#[derive(Clone)]
struct PermitRate {
    permit: WeakShare,
    /// Index of the rate among the permit's charges at admission.
    index: usize,
}

impl Permit {
    /// Returns the budget of the permit at a rate, by the limit or its name.
    ///
    /// # Errors
    ///
    /// [`UnknownRate`](AcquireErrorKind::UnknownRate) if no rate of the permit has this name, since a typo must not turn a
    /// budget off. The error is counted (`turnstile_unknown_rate_total`) and logged: the first for each name at warn
    /// level, later ones at debug level.
    pub fn budget(&self, limit: impl AsRef<str>) -> Result<Budget, AcquireError> {
        let (share, limit) = (self.share(), limit.as_ref());
        let budget = share.downgrade().budget(limit);
        let is_rate = |of: &Limit| of.name() == limit && of.period().is_some();
        let exempt = || share.leases.is_exempt_from(is_rate).then_some(Budget::NONE);
        let unknown = || unknown_rate(&share.keeper.unknown_rates, limit);
        budget.or_else(exempt).ok_or_else(unknown)
    }
}

impl Budget {
    /// The budget of a rate that does not apply.
    pub(crate) const NONE: Self = Self(None);

    /// Charges the rate once more, and waits or is refused like a new request. Returns the units charged.
    ///
    /// For a cost that is known before the work begins, such as the cost of a prompt that had to be read first. It waits for
    /// as long as the permit's request could have: not at all after [`try_acquire`](crate::Semaphore::try_acquire).
    ///
    /// A rate with [`clamp_cost`](crate::Scope::clamp_cost) charges at most its burst; [`spend`](Self::spend) the rest. Nothing
    /// is charged if the rate does not apply to the permit, or its [fallback](crate::Limit::fallback) allows everything.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Semaphore::acquire`](crate::Semaphore::acquire), and
    /// [`InvalidCost`](AcquireErrorKind::InvalidCost) if the cost is above the rate's burst. The permit does not change.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future refunds the charge, if it was made.
    pub fn charge(
        &self,
        cost: u32,
    ) -> impl Future<Output = Result<u32, AcquireError>> + Send + Unpin + use<> {
        let asked = self.0.as_ref().and_then(|rate| {
            let keeper = rate.permit.upgrade()?.keeper.clone();
            let demand = Demand::One(leg(rate.fee(), cost));
            let request = PermitRequest::new(keeper, demand);
            Some(Box::pin(charged(request, rate.clone())))
        });
        asked.map_or(Either::Left(ready(Ok(0))), Either::Right)
    }

    /// Adds to the permit's cost. Never waits, and is never refused.
    ///
    /// The process reports sums to the store about once a second, and when the permit is released. A report may put the
    /// rate into debt: the rate then admits no request until the debt has drained, and refusals have an exact
    /// [`retry_after`](AcquireError::retry_after). A debt is at most the amount that drains in 24 hours.
    ///
    /// A sum is sent only once: if its answer is lost, the sum may not count. While the store is down, the
    /// [fallback](crate::Limit::fallback) is charged instead.
    pub fn spend(&self, cost: u32) {
        self.change(|account| {
            let counts = account.spend(cost);
            counts.then_some((Cost::Spent, cost.into()))
        });
    }

    /// Sets the permit's total cost, for its acquisition, charges and spending together. Only the first call counts. Later
    /// spending is ignored, and later charges are refunded.
    ///
    /// If the total exceeds the sum of charges and spending, the difference is charged as if it had been
    /// [spent](Self::spend). If the total is smaller, the difference is refunded unless it has drained, since an amount
    /// that has drained may already have admitted other requests. While nothing drains, the whole difference is refunded.
    /// See [Token budgets](crate::guide::tokens) for details.
    ///
    /// Without a settlement, the charges and the spending stand.
    pub fn settle(&self, actual: u64) {
        self.change(|account| match account.settle(actual)? {
            Settled::Up(more) => Some((Cost::SettledUp, more)),
            Settled::Down(less) => Some((Cost::SettledDown, less)),
        });
    }

    /// Returns the units left of the rate after the latest charge of this permit.
    ///
    /// For work that stops before it runs into debt. Later charges of other permits are not included. `None` if nothing was
    /// charged, or the permit is released.
    pub fn remaining(&self) -> Option<u32> {
        let rate = self.0.as_ref()?;
        let share = rate.permit.upgrade()?;
        let quota = share.keeper.quota_of(rate.fee());
        quota.map(|quota| quota.remaining)
    }

    fn change(&self, change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>) {
        if let Some(rate) = &self.0
            && let Some(share) = rate.permit.upgrade()
        {
            rate.change(&share, change);
        }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = self.0.as_ref().map(|rate| rate.fee().limit.name());
        f.debug_struct("Budget")
            .field("limit", &limit)
            .finish_non_exhaustive()
    }
}

impl PermitRate {
    fn fee(&self) -> &Fee {
        &self.permit.leases.fees()[self.index]
    }

    /// Changes the permit's account at this rate.
    fn change(&self, share: &Share, change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>) {
        share.leases.note_account();
        share.keeper.change_account(self.fee(), change);
    }

    /// Returns the units charged.
    fn add_charges(&self, share: &Share, taken: Taken) -> u32 {
        let charges = taken.notes.map(|notes| notes.fees).unwrap_or_default();
        self.change(share, |account| {
            let charges = charges.iter();
            let excess = charges.map(|charge| account.charge(charge.paid_cost(), charge.paid));
            Some((Cost::SettledDown, excess.sum()))
        });
        charges.iter().map(Fee::paid_cost).sum()
    }
}

impl Share {
    /// The state of the permit's rates, which may be newer than at its admission.
    pub(crate) fn quotas(&self) -> impl Iterator<Item = Quota> {
        let fees = self.leases.open_accounts().iter();
        fees.filter_map(|fee| self.keeper.quota_of(fee))
    }
}

impl WeakShare {
    /// The budget at the rate of this name; `None` if it does not charge the permit.
    pub(crate) fn budget(&self, limit: &str) -> Option<Budget> {
        let mut fees = self.leases.fees().iter();
        let index = fees.position(|fee| fee.limit.name() == limit)?;
        let permit = self.clone();
        Some(Budget(Some(PermitRate { permit, index })))
    }
}

/// The error of a budget at a rate that the permit does not have. It is recorded.
pub(crate) fn unknown_rate(unknown: &UnknownRates, limit: &str) -> AcquireError {
    let error = Limit::unknown(limit, AcquireErrorKind::UnknownRate);
    unknown.note(error.limit_name());
    error
}

/// The request's cost, once it is charged.
async fn charged(mut request: PermitRequest, rate: PermitRate) -> Result<u32, AcquireError> {
    let granted = poll_fn(|cx| request.poll(cx)).await;
    match (granted, rate.permit.upgrade()) {
        (Ok(granted), Some(share)) => Ok(rate.add_charges(&share, granted.taken)),
        // The permit was released meanwhile.
        (Ok(granted), None) => {
            granted.keeper.cancel_granted(granted.taken);
            Ok(0)
        }
        (Err(mut error), _) => {
            error.details.is_shared = rate.fee().key == Key::SHARED;
            Err(error)
        }
    }
}

fn leg(fee: &Fee, cost: u32) -> Leg {
    Leg {
        limit: fee.limit_id(),
        key: fee.key.clone(),
        wait: fee.wait,
        until: fee.until,
        value: fee.own_value,
        weight: 1,
        cost,
        clamps: fee.clamps,
        tenant: None,
        exempt: false,
        admitted: true,
    }
}
