//! Ranges of a limit's values. The exactness and the bounds of the ledger depend on them.

use std::time::Duration;

/// The longest name of a limit: 128 bytes.
pub(crate) const MAX_NAME_LEN: usize = 128;
/// The largest value of a limit: 1,000,000. A key with this many holders is still fast.
pub(crate) const MAX_LIMIT: u32 = 1_000_000;
/// The largest count and burst of a rate: 1,000,000,000.
pub(crate) const MAX_RATE: u32 = 1_000_000_000;
/// The fastest rate: 1,000,000 per millisecond, in units per microsecond.
pub(crate) const MAX_PER_US: u128 = 1_000;
/// The longest queue of a key: 100,000 requests.
pub(crate) const MAX_WAITERS: u32 = 100_000;
/// The longest wait: 24 h.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest period of a rate: 31 days.
pub(crate) const MAX_PERIOD: Duration = Duration::from_secs(31 * 24 * 60 * 60);
/// The longest pause: 1 h.
pub(crate) const MAX_PAUSE: Duration = Duration::from_secs(60 * 60);
/// The largest number of limits on one request: 16.
pub(crate) const MAX_SCOPES: usize = 16;
/// The largest share of a tenant of a fair limit: 1,000.
pub(crate) const MAX_SHARE: u32 = 1_000;
/// The largest weight of a permit, in units of a limit: 64.
pub(crate) const MAX_WEIGHT: u32 = 64;
