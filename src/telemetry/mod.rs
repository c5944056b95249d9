//! What is measured, through the `metrics` facade. Without the feature the handles are there and do nothing, so that
//! nobody else has to ask.
//!
//! Handles are made once for each limit, and cost an atomic operation each time. Labels are the namespace, the limit's
//! name and a reason, which are few; never a key.
//!
//! | file | what |
//! | --- | --- |
//! | `limit` | what is measured of a limit |
//! | `store` | what is measured of the store |
//! | `facade` | the handles; `nothing` in its place without the feature |
//! | `history` | what was said and done, told event by event at TRACE: diagnostics for tests, unstable |

#[cfg(feature = "metrics")]
mod facade;
#[cfg(not(feature = "metrics"))]
#[path = "nothing.rs"]
mod facade;
mod history;
mod limit;
mod store;
#[cfg(all(test, feature = "metrics"))]
mod tests;

pub(crate) use self::{
    history::History,
    limit::{LimitMeter, Measure},
    store::{StoreMeter, StoreState},
};

/// Describes all metrics to the recorder.
pub(crate) fn describe() {
    METRICS.iter().for_each(facade::describe);
}

/// A metric, as it is described to whoever collects it.
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
struct Metric {
    name: &'static str,
    kind: Kind,
    help: &'static str,
}

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    /// A histogram.
    Seconds,
}

const HELD: &str = "turnstile_held";
const WAITING: &str = "turnstile_waiting";
const ADMITTED: &str = "turnstile_admitted_total";
const WAIT: &str = "turnstile_wait_seconds";
const HOLD: &str = "turnstile_hold_seconds";
const REFUSALS: &str = "turnstile_refusals_total";
const SHADOW_REFUSALS: &str = "turnstile_shadow_refusals_total";
const LOST: &str = "turnstile_lost_total";
const ADOPTED: &str = "turnstile_adopted_total";
const EXPIRED: &str = "turnstile_expired_total";
const ABORTED: &str = "turnstile_aborted_total";
const EXCHANGES: &str = "turnstile_exchanges_total";
const EXCHANGE: &str = "turnstile_exchange_seconds";
const STORE_UP: &str = "turnstile_store_up";
const BREAKER_OPENED: &str = "turnstile_breaker_opened_total";

const METRICS: [Metric; 15] = [
    gauge(HELD, "Permits that this process holds"),
    gauge(WAITING, "Requests of this process that wait"),
    counter(ADMITTED, "Requests that got their permits"),
    seconds(WAIT, "Time from the request to its permit"),
    seconds(HOLD, "Time from a permit to its return or loss"),
    counter(REFUSALS, "Requests that were refused"),
    counter(
        SHADOW_REFUSALS,
        "Requests that were let in by a limit in shadow mode",
    ),
    counter(LOST, "Permits that were lost"),
    counter(ADOPTED, "Permits put back that the store did not have"),
    counter(EXPIRED, "Slots taken back at a bound"),
    counter(ABORTED, "Responses that were ended with their slot"),
    counter(EXCHANGES, "Exchanges with the store"),
    seconds(EXCHANGE, "Time of an exchange with the store"),
    gauge(
        STORE_UP,
        "1 if the store answers, 0 if the policies apply; of a cluster the share that answers",
    ),
    counter(BREAKER_OPENED, "Times that the store was found to be down"),
];

const fn counter(name: &'static str, help: &'static str) -> Metric {
    let kind = Kind::Counter;
    Metric { name, kind, help }
}

const fn gauge(name: &'static str, help: &'static str) -> Metric {
    let kind = Kind::Gauge;
    Metric { name, kind, help }
}

const fn seconds(name: &'static str, help: &'static str) -> Metric {
    let kind = Kind::Seconds;
    Metric { name, kind, help }
}
