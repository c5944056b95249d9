//! What a limiter reports of itself.
//!
//! Tests: `tests/semaphore/main.rs`.

use std::{borrow::Cow, time::Duration};

/// What this process holds and waits for now, and whether its store answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Permits that this process holds. One under several limits counts once. While a request waits for one of several
    /// slots, those that it has already count too.
    pub held: usize,
    /// Requests of this process that wait.
    pub waiting: usize,
    /// Whether the store answered last time, and did its work. Always true in memory.
    pub store_up: bool,
}

/// What all replicas together hold and wait for under one limit and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Slots in use.
    pub in_use: u32,
    /// Waiters.
    pub waiting: u32,
    /// The limit's value for this key.
    pub max: u32,
}

/// What became of the permits when a limiter was shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Waiters that were refused.
    pub refused: usize,
    /// Permits that their holders released in time.
    pub released: usize,
    /// Permits that were still held at the deadline: they were marked as lost, and their slots were released.
    pub lost: usize,
}

/// How one limit stood when a request was decided on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) limit_name: Cow<'static, str>,
    /// Of a rate.
    pub(crate) period: Option<Duration>,
    /// Whether the limit slows anybody down.
    pub(crate) is_enforced: bool,
    /// The limit's value for this key: slots, or requests in a period.
    pub(crate) max: u32,
    /// Free slots, or requests that may start at once.
    pub(crate) remaining: u32,
    /// Time until `remaining` grows, if it is known.
    pub(crate) reset: Option<Duration>,
}
