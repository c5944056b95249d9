//! Metrics, through the `metrics` facade. Without the feature the handles are there and do nothing, so that no other
//! module depends on it.
//!
//! Handles are made once for each limit, and cost an atomic operation each time. A limit has only the series that its
//! settings make possible. Labels are the namespace, the limit's
//! name and a reason, which are few; never a key.
//!
//! | file | what |
//! | --- | --- |
//! | `catalog` | the names of all metrics, and what they mean |
//! | `limit` | what is measured of a limit |
//! | `store` | what is measured of the store |
//! | `unknown_rates` | charges at rates that their requests do not have |
//! | `facade` | the handles; `noop` in its place without the feature |
//! | `tests` | with `balance`: each admitted permit ends once, and is counted so |
//! | `reports` | what happens at many places at a time, for one event of the log |
//! | `history` | exchanges and permits, event by event at TRACE: diagnostics for tests, unstable |

use std::sync::atomic::{AtomicBool, Ordering};

mod catalog;
#[cfg(feature = "metrics")]
mod facade;
#[cfg(not(feature = "metrics"))]
#[path = "noop.rs"]
mod facade;
mod history;
mod limit;
mod reports;
mod store;
#[cfg(all(test, feature = "metrics"))]
mod tests;
mod unknown_rates;

pub(crate) use self::{
    history::History,
    limit::{Adopted, Cost, LimitMeter, Measure},
    reports::{CAUSES, Cause, Report, Reports, StoreNews, Topic},
    store::{StoreMeter, StoreState},
    unknown_rates::{RateCall, UnknownRates},
};

/// Describes all metrics to the recorder, and warns if there is none.
pub(crate) fn describe(namespace: &str) {
    catalog::METRICS.iter().for_each(facade::describe);
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !facade::is_recording() && !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            namespace,
            "a limiter is made before a metrics recorder is installed, so its metrics are not recorded: \
             install the recorder first, or disable the feature `metrics`"
        );
    }
}
