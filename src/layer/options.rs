//! Choices of a layer: when a slot is released, and what its loss does to the response.
//!
//! Tests: `tests/layer/lost.rs`, `releases.rs`.

/// What becomes of a response whose slot is lost: its lease has ended in the store, and somebody else may have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum OnLost {
    /// It goes on, over the limit. The handler can see it in its [`Slot`](super::Slot).
    #[default]
    Continue,
    /// It ends: the service's body is dropped, also while the server asks for no frames because the client has stopped
    /// reading. What the server had taken may still be sent, and then the client sees an error
    /// ([`LostError`](super::LostError)) in place of the end. If there is no response head yet, the service's future
    /// is dropped, as if the client had left, and the request is refused ([`RefusalKind::Lost`]).
    ///
    /// The local deadline of a lease is a little before its end in the store (2 ms and a thousandth of the lease), so
    /// the work behind the layer has ended when somebody else gets the slot, if the runtime of the request gets to a
    /// task within this time.
    ///
    /// [`RefusalKind::Lost`]: super::RefusalKind::Lost
    Abort,
}

/// When the slot of a request is given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum ReleaseAt {
    /// When the response body has ended, failed or been dropped.
    #[default]
    BodyEnd,
    /// When the response head is there. For limits on the work before the first byte, such as a search whose result
    /// is then sent at the client's pace. The body cannot lose its slot any more.
    Head,
}
