//! Ranges of a limit's values, on which the exactness and the bounds of the ledger rest too.

use std::time::Duration;

/// The largest limit: a ledger of a million holders is still fast.
pub const MAX_LIMIT: u32 = 1_000_000;
/// The longest queue of a key.
pub const MAX_WAITERS: u32 = 100_000;
/// The longest wait.
pub const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest period of a rate.
pub const MAX_PERIOD: Duration = Duration::from_secs(24 * 60 * 60);
/// The most limits that one request is under.
pub const MAX_SCOPES: usize = 16;
