//! The layer and its service: a limit around a service that takes the replayed body.
//!
//! Tests: `tests/layer/read_ahead.rs`.

use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{ReadAheadBody, ReadAheadFuture};
use crate::layer::{LimitLayer, Limited, ResponseBody};

/// Default for how much of a waiting request's body is read: 64 KiB.
pub const READ_AHEAD: usize = 64 * 1024;
/// Most that may be read ahead: 16 MiB.
pub const MAX_READ_AHEAD: usize = 16 * 1024 * 1024;

/// A [`LimitLayer`] that reads ahead in the bodies of waiting requests.
///
/// It notices HTTP/1 clients that disconnect while they queue. Created by [`LimitLayer::read_ahead`].
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct ReadAheadLayer {
    layer: LimitLayer,
    bound: usize,
}

impl LimitLayer {
    /// Reads ahead in the bodies of waiting requests, to notice disconnected HTTP/1 clients.
    ///
    /// hyper's HTTP/1 server notices a disconnect when it reads, and it stops reading while the body is not consumed. With
    /// this layer a request that has waited for 20 ms reads the first 64 KiB ([`READ_AHEAD`]) of its body, and replays it
    /// once it has its slot: the service gets the data, the trailers and the rest of the body in order. A request that gets
    /// its slot earlier reads nothing ahead.
    ///
    /// When the client disconnects, the queue position is given up at once if everything that it has sent of its body
    /// could be read ahead: a whole body of up to 64 KiB, or the first part of a longer one, with a length or chunked.
    /// Otherwise hyper stops reading, as without this layer, and the request keeps its position until it is admitted or its
    /// wait is over; [`up_to`](ReadAheadLayer::up_to) moves the bound. The same goes for a client that has sent the start of
    /// another request behind this one (pipelining). Over HTTP/2 every disconnect is noticed, with or without this layer.
    ///
    /// Other effects:
    ///
    /// - The service is called with another type of body, [`ReadAheadBody`]. axum and other services that are generic over
    ///   the body accept it. The body has to be [`Unpin`], as hyper's and axum's are.
    /// - The data that was read arrives as one frame.
    /// - A client that sent `Expect: 100-continue` gets its `100 Continue` while it waits.
    /// - A body that fails while the request waits, as when the client disconnects in the middle of it, refuses the request:
    ///   [`RefusalKind::BodyFailed`], with 400 and no body. The service does not see it. A layer that limits the length of
    ///   bodies makes them fail too: put it inside this one to answer in its own way.
    /// - Memory: each waiting request takes up to 64 KiB and one frame (hyper's are up to about 400 KiB) more.
    ///   [`Limit::max_waiters`](crate::Limit::max_waiters) bounds the queue of a key.
    ///
    /// The Tokio runtime that polls the requests needs timers.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use axum::{Router, routing::post};
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// static CHAT: Limit = Limit::concurrent("chat", 5).wait_up_to(Duration::from_secs(30));
    ///
    /// let limiter = Limiter::in_memory();
    /// let app: Router = Router::new()
    ///     .route("/chat", post(async |prompt: String| prompt))
    ///     .route_layer(limiter.layer(CHAT.clone().by_header("x-api-key")).read_ahead());
    /// ```
    ///
    /// [`RefusalKind::BodyFailed`]: crate::RefusalKind::BodyFailed
    pub fn read_ahead(self) -> ReadAheadLayer {
        ReadAheadLayer {
            layer: self,
            bound: READ_AHEAD,
        }
    }
}

impl ReadAheadLayer {
    /// Sets how many bytes of a body are read ahead. Default: 64 KiB ([`READ_AHEAD`]).
    ///
    /// With more than the longest body, every disconnect over HTTP/1 is noticed. Each waiting request may take as much
    /// memory.
    ///
    /// # Panics
    ///
    /// If it is 0, or more than 16 MiB ([`MAX_READ_AHEAD`]).
    #[track_caller]
    pub fn up_to(mut self, bytes: usize) -> Self {
        assert!(
            (1..=MAX_READ_AHEAD).contains(&bytes),
            "cannot read {bytes} bytes ahead: 1 to {MAX_READ_AHEAD} can be"
        );
        self.bound = bytes;
        self
    }
}

impl<S> Layer<S> for ReadAheadLayer {
    type Service = ReadAhead<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ReadAhead {
            limited: self.layer.layer(inner),
            bound: self.bound,
        }
    }
}

/// A service whose requests are limited and read ahead while they wait.
///
/// Created by a [`ReadAheadLayer`].
#[derive(Clone, Debug)]
pub struct ReadAhead<S> {
    limited: Limited<S>,
    bound: usize,
}

impl<S> ReadAhead<S> {
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
        let request = request.map(|body| ReadAheadBody::new(body, self.bound));
        ReadAheadFuture::new(self.limited.call(request))
    }
}
