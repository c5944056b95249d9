//! The layer and its settings.
//!
//! Tests: `tests/layer/`, by theme.

use std::{borrow::Cow, sync::Arc};

use http::{StatusCode, request::Parts};
use tower_layer::Layer;

#[cfg(feature = "config")]
use super::gates::Routing;
use super::{
    gates::{Gate, GateScope, Gates, Labels, Refuse},
    keys::{Policy, Scope},
    refusal::{Refusal, RefusalResponse},
    response::{OnLost, ReleaseAt},
    service::Limited,
    slot::DeclaredLimits,
};
use crate::{error::ConfigError, limiter::Limiter};

/// Layer that applies limits to a service. Created by [`Limiter::layer`].
///
/// | setting | default |
/// | --- | --- |
/// | [`on_lost`](Self::on_lost) | [`OnLost::Continue`] |
/// | [`at_shutdown`](Self::at_shutdown) | as `on_lost` |
/// | [`release_at`](Self::release_at) | [`ReleaseAt::BodyEnd`] |
/// | [`max_hold`](Self::max_hold) | none |
/// | [`idle`](Self::idle) | none |
/// | [`limited_status`](Self::limited_status) | 429 if the scope has a key source, else 503 |
/// | [`unavailable_status`](Self::unavailable_status) | 503 |
/// | [`refuse_with`](Self::refuse_with) | problem details in JSON ([`Refusal::to_response`]); a status for gRPC clients ([`Refusal::to_grpc_response`]) |
/// | [`rate_limit_fields`](Self::rate_limit_fields) | none |
///
/// See the [module](super) for examples, and [Keys and policies](crate::guide::keys) for its position in a stack. To turn a
/// limit off, use [`Mode::Off`](crate::Mode::Off). tower's `option_layer` needs the same type of response body with and
/// without the layer: in axum, `option_layer(limit.map(|limit| (MapResponseBodyLayer::new(Body::new), limit)))`, with
/// tower-http's `MapResponseBodyLayer`.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct LimitLayer {
    pub(crate) gates: Gates,
}

impl Limiter {
    /// Creates a layer that acquires a slot for each request.
    ///
    /// The policy is a [`Limit`](crate::Limit), a [`Scope`], or a list or tuple of them: see [`Policy`].
    ///
    /// # Errors
    ///
    /// If a value of a limit is out of range, if this limiter has another limit of the same name with different values, or
    /// if the policy is empty, has more than [`Policy::MAX_SCOPES`](crate::Policy::MAX_SCOPES) scopes, or has a limit twice.
    pub fn layer(&self, policy: impl Into<Policy>) -> Result<LimitLayer, ConfigError> {
        let policy = policy.into();
        policy.validate()?;
        let register = |scope: Scope| {
            let (limit, meter) = self.keeper().register(scope.limit())?;
            if scope.may_lack_key() {
                meter.expect_unkeyed(scope.requires_key());
            }
            if scope.requires_tenant() {
                meter.expect_unkeyed(true);
            }
            if scope.judges() {
                meter.expect_pauses();
            }
            Ok(GateScope {
                limit,
                meter,
                scope,
            })
        };
        let scopes = policy.0.into_iter().map(register);
        let scopes = scopes.collect::<Result<_, ConfigError>>()?;
        Ok(LimitLayer::new(self, scopes))
    }
}

impl LimitLayer {
    fn new(limiter: &Limiter, scopes: Vec<GateScope>) -> Self {
        let limits = scopes.iter().map(|of| of.scope.limit());
        let mut gate = Gate {
            keeper: limiter.keeper().clone(),
            declared: DeclaredLimits::new(limiter.keeper(), limits),
            scopes,
            terms: Arc::default(),
            release_at: ReleaseAt::default(),
            limited_status: None,
            unavailable_status: StatusCode::SERVICE_UNAVAILABLE,
            refuse: None,
            rate_limit_fields: false,
            labels: Labels::default(),
        };
        let meter = gate.first().map(|first| first.meter.clone());
        gate.edit_terms(|terms| {
            // Aborted responses are reported for the first scope's limit.
            terms.meter = meter;
            terms.may_be_revoked = limiter.is_operable();
        });
        Self {
            gates: Gates::One(Arc::new(gate)),
        }
    }

    /// Lets every request pass.
    #[cfg(feature = "config")]
    pub(crate) fn open(limiter: &Limiter) -> Self {
        Self::new(limiter, Vec::new())
    }

    /// Lets handlers name all these limits, even if they do not apply to the layer's requests.
    #[cfg(feature = "config")]
    pub(crate) fn declaring(self, declared: &Arc<DeclaredLimits>) -> Self {
        let declared = declared.clone();
        self.edit(move |gate| gate.declared = declared.clone())
    }

    /// The gate of a layer that is not routed.
    #[cfg(feature = "config")]
    pub(crate) fn into_gate(self) -> Arc<Gate> {
        match self.gates {
            Gates::One(gate) => gate,
            Gates::Routed(_) => unreachable!("a routed layer is not a route's"),
        }
    }

    /// Routes each request to its gate.
    #[cfg(feature = "config")]
    pub(crate) fn routed(routing: Arc<dyn Routing>) -> Self {
        Self {
            gates: Gates::Routed(routing),
        }
    }

    /// Sets the effect of a lost slot on its response. Default: [`OnLost::Continue`].
    ///
    /// [`OnLost::Abort`] keeps the cap even if this process stands still or is cut off, but breaks responses when the store
    /// is gone for a whole lease. With either setting, requests that a process admits by its fallback in an outage are not
    /// counted by other processes. With `Abort` a response costs a few more allocations.
    pub fn on_lost(self, on_lost: OnLost) -> Self {
        self.edit(move |gate| gate.edit_terms(|terms| terms.on_lost = on_lost))
    }

    /// Sets the effect of [`Limiter::shutdown`] on responses still open at its deadline.
    ///
    /// Default: the setting for a lost slot ([`on_lost`](Self::on_lost)). With [`OnLost::Abort`] here and
    /// [`OnLost::Continue`] for losses, an outage of the store cuts no streams, while a shutdown ends the remaining
    /// streams, including streams that had lost their slots before. Each ends with a [`LostError`](super::LostError), so
    /// that its client does not take the response for complete.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter, OnLost};
    ///
    /// const CHAT: Limit = Limit::concurrent("chat", 5);
    ///
    /// let limiter = Limiter::in_memory();
    /// let layer = limiter.layer(CHAT.by_header("x-api-key"))?.at_shutdown(OnLost::Abort);
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    pub fn at_shutdown(self, at_shutdown: OnLost) -> Self {
        self.edit(move |gate| gate.edit_terms(|terms| terms.at_shutdown = Some(at_shutdown)))
    }

    /// Sets when slots are released. Default: [`ReleaseAt::BodyEnd`].
    pub fn release_at(self, release_at: ReleaseAt) -> Self {
        self.edit(move |gate| gate.release_at = release_at)
    }

    /// Sets the status of refusals by a limit. Default: 429 for scopes with a key source, else 503, also if the limit
    /// is fair among tenants.
    ///
    /// A limit with keys is the caller's own; a shared limit reports that the service is at capacity. But tracing layers
    /// log a 503 as an error, and load balancers may take the replica for unhealthy, or send the request to another
    /// replica, which shares the limit: set 429 here to avoid these effects. gRPC clients get a gRPC status instead.
    ///
    /// # Panics
    ///
    /// If the status is not 400 to 599.
    #[track_caller]
    pub fn limited_status(self, status: StatusCode) -> Self {
        let status = refusing(status);
        self.edit(move |gate| gate.limited_status = Some(status))
    }

    /// Sets the status of refusals that are not the caller's: the store is unavailable or misconfigured, the limit is
    /// paused, the slot was lost, revoked or held for too long, there is no runtime, or the limiter is shutting down.
    /// Default: 503.
    ///
    /// # Panics
    ///
    /// If the status is not 400 to 599.
    #[track_caller]
    pub fn unavailable_status(self, status: StatusCode) -> Self {
        let status = refusing(status);
        self.edit(move |gate| gate.unavailable_status = status)
    }

    /// Sets a closure that builds refusals, from the reason and the request's head.
    ///
    /// The closure returns a response with any body: text, bytes, or a framework's body, such as
    /// `ApiError::from(refusal).into_response()` in axum. A closure that only adds to the default can start from
    /// [`Refusal::to_response`] or, for gRPC clients, [`Refusal::to_grpc_response`].
    ///
    /// The layer adds missing parts: `Retry-After` for a status of 400 or more, unless a retry is pointless
    /// ([`RefusalKind::NoKey`](super::RefusalKind::NoKey)); the items of limits that the closure's [rate limit
    /// fields](Self::rate_limit_fields) do not name, if the layer adds these fields; and the [`Refusal`] in the extensions.
    ///
    /// The closure does not see refusals inside the handler, such as by [`Budget::charge`](crate::Budget::charge): see
    /// [Refusals](crate::guide::keys#refusals).
    ///
    /// ```
    /// use http::Response;
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// let layer = Limiter::in_memory()
    ///     .layer(Limit::concurrent("chat", 5).by_header("x-api-key"))?
    ///     .refuse_with(|refusal, head| {
    ///         let mut response = Response::new(format!("{} is busy, come back later", head.uri.path()));
    ///         *response.status_mut() = refusal.status();
    ///         response
    ///     });
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    pub fn refuse_with<R: RefusalResponse<M>, M>(
        self,
        refuse: impl Fn(&Refusal, &Parts) -> R + Send + Sync + 'static,
    ) -> Self {
        let refuse: Arc<Refuse> =
            Arc::new(move |refusal, head| refuse(refusal, head).into_refusal());
        self.edit(move |gate| gate.refuse = Some(refuse.clone()))
    }

    /// Adds `RateLimit-Policy` and `RateLimit` to responses and refusals. Default: off.
    ///
    /// The fields report the limits' state, so that clients can slow down before they are refused. Their format is
    /// draft-ietf-httpapi-ratelimit-headers-11.
    ///
    /// ```http
    /// RateLimit-Policy: "chat";q=5;qu="concurrent-requests", "opens";q=60;w=60;qu="requests"
    /// RateLimit: "chat";r=2, "opens";r=12;t=1
    /// ```
    ///
    /// - `q` is the limit, `r` the remainder as last reported by the store, and `t` the time in seconds until the remainder
    ///   grows, rounded up, if known.
    /// - `qu` is the [unit](crate::Limit::unit) of a rate.
    /// - A window `w` has whole seconds. A rate with another period is converted to a period rounded up: 10 in 100 ms is
    ///   `q=100;w=1`.
    /// - Names of limits are ASCII strings. As in the problem details, `%` and all bytes other than printable ASCII are
    ///   percent-encoded.
    /// - A response whose limits' state is unknown has no fields. Limits in [`Mode::Shadow`](crate::Mode::Shadow) and keys
    ///   (`pk`) are left out.
    /// - Items set by the service or an inner layer are kept, and items with other names are added.
    ///
    /// The fields disclose the capacity of the service. For limits that all callers share, you may not want this.
    pub fn rate_limit_fields(self) -> Self {
        self.edit(move |gate| gate.rate_limit_fields = true)
    }

    /// Sets the label of a request in the views for [operators](crate::operate).
    ///
    /// Default: the method, and with the feature `axum` the matched route, such as `POST /chats/{id}`. Return routes and
    /// names of operations rather than paths, which may contain secrets. Labels are truncated to 128 bytes. A
    /// `&'static str` costs no allocation.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// let layer = Limiter::in_memory()
    ///     .layer(Limit::concurrent("chat", 5))?
    ///     .label_by(|head| if head.uri.path().starts_with("/v1/") { "v1" } else { "v2" });
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    #[cfg(feature = "operate")]
    pub fn label_by<L: Into<Cow<'static, str>>>(
        self,
        label: impl Fn(&Parts) -> L + Send + Sync + 'static,
    ) -> Self {
        let by = Arc::new(move |head: &Parts| label(head).into());
        self.edit(move |gate| gate.labels = Labels(Some(by.clone())))
    }

    pub(super) fn edit(mut self, edit: impl Fn(&mut Gate) + Send + Sync + 'static) -> Self {
        self.gates.edit(edit);
        self
    }
}

#[track_caller]
fn refusing(status: StatusCode) -> StatusCode {
    let refuses = status.is_client_error() || status.is_server_error();
    assert!(refuses, "{status} is not a status for a refusal");
    status
}

impl<S> Layer<S> for LimitLayer {
    type Service = Limited<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Limited::new(inner, self.gates.clone())
    }
}
