//! The body of a refusal: bytes, or the body of a response that a user's closure built.
//!
//! Tests: `tests/layer/refusals.rs`.

use std::{
    fmt,
    pin::Pin,
    sync::Mutex,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};

use crate::error::BoxError;

/// A response that [`LimitLayer::refuse_with`](super::LimitLayer::refuse_with) can send.
///
/// Implemented for [`http::Response`]s whose body is text, bytes, or any [`Body`] of [`Bytes`], such as the body of axum's
/// `Response`. The trait cannot be implemented outside this crate. `M` distinguishes bodies from plain data, and is
/// inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no response that a refusal can be",
    label = "not a response whose body is text, `Bytes`, or an `http_body::Body` of `Bytes`",
    note = "return an `http::Response`: of axum's types, by `.into_response()`"
)]
pub trait RefusalResponse<M>: sealed::Sealed<M> {}

impl<R: sealed::Sealed<M>, M> RefusalResponse<M> for R {}

pub(super) mod sealed {
    use http::Response;

    use super::RefusalBody;

    pub trait Sealed<M> {
        fn into_refusal(self) -> Response<RefusalBody>;
    }
}

/// Marks responses whose body is plain data.
#[derive(Debug)]
pub enum Plain {}
/// Marks responses with a [`Body`].
#[derive(Debug)]
pub enum Streamed {}

macro_rules! plain {
    ($($body:ty),*) => {
        $(
            impl sealed::Sealed<Plain> for Response<$body> {
                fn into_refusal(self) -> Response<RefusalBody> {
                    self.map(|body| RefusalBody::from(Bytes::from(body)))
                }
            }
        )*
    };
}

// `String` is a `Body`.
plain!(Bytes, &'static str, &'static [u8], Vec<u8>);

impl<B> sealed::Sealed<Streamed> for Response<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    fn into_refusal(self) -> Response<RefusalBody> {
        self.map(RefusalBody::boxed)
    }
}

/// The body of a refusal.
pub struct RefusalBody(Kind);

enum Kind {
    /// The data, until the body is polled.
    Bytes(Bytes),
    Boxed {
        /// The mutex makes the body `Sync` even if the inner body is not. It is never locked.
        body: Mutex<Pin<Box<dyn ErasedBody>>>,
        /// Whether the body reported its end after the last frame.
        is_ended: bool,
        size: SizeHint,
    },
}

impl RefusalBody {
    pub(super) const EMPTY: Self = Self(Kind::Bytes(Bytes::new()));

    fn boxed<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self(Kind::Boxed {
            is_ended: body.is_end_stream(),
            size: body.size_hint(),
            body: Mutex::new(Box::pin(body)),
        })
    }

    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Kind::Bytes(bytes) if bytes.is_empty() => Poll::Ready(None),
            Kind::Bytes(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Kind::Boxed {
                body,
                is_ended,
                size,
            } => {
                let body = body
                    .get_mut()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                let frame = ready!(body.as_mut().poll(cx));
                (*is_ended, *size) = body.state();
                Poll::Ready(frame)
            }
        }
    }

    pub(super) fn is_ended(&self) -> bool {
        match &self.0 {
            Kind::Bytes(bytes) => bytes.is_empty(),
            Kind::Boxed { is_ended, .. } => *is_ended,
        }
    }

    pub(super) fn size(&self) -> SizeHint {
        match &self.0 {
            Kind::Bytes(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Kind::Boxed { size, .. } => *size,
        }
    }
}

impl From<Bytes> for RefusalBody {
    fn from(bytes: Bytes) -> Self {
        Self(Kind::Bytes(bytes))
    }
}

impl fmt::Debug for RefusalBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefusalBody").finish_non_exhaustive()
    }
}

/// A body whose errors are boxed.
trait ErasedBody: Send {
    fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>>;

    /// Whether the body has ended, and the size of the rest.
    fn state(&self) -> (bool, SizeHint);
}

impl<B> ErasedBody for B
where
    B: Body<Data = Bytes> + Send,
    B::Error: Into<BoxError>,
{
    fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = self.poll_frame(cx);
        frame.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn state(&self) -> (bool, SizeHint) {
        (self.is_end_stream(), self.size_hint())
    }
}
