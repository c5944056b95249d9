//! The value of a limit for one key, or for a time.
//!
//! Tests: `tests/layer/values.rs`, `tests/semaphore/bursts.rs`.

/// A key's own value of a limit: slots, or the count per period of a rate and its burst.
///
/// A number converts into a value without a burst. A rate then has the [burst](crate::Limit::burst) set for the limit; if
/// the limit sets none, the burst is the value itself.
///
/// ```
/// use std::time::Duration;
/// use tower_turnstile::{Limit, LimitValue};
///
/// const TOKENS: Limit = Limit::rate("tokens", 1_000, Duration::from_secs(60)).burst(200);
///
/// let tokens = TOKENS.by_header("x-api-key").values([
///     ("silver", LimitValue::new(5_000)), // a burst of 200
///     ("gold", LimitValue::new(20_000).burst(4_000)),
/// ]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct LimitValue {
    /// Slots, or the count per period of a rate.
    pub max: u32,
    /// Permits of a rate that an idle key may get at once. `None`: the limit's burst.
    pub burst: Option<u32>,
}

impl LimitValue {
    /// A value without a burst.
    #[must_use]
    pub const fn new(max: u32) -> Self {
        Self { max, burst: None }
    }

    /// Sets the burst. Only for a rate; at least 1.
    #[must_use]
    pub const fn burst(self, burst: u32) -> Self {
        Self {
            burst: Some(burst),
            ..self
        }
    }
}

impl From<u32> for LimitValue {
    fn from(max: u32) -> Self {
        Self::new(max)
    }
}
