//! Tenures: the permits that a lease serves, one after another; and the leases of one permit.

use std::{future::pending, slice, sync::Arc};

use futures_util::future::select_all;
use tokio::time::Instant;

use super::{account::Fee, lease::Lease, owners::Owners};
use crate::{
    error::LostErrorKind,
    ledger::weight_of,
    limit::Limit,
    sync::{AtomicBool, Ordering},
};

/// The period during which one permit has a lease. A lease that goes through the pool serves several permits, one after
/// another.
#[derive(Clone)]
pub(crate) struct Tenure {
    lease: Arc<Lease>,
    number: u64,
}

impl Tenure {
    /// The tenure of the lease's current permit.
    pub(crate) fn of(lease: Arc<Lease>) -> Self {
        let number = lease.owners().tenure();
        Self { lease, number }
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Whether no later permit has the lease. For a watcher that has seen the lease end, and must know whether that end
    /// concerns its permit.
    pub(crate) fn is_current(&self) -> bool {
        self.lease.owners().tenure() == self.number
    }

    /// Adds an owner of the permit, if it has one.
    pub(crate) fn join(&self) -> bool {
        self.lease.owners().join(self.number)
    }

    /// Removes an owner. Returns whether it was the last, which must end the tenure or release the slot.
    pub(crate) fn leave(&self) -> bool {
        self.lease.owners().leave()
    }

    /// Returns the slot to the pool, if it may go there. Otherwise the caller must release it.
    pub(crate) fn recycle(&self) -> bool {
        self.lease.recycle()
    }
}

/// The slots of a permit. A clone does not own them: owners are counted.
#[derive(Clone)]
pub(crate) enum Leases {
    One(Tenure),
    /// These never serve a later permit, so a watcher may wait indefinitely.
    Many(Arc<Together>),
}

/// Several slots or none, with shared owners.
pub(crate) struct Together {
    leases: Vec<Arc<Lease>>,
    /// The charges of rates at admission.
    fees: Vec<Fee>,
    /// Limits that do not apply to this permit, since their mode was off.
    exempt: Vec<Arc<Limit>>,
    /// Whether any fee has an account. Set by an owner, and read by the last one that [leaves](Owners::leave), which
    /// sees all changes by earlier owners.
    has_account: AtomicBool,
    owners: Owners,
}

impl Default for Leases {
    fn default() -> Self {
        Self::many(Vec::new())
    }
}

impl Leases {
    pub(crate) fn many(leases: Vec<Arc<Lease>>) -> Self {
        Self::Many(Arc::new(Together {
            leases,
            fees: Vec::new(),
            exempt: Vec::new(),
            has_account: AtomicBool::new(false),
            owners: Owners::one(),
        }))
    }

    /// Adds the charges of rates, and the limits that do not apply. Call before the permit has a second owner.
    pub(crate) fn set_fees(&mut self, fees: Vec<Fee>, exempt: Vec<Arc<Limit>>) {
        if let Self::Many(together) = self
            && let Some(together) = Arc::get_mut(together)
        {
            (together.fees, together.exempt) = (fees, exempt);
        }
    }

    /// Whether such a limit is off for the permit.
    pub(crate) fn is_exempt_from(&self, is_meant: impl Fn(&Limit) -> bool) -> bool {
        match self {
            Self::One(_) => false,
            Self::Many(together) => together.exempt.iter().any(|of| is_meant(of)),
        }
    }

    /// The charges of rates at admission.
    pub(crate) fn fees(&self) -> &[Fee] {
        match self {
            Self::One(_) => &[],
            Self::Many(together) => &together.fees,
        }
    }

    /// The first lease, with the number of its tenure.
    pub(crate) fn first(&self) -> Option<(&Lease, u64)> {
        match self {
            Self::One(tenure) => Some((&tenure.lease, tenure.number)),
            // No other tenure begins while the permit has this lease.
            Self::Many(together) => {
                let first = together.leases.first();
                first.map(|lease| (&**lease, lease.owners().tenure()))
            }
        }
    }

    pub(crate) fn all(&self) -> &[Arc<Lease>] {
        match self {
            Self::One(tenure) => slice::from_ref(tenure.lease()),
            Self::Many(together) => &together.leases,
        }
    }

    /// An owner must call this before the permit gets its first account at a rate.
    pub(crate) fn note_account(&self) {
        if let Self::Many(together) = self {
            together.has_account.store(true, Ordering::Relaxed);
        }
    }

    /// The fees that may have accounts, as known to an owner; the last owner knows all of them.
    pub(crate) fn open_accounts(&self) -> &[Fee] {
        match self {
            Self::Many(together) if together.has_account.load(Ordering::Relaxed) => &together.fees,
            _ => &[],
        }
    }

    /// Units of the heaviest lease; 1 for a permit without leases.
    pub(crate) fn weight(&self) -> u32 {
        let weights = self.all().iter().map(|lease| weight_of(lease.seq()));
        weights.max().unwrap_or(1)
    }

    /// Adds an owner, if the leases have one.
    pub(crate) fn join(&self) -> bool {
        match self {
            Self::One(tenure) => tenure.join(),
            Self::Many(together) => together.owners.join(0),
        }
    }

    /// Removes an owner. Returns whether it was the last, which must release the slots.
    pub(crate) fn leave(&self) -> bool {
        match self {
            Self::One(tenure) => tenure.leave(),
            Self::Many(together) => together.owners.leave(),
        }
    }

    /// Whether a lease is lost: another permit may have the slot.
    pub(crate) fn is_lost(&self) -> bool {
        let now = Instant::now();
        self.all().iter().any(|lease| lease.is_over(now)) && self.are_current()
    }

    /// Whether a lease is [over](Lease::over) for a reason that `counts`.
    pub(crate) fn over(&self, counts: impl Fn(LostErrorKind) -> bool) -> Option<LostErrorKind> {
        let over = self.all().iter().filter_map(|lease| lease.over());
        let over = { over }.find(|kind| counts(*kind));
        over.filter(|_| self.are_current())
    }

    /// Whether no later permit has the leases. Check this after seeing an end that may belong to a later permit.
    fn are_current(&self) -> bool {
        match self {
            Self::One(tenure) => tenure.is_current(),
            Self::Many(_) => true,
        }
    }

    /// Returns the slots to a pool, if they may go there. Otherwise the caller must release them.
    pub(crate) fn recycle(&self) -> bool {
        match self {
            Self::One(tenure) => tenure.recycle(),
            Self::Many(_) => false,
        }
    }

    /// Like [`Lease::set_unread`], for all leases.
    pub(crate) fn set_unread(&self, since: Option<Instant>) {
        self.all().iter().for_each(|lease| lease.set_unread(since));
    }

    /// Completes when a lease is [over](Lease::over) for a reason that `counts`.
    pub(crate) async fn ended(
        &self,
        attend: impl Fn(),
        counts: impl Fn(LostErrorKind) -> bool,
    ) -> LostErrorKind {
        let counts = |kind| counts(kind) && self.are_current();
        match self.all() {
            [] => pending().await,
            [lease] => lease.ended(attend, counts).await,
            leases => {
                let ended = leases
                    .iter()
                    .map(|lease| Box::pin(lease.ended(&attend, &counts)));
                select_all(ended).await.0
            }
        }
    }
}
