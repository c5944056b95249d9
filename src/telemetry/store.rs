//! The measurements of the store.
//!
//! Tests: `tests.rs`, `tests/metrics/main.rs`.

use std::{array, time::Duration};

use super::{
    catalog,
    facade::{self, Counter, Gauge, Histogram},
};
use crate::store::Failure;

/// A change of the store.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StoreState {
    Up,
    /// The breaker has opened, or the reason is now known. `refused`: the store refused explicitly.
    Down {
        was_up: bool,
        refused: bool,
    },
    /// It has lost its data.
    Lost,
    /// Whether newcomers under strict limits wait because permits return to it.
    Recovering(bool),
}

/// The measurements of the store. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct StoreMeter {
    up: Gauge,
    /// A part's share of the store, if the store has several parts.
    share: Option<f64>,
    seconds: Histogram,
    /// By outcome: answered, or a [`Failure`].
    exchanges: [Counter; 4],
    /// By whether the store refused.
    opened: [Counter; 2],
    losses: Counter,
    recovering: Gauge,
}

impl StoreMeter {
    /// The store counts as up until it is found to be down, each part for its share.
    ///
    /// `parts`: the number of the store's parts.
    pub(crate) fn new(namespace: &str, parts: usize) -> Self {
        let labels = [("namespace", namespace)];
        let with = |label, value| [labels[0], (label, value)];
        let outcome = |outcome| facade::counter(catalog::EXCHANGES, &with("outcome", outcome));
        let opened = |cause| facade::counter(catalog::BREAKER_OPENED, &with("cause", cause));
        let store = Self {
            up: facade::gauge(catalog::STORE_UP, &labels),
            share: (parts > 1).then(|| 1.0 / parts as f64),
            seconds: facade::histogram(catalog::EXCHANGE, &labels),
            exchanges: ["ok", "failed", "timed_out", "refused"].map(outcome),
            opened: ["outage", "refused"].map(opened),
            losses: facade::counter(catalog::DATA_LOSSES, &labels),
            recovering: facade::gauge(catalog::RECOVERING, &labels),
        };
        store.up.set(1.0);
        store.recovering.set(0.0);
        store
    }

    pub(crate) fn noop() -> Self {
        Self {
            up: Gauge::noop(),
            share: None,
            seconds: Histogram::noop(),
            exchanges: array::from_fn(|_| Counter::noop()),
            opened: array::from_fn(|_| Counter::noop()),
            losses: Counter::noop(),
            recovering: Gauge::noop(),
        }
    }

    /// Records the end of an exchange, with or without a reply.
    pub(crate) fn exchanged(&self, failure: Option<Failure>, took: Duration) {
        self.seconds.record(took);
        let outcome = failure.map_or(0, |failure| failure as usize + 1);
        self.exchanges[outcome].increment(1);
    }

    pub(crate) fn is(&self, state: StoreState) {
        match (state, self.share) {
            (StoreState::Up, None) => self.up.set(1.0),
            (StoreState::Up, Some(share)) => self.up.increment(share),
            (StoreState::Down { .. }, None) => self.up.set(0.0),
            (StoreState::Down { was_up: true, .. }, Some(share)) => self.up.decrement(share),
            (StoreState::Down { was_up: false, .. }, Some(_)) => {}
            (StoreState::Lost, _) => self.losses.increment(1),
            (StoreState::Recovering(waits), _) => self.recovering.set(f64::from(u8::from(waits))),
        }
        if let StoreState::Down { refused, .. } = state {
            self.opened[usize::from(refused)].increment(1);
        }
    }
}
