//! The response body: the service's body with its slot, or a refusal's body.
//!
//! Tests: `tests/layer/releases.rs`, `transparency.rs`.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use pin_project_lite::pin_project;

use super::{
    refusal::{Form, RefusalBody, grpc},
    response::{SlotGuard, Tied},
};
use crate::{
    error::{BoxError, LostErrorKind},
    permit::Share,
};

pin_project! {
    /// Response body of a [`Limited`](super::Limited) service.
    ///
    /// Frames, trailers and the size hint come unchanged from the service's body. The slot is released as soon as the body
    /// has ended, reports its end after a frame, fails, or is dropped. A server takes the last frame a little before the
    /// client receives it.
    ///
    /// If the slot ends first, and the slot's end is set to end the response ([`OnLost::Abort`](super::OnLost::Abort),
    /// [`LimitLayer::max_hold`](super::LimitLayer::max_hold), [`LimitLayer::idle`](super::LimitLayer::idle)), the service's
    /// body is dropped at once, whether or not the response body is polled. The next frame is a [`LostError`], or for a gRPC
    /// call its trailers, with the status `UNAVAILABLE`.
    pub struct ResponseBody<B> {
        #[pin]
        source: Source<B>,
    }
}

pin_project! {
    #[project = SourceProj]
    enum Source<B> {
        /// The service's body, which does not end with its slot.
        Plain {
            #[pin]
            body: B,
            share: Option<Share>,
        },
        /// The service's body, which ends with its slot.
        Tied { body: Tied<B>, form: Form },
        /// The body of a `Tied` that has released its slot.
        Freed { body: Pin<Box<B>> },
        /// The body of a refusal, or no body after an abort.
        Refusal {
            #[pin]
            body: RefusalBody,
        },
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn refusal(body: RefusalBody) -> Self {
        Self {
            source: Source::Refusal { body },
        }
    }
}

/// An ended body without a slot, for middleware that makes its own responses, such as a timeout.
impl<B> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::refusal(RefusalBody::Left(Full::default()))
    }
}

/// Response bodies of services behind a [`LimitLayer`](super::LimitLayer): every [`Body`] that is `Send + 'static`.
///
/// The trait exists for its name, which the compiler's errors show.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the response body of a limited service",
    label = "not an `http_body::Body` that is `Send + 'static`",
    note = "a service behind a `LimitLayer` returns an `http::Response` whose body implements `http_body::Body` and is \
            `Send + 'static`: for text or bytes use `http_body_util::Full`, for a body that is not `Send` a boxed one \
            (`axum::body::Body::new`, `BodyExt::boxed_unsync`)"
)]
pub trait LimitedBody: Body + Send + 'static {}

#[diagnostic::do_not_recommend]
impl<B: Body + Send + 'static> LimitedBody for B {}

impl<B: Body + Send + 'static> ResponseBody<B> {
    /// Releases the slot at once if the body has already ended: some servers never poll such a body (HEAD, 204, 304).
    #[inline]
    pub(super) fn new(body: B, guard: SlotGuard, form: Form) -> Self {
        let source = match guard {
            _ if body.is_end_stream() => Source::Plain { body, share: None },
            SlotGuard::Plain(share) => Source::Plain { body, share },
            SlotGuard::Tied(tie) => {
                tie.begin_unread();
                let body = Tied::new(body, tie);
                body.watch();
                Source::Tied { body, form }
            }
        };
        Self { source }
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
        let frame = match source.as_mut().project() {
            SourceProj::Plain { mut body, share } => {
                let frame = ready!(body.as_mut().poll_frame(cx));
                if share.is_some() && is_last(&frame, &*body) {
                    *share = None;
                }
                frame
            }
            SourceProj::Tied { body, form } => {
                let polled = body.poll(cx, |mut body, cx| {
                    let polled = body.as_mut().poll_frame(cx);
                    polled.map(|frame| (is_last(&frame, &*body), frame))
                });
                match ready!(polled) {
                    Ok((is_last, frame)) => {
                        if is_last && let Some(body) = body.free() {
                            source.set(Source::Freed { body });
                        }
                        frame
                    }
                    Err(kind) => {
                        let error = LostError(kind);
                        let end = match form {
                            Form::Grpc => {
                                Ok(Frame::trailers(grpc::trailers(kind, &error.to_string())))
                            }
                            Form::Http | Form::Head => Err(error.into()),
                        };
                        source.set(Self::default().source);
                        return Poll::Ready(Some(end));
                    }
                }
            }
            SourceProj::Freed { body } => ready!(body.as_mut().poll_frame(cx)),
            SourceProj::Refusal { body } => return body.poll_frame(cx),
        };
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Plain { body, .. } => body.is_end_stream(),
            // A body that was dropped with its slot has yet to return its error.
            Source::Tied { body, .. } => body.peek(B::is_end_stream).unwrap_or(false),
            Source::Freed { body } => body.is_end_stream(),
            Source::Refusal { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Plain { body, .. } => body.size_hint(),
            Source::Tied { body, .. } => body.peek(B::size_hint).unwrap_or_default(),
            Source::Freed { body } => body.size_hint(),
            Source::Refusal { body } => body.size_hint(),
        }
    }
}

/// A server that knows the length stops polling after the last frame, so check for the end after each frame. The end is a
/// reason to release the slot, but never to stop: trailers may follow.
fn is_last<B: Body>(frame: &Option<Result<Frame<B::Data>, B::Error>>, body: &B) -> bool {
    !matches!(frame, Some(Ok(_))) || body.is_end_stream()
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

/// Error that ends a response body whose slot has ended.
///
/// The slot was lost (with [`OnLost::Abort`](super::OnLost::Abort)), was ended by a
/// [shutdown](super::LimitLayer::at_shutdown), or reached a bound
/// ([`LimitLayer::max_hold`](super::LimitLayer::max_hold),
/// [`LimitLayer::idle`](super::LimitLayer::idle)), or an operator revoked it.
#[derive(Debug)]
pub struct LostError(LostErrorKind);

impl LostError {
    /// Returns the reason why the slot ended.
    pub fn kind(&self) -> LostErrorKind {
        self.0
    }
}

impl fmt::Display for LostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            LostErrorKind::Lost => "the slot of this response was lost",
            LostErrorKind::ShutDown => "the limiter was shut down before this response had ended",
            LostErrorKind::HeldTooLong => "this response held its slot for too long",
            LostErrorKind::Idle => "this response held its slot and was not read for too long",
            LostErrorKind::Revoked => "an operator has ended this response",
        })
    }
}

impl Error for LostError {}
