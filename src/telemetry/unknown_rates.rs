//! Calls that name a rate which their permit does not have. Their cost is not charged.
//!
//! Tests: `tests/metrics/main.rs`, `tests/layer/slots.rs`.

use std::sync::{Mutex, OnceLock, PoisonError};

use super::{
    catalog,
    facade::{self, Counter},
};
use crate::sync::shielded;

/// Number of names with one warning each. Later names are logged at debug level only.
const MAX_WARNED: usize = 16;

/// The method called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RateCall {
    Charge,
    Spend,
    Settle,
    Remaining,
}

impl RateCall {
    const ALL: [Self; 4] = [Self::Charge, Self::Spend, Self::Settle, Self::Remaining];

    fn as_str(self) -> &'static str {
        match self {
            Self::Charge => "charge",
            Self::Spend => "spend",
            Self::Settle => "settle",
            Self::Remaining => "remaining",
        }
    }
}

/// Counts and logs such calls for one limiter. Names appear only in the log, because their number is unlimited.
pub(crate) struct UnknownRates {
    namespace: String,
    counters: OnceLock<[Counter; 4]>,
    warned: Mutex<Vec<String>>,
}

impl UnknownRates {
    pub(crate) fn new(namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            counters: OnceLock::new(),
            warned: Mutex::default(),
        }
    }

    /// Creates the series, once a rate exists. Call without a lock, because a recorder is foreign code.
    pub(crate) fn expect(&self) -> &[Counter; 4] {
        if let Some(counters) = self.counters.get() {
            return counters;
        }
        let counters = RateCall::ALL.map(|call| {
            let labels = [("namespace", &*self.namespace), ("call", call.as_str())];
            facade::counter(catalog::UNKNOWN_RATE, &labels)
        });
        let mut counters = Some(counters);
        // If two threads create the counters, both get the same series.
        self.counters
            .get_or_init(|| counters.take().expect("made once"))
    }

    /// Records a call with a limit that is not among the rates of its permit.
    #[cold]
    pub(crate) fn note(&self, call: RateCall, limit_name: &str) {
        if cfg!(feature = "metrics") {
            shielded(|| self.expect()[call as usize].increment(1));
        }
        let (namespace, call) = (&*self.namespace, call.as_str());
        if self.is_new(limit_name) {
            tracing::warn!(
                namespace,
                limit = limit_name,
                call,
                "the request has no rate of this name: nothing is charged, and nothing is limited by it"
            );
        } else {
            tracing::debug!(
                namespace,
                limit = limit_name,
                call,
                "the request has no rate of this name"
            );
        }
    }

    fn is_new(&self, limit_name: &str) -> bool {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = warned.len() < MAX_WARNED && !warned.iter().any(|name| name == limit_name);
        if is_new {
            warned.push(limit_name.to_owned());
        }
        is_new
    }
}
