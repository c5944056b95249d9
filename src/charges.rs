//! Charges of a permit at a rate while it is held: further charges before the work, spending during the work, and the
//! settlement at the end.
//!
//! Tests: `tests/semaphore/charges.rs`.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::time::Instant;

use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{Demand, Leg, Request, Taken},
    key::Key,
    leases::{Account, Fee, Settled},
    limit::Limit,
    permit::{Permit, Share, WeakShare},
    status::{Quota, QuotaReader},
    telemetry::{Cost, RateCall},
};

/// Charges at a rate.
///
/// A [rate](crate::Limit::rate) charges a permit when it is acquired. For work whose cost is known only later, such as the
/// tokens of a language model, the methods below charge the known part in advance, add up spending, and settle the
/// difference to the true cost at the end: see [Token budgets](crate::guide::tokens).
///
/// All methods take the limit or its name.
///
/// # A rate that the permit does not have
///
/// A typo must not turn a budget off. If no rate of the permit has the name, [`charge`](Permit::charge) fails with
/// [`UnknownRate`](crate::AcquireErrorKind::UnknownRate), and the other calls have no effect. Each such call is counted
/// (`turnstile_unknown_rate_total`) and logged: the first call for each name at warn level, later calls at debug level.
///
/// A rate of the semaphore or the layer that does not apply to this permit is not unknown: calls charge nothing and log
/// nothing. A rate does not apply if its [mode](crate::Mode) is off, or if the request has no key for it
/// ([`Scope::require_key`](crate::Scope::require_key) refuses such requests on arrival). In a layer of a configuration,
/// every rate of the file is known, whether the request's route has it or not.
impl Permit {
    /// Charges the rate once more, and waits or is refused like a new request.
    ///
    /// For a cost that is known before the work begins, such as the cost of a prompt that had to be read first.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_turnstile::{AcquireErrorKind, Limit, Limiter};
    /// const TOKENS: Limit = Limit::rate("tokens", 100_000, Duration::from_secs(60)).burst(20_000);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let permit = Limiter::in_memory().semaphore(&TOKENS, "acme").acquire().await?;
    /// permit.charge(&TOKENS, 1_500).await?; // the prompt
    /// permit.spend(&TOKENS, 300); // while the answer comes
    /// permit.settle(&TOKENS, 1_790); // as the answer says in the end
    ///
    /// let refused = permit.charge(&TOKENS, 20_001).await.unwrap_err();
    /// assert_eq!(refused.kind(), AcquireErrorKind::InvalidCost);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Semaphore::acquire`](crate::Semaphore::acquire),
    /// [`InvalidCost`](crate::AcquireErrorKind::InvalidCost) if the cost is above the rate's burst, and
    /// [`UnknownRate`](crate::AcquireErrorKind::UnknownRate) if the permit does not have the rate. The permit stays as it
    /// is.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future refunds the charge, if it was made.
    pub fn charge(&self, limit: impl AsRef<str>, cost: u32) -> Charging {
        let limit = limit.as_ref();
        match self.share().rate(limit, RateCall::Charge) {
            Ok(Some(_)) => self.share().downgrade().charge(limit, cost),
            Ok(None) => Charging::NONE,
            Err(unknown) => Charging::refused(unknown),
        }
    }

    /// Adds to the permit's cost. Never waits, and is never refused.
    ///
    /// The process reports sums to the store about once a second, and when the permit is released. A report may put the
    /// rate into debt: the rate then admits no request until the debt has drained, and refusals have an exact
    /// [`retry_after`](crate::AcquireError::retry_after). A debt is at most the amount that drains in 24 hours.
    ///
    /// A sum is sent only once: if its answer is lost, the sum may not count. While the store is down, the
    /// [fallback](crate::Limit::fallback) is charged instead.
    pub fn spend(&self, limit: impl AsRef<str>, cost: u32) {
        self.share().spend(limit.as_ref(), cost);
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
    pub fn settle(&self, limit: impl AsRef<str>, actual: u32) {
        self.share().settle(limit.as_ref(), actual);
    }

    /// Returns the units left of the rate after the latest charge of this permit.
    ///
    /// For work that stops before it runs into debt. Later charges of other permits are not included. `None` if nothing was
    /// charged.
    pub fn remaining(&self, limit: impl AsRef<str>) -> Option<u32> {
        self.share().remaining(limit.as_ref())
    }
}

impl Share {
    fn add_charges(&self, fee: &Fee, taken: Taken) {
        let charges = taken.notes.map(|notes| notes.fees).unwrap_or_default();
        self.change(fee, |account| {
            let charges = charges.iter();
            let excess = charges.map(|charge| account.charge(charge.paid_cost(), charge.paid));
            Some((Cost::SettledDown, excess.sum()))
        });
    }

    /// Changes the permit's account at this rate.
    fn change(&self, fee: &Fee, change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>) {
        self.leases.note_account();
        self.keepers.change_account(fee, change);
    }

    /// Returns the charge on arrival at the rate with this name; `None` if the rate does not apply. An unknown name is an
    /// error, and is recorded.
    fn rate(&self, limit: &str, call: RateCall) -> Result<Option<&Fee>, AcquireError> {
        let fee = self.leases.fee(limit);
        if fee.is_some() || self.leases.is_exempt_from(limit) {
            return Ok(fee);
        }
        let error = Limit::unknown_rate(limit);
        self.keepers.unknown_rates.note(call, error.limit_name());
        Err(error)
    }

    /// Records that a rate refused to charge this permit.
    fn note_refusal(&self, fee: &Fee, error: &AcquireError) {
        if let (AcquireErrorKind::TooSoon, Some(rest)) = (error.kind(), error.retry_after()) {
            let until = Instant::now() + rest;
            self.change(fee, |account| {
                account.refuse(until);
                None
            });
        }
    }

    pub(crate) fn spend(&self, limit: &str, cost: u32) {
        if let Ok(Some(fee)) = self.rate(limit, RateCall::Spend) {
            let spend = |account: &mut Account| {
                let counts = account.spend(cost);
                counts.then_some((Cost::Spent, cost.into()))
            };
            self.change(fee, spend);
        }
    }

    pub(crate) fn settle(&self, limit: &str, actual: u32) {
        if let Ok(Some(fee)) = self.rate(limit, RateCall::Settle) {
            let settle = |account: &mut Account| match account.settle(actual)? {
                Settled::Up(more) => Some((Cost::SettledUp, more)),
                Settled::Down(less) => Some((Cost::SettledDown, less)),
            };
            self.change(fee, settle);
        }
    }

    pub(crate) fn remaining(&self, limit: &str) -> Option<u32> {
        let fee = self.rate(limit, RateCall::Remaining).ok()??;
        let quota = self.keepers.quota_of(fee, QuotaReader::Handler);
        quota.map(|quota| quota.remaining)
    }

    /// The state of the permit's rates, which may be newer than at its admission.
    pub(crate) fn quotas(&self) -> impl Iterator<Item = Quota> {
        let fees = self.leases.open_accounts().iter();
        fees.filter_map(|fee| self.keepers.quota_of(fee, QuotaReader::Client))
    }
}

impl WeakShare {
    /// Whether the limit is among the rates of the permit.
    pub(crate) fn is_charged_by(&self, limit: &str) -> bool {
        self.leases.fee(limit).is_some()
    }

    /// Charges a rate of the permit. Has no effect once the permit is released.
    pub(crate) fn charge(&self, limit: &str, cost: u32) -> Charging {
        let fee = self.leases.fee(limit).cloned();
        let asked = self.upgrade().zip(fee).map(|(share, fee)| {
            let demand = Demand::One(leg(&fee, cost));
            let request = Request::new(share.keepers.clone(), demand);
            (request, fee, self.clone())
        });
        Charging(match asked {
            Some(asked) => Stage::Asked(Box::new(asked)),
            None => Stage::Done(Ok(())),
        })
    }
}

/// Future returned by [`Permit::charge`], [`Slot::charge`](crate::Slot::charge) and [`Hold::charge`](crate::Hold::charge).
///
/// The future does nothing until it is polled.
#[must_use = "futures do nothing unless polled"]
pub struct Charging(Stage);

enum Stage {
    Asked(Box<(Request, Fee, WeakShare)>),
    /// Decided without a call to the store.
    Done(Result<(), AcquireError>),
}

impl Charging {
    /// The result for a rate that does not apply.
    pub(crate) const NONE: Self = Self(Stage::Done(Ok(())));

    pub(crate) fn refused(error: AcquireError) -> Self {
        Self(Stage::Done(Err(error)))
    }
}

impl Future for Charging {
    type Output = Result<(), AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (request, fee, permit) = match &mut self.0 {
            Stage::Asked(asked) => &mut **asked,
            Stage::Done(done) => return Poll::Ready(mem::replace(done, Ok(()))),
        };
        let charged = match ready!(request.poll(cx)) {
            Ok(granted) => {
                match permit.upgrade() {
                    Some(share) => share.add_charges(fee, granted.taken),
                    // The permit was released meanwhile.
                    None => drop(granted.keepers.give_back(granted.taken)),
                }
                Ok(())
            }
            Err(mut error) => {
                error.details.is_shared = fee.key == Key::SHARED;
                if let Some(share) = permit.upgrade() {
                    share.note_refusal(fee, &error);
                }
                Err(error)
            }
        };
        self.0 = Stage::Done(Ok(()));
        Poll::Ready(charged)
    }
}

impl fmt::Debug for Charging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charging").finish_non_exhaustive()
    }
}

fn leg(fee: &Fee, cost: u32) -> Leg {
    Leg {
        limit: fee.limit_id(),
        key: fee.key.clone(),
        wait: fee.wait,
        value: fee.own_value,
        weight: 1,
        cost,
        clamps: fee.clamps,
    }
}
