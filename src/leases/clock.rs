//! Two clocks: the store's, used by the ledger, and the local monotonic clock, used for permits.
//!
//! The two are never compared. A deadline of the store becomes a length of time, which is counted from a local moment that
//! certainly precedes the store's: the sending of the exchange. This machine's wall clock is never read. This module
//! reads no clock at all: the callers do where a step begins (`keeper/lock.rs`), and in `lease.rs`, `tenure.rs` and `pool.rs` for
//! operations without the lock.

use std::time::Duration;

use tokio::time::Instant;

/// Store times are whole milliseconds in the ledger: rounding may add up to one on either side.
const TRUNCATION: Duration = Duration::from_millis(2);
/// The two clocks may differ in speed by up to one part in this many (clock slewing stays within half of it).
const SLEW: u32 = 1_000;

/// A moment by both clocks: the store's time, and a local time no later than that, such as the sending of the exchange
/// whose reply brought the store's time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreMoment {
    pub(crate) store_us: u64,
    pub(crate) sent: Instant,
}

impl StoreMoment {
    /// An upper bound of the store's time at a local moment.
    pub(crate) fn at(self, local: Instant) -> u64 {
        self.store_us + local.saturating_duration_since(self.sent).as_micros() as u64
    }

    /// Until when a lease that the store counts from this moment to `until_ms` is certainly held.
    pub(crate) fn deadline(self, until_ms: u64, lease: Duration) -> Instant {
        let lasts = until_ms.saturating_sub(self.store_us / 1_000);
        let lasts = Duration::from_millis(lasts).min(lease);
        self.sent + lasts.saturating_sub(TRUNCATION + lasts / SLEW)
    }
}
