//! A bound on the time without a byte from the upstream.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};
use tower_turnstile::BoxError;

/// Body that fails if the upstream sends nothing for too long.
#[derive(Debug)]
pub(crate) struct Silent<B> {
    body: B,
    allowed: Duration,
    /// Set while waiting for a byte.
    timer: Option<Pin<Box<Sleep>>>,
}

/// Error of a body whose upstream sent nothing for `--silence`.
#[derive(Debug)]
pub(crate) struct SilenceError;

impl fmt::Display for SilenceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the upstream has sent nothing for too long")
    }
}

impl Error for SilenceError {}

impl<B> Silent<B> {
    pub(crate) fn new(body: B, allowed: Duration) -> Self {
        Self {
            body,
            allowed,
            timer: None,
        }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for Silent<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.timer = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let allowed = self.allowed;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(allowed)));
        if timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        tracing::warn!("the upstream has sent nothing for too long");
        Poll::Ready(Some(Err(SilenceError.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
