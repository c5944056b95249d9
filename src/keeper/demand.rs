//! What a request wants, and what it gets.

use std::{future::pending, slice, sync::Arc, time::Duration};

use futures_util::future::select_all;
use tokio::time::Instant;

use super::{
    Lease,
    rates::Fee,
    tenure::{Owners, Tenure},
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    key::Key,
    limit::Limit,
    status::Quota,
};

/// What a request wants of one limit.
#[derive(Clone, Debug)]
pub(crate) struct Leg {
    /// The limit's number.
    pub(crate) limit: usize,
    pub(crate) key: Key,
    pub(crate) wait: Duration,
    /// The limit's value for this key, if it has one of its own.
    pub(crate) max: Option<u32>,
    /// What it costs at a rate.
    pub(crate) cost: u32,
}

/// What a request wants.
#[derive(Clone, Debug)]
pub(crate) enum Demand {
    One(Leg),
    /// All or nothing. No limit is named twice.
    All(Vec<Leg>),
}

impl Demand {
    /// The number of its first limit.
    pub(super) fn first_limit(&self) -> usize {
        match self {
            Self::One(leg) => leg.limit,
            Self::All(legs) => legs.first().map_or(0, |leg| leg.limit),
        }
    }
}

/// A request under way.
#[derive(Clone)]
pub(crate) enum Asked {
    /// For one slot.
    Slot(Arc<Lease>),
    /// For several, or for times at rates.
    Claim(u64),
}

/// How a request came by its permit.
pub(crate) struct Taken {
    pub(crate) leases: Leases,
    pub(crate) waited: Duration,
    /// The place in the line when it was joined; 0 if there was no need to wait.
    pub(crate) place: u32,
    /// Mostly there are none.
    pub(crate) notes: Option<Box<Notes>>,
}

/// What else there is to tell of a permit.
#[derive(Default)]
pub(crate) struct Notes {
    /// Limits that would have refused it, and only look on.
    pub(crate) passed: Vec<(Arc<Limit>, AcquireErrorKind)>,
    /// What it was charged at rates.
    pub(super) fees: Vec<Fee>,
    /// How its limits stand, if it was to tell.
    pub(crate) quotas: Vec<Quota>,
}

impl Taken {
    /// Both, as one after the other.
    pub(super) fn and(mut self, next: Self) -> Self {
        let leases = self.leases.all().iter().chain(next.leases.all());
        self.leases = Leases::many(leases.cloned().collect());
        self.waited += next.waited;
        self.place = self.place.max(next.place);
        if let Some(mut next) = next.notes {
            let notes = self.notes.get_or_insert_default();
            notes.passed.append(&mut next.passed);
            notes.fees.append(&mut next.fees);
            notes.quotas.append(&mut next.quotas);
        }
        self
    }

    /// Limits that would have refused it, and only look on.
    pub(super) fn passed(&self) -> &[(Arc<Limit>, AcquireErrorKind)] {
        self.notes.as_ref().map_or(&[], |notes| &notes.passed)
    }
}

/// The slots of a permit. A clone does not own them: owners are counted.
#[derive(Clone)]
pub(crate) enum Leases {
    One(Tenure),
    /// These go to no later permit, so a watcher may go on for ever.
    Many(Arc<Together>),
}

/// Several slots, or none, with the same owners.
pub(crate) struct Together {
    leases: Vec<Arc<Lease>>,
    owners: Owners,
}

impl Default for Leases {
    fn default() -> Self {
        Self::many(Vec::new())
    }
}

impl Leases {
    pub(super) fn many(leases: Vec<Arc<Lease>>) -> Self {
        let owners = Owners::one();
        Self::Many(Arc::new(Together { leases, owners }))
    }

    pub(crate) fn all(&self) -> &[Arc<Lease>] {
        match self {
            Self::One(tenure) => slice::from_ref(tenure.lease()),
            Self::Many(together) => &together.leases,
        }
    }

    /// Adds an owner, if they have one.
    pub(crate) fn join(&self) -> bool {
        match self {
            Self::One(tenure) => tenure.join(),
            Self::Many(together) => together.owners.join(0),
        }
    }

    /// Takes an owner away. Returns whether it was the last, who has to give them back.
    pub(crate) fn leave(&self) -> bool {
        match self {
            Self::One(tenure) => tenure.leave(),
            Self::Many(together) => together.owners.leave(),
        }
    }

    /// Whether one of them is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.all().iter().any(|lease| lease.is_lost()) && self.are_current()
    }

    /// Whether one of them is over, and why.
    pub(crate) fn over(&self) -> Option<LostErrorKind> {
        let over = self.all().iter().find_map(|lease| lease.over());
        over.filter(|_| self.are_current())
    }

    /// Whether no later permit has them. To be asked after what may be due to a later one was seen.
    fn are_current(&self) -> bool {
        match self {
            Self::One(tenure) => tenure.is_current(),
            Self::Many(_) => true,
        }
    }

    /// Returns the slots to a pool, if they may go there. Otherwise they have to be released.
    pub(crate) fn end(&self) -> bool {
        match self {
            Self::One(tenure) => tenure.end(),
            Self::Many(_) => false,
        }
    }

    /// As [`Lease::set_unread`], for all.
    pub(crate) fn set_unread(&self, since: Option<Instant>) {
        self.all().iter().for_each(|lease| lease.set_unread(since));
    }

    /// Completes when one of them is over for a reason that `counts`.
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
