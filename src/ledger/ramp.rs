//! The ramp after a pause: the limit rises from 0, so that the waiters do not all proceed at once.

use std::cmp::{max, min};

use super::layout::{RAMP_MS, ramped};

/// Time after the end of a pause at which the limit in force exceeds what is in use and its value after `elapsed_ms`.
pub(crate) fn next_rise_ms(limit: u32, in_use: u32, elapsed_ms: u64) -> u64 {
    let reached = max(in_use, ramped(limit, 0, elapsed_ms));
    let rise_ms = u64::from(reached) * RAMP_MS / u64::from(max(limit, 1)) + 1;
    min(rise_ms, RAMP_MS)
}
