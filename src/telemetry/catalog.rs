//! The metrics: their names, kinds and descriptions.
//!
//! Tests: `tests.rs`.

/// A metric, as it is described to a recorder.
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
pub(super) struct Metric {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) help: &'static str,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Counter,
    Gauge,
    /// A histogram.
    Seconds,
}

pub(super) const HELD: &str = "turnstile_held";
pub(super) const WAITING: &str = "turnstile_waiting";
pub(super) const ADMITTED: &str = "turnstile_admitted_total";
pub(super) const WAIT: &str = "turnstile_wait_seconds";
pub(super) const HOLD: &str = "turnstile_hold_seconds";
pub(super) const REFUSALS: &str = "turnstile_refusals_total";
pub(super) const SHADOW_REFUSALS: &str = "turnstile_shadow_refusals_total";
pub(super) const UNKEYED: &str = "turnstile_unkeyed_total";
pub(super) const LOST: &str = "turnstile_lost_total";
pub(super) const ADOPTED: &str = "turnstile_adopted_total";
pub(super) const EXPIRED: &str = "turnstile_expired_total";
pub(super) const ABORTED: &str = "turnstile_aborted_total";
pub(super) const EXCHANGES: &str = "turnstile_exchanges_total";
pub(super) const EXCHANGE: &str = "turnstile_exchange_seconds";
pub(super) const STORE_UP: &str = "turnstile_store_up";
pub(super) const BREAKER_OPENED: &str = "turnstile_breaker_opened_total";

pub(super) const METRICS: [Metric; 16] = [
    gauge(HELD, "Units of permits that this process holds"),
    gauge(WAITING, "Requests of this process that wait"),
    counter(ADMITTED, "Requests that got their permits"),
    seconds(WAIT, "Time from the request to its permit"),
    seconds(HOLD, "Time from a permit to its return or loss"),
    counter(REFUSALS, "Requests that were refused"),
    counter(
        SHADOW_REFUSALS,
        "Requests that were let in by a limit in shadow mode",
    ),
    counter(
        UNKEYED,
        "Requests without a key that passed without the limit",
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
