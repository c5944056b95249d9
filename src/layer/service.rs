//! The service: calls the inner service once the request has its slot.
//!
//! Tests: `tests/layer/transparency.rs`.

use std::{
    mem,
    task::{Context, Poll},
};

use http::{Request, Response};
use tower_service::Service;

use super::{
    body::{LimitedBody, ResponseBody},
    future::ResponseFuture,
    gates::Gates,
};

/// A service whose requests are limited. Created by a [`LimitLayer`](super::LimitLayer).
///
/// The futures and response bodies of the wrapped service must be `Send + 'static`: see [where the layer
/// goes](crate::guide::keys#where-the-layer-goes). A service that stays on one thread can acquire permits from a
/// [`Semaphore`](crate::Semaphore) instead, and keep them in its bodies. Response bodies must implement
/// [`http_body::Body`]; the compiler reports other types:
///
/// ```compile_fail,E0277
/// use http::{Request, Response};
/// use std::convert::Infallible;
/// use tower::{Layer, Service, service_fn};
/// use tower_turnstile::{Limit, Limiter};
///
/// let text = service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new("no body")));
/// let mut limited = Limiter::in_memory().layer(Limit::concurrent("chat", 5))?.layer(text);
/// let _ = limited.call(Request::new(())); // `&str` cannot be the response body of a limited service
/// # Ok::<(), tower_turnstile::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Limited<S> {
    inner: S,
    gates: Gates,
}

impl<S> Limited<S> {
    pub(super) fn new(inner: S, gates: Gates) -> Self {
        Self { inner, gates }
    }

    /// Returns a reference to the inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns a mutable reference to the inner service. Calls on it are not limited.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service, without the limit.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Q, R> Service<Request<Q>> for Limited<S>
where
    S: Service<Request<Q>, Response = Response<R>, Future: Send + 'static> + Clone,
    R: LimitedBody,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, Q>;

    /// Acquires no slot: a service is made ready before there is a request, and an idle connection would hold the slot.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        // Only this instance is ready; its clone may not be.
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        ResponseFuture::new(self.gates.find(&request), ready, request)
    }
}
