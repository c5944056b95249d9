//! Charges of a permit at a rate while it is held: more of them before the work, what the work spends, and the truth in
//! the end.
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
/// A [rate](crate::Limit::rate) charges a permit when it is acquired. For work whose cost is known later, such as the
/// tokens of a language model, these charge what is known before it begins, add up what it spends, and settle the
/// difference to the true cost in the end: see [Token budgets](crate::guide::tokens).
///
/// The limit is named by itself or by its name.
///
/// # A rate that the permit does not have
///
/// A typo must not turn a budget off. If the name is not that of a rate of the permit, [`charge`](Permit::charge) ends with
/// [`UnknownRate`](crate::AcquireErrorKind::UnknownRate), and the other calls do nothing. Each such call is counted
/// (`turnstile_unknown_rate_total`), and logged: the first of each name at warn level, later ones at debug level.
///
/// A rate that the semaphore or the layer has, but that does not apply to this permit, is not unknown: nothing is charged,
/// and nothing is logged. Its [mode](crate::Mode) is off, or the request has no key for it
/// ([`Scope::require_key`](crate::Scope::require_key) refuses those at the door). In a layer of a configuration these are all
/// rates of the file, whether the request's route has them or not.
impl Permit {
    /// Charges the rate once more, and waits or is refused like a newcomer.
    ///
    /// For a cost that is known before the work begins, such as that of a prompt which had to be read first.
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
    /// Those of [`Semaphore::acquire`](crate::Semaphore::acquire),
    /// [`InvalidCost`](crate::AcquireErrorKind::InvalidCost) if the cost is above the rate's burst, and
    /// [`UnknownRate`](crate::AcquireErrorKind::UnknownRate) if the permit does not have the rate. The permit stays as it is.
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

    /// Adds to what the permit has cost. Never waits, and is never refused.
    ///
    /// Sums are sent to the store about once a second, and when the permit is released. The rate may be in debt then: it
    /// admits nobody until that has drained, with an exact [`retry_after`](crate::AcquireError::retry_after). A debt is at
    /// most what drains in 24 hours.
    ///
    /// A sum that was sent is not sent again: if its answer is lost, it may count once too little. While the store is
    /// down, the [fallback](crate::Limit::fallback) is charged instead.
    pub fn spend(&self, limit: impl AsRef<str>, cost: u32) {
        self.share().spend(limit.as_ref(), cost);
    }

    /// Sets what the permit has cost in all, at its acquisition, by charges and by spending. Only the first call counts:
    /// what is spent after it does not, and what is charged after it is refunded.
    ///
    /// A cost above that is charged like something that was [spent](Self::spend); below it the rest is refunded, as far
    /// as it has not drained, since time that has passed cannot be given back. While nothing drains all of it comes back.
    /// [Token budgets](crate::guide::tokens) says what may be lost.
    ///
    /// Without it, all that was charged and spent stands.
    pub fn settle(&self, limit: impl AsRef<str>, actual: u32) {
        self.share().settle(limit.as_ref(), actual);
    }

    /// Returns what the rate would admit at once, as the latest charge of this permit has left it.
    ///
    /// For work that ends by itself before it runs into debt. It does not know what others were charged since. `None` if
    /// nothing was charged.
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

    /// Something happens to its account at this rate.
    fn change(&self, fee: &Fee, change: impl FnOnce(&mut Account) -> Option<(Cost, u64)>) {
        self.leases.note_account();
        self.keepers.change_account(fee, change);
    }

    /// The charge at the door of the rate of this name. `None`: the rate is off. An error, which is noted: it is unknown.
    fn rate(&self, limit: &str, call: RateCall) -> Result<Option<&Fee>, AcquireError> {
        let fee = self.leases.fee(limit);
        if fee.is_some() || self.leases.is_exempt_from(limit) {
            return Ok(fee);
        }
        let error = Limit::unknown_rate(limit);
        self.keepers.unknown_rates.note(call, error.limit_name());
        Err(error)
    }

    /// A rate has refused to charge this permit.
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

    /// How its rates stand, of which it knows more than when it was admitted.
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

    /// Charges a rate of the permit. Nothing happens once it is released.
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
/// It does nothing until it is polled.
#[must_use = "futures do nothing unless polled"]
pub struct Charging(Stage);

enum Stage {
    Asked(Box<(Request, Fee, WeakShare)>),
    /// Without asking.
    Done(Result<(), AcquireError>),
}

impl Charging {
    /// By a rate that does not apply.
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
                    // It was released meanwhile.
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
