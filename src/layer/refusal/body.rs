//! The body of a refusal: bytes, or the body of a response that a user's closure built.
//!
//! Tests: `tests/layer/refusals.rs`.

use std::{
    pin::Pin,
    sync::Mutex,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Either, Full, combinators::UnsyncBoxBody};

use crate::{error::BoxError, sync::locked};

/// A response that [`LimitLayer::refuse_with`](crate::layer::LimitLayer::refuse_with) can send.
///
/// Implemented for [`http::Response`]s whose body is text, bytes, or any [`Body`] of [`Bytes`], such as the body of axum's
/// `Response`. The trait cannot be implemented outside this crate. `M` distinguishes bodies from plain data, and is
/// inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a response that a refusal can be",
    label = "not a response whose body is text, `Bytes`, or an `http_body::Body` of `Bytes`",
    note = "return an `http::Response`: of axum's types, by `.into_response()`"
)]
pub trait RefusalResponse<M>: sealed::Sealed<M> {}

impl<R: sealed::Sealed<M>, M> RefusalResponse<M> for R {}

pub(in crate::layer) mod sealed {
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
                    self.map(|body| Either::Left(Full::from(body)))
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
        let boxed = |body: B| UnsyncBoxBody::new(body.map_err(Into::into));
        self.map(|body| Either::Right(SyncBody(Mutex::new(boxed(body)))))
    }
}

/// The body of a refusal.
pub(in crate::layer) type RefusalBody = Either<Full<Bytes>, SyncBody>;

/// A body in a mutex, which makes it `Sync`. Only the owner of the body locks it.
#[derive(Debug)]
pub struct SyncBody(Mutex<UnsyncBoxBody<Bytes, BoxError>>);

impl Body for SyncBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut *locked(&self.0)).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        locked(&self.0).is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        locked(&self.0).size_hint()
    }
}
