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

/// Declares the names of metrics, and describes them in one table.
macro_rules! metrics {
    ($($const:ident = $kind:ident $name:literal, $help:literal;)+) => {
        $(pub(super) const $const: &str = $name;)+

        pub(super) const METRICS: [Metric; [$($name),+].len()] = [
            $(Metric { name: $name, kind: MetricKind::$kind, help: $help },)+
        ];
    };
}

metrics! {
    MAX = Gauge "turnstile_limit_max", "The value of the limit that is in force";
    OVERRIDDEN = Gauge "turnstile_limit_overridden",
        "1 if an operator has changed or paused the limit, 0 if what is declared applies";
    FALLBACK = Gauge "turnstile_fallback_limit",
        "The value that this process enforces by itself while the store is down: 0 if it refuses all requests, 1000000 if it admits all";
    HELD = Gauge "turnstile_held", "Units of permits held by this process";
    WAITING = Gauge "turnstile_waiting", "Queued requests of this process";
    FAIR_TENANTS = Gauge "turnstile_fair_tenants",
        "Tenants of a fair limit with permits or queued requests in this process";
    ADMITTED = Counter "turnstile_admitted_total", "Requests that got their permits";
    WAIT = Seconds "turnstile_wait_seconds", "Time from the request to its permit";
    HOLD = Seconds "turnstile_hold_seconds", "Time from a permit to its end";
    REFUSALS = Counter "turnstile_refusals_total", "Requests that were refused";
    SHADOW_REFUSALS = Counter "turnstile_shadow_refusals_total",
        "Requests under a limit in shadow mode that found no free slot, or too little of the rate";
    UNKEYED = Counter "turnstile_unkeyed_total", "Requests without a key, which the limit did not apply to";
    PAUSES = Counter "turnstile_pauses_total", "Pauses of a key that responses or handlers of this process started";
    PAUSE_SECONDS = Counter "turnstile_pause_seconds_total", "Length of these pauses, as first stated, in whole seconds";
    OVERLOADED = Counter "turnstile_overloaded_total", "Requests that an outcome found overloaded, or that paused their key";
    ADAPTIVE_CUTS = Counter "turnstile_adaptive_cuts_total", "Cuts of an adaptive limit that this process has learned of";
    UNKNOWN_RATE = Counter "turnstile_unknown_rate_total", "Budgets that name a rate which their request does not have";
    RELEASED = Counter "turnstile_released_total", "Permits that were released";
    LOST = Counter "turnstile_lost_total", "Permits that were lost, or ended by a shutdown";
    REVOKED = Counter "turnstile_revoked_total", "Permits that an operator revoked and that were released then";
    ADOPTED = Counter "turnstile_adopted_total",
        "Permits entered into the store, which had lost them or had not admitted them";
    EXPIRED = Counter "turnstile_expired_total", "Permits ended by max_hold or idle";
    ABORTED = Counter "turnstile_aborted_total", "Responses that ended with their slot";
    COST = Counter "turnstile_cost_total",
        "Cost of requests at a rate: charged, spent, settled up and down, and unsettled";
    EXCHANGES = Counter "turnstile_exchanges_total", "Calls to the store";
    EXCHANGE = Seconds "turnstile_exchange_seconds", "Time from a call to the store to its reply or failure";
    STORE_UP = Gauge "turnstile_store_up",
        "1 if the store works, 0 if fallbacks apply or the store refuses; in a cluster the share that works";
    RECOVERING = Gauge "turnstile_recovering",
        "1 while newcomers under strict limits wait because permits return to a store that has lost them or was down, else 0";
    DATA_LOSSES = Counter "turnstile_data_losses_total",
        "Losses of all data that this process has found in the store; in a cluster, in a part of it";
    BREAKER_OPENED = Counter "turnstile_breaker_opened_total",
        "Times that the circuit breaker opened, once for each cause; in a cluster, of each part";
}
