//! The layer: made by a limiter, and its settings.
//!
//! Tests: `tests/layer/`, by theme.

use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode, request::Parts};
use tower_layer::Layer;

#[cfg(feature = "config")]
use super::gates::Routing;
use super::{
    gate::{Gate, Refuse},
    gates::Gates,
    guard::Terms,
    options::{OnLost, ReleaseAt},
    policy::Policy,
    refusal::Refusal,
    scope::Scope,
    service::Limited,
};
#[cfg(feature = "config")]
use crate::limit::MAX_SCOPES;
use crate::{error::ConfigError, keeper::Bounds, limiter::Limiter};

/// Puts a limit before a service. Made by [`Limiter::layer`].
///
/// | setting | default |
/// | --- | --- |
/// | [`on_lost`](Self::on_lost) | [`OnLost::Continue`] |
/// | [`release_at`](Self::release_at) | [`ReleaseAt::BodyEnd`] |
/// | [`max_hold`](Self::max_hold) | none |
/// | [`idle`](Self::idle) | none |
/// | [`limited_status`](Self::limited_status) | 429 if the scope has keys, 503 if all callers share the limit |
/// | [`unavailable_status`](Self::unavailable_status) | 503 |
/// | [`refuse_with`](Self::refuse_with) | problem details in JSON ([`Refusal::to_response`]); a status for gRPC clients ([`Refusal::to_grpc_response`]) |
/// | [`rate_limit_fields`](Self::rate_limit_fields) | none |
///
/// See the [module's documentation](super) for examples.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct LimitLayer {
    pub(crate) gates: Gates,
}

impl Limiter {
    /// A layer that takes a slot for each request. The policy is a [`Limit`](crate::Limit), a [`Scope`], or a list of
    /// scopes: see [`Policy`].
    ///
    /// # Panics
    ///
    /// If a value of a limit is out of range, or this limiter knows another limit of the same name and different
    /// values; if the policy is empty, has more than [`MAX_SCOPES`](crate::MAX_SCOPES), or names a limit twice.
    /// [`Limiter::try_layer`] returns that as an error.
    #[track_caller]
    pub fn layer(&self, policy: impl Into<Policy>) -> LimitLayer {
        match self.try_layer(policy) {
            Ok(layer) => layer,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`layer`](Self::layer), for limits from a configuration.
    ///
    /// # Errors
    ///
    /// Whatever makes [`layer`](Self::layer) panic.
    pub fn try_layer(&self, policy: impl Into<Policy>) -> Result<LimitLayer, ConfigError> {
        let policy = policy.into();
        policy.validate()?;
        let number = |scope: Scope| {
            let number = self.keepers().register(scope.limit())?;
            if scope.may_lack_key() {
                self.keepers()
                    .meter(number)
                    .expect_unkeyed(scope.requires_key());
            }
            Ok((number, scope))
        };
        let scopes = policy.0.into_iter().map(number);
        let scopes = scopes.collect::<Result<_, ConfigError>>()?;
        Ok(LimitLayer::new(self, scopes))
    }
}

impl LimitLayer {
    fn new(limiter: &Limiter, scopes: Vec<(usize, Scope)>) -> Self {
        let terms = Terms {
            on_lost: OnLost::default(),
            bounds: Bounds::default(),
            limit_name: String::new(),
            meter: None,
        };
        let mut gate = Gate {
            keepers: limiter.keepers().clone(),
            scopes,
            terms: Arc::new(terms),
            release_at: ReleaseAt::default(),
            limited_status: None,
            unavailable_status: StatusCode::SERVICE_UNAVAILABLE,
            refuse: None,
            rate_limit_fields: false,
        };
        gate.name_first();
        Self {
            gates: Gates::One(Arc::new(gate)),
        }
    }

    /// Lets every request pass.
    #[cfg(feature = "config")]
    pub(crate) fn open(limiter: &Limiter) -> Self {
        Self::new(limiter, Vec::new())
    }

    /// One layer for the limits of all these, with the strictest of their settings, and the statuses of the first.
    /// `None`: there are too many.
    #[cfg(feature = "config")]
    pub(crate) fn together(layers: &[&Self]) -> Option<Self> {
        let mut gates = layers.iter().filter_map(|layer| match &layer.gates {
            Gates::One(gate) => Some(gate),
            Gates::Routed(_) => None,
        });
        let mut together = Gate::clone(gates.next()?);
        for gate in gates {
            together.tighten(gate);
            for (number, scope) in &gate.scopes {
                let counts =
                    |(known, other): &(usize, Scope)| known == number && other.has_key_of(scope);
                if !together.scopes.iter().any(counts) {
                    together.scopes.push((*number, scope.clone()));
                }
            }
        }
        together.name_first();
        (together.scopes.len() <= MAX_SCOPES).then(|| Self {
            gates: Gates::One(Arc::new(together)),
        })
    }

    /// Takes each request to the layer that is found for it.
    #[cfg(feature = "config")]
    pub(crate) fn routed(routing: Arc<dyn Routing>) -> Self {
        Self {
            gates: Gates::Routed(routing),
        }
    }

    /// What becomes of a response whose slot is lost. Default: [`OnLost::Continue`].
    ///
    /// Abort keeps to the limit whatever happens to this process, and breaks responses when the store is gone for a
    /// whole lease. A response that may be aborted costs a few allocations more.
    pub fn on_lost(self, on_lost: OnLost) -> Self {
        self.edit(move |gate| Arc::make_mut(&mut gate.terms).on_lost = on_lost)
    }

    /// When slots are given back. Default: [`ReleaseAt::BodyEnd`].
    pub fn release_at(self, release_at: ReleaseAt) -> Self {
        self.edit(move |gate| gate.release_at = release_at)
    }

    /// The status of a refusal because the limit was reached. Default: 429 if the scope has keys, since the limit is
    /// then the caller's own; 503 if all callers share it. gRPC clients are not told in a status of HTTP.
    ///
    /// # Panics
    ///
    /// If the status is not 400 to 599.
    #[track_caller]
    pub fn limited_status(self, status: StatusCode) -> Self {
        let status = refusing(status);
        self.edit(move |gate| gate.limited_status = Some(status))
    }

    /// The status of any other refusal: store out of order, shutting down, slot lost. Default: 503.
    ///
    /// # Panics
    ///
    /// If the status is not 400 to 599.
    #[track_caller]
    pub fn unavailable_status(self, status: StatusCode) -> Self {
        let status = refusing(status);
        self.edit(move |gate| gate.unavailable_status = status)
    }

    /// Builds refusals in your own form, from the reason and the head of the request.
    ///
    /// The [`Refusal`] is put in the extensions of whatever is returned. A closure that only adds to the default can
    /// start from [`Refusal::to_response`] or, where it answers gRPC clients, [`Refusal::to_grpc_response`].
    ///
    /// ```
    /// use http::Response;
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// let layer = Limiter::in_memory()
    ///     .layer(Limit::concurrent("chat", 5).by_header("x-api-key"))
    ///     .refuse_with(|refusal, head| {
    ///         let mut response = Response::new(format!("{} is busy, come back later", head.uri.path()));
    ///         *response.status_mut() = refusal.status();
    ///         response
    ///     });
    /// ```
    pub fn refuse_with<B: Into<Bytes>>(
        self,
        refuse: impl Fn(&Refusal, &Parts) -> Response<B> + Send + Sync + 'static,
    ) -> Self {
        let refuse: Arc<Refuse> =
            Arc::new(move |refusal, head| refuse(refusal, head).map(Into::into));
        self.edit(move |gate| gate.refuse = Some(refuse.clone()))
    }

    /// Tells clients in each response, and in each refusal, how their limits stand, so that they can slow down before
    /// they are refused: the fields `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11.
    /// Default: none.
    ///
    /// ```http
    /// RateLimit-Policy: "chat";q=5;qu="concurrent-requests", "opens";q=60;w=60;qu="requests"
    /// RateLimit: "chat";r=2, "opens";r=12;t=1
    /// ```
    ///
    /// - `q` is the limit, `r` what was left when this process last heard, and `t` the time in seconds until there is
    ///   more, rounded up, where that is known.
    /// - A window `w` has whole seconds. A rate with another period is told for a period rounded up: 10 in 100 ms is
    ///   `q=100;w=1`.
    /// - Names are strings of ASCII there. `%` and whatever is not printable ASCII are percent-encoded, here as in
    ///   the problem details.
    /// - A response without a known standing has no fields, and a limit in [`Mode::Shadow`](crate::Mode::Shadow) is not
    ///   told of. Keys are never told (`pk`).
    /// - Fields that the service has set stay, and these are added to them.
    ///
    /// They tell strangers how much the service can take. For limits that all callers share, that may be too much.
    pub fn rate_limit_fields(self) -> Self {
        self.edit(move |gate| gate.rate_limit_fields = true)
    }

    pub(super) fn edit(mut self, edit: impl Fn(&mut Gate) + Send + Sync + 'static) -> Self {
        self.gates.edit(edit);
        self
    }
}

#[track_caller]
fn refusing(status: StatusCode) -> StatusCode {
    let refuses = status.is_client_error() || status.is_server_error();
    assert!(refuses, "{status} is no status for a refusal");
    status
}

impl<S> Layer<S> for LimitLayer {
    type Service = Limited<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Limited::new(inner, self.gates.clone())
    }
}
