//! Bounds on the slot of a response that does not end.
//!
//! Tests: `tests/layer/bounds.rs`, `stalled.rs`.

use std::time::Duration;

use super::layer::LimitLayer;
use crate::error::ConfigError;

/// Longest bound of a slot, for [`LimitLayer::max_hold`] and [`LimitLayer::idle`]: 30 days.
pub const MAX_HOLD: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// The resolution of timers.
const SHORTEST: Duration = Duration::from_millis(1);

/// Responses that do not end.
///
/// When a bound is reached, the slot is released at once, regardless of [`on_lost`](Self::on_lost), and the service's work
/// ends with it: the layer drops the service's body, or its future if there is no response head yet, even if the server
/// does not poll because the client has stopped reading. So the cap also holds for the calls behind the layer, such as
/// those of a proxy to its upstream. Frames that the server had taken may still be sent. Then the response ends with an
/// error ([`LostError`](super::LostError)), so that the client does not take it for complete.
///
/// The drop is a task on the runtime of the request, spawned when the slot ends. Until the runtime gets to it, the next
/// request may have started.
impl LimitLayer {
    /// Sets the longest time that a request holds its slot, from its admission. Default: none.
    ///
    /// If there is no response head by then, the call to the service is dropped, as if the client had disconnected, and
    /// the request is refused ([`RefusalKind::HeldTooLong`](super::RefusalKind::HeldTooLong)). A [`Hold`](super::Hold)
    /// ends too: [`Hold::lost`](super::Hold::lost) completes.
    ///
    /// It should be far longer than any normal response: it is the last resort against forgotten streams.
    ///
    /// # Panics
    ///
    /// If it is shorter than 1 ms or longer than [`MAX_HOLD`] (30 days).
    #[track_caller]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        let max_hold = checked("max_hold", max_hold);
        self.edit(move |gate| gate.edit_terms(|terms| terms.bounds.max_hold = Some(max_hold)))
    }

    /// Sets the longest time that a response may be unread. Default: none.
    ///
    /// It counts from the moment at which the response head or a frame was handed to the server until the server asks for
    /// the next. A server does not ask while its connection is full, so this ends the slots of clients that stopped
    /// reading without disconnecting. Time in which the server waits for the service does not count, however long the
    /// service takes: that is bounded by [`max_hold`](Self::max_hold). A slow reader needs some time for what fits into the
    /// buffers on the way: a few seconds are too short.
    ///
    /// The bound ends with the response: a [`Hold`](super::Hold) may go on without one.
    ///
    /// # Panics
    ///
    /// If it is shorter than 1 ms or longer than [`MAX_HOLD`] (30 days).
    #[track_caller]
    pub fn idle(self, idle: Duration) -> Self {
        let idle = checked("idle", idle);
        self.edit(move |gate| gate.edit_terms(|terms| terms.bounds.idle = Some(idle)))
    }
}

#[track_caller]
fn checked(name: &str, bound: Duration) -> Duration {
    match check_bound(name, bound) {
        Ok(()) => bound,
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn check_bound(name: &str, bound: Duration) -> Result<(), ConfigError> {
    if (SHORTEST..=MAX_HOLD).contains(&bound) {
        return Ok(());
    }
    let message = format!("{name} is {bound:?}: it must be {SHORTEST:?} to {MAX_HOLD:?}");
    Err(ConfigError::value(message))
}
