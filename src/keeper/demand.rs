//! Demands of requests, and their results.

use std::{num::NonZeroU64, slice, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    error::AcquireErrorKind,
    key::Key,
    leases::{Fee, Leases},
    limit::{Limit, LimitId, LimitValue},
    status::Quota,
};

/// The demand on one limit.
#[derive(Clone, Debug)]
pub(crate) struct Leg {
    pub limit: LimitId,
    pub key: Key,
    pub wait: Duration,
    /// When its caller gives up, if that is known: it waits until a round trip before.
    pub until: Option<Instant>,
    /// The limit's value for this key, if the request brings one.
    pub value: Option<LimitValue>,
    /// Units of a slot, from 1 to [`MAX_WEIGHT`](crate::ranges::MAX_WEIGHT).
    pub weight: u32,
    pub cost: u32,
    /// Whether a cost above the rate's burst counts as the burst; otherwise the request is refused.
    pub clamps: bool,
    /// Who pays for the slot, if the limit is fair.
    pub tenant: Option<Tenant>,
    /// The limit was off, so its key or value was not looked up. The limit does not apply, even if it is on by now: the
    /// request would count under another key.
    pub exempt: bool,
    /// Part of a request that has a permit already. A shutdown lets it go on.
    pub admitted: bool,
}

/// One of those among whom a limit is fair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tenant {
    /// [`Key::SHARED`]: all requests without a tenant.
    pub name: Key,
    /// From 1 to [`MAX_SHARE`](crate::ranges::MAX_SHARE).
    pub share: u32,
}

/// The demand of a request.
#[derive(Clone, Debug)]
pub(crate) enum Demand {
    One(Leg),
    /// All or nothing. Each limit occurs once.
    All(Vec<Leg>),
}

impl Demand {
    pub(super) fn legs(&self) -> &[Leg] {
        match self {
            Self::One(leg) => slice::from_ref(leg),
            Self::All(legs) => legs,
        }
    }

    pub(super) fn first_limit(&self) -> LimitId {
        self.legs().first().map_or(LimitId(0), |leg| leg.limit)
    }
}

/// Identifies a request submitted to a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RequestId {
    /// In order of submission.
    pub number: NonZeroU64,
    /// Index in the core's slab.
    pub slot: u32,
}

/// How a request obtained its permit.
pub(crate) struct Taken {
    pub leases: Leases,
    pub waited: Duration,
    /// Place at which the request joined the queue; 0 if it did not wait.
    pub place: u32,
    /// Usually `None`.
    pub notes: Option<Box<Notes>>,
}

/// Further facts about a permit.
#[derive(Default)]
pub(crate) struct Notes {
    /// Limits in shadow mode that would have refused the request.
    pub bypassed: Vec<(Arc<Limit>, AcquireErrorKind)>,
    /// Charges at rates.
    pub fees: Vec<Fee>,
    /// Limits that ask for nothing because their mode is off.
    pub exempt: Vec<Arc<Limit>>,
    /// The state of each limit, if the request asked for quotas.
    pub quotas: Vec<Quota>,
}
