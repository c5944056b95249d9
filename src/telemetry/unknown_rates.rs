//! Budgets that name a rate which their permit does not have. Their cost is not charged.
//!
//! Tests: `tests/metrics/main.rs`, `tests/layer/slots.rs`.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::{
    catalog,
    facade::{self, Counter},
    limit::{Series, SeriesLabel},
};
use crate::sync::shielded;

/// Counts such budgets for one limiter, and logs the first. Names appear only in the log, because their number is unlimited.
pub(crate) struct UnknownRates {
    labels: [SeriesLabel; 1],
    counter: Series<Counter>,
    is_warned: AtomicBool,
}

impl UnknownRates {
    pub(crate) fn new(namespace: &str) -> Self {
        Self {
            labels: [("namespace", namespace.to_owned())],
            counter: Series::new(catalog::UNKNOWN_RATE, facade::counter),
            is_warned: AtomicBool::new(false),
        }
    }

    /// Creates the series, once a rate exists. Call without a lock, because a recorder is foreign code.
    pub(crate) fn expect(&self) -> &Counter {
        self.counter.of(&self.labels)
    }

    /// Records a budget at a limit that is not among the rates of its permit.
    #[cold]
    pub(crate) fn note(&self, limit_name: &str) {
        if cfg!(feature = "metrics") {
            shielded(|| self.expect().increment(1));
        }
        if !self.is_warned.swap(true, Relaxed) {
            tracing::warn!(
                namespace = self.labels[0].1,
                limit = limit_name,
                "the request has no rate of this name: nothing is charged, and nothing is limited by it"
            );
        }
    }
}
