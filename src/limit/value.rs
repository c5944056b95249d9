//! The value of a limit for one key, or for a time.
//!
//! Tests: `tests/layer/values.rs`, `tests/semaphore/bursts.rs`.

/// The value of a limit for a key that has one of its own: slots, or the count per period of a rate; and its burst.
///
/// A number is a value without a burst. Then a rate has the [burst](crate::Limit::burst) that is set for the limit; if none
/// is set, as much as the value itself.
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
    /// Slots; of a rate, the count per period.
    pub max: u32,
    /// Permits of a rate that an idle key may get at once. `None`: as the limit says.
    pub burst: Option<u32>,
}

impl LimitValue {
    /// A value without a burst.
    #[must_use]
    pub const fn new(max: u32) -> Self {
        Self { max, burst: None }
    }

    /// Sets the burst, which only a rate has. At least 1.
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
