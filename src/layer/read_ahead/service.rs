//! The service: replays to the inner service what was read of a body.
//!
//! Tests: `tests/layer/read_ahead.rs`.

use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response, Version, header};
use http_body::Body;
use tower_service::Service;

use super::{ReadAheadBody, ReadAheadFuture};
use crate::layer::{Limited, ResponseBody};

/// A service whose requests are limited, and whose waiting requests read ahead.
///
/// Created by a [`ReadAheadLayer`](super::ReadAheadLayer).
#[derive(Clone, Debug)]
pub struct ReadAhead<S> {
    limited: Limited<S>,
    bound: usize,
}

impl<S> ReadAhead<S> {
    pub(super) fn new(limited: Limited<S>, bound: usize) -> Self {
        Self { limited, bound }
    }

    /// Returns a reference to the inner service.
    pub fn get_ref(&self) -> &S {
        self.limited.get_ref()
    }

    /// Returns a mutable reference to the inner service. Calls on it are not limited.
    pub fn get_mut(&mut self) -> &mut S {
        self.limited.get_mut()
    }

    /// Returns the inner service, without the limit.
    pub fn into_inner(self) -> S {
        self.limited.into_inner()
    }
}

impl<S, Q, R> Service<Request<Q>> for ReadAhead<S>
where
    S: Service<Request<ReadAheadBody<Q>>, Response = Response<R>, Future: Send + 'static> + Clone,
    Q: Body<Data = Bytes> + Unpin,
    R: Body + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ReadAheadFuture<S, Q>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.limited.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        // Over HTTP/2 a refusal ends only its stream, and the client sees it.
        let asks = request.headers().contains_key(header::EXPECT);
        let sends = (request.version() < Version::HTTP_2).then_some(!asks);
        let request = request.map(|body| ReadAheadBody::new(body, self.bound));
        ReadAheadFuture::new(self.limited.call(request), sends)
    }
}
