//! The slot of a request, as seen by its handler.
//!
//! Tests: `tests/layer/slots.rs`.

use std::{fmt, future::pending, iter, ptr, sync::Arc, time::Duration};

use futures_util::future::select_all;
use http::Extensions;

use super::response::Outcome;
use crate::{
    charges::{Budget, unknown_rate},
    error::{AcquireError, AcquireErrorKind, LostErrorKind},
    keeper::KeeperHandle,
    limit::Limit,
    permit::{Share, WeakShare},
    permit_id::PermitId,
    telemetry::UnknownRates,
};

/// View of the slot of a request, in the request's extensions.
///
/// A `Slot` does not own the request's slot: keeping the view never delays the release. To use the slot for longer than the
/// response, as a WebSocket does, take a [`Hold`]. Under several [`LimitLayer`](super::LimitLayer)s, a `Slot` represents
/// all their slots.
///
/// Every request that passes a layer has a `Slot`. If no limit applies, because of the request's key, its route or
/// [`Mode::Off`](crate::Mode::Off), the `Slot` is never lost, and its [`Hold`] holds nothing.
///
/// With the feature `axum`, `Slot` is an extractor; without the feature, handlers take it from the request's extensions
/// (`Extension<Slot>` in axum).
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::http::StatusCode;
/// use tower_turnstile::Slot;
///
/// async fn report(slot: Slot) -> Result<&'static str, StatusCode> {
///     tokio::select! {
///         answer = work() => Ok(answer),
///         _ = slot.lost() => Err(StatusCode::SERVICE_UNAVAILABLE), // another request may run in our place
///     }
/// }
/// # async fn work() -> &'static str { "done" }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::get(report));
/// ```
#[derive(Clone)]
pub struct Slot {
    /// `None`: no limit applies to the request.
    share: Option<WeakShare>,
    /// The limits that the layer declares, whether they apply to the request or not.
    declared: Arc<DeclaredLimits>,
    /// The slot of the next outer layer.
    outer: Option<Arc<Slot>>,
}

/// The limits of a layer.
pub(crate) struct DeclaredLimits {
    limits: Vec<Limit>,
    unknown: Arc<UnknownRates>,
}

impl DeclaredLimits {
    pub(crate) fn new<'a>(
        limiter: &KeeperHandle,
        limits: impl IntoIterator<Item = &'a Limit>,
    ) -> Arc<Self> {
        let limits: Vec<Limit> = limits.into_iter().cloned().collect();
        let unknown = limiter.unknown_rates.clone();
        if limits.iter().any(|limit| limit.period().is_some()) {
            unknown.expect();
        }
        Arc::new(Self { limits, unknown })
    }

    /// Whether there is a rate of this name, or a limit with slots.
    fn has(&self, name: &str, is_rate: bool) -> bool {
        let is_meant = |limit: &Limit| limit.name() == name && limit.period().is_some() == is_rate;
        self.limits.iter().any(is_meant)
    }
}

impl Slot {
    /// Inserts the slot into the extensions, together with the slots of outer layers. `None`: no limit of this layer
    /// applies.
    pub(super) fn show(
        share: Option<&Share>,
        declared: &Arc<DeclaredLimits>,
        extensions: &mut Extensions,
    ) {
        let adds_nothing = share.is_none() && declared.limits.is_empty();
        if adds_nothing && extensions.get::<Self>().is_some() {
            return;
        }
        let outer = extensions.remove::<Self>();
        extensions.insert(Self {
            share: share.map(Share::downgrade),
            declared: declared.clone(),
            outer: outer.map(Arc::new),
        });
    }

    /// Keeps the slot for as long as the returned [`Hold`] lives. `None` if it was already released.
    ///
    /// Any number of holds may be taken; the slot is released when the response and all holds are gone. Under several
    /// layers, those that have not released their slots are held.
    pub fn hold(&self) -> Option<Hold> {
        let shares: Vec<_> = self.shares().filter_map(WeakShare::upgrade).collect();
        let is_released = shares.is_empty() && self.shares().next().is_some();
        (!is_released).then(|| Hold {
            shares,
            slot: self.clone(),
        })
    }

    /// Returns the id of the slot's permit, as operators see it. Under several layers, the innermost layer with a slot
    /// counts.
    ///
    /// `None` if no limit with slots applies, or the limiter is gone.
    pub fn id(&self) -> Option<PermitId> {
        self.shares().find_map(WeakShare::id)
    }

    /// Returns the units of the slot, from 1 to 64. See [`Scope::weight_by`](super::Scope::weight_by).
    ///
    /// Under several limits, returns the largest number under any of them. 1 if no limit applies.
    pub fn weight(&self) -> u32 {
        self.shares().map(WeakShare::weight).max().unwrap_or(1)
    }

    /// Returns whether the slot was lost while it was held, or an operator has revoked it.
    ///
    /// The lease has ended in the store, or a bound of the layer was reached ([`max_hold`](super::LimitLayer::max_hold),
    /// [`idle`](super::LimitLayer::idle)), and another request may run in its place. A lost slot stays lost.
    pub fn is_lost(&self) -> bool {
        self.shares().any(WeakShare::is_over)
    }

    /// Completes when the slot is lost, or an operator has revoked it, with the reason. If the slot is released first, the
    /// future never completes.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) -> LostErrorKind {
        any(self.shares().map(WeakShare::ended)).await
    }

    /// Returns the budget of the request at a rate, by the limit or its name, to charge it for a cost that is not known on
    /// arrival. See [Token budgets](crate::guide::tokens).
    ///
    /// If several layers have the rate, the innermost layer whose rate applies counts. If a layer's rate does not apply
    /// to the request, for example because the request has no key, its budget charges nothing.
    ///
    /// # Errors
    ///
    /// [`UnknownRate`](crate::AcquireErrorKind::UnknownRate) if no layer of the request has a rate of this name. See
    /// [`Permit::budget`](crate::Permit::budget).
    pub fn budget(&self, limit: impl AsRef<str>) -> Result<Budget, AcquireError> {
        let limit = limit.as_ref();
        let budget = self.shares().find_map(|share| share.budget(limit));
        let is_declared = || self.layers().any(|slot| slot.declared.has(limit, true));
        let idle = || is_declared().then_some(Budget::NONE);
        let unknown = || unknown_rate(&self.declared.unknown, limit);
        budget.or_else(idle).ok_or_else(unknown)
    }

    /// Pauses a limit of the request for its key, in all replicas, by the limit or its name: see
    /// [`Permit::pause`](crate::Permit::pause).
    ///
    /// Short for a [`report`](Self::report) of this pause.
    ///
    /// # Errors
    ///
    /// As [`report`](Self::report).
    pub fn pause(&self, limit: impl AsRef<str>, time: Duration) -> Result<(), AcquireError> {
        self.report(limit, Outcome::Pause(time))
    }

    /// Reports the outcome of the request to one of its limits, by the limit or its name, as if
    /// [`Scope::outcome_by`](super::Scope::outcome_by) had judged a response so.
    ///
    /// For handlers that know more than a response head shows, such as a preemption in a batching engine. Each report counts, so a
    /// handler reports an outcome once. If a layer's limit does not apply to the request, for example because the request has no
    /// key, or if the slot was released, nothing happens.
    ///
    /// ```
    /// use tower_turnstile::{AcquireError, Slot, layer::Outcome};
    ///
    /// fn on_preemption(slot: &Slot) -> Result<(), AcquireError> {
    ///     slot.report("gpu", Outcome::Overloaded)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`UnknownLimit`](AcquireErrorKind::UnknownLimit) if no layer of the request has a limit with slots of this name.
    pub fn report(&self, limit: impl AsRef<str>, outcome: Outcome) -> Result<(), AcquireError> {
        let limit = limit.as_ref();
        if !self.layers().any(|slot| slot.declared.has(limit, false)) {
            return Err(Limit::unknown(limit, AcquireErrorKind::UnknownLimit));
        }
        let mut shares = self.shares().filter_map(WeakShare::upgrade);
        shares.any(|share| outcome.apply(&share, limit));
        Ok(())
    }

    /// The slots of this layer and all outer layers.
    fn layers(&self) -> impl Iterator<Item = &Self> {
        iter::successors(Some(self), |slot| slot.outer.as_deref())
    }

    /// Whether the request has been admitted by a layer of the same limiter, and goes on.
    pub(super) fn is_held(&self, keeper: &KeeperHandle) -> bool {
        let mut shares = self.shares().filter_map(WeakShare::upgrade);
        shares.any(|share| ptr::eq(&*share.keeper, keeper))
    }

    fn shares(&self) -> impl Iterator<Item = &WeakShare> {
        self.layers().filter_map(|slot| slot.share.as_ref())
    }
}

/// Completes with the first of the futures, and never if there are none.
async fn any<F: Future>(futures: impl Iterator<Item = F>) -> F::Output {
    let futures: Vec<_> = futures.map(Box::pin).collect();
    if futures.is_empty() {
        pending().await
    } else {
        select_all(futures).await.0
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("id", &self.id())
            .field("lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

/// Keeps a [`Slot`] after its response has ended.
///
/// Dropping the hold releases the slot, once the response and other holds are gone too. Losing the slot does not end the
/// task that holds it, so a long-lived task should watch [`lost`](Self::lost). The future also completes when the slot has
/// been held as long as [`max_hold`](super::LimitLayer::max_hold) allows; the slot is then released, whatever the task
/// does.
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::{extract::ws::WebSocketUpgrade, response::Response};
/// use tower_turnstile::Slot;
///
/// async fn socket(slot: Slot, upgrade: WebSocketUpgrade) -> Response {
///     // The response ends with its 101; the conversation goes on.
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
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::get(socket));
/// ```
#[must_use = "dropping a hold releases its slot"]
pub struct Hold {
    shares: Vec<Share>,
    /// The slot that the shares keep.
    slot: Slot,
}

impl Hold {
    /// Returns the id of the slot's permit. See [`Slot::id`].
    pub fn id(&self) -> Option<PermitId> {
        self.shares.iter().find_map(Share::id)
    }

    /// Returns whether the slot was lost. See [`Slot::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.shares
            .iter()
            .any(|share| share.over(|_| true).is_some())
    }

    /// Returns the budget of the request at a rate. See [`Slot::budget`].
    ///
    /// # Errors
    ///
    /// As [`Slot::budget`].
    pub fn budget(&self, limit: impl AsRef<str>) -> Result<Budget, AcquireError> {
        self.slot.budget(limit)
    }

    /// Pauses a limit of the request for its key. See [`Slot::pause`].
    ///
    /// # Errors
    ///
    /// As [`Slot::pause`].
    pub fn pause(&self, limit: impl AsRef<str>, time: Duration) -> Result<(), AcquireError> {
        self.slot.pause(limit, time)
    }

    /// Reports the outcome of the request to one of its limits. See [`Slot::report`].
    ///
    /// # Errors
    ///
    /// As [`Slot::report`].
    pub fn report(&self, limit: impl AsRef<str>, outcome: Outcome) -> Result<(), AcquireError> {
        self.slot.report(limit, outcome)
    }

    /// Completes when the slot is lost, or an operator has revoked it, with the reason.
    ///
    /// A revoked slot stays taken until the hold is dropped.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) -> LostErrorKind {
        any(self.shares.iter().map(|share| share.ended(|_| true))).await
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("id", &self.id())
            .field("lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}
