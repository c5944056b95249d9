//! How a ledger is laid out in its sorted set, as far as operators read it. `script/header.lua` has the whole of it.

pub use super::ramp::{RAMP_MS, ramped};

/// Characters of a replica's id, with which the names of its permits begin.
pub const REPLICA_CHARS: usize = 16;
pub(crate) const SEQ_CHARS: usize = 10;
/// Characters of a permit's name. A heavy permit has further members with one more.
pub const ID_CHARS: usize = REPLICA_CHARS + SEQ_CHARS;
/// The end of the scores of holders, and the start of those of heartbeats and of the pause. It is also added to the payments
/// of tenants that do not wait, and subtracted from virtual time.
pub const ALIVE: u64 = 1 << 51;
/// How long a replica stays on the roster, in milliseconds.
pub const STALE_MS: u64 = 180_000;
