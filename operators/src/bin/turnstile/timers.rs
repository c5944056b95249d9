//! Timers of commands and clients.

use std::{future::pending, time::Duration};

use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until};

/// Completes at this time; never if there is none.
pub(crate) async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

/// Ticks at once, and then at this interval.
pub(crate) fn every(period: Duration) -> Interval {
    let mut interval = interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}
