//! The service: one that is called once the request has its slot.
//!
//! Tests: `tests/layer/transparency.rs`.

use std::{
    mem,
    task::{Context, Poll},
};

use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::{body::ResponseBody, future::ResponseFuture, gates::Gates};

/// A service whose requests are limited. Made by a [`LimitLayer`](super::LimitLayer).
///
/// The futures and response bodies of the wrapped service must be `Send + 'static`: see
/// [the layer](super#what-the-service-must-be).
#[derive(Clone, Debug)]
pub struct Limited<S> {
    inner: S,
    gates: Gates,
}

impl<S> Limited<S> {
    pub(super) fn new(inner: S, gates: Gates) -> Self {
        Self { inner, gates }
    }

    /// The service within.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service within. Calls made on it are not limited.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Takes the limit off.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Q, R> Service<Request<Q>> for Limited<S>
where
    S: Service<Request<Q>, Response = Response<R>, Future: Send + 'static> + Clone,
    R: Body + Send + 'static,
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
