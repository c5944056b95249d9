//! The metrics: their names, kinds and descriptions.
//!
//! Tests: `tests.rs`.

/// A metric as described to a recorder.
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
pub(super) struct Metric {
    pub(super) name: &'static str,
    pub(super) kind: MetricKind,
    pub(super) help: &'static str,
}

#[derive(Clone, Copy)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    /// A histogram.
    Seconds,
}

pub(super) const MAX: &str = "turnstile_limit_max";
pub(super) const OVERRIDDEN: &str = "turnstile_limit_overridden";
pub(super) const HELD: &str = "turnstile_held";
pub(super) const WAITING: &str = "turnstile_waiting";
pub(super) const ADMITTED: &str = "turnstile_admitted_total";
pub(super) const WAIT: &str = "turnstile_wait_seconds";
pub(super) const HOLD: &str = "turnstile_hold_seconds";
pub(super) const REFUSALS: &str = "turnstile_refusals_total";
pub(super) const SHADOW_REFUSALS: &str = "turnstile_shadow_refusals_total";
pub(super) const UNKEYED: &str = "turnstile_unkeyed_total";
pub(super) const UNKNOWN_RATE: &str = "turnstile_unknown_rate_total";
pub(super) const RELEASED: &str = "turnstile_released_total";
pub(super) const LOST: &str = "turnstile_lost_total";
pub(super) const REVOKED: &str = "turnstile_revoked_total";
pub(super) const ADOPTED: &str = "turnstile_adopted_total";
pub(super) const EXPIRED: &str = "turnstile_expired_total";
pub(super) const ABORTED: &str = "turnstile_aborted_total";
pub(super) const COST: &str = "turnstile_cost_total";
pub(super) const EXCHANGES: &str = "turnstile_exchanges_total";
pub(super) const EXCHANGE: &str = "turnstile_exchange_seconds";
pub(super) const STORE_UP: &str = "turnstile_store_up";
pub(super) const BREAKER_OPENED: &str = "turnstile_breaker_opened_total";

pub(super) const METRICS: [Metric; 22] = [
    gauge(MAX, "The value of the limit that is in force"),
    gauge(
        OVERRIDDEN,
        "1 if an operator has changed or paused the limit, 0 if what is declared applies",
    ),
    gauge(HELD, "Units of permits held by this process"),
    gauge(WAITING, "Queued requests of this process"),
    counter(ADMITTED, "Requests that got their permits"),
    seconds(WAIT, "Time from the request to its permit"),
    seconds(HOLD, "Time from a permit to its end"),
    counter(REFUSALS, "Requests that were refused"),
    counter(
        SHADOW_REFUSALS,
        "Requests that a limit in shadow mode would have refused",
    ),
    counter(
        UNKEYED,
        "Requests without a key, which the limit did not apply to",
    ),
    counter(
        UNKNOWN_RATE,
        "Budgets that name a rate which their request does not have",
    ),
    counter(RELEASED, "Permits that were released"),
    counter(LOST, "Permits that were lost, or ended by a shutdown"),
    counter(
        REVOKED,
        "Permits that an operator revoked and that were released then",
    ),
    counter(
        ADOPTED,
        "Permits entered into the store, which had lost them or had not admitted them",
    ),
    counter(EXPIRED, "Permits ended by max_hold or idle"),
    counter(ABORTED, "Responses that ended with their slot"),
    counter(
        COST,
        "Cost of requests at a rate: charged, spent, settled up and down, and unsettled",
    ),
    counter(EXCHANGES, "Calls to the store"),
    seconds(
        EXCHANGE,
        "Time from a call to the store to its reply or failure",
    ),
    gauge(
        STORE_UP,
        "1 if the store works, 0 if fallbacks apply; in a cluster the share that works",
    ),
    counter(BREAKER_OPENED, "Times that the circuit breaker opened"),
];

const fn counter(name: &'static str, help: &'static str) -> Metric {
    let kind = MetricKind::Counter;
    Metric { name, kind, help }
}

const fn gauge(name: &'static str, help: &'static str) -> Metric {
    let kind = MetricKind::Gauge;
    Metric { name, kind, help }
}

const fn seconds(name: &'static str, help: &'static str) -> Metric {
    let kind = MetricKind::Seconds;
    Metric { name, kind, help }
}
