//! The response future: the limit's future, and beside it the reader of the body while the request waits, or after it was
//! refused.
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
use crate::layer::{
    RefusalKind, ResponseBody, ResponseFuture,
    gates::{Gate, Refused},
};

/// Wait before reading. Longer than an answer of a near store takes, so that requests that are admitted or refused at once
/// do not read ahead.
const READ_AFTER: Duration = Duration::from_millis(20);
/// How long a refusal waits for the end of the request's body.
const DISCARD_FOR: Duration = Duration::from_secs(1);

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
        // Whether the client sends its body, unasked or since it was read. `None`: a refusal ends only its stream.
        sends: Option<bool>,
        refused: Option<Discarding>,
    }
}

/// A refused request whose body is read to its end before the refusal is sent.
struct Discarding {
    reason: Refused,
    /// Bytes of the body that may still be read.
    left: usize,
    until: Pin<Box<Sleep>>,
}

impl<S, Q> ReadAheadFuture<S, Q>
where
    S: Service<Request<ReadAheadBody<Q>>>,
{
    pub(super) fn new(limited: ResponseFuture<S, ReadAheadBody<Q>>, sends: Option<bool>) -> Self {
        Self {
            limited,
            pause: None,
            sends,
            refused: None,
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
        if this.refused.is_none() {
            // Poll the limit first, so that a body that fails once the slot is granted goes to the service.
            match this.limited.as_mut().poll_admission(cx) {
                Poll::Ready(Ok(())) => return this.limited.poll(cx),
                Poll::Ready(Err(reason)) => {
                    let body = this.limited.as_mut().waiting();
                    let left = body.map_or(0, |body| body.discardable());
                    // Without timers, a client that sends nothing would never be refused.
                    if *this.sends != Some(true) || left == 0 || Handle::try_current().is_err() {
                        let response = this.limited.refuse(|gate| gate.refusal_of(&reason));
                        return Poll::Ready(Ok(response));
                    }
                    *this.refused = Some(Discarding {
                        reason,
                        left,
                        until: Box::pin(tokio::time::sleep(DISCARD_FOR)),
                    });
                }
                Poll::Pending => {}
            }
        }
        let Some(body) = this.limited.as_mut().waiting() else {
            return Poll::Pending;
        };
        if let Some(Discarding {
            reason,
            left,
            until,
        }) = this.refused
        {
            if until.as_mut().poll(cx).is_pending() {
                ready!(body.poll_discard(left, cx));
            }
            let response = this.limited.refuse(|gate| gate.refusal_of(reason));
            *this.refused = None;
            return Poll::Ready(Ok(response));
        }
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
        *this.sends = this.sends.map(|_| true);
        match ready!(body.poll_ahead(cx)) {
            Ok(()) => Poll::Pending,
            Err(_) => {
                let refusal = |gate: &Gate| gate.refusal(RefusalKind::BodyFailed);
                let response = this.limited.refuse(refusal);
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
