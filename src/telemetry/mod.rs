//! Metrics, through the `metrics` facade. Without the feature the handles do nothing, so other modules do not depend on
//! it.
//!
//! Handles are created once for each limit, and each use costs an atomic operation. A limit has only the series that
//! its settings make possible. Labels are the namespace, the limit's name and a reason from a small set, but never a
//! key.
//!
//! | file | content |
//! | --- | --- |
//! | `catalog` | the names and descriptions of all metrics |
//! | `limit` | measurements of a limit |
//! | `store` | measurements of the store |
//! | `unknown_rates` | budgets at rates that their requests do not have |
//! | `facade` | the handles; `noop` replaces it without the feature |
//! | `tests` | with `balance`: each admitted permit ends once, and is counted once |
//! | `reports` | gathers simultaneous events into one event of the log |
//! | `exchange_log` | exchanges and permits, event by event at TRACE, for tests; `no_exchange_log` replaces it without `test-util` |

use std::sync::atomic::{AtomicBool, Ordering};

mod catalog;
#[cfg(feature = "test-util")]
mod exchange_log;
#[cfg(not(feature = "test-util"))]
#[path = "no_exchange_log.rs"]
mod exchange_log;
#[cfg(feature = "metrics")]
mod facade;
#[cfg(not(feature = "metrics"))]
#[path = "noop.rs"]
mod facade;
mod limit;
mod reports;
mod store;
#[cfg(all(test, feature = "metrics"))]
mod tests;
mod unknown_rates;

pub(crate) use self::{
    exchange_log::History,
    limit::{Adopted, Cost, LimitMeter, Measure},
    reports::{CAUSES, Cause, PermitReport, Reports, StoreNews, Topic},
    store::{StoreMeter, StoreState},
    unknown_rates::UnknownRates,
};

/// Describes all metrics to the recorder, and warns if the recorder is missing.
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
