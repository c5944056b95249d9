//! Adaptive limits: the bounds within which a limit finds its own value, and the results that it follows.
//!
//! Tests: `tests/layer/adaptive.rs`, `tests/config/adaptive.rs`.

#[cfg(all(feature = "config", test))]
use crate::ranges::MAX_LIMIT;

/// The bounds within which a limit finds its own value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize),
    cfg_attr(test, derive(schemars::JsonSchema)),
    serde(deny_unknown_fields)
)]
pub(crate) struct Adapt {
    /// Smallest value, at most the limit's own.
    #[cfg_attr(all(feature = "config", test), schemars(range(min = 1, max = MAX_LIMIT)))]
    pub floor: u32,
    /// Largest value, at least the limit's own.
    #[cfg_attr(all(feature = "config", test), schemars(range(min = 1, max = MAX_LIMIT)))]
    pub ceiling: u32,
}

impl Adapt {
    /// Whether a limit or a key may begin with this value.
    pub(super) fn allows(self, value: u32) -> bool {
        (self.floor..=self.ceiling).contains(&value)
    }
}

/// How an upstream took a request of an adaptive limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Accepted,
    Overloaded,
}
