//! The response future: the limit's future, and beside it the reader of the body while the request waits.
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

/// Wait before reading. Longer than an answer of a near store takes, so that requests that are admitted or refused at once
/// do not read ahead.
const READ_AFTER: Duration = Duration::from_millis(20);

pin_project! {
    /// Response future of a [`ReadAhead`](super::ReadAhead) service.
    ///
    /// Dropping the future leaves the queue, or releases the slot.
    pub struct ReadAheadFuture<S, Q>
    where
        S: Service<Request<ReadAheadBody<Q>>>,
    {
        #[pin]
        limited: ResponseFuture<S, ReadAheadBody<Q>>,
        // Timer until reading begins. Created when the request first has to wait.
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
        // Poll the limit first, so that a body that fails once the slot is granted goes to the service.
        if let Poll::Ready(result) = this.limited.as_mut().poll(cx) {
            return Poll::Ready(result);
        }
        let Some(body) = this.limited.as_mut().waiting() else {
            return Poll::Pending;
        };
        if body.is_read() {
            return Poll::Pending;
        }
        // The caller may have no runtime: the limiter may run on its own.
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
