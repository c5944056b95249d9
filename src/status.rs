//! Numbers that a limiter reports.
//!
//! Tests: `tests/semaphore/main.rs`.

use std::{borrow::Cow, time::Duration};

use crate::unit::Unit;

/// Permits and queued requests of this process. See [`Limiter::status`](crate::Limiter::status).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Permits that this process holds, whatever they weigh. One under several limits counts once. While a request waits for one of several
    /// slots, those that it has already count too.
    pub held: usize,
    /// Queued requests of this process.
    pub waiting: usize,
    /// Whether the store works, as far as is known. After an outage that recurs within a minute it has to work for some seconds
    /// first. Always true in memory.
    pub store_up: bool,
}

/// Slots and waiters of all replicas, for one limit and key. See [`Semaphore::usage`](crate::Semaphore::usage).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Slots in use, in units.
    pub in_use: u32,
    /// Queued requests.
    pub waiting: u32,
    /// The limit's value for this key.
    pub max: u32,
}

/// Where a request stands in the queue of a limit, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InLine {
    /// 1 at the head.
    pub(crate) position: u32,
    /// Requests in the queue, this one among them.
    pub(crate) waiting: u32,
}

/// Result of [`Limiter::shutdown`](crate::Limiter::shutdown). In a cluster, a request under several limits that waits while it
/// has some of its slots counts as refused, and each of these slots as released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Queued requests that were refused.
    pub refused: usize,
    /// Permits that were released in time, as the store has confirmed.
    pub released: usize,
    /// Permits that were still held at the deadline: marked as lost, and released.
    pub lost: usize,
    /// Slots whose release the store has not confirmed: they may stay taken until their leases end.
    ///
    /// These are slots of lost permits, of permits that were released in time or before the shutdown, and of queued requests.
    /// A permit has one for each of its limits, whatever it weighs. Always 0 in memory.
    pub unconfirmed: usize,
}

/// Whom a quota is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuotaReader {
    /// The handler, which knows itself what it was refused.
    Handler,
    /// The client: a rate that has refused a charge of the handler is used up until then.
    Client,
}

/// State of one limit when a request was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) limit_name: Cow<'static, str>,
    /// Of a rate.
    pub(crate) period: Option<Duration>,
    /// What the limit counts.
    pub(crate) unit: Unit,
    /// Whether the limit slows anybody down.
    pub(crate) is_enforced: bool,
    /// The limit's value for this key: slots, or units in a period.
    pub(crate) max: u32,
    /// Free slots, or units that a rate has at once.
    pub(crate) remaining: u32,
    /// Time until `remaining` grows, if it is known.
    pub(crate) reset: Option<Duration>,
}
