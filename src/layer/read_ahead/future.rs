//! The response future: the limit's, and the body's reader beside it while the request waits.
//!
//! Tests: `tests/layer/read_ahead.rs`, `replay.rs`.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::{runtime::Handle, time::Sleep};
use tower_service::Service;

use super::ReadAheadBody;
use crate::layer::{RefusalKind, ResponseBody, ResponseFuture};

/// Longer than the store takes to answer, so that a request that waits for it is in the queue. A request that is admitted
/// or refused at once reads nothing.
const READ_AFTER: Duration = Duration::from_millis(20);

pin_project! {
    /// Response future of a [`ReadAhead`](super::ReadAhead) service.
    ///
    /// Dropping it gives up the queue position, or releases the slot.
    pub struct ReadAheadFuture<S, Q>
    where
        S: Service<Request<ReadAheadBody<Q>>>,
    {
        #[pin]
        limited: ResponseFuture<S, ReadAheadBody<Q>>,
        // Until the reading begins. Made when the request first has to wait.
        pause: Option<Pin<Box<Sleep>>>,
    }
}

impl<S, Q> ReadAheadFuture<S, Q>
where
    S: Service<Request<ReadAheadBody<Q>>>,
{
    pub(super) fn new(limited: ResponseFuture<S, ReadAheadBody<Q>>) -> Self {
        Self {
            limited,
            pause: None,
        }
    }
}

impl<S, Q, R> Future for ReadAheadFuture<S, Q>
where
    S: Service<Request<ReadAheadBody<Q>>, Response = Response<R>, Future: Send + 'static>,
    Q: Body<Data = Bytes> + Unpin,
    R: Body + Send + 'static,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        // First, so that a body which fails when the slot is there is the service's.
        if let Poll::Ready(result) = this.limited.as_mut().poll(cx) {
            return Poll::Ready(result);
        }
        let Some(body) = this.limited.as_mut().waiting() else {
            return Poll::Pending;
        };
        if body.is_read() {
            return Poll::Pending;
        }
        // Requests can wait without a runtime here: the limiter may have been given one.
        if this.pause.is_none() && Handle::try_current().is_ok() {
            *this.pause = Some(Box::pin(tokio::time::sleep(READ_AFTER)));
        }
        if let Some(pause) = this.pause {
            ready!(pause.as_mut().poll(cx));
        }
        match ready!(body.poll_ahead(cx)) {
            Ok(()) => Poll::Pending,
            Err(_) => {
                let response = this.limited.give_up(RefusalKind::BodyFailed);
                Poll::Ready(Ok(response))
            }
        }
    }
}

impl<S, Q> fmt::Debug for ReadAheadFuture<S, Q>
where
    S: Service<Request<ReadAheadBody<Q>>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadAheadFuture").finish_non_exhaustive()
    }
}
