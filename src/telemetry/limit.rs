//! What is measured of a limit.
//!
//! Tests: `tests.rs`, `tests/metrics.rs`.

use std::{sync::OnceLock, time::Duration};

use super::{
    catalog,
    facade::{self, Counter, Gauge, Histogram},
};
use crate::error::{AcquireErrorKind, LostErrorKind};

/// Something that is measured of a limit. Recorders are foreign code, so the keeper notes it under its lock and records it later.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Measure {
    /// Change of the number of held permits.
    Held(f64),
    /// Change of the number of waiting requests.
    Waiting(f64),
    /// A request got its permit after this wait.
    Admitted(Duration),
    Refused(AcquireErrorKind),
    /// A request would have been refused, if the limit were enforced.
    RefusedInShadow(AcquireErrorKind),
    /// Time for which a permit was held.
    Hold(Duration),
    Lost,
    Adopted(u64),
    /// A slot was taken back at a bound.
    Expired(LostErrorKind),
}

/// What is measured of one limit, in this process.
#[derive(Debug)]
pub(crate) struct LimitMeter {
    pub(crate) held: Gauge,
    waiting: Gauge,
    admitted: Counter,
    wait: Histogram,
    pub(crate) hold: Histogram,
    lost: Counter,
    adopted: Counter,
    refusals: Refusals,
    shadow_refusals: Refusals,
    expired_max_hold: Counter,
    expired_idle: Counter,
    aborted_lost: Counter,
    aborted_shut_down: Counter,
    aborted_max_hold: Counter,
    aborted_idle: Counter,
    /// Made once a layer is made whose requests may have no key.
    unkeyed: OnceLock<Counter>,
    refused_unkeyed: OnceLock<Counter>,
    labels: [(&'static str, String); 2],
}

#[derive(Debug)]
struct Refusals {
    full: Counter,
    queue_full: Counter,
    timed_out: Counter,
    too_soon: Counter,
    unavailable: Counter,
    misconfigured: Counter,
    shut_down: Counter,
    no_runtime: Counter,
}

impl LimitMeter {
    pub(crate) fn new(namespace: &str, limit: &str) -> Self {
        let labels = [("namespace", namespace), ("limit", limit)];
        let with = |label, value| [labels[0], labels[1], (label, value)];
        let expired = |bound| facade::counter(catalog::EXPIRED, &with("bound", bound));
        let aborted = |reason| facade::counter(catalog::ABORTED, &with("reason", reason));
        let refusals = |name| {
            let refused = |reason| facade::counter(name, &with("reason", reason));
            Refusals {
                full: refused("full"),
                queue_full: refused("queue_full"),
                timed_out: refused("timed_out"),
                too_soon: refused("too_soon"),
                unavailable: refused("unavailable"),
                misconfigured: refused("misconfigured"),
                shut_down: refused("shut_down"),
                no_runtime: refused("no_runtime"),
            }
        };
        Self {
            held: facade::gauge(catalog::HELD, &labels),
            waiting: facade::gauge(catalog::WAITING, &labels),
            admitted: facade::counter(catalog::ADMITTED, &labels),
            wait: facade::histogram(catalog::WAIT, &labels),
            hold: facade::histogram(catalog::HOLD, &labels),
            lost: facade::counter(catalog::LOST, &labels),
            adopted: facade::counter(catalog::ADOPTED, &labels),
            refusals: refusals(catalog::REFUSALS),
            shadow_refusals: refusals(catalog::SHADOW_REFUSALS),
            expired_max_hold: expired("max_hold"),
            expired_idle: expired("idle"),
            aborted_lost: aborted("lost"),
            aborted_shut_down: aborted("shut_down"),
            aborted_max_hold: aborted("max_hold"),
            aborted_idle: aborted("idle"),
            unkeyed: OnceLock::new(),
            refused_unkeyed: OnceLock::new(),
            labels: labels.map(|(name, value)| (name, value.to_owned())),
        }
    }

    /// Requests may come without a key under this limit: they are refused or pass.
    pub(crate) fn expect_unkeyed(&self, refuses: bool) {
        let labels = self.labels.each_ref();
        let [namespace, limit] = labels.map(|(name, value)| (*name, value.as_str()));
        // Made before they are put in place: a recorder is foreign code.
        if self.unkeyed.get().is_none() {
            let unkeyed = facade::counter(catalog::UNKEYED, &[namespace, limit]);
            let _ = self.unkeyed.set(unkeyed);
        }
        if refuses && self.refused_unkeyed.get().is_none() {
            let labels = [namespace, limit, ("reason", "no_key")];
            let refused = facade::counter(catalog::REFUSALS, &labels);
            let _ = self.refused_unkeyed.set(refused);
        }
    }

    /// A request without a key has come, and was refused or has passed.
    pub(crate) fn note_unkeyed(&self, refused: bool) {
        let counter = match refused {
            true => &self.refused_unkeyed,
            false => &self.unkeyed,
        };
        if let Some(counter) = counter.get() {
            counter.increment(1);
        }
    }

    /// A request has got its permit.
    pub(crate) fn let_in(&self, waited: Duration) {
        self.admitted.increment(1);
        self.wait.record(waited);
    }

    pub(crate) fn note(&self, measure: Measure) {
        match measure {
            Measure::Held(change) => move_by(&self.held, change),
            Measure::Waiting(change) => move_by(&self.waiting, change),
            Measure::Admitted(waited) => self.let_in(waited),
            Measure::Refused(kind) => self.refusals.of(kind).increment(1),
            Measure::RefusedInShadow(kind) => self.shadow_refusals.of(kind).increment(1),
            Measure::Hold(held) => self.hold.record(held),
            Measure::Lost => self.lost.increment(1),
            Measure::Adopted(count) => self.adopted.increment(count),
            Measure::Expired(kind) => self.expired(kind),
        }
    }

    /// A slot was taken back because of a bound.
    fn expired(&self, kind: LostErrorKind) {
        match kind {
            LostErrorKind::HeldTooLong => self.expired_max_hold.increment(1),
            LostErrorKind::Idle => self.expired_idle.increment(1),
            LostErrorKind::Lost | LostErrorKind::ShutDown => {}
        }
    }

    /// A response was ended with its slot.
    pub(crate) fn aborted(&self, kind: LostErrorKind) {
        let aborted = match kind {
            LostErrorKind::Lost => &self.aborted_lost,
            LostErrorKind::ShutDown => &self.aborted_shut_down,
            LostErrorKind::HeldTooLong => &self.aborted_max_hold,
            LostErrorKind::Idle => &self.aborted_idle,
        };
        aborted.increment(1);
    }
}

fn move_by(gauge: &Gauge, change: f64) {
    match change < 0.0 {
        true => gauge.decrement(-change),
        false => gauge.increment(change),
    }
}

impl Refusals {
    fn of(&self, kind: AcquireErrorKind) -> &Counter {
        match kind {
            AcquireErrorKind::Full => &self.full,
            AcquireErrorKind::QueueFull => &self.queue_full,
            AcquireErrorKind::TimedOut => &self.timed_out,
            AcquireErrorKind::TooSoon => &self.too_soon,
            AcquireErrorKind::Unavailable => &self.unavailable,
            AcquireErrorKind::Misconfigured => &self.misconfigured,
            AcquireErrorKind::ShutDown => &self.shut_down,
            AcquireErrorKind::NoRuntime => &self.no_runtime,
        }
    }
}
