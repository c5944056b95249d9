//! Support for axum's handlers and routes: the slot as an extractor, the refusal as a response, the route as a key.
//!
//! Tests: `tests/layer/axum.rs`, `acquire_errors.rs`.

use std::convert::Infallible;

use axum::{
    body::Body,
    extract::{FromRequestParts, MatchedPath, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{StatusCode, request::Parts};

use super::{keys::Scope, refusal::Refusal, slot::Slot};
use crate::{
    error::AcquireError,
    key::Key,
    limit::{Class, Limit},
};

/// Extracts the slot of the request. On a route without a [`LimitLayer`](super::LimitLayer) the request is answered with 500.
/// `Option<Slot>` is for routes that may have no layer.
///
/// ```
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
impl<S: Send + Sync> FromRequestParts<S> for Slot {
    type Rejection = StatusCode;

    async fn from_request_parts(head: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        head.extensions.get::<Self>().cloned().ok_or_else(|| {
            tracing::error!("a handler extracts a slot on a route without a limit layer");
            StatusCode::INTERNAL_SERVER_ERROR
        })
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for Slot {
    type Rejection = Infallible;

    async fn from_request_parts(head: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(head.extensions.get::<Self>().cloned())
    }
}

/// Converts like [`Refusal::to_response`], with the refusal in the extensions.
impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = self.to_response().map(Body::from);
        response.extensions_mut().insert(self);
        response
    }
}

/// Converts into a refusal, so a handler that returns `Result<_, AcquireError>` can use `semaphore.acquire().await?`.
///
/// The settings of layers (`limited_status`, `unavailable_status`, `refuse_with`, gRPC) do not apply. The problem
/// details, the status and `Retry-After` come from [`Refusal::to_response`]. The [`Refusal`] is in the extensions.
///
/// ```
/// use axum::{Router, extract::State, routing::post};
/// use tower_turnstile::{AcquireError, Limit, Limiter};
///
/// const EXPORT: Limit = Limit::concurrent("export", 1);
///
/// async fn export(State(limiter): State<Limiter>) -> Result<&'static str, AcquireError> {
///     let export = limiter.semaphore(&EXPORT, "acme").expect("one limit of this name");
///     let _permit = export.acquire().await?;
///     Ok("a long report")
/// }
///
/// let app: Router = Router::new()
///     .route("/export", post(export))
///     .with_state(Limiter::in_memory());
/// ```
impl IntoResponse for AcquireError {
    fn into_response(self) -> Response {
        Refusal::from(&self).into_response()
    }
}

impl Limit {
    /// Limits each axum route separately, by its matched path (`/users/{id}`).
    ///
    /// Needs the feature `axum`. Only layers inside a router know the path (`Router::layer`, `Router::route_layer`). A
    /// request that no route matches has no key: see [`Scope::require_key`]. The limit's [class](Self::class) is
    /// [`Class::Route`], unless it was set: if the limit is also used elsewhere, set this class there too.
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// const EACH: Limit = Limit::concurrent("each-route", 100);
    ///
    /// let app: Router = Router::new()
    ///     .route("/users/{id}", get(async || "a user"))
    ///     .route_layer(Limiter::in_memory().layer(EACH.by_matched_path())?);
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    pub fn by_matched_path(self) -> Scope {
        self.or_class(Class::Route)
            .by_key(|head| Some(Key::from(head.extensions.get::<MatchedPath>()?.as_str())))
    }
}
