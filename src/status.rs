//! Numbers that a limiter reports.
//!
//! Tests: `tests/semaphore/main.rs`.

use std::{borrow::Cow, time::Duration};

use crate::unit::Unit;

/// Slots and queued requests of this process. See [`Limiter::status`](crate::Limiter::status).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Slots that this process holds: one for each concurrent limit of a permit, whatever its weight. While a request waits
    /// for one of several slots, the slots that it already has count too.
    pub held: usize,
    /// Queued requests of this process.
    pub waiting: usize,
    /// Whether the store works, as far as this process knows. After an outage that recurs within a minute, the store has to
    /// work for some seconds first. Always true in memory.
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

/// The last known place of a request in the queue of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InLine {
    /// Queue position: 1 at the head.
    pub(crate) position: u32,
    /// Requests in the queue, including this one.
    pub(crate) waiting: u32,
}

/// Result of [`Limiter::shutdown`](crate::Limiter::shutdown). A permit has a slot for each of its concurrent limits,
/// whatever its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Requests that still waited at the deadline, perhaps with some of their slots: refused.
    pub refused: usize,
    /// Slots that permits had when the shutdown began, and released in time, as the store has confirmed.
    pub released: usize,
    /// Slots of permits that were still held at the deadline: marked as lost, and released.
    pub lost: usize,
    /// Slots whose release the store has not confirmed. Such slots may stay taken until their leases end.
    ///
    /// Includes slots of lost permits, of permits released in time or before the shutdown, and of queued requests. Always 0
    /// in memory.
    pub unconfirmed: usize,
}

/// State of one limit when a request was admitted or refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) limit_name: Cow<'static, str>,
    /// Only for a rate.
    pub(crate) period: Option<Duration>,
    /// The unit of the limit.
    pub(crate) unit: Unit,
    /// Whether the limit can refuse or delay requests.
    pub(crate) is_enforced: bool,
    /// The limit's value for this key: slots, or units in a period.
    pub(crate) max: u32,
    /// Free slots, or units of a rate available at once.
    pub(crate) remaining: u32,
    /// Time until `remaining` grows, if known.
    pub(crate) reset: Option<Duration>,
}
