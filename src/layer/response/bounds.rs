//! The settings `max_hold` and `idle` of a layer, for responses that never end. `leases/bounded.rs` and `tied.rs` enforce them.
//!
//! Tests: `tests/layer/bounds.rs`, `stalled.rs`.

use std::time::Duration;

use crate::{error::ConfigError, layer::layer::LimitLayer};

/// Shortest bound: the resolution of timers.
const SHORTEST: Duration = Duration::from_millis(1);

/// Bounds for responses that never end.
///
/// When a response reaches a bound, its slot is released at once, regardless of [`on_lost`](Self::on_lost), and the
/// service's work ends: the layer drops the service's body, or its future if there is no response head yet, even if the
/// server does not poll because the client has stopped reading. So the cap also applies to the calls behind the layer, such
/// as a proxy's calls to its upstream. Frames that the server had taken may still be sent. Then the response ends with an
/// error ([`LostError`](crate::layer::LostError)), so that the client does not take it for complete. A slot of a limit in
/// [shadow mode](crate::Mode::Shadow) ends without its response. The bounds do not apply to requests that have rates
/// only, since these requests hold no slot.
///
/// The drop runs in a task on the runtime of the request, spawned when the slot ends. The next request may start before
/// this task runs.
impl LimitLayer {
    /// Longest bound of a slot, for [`max_hold`](Self::max_hold) and [`idle`](Self::idle): 30 days.
    pub const MAX_HOLD: Duration = Duration::from_secs(30 * 24 * 60 * 60);

    /// Sets the longest time that a request holds its slot, from its admission. Default: none.
    ///
    /// If there is no response head by then, the call to the service is dropped, as if the client had disconnected, and
    /// the request is refused ([`RefusalKind::HeldTooLong`](crate::layer::RefusalKind::HeldTooLong)). A [`Hold`](crate::layer::Hold)
    /// ends too: [`Hold::lost`](crate::layer::Hold::lost) completes.
    ///
    /// The bound should be far longer than any normal response: it is the last resort against forgotten streams.
    ///
    /// # Panics
    ///
    /// If the bound is shorter than 1 ms or longer than [`LimitLayer::MAX_HOLD`] (30 days).
    #[track_caller]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        assert_bound("max_hold", max_hold);
        self.edit(move |gate| gate.edit_terms(|terms| terms.bounds.max_hold = Some(max_hold)))
    }

    /// Sets the longest time that a response may be unread. Default: none.
    ///
    /// The time counts from the moment at which the server took the response head or a frame until the server asks for the
    /// next frame. A server does not ask while its connection is full, so the bound ends the slots of clients that stopped
    /// reading without disconnecting. Time in which the server waits for the service does not count, however long the
    /// service takes: see [`max_hold`](Self::max_hold). A slow reader needs some time to empty the buffers on the way: a
    /// few seconds are too short. Small keep-alives always fit into the buffers, so the bound does not notice
    /// a dead network.
    ///
    /// The bound ends with the response, and does not apply to a [`Hold`](crate::layer::Hold) that outlives it.
    ///
    /// # Panics
    ///
    /// If the bound is shorter than 1 ms or longer than [`LimitLayer::MAX_HOLD`] (30 days).
    #[track_caller]
    pub fn idle(self, idle: Duration) -> Self {
        assert_bound("idle", idle);
        self.edit(move |gate| gate.edit_terms(|terms| terms.bounds.idle = Some(idle)))
    }
}

#[track_caller]
fn assert_bound(name: &str, bound: Duration) {
    if let Err(error) = check_bound(name, bound) {
        panic!("{error}");
    }
}

pub(crate) fn check_bound(name: &str, bound: Duration) -> Result<(), ConfigError> {
    let longest = LimitLayer::MAX_HOLD;
    if (SHORTEST..=longest).contains(&bound) {
        return Ok(());
    }
    let message = format!("{name} is {bound:?}: it must be {SHORTEST:?} to {longest:?}");
    Err(ConfigError::value(message))
}
