//! The service: one that is called once the request has its slot.
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
/// The futures and response bodies of the wrapped service must be `Send + 'static`: see
/// [where the layer goes](crate::guide::keys#where-the-layer-goes). Its response bodies must implement
/// [`http_body::Body`], which the compiler reports for others:
///
/// ```compile_fail,E0277
/// # use std::convert::Infallible;
/// # use http::{Request, Response};
/// # use tower::{Layer, ServiceExt, service_fn};
/// # use tower_turnstile::{Limit, Limiter};
/// # fn example() {
/// let text = service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new("no body")) });
/// let limited = Limiter::in_memory().layer(Limit::concurrent("chat", 5)).layer(text);
/// let response = ServiceExt::<Request<()>>::oneshot(limited, Request::new(()));
/// # }
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

    /// Takes no slot: a service is made ready before there is a request, and an idle connection would hold it.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        // Only this one is ready; its clone may not be.
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        ResponseFuture::new(self.gates.find(&request), ready, request)
    }
}
