//! The measurements of the store.
//!
//! Tests: `tests.rs`, `tests/metrics/main.rs`.

use std::time::Duration;

use super::{
    catalog,
    facade::{self, Counter, Gauge, Histogram},
};
use crate::store::Failure;

/// A change of whether the store answers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StoreState {
    Up,
    /// The breaker has opened, or the reason is now known. `refused`: the store refused explicitly.
    Down {
        was_up: bool,
        refused: bool,
    },
}

/// The measurements of the store. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct StoreMeter {
    up: Gauge,
    /// This part's share of the store, if the store has several parts.
    share: Option<f64>,
    seconds: Histogram,
    answered: Counter,
    failed: Counter,
    refused: Counter,
    timed_out: Counter,
    opened_by_outage: Counter,
    opened_by_refusal: Counter,
}

impl StoreMeter {
    /// The store counts as up until it is found to be down.
    ///
    /// `share`: this part's share of the store, if the store has several parts.
    pub(crate) fn new(namespace: &str, share: Option<f64>) -> Self {
        let labels = [("namespace", namespace)];
        let with = |label, value| [labels[0], (label, value)];
        let outcome = |outcome| facade::counter(catalog::EXCHANGES, &with("outcome", outcome));
        let opened = |cause| facade::counter(catalog::BREAKER_OPENED, &with("cause", cause));
        let store = Self {
            up: facade::gauge(catalog::STORE_UP, &labels),
            share,
            seconds: facade::histogram(catalog::EXCHANGE, &labels),
            answered: outcome("ok"),
            failed: outcome("failed"),
            refused: outcome("refused"),
            timed_out: outcome("timed_out"),
            opened_by_outage: opened("outage"),
            opened_by_refusal: opened("refused"),
        };
        store.up.set(1.0);
        store
    }

    pub(crate) fn noop() -> Self {
        Self {
            up: Gauge::noop(),
            share: None,
            seconds: Histogram::noop(),
            answered: Counter::noop(),
            failed: Counter::noop(),
            refused: Counter::noop(),
            timed_out: Counter::noop(),
            opened_by_outage: Counter::noop(),
            opened_by_refusal: Counter::noop(),
        }
    }

    /// Records the end of an exchange, with or without a reply.
    pub(crate) fn exchanged(&self, failure: Option<Failure>, took: Duration) {
        self.seconds.record(took);
        let outcome = match failure {
            None => &self.answered,
            Some(Failure::TimedOut) => &self.timed_out,
            Some(Failure::Cut) => &self.failed,
            Some(Failure::Refused) => &self.refused,
        };
        outcome.increment(1);
    }

    pub(crate) fn is(&self, state: StoreState) {
        match (state, self.share) {
            (StoreState::Up, None) => self.up.set(1.0),
            (StoreState::Up, Some(share)) => self.up.increment(share),
            (StoreState::Down { .. }, None) => self.up.set(0.0),
            (StoreState::Down { was_up: true, .. }, Some(share)) => self.up.decrement(share),
            (StoreState::Down { was_up: false, .. }, Some(_)) => {}
        }
        if let StoreState::Down { refused, .. } = state {
            match refused {
                true => self.opened_by_refusal.increment(1),
                false => self.opened_by_outage.increment(1),
            }
        }
    }
}
