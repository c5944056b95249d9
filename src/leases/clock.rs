//! Two clocks: the store's, used by the ledger, and the local monotonic clock, used for permits.
//!
//! They are never compared. The store sends a deadline as a length of time, which is counted from a local moment that
//! certainly precedes the store's: the sending of the exchange. This machine's wall clock is never read. This module
//! reads no clock at all: the callers do where a step begins (`keeper/lock.rs`), and in `lease.rs` and `pool.rs` for
//! operations without the lock.

use std::time::Duration;

use tokio::time::Instant;

/// Store times are whole milliseconds in the ledger: rounding may add up to one on either side.
const TRUNCATION: Duration = Duration::from_millis(2);
/// The two clocks may differ in speed by up to one part in this many (clock slewing stays within half of it).
const SLEW: u32 = 1_000;

/// When a lease that the store counts from `counted_from_us` to `until_ms` is certainly over, if the store began to
/// count at `since` or later.
pub(crate) fn local_deadline(
    since: Instant,
    counted_from_us: u64,
    until_ms: u64,
    lease: Duration,
) -> Instant {
    let lasts = Duration::from_millis(until_ms.saturating_sub(counted_from_us / 1_000)).min(lease);
    since + lasts.saturating_sub(TRUNCATION + lasts / SLEW)
}

/// The store's time, from its latest reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreClock {
    pub(crate) now_us: u64,
    /// When the exchange with that reply was sent: the store read its clock at this moment or later.
    pub(crate) sent: Instant,
}

impl StoreClock {
    /// An upper bound of the store's time at a local moment.
    pub(crate) fn at(self, local: Instant) -> u64 {
        self.now_us + local.saturating_duration_since(self.sent).as_micros() as u64
    }
}
