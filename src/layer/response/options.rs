//! Options of a layer: when a slot is released, and how its loss affects the response. The methods that set them are in
//! `layer/layer.rs`.
//!
//! Tests: `tests/layer/lost.rs`, `releases.rs`.

/// Decides how a response continues when its slot is lost.
///
/// The slot's lease has ended in the store, and another request may have the slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize),
    cfg_attr(test, derive(schemars::JsonSchema)),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum OnLost {
    /// The response continues over the limit. The handler can watch its [`Slot`](crate::layer::Slot).
    #[default]
    Continue,
    /// The response ends with an error, and the service's work is dropped.
    ///
    /// The layer drops the service's body even if the server does not poll because the client has stopped reading. Frames
    /// that the server had taken may still be sent; then the client sees an error ([`LostError`](crate::layer::LostError)). If
    /// there is no response head yet, the layer drops the service's future, as if the client had disconnected, and refuses
    /// the request ([`RefusalKind::Lost`](crate::layer::RefusalKind::Lost)). A slot of a limit in shadow mode
    /// ([`Mode::Shadow`](crate::Mode::Shadow)) ends no response.
    ///
    /// The local deadline of a lease is a little before its end in the store (2 ms and a thousandth of the lease), so the
    /// work behind the layer has ended when another request gets the slot, if the runtime runs a task within this time.
    Abort,
}

/// Decides when the slot of a request is released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize),
    cfg_attr(test, derive(schemars::JsonSchema)),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// The slot is released when the response body has ended, failed or been dropped. A body of a single frame, such as a
    /// string, has ended when the server takes it, before its client has read it.
    #[default]
    BodyEnd,
    /// The slot is released when the response head is ready.
    ///
    /// For limits on the work before the first byte, such as a search whose result is then sent at the client's pace. The
    /// body then has no slot that it could lose. It has no budget either: [`Budget::spend`](crate::Budget::spend) and
    /// [`Budget::settle`](crate::Budget::settle) do nothing once the slot is released. To spend in the body, keep the slot
    /// with a [`Hold`](crate::layer::Hold).
    Head,
}
