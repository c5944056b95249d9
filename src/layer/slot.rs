//! The slot of a request, as its handler sees it.
//!
//! Tests: `tests/layer/slots.rs`.

use std::{fmt, future::pending, iter, sync::Arc};

use futures_util::future::select_all;
use http::Extensions;

use crate::permit::{Share, WeakShare};

/// The slot that a request runs in, found in the request's extensions.
///
/// It does not own the slot: keeping it, or a request that carries it, never delays the release. To use the slot for
/// longer than the response, as a WebSocket does, take a [`Hold`]. Under several [`LimitLayer`](super::LimitLayer)s
/// it stands for all their slots at once.
///
/// Every request that passes a layer has one. If no limit applies to the request, because of its key, its route or
/// [`Mode::Off`](crate::Mode::Off), it stands for no slot: it is never lost, and a [`Hold`] of it holds nothing.
///
/// ```
/// use axum::Extension;
/// use tower_turnstile::Slot;
///
/// async fn report(Extension(slot): Extension<Slot>) -> &'static str {
///     tokio::select! {
///         answer = work() => answer,
///         () = slot.lost() => "somebody else may run in our place: better to stop here",
///     }
/// }
/// # async fn work() -> &'static str { "done" }
/// ```
#[derive(Clone)]
pub struct Slot {
    /// `None`: no limit applies to the request.
    share: Option<WeakShare>,
    /// Of the layer around the one that made this slot.
    outer: Option<Arc<Slot>>,
}

impl Slot {
    /// Shows the slot to the handler, together with those of outer layers.
    pub(super) fn show(share: &Share, extensions: &mut Extensions) {
        let outer = extensions.remove::<Self>();
        extensions.insert(Self {
            share: Some(share.downgrade()),
            outer: outer.map(Arc::new),
        });
    }

    /// Shows the handler of an unlimited request the slot of the outer layers, or one that stands for none.
    pub(super) fn show_none(extensions: &mut Extensions) {
        if extensions.get::<Self>().is_none() {
            extensions.insert(Self {
                share: None,
                outer: None,
            });
        }
    }

    /// Keeps the slot for as long as the returned [`Hold`] lives. `None` if it was given back already.
    ///
    /// Any number of holds may be taken; the slot returns when the response and all holds are gone.
    pub fn hold(&self) -> Option<Hold> {
        let shares = self.shares().map(WeakShare::upgrade);
        shares.collect::<Option<_>>().map(Hold)
    }

    /// Whether the slot was lost while it was held: its lease has ended in the store, or a bound of the layer was
    /// reached ([`max_hold`](super::LimitLayer::max_hold), [`idle`](super::LimitLayer::idle)), and somebody else may
    /// run in its place. Once over, it stays over.
    pub fn is_lost(&self) -> bool {
        self.shares().any(WeakShare::is_lost)
    }

    /// Completes when the slot is lost. If it is given back first, never.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) {
        any(self.shares().map(WeakShare::lost)).await;
    }

    /// Of this layer and those around it.
    fn shares(&self) -> impl Iterator<Item = &WeakShare> {
        let slots = iter::successors(Some(self), |slot| slot.outer.as_deref());
        slots.filter_map(|slot| slot.share.as_ref())
    }
}

/// Completes with the first of them. If there are none, never.
async fn any<F: Future>(futures: impl Iterator<Item = F>) {
    let futures: Vec<_> = futures.map(Box::pin).collect();
    match futures.is_empty() {
        true => pending().await,
        false => drop(select_all(futures).await),
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

/// Keeps a [`Slot`] after its response has ended. Dropping it gives the slot back, if the response is gone too.
///
/// Nothing ends a task that holds a lost slot: a long-lived holder should watch [`lost`](Self::lost). That completes too
/// when the slot has been held for as long as [`max_hold`](super::LimitLayer::max_hold) allows; the slot is given back
/// then, whatever the task does.
///
/// ```
/// use axum::{Extension, extract::ws::WebSocketUpgrade, response::Response};
/// use tower_turnstile::Slot;
///
/// async fn socket(Extension(slot): Extension<Slot>, upgrade: WebSocketUpgrade) -> Response {
///     // The response ends with its 101, the conversation does not.
///     let hold = slot.hold();
///     upgrade.on_upgrade(async move |mut socket| {
///         while let Some(Ok(message)) = socket.recv().await {
///             if socket.send(message).await.is_err() {
///                 break;
///             }
///         }
///         drop(hold);
///     })
/// }
/// ```
#[must_use = "dropping a hold gives its slot back"]
pub struct Hold(Vec<Share>);

impl Hold {
    /// As [`Slot::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.0.iter().any(Share::is_lost)
    }

    /// Completes when the slot is lost.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) {
        any(self.0.iter().map(|share| share.ended(|_| true))).await;
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}
