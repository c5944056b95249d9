//! Charges of a permit at a rate while it is held: more of them before the work, what the work spends, and the truth in
//! the end.
//!
//! Tests: `tests/semaphore/charges.rs`.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use crate::{
    error::AcquireError,
    keeper::{Demand, Leg, Request, Taken},
    key::Key,
    leases::{Account, Fee, Settled},
    permit::{Permit, Share, WeakShare},
    status::Quota,
    telemetry::Cost,
};

/// Charges at a rate.
///
/// A [rate](crate::Limit::rate) charges a permit when it is acquired. For work whose cost is known later, such as the
/// tokens of a language model, these charge what is known before it begins, add up what it spends, and settle the
/// difference to the true cost in the end: see [Token budgets](crate::guide::tokens).
///
/// The limit is named by itself or by its name. If it is not among the rates of the permit, nothing happens.
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
    /// Those of [`Semaphore::acquire`](crate::Semaphore::acquire), and
    /// [`InvalidCost`](crate::AcquireErrorKind::InvalidCost) if the cost is above the rate's burst. The permit stays as it
    /// is.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future refunds the charge, if it was made.
    pub fn charge(&self, limit: impl AsRef<str>, cost: u32) -> Charging {
        self.share().downgrade().charge(limit.as_ref(), cost)
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

    /// Whether the limit is among the rates of the permit.
    pub(crate) fn is_charged_by(&self, limit: &str) -> bool {
        self.leases.fee(limit).is_some()
    }

    pub(crate) fn spend(&self, limit: &str, cost: u32) {
        if let Some(fee) = self.leases.fee(limit) {
            let spend = |account: &mut Account| {
                let counts = account.spend(cost);
                counts.then_some((Cost::Spent, cost.into()))
            };
            self.change(fee, spend);
        }
    }

    pub(crate) fn settle(&self, limit: &str, actual: u32) {
        if let Some(fee) = self.leases.fee(limit) {
            let settle = |account: &mut Account| match account.settle(actual)? {
                Settled::Up(more) => Some((Cost::SettledUp, more)),
                Settled::Down(less) => Some((Cost::SettledDown, less)),
            };
            self.change(fee, settle);
        }
    }

    pub(crate) fn remaining(&self, limit: &str) -> Option<u32> {
        let quota = self.keepers.quota_of(self.leases.fee(limit)?);
        quota.map(|quota| quota.remaining)
    }

    /// How its rates stand, of which it knows more than when it was admitted.
    pub(crate) fn quotas(&self) -> impl Iterator<Item = Quota> {
        let fees = self.leases.open_accounts().iter();
        fees.filter_map(|fee| self.keepers.quota_of(fee))
    }
}

impl WeakShare {
    pub(crate) fn is_charged_by(&self, limit: &str) -> bool {
        self.leases.fee(limit).is_some()
    }

    pub(crate) fn charge(&self, limit: &str, cost: u32) -> Charging {
        let fee = self.leases.fee(limit).cloned();
        let asked = self.upgrade().zip(fee).map(|(share, fee)| {
            let demand = Demand::One(leg(&fee, cost));
            let request = Request::new(share.keepers.clone(), demand);
            (request, fee, self.clone())
        });
        Charging(asked.map(Box::new))
    }
}

/// Future returned by [`Permit::charge`], [`Slot::charge`](crate::Slot::charge) and [`Hold::charge`](crate::Hold::charge).
///
/// It does nothing until it is polled.
#[must_use = "futures do nothing unless polled"]
pub struct Charging(Option<Box<(Request, Fee, WeakShare)>>);

impl Charging {
    /// Under no rate.
    pub(crate) const NONE: Self = Self(None);
}

impl Future for Charging {
    type Output = Result<(), AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some((request, fee, permit)) = self.0.as_deref_mut() else {
            return Poll::Ready(Ok(()));
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
                Err(error)
            }
        };
        self.0 = None;
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
        max: fee.own_max,
        weight: 1,
        cost,
        clamps: fee.clamps,
    }
}
