//! The cost of a request at a rate.
//!
//! Tests: `tests/config/costs.rs`.

use serde::{Deserialize, Deserializer};

use super::{
    error::Faults,
    key::check_name,
    word_or_table::{NUMBER_OR_TABLE, word_or_table},
};
use crate::layer::Scope;

/// The cost of a request at a rate: `cost = 0`, or `cost = { header = "x-prompt-tokens" }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CostConfig {
    /// One cost for all requests.
    Fixed(u32),
    /// The number in this request header; 1 without the header. A value that is not a number counts as the largest cost:
    /// see [`Scope::cost_by_header`](crate::Scope::cost_by_header).
    ///
    /// A trusted proxy or layer in front of the limiter has to write the header, or callers choose their own cost.
    Header(String),
}

impl CostConfig {
    pub(super) fn check(&self, path: &str, burst: u32, clamp: bool, faults: &mut Faults) {
        if self.is_above(burst) && !clamp {
            let message = format!("is more than the burst of {burst}: no request is admitted");
            faults.add(path, message);
        }
        if let Self::Header(name) = self {
            check_name(name, format!("{path}.header"), faults);
        }
    }

    /// Whether a rate with this burst refuses every request.
    pub(super) fn is_above(&self, burst: u32) -> bool {
        self.fixed().is_some_and(|cost| cost > burst)
    }

    /// The cost, unless requests have their own.
    pub(super) fn fixed(&self) -> Option<u32> {
        match self {
            Self::Fixed(cost) => Some(*cost),
            Self::Header(_) => None,
        }
    }

    pub(super) fn apply(&self, scope: Scope) -> Scope {
        match self {
            &Self::Fixed(cost) => scope.cost_by(move |_| cost),
            // `check` has refused invalid names.
            Self::Header(name) => scope.cost_by_header(name.as_str()),
        }
    }
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct CostTable {
    /// The number in this request header; 1 without the header, and the largest cost if the value is not a number.
    #[cfg_attr(test, schemars(regex(pattern = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")))]
    header: String,
}

impl<'de> Deserialize<'de> for CostConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let header = |table: CostTable| Ok(Self::Header(table.header));
        let fixed = |cost| Ok(Self::Fixed(cost));
        word_or_table(deserializer, NUMBER_OR_TABLE, fixed, header)
    }
}
