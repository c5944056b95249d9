//! The response body: the service's, with the slot it runs in, or a refusal's.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::guard::Guard;
use crate::error::{BoxError, LostErrorKind};

pin_project! {
    /// Response body of a [`Limited`](super::Limited) service.
    ///
    /// Frames, trailers and the size hint are those of the service's body. The slot is given back at the first of: the
    /// body has ended, it says that it will end after the frame it just gave, it fails, or it is dropped. A server
    /// takes the last frame a little before the client has it.
    pub struct ResponseBody<B> {
        #[pin]
        source: Source<B>,
    }
}

pin_project! {
    #[project = SourceProj]
    enum Source<B> {
        Service {
            #[pin]
            body: B,
            guard: Guard,
        },
        /// A refusal's bytes, until they are taken; nothing after an abort.
        Bytes { bytes: Bytes },
    }
}

impl<B> Source<B> {
    const NOTHING: Self = Self::Bytes {
        bytes: Bytes::new(),
    };
}

impl<B> ResponseBody<B> {
    pub(super) fn refusal(bytes: Bytes) -> Self {
        Self {
            source: Source::Bytes { bytes },
        }
    }
}

impl<B: Body> ResponseBody<B> {
    /// A body that has ended already is never polled by some servers: HEAD, 204, 304.
    pub(super) fn new(body: B, mut guard: Guard) -> Self {
        if body.is_end_stream() {
            guard.release();
        }
        Self {
            source: Source::Service { body, guard },
        }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut source = self.project().source;
        match source.as_mut().project() {
            SourceProj::Bytes { bytes } if bytes.is_empty() => Poll::Ready(None),
            SourceProj::Bytes { bytes } => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes)))))
            }
            SourceProj::Service { mut body, guard } => {
                let polled = guard.poll(cx, |cx| body.as_mut().poll_frame(cx));
                let frame = match ready!(polled) {
                    Ok(frame) => frame,
                    Err(kind) => {
                        source.set(Source::NOTHING);
                        return Poll::Ready(Some(Err(LostError(kind).into())));
                    }
                };
                // A server that knows the length stops after the last frame, so ask for the end after each. It is a
                // reason to release and never to stop: trailers may still come.
                if !matches!(frame, Some(Ok(_))) || body.is_end_stream() {
                    guard.release();
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Service { body, .. } => body.is_end_stream(),
            Source::Bytes { bytes } => bytes.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Service { body, .. } => body.size_hint(),
            Source::Bytes { bytes } => SizeHint::with_exact(bytes.len() as u64),
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

/// The error that ends a response body whose slot is over: it was lost, with [`OnLost::Abort`](super::OnLost::Abort), or
/// has reached a bound ([`LimitLayer::max_hold`](super::LimitLayer::max_hold),
/// [`LimitLayer::idle`](super::LimitLayer::idle)).
#[derive(Debug)]
pub struct LostError(LostErrorKind);

impl LostError {
    /// Why the slot is over.
    pub fn kind(&self) -> LostErrorKind {
        self.0
    }
}

impl fmt::Display for LostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            LostErrorKind::Lost => "the slot of this response was lost",
            LostErrorKind::HeldTooLong => "this response held its slot for too long",
            LostErrorKind::Idle => "this response held its slot and was not read for too long",
        })
    }
}

impl Error for LostError {}
